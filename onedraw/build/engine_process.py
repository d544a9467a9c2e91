"""The process of an engine: its start from the client's side, and its main function.

In: settings. Out: a RemoteEngine. The parts that are the same for an engine in any other process, also on another machine, are
here as well: `serve_engine` builds and serves an engine there, and `engine_client` waits for the engine here.

`python -m onedraw.build.engine_process FD` builds an engine and serves it over the socket FD, whose first frame has the settings
as JSON. The process sends its log and progress to the client, so they appear where the client's do. The process ends when the
client closes the engine and also when the client's process ends, however that happens; signals that a terminal or a service
manager sends to all processes are left to the client.
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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from onedraw.build.checkpoint import Progress
from onedraw.engine.client import BuildConstraint, EngineClient
from onedraw.engine.remote import EngineChannel, EngineServer, EventSender, Frames, MessageSender, RemoteEngine
from onedraw.engine.wire import Failed, Report, RequestCodec, Started, decode_from_engine, encode
from onedraw.errors import EngineLost, OnedrawError
from onedraw.settings import Settings
from onedraw.text.constraints.wire import decode_constraint, encode_constraint

log = logging.getLogger("onedraw.engine")

CODEC = RequestCodec(encode_constraint, decode_constraint)
SWITCH_SECONDS = 0.001  # Threads get the GIL after at most this time, so that requests do not wait long for it.
ORPHAN_SECONDS = 10.0  # how long the engine's process may go on after its client has ended


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
        self.fingerprint = ""
        with suppress(OSError):  # The process may have ended already; then `client` raises the error.
            self.frames.send(encode_settings(settings))

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.frames.close()
            self.end(0)

    def client(self, build_constraint: BuildConstraint, notify: Progress) -> RemoteEngine:
        """Wait until the engine is built, and return its client. An error in the engine's process is raised here."""
        client = engine_client(self.frames, build_constraint, notify, end_process=self.end)
        self.fingerprint = client.fingerprint
        return client

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


class EngineSource(Protocol):
    """Starts an engine outside of this process. In a `with` the engine is ended if anything fails before `client` has returned;
    after that the client ends it. `fingerprint` is that of the engine, once there is a client."""

    fingerprint: str

    def __enter__(self) -> EngineSource: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...

    def client(self, build_constraint: BuildConstraint, notify: Progress) -> EngineClient: ...


StartEngine = Callable[[Settings], EngineSource]


def engine_client(
    channel: EngineChannel, build_constraint: BuildConstraint, notify: Progress, *, end_process: Callable[[float], str]
) -> RemoteEngine:
    """Wait until the engine at the other end of a channel is built, and return its client. An error of the engine is raised here.
    `end_process` waits so many seconds for the end of the engine's process, then kills it, and returns how it ended."""

    def report(line: Report) -> None:
        if line.level:
            logging.getLogger(line.logger).log(line.level, "%s", line.text)
        else:
            notify(line.text)

    while (data := channel.receive()) is not None:
        match decode_from_engine(data):
            case Started() as started:
                return RemoteEngine(
                    channel,
                    started,
                    codec=CODEC,
                    build_constraint=build_constraint,
                    on_report=report,
                    end_process=end_process,
                )
            case Report() as line:
                report(line)
            case Failed(error):
                raise error
    raise EngineLost(f"the engine's process ended while it loaded the model ({end_process(ORPHAN_SECONDS)}); see its output")


def encode_settings(settings: Settings) -> bytes:
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return json.dumps({name: str(value) if isinstance(value, Path) else value for name, value in values.items()}).encode()


# ---------------------------------------------------------------------- the engine's process


class ReportHandler(logging.Handler):
    """Sends log records to the client."""

    def __init__(self, channel: MessageSender) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record).encode("utf-8", "backslashreplace").decode()
        with suppress(OSError):  # The client may have ended.
            self._channel.send(encode(Report(record.levelno, record.name, text)))


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
    return 0 if serve_engine(settings, frames, incoming, built.set) else 1


def serve_engine(
    settings: bytes, channel: MessageSender, incoming: SimpleQueue[bytes | None], on_built: Callable[[], None]
) -> bool:
    """Build the engine of these settings and serve its client until `incoming` gives None. Return whether it could be built; if
    not, the client gets the error."""
    from onedraw.build.llm import build_llm

    sender = EventSender(channel)
    try:
        llm = build_llm(
            Settings.of(**json.loads(settings)), lambda line: channel.send(encode(Report(0, "", line))), sender=sender
        )
    except OnedrawError as error:
        channel.send(encode(Failed(error)))
        return False
    with llm:
        gc.collect()
        gc.freeze()
        sys.setswitchinterval(SWITCH_SECONDS)
        on_built()
        EngineServer(llm.service, channel, sender, CODEC, fingerprint=llm.card.fingerprint).run(incoming)
    return True


def _receive(frames: Frames, incoming: SimpleQueue[bytes | None], built: threading.Event) -> None:
    """Pass the client's messages on to the queue `incoming`. When the client has ended, end this process: at once if the engine
    is not built yet, else when it has closed, and after ORPHAN_SECONDS at the latest."""
    while (data := frames.receive()) is not None:
        incoming.put(data)
    if built.is_set():
        incoming.put(None)
        threading.Event().wait(ORPHAN_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
