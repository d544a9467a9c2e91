"""Parts that constraints are built from: token masks, the state after every prefix of a reply, the intersection of several
constraints, and a limit on runs of digits.

A constraint is a pure function of the reply so far and of the drafts that follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from onedraw.types import Constraint, TokenMask

LONGEST_NUMBER = 48  # digits in a row; a model that writes more is stuck in the number
_DIGITS = b"0123456789"

StateT = TypeVar("StateT")


def token_mask(tokens: Sequence[int], vocab: int) -> TokenMask:
    """The set of these tokens, one bit per token of the vocabulary."""
    bits = np.zeros(-(-vocab // 32) * 32, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def intersect(first: TokenMask, second: TokenMask) -> TokenMask:
    length = min(len(first), len(second))
    return first[:length] & second[:length]


class PrefixStates(Generic[StateT]):
    """The state after every prefix of a token sequence. Only what follows the prefix shared with the last call is computed again.
    Owner: one constraint."""

    def __init__(self, first: StateT, step: Callable[[StateT, int], StateT]) -> None:
        self._step = step
        self._tokens: list[int] = []
        self._states = [first]  # states[i]: after i tokens

    def after(self, output: Sequence[int], drafts: Sequence[int]) -> StateT:
        tokens = [*output, *drafts]
        common = common_prefix(self._tokens, tokens)
        del self._tokens[common:], self._states[common + 1 :]
        for token in tokens[common:]:
            self._states.append(self._step(self._states[-1], token))
        self._tokens = tokens
        return self._states[-1]


def common_prefix(known: list[int], tokens: list[int]) -> int:
    """The length of the common prefix. It is mostly the whole shorter list, or all but a few, so slices are compared first."""
    length = min(len(known), len(tokens))
    for back in range(0, min(length, 16) + 1):
        if known[: length - back] == tokens[: length - back]:
            return length - back
    return next(i for i, (a, b) in enumerate(zip(known, tokens, strict=False)) if a != b)


def combine(*constraints: Constraint | None) -> Constraint | None:
    """A constraint that allows the tokens that all of these allow; None if there is none."""
    given = tuple(constraint for constraint in constraints if constraint is not None)
    return None if not given else given[0] if len(given) == 1 else AllOf(given)


@dataclass(frozen=True, slots=True)
class AllOf:
    """Owner: one request."""

    constraints: tuple[Constraint, ...]

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> TokenMask | None:
        common: TokenMask | None = None
        for constraint in self.constraints:
            bits = constraint.allowed(output, drafts)
            if bits is not None:
                common = bits if common is None else intersect(common, bits)
        return common


class BoundedNumbers:
    """A grammar with at most LONGEST_NUMBER digits in a row; where the grammar allows only digits, the limit does not apply.
    Owner: one request."""

    def __init__(self, grammar: Constraint, *, token_bytes: Callable[[int], bytes], digits: TokenMask) -> None:
        self._grammar = grammar
        self._token_bytes = token_bytes
        self._digits = digits  # the tokens that begin with a digit
        self._digit_runs: PrefixStates[int] = PrefixStates(0, self._next)

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> TokenMask | None:
        bits = self._grammar.allowed(output, drafts)
        if bits is None or self._digit_runs.after(output, drafts) < LONGEST_NUMBER:
            return bits
        others = intersect(bits, ~self._digits)  # a grammar's mask may be a word longer than the vocabulary
        return others if others.any() else bits

    def _next(self, run: int, token: int) -> int:
        """How many digits the reply ends with."""
        text = self._token_bytes(token)
        tail = len(text) - len(text.rstrip(_DIGITS))
        return run + tail if tail == len(text) else tail
