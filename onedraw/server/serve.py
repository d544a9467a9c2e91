"""Run the app with uvicorn: bind the port, say what is served and how to try it, shut down gracefully.

The example request goes to stdout; the card with addresses, model and memory, and the line `ready`, go to stderr like the log.
`serve` returns after the shutdown. On the first SIGTERM or SIGINT, new requests get 503 and running ones may finish within
`drain_seconds`. A second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import ipaddress
import json
import logging
import os
import resource
import shlex
import socket
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import uvicorn

from onedraw.errors import BadSetting
from onedraw.llm.llm import LLM
from onedraw.server.app import Endpoints, create_app
from onedraw.server.config import ServerOptions
from onedraw.server.http_parser import BoundedParser
from onedraw.server.logs import log_config

log = logging.getLogger("onedraw")

# Every socket write releases the GIL, and the event loop then waits for the engine's thread to give it back: up to Python's
# switch interval, 5 ms by default, many times per step. A shorter interval keeps the latency of large batches low.
SWITCH_SECONDS = 0.001
FLUSH_SECONDS = 5  # After the engine has stopped, finished replies have this long to reach their clients.


class Server(uvicorn.Server):
    """Uvicorn with a shutdown that lets running requests of the LLM finish."""

    def __init__(
        self, llm: LLM, options: ServerOptions, listener: socket.socket | None = None, *, proposers: Sequence[str] = ()
    ) -> None:
        app = create_app(llm, options)
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedParser,
                ws="none",
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
        self._proposers = proposers
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
            if self._desk.tracing is not None:
                self._desk.tracing.close()

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
        self._desk.batches.start()
        self._introduce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._desk.batches.stop()
        await super().shutdown(sockets)

    def _introduce(self) -> None:
        """Print the card, the example request and `ready`. With logs in JSON, the card and `ready` are log records."""
        llm, options, url = self._desk.llm, self._options, self.url
        card = model_card_lines(url, llm, options, proposers=self._proposers)
        if options.log_format == "json":
            log.info("%s", "; ".join(f"{name}: {text}" for name, text in card))
        else:
            print("\n".join(f"  {name:8} {text}" for name, text in card), file=sys.stderr, flush=True)
        if exposed(options):
            log.warning(
                "--host %s without an API key: everyone whose packets reach port %d may use this server. Set --api-key, or use "
                "--host 127.0.0.1",
                options.host,
                self._listener.getsockname()[1],
            )
        print(greeting(url, llm, options, reveal=sys.stdout.isatty()), flush=True)
        if options.log_format == "json":
            log.info("ready")
        else:
            print("ready", file=sys.stderr, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain, so that the process exits with status 0; Uvicorn's own handler would end it by the signal. A
        second signal ends the process at once."""
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
            stats = self._desk.llm.service.stats()
            if stats.running + stats.waiting:
                log.warning(
                    "stopping: %d running and %d waiting requests may finish within %g seconds (--drain-seconds); Ctrl-C again "
                    "ends them at once",
                    stats.running,
                    stats.waiting,
                    self._options.drain_seconds,
                )
            self._drain = asyncio.get_running_loop().create_task(self._finish())

    async def _finish(self) -> None:
        try:
            await self._desk.batches.stop()  # Lines of batches are not waited for: they run again after the next start.
            await asyncio.to_thread(self._desk.llm.close, self._options.drain_seconds)
        finally:
            self.should_exit = True


def serve(llm: LLM, options: ServerOptions, listener: socket.socket | None = None, *, proposers: Sequence[str] = ()) -> None:
    """Serve until a signal arrives. A port that is not available raises BadSetting. `listener` is an earlier result of `bind`;
    `proposers` are the names of the drafters on the host, for the card."""
    server = Server(llm, options, listener, proposers=proposers)
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


def exposed(options: ServerOptions) -> bool:
    """Whether other machines may reach the server although no key protects it."""
    if options.keys:
        return False
    try:
        return not ipaddress.ip_address(options.host).is_loopback
    except ValueError:  # The host is a name and not an address.
        return options.host != "localhost"


def model_card_lines(url: str, llm: LLM, options: ServerOptions, *, proposers: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Return the lines of the card that is shown at start, each as (name, text): addresses, model, memory, drafters. No line
    contains an API key."""
    card, capacity = llm.card, llm.service.capacity
    proposers = proposers if capacity.logits_per_position else ()
    drafters = [*proposers, *([f"{capacity.drafter} on the device"] if capacity.drafter else [])]
    positions = capacity.groups[0].pages * capacity.page_size
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sampling = ", ".join(f"{name} {value:g}" for name, value in card.defaults.items())
    return [
        ("page", f"{url}{options.root_path}/"),
        ("API", f"{url}{options.root_path}/v1"),
        ("model", f"{card.name} ({card.family}, {card.dtype})" + (f", {sampling}" if sampling else "")),
        ("device", card.device),
        ("memory", f"keys and values of {positions:,} tokens, {peak / 2**20:,.0f} MiB of host memory so far"),
        ("context", f"{card.max_context:,} tokens, {capacity.lanes} requests at once"),
        ("drafts", ", ".join(drafters) or "none"),
        ("key", "required" if options.keys else "none: --api-key KEY sets one"),
    ]


def greeting(url: str, llm: LLM, options: ServerOptions, *, reveal: bool = False) -> str:
    """Return a curl command to try the server with. It names an environment variable instead of the API key, which may be in a
    log, unless `reveal` says that only the user's terminal shows it."""
    chat = llm.template is not None
    chat_fields: dict[str, Any] = {"messages": [{"role": "user", "content": "Say hello."}]}
    fields = chat_fields if chat else {"prompt": "Once upon a time"}
    body = json.dumps(fields | {"max_tokens": 32})
    path = "/v1/chat/completions" if chat else "/v1/completions"
    key = ""
    if options.api_key is not None and reveal:
        key = " -H " + shlex.quote(f"Authorization: Bearer {options.api_key}")
    elif options.keys:
        key = ' -H "Authorization: Bearer $ONEDRAW_API_KEY"'
    return f"curl {url}{path}{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
