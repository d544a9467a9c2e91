"""Server-sent events: the HTTP response of a streamed reply.

The input is an async generator of chunks. An error after the start is sent as an event. If the client disconnects, the
generator is closed, which cancels the generation.
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
    """The differences between the event streams of OpenAI's and Anthropic's APIs."""

    named: bool  # whether each event has an `event:` line with its type
    last: bytes  # bytes to send after the last event of a complete stream


OPENAI = Framing(named=False, last=b"data: [DONE]\n\n")
NAMED = Framing(named=True, last=b"")


class EventStream(Response):
    """Sends the chunks of an async generator. If it raises, `failed` turns the error into last chunks, and the stream ends."""

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[list[Chunk], None],
        headers: Mapping[str, str],
        framing: Framing,
        failed: Callable[[OnedrawError], list[Chunk]],
    ) -> None:
        # The header x-accel-buffering tells reverse proxies to pass events on without buffering.
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
        except Exception as failure:  # `failed` writes the reply so far, which may be the very part that cannot be written
            log.error("an error could not be written in the shape of its endpoint", exc_info=failure)
            return event({"type": "error", **error_object(error)}, self._framing.named)

    def _events(self, chunks: list[Chunk]) -> bytes:
        """Join all chunks into one write, since a socket write per chunk would cost more than making the chunk."""
        return b"".join(event(chunk, self._framing.named) for chunk in chunks)


def event(value: Chunk, named: bool = False) -> bytes:
    """Return one event as bytes. With `named` it has an `event:` line with its type."""
    name = b"event: %b\n" % value["type"].encode() if named else b""
    return b"%bdata: %b\n\n" % (name, to_json(value, inf_nan_mode="null"))
