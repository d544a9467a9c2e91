"""Detokenize a stream: token ids in, text out, where text that was returned never changes.

The returned texts, joined, equal `Tokenizer.decode` of all ids. The bytes of an incomplete character are held back. The work per
token does not grow with the length of the reply.
"""

from __future__ import annotations

import codecs
from typing import NamedTuple

from onedraw.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TokenText(NamedTuple):
    """The text that a token adds to a reply."""

    text: str  # characters of the reply that are final now
    own: str  # the same with a leading space, and without the markers of reasoning and tool calls
    after_broken: bool = False  # the character before them stayed incomplete, and became one U+FFFD


class Detokenizer:
    """Owner: the stream of one reply.

    `opening`: the ids begin a text, so the space that SentencePiece encoding adds in front is removed; the continuation of a
    prompt's text keeps it. `spelled`: special tokens that are kept in the text although `skip_special` removes the others.
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
        """The text that is final now, and the token's own part of it."""
        hidden = self._skip_special and self._tokenizer.is_special(token_id)
        if hidden and token_id not in self._spelled:
            return TokenText("", "")
        data, pending = self._tokenizer.token_bytes(token_id), bool(self._decoder.getstate()[0])
        text = self._decoder.decode(data)
        if hidden:
            return TokenText(self._strip_first_space(text), "")
        return TokenText(self._strip_first_space(text), text, pending and bool(text) and not _continues_character(data))

    def peek(self, token_id: int) -> TokenText:
        """The text that the token would add, without adding it."""
        state, strips_space = self._decoder.getstate(), self._strips_space
        found = self.push_token(token_id)
        self._decoder.setstate(state)
        self._strips_space = strips_space
        return found

    def finish(self) -> str:
        """The rest: U+FFFD for a character that stayed incomplete."""
        return self._strip_first_space(self._decoder.decode(b"", final=True))

    def _strip_first_space(self, text: str) -> str:
        if self._strips_space and text:
            self._strips_space = False
            return text.removeprefix(" ")
        return text


def _continues_character(data: bytes) -> bool:
    """Whether bytes begin inside a UTF-8 character."""
    return data[:1] != b"" and data[0] & 0xC0 == 0x80
