"""Token by token to text that is final: what was once given out never changes.

In: the ids of one reply, one at a time. Out: pieces of text; joined they equal `Tokenizer.decode` of all ids. A
character whose bytes are not complete is held back. Work per token does not grow with the length of the reply.
"""

from __future__ import annotations

import codecs
from typing import NamedTuple

from onedraw.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TokenText(NamedTuple):
    """What a token adds to a reply."""

    text: str  # characters of the reply that are final now
    own: str  # the same with a first space, and without the markers of reasoning and calls
    after_broken: bool = False  # one character that never became complete stands before these


class Detokenizer:
    """One owner: the stream of one reply.

    `opening`: the ids begin a text, so a space that encoding put in front is taken away (SentencePiece kinds only).
    A continuation of a prompt's text is no opening and keeps its space. `spelled`: special tokens that have a text
    all the same, because somebody reads them there.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special: bool = True, opening: bool = True, spelled: frozenset[int] = frozenset()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._spelled = spelled
        self._decoder = _Utf8Decoder(errors="replace")
        self._strips_space = opening and tokenizer.strips_space

    def push(self, token_id: int) -> str:
        """The text that is final now."""
        return self.push_token(token_id).text

    def push_token(self, token_id: int) -> TokenText:
        """The same, with what the token alone contributes."""
        hidden = self._skip_special and self._tokenizer.is_special(token_id)
        if hidden and token_id not in self._spelled:
            return TokenText("", "")
        data, held = self._tokenizer.token_bytes(token_id), bool(self._decoder.getstate()[0])
        text = self._decoder.decode(data)
        if hidden:
            return TokenText(self._opened(text), "")
        return TokenText(self._opened(text), text, held and bool(text) and not _continues_character(data))

    def peek(self, token_id: int) -> TokenText:
        """What the token would add, without adding it."""
        state, strips_space = self._decoder.getstate(), self._strips_space
        found = self.push_token(token_id)
        self._decoder.setstate(state)
        self._strips_space = strips_space
        return found

    def finish(self) -> str:
        """The rest: U+FFFD for a character that never became complete."""
        return self._opened(self._decoder.decode(b"", final=True))

    def _opened(self, text: str) -> str:
        if self._strips_space and text:
            self._strips_space = False
            return text.removeprefix(" ")
        return text


def _continues_character(data: bytes) -> bool:
    """Whether bytes begin inside a UTF-8 character."""
    return data[:1] != b"" and data[0] & 0xC0 == 0x80
