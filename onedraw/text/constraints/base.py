"""Building blocks of constraints: token masks, the state after every prefix of a reply, the intersection of two constraints,
and a limit on runs of digits.

A constraint returns the tokens that may come next. They depend only on the reply so far and the drafts that follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from onedraw.types import Constraint, TokenMask

LONGEST_NUMBER = 48  # the longest run of digits; a model that writes a longer one is likely to repeat digits without end
_DIGITS = b"0123456789"

StateT = TypeVar("StateT")


def token_mask(tokens: Sequence[int], vocab: int) -> TokenMask:
    """Return a set of tokens as a bit mask, with one bit per token of the vocabulary."""
    bits = np.zeros(-(-vocab // 32) * 32, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def intersect(first: TokenMask, second: TokenMask) -> TokenMask:
    length = min(len(first), len(second))
    return first[:length] & second[:length]


class PrefixStates(Generic[StateT]):
    """Caches the state of a constraint after every prefix of a token sequence. When the sequence changes, as it does when drafts
    are rejected, only the states after the common prefix are computed again. Each constraint has a cache of its own."""

    def __init__(self, first: StateT, step: Callable[[StateT, int], StateT]) -> None:
        self._step = step
        self._tokens: list[int] = []
        self._states = [first]  # states[i] is the state after i tokens

    def after(self, output: Sequence[int], drafts: Sequence[int]) -> StateT:
        tokens = [*output, *drafts]
        common = common_prefix(self._tokens, tokens)
        del self._tokens[common:], self._states[common + 1 :]
        for token in tokens[common:]:
            self._states.append(self._step(self._states[-1], token))
        self._tokens = tokens
        return self._states[-1]

    def at(self, count: int) -> StateT:
        """Return the state after the first `count` tokens of the sequence in the last call of `after`."""
        return self._states[count]


def common_prefix(known: list[int], tokens: list[int]) -> int:
    """Return the length of the common prefix. Mostly it is close to the length of the shorter list, so the search begins
    there."""
    length = min(len(known), len(tokens))
    for back in range(0, min(length, 16) + 1):
        if known[: length - back] == tokens[: length - back]:
            return length - back
    return next(i for i, (a, b) in enumerate(zip(known, tokens, strict=False)) if a != b)


def combine(*constraints: Constraint | None) -> Constraint | None:
    """Return a constraint that allows what all given constraints allow; None if none is given."""
    given = tuple(constraint for constraint in constraints if constraint is not None)
    return None if not given else given[0] if len(given) == 1 else AllOf(given)


@dataclass(frozen=True, slots=True)
class AllOf:
    """The constraints of one request, which a token must all satisfy."""

    constraints: tuple[Constraint, ...]

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> TokenMask | None:
        common: TokenMask | None = None
        for constraint in self.constraints:
            bits = constraint.allowed(output, drafts)
            if bits is not None:
                common = bits if common is None else intersect(common, bits)
        return common

    def legal(self, output: Sequence[int]) -> int:
        return min(constraint.legal(output) for constraint in self.constraints)


class BoundedNumbers:
    """Limits the digits in a row of a reply to LONGEST_NUMBER, in addition to a grammar. Where the grammar allows nothing but
    digits, the limit does not apply. Each request has an object of its own, since it has state."""

    def __init__(self, grammar: Constraint, *, token_bytes: Callable[[int], bytes], digits: TokenMask) -> None:
        self._grammar = grammar
        self._token_bytes = token_bytes
        self._digits = digits  # mask of the tokens that begin with a digit
        self._digit_runs: PrefixStates[int] = PrefixStates(0, self._next)

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> TokenMask | None:
        bits = self._grammar.allowed(output, drafts)
        if bits is None or self._digit_runs.after(output, drafts) < LONGEST_NUMBER:
            return bits
        others = intersect(bits, ~self._digits)  # `intersect` cuts a grammar's mask, which may be longer than the vocabulary
        return others if others.any() else bits

    def legal(self, output: Sequence[int]) -> int:
        """Return how many of the first tokens the grammar allows. The limit on digits is not checked, because at a position it
        applies only if the grammar allows another token there, which takes the mask of every position to know."""
        return self._grammar.legal(output)

    def _next(self, run: int, token: int) -> int:
        """Return how many digits the reply ends with after this token; `run` is their number before it."""
        text = self._token_bytes(token)
        tail = len(text) - len(text.rstrip(_DIGITS))
        return run + tail if tail == len(text) else tail
