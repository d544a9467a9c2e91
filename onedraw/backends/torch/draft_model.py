"""A smaller model as a drafter: it computes whatever the target computes, then runs ahead token by token.

In: after every turn, what was settled. Out: a chain of drafts per row. Its keys and values lie in pages numbered like the
target's, so a prefix hit or a preemption of the target is one of the draft model too. Where it runs ahead it writes past
the committed positions; the next turn writes there again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onedraw.backends.torch.inputs import Inputs, Shape, Span, lay_out
from onedraw.backends.torch.ranking import Ranker, room_ahead
from onedraw.backends.torch.stack import Stack
from onedraw.backends.torch.state import Sizes, State
from onedraw.types import Draft, Plan, Row, RowOutcome


@dataclass(slots=True)
class Runner:
    """One row running ahead. Owner: one call of `guess`."""

    index: int
    row: Row
    start: int  # position of the last chosen token
    room: int  # drafts it may have
    drafts: list[Draft]


class DraftModel:
    """Owner: the backend. Complete when constructed."""

    captures: tuple[int, ...] = ()

    def __init__(self, stack: Stack, *, shape: Shape, lanes: int, max_context: int, length: int) -> None:
        self._stack, self._shape, self._length, self._max_context = stack, shape.alone, length, max_context
        sizes = Sizes(pages=self._shape.scratch, page_size=shape.page_size)
        self._state = State(stack.spec.layers, sizes, dtype=stack.dtype, device=stack.device)
        self._ranker = Ranker(lanes)

    @property
    def name(self) -> str:
        return "model"

    @property
    def lookahead(self) -> int:
        return self._length + 1

    def open(self, rows: Sequence[Row]) -> None:
        self._state.open(rows)

    def guess(self, plan: Plan, inputs: Inputs, features: list[Tensor], rows: tuple[RowOutcome, ...]) -> list[tuple[Draft, ...]]:
        self._ranker.learn(plan, rows)
        runners, hidden, ends = self._follow(plan, rows)
        arm = self._ranker.choose_arm()
        running = runners
        while running:
            hidden = hidden.index_select(0, torch.tensor(self._padded(ends), dtype=torch.long, device=self._stack.device))
            ids, logits = self._ranker.best(self._stack.logits(hidden)[: len(running), : self._stack.spec.vocab])
            for runner, token_ids, values in zip(running, ids, logits, strict=True):
                position = runner.start + len(runner.drafts) + 1
                token, _ = self._ranker.rank(runner.row, token_ids, values, position=position, arm=arm)[0]
                runner.drafts.append(Draft(token, len(runner.drafts) - 1))
            running = [runner for runner in running if len(runner.drafts) < runner.room]
            if running:
                hidden, ends = self._step(running)
        guesses: list[tuple[Draft, ...]] = [()] * len(plan.rows)
        for runner in runners:
            guesses[runner.index] = tuple(runner.drafts)
            self._ranker.remember(runner.row, guesses[runner.index], arm)
        return guesses

    def _follow(self, plan: Plan, rows: tuple[RowOutcome, ...]) -> tuple[list[Runner], Tensor, list[int]]:
        """Compute what the turn settled and, where a row goes on, its last chosen token. Ends: where those stand."""
        tokens: list[int] = []
        spans: list[Span] = []
        runners: list[Runner] = []
        ends: list[int] = []
        for index, (row, outcome) in enumerate(zip(plan.rows, rows, strict=True)):
            part = [*row.tokens, *(row.drafts[i].token for i in outcome.kept)]
            runner = self._runner(index, row, outcome)
            if runner is not None:
                part.append(outcome.chosen[-1].token)
                runners.append(runner)
                ends.append(len(tokens) + len(part) - 1)
            spans.append(Span(len(tokens), len(part), row.start))
            tokens.extend(part)
        return runners, self._run(tokens, spans, [row.pages[:1] for row in plan.rows]), ends

    def _runner(self, index: int, row: Row, outcome: RowOutcome) -> Runner | None:
        limits = {"page_size": self._shape.page_size, "max_context": self._max_context}
        room = room_ahead(row, outcome, limit=self._length, **limits)
        return Runner(index, row, row.stop + len(outcome.kept), room, []) if room else None

    def _step(self, running: list[Runner]) -> tuple[Tensor, list[int]]:
        tokens = [runner.drafts[-1].token for runner in running]
        spans = [Span(i, 1, runner.start + len(runner.drafts)) for i, runner in enumerate(running)]
        return self._run(tokens, spans, [runner.row.pages[:1] for runner in running]), list(range(len(running)))

    def _run(self, tokens: list[int], spans: list[Span], pages: Sequence[tuple[Sequence[int], ...]]) -> Tensor:
        inputs = lay_out(tokens, spans, pages, shape=self._shape, device=self._stack.device)
        return self._stack.hidden(inputs, self._state)

    def _padded(self, rows: list[int]) -> list[int]:
        return [*rows, *rows[-1:] * (self._shape.rule.padded(len(rows)) - len(rows))]
