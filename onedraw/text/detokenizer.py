"""Turn a stream of token ids into text. Text that was returned once never changes.

All returned texts joined equal `Tokenizer.decode` of all ids. The bytes of an incomplete UTF-8 character are held back until it
is complete. The work per token does not depend on the length of the reply.
"""

from __future__ import annotations

import codecs
from typing import NamedTuple

from onedraw.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TokenText(NamedTuple):
    """The text that a token adds to a reply."""

    text: str  # the characters of the reply that this token made final
    # The text to show beside the token's logprob: `text` with any leading space, or empty for a marker of reasoning or a call.
    own: str
    after_broken: bool = False  # whether `text` begins with U+FFFD for a character that an earlier token began and none completed


class Detokenizer:
    """The detokenizer of one reply.

    With `opening` the reply is a text of its own, so the space that SentencePiece encoding adds in front is removed; a
    continuation of the prompt's text keeps it. `skip_special` leaves special tokens out of the text, except those in `spelled`,
    which are markers of reasoning or tool calls that the parser must see.
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
        """Add a token and return the text that is final now."""
        return self.push_token(token_id).text

    def push_token(self, token_id: int) -> TokenText:
        """Add a token and return the text that is final now, with the token's own part of it."""
        hidden = self._skip_special and self._tokenizer.is_special(token_id)
        if hidden and token_id not in self._spelled:
            return TokenText("", "")
        data, pending = self._tokenizer.token_bytes(token_id), bool(self._decoder.getstate()[0])
        text = self._decoder.decode(data)
        if hidden:
            return TokenText(self._strip_first_space(text), "")
        return TokenText(self._strip_first_space(text), text, pending and bool(text) and not _continues_character(data))

    def peek(self, token_id: int) -> TokenText:
        """Return the text that a token would add, without adding it."""
        state, strips_space = self._decoder.getstate(), self._strips_space
        found = self.push_token(token_id)
        self._decoder.setstate(state)
        self._strips_space = strips_space
        return found

    def finish(self) -> str:
        """Return the rest of the text at the end of the reply: U+FFFD if its last character is incomplete."""
        return self._strip_first_space(self._decoder.decode(b"", final=True))

    def _strip_first_space(self, text: str) -> str:
        if self._strips_space and text:
            self._strips_space = False
            return text.removeprefix(" ")
        return text


def _continues_character(data: bytes) -> bool:
    """Whether these bytes begin with a continuation byte of a UTF-8 character."""
    return data[:1] != b"" and data[0] & 0xC0 == 0x80
