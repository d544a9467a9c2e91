"""Server-sent events: the response of a streamed reply.

In: an async generator of chunks. Out: an ASGI response. An error after the start is written as an event; if the client
disconnects, the generator is closed, which cancels the generation.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from onedraw.errors import OnedrawError
from onedraw.server.errors import error_object, known, log
from onedraw.server.middleware import or_disconnect

Chunk = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Framing:
    """How an API frames its events."""

    named: bool  # with an `event:` line that holds the type
    last: bytes  # the end of a complete stream


OPENAI = Framing(named=False, last=b"data: [DONE]\n\n")
NAMED = Framing(named=True, last=b"")


class EventStream(Response):
    """Sends the chunks of an async generator. An error is written by `failed` and ends the stream."""

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[list[Chunk], None],
        headers: Mapping[str, str],
        framing: Framing,
        failed: Callable[[OnedrawError], list[Chunk]],
    ) -> None:
        # Tells reverse proxies not to buffer the events.
        super().__init__(headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._framing = framing
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await or_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with aclosing(self._chunks) as stream:
            try:
                async for chunks in stream:
                    await send({"type": "http.response.body", "body": self._events(chunks), "more_body": True})
                last = self._framing.last
            except Exception as error:
                last = self._error_events(known(error))
            await send({"type": "http.response.body", "body": last, "more_body": False})

    def _error_events(self, error: OnedrawError) -> bytes:
        try:
            return self._events(self._failed(error))
        except Exception as failure:  # the reply so far may be what cannot be written
            log.error("an error could not be written in the shape of its endpoint", exc_info=failure)
            return event({"type": "error", **error_object(error)}, self._framing.named)

    def _events(self, chunks: list[Chunk]) -> bytes:
        """All chunks in one write: a write per chunk costs more than the chunk."""
        return b"".join(event(chunk, self._framing.named) for chunk in chunks)


def event(value: Chunk, named: bool = False) -> bytes:
    """One event; `named`: with its type as the event's name."""
    name = b"event: %b\n" % value["type"].encode() if named else b""
    return b"%bdata: %b\n\n" % (name, to_json(value, inf_nan_mode="null"))
