"""A lower bound on the number of tokens of a text, found without tokenizing it.

A text whose bound exceeds the context can never fit, so it is refused at once: tokenizing ten megabytes takes seconds and more
than a gigabyte of memory, while counting their bytes takes milliseconds. The bound is the weight of the text:

    weight of a byte b    1 / (length in bytes of the longest token that contains b)
    weight of a token     at most 1, since each of its L bytes weighs at most 1/L
    weight of a text      the sum over its bytes, so the text has at least that many tokens

Bytes that the tokenizer might drop, or join into one token without limit, weigh 0: those of unknown characters, and white space
if an added token takes in the white space around it. If a part of the tokenizer has an unknown effect on the text, every byte
weighs 0, and the bound is useless but right.
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

BLOCK = 1 << 16  # characters that are normalized and weighed at once, which bounds memory
# Subtracted from the weight of each normalized block. A normalizer may treat the characters at the ends of a block differently
# than inside a whole text, or write a space before it. That affects a few characters of at most four bytes, each of weight 1.
EDGE = 64
_KEEP_TEXT = frozenset({"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation", "UnicodeScripts", "Sequence"})
_BYTES = 256


class LeastTokens:
    """Weighs texts for one tokenizer. It is immutable, so several threads may use it."""

    def __init__(self, backend: tokenizers.Tokenizer, pieces: Iterable[bytes], *, byte_level: dict[int, str] | None) -> None:
        """`pieces` has the bytes of every token. `byte_level` maps each byte to its character in the alphabet of byte-level BPE;
        None if the tokens are not written in that alphabet."""
        self._normalizer = backend.normalizer
        self._spaced = byte_level is None  # whether tokens have ▁ in place of a space
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
        """Return a lower bound on the number of tokens of a text. Weighing stops once the bound reaches `enough`."""
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
        return max(math.floor(total - 1e-6 * total), 0)  # a little less, because rounding may have made the sum too large

    def _bytes(self, text: str) -> bytes:
        return (text.replace(SPACE, " ") if self._spaced else text).encode()


def _white_space() -> set[int]:
    """Return all bytes that occur in the UTF-8 of white space."""
    return {byte for code in range(0x3001) if chr(code).isspace() for byte in chr(code).encode()}


_WHITE = _white_space()


def _keeps_text(backend: tokenizers.Tokenizer) -> bool:
    """Whether the tokens of a text, joined, spell all of the normalized text except unknown characters. Only then does every byte
    belong to a token, so that its weight counts."""
    model = backend.model
    if not isinstance(model, models.BPE | models.Unigram):
        return False
    if isinstance(model, models.BPE) and (model.continuing_subword_prefix or model.end_of_word_suffix):
        return False
    if not all(step["type"] in _KEEP_TEXT and step.get("behavior") != "Removed" for step in _steps(backend.pre_tokenizer)):
        return False
    # The tokenizer cuts out added tokens before it normalizes the rest, while `of` normalizes all of a text together. The results
    # may differ if a character at the end of an added token can join with its neighbour.
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
    """Return the bytes that may belong to characters without a token; the tokenizer may drop such characters."""
    if byte_level is not None:
        return [byte for byte in range(_BYTES) if backend.token_to_id(byte_level[byte]) is None]
    if getattr(backend.model, "byte_fallback", False) and all(
        backend.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(_BYTES)
    ):
        return []
    # A space has a token only if the tokenizer replaces it with ▁ and ▁ has a token.
    spaces = any(
        SPACE in part.__getstate__().decode() for part in (backend.normalizer, backend.pre_tokenizer) if part is not None
    )
    known = {byte for byte in range(128) if byte != 0x20 and backend.token_to_id(chr(byte)) is not None}
    known |= {0x20} if spaces and backend.token_to_id(SPACE) is not None else set()
    return [byte for byte in range(_BYTES) if byte not in known]
