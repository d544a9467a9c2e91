"""A cache of replies with tool calls, so that the prompt of the next turn begins with exactly the tokens the model wrote.

In: replies with calls when they end; later, messages that hold these calls. Out: the token ids of the earlier prompt and reply,
as the beginning of the new prompt. Without it the cached prefix would be lost: a template formats a past call in its own way
(spaces, order, escapes), and a model's tokens need not be the tokenizer's encoding of their text. The size is limited; the
oldest replies are dropped.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_TOKENS = 2**22  # of all cached prompts and replies together
_PLACEHOLDER = "\ue000the reply\ue000"  # for the text of a reply; private-use characters, which no message contains

Render = Callable[[Sequence[Mapping[str, Any]], bool], str]  # messages, add_generation_prompt → prompt text


@dataclass(frozen=True, slots=True)
class CachedReply:
    """A reply that called tools."""

    prompt_hash: str  # of the prompt's text, as the template rendered it
    ids: tuple[int, ...]  # prompt and reply, without the token that ended it
    content: str
    calls: tuple[tuple[str, str], ...]  # name and arguments, as the client received them


class ToolCallCache:
    """Replies by the id of their first call. Safe to use from several threads."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._replies: OrderedDict[str, CachedReply] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, call_id: str, reply: CachedReply) -> None:
        with self._lock:
            self._replies[call_id] = reply
            self._tokens += len(reply.ids)
            while self._tokens > self._max_tokens and self._replies:
                _, oldest = self._replies.popitem(last=False)
                self._tokens -= len(oldest.ids)

    def get(self, message: Mapping[str, Any]) -> CachedReply | None:
        """The reply that this message repeats; None if the client changed it."""
        calls = message.get("tool_calls") or ()
        if message.get("role") != "assistant" or not calls:
            return None
        with self._lock:
            reply = self._replies.get(calls[0].get("id", ""))
        if reply is None or (message.get("content") or "") != reply.content or len(calls) != len(reply.calls):
            return None
        given = [(call["function"]["name"], _canonical(call["function"].get("arguments"))) for call in calls]
        return reply if given == [(name, _canonical(arguments)) for name, arguments in reply.calls] else None


def prompt_hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def cached_prompt(
    messages: Sequence[Mapping[str, Any]],
    text: str,
    *,
    cache: ToolCallCache,
    render: Render,
    eos_texts: Sequence[str],
    special_texts: Sequence[str],
) -> tuple[tuple[int, ...], str] | None:
    """The ids that the prompt begins with, and the text that follows them; None if no reply of the messages is cached.

    `text` is the whole prompt as the template renders it, `eos_texts` the text of the end tokens, `special_texts` that of all
    special tokens. The text is only split before a special token, where tokenization starts anew.
    """
    for number in range(len(messages) - 1, -1, -1):
        reply = cache.get(messages[number])
        if reply is None:
            continue
        if prompt_hash(render(messages[:number], True)) != reply.prompt_hash:
            return None
        rest = _text_after(messages, number, text, render, eos_texts, special_texts)
        return None if rest is None else (reply.ids, rest)
    return None


def _text_after(
    messages: Sequence[Mapping[str, Any]],
    number: int,
    text: str,
    render: Render,
    eos_texts: Sequence[str],
    special_texts: Sequence[str],
) -> str | None:
    """The prompt's text after message `number`, beginning with a special token."""
    until = render(messages[: number + 1], False)
    last = max((until.rfind(eos) for eos in eos_texts if eos), default=-1)
    if last > 0 and text.startswith(until[:last]) and any(text.startswith(eos, last) for eos in eos_texts):
        return text[last:]
    # A template may render the last message differently from the others.
    placeholder = {"role": "assistant", "content": _PLACEHOLDER}
    _, found, rest = render([*messages[:number], placeholder, *messages[number + 1 :]], True).partition(_PLACEHOLDER)
    return rest if found and text.endswith(rest) and any(rest.startswith(special) for special in special_texts) else None


def _canonical(arguments: Any) -> str:
    """Arguments in one spelling, whatever their spaces and their order are: `true`, `1` and `1.0` stay different."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return str(arguments)
