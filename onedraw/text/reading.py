"""How the text of a reply is to be read: which part of it is reasoning and which the answer.

In: a Reading, made with the prompt, and text in pieces of any size. Out: (channel, text) parts that are final. A completion
is read plainly: everything is content.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onedraw.text.channels import ChannelSplitter, Pieces, Reasoning, reasoning_is_open
from onedraw.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Reading:
    """What is known of a reply before it begins."""

    opening: bool = False  # it begins a text of its own: a first space that only marks a word is dropped
    reasoning: Reasoning | None = None
    reasoning_open: bool = False  # the prompt ends inside reasoning
    spelled: frozenset[int] = frozenset()  # special tokens that are markers, spelled out for the reader


PLAIN = Reading()


def chat_reading(prompt: str, reasoning: Reasoning | None, tokenizer: Tokenizer) -> Reading:
    """How the reply to a rendered chat is read."""
    markers = () if reasoning is None else (reasoning.opens, reasoning.closes)
    return Reading(
        opening=True,
        reasoning=reasoning,
        reasoning_open=reasoning_is_open(prompt, reasoning),
        spelled=special_ids(markers, tokenizer),
    )


def special_ids(markers: Iterable[str], tokenizer: Tokenizer) -> frozenset[int]:
    """The special tokens that these markers are written with."""
    ids = (token for marker in markers for token in tokenizer.encode(marker, add_special=False))
    return frozenset(token for token in ids if tokenizer.is_special(token))


class Reader:
    """One owner: the stream of one reply."""

    def __init__(self, reading: Reading) -> None:
        self._splitter = ChannelSplitter(reading.reasoning, reasoning_open=reading.reasoning_open)

    def push(self, text: str) -> Pieces:
        return self._splitter.push(text)

    def finish(self) -> Pieces:
        return self._splitter.finish()
