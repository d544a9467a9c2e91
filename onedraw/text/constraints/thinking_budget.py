"""Thinking budget: a constraint that ends reasoning after a number of tokens.

It allows every token until the limit is reached inside the reasoning. Then, at the next character boundary, it forces the tokens
of the closing text one after the other. Its state depends only on the reply and the drafts after it, so drafts cannot change
where the reasoning ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onedraw.text.constraints.base import PrefixStates
from onedraw.text.reasoning import InitialThinking, ReasoningState, ReasoningSyntax, advance, initial_state
from onedraw.types import TokenMask

NOT_CLOSING = -1  # value of BudgetState.closing while no closing text is forced


@dataclass(frozen=True, slots=True)
class BudgetState:
    reasoning: ReasoningState
    used: int = 0  # number of reasoning tokens so far
    closing: int = NOT_CLOSING  # index of the closing token that is forced next
    missing: int = 0  # bytes that the last, incomplete UTF-8 character still needs


class ThinkingBudget:
    """The constraint of one request. `closing` is the text that ends reasoning, as token ids."""

    def __init__(
        self,
        reasoning: ReasoningSyntax,
        *,
        limit: int,
        closing: Sequence[int],
        token_bytes: Callable[[int], bytes],
        thinking: InitialThinking,
    ) -> None:
        assert closing
        self._reasoning = reasoning
        self._limit = limit
        self._closing = tuple(closing)
        self._token_bytes = token_bytes
        self._masks = {token: single_token_mask(token) for token in closing}
        first = BudgetState(initial_state(reasoning, thinking))
        self._states = PrefixStates(self._close_if_spent(first), self._next)

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> TokenMask | None:
        index = self._states.after(output, drafts).closing
        return None if index == NOT_CLOSING else self._masks[self._closing[index]]

    def legal(self, output: Sequence[int]) -> int:
        self._states.after(output, ())
        forced = ((i, self._states.at(i).closing) for i in range(len(output)))
        wrong = (i for i, index in forced if index != NOT_CLOSING and output[i] != self._closing[index])
        return next(wrong, len(output))

    def _next(self, state: BudgetState, token: int) -> BudgetState:
        data = self._token_bytes(token)
        reasoning = advance(state.reasoning, data, self._reasoning)
        if state.closing == NOT_CLOSING:
            used = state.used + state.reasoning.reasoning
            return self._close_if_spent(BudgetState(reasoning, used, missing=missing_bytes(state.missing, data)))
        if state.closing + 1 < len(self._closing):
            return replace(state, reasoning=reasoning, closing=state.closing + 1)
        # The whole closing text was forced, so reasoning is over, whether or not `advance` found the end marker in it.
        if reasoning.reasoning:
            reasoning = ReasoningState("content", trim_left=True)
        return replace(state, reasoning=reasoning, closing=NOT_CLOSING)

    def _close_if_spent(self, state: BudgetState) -> BudgetState:
        spent = state.reasoning.reasoning and state.used >= self._limit and not state.missing
        return replace(state, closing=0) if spent else state


def missing_bytes(missing: int, data: bytes) -> int:
    """Return how many bytes the last UTF-8 character still needs after `data`, given that it needed `missing` before."""
    for byte in data:
        if missing and 0x80 <= byte < 0xC0:
            missing -= 1
        else:
            missing = 0 if byte < 0xC0 else 1 if byte < 0xE0 else 2 if byte < 0xF0 else 3
    return missing


def single_token_mask(token: int) -> TokenMask:
    bits = np.zeros(token // 32 + 1, dtype=np.uint32)
    bits[token // 32] = np.uint32(1 << (token % 32))
    return bits
