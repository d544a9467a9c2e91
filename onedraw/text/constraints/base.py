"""Constraints made of constraints: several at once, and a bound on runs of digits.

In: constraints. Out: a constraint. Each stays a pure function of the reply so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar

import numpy as np

from onedraw.types import Bits, Constraint

# -------------------- A state after every token of a reply, walked once: what constraints stand on.


StateT = TypeVar("StateT")


class Walk(Generic[StateT]):
    """One owner: a constraint."""

    def __init__(self, first: StateT, step: Callable[[StateT, int], StateT]) -> None:
        self._step = step
        self._tokens: list[int] = []
        self._states = [first]  # states[i]: after i tokens

    def after(self, output: Sequence[int], drafts: Sequence[int]) -> StateT:
        tokens = [*output, *drafts]
        common = shared(self._tokens, tokens)
        del self._tokens[common:], self._states[common + 1 :]
        for token in tokens[common:]:
            self._states.append(self._step(self._states[-1], token))
        self._tokens = tokens
        return self._states[-1]


def shared(known: list[int], tokens: list[int]) -> int:
    """How many tokens both begin with. Mostly all of the shorter one, or all but a few: so whole slices are tried first."""
    length = min(len(known), len(tokens))
    for back in range(0, min(length, 16) + 1):
        if known[: length - back] == tokens[: length - back]:
            return length - back
    return next(i for i, (a, b) in enumerate(zip(known, tokens, strict=False)) if a != b)


# -------------------- Constraints made of constraints: several at once, and a bound on runs of digits.


LONGEST_NUMBER = 48  # digits in a row; a number of more is a model that does not come to an end
_DIGITS = b"0123456789"


def combine(*constraints: Constraint | None) -> Constraint | None:
    """What all of them allow."""
    given = tuple(constraint for constraint in constraints if constraint is not None)
    return None if not given else given[0] if len(given) == 1 else All(given)


@dataclass(frozen=True, slots=True)
class All:
    """Owner: one request."""

    constraints: tuple[Constraint, ...]

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> Bits | None:
        common: Bits | None = None
        for constraint in self.constraints:
            bits = constraint.allowed(output, drafts)
            if bits is not None:
                common = bits if common is None else both(common, bits)
        return common


def both(first: Bits, second: Bits) -> Bits:
    length = min(len(first), len(second))
    return first[:length] & second[:length]


class BoundedNumbers:
    """A grammar in which no run of digits goes on for ever. Owner: one request.

    Where only a digit can follow, the grammar wants a longer number than the bound, and has it.
    """

    def __init__(self, grammar: Constraint, *, spell: Callable[[int], bytes], digits: Bits) -> None:
        self._grammar = grammar
        self._spell = spell
        self._digits = digits  # the tokens that begin with a digit
        self._walk: Walk[int] = Walk(0, self._step)

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> Bits | None:
        bits = self._grammar.allowed(output, drafts)
        if bits is None or self._walk.after(output, drafts) < LONGEST_NUMBER:
            return bits
        others = both(bits, ~self._digits)  # a grammar's sets may be a word longer than the vocabulary
        return others if others.any() else bits

    def _step(self, run: int, token: int) -> int:
        """How many digits the reply ends with."""
        text = self._spell(token)
        tail = len(text) - len(text.rstrip(_DIGITS))
        return run + tail if tail == len(text) else tail


def token_mask(members: Sequence[int], vocab: int) -> Bits:
    """A set of tokens."""
    bits = np.zeros(-(-vocab // 32) * 32, dtype=np.uint8)
    bits[list(members)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


@cache
def begins_with_digit(text: bytes) -> bool:
    return text[:1] in (b"0", b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"8", b"9")
