"""Compiles response formats in a helper process first, so that a format which is too costly, or which crashes the native
compiler, ends that process and not the server.

The input is the text of a grammar, or a schema; the output is a CheckedFormat, which says why it cannot be used, if so. The
process (`check_process.py`) starts with the first check and is replaced if it dies; another one starts while it is at work. It
ends with the checker, and also if the server is killed, because its input, a pipe from the server, is closed then.
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

_SIGPROF = -27  # exit status of a process that this signal ended
_KILLED = (-1, -2, -9, -15)  # exit statuses after signals that a format cannot cause: SIGHUP, SIGINT, SIGKILL, SIGTERM
START_SECONDS = 120.0  # how long a new process may take to read the vocabulary, on a busy machine


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a format cannot be used. `path` leads to the keyword inside a schema, for example ".properties.a.pattern"; it is
    appended to the name of the caller's parameter."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class CheckedFormat:
    refusal: Refusal | None  # None: the format can be used
    seconds: float = 0.0  # processor time that finding this took


class GrammarChecker:
    """Checks formats for one vocabulary, each in one of `limits.MAX_FORMAT_WORK` processes, so that a costly format holds up no
    other one. Several threads may use it. The GrammarCompiler owns and closes it."""

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
        self._idle: list[_Process] = []  # processes that check nothing now
        self._turns = threading.BoundedSemaphore(limits.MAX_FORMAT_WORK)
        self._closed = False

    def check(self, request: Mapping[str, Any]) -> CheckedFormat:
        """Return whether a format can be used. `request` has a `grammar` as text, with its `schema` if it is made of one, or a
        `schema` alone. If other checks take too long, raise QueueFull; if the process does not start or the checker was closed,
        StepFailed."""
        line = _line(request)
        if not self._turns.acquire(timeout=limits.COMPILE_WAIT_SECONDS):
            raise QueueFull("other response formats are being compiled; try again in a moment")
        try:
            answer = self._ask(line)
            if answer is None:  # The system killed the process, perhaps because others use too much memory. Try once more.
                answer = self._ask(line)
        finally:
            self._turns.release()
        if answer is None:
            return CheckedFormat(Refusal("", "cannot be compiled: the process that compiles it was killed"))
        error = answer["error"]
        return CheckedFormat(None if error is None else Refusal(error["path"], error["reason"]), answer["seconds"])

    def start(self) -> None:
        """Start a process without waiting for it."""
        with self._turns:
            self._idle.append(self._process())

    def close(self) -> None:
        """Wait until the formats that are being checked are, and end all processes."""
        self._closed = True
        for _ in range(limits.MAX_FORMAT_WORK):
            self._turns.acquire()
        while self._idle:
            self._idle.pop().close()
        self._turns.release(limits.MAX_FORMAT_WORK)

    def _ask(self, line: bytes) -> dict[str, Any] | None:
        """Send a line to a process and return its answer, or None if something outside killed it. A format that ends the process
        is refused."""
        process = self._process()
        try:
            process.wait_until_ready()
            answer = process.ask(line, limits.COMPILE_WALL_SECONDS)
        except BaseException:
            process.close()
            raise
        if answer is not None and not answer["last"]:
            self._idle.append(process)
            return answer
        code = process.wait() if answer is None else 0
        process.close()
        if answer is not None or (code in _KILLED and not process.timed_out):
            return answer
        log.warning("a response format ended the process that compiles formats first (exit status %s); it was refused", code)
        return {"error": {"path": "", "reason": _too_costly(code, process.timed_out)}, "seconds": limits.COMPILE_SECONDS}

    def _process(self) -> _Process:
        """Return an idle process, or a new one if there is none."""
        if self._closed:
            raise StepFailed("the model was closed")
        with suppress(IndexError):
            while True:
                process = self._idle.pop()
                if process.alive:
                    return process
                process.close()
        return _Process(self._setup)


class _Process:
    """One helper process, which the checker owns."""

    def __init__(self, setup: bytes) -> None:
        # The helper process finds packages in the same places as this one. It has a single malloc arena, because each arena
        # reserves address space, and the process limits its own.
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        environment = {**os.environ, "PYTHONPATH": path, "MALLOC_ARENA_MAX": "1"}
        command = [sys.executable, "-P", "-m", "onedraw.text.constraints.check_process"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._end = weakref.finalize(self, _end_process, self._process)
        self._ready = False
        self.timed_out = False
        # A thread writes the setup: it is longer than a pipe's buffer, so writing waits until the process has started and reads.
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
        """Send a line and return the answer; None if the process died, or was killed because the answer took over `seconds`."""
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
        with suppress(OSError, ValueError):  # If the process died or was closed, the read that follows finds that out.
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _time_out(self) -> None:
        self.timed_out = True
        self._process.kill()


def _end_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # Data that was not written yet does not matter, since the process has ended.
                pipe.close()
    process.wait()


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _too_costly(code: int, timed_out: bool) -> str:
    if timed_out or code == _SIGPROF:
        return f"takes more than {limits.COMPILE_SECONDS:g} seconds to compile; use a simpler format"
    return f"needs more than {limits.COMPILE_MEMORY >> 20} MiB of memory, or too much stack, to compile; use a simpler format"
