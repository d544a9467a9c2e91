"""Replies in OpenAI's shapes, from parts: chunk objects for a stream, one object for a whole reply.

In: a job's parts and usage. Out: plain dictionaries, ready for JSON.
A whole choice is its joined parts, written by the same hand.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from onedraw.errors import OnedrawError
from onedraw.server.errors import error_object
from onedraw.server.generation import PreparedRequest
from onedraw.server.openai.choice_parts import ReplyPart, Token, join
from onedraw.text.tokenizer import Tokenizer
from onedraw.types import ModelCard, Usage

FLOOR = -9999.0  # stands for minus infinity, which JSON cannot write

Json = dict[str, Any]


class OpenAIWriter:
    """Writes the parts of one job down."""

    def __init__(self, job: PreparedRequest, *, card: ModelCard, tokenizer: Tokenizer, include_usage: bool = False) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._include_usage = include_usage
        self._begun: set[tuple[int, int]] = set()  # choice and call, of calls that were named
        self._head = {
            "id": job.id,
            "created": int(time.time()),
            "model": card.name,
            "system_fingerprint": card.fingerprint,
        }

    # ------------------------------------------------------------------ a stream

    def chunks(self, part: ReplyPart) -> list[Json]:
        """A chat choice begins with a chunk that names the role. A part with nothing to show gives no chunk."""
        written: list[Json] = []
        if part.prompt_ids is not None and self._job.kind == "chat":
            opening = ReplyPart(index=part.index, seed=part.seed, prompt_ids=part.prompt_ids)
            written.append(self._chunk(self._choice(opening, {"delta": {"role": "assistant", "content": ""}}), part.prompt_ids))
            part = _without_prompt(part)
        opens = part.prompt_ids is not None and self._job.token_ids
        calls = self._deltas(part)
        if part.text or part.reasoning or calls or part.finish is not None or opens or part.said:
            body = {"delta": _spoken(part) | calls} if self._job.kind == "chat" else {"text": part.text}
            written.append(self._chunk(self._choice(part, body), part.prompt_ids))
        return written

    def _deltas(self, part: ReplyPart) -> Json:
        """Calls with what is new of them: id and name once, then pieces of the arguments."""
        written = []
        for call, text in part.calls:
            entry: Json = {"index": call.index}
            if (part.index, call.index) not in self._begun:
                self._begun.add((part.index, call.index))
                entry |= {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": text}}
            elif text:
                entry |= {"function": {"arguments": text}}
            else:
                continue
            written.append(entry)
        return {"tool_calls": written} if written else {}

    def ending(self, usage: Usage) -> list[Json]:
        """A last chunk without choices, where it was asked for."""
        if not self._include_usage:
            return []
        return [self._head | {"object": self._chunk_object, "choices": [], "usage": write_usage(usage)}]

    def failed(self, error: OnedrawError) -> list[Json]:
        """What ends a stream that cannot come to its end."""
        return [error_object(error)]

    def _chunk(self, choice: Json, prompt_ids: tuple[int, ...] | None) -> Json:
        chunk = self._head | {"object": self._chunk_object, "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = None
        return chunk | self._prompt_ids(prompt_ids)

    @property
    def _chunk_object(self) -> str:
        return "chat.completion.chunk" if self._job.kind == "chat" else "text_completion"

    # ------------------------------------------------------------------ whole

    def whole(self, parts: Mapping[int, Sequence[ReplyPart]], usage: Usage) -> Json:
        choices = []
        for index in range(self._job.choices):
            part = join(parts[index])
            if self._job.kind == "chat":
                body: Json = {"message": _message(part)}
            else:
                body = {"text": part.text}
            choices.append(self._choice(part, body))
        reply = self._head | {"object": "chat.completion" if self._job.kind == "chat" else "text_completion", "choices": choices}
        return reply | {"usage": write_usage(usage)} | self._prompt_ids(self._job.generations[0].prompt)

    # ------------------------------------------------------------------ both

    def _choice(self, part: ReplyPart, body: Json) -> Json:
        choice = {
            "index": part.index,
            **body,
            "logprobs": self._logprobs(part),
            "finish_reason": part.finish,
            "stop_reason": part.stop_reason,
            "seed": part.seed,
        }
        if self._job.token_ids:
            choice["token_ids"] = [token.id for token in part.said]
            if part.prompt_ids is not None:
                choice["prompt_token_ids"] = list(part.prompt_ids)
        if self._job.checksums:
            choice["score_checksums"] = [str(token.checksum) for token in part.said]
        if self._job.details:
            choice["token_details"] = [
                {"id": token.id, "text": token.text, "kept": token.kept, "rejected": token.rejected} for token in part.said
            ]
        return choice

    def _prompt_ids(self, ids: tuple[int, ...] | None) -> Json:
        """Beside the choices too where there is one prompt: some clients look there."""
        return (
            {"prompt_token_ids": list(ids)} if ids is not None and self._job.token_ids and len(self._job.generations) == 1 else {}
        )

    def _logprobs(self, part: ReplyPart) -> Json | None:
        if not self._job.logprobs:
            return None
        tokens = (*part.echoed, *part.said)
        if self._job.kind == "chat":
            return {"content": self.chat_logprobs(tokens), "refusal": None} if tokens else None
        return {
            "tokens": [self._spell(token.id) for token in tokens],
            "token_logprobs": [None if token.logprobs is None else finite(token.logprobs.logprob) for token in tokens],
            "top_logprobs": [self._alternatives(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def chat_logprobs(self, tokens: Sequence[Token]) -> list[Json]:
        return [self._chat_entry(token) for token in tokens]

    def _chat_entry(self, token: Token) -> Json:
        assert token.logprobs is not None  # they were asked for with the request
        top = [self._entry(id, logprob) for id, logprob in token.logprobs.top]
        return self._entry(token.id, token.logprobs.logprob) | {"top_logprobs": top}

    def _entry(self, id: int, logprob: float) -> Json:
        return {"token": self._spell(id), "logprob": finite(logprob), "bytes": list(self._tokenizer.token_bytes(id))}

    def _alternatives(self, token: Token) -> dict[str, float] | None:
        """Spelling → logprob, the token itself included; of two tokens spelled alike the likelier stands."""
        if token.logprobs is None:
            return None
        spelled: dict[str, float] = {}
        for id, logprob in (*token.logprobs.top, (token.id, token.logprobs.logprob)):
            spelled.setdefault(self._spell(id), finite(logprob))
        return spelled

    def _spell(self, id: int) -> str:
        """A token as text; one that is no whole character as its bytes, so that two such tokens stay apart."""
        raw = self._tokenizer.token_bytes(id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def finite(logprob: float) -> float:
    return max(logprob, FLOOR)


def write_usage(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning,
            "accepted_prediction_tokens": usage.kept,
            "rejected_prediction_tokens": usage.rejected,
        },
    }


def _message(part: ReplyPart) -> Json:
    content = None if part.calls and not part.text else ""
    message: Json = {"role": "assistant", "content": content, "refusal": None} | _spoken(part)
    if part.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
            for call, arguments in part.calls
        ]
    return message


def _spoken(part: ReplyPart) -> Json:
    said: Json = {"content": part.text} if part.text else {}
    return said | ({"reasoning_content": part.reasoning} if part.reasoning else {})


def _without_prompt(part: ReplyPart) -> ReplyPart:
    return replace(part, prompt_ids=None)
