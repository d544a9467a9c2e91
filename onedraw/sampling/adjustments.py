"""The part of sampling that only the host can compute, as adjustments of single tokens.

The input is the sampling parameters, the history and the drafts before a position. The output is an Adjustment: DRY penalties,
and the tokens banned by bad words, the minimum length or a constraint. DRY ("don't repeat yourself") penalizes the token that
would extend a repetition. The reference sampler and every fast sampler use the same adjustments. V is the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onedraw.types import LONGEST_REPETITION, DryParams, History, SamplingParams, TokenMask

_LARGEST = float(np.finfo(np.float32).max)  # the limit on a penalty, so that scores stay finite

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Adjustment:
    """Penalties of tokens, banned tokens, and a mask of allowed tokens (None: all). No token id occurs twice."""

    penalized: tuple[tuple[int, float], ...] = ()
    banned: tuple[int, ...] = ()
    allowed: TokenMask | None = None


NO_ADJUSTMENT = Adjustment()


class BannedWords:
    """Banned words as token ids, looked up by the tokens before the last one, so that the cost does not grow with their
    number."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self.words = words
        self._last: dict[tuple[int, ...], set[int]] = {}  # tokens of a word before its last → last tokens of such words
        for word in words:
            self._last.setdefault(word[:-1], set()).add(word[-1])
        self._lengths = sorted({len(before) for before in self._last})

    def completions(self, output: Sequence[int], drafts: Sequence[int]) -> set[int]:
        """Return the last token of every word whose other tokens end the output and drafts. For a word of one token there are no
        others, so that token is always returned."""
        tail = (*output[max(0, len(output) - self._lengths[-1]) :], *drafts)
        found: set[int] = set()
        for length in self._lengths:
            if length <= len(tail):
                found |= self._last.get(tail[len(tail) - length :], set())
        return found


class HistoryTokens:
    """The tokens of one history as an array that grows with it, and its banned words. Each sampler keeps one per history.

    Without this object, every sampled token would copy the whole history. Known tokens never change, so a longer history of the
    same request only appends to the array. If a history is shorter than the last, the sampler has reused the object for another
    request, and all tokens are copied.
    """

    def __init__(self) -> None:
        self._tokens: Tokens = np.empty(256, dtype=np.int64)
        self._known = 0
        self._banned: BannedWords | None = None

    def banned(self, words: Sequence[tuple[int, ...]]) -> BannedWords:
        if self._banned is None or self._banned.words is not words:
            self._banned = BannedWords(words)
        return self._banned

    def read(self, history: History, drafts: Sequence[int]) -> Tokens:
        """Return the history and the drafts after it. The array is valid until the next call."""
        known, stop = len(history), len(history) + len(drafts)
        if known < self._known:
            self._known = 0
        if stop > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty(2 * stop - len(self._tokens), dtype=np.int64)])
        if known > self._known:
            self._tokens[self._known : known] = history.slice(self._known, known)
            self._known = known
        if drafts:
            self._tokens[known:stop] = drafts
        return self._tokens[:stop]


def adjustment(
    params: SamplingParams, history: History, drafts: Sequence[int] = (), cached: HistoryTokens | None = None
) -> Adjustment:
    """Return the adjustment of the position after `history` and `drafts`. `cached` saves time and does not change the result."""
    sampled = len(history.output) + len(drafts)
    penalized: tuple[tuple[int, float], ...] = ()
    if params.dry is not None and params.dry.multiplier > 0:
        penalized = dry_penalties((cached or HistoryTokens()).read(history, drafts), params.dry)
    banned: set[int] = set()
    if params.bad_words:
        banned |= (cached or HistoryTokens()).banned(params.bad_words).completions(history.output, drafts)
    if sampled < params.min_tokens:
        banned |= params.stop_ids
    allowed = None if history.constraint is None else history.constraint.allowed(history.output, drafts)
    if not penalized and not banned and allowed is None:
        return NO_ADJUSTMENT
    return Adjustment(penalized, tuple(sorted(banned)), allowed)


def mask_to_bools(mask: TokenMask, vocab: int) -> npt.NDArray[np.bool_]:
    """Expand a token mask to one boolean per token.   [V]"""
    found = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")[:vocab].view(np.bool_)
    return found if len(found) == vocab else np.pad(found, (0, vocab - len(found)))


def is_allowed(mask: TokenMask, token: int) -> bool:
    """Whether a token mask allows this token."""
    return token // 32 < len(mask) and bool(int(mask[token // 32]) >> token % 32 & 1)


def valid_ids(ids: Collection[int], vocab: int) -> Iterable[int]:
    """Return those ids that are in the vocabulary."""
    return (token for token in ids if 0 <= token < vocab)


def dry_penalties(tokens: Tokens, dry: DryParams) -> tuple[tuple[int, float], ...]:
    """Return (token, penalty) for every token that would continue a repetition, by its longest match.

    From all earlier occurrences of the last token, matches are extended backwards at the same time; most end after a few tokens.
    A sequence breaker (a token of `dry.breakers`) ends a match. It is never penalized itself, because no match continues across
    it.
    """
    tokens = tokens[-dry.range :] if dry.range else tokens
    if len(tokens) < 2 or int(tokens[-1]) in dry.breakers:
        return ()
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # earlier occurrences of the last token
    lengths = np.ones(len(ends), dtype=np.int64)
    alive = np.arange(len(ends))
    for back in range(1, min(LONGEST_REPETITION, len(tokens))):
        expected = int(tokens[-1 - back])
        alive = alive[ends[alive] >= back]
        alive = alive[tokens[ends[alive] - back] == expected]
        if not len(alive) or expected in dry.breakers:
            break
        lengths[alive] = back + 1
    far_enough = lengths >= dry.allowed_length
    followers, lengths = tokens[ends[far_enough] + 1], lengths[far_enough]
    order = np.lexsort((-lengths, followers))  # sorted by follower; the longest match of each comes first
    unique, first = np.unique(followers[order], return_index=True)
    longest = lengths[order][first]
    return tuple(
        (token, _penalty(dry, length))
        for token, length in zip(unique.tolist(), longest.tolist(), strict=True)
        if token not in dry.breakers
    )


def _penalty(dry: DryParams, length: int) -> float:
    try:
        return min(dry.multiplier * dry.base ** (length - dry.allowed_length), _LARGEST)
    except OverflowError:
        return _LARGEST
