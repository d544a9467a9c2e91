"""Token by token to text that is final: what was once given out never changes.

In: the ids of one reply, one at a time. Out: pieces of text; joined they equal `Tokenizer.decode` of all ids. A
character whose bytes are not complete is held back. Work per token does not grow with the length of the reply.
"""

from __future__ import annotations

import codecs

from onedraw.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


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

    @property
    def holds(self) -> bool:
        """Whether there are bytes of a character that is not complete."""
        return bool(self._decoder.getstate()[0])

    def push(self, token_id: int) -> str:
        """The text that is final now."""
        if self._skip_special and self._tokenizer.is_special(token_id) and token_id not in self._spelled:
            return ""
        return self._opened(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """The rest: U+FFFD for a character that never became complete."""
        return self._opened(self._decoder.decode(b"", final=True))

    def _opened(self, text: str) -> str:
        if self._strips_space and text:
            self._strips_space = False
            return text.removeprefix(" ")
        return text
