"""A state after every token of a reply, walked once: what constraints stand on.

In: a first state and a step (state, token) → state. Out: the state after any output and any drafts behind it. The last
walk is remembered, so going on by a token costs one step, and another branch of a draft tree or a rejected draft costs
the steps from where it parts. The answer is that of a walk from the start: a pure function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

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
