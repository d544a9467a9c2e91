"""Server-sent events: chunk objects out as they come, an error as an event, and the work cancelled when the client hangs up.

In: an async iterator of chunk objects. Out: an ASGI response.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from onedraw.server.errors import error_object, known
from onedraw.server.guards import until_gone

DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends what an async generator yields. An error after the start is an event of its own; then the stream ends."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[dict[str, Any], None], headers: Mapping[str, str]) -> None:
        # Reverse proxies must not collect the events.
        super().__init__(headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await until_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            try:
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": event(chunk), "more_body": True})
                last = DONE
            except Exception as error:
                last = event(error_object(known(error)))
            await send({"type": "http.response.body", "body": last, "more_body": False})


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"
