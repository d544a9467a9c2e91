"""Server-sent events: chunk objects out as they come, an error as an event, and the work cancelled when the client hangs up.

In: an async iterator of chunk objects. Out: an ASGI response.
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
from onedraw.server.middleware import until_gone

Chunk = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Framing:
    """How a shape of replies is streamed."""

    named: bool  # events carry their type as a name
    last: bytes  # what ends a stream that came to its end


OPENAI = Framing(named=False, last=b"data: [DONE]\n\n")
NAMED = Framing(named=True, last=b"")


class EventStream(Response):
    """Sends what an async generator yields. An error after the start is written by `failed`; then the stream ends."""

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[list[Chunk], None],
        headers: Mapping[str, str],
        framing: Framing,
        failed: Callable[[OnedrawError], list[Chunk]],
    ) -> None:
        # Reverse proxies must not collect the events.
        super().__init__(headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._framing = framing
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await until_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with aclosing(self._chunks) as stream:
            try:
                async for chunks in stream:
                    await send({"type": "http.response.body", "body": self._events(chunks), "more_body": True})
                last = self._framing.last
            except Exception as error:
                last = self._last_words(known(error))
            await send({"type": "http.response.body", "body": last, "more_body": False})

    def _last_words(self, said: OnedrawError) -> bytes:
        try:
            return self._events(self._failed(said))
        except Exception as error:  # what was said so far may be what cannot be written
            log.error("an error could not be told in its shape", exc_info=error)
            return event({"type": "error", **error_object(said)}, self._framing.named)

    def _events(self, chunks: list[Chunk]) -> bytes:
        """One write for all of them: a write per chunk would cost more than the chunk."""
        return b"".join(event(chunk, self._framing.named) for chunk in chunks)


def event(value: Chunk, named: bool = False) -> bytes:
    """One event; `named`: by its type, as those clients expect who listen for names."""
    name = b"event: %b\n" % value["type"].encode() if named else b""
    return b"%bdata: %b\n\n" % (name, to_json(value, inf_nan_mode="null"))
