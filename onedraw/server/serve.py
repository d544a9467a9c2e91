"""Run the app with uvicorn: bind the port, print an example request, shut down gracefully.

`serve` returns after the shutdown. On the first SIGTERM or SIGINT, new requests get 503 and running ones may finish within
`drain_seconds`. A second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import errno
import gc
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
from onedraw.server.config import ServerOptions
from onedraw.server.logs import log_config

# Every socket write releases the GIL, and the event loop then waits for the engine's thread to give it back: up to Python's
# switch interval, 5 ms by default, many times per step. A shorter interval keeps the latency of large batches low.
SWITCH_SECONDS = 0.001
FLUSH_SECONDS = 5  # After the engine has stopped, finished replies have this long to reach their clients.


class Server(uvicorn.Server):
    """Uvicorn with a shutdown that lets running requests of the LLM finish."""

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
        self._signalled = False

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
        """Start to listen. Two servers that load at the same time may both bind the port, but only one of them can listen."""
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
        """Begin to drain, so that the process exits with status 0. Uvicorn's own handler would end it by the signal."""
        if self._signalled:
            os._exit(128 + sig)
        self._signalled = True
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """Begin the shutdown: new requests get 503 from here on. It must be called on the server's event loop."""
        self._desk.draining = True
        if self._drain is None:
            self._drain = asyncio.get_running_loop().create_task(self._finish())

    async def _finish(self) -> None:
        try:
            await asyncio.to_thread(self._desk.llm.close, self._options.drain_seconds)
        finally:
            self.should_exit = True


def serve(llm: LLM, options: ServerOptions, listener: socket.socket | None = None) -> None:
    """Serve until a signal arrives. A port that is not available raises BadSetting. `listener` is an earlier result of `bind`."""
    server = Server(llm, options, listener)
    # A full garbage collection stops every stream while it walks through all objects. Nearly all of them were made by imports and
    # live as long as the process: without them it takes milliseconds instead of half a second.
    gc.collect()
    gc.freeze()
    server.run()


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to this address, or raise BadSetting."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:  # A string that cannot be a host name raises UnicodeError.
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadSetting(f"--host: {host!r} is not an address of this machine ({reason})") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        if isinstance(error, PermissionError):
            raise BadSetting(f"--port: {port} needs more privileges; choose a port above 1023") from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise BadSetting(f"--host: {host!r} is not an address of this machine ({error.strerror})") from None
        raise _no_port(host, port, error) from None
    listener.set_inheritable(True)
    return listener


def _no_port(host: str, port: int, error: OSError) -> BadSetting:
    reason = "is in use" if error.errno == errno.EADDRINUSE else f"is not available ({error.strerror})"
    return BadSetting(f"--port: {port} on {host} {reason}; stop the other program or choose another port with --port")


def greeting(url: str, llm: LLM, options: ServerOptions) -> str:
    """Return a curl command to try the server with. It names an environment variable instead of the API key."""
    chat = llm.template is not None
    chat_fields: dict[str, Any] = {"messages": [{"role": "user", "content": "Say hello."}]}
    fields = chat_fields if chat else {"prompt": "Once upon a time"}
    body = json.dumps(fields | {"max_tokens": 32})
    path = "/v1/chat/completions" if chat else "/v1/completions"
    key = ' -H "Authorization: Bearer $ONEDRAW_API_KEY"' if options.keys else ""
    return f"curl {url}{path}{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
