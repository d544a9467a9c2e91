"""A cache of replies with tool calls, so that the next prompt of a conversation begins with the tokens the model generated.

Replies are added when they end. When later messages contain such a reply, its prompt and its own token ids become the beginning
of the new prompt, and the prefix cache finds them. Rendering and tokenizing the message again could give other tokens: a template
writes a call with its own spaces, order and escapes, and a model's tokens need not be those that the tokenizer would choose for
the same text. The size is limited; the oldest replies are dropped.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_TOKENS = 2**22  # the limit on the tokens of all cached prompts and replies together
_PLACEHOLDER = "\ue000the reply\ue000"  # Stands for the reply's text. No message contains these private-use characters.

Render = Callable[[Sequence[Mapping[str, Any]], bool], str]  # (messages, add_generation_prompt) → text of the prompt


@dataclass(frozen=True, slots=True)
class CachedReply:
    """A reply that called tools, with its prompt."""

    prompt_hash: str  # hash of the prompt's text, as the template rendered it
    ids: tuple[int, ...]  # tokens of prompt and reply, without the end token
    content: str  # the text of the reply without its calls
    calls: tuple[tuple[str, str], ...]  # (name, arguments) of each call, as the client received them


class ToolCallCache:
    """Cached replies by the id of their first call. It is thread-safe."""

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
        """Return the reply that this message repeats; None if it is not cached or the client changed it."""
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
    """Return the ids that the prompt begins with and the text after them; None if the messages contain no cached reply.

    `text` is the whole prompt as the template renders it. `eos_texts` and `special_texts` are the texts of the end tokens and of
    all special tokens. The text is only split before a special token, because tokens never cross such a point.
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
    """Return the part of the prompt's text after message `number`, which must begin with a special token; None if that
    part cannot be found or begins otherwise."""
    until = render(messages[: number + 1], False)
    last = max((until.rfind(eos) for eos in eos_texts if eos), default=-1)
    if last > 0 and text.startswith(until[:last]) and any(text.startswith(eos, last) for eos in eos_texts):
        return text[last:]
    # The template may render a message differently when it is the last, so render all messages with a placeholder instead.
    placeholder = {"role": "assistant", "content": _PLACEHOLDER}
    _, found, rest = render([*messages[:number], placeholder, *messages[number + 1 :]], True).partition(_PLACEHOLDER)
    return rest if found and text.endswith(rest) and any(rest.startswith(special) for special in special_texts) else None


def _canonical(arguments: Any) -> str:
    """Return arguments as JSON with normalized spaces and order. The values `true`, `1` and `1.0` stay different."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return str(arguments)
