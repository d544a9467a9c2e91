"""Runs the app: binds the port, says how to ask, and stops in good order.

In: a Door and ServerOptions. Out: nothing; returns when a signal asked for it and what ran has finished.
First SIGTERM or SIGINT: new requests get 503, running ones may finish within `drain_seconds`. Second: exit at once.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shlex
import socket
import sys
from types import FrameType
from typing import Any

import uvicorn

from onedraw.errors import BadSetting
from onedraw.llm.llm import LLM
from onedraw.server.app import Endpoints, create_app
from onedraw.server.logs import log_config
from onedraw.server.options import ServerOptions

# The loop gives the interpreter up with every write to a socket, and gets it back when the engine's thread has had its turn:
# Python's own 5 ms, many times per turn, are what the slowest tokens of a crowd would wait for.
SWITCH_SECONDS = 0.001
FLUSH_SECONDS = 5  # for the last bytes of finished replies, after the engine has stopped


class Server(uvicorn.Server):
    """Uvicorn with our way of stopping. Closes the door when told to stop."""

    def __init__(self, llm: LLM, options: ServerOptions, listener: socket.socket | None = None) -> None:
        app = create_app(llm, options)
        super().__init__(
            uvicorn.Config(
                app,
                log_config=log_config(options.log_level, options.log_format),
                log_level=options.log_level,
                timeout_graceful_shutdown=FLUSH_SECONDS,
                server_header=False,
                lifespan="off",
                access_log=False,
            )
        )
        self._desk: Endpoints = app.state.endpoints
        self._options = options
        self._listener = listener or bind(options.host, options.port)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None
        self._told = False

    @property
    def url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            self._listen()
            super().run(sockets=sockets or [self._listener])
        finally:
            self._listener.close()

    def _listen(self) -> None:
        """Two servers that were loading at once may both have the port until one listens."""
        host, port = self._listener.getsockname()[:2]
        try:
            self._listener.listen()
        except OSError as error:
            raise _no_port(host, port, error) from None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        print(greeting(self.url, self._desk.llm, self._options), flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Uvicorn's own way would end the process by the signal; ours ends it with status 0."""
        if self._told:
            os._exit(128 + sig)
        self._told = True
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """Begin to stop; call it on the server's loop. New requests get 503 from here on."""
        self._desk.draining = True
        if self._drain is None:
            self._drain = asyncio.get_running_loop().create_task(self._finish())

    async def _finish(self) -> None:
        try:
            await asyncio.to_thread(self._desk.llm.close, self._options.drain_seconds)
        finally:
            self.should_exit = True


def serve(llm: LLM, options: ServerOptions, listener: socket.socket | None = None) -> None:
    """Serve until a signal says stop. BadSetting when the port cannot be had. `listener`: it is had already (`bind`)."""
    Server(llm, options, listener).run()


def bind(host: str, port: int) -> socket.socket:
    """A socket on this address, or an error that says what to do."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:  # the latter for a name that cannot be written as one
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadSetting(f"--host: {host!r} is no address of this machine ({reason})") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        if isinstance(error, PermissionError):
            raise BadSetting(f"--port: {port} needs more rights; choose one above 1023") from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise BadSetting(f"--host: {host!r} is no address of this machine ({error.strerror})") from None
        raise _no_port(host, port, error) from None
    listener.set_inheritable(True)
    return listener


def _no_port(host: str, port: int, error: OSError) -> BadSetting:
    reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had ({error.strerror})"
    return BadSetting(f"--port: {port} on {host} {reason}; stop the other program or choose another port with --port")


def greeting(url: str, llm: LLM, options: ServerOptions) -> str:
    """One line that works when pasted into a shell. The key itself is never printed."""
    chat = llm.template is not None
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Say hello."}]} if chat else {"prompt": "Once upon a time"}
    body = json.dumps(asked | {"max_tokens": 32})
    path = "/v1/chat/completions" if chat else "/v1/completions"
    key = ' -H "Authorization: Bearer $ONEDRAW_API_KEY"' if options.keys else ""
    return f"curl {url}{path}{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
