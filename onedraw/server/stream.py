"""Server-sent events: chunk objects out as they come, an error as an event, and the work cancelled when the client hangs up.

In: an async iterator of chunk objects. Out: an ASGI response.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from onedraw.errors import OnedrawError
from onedraw.server.errors import error_object, known, message_error
from onedraw.server.guards import until_gone

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Framing:
    """How a shape of replies is streamed."""

    named: bool  # events carry their type as a name
    last: bytes  # what ends a stream that came to its end
    error: Callable[[OnedrawError], dict[str, Any]]  # an error after the start


def _response_error(error: OnedrawError) -> dict[str, Any]:
    return {"type": "error", "sequence_number": 0, "code": error.code, "message": str(error), "param": error.param}


OPENAI = Framing(named=False, last=DONE, error=error_object)
RESPONSES = Framing(named=True, last=b"", error=_response_error)
MESSAGES = Framing(named=True, last=b"", error=message_error)


class EventStream(Response):
    """Sends what an async generator yields. An error after the start is an event of its own; then the stream ends."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[dict[str, Any], None], headers: Mapping[str, str], framing: Framing) -> None:
        # Reverse proxies must not collect the events.
        super().__init__(headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._framing = framing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await until_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        framing = self._framing
        async with aclosing(self._chunks) as chunks:
            try:
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": event(chunk, framing.named), "more_body": True})
                last = framing.last
            except Exception as error:
                last = event(framing.error(known(error)), framing.named)
            await send({"type": "http.response.body", "body": last, "more_body": False})


def event(value: dict[str, Any], named: bool = False) -> bytes:
    """One event; `named`: by its type, as those clients expect who listen for names."""
    name = b"event: " + value["type"].encode() + b"\n" if named else b""
    return name + b"data: " + json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"
