"""Replies of /api/chat and /api/generate in Ollama's shape, as the lines of a stream or as one object, and the answers of
/api/tags, /api/ps, /api/show and /api/version.

The input is the pieces of a reply (its parts, as they arrive), or the whole reply, and its usage; the output is dictionaries,
ready for JSON. Durations are in nanoseconds.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal

from onedraw import __version__
from onedraw.errors import OnedrawError
from onedraw.llm.llm import LLM
from onedraw.llm.reply import BlockClosed, BlockGrew, ContentBlock, Reply
from onedraw.server.errors import ollama_error
from onedraw.server.metrics import RequestTimer
from onedraw.server.openai.chat import Json, OpenAIWriter, arguments_object
from onedraw.server.prompts import PreparedRequest
from onedraw.types import ModelCard, Piece, ReplyToken, Usage

API_VERSION = "0.12.11"  # the version of Ollama whose API this is; some clients refuse a server with an older one

Shape = Literal["chat", "generate"]


class OllamaWriter:
    """Writes one reply. A tool call is written once it is complete; one that max_tokens cut is left out."""

    def __init__(
        self, prepared: PreparedRequest, shape: Shape, *, card: ModelCard, timer: RequestTimer, openai: OpenAIWriter
    ) -> None:
        self._prepared = prepared
        self._shape = shape
        self._card = card
        self._timer = timer
        self._openai = openai  # writes logprobs, which have OpenAI's shape
        self._reply = Reply()

    def chunks(self, piece: Piece) -> list[Json]:
        parts: list[Json] = []
        for change in self._reply.add(piece):
            match change:
                case BlockGrew(block, text) if text and block.channel != "tool":
                    parts.append({"thinking" if block.channel == "reasoning" else "content": text})
                case BlockClosed(block) if block.call is not None and not block.cut:
                    parts.append({"tool_calls": [_call(block)]})
        scores = self._logprobs(piece.tokens)
        if scores and not parts:
            parts.append({})
        return [self._head(part) | {"done": False} | (scores if number == 0 else {}) for number, part in enumerate(parts)]

    def ending(self, usage: Usage) -> list[Json]:
        return [self._head({}) | self._end(self._reply, usage)]

    def failed(self, error: OnedrawError) -> list[Json]:
        return [ollama_error(error)]

    def whole(self, replies: Sequence[Reply], usage: Usage) -> Json:
        (reply,) = replies
        calls = [_call(block) for block in reply.blocks if block.call is not None and not block.cut]
        part: Json = {"content": reply.text}
        part |= {"thinking": reply.reasoning} if reply.reasoning else {}
        part |= {"tool_calls": calls} if calls else {}
        return self._head(part) | self._end(reply, usage) | self._logprobs(reply.tokens)

    def _head(self, part: Mapping[str, object]) -> Json:
        """Return the beginning of an object: the model, the time and a part of the reply."""
        head: Json = {"model": self._card.name, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}
        content = part.get("content", "")
        rest = {name: value for name, value in part.items() if name != "content"}
        if self._shape == "chat":
            return head | {"message": {"role": "assistant", "content": content, **rest}}
        return head | {"response": content, **rest}

    def _logprobs(self, tokens: Sequence[ReplyToken]) -> Json:
        return {"logprobs": self._openai.chat_logprobs(tokens)} if self._prepared.logprobs and tokens else {}

    def _end(self, reply: Reply, usage: Usage) -> Json:
        now, timer = time.monotonic(), self._timer
        first = timer.first_token or now
        return {
            "done": True,
            "done_reason": reply.finish if reply.finish in ("length", "moved") else "stop",
            "total_duration": _nanoseconds(now - timer.arrival),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": _nanoseconds(first - timer.arrival),
            "eval_count": usage.completion,
            "eval_duration": _nanoseconds(now - first),
            "seed": self._prepared.seed_of(0),
            "system_fingerprint": self._card.fingerprint,
        }


def _nanoseconds(seconds: float) -> int:
    return max(int(seconds * 1e9), 1)  # Never 0, because clients divide by durations.


def _call(block: ContentBlock) -> Json:
    assert block.call is not None
    function = {"index": block.call.index, "name": block.call.name, "arguments": arguments_object(block.text)}
    return {"id": block.call.id, "function": function}


# ---------------------------------------------------------------------------------------------- about the server


def nothing_generated(card: ModelCard, shape: Shape) -> Json:
    """Return the answer to a request without a prompt, with which clients load a model or, with `keep_alive: 0`, unload it."""
    content: Json = {"message": {"role": "assistant", "content": ""}} if shape == "chat" else {"response": ""}
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return {"model": card.name, "created_at": now, **content, "done": True, "done_reason": "load"}


def model_entry(card: ModelCard) -> Json:
    """Return the served model as a member of the lists of /api/tags and /api/ps. `size` is not known here and left out."""
    return {
        "name": card.name,
        "model": card.name,
        "modified_at": datetime.fromtimestamp(card.created, UTC).isoformat(),
        "digest": hashlib.sha256(card.fingerprint.encode()).hexdigest(),
        "details": _details(card),
    }


def running_entry(card: ModelCard) -> Json:
    return {**model_entry(card), "context_length": card.max_context}


def shown_model(llm: LLM) -> Json:
    """Return the answer of /api/show."""
    card, template = llm.card, llm.template
    able = {"completion": True, "tools": template is not None, "thinking": llm.reasoning is not None}
    return {
        "modelfile": f"FROM {card.name}\n",
        "parameters": "\n".join(f"{name} {value:g}" for name, value in card.defaults.items()),
        "template": "" if template is None else template.source,
        "details": _details(card),
        "model_info": {
            "general.architecture": card.family,
            "general.basename": card.name,
            f"{card.family}.context_length": card.max_context,
            f"{card.family}.vocab_size": card.vocab,
        },
        "capabilities": [name for name, has in able.items() if has],
        "modified_at": datetime.fromtimestamp(card.created, UTC).isoformat(),
    }


def version() -> Json:
    return {"version": API_VERSION, "onedraw": __version__}


def _details(card: ModelCard) -> Json:
    return {"family": card.family, "families": [card.family], "quantization_level": card.dtype}
