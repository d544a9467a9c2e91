"""Replies of /v1/chat/completions and /v1/completions, either as the chunks of a stream or as one object.

The input is pieces (parts of a reply as they arrive), or whole replies, and their usage; the output is dictionaries in OpenAI's
shapes, ready for JSON. A choice is one of the n replies to a prompt.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from onedraw.errors import OnedrawError
from onedraw.llm.reply import Reply
from onedraw.server.errors import error_object
from onedraw.server.prompts import PreparedRequest
from onedraw.server.protocol import StreamOptions
from onedraw.text.detokenizer import Detokenizer
from onedraw.text.tokenizer import Tokenizer
from onedraw.types import Finish, Logprobs, ModelCard, Piece, ReplyToken, Usage

MIN_LOGPROB = -9999.0  # JSON cannot write minus infinity, so this number is sent instead.

Json = dict[str, Any]


class OpenAIWriter:
    """Writes all choices of the reply to one request."""

    def __init__(
        self, prepared: PreparedRequest, *, card: ModelCard, tokenizer: Tokenizer, stream_options: StreamOptions | None = None
    ) -> None:
        self._prepared = prepared
        self._tokenizer = tokenizer
        self._include_usage = stream_options is not None and stream_options.include_usage
        self._counts_usage = stream_options is not None and stream_options.continuous_usage_stats
        self._sampled = 0  # tokens of all choices so far
        self._begun: set[int] = set()  # indices of the choices that already had a chunk
        self._named: set[tuple[int, int]] = set()  # (choice, call) of the tool calls whose id and name were already sent
        self._head = {
            "id": prepared.id,
            "created": int(time.time()) if prepared.line is None else prepared.line.created,
            "model": card.name,
            "system_fingerprint": card.fingerprint,
        }

    # ------------------------------------------------------------------ a stream

    def chunks(self, piece: Piece) -> list[Json]:
        """Write a piece. The first chunk of a chat choice names the role. A piece gives no other chunk if it has no text, no
        token data that the request asks for and no finish reason."""
        prepared, index, written = self._prepared, piece.index, []
        first = index not in self._begun
        self._begun.add(index)
        prompt_ids = prepared.generation_of(index).prompt if first else None
        scored = self._prompt_logprobs(index, piece.prompt_logprobs) if first else {}
        if first and prepared.kind == "chat":
            opening = self._choice(index, {"delta": {"role": "assistant", "content": ""}}, prompt_ids=prompt_ids)
            written.append(self._chunk(opening, prompt_ids) | (scored if index == 0 else {}))
            first, prompt_ids = False, None
        tokens = piece.tokens if prepared.shows_tokens else ()
        if prepared.kind == "chat":
            delta = self._delta(piece)
            if delta and piece.finish is not None:  # Clients expect the finish reason in a chunk of its own.
                return [*written, *self.chunks(replace(piece, finish=None)), *self.chunks(closing(piece))]
            body: Json = {"delta": delta}
            shown = bool(delta)
        else:
            text = (prepared.echo_of(index) or "") + piece.text if first else piece.text
            body, shown = {"text": text} | scored, bool(text or scored)
        self._sampled += len(piece.tokens)
        if shown or piece.finish is not None or (first and prepared.token_ids) or tokens:
            choice = self._choice(
                index,
                body,
                tokens=tokens,
                echoed=self._echoed(index, piece.prompt_logprobs) if first else (),
                finish=piece.finish,
                stop_reason=piece.stop_reason,
                prompt_ids=prompt_ids,
            )
            written.append(self._chunk(choice, prompt_ids))
        return written

    def _delta(self, piece: Piece) -> Json:
        match piece.channel:
            case "content":
                return {"content": piece.text} if piece.text else {}
            case "reasoning":
                return {"reasoning_content": piece.text} if piece.text else {}
            case "tool":
                return self._call_delta(piece)

    def _call_delta(self, piece: Piece) -> Json:
        """Return the delta of a tool call. The first one has the call's id and name; later ones only add to its arguments."""
        call = piece.call
        assert call is not None
        if (piece.index, call.index) not in self._named:
            self._named.add((piece.index, call.index))
            function, shown = {"name": call.name, "arguments": piece.text}, self._prepared.call_id(piece.index, call)
            return {"tool_calls": [{"index": call.index, "id": shown, "type": "function", "function": function}]}
        return {"tool_calls": [{"index": call.index, "function": {"arguments": piece.text}}]} if piece.text else {}

    def ending(self, usage: Usage) -> list[Json]:
        """Return the last chunks of a stream: with `include_usage` one that has the usage and no choices, else none."""
        if not self._include_usage:
            return []
        return [self._head | {"object": self._chunk_object, "choices": [], "usage": write_usage(usage)}]

    def failed(self, error: OnedrawError) -> list[Json]:
        """Return the last chunk of a stream that failed."""
        return [error_object(error)]

    def _chunk(self, choice: Json, prompt_ids: tuple[int, ...] | None) -> Json:
        chunk = self._head | {"object": self._chunk_object, "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = self._usage_so_far() if self._counts_usage else None
        return chunk | self._prompt_ids(prompt_ids)

    def _usage_so_far(self) -> Json:
        prompt = sum(len(generation.prompt) for generation in self._prepared.generations)
        return {"prompt_tokens": prompt, "completion_tokens": self._sampled, "total_tokens": prompt + self._sampled}

    @property
    def _chunk_object(self) -> str:
        return "chat.completion.chunk" if self._prepared.kind == "chat" else "text_completion"

    # ------------------------------------------------------------------ a whole reply

    def whole(self, replies: Sequence[Reply], usage: Usage) -> Json:
        chat = self._prepared.kind == "chat"
        choices = []
        for index, reply in enumerate(replies):
            choice = self._choice(
                index,
                {"message": self._message(index, reply)}
                if chat
                else {"text": (self._prepared.echo_of(index) or "") + reply.text}
                | self._prompt_logprobs(index, reply.prompt_logprobs),
                tokens=reply.tokens,
                echoed=self._echoed(index, reply.prompt_logprobs),
                finish=reply.finish,
                stop_reason=reply.stop_reason,
                prompt_ids=reply.prompt_ids,
            )
            choices.append(choice)
        whole = self._head | {"object": "chat.completion" if chat else "text_completion", "choices": choices}
        scored = self._prompt_logprobs(0, replies[0].prompt_logprobs) if chat else {}
        return whole | {"usage": self._usage(usage)} | self._prompt_ids(self._prepared.generations[0].prompt) | scored

    def _usage(self, usage: Usage) -> Json:
        """Return the usage of a whole reply. In a line of a batch it has no counts of cached tokens and drafts, which depend on
        other requests."""
        counted = write_usage(usage)
        if self._prepared.line is None:
            return counted
        kept = {name: counted[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
        return kept | {"completion_tokens_details": {"reasoning_tokens": usage.reasoning}}

    def _message(self, index: int, reply: Reply) -> Json:
        calls, text, reasoning = reply.calls, reply.text, reply.reasoning
        message: Json = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [
                {
                    "id": self._prepared.call_id(index, one.call),
                    "type": "function",
                    "function": {"name": one.call.name, "arguments": one.arguments},
                }
                for one in calls
            ]
        return message

    # ------------------------------------------------------------------ parts that streams and whole replies share

    def _choice(
        self,
        index: int,
        body: Json,
        *,
        tokens: Sequence[ReplyToken] = (),
        echoed: Sequence[ReplyToken] = (),
        finish: Finish | None = None,
        stop_reason: str | int | None = None,
        prompt_ids: tuple[int, ...] | None = None,
    ) -> Json:
        prepared = self._prepared
        choice = {
            "index": index,
            **body,
            "logprobs": self._logprobs(index, tokens, echoed) if prepared.logprobs else None,
            "finish_reason": finish,
            "stop_reason": stop_reason,
            "seed": prepared.seed_of(index),
        }
        if prepared.token_ids:
            choice["token_ids"] = [token.token for token in tokens]
            if prompt_ids is not None:
                choice["prompt_token_ids"] = list(prompt_ids)
        if prepared.checksums:
            choice["score_checksums"] = [str(token.checksum) for token in tokens]
        if prepared.details:
            choice["token_details"] = [
                {"id": token.token, "text": token.text, "kept": token.kept, "rejected": token.rejected} for token in tokens
            ]
        return choice

    def _prompt_ids(self, ids: tuple[int, ...] | None) -> Json:
        """Return the field with the prompt's ids that stands beside `choices`, where some clients read them; only for a single
        prompt."""
        one_prompt = len(self._prepared.generations) == 1
        return {"prompt_token_ids": list(ids)} if ids is not None and self._prepared.token_ids and one_prompt else {}

    def _logprobs(self, index: int, tokens: Sequence[ReplyToken], echoed: Sequence[ReplyToken]) -> Json | None:
        if self._prepared.kind == "chat":
            return {"content": self.chat_logprobs(tokens), "refusal": None} if tokens else None
        start = len(self._prepared.echo_of(index) or "")
        both = _both_columns([token.logprobs for token in (*echoed, *tokens)])
        return both | {
            "tokens": [self._token_text(token.token) for token in (*echoed, *tokens)],
            "token_logprobs": [_finite_or_none(token.logprobs) for token in (*echoed, *tokens)],
            "top_logprobs": [self._alternatives(token) for token in (*echoed, *tokens)],
            "text_offset": [*(token.offset for token in echoed), *(start + token.offset for token in tokens)],
        }

    def _echoed(self, index: int, logprobs: Sequence[Logprobs] | None) -> list[ReplyToken]:
        """Return the prompt's tokens if the request wants them echoed with logprobs. The first one has no logprob."""
        echo = self._prepared.echo_of(index)
        if echo is None or not self._prepared.logprobs:
            return []
        prompt = self._prepared.generation_of(index).prompt
        offsets = prompt_offsets(prompt, echo, self._tokenizer)
        most = self._prepared.choices[index].request.params.logprobs
        scored = (None, *(replace(one, top=one.top[:most]) for one in logprobs or ()))
        return [ReplyToken(id, one, offset=offset) for id, one, offset in zip(prompt, scored, offsets, strict=True)]

    def _prompt_logprobs(self, index: int, logprobs: Sequence[Logprobs] | None) -> Json:
        """Return the field `prompt_logprobs` in vLLM's shape, if the request asks for it: null for the first token of the prompt,
        then for each one an object that maps its id, and those of the likeliest tokens there, to their logprobs."""
        most, prompt = self._prepared.prompt_logprobs, self._prepared.generation_of(index).prompt
        if most is None or logprobs is None:
            return {}
        scored = [self._ranked(token, one, most) for token, one in zip(prompt[1:], logprobs, strict=True)]
        return {"prompt_logprobs": [None, *scored]}

    def _ranked(self, token: int, found: Logprobs, most: int) -> Json:
        likeliest = found.top[:most]
        ranks = {id: rank for rank, (id, _) in enumerate(likeliest, 1)}
        shown = {token: found.logprob} | dict(likeliest)
        return {
            str(id): {"logprob": finite(logprob), "rank": ranks.get(id), "decoded_token": self._token_text(id)}
            for id, logprob in shown.items()
        }

    def chat_logprobs(self, tokens: Sequence[ReplyToken]) -> list[Json]:
        return [self._chat_entry(token) for token in tokens]

    def _chat_entry(self, token: ReplyToken) -> Json:
        assert token.logprobs is not None  # every token has logprobs if the request asks for any
        found = token.logprobs
        top = [self._entry(id, logprob) | ({"id": id} if found.asked else {}) for id, logprob in found.alternatives]
        entry = self._entry(token.token, found.logprob) | {"top_logprobs": top}
        return (
            entry if found.processed is None else entry | {"processed_logprob": finite(found.processed), "kept_mass": found.mass}
        )

    def _entry(self, id: int, logprob: float) -> Json:
        return {"token": self._token_text(id), "logprob": finite(logprob), "bytes": list(self._tokenizer.token_bytes(id))}

    def _alternatives(self, token: ReplyToken) -> dict[str, float] | None:
        """Map the text of each alternative and of the token itself to its logprob. If two have the same text, the first and
        likelier one is kept; a token that the request asks for by id is then named by its id."""
        if token.logprobs is None:
            return None
        found: dict[str, float] = {}
        named: dict[str, int] = {}
        for id, logprob in (*token.logprobs.top, (token.token, token.logprobs.logprob)):
            if named.setdefault(self._token_text(id), id) == id:
                found[self._token_text(id)] = finite(logprob)
        for id, logprob in token.logprobs.asked:
            text = self._token_text(id)
            found[text if named.setdefault(text, id) == id else f"token_id:{id}"] = finite(logprob)
        return found

    def _token_text(self, id: int) -> str:
        """Return the text of a token. A token that is not valid UTF-8 alone is written as its bytes, which keeps such tokens
        distinct."""
        raw = self._tokenizer.token_bytes(id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def closing(piece: Piece) -> Piece:
    """Return what is left of a reply's last piece after its text and tokens."""
    return Piece(piece.index, "content", "", (), finish=piece.finish, stop_reason=piece.stop_reason, usage=piece.usage)


def finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def _finite_or_none(logprobs: Logprobs | None) -> float | None:
    return None if logprobs is None else finite(logprobs.logprob)


def _both_columns(found: Sequence[Logprobs | None]) -> Json:
    """Return the columns of a completion's logprobs with the mode "both"; none if no token has them."""
    processed = [None if one is None else one.processed for one in found]
    if all(one is None for one in processed):
        return {}
    masses = [None if one is None else one.mass for one in found]
    return {"processed_token_logprobs": [None if one is None else finite(one) for one in processed], "kept_masses": masses}


def prompt_offsets(prompt: Sequence[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """Return where each prompt token begins in the echoed text. Special tokens that are not in that text have width 0."""
    detokenizer, offsets, at = Detokenizer(tokenizer, skip_special=False), [], 0
    for token in prompt:
        offsets.append(at)
        found = detokenizer.push(token)
        if not tokenizer.is_special(token) or text.startswith(found, at):
            at = min(at + len(found), len(text))
    return offsets


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


def arguments_object(arguments: str) -> Json:
    """Parse the arguments of a call, for APIs that send them as an object; cut-off arguments give {}. Numbers beyond the range
    of a float are clamped and NaN becomes null, so that the reply is valid JSON."""
    try:
        found = json.loads(arguments, parse_float=_finite_float, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _finite_float(number: str) -> float:
    return max(-sys.float_info.max, min(float(number), sys.float_info.max))
