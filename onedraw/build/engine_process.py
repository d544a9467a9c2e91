"""The process of an engine: its start from the client's side, and its main function.

`python -m onedraw.build.engine_process FD` builds an engine and serves it over the socket FD, whose first frame has the settings
as JSON. Its log and progress go to the client, so they appear where the client's do. It ends when the client closes the engine
and also when the client's process ends, however that happens; signals that a terminal or a service manager sends to all
processes are left to the client.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from queue import SimpleQueue

from onedraw.build.checkpoint import Progress
from onedraw.engine.client import BuildConstraint
from onedraw.engine.remote import EngineServer, EventSender, Frames, RemoteEngine
from onedraw.engine.wire import Failed, Report, RequestCodec, Started, decode_from_engine, encode
from onedraw.errors import EngineLost, OnedrawError
from onedraw.settings import Settings
from onedraw.text.constraints.wire import decode_constraint, encode_constraint

log = logging.getLogger("onedraw.engine")

CODEC = RequestCodec(encode_constraint, decode_constraint)
SWITCH_SECONDS = 0.001  # so that requests and cancellations do not wait long for Python's lock, which the engine's thread holds
ORPHAN_SECONDS = 10.0  # how long the engine's process may take to end after its client has


class EngineProcess:
    """A process that builds an engine. In a `with` it is killed if anything fails before `client` has returned; after that the
    client ends it."""

    def __init__(self, settings: Settings) -> None:
        ours, theirs = socket.socketpair()
        # The process finds packages in the same places as this one.
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        command = [sys.executable, "-P", "-m", "onedraw.build.engine_process", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env={**os.environ, "PYTHONPATH": path}
            )
        self.frames = Frames(ours)
        self.pid = self._process.pid
        with suppress(OSError):  # The process may have ended already; then `client` raises the error.
            self.frames.send(_written(settings))

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.frames.close()
            self.end(0)

    def client(self, build_constraint: BuildConstraint, notify: Progress) -> RemoteEngine:
        """Wait until the engine is built, and return its client. An error in the engine's process is raised here."""

        def report(line: Report) -> None:
            if line.level:
                logging.getLogger(line.logger).log(line.level, "%s", line.text)
            else:
                notify(line.text)

        while (data := self.frames.receive()) is not None:
            match decode_from_engine(data):
                case Started() as started:
                    return RemoteEngine(
                        self.frames,
                        started,
                        codec=CODEC,
                        build_constraint=build_constraint,
                        on_report=report,
                        end_process=self.end,
                    )
                case Report() as line:
                    report(line)
                case Failed(error):
                    raise error
        raise EngineLost(f"the engine's process ended while it loaded the model ({self.end(ORPHAN_SECONDS)}); see its output")

    def end(self, seconds: float) -> str:
        """Wait up to `seconds` for the end of the process, then kill it. Return how it ended."""
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return "it did not stop and was killed"
        if status >= 0:
            return f"exit status {status}"
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"killed by signal {-status}"


def _written(settings: Settings) -> bytes:
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return json.dumps({name: str(value) if isinstance(value, Path) else value for name, value in values.items()}).encode()


# ---------------------------------------------------------------------- the engine's process


class ReportHandler(logging.Handler):
    """Sends log records to the client."""

    def __init__(self, frames: Frames) -> None:
        super().__init__()
        self._frames = frames

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record).encode("utf-8", "backslashreplace").decode()
        with suppress(OSError):  # The client may have ended.
            self._frames.send(encode(Report(record.levelno, record.name, text)))


def main(descriptor: int) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    frames = Frames(socket.socket(fileno=descriptor))
    settings = frames.receive()
    if settings is None:
        return 1
    handler = ReportHandler(frames)
    logging.basicConfig(level=logging.INFO, handlers=[handler], format="%(message)s")
    incoming: SimpleQueue[bytes | None] = SimpleQueue()
    built = threading.Event()
    threading.Thread(target=_receive, args=(frames, incoming, built), name="onedraw-from-client", daemon=True).start()
    try:
        _serve(Settings.of(**json.loads(settings)), frames, incoming, built)
    except OnedrawError as error:
        frames.send(encode(Failed(error)))
        return 1
    return 0


def _serve(settings: Settings, frames: Frames, incoming: SimpleQueue[bytes | None], built: threading.Event) -> None:
    from onedraw.build.llm import build_llm

    sender = EventSender(frames)
    with build_llm(settings, lambda line: frames.send(encode(Report(0, "", line))), sender=sender) as llm:
        gc.collect()
        gc.freeze()
        sys.setswitchinterval(SWITCH_SECONDS)
        built.set()
        EngineServer(llm.service, frames, sender, CODEC).run(incoming)


def _receive(frames: Frames, incoming: SimpleQueue[bytes | None], built: threading.Event) -> None:
    """Pass messages on. When the client has ended, end this process: at once while it loads, else after closing the engine."""
    while (data := frames.receive()) is not None:
        incoming.put(data)
    if built.is_set():
        incoming.put(None)
        threading.Event().wait(ORPHAN_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
