"""A model that runs ahead of the target token by token: a smaller one, or the target's own MTP head.

In: after every turn, what was settled. Out: a chain of drafts per row. Its keys and values lie in pages numbered like the
target's, so a prefix hit or a preemption of the target is one of the draft model too. Where it runs ahead it writes past
the committed positions; the next turn writes there again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from onedraw.backends.torch.drafters.base import CompletedStep, Ranker, room_ahead
from onedraw.backends.torch.model.transformer import Transformer
from onedraw.backends.torch.runner.inputs import InputLayout, Inputs, Span, lay_out
from onedraw.backends.torch.state.model_state import ModelState, StateSizes
from onedraw.types import Draft, Row, RowOutcome


class DraftingModel(Protocol):
    """What runs ahead. `late`: at position t it reads token t + 1 and what the model before it gave at t."""

    @property
    def name(self) -> str: ...

    @property
    def late(self) -> bool: ...

    @property
    def transformer(self) -> Transformer:
        """Whose device it runs on."""
        ...

    @property
    def state(self) -> ModelState: ...

    def run(self, inputs: Inputs, before: Tensor | None) -> Tensor:
        """[T, E]; before [T, E] where late."""
        ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class SmallModel:
    """Any model with the target's tokenizer."""

    name = "model"
    late = False

    def __init__(self, transformer: Transformer, *, layout: InputLayout) -> None:
        self.transformer = transformer
        sizes = StateSizes(pages=layout.alone.scratch, page_size=layout.page_size)
        [self.state] = transformer.states(sizes)

    def run(self, inputs: Inputs, before: Tensor | None) -> Tensor:
        return self.transformer.hidden(inputs, [self.state])

    def logits(self, hidden: Tensor) -> Tensor:
        return self.transformer.logits(hidden)


@dataclass(slots=True)
class DraftingRow:
    """One row running ahead. Owner: one call of `guess`."""

    index: int
    row: Row
    start: int  # position of the last chosen token
    room: int  # drafts it may have
    drafts: list[Draft]


class DraftModel:
    """Owner: the backend. Complete when constructed."""

    feature_layers: tuple[int, ...] = ()

    def __init__(self, model: DraftingModel, *, layout: InputLayout, lanes: int, max_context: int, length: int) -> None:
        self._model, self._layout, self._length, self._max_context = model, layout.alone, length, max_context
        self._device, self._vocab = model.transformer.device, model.transformer.spec.vocab
        self._ranker = Ranker(lanes)

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def lookahead(self) -> int:
        return self._length + 1

    @property
    def state(self) -> ModelState:
        return self._model.state

    def open(self, rows: Sequence[Row]) -> None:
        self._model.state.open(rows)

    def draft(self, step: CompletedStep) -> list[tuple[Draft, ...]]:
        self._ranker.learn(step.plan, step.rows)
        guesses: list[tuple[Draft, ...]] = [()] * len(step.rows)
        runners, hidden, ends = self._follow(step)
        arm = self._ranker.choose_arm()
        running = runners
        while running:
            hidden = hidden.index_select(0, torch.tensor(self._padded(ends), dtype=torch.long, device=self._device))
            ids, logits = self._ranker.best(self._model.logits(hidden)[: len(running), : self._vocab])
            for runner, token_ids, values in zip(running, ids, logits, strict=True):
                position = runner.start + len(runner.drafts) + 1
                token, _ = self._ranker.rank(runner.row, token_ids, values, position=position, arm=arm)[0]
                runner.drafts.append(Draft(token, len(runner.drafts) - 1))
            going = [i for i, runner in enumerate(running) if len(runner.drafts) < runner.room]
            running = [running[i] for i in going]
            if running:
                hidden, ends = self._step(running, hidden, going)
        for runner in runners:
            guesses[runner.index] = tuple(runner.drafts)
            self._ranker.remember(runner.row, guesses[runner.index], arm)
        return guesses

    def _follow(self, step: CompletedStep) -> tuple[list[DraftingRow], Tensor, list[int]]:
        """Compute what the turn settled and, where a row goes on, its last chosen token. Ends: where those stand.

        A late model computes position t from token t + 1, so its tokens are the settled ones but the first, and then the
        one behind them, which is chosen or known.
        """
        late = self._model.late
        tokens: list[int] = []
        sources: list[int] = []  # tokens of the turn, for a late model
        spans: list[Span] = []
        runners: list[DraftingRow] = []
        ends: list[int] = []
        for index, (row, span, outcome) in enumerate(zip(step.plan.rows, step.inputs.spans, step.rows, strict=False)):
            settled = [*row.tokens, *(row.drafts[i].token for i in outcome.kept)]
            runner = self._runner(index, row, outcome)
            if late and not settled:  # came whole from a checkpoint, which has no hidden state to go on from
                runner = None
            behind = [outcome.sampled[-1].token] if outcome.sampled else row.history.slice(row.stop, row.stop + 1)
            if late:
                places = [*range(len(row.tokens)), *(len(row.tokens) + i for i in outcome.kept)]
                part = [*settled[1:], *behind][: len(settled)]
                sources += (span.first + place for place in places[: len(part)])
            else:
                part = [*settled, *(behind if runner is not None else ())]
            if runner is not None:
                runners.append(runner)
                ends.append(len(tokens) + len(part) - 1)
            spans.append(Span(len(tokens), len(part), row.start))
            tokens += part
        if not tokens:
            return [], step.hidden[:0], []
        before = step.hidden.index_select(0, self._index(sources)) if late else None
        return runners, self._run(tokens, spans, [row.pages[:1] for row in step.plan.rows], before), ends

    def _runner(self, index: int, row: Row, outcome: RowOutcome) -> DraftingRow | None:
        limits = {"page_size": self._layout.page_size, "max_context": self._max_context}
        room = room_ahead(row, outcome, limit=self._length, **limits)
        return DraftingRow(index, row, row.stop + len(outcome.kept), room, []) if room else None

    def _step(self, running: list[DraftingRow], hidden: Tensor, going: list[int]) -> tuple[Tensor, list[int]]:
        tokens = [runner.drafts[-1].token for runner in running]
        back = 1 if self._model.late else 0
        spans = [Span(i, 1, runner.start + len(runner.drafts) - back) for i, runner in enumerate(running)]
        before = hidden.index_select(0, self._index(going)) if self._model.late else None
        return self._run(tokens, spans, [runner.row.pages[:1] for runner in running], before), list(range(len(running)))

    def _run(
        self, tokens: list[int], spans: list[Span], pages: Sequence[tuple[Sequence[int], ...]], before: Tensor | None
    ) -> Tensor:
        return self._model.run(lay_out(tokens, spans, pages, layout=self._layout, device=self._device), before)

    def _index(self, rows: list[int]) -> Tensor:
        return torch.tensor(self._padded(rows), dtype=torch.long, device=self._device)

    def _padded(self, rows: list[int]) -> list[int]:
        return [*rows, *rows[-1:] * (self._layout.rule.padded(len(rows)) - len(rows))]
