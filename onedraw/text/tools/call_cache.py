"""What models wrote when they called tools, token for token, so that the next turn's prompt begins with it.

In: replies with calls as they end; later, messages that hold such calls. Out: the ids of a prompt whose beginning is the
earlier prompt and reply themselves. A template writes a past call in its own way (spaces, order, escapes), and a reply need
not be the tokenizer's own spelling of its text: either would lose the whole cached prefix. Bounded: the oldest are forgotten.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_TOKENS = 2**22  # of all remembered prompts and replies together
_STAND_IN = "\ue000the reply\ue000"  # stands where a reply's text would; of a range that no text uses

Render = Callable[[Sequence[Mapping[str, Any]], bool], str]  # messages, whether a reply is to follow → text


@dataclass(frozen=True, slots=True)
class CachedReply:
    """A reply that called tools. `origin`: of the prompt's text, as the template rendered it."""

    origin: str
    ids: tuple[int, ...]  # prompt and reply, without the token that ended it
    content: str
    calls: tuple[tuple[str, str], ...]  # name and arguments, as they were told


class ToolCallCache:
    """Replies by the id of their first call. Any thread may use it."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most = most_tokens
        self._tokens = 0
        self._kept: OrderedDict[str, CachedReply] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, call_id: str, reply: CachedReply) -> None:
        with self._lock:
            self._kept[call_id] = reply
            self._tokens += len(reply.ids)
            while self._tokens > self._most and self._kept:
                _, oldest = self._kept.popitem(last=False)
                self._tokens -= len(oldest.ids)

    def get(self, message: Mapping[str, Any]) -> CachedReply | None:
        """The reply that this message tells of, if it tells of it as it was."""
        calls = message.get("tool_calls") or ()
        if message.get("role") != "assistant" or not calls:
            return None
        with self._lock:
            reply = self._kept.get(calls[0].get("id", ""))
        if reply is None or (message.get("content") or "") != reply.content or len(calls) != len(reply.calls):
            return None
        told = [(call["function"]["name"], _spelled(call["function"].get("arguments"))) for call in calls]
        return reply if told == [(name, _spelled(arguments)) for name, arguments in reply.calls] else None


def prompt_hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def cached_prompt(
    messages: Sequence[Mapping[str, Any]],
    text: str,
    *,
    memory: ToolCallCache,
    render: Render,
    ends: Sequence[str],
    marks: Sequence[str],
) -> tuple[tuple[int, ...], str] | None:
    """The ids that the prompt begins with, and the text that follows them; None where nothing is remembered.

    `text` is the whole prompt as the template renders it, `ends` how the tokens that end a reply are spelled, `marks` how
    all special tokens are: the text is only ever parted before one, where tokenization begins anew.
    """
    for number in range(len(messages) - 1, -1, -1):
        reply = memory.get(messages[number])
        if reply is None:
            continue
        if prompt_hash(render(messages[:number], True)) != reply.origin:
            return None
        rest = _behind(messages, number, text, render, ends, marks)
        return None if rest is None else (reply.ids, rest)
    return None


def _behind(
    messages: Sequence[Mapping[str, Any]], number: int, text: str, render: Render, ends: Sequence[str], marks: Sequence[str]
) -> str | None:
    """The prompt's text from the end of the reply on, beginning with a special token."""
    upto = render(messages[: number + 1], False)
    last = max((upto.rfind(end) for end in ends if end), default=-1)
    if last > 0 and text.startswith(upto[:last]) and any(text.startswith(end, last) for end in ends):
        return text[last:]
    # A template may write the last message otherwise than one in the middle.
    stand_in = {"role": "assistant", "content": _STAND_IN}
    _, found, rest = render([*messages[:number], stand_in, *messages[number + 1 :]], True).partition(_STAND_IN)
    return rest if found and text.endswith(rest) and any(rest.startswith(mark) for mark in marks) else None


def _spelled(arguments: Any) -> str:
    """Arguments in one spelling, whatever their spaces and their order are: `true`, `1` and `1.0` are three things."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return str(arguments)
