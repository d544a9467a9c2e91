"""How many tokens a text needs at least, without tokenizing it: what can never fit into the context is refused by this number.

In: a tokenizer. Out: for any text a number that its tokens never fall below. To tokenize ten megabytes takes seconds and more
than a gigabyte; to count their bytes takes milliseconds.

    weight(b) = 1 / length in bytes of the longest token that contains the byte b
    a token of L bytes, each of weight at most 1/L, weighs at most 1, so a text has at least as many tokens as it weighs

Bytes that might be dropped, or joined into one token without limit, weigh nothing: those of unknown characters, and white space
where an added token takes in the white space around it. A tokenizer with a part whose effect on the text is not known weighs
nothing at all.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterable
from typing import Any

import numpy as np
import tokenizers
from tokenizers import models

from onedraw.text.gguf_tokenizer import SPACE

BLOCK = 1 << 16  # Characters that are weighed at once.
# A normalizer may join characters across the ends of a block, or write a space before it: a few characters of four bytes each,
# and no byte weighs more than 1.
EDGE = 64
_KEEP_TEXT = frozenset({"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation", "UnicodeScripts", "Sequence"})
_BYTES = 256


class LeastTokens:
    """Weighs texts for one tokenizer. Immutable; safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer, pieces: Iterable[bytes], *, byte_level: dict[int, str] | None) -> None:
        """`pieces`: the bytes of every token. `byte_level`: the character of each byte, if tokens are written in these."""
        self._normalizer = backend.normalizer
        self._spaced = byte_level is None  # Tokens have ▁ in place of a space.
        self._weights = np.zeros(_BYTES)
        if not _keeps_text(backend):
            return
        added = backend.get_added_tokens_decoder().values()
        contents = [token.content for token in added]
        normalized = [] if self._normalizer is None else [self._normalizer.normalize_str(content) for content in contents]
        longest = [0] * _BYTES
        for piece in (*pieces, *map(self._bytes, (*contents, *normalized))):
            for byte in set(piece):
                longest[byte] = max(longest[byte], len(piece))
        nothing = set(_unknown(backend, byte_level))
        if any(token.lstrip or token.rstrip for token in added):
            nothing |= _WHITE
        for byte in range(_BYTES):
            if longest[byte] and byte not in nothing:
                self._weights[byte] = 1 / longest[byte]

    def of(self, text: str, *, enough: int) -> int:
        """The least number of tokens of a text. Weighing stops once it is `enough`."""
        total = 0.0
        for start in range(0, len(text), BLOCK):
            block = text[start : start + BLOCK]
            if self._normalizer is not None:
                block = self._normalizer.normalize_str(block)
            counts = np.bincount(np.frombuffer(self._bytes(block), np.uint8), minlength=_BYTES)
            weight = float(counts @ self._weights)
            total += weight if self._normalizer is None else max(weight - EDGE, 0.0)
            if total >= enough + 1:
                break
        return max(math.floor(total - 1e-6 * total), 0)  # The sum of many weights is rounded.

    def _bytes(self, text: str) -> bytes:
        return (text.replace(SPACE, " ") if self._spaced else text).encode()


def _white_space() -> set[int]:
    """The bytes of all white space, in UTF-8."""
    return {byte for code in range(0x3001) if chr(code).isspace() for byte in chr(code).encode()}


_WHITE = _white_space()


def _keeps_text(backend: tokenizers.Tokenizer) -> bool:
    """Whether the tokens of a text spell all of the normalized text, unknown characters aside."""
    model = backend.model
    if not isinstance(model, models.BPE | models.Unigram):
        return False
    if isinstance(model, models.BPE) and (model.continuing_subword_prefix or model.end_of_word_suffix):
        return False
    if not all(step["type"] in _KEEP_TEXT and step.get("behavior") != "Removed" for step in _steps(backend.pre_tokenizer)):
        return False
    # An added token is cut out before the rest is normalized; here the two are normalized together.
    return not any(
        _joins(end) for token in backend.get_added_tokens_decoder().values() for end in token.content[:1] + token.content[-1:]
    )


def _steps(pre_tokenizer: Any) -> list[dict[str, Any]]:
    if pre_tokenizer is None:
        return []
    state: dict[str, Any] = json.loads(pre_tokenizer.__getstate__())
    return [state, *state.get("pretokenizers", ())]


def _joins(character: str) -> bool:
    """Whether a normalizer may join a character with its neighbour."""
    return unicodedata.combining(character) > 0 or unicodedata.category(character)[0] == "M" or "\u1100" <= character <= "\u11ff"


def _unknown(backend: tokenizers.Tokenizer, byte_level: dict[int, str] | None) -> list[int]:
    """The bytes of characters that may have no token."""
    if byte_level is not None:
        return [byte for byte in range(_BYTES) if backend.token_to_id(byte_level[byte]) is None]
    if getattr(backend.model, "byte_fallback", False) and all(
        backend.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(_BYTES)
    ):
        return []
    # A space counts only where it is written as another character before it is looked up, and that one has a token.
    spaces = any(
        SPACE in part.__getstate__().decode() for part in (backend.normalizer, backend.pre_tokenizer) if part is not None
    )
    known = {byte for byte in range(128) if byte != 0x20 and backend.token_to_id(chr(byte)) is not None}
    known |= {0x20} if spaces and backend.token_to_id(SPACE) is not None else set()
    return [byte for byte in range(_BYTES) if byte not in known]
