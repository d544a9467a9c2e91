"""Compiles formats in a helper process first, so that a format which is too costly, or which crashes the native compiler, ends
that process and not the server.

In: the text of a grammar, or a schema. Out: why it cannot be used, or None. The process starts with the first check, is replaced
after its death and ends with the checker, or with the server however that ends, since it reads the server's pipe.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from onedraw import limits
from onedraw.errors import QueueFull, StepFailed

log = logging.getLogger("onedraw.constraints")

_SIGKILL, _SIGPROF = -9, -27  # exit statuses
START_SECONDS = 120.0  # until a new process has read the vocabulary, on a busy machine


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a format cannot be used. `path`: of the keyword in a schema, below the caller's parameter."""

    path: str
    reason: str


class GrammarChecker:
    """Checks one format at a time, for one vocabulary. Safe to use from several threads. Owner: the compiler, which closes it."""

    def __init__(self, *, tokens: Sequence[bytes], special: Sequence[int], eos_ids: Sequence[int]) -> None:
        setup = {
            "tokens": [token.decode("latin-1") for token in tokens],
            "special": list(special),
            "eos_ids": list(eos_ids),
            "seconds": limits.COMPILE_SECONDS,
            "memory": limits.COMPILE_MEMORY,
            "stack": limits.COMPILE_STACK,
        }
        self._setup = _line(setup)
        self._process: _Process | None = None
        self._lock = threading.Lock()
        self._closed = False

    def check(self, request: Mapping[str, Any]) -> Refusal | None:
        """Why a format cannot be used; None if it can. `request`: a `grammar` as text, with its `schema` if it is made of one, or
        a `schema` alone."""
        line = _line(request)
        if not self._lock.acquire(timeout=limits.COMPILE_WAIT_SECONDS):
            raise QueueFull("other response formats are being compiled; try again in a moment")
        try:
            answer = self._ask(line)
            if answer is None:  # killed by the system, perhaps for the memory of others
                answer = self._ask(line)
        finally:
            self._lock.release()
        if answer is None:
            return Refusal("", "cannot be compiled: the process that compiles it was killed")
        error = answer["error"]
        return None if error is None else Refusal(error["path"], error["reason"])

    def start(self) -> None:
        """Start the process without waiting for it."""
        with self._lock:
            self._running()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._end()

    def _ask(self, line: bytes) -> dict[str, Any] | None:
        """The answer of the process. None: something outside killed it."""
        process = self._running()
        process.wait_until_ready()
        answer = process.ask(line, limits.COMPILE_WALL_SECONDS)
        if answer is not None:
            if answer["last"]:
                self._end()
            return answer
        code = process.wait()
        self._end()
        if code == _SIGKILL and not process.timed_out:
            return None
        log.warning("a response format ended the process that compiles formats first (exit status %s); it was refused", code)
        return {"error": {"path": "", "reason": _too_costly(code, process.timed_out)}}

    def _running(self) -> _Process:
        if self._closed:
            raise StepFailed("the model was closed")
        if self._process is not None and not self._process.alive:
            self._end()
        if self._process is None:
            self._process = _Process(self._setup)
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None


class _Process:
    """One helper process. Owner: the checker."""

    def __init__(self, setup: bytes) -> None:
        # The same packages as this process has, found in the same places. One malloc arena: each reserves address space.
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        environment = {**os.environ, "PYTHONPATH": path, "MALLOC_ARENA_MAX": "1"}
        command = [sys.executable, "-P", "-m", "onedraw.text.constraints.check_process"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._end = weakref.finalize(self, _end_process, self._process)
        self._ready = False
        self.timed_out = False
        # Written by a thread, since the setup is longer than a pipe holds and the process is still starting.
        self._writer = threading.Thread(target=self._write, args=(setup,), daemon=True)
        self._writer.start()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_ready(self) -> None:
        if self._ready:
            return
        if self.ask(b"", START_SECONDS) is None:
            code = self.wait()
            raise StepFailed(
                f"the helper process that compiles response formats did not start (exit status {code}); see the server's log"
            )
        self._writer.join()
        self._ready = True

    def wait(self) -> int:
        return self._process.wait()

    def close(self) -> None:
        self._end()

    def ask(self, line: bytes, seconds: float) -> dict[str, Any] | None:
        """The answer to one line; None if the process died, or was killed after so many seconds."""
        assert self._process.stdout is not None
        timer = threading.Timer(seconds, self._time_out)
        timer.start()
        try:
            self._write(line)
            answer = self._process.stdout.readline()
        finally:
            timer.cancel()
        return cast(dict[str, Any], json.loads(answer)) if answer.endswith(b"\n") else None

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # it died, or was closed, which its reader sees
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _time_out(self) -> None:
        self.timed_out = True
        self._process.kill()


def _end_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what was not written is lost with the process
                pipe.close()
    process.wait()


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _too_costly(code: int, timed_out: bool) -> str:
    if timed_out or code == _SIGPROF:
        return f"takes more than {limits.COMPILE_SECONDS:g} seconds to compile; use a simpler one"
    return f"needs more than {limits.COMPILE_MEMORY >> 20} MiB of memory, or too much stack, to compile; use a simpler one"
