"""The HTTP response of a streamed reply: server-sent events, or lines of JSON.

The input is an async generator of chunks. An error after the start is sent as a chunk. If the client disconnects, the
generator is closed, which cancels the generation.
"""

from __future__ import annotations

import asyncio
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
CHUNKS_ON_LOOP = 64  # More chunks at once, as for a client that reads slowly, are written on a thread.


def event(chunk: Chunk) -> bytes:
    """Return a chunk as a server-sent event."""
    return b"data: %b\n\n" % to_json(chunk, inf_nan_mode="null")


def named_event(chunk: Chunk) -> bytes:
    """Return a chunk as a server-sent event with an `event:` line that has the chunk's type."""
    return b"event: %b\n%b" % (chunk["type"].encode(), event(chunk))


def json_line(chunk: Chunk) -> bytes:
    return to_json(chunk, inf_nan_mode="null") + b"\n"


@dataclass(frozen=True, slots=True)
class Framing:
    """The differences between the streams of OpenAI's, Anthropic's and Ollama's APIs."""

    write: Callable[[Chunk], bytes]
    last: bytes = b""  # bytes to send after the last chunk of a complete stream
    media_type: str = "text/event-stream"


OPENAI = Framing(event, last=b"data: [DONE]\n\n")
NAMED = Framing(named_event)
LINES = Framing(json_line, media_type="application/x-ndjson")


class ChunkStream(Response):
    """Sends the chunks of an async generator. If the generator raises, `failed` turns the error into the last chunks."""

    def __init__(
        self,
        chunks: AsyncGenerator[list[Chunk], None],
        headers: Mapping[str, str],
        framing: Framing,
        failed: Callable[[OnedrawError], list[Chunk]],
    ) -> None:
        # The header x-accel-buffering tells reverse proxies to pass events on without buffering.
        headers = {**headers, "cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type=framing.media_type)
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
                    many = len(chunks) > CHUNKS_ON_LOOP
                    body = await asyncio.to_thread(self._joined, chunks) if many else self._joined(chunks)
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                last = self._framing.last
            except Exception as error:
                last = self._error_chunks(known(error))
            await send({"type": "http.response.body", "body": last, "more_body": False})

    def _error_chunks(self, error: OnedrawError) -> bytes:
        try:
            return self._joined(self._failed(error))
        except Exception as failure:  # `failed` writes the reply so far, which may be the very part that cannot be written
            log.error("an error could not be written in the shape of its endpoint", exc_info=failure)
            return self._framing.write({"type": "error", **error_object(error)})

    def _joined(self, chunks: list[Chunk]) -> bytes:
        """Join all chunks into one write, since a socket write per chunk would cost more than making the chunk."""
        return b"".join(map(self._framing.write, chunks))
