"""Drafters that run ahead of the target token by token: a smaller model (`SmallModel`), or the target's own MTP head (`MtpHead`).

In: after every step, its kept tokens. Out: a chain of drafts per row. Keys and values are in pages numbered like the target's,
so prefix cache hits and preemptions hold for the draft model too. Drafting writes past the committed positions; the
next step overwrites them. The target is the model that is drafted for; a row is the work of one sequence in one step. Axes: T
tokens, E hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from onedraw.backends.torch.drafters.base import CompletedStep, DraftedPosition, Ranker, drafting_sampler, room_ahead
from onedraw.backends.torch.model.layer import load_layer, rope_tables, run_layer
from onedraw.backends.torch.model.transformer import Transformer
from onedraw.backends.torch.model.weight_loader import WeightLoader
from onedraw.backends.torch.ops.base import PreparedInputs
from onedraw.backends.torch.runner.inputs import InputLayout, Inputs, Span, lay_out
from onedraw.backends.torch.state.model_state import ModelState, StateSizes
from onedraw.models.mtp import MtpSpec, MtpWeights
from onedraw.types import Draft, Row, RowOutcome


class DraftingModel(Protocol):
    """A model that drafts. `late`: at position t it reads token t + 1 and a hidden state of position t: the target's, or after
    the first draft its own."""

    @property
    def name(self) -> str: ...

    @property
    def late(self) -> bool: ...

    @property
    def transformer(self) -> Transformer:
        """The transformer on whose device it runs."""
        ...

    @property
    def state(self) -> ModelState: ...

    def run(self, inputs: Inputs, before: Tensor | None) -> Tensor:
        """Hidden states [T, E] of the tokens. `before` [T, E]: the hidden states that a late model reads, None for others."""
        ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class SmallModel:
    """Any model with the target's tokenizer."""

    name = "model"
    late = False

    def __init__(self, transformer: Transformer, *, layout: InputLayout) -> None:
        self.transformer = transformer
        sizes = StateSizes(pages=layout.alone.scratch, page_size=layout.page_size)
        self.state = transformer.state(sizes)

    def run(self, inputs: Inputs, before: Tensor | None) -> Tensor:
        return self.transformer.hidden(inputs, [self.state])

    def logits(self, hidden: Tensor) -> Tensor:
        return self.transformer.logits(hidden)


class MtpHead:
    """The MTP head of a checkpoint: one more attention layer that reads the target's hidden states (formula: `models/mtp.py`).
    Embedding and head are the target's. Owner: a DraftModel."""

    name = "mtp"
    late = True

    def __init__(self, spec: MtpSpec, weights: MtpWeights, *, target: Transformer, layout: InputLayout, max_context: int) -> None:
        self.transformer, self._spec = target, spec
        loader = WeightLoader(weights, ops=target.ops, dtype=target.dtype, device=target.device, norm=spec.norm)
        self._fc = loader.linear(None, "fc")
        self._embed_norm, self._hidden_norm = loader.norm(None, "embed_norm"), loader.norm(None, "hidden_norm")
        self._norm = loader.norm(None, "norm")
        self._layer = load_layer(0, spec.layer, loader, target.ops, spec.eps)
        sizes = StateSizes(pages=layout.alone.scratch, page_size=layout.page_size)
        self.state = ModelState(spec.layers, sizes, dtype=target.dtype, device=target.device)
        self._ropes = rope_tables(spec.layers, max(max_context, 64) + 1, dtype=target.dtype, device=target.device)

    def run(self, inputs: Inputs, before: Tensor | None) -> Tensor:
        assert before is not None
        ops, eps = self.transformer.ops, self._spec.eps
        embedded = ops.rms_norm(self.transformer.embed(inputs.tokens).to(before.dtype), self._embed_norm, eps)
        joined = torch.cat([embedded, ops.rms_norm(before, self._hidden_norm, eps)], dim=1)  # [T, 2 * E]
        prepared = PreparedInputs(ops, inputs, self._ropes)
        x = run_layer(self._fc(joined), self._layer, ops=ops, store=self.state.stores[0], prepared=prepared, eps=eps)
        return ops.rms_norm(x, self._norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.transformer.logits(hidden)


@dataclass(slots=True)
class DraftingRow:
    """One row while it drafts. Owner: one call of `draft`."""

    index: int
    row: Row
    sampled: tuple[int, ...]  # the tokens that the row sampled
    start: int  # position of the last sampled token
    room: int  # the most drafts that the row may carry
    drafts: list[Draft]


class DraftModel:
    """Drafts token by token with a DraftingModel. Its weights are loaded when it is constructed. Owner: the backend."""

    feature_layers: tuple[int, ...] = ()

    def __init__(self, model: DraftingModel, *, layout: InputLayout, lanes: int, max_context: int, length: int) -> None:
        self._model, self._layout, self._length, self._max_context = model, layout.alone, length, max_context
        self._device, self._vocab = model.transformer.device, model.transformer.spec.vocab
        self._ranker = Ranker(lanes, *drafting_sampler(model.transformer, lanes))

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
        found: list[tuple[Draft, ...]] = [()] * len(step.rows)
        runners, hidden, ends = self._follow(step)
        arm = self._ranker.choose_arm()
        running = runners
        while running:
            hidden = hidden.index_select(0, torch.tensor(self._padded(ends), dtype=torch.long, device=self._device))
            logits = self._model.logits(hidden)[: len(running), : self._vocab].float()
            positions = [DraftedPosition(r.row, (*r.sampled, *(draft.token for draft in r.drafts)), 1) for r in running]
            best = self._ranker.best(logits, positions, arm=arm)
            for runner, token in zip(running, best, strict=True):
                if token >= 0:  # a negative token: the logits were not finite, so drafting ends
                    runner.drafts.append(Draft(token, len(runner.drafts) - 1))
            going = [i for i, r in enumerate(running) if best[i] >= 0 and len(r.drafts) < r.room]
            running = [running[i] for i in going]
            if running:
                hidden, ends = self._step(running, hidden, going)
        for runner in runners:
            found[runner.index] = tuple(runner.drafts)
            self._ranker.remember(runner.row, found[runner.index], arm)
        return found

    def _follow(self, step: CompletedStep) -> tuple[list[DraftingRow], Tensor, list[int]]:
        """Run the model over the committed tokens of the step and, for rows that draft next, over their last sampled token.
        Return the rows that draft, the hidden states, and for each of these rows the index of its last token.

        A late model computes position t from token t + 1. So its input for every row is the committed tokens but the first, and
        then the token that follows them: the sampled one, or in the middle of a prompt the next one of the prompt.
        """
        late = self._model.late
        tokens: list[int] = []
        sources: list[int] = []  # for a late model (`DraftingModel.late`), the tokens of the step whose hidden states it reads
        spans: list[Span] = []
        runners: list[DraftingRow] = []
        ends: list[int] = []
        for index, (row, span, outcome) in enumerate(zip(step.plan.rows, step.inputs.spans, step.rows, strict=False)):
            committed = [*row.tokens, *(row.drafts[i].token for i in outcome.kept)]
            runner = self._runner(index, row, outcome)
            if late and not committed:  # the row only restored a checkpoint, which has no hidden states
                runner = None
            after = [outcome.sampled[-1].token] if outcome.sampled else row.history.slice(row.stop, row.stop + 1)
            if late:
                places = [*range(len(row.tokens)), *(len(row.tokens) + i for i in outcome.kept)]
                part = [*committed[1:], *after][: len(committed)]
                sources += (span.first + place for place in places[: len(part)])
            else:
                part = [*committed, *(after if runner is not None else ())]
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
        sampled = tuple(choice.token for choice in outcome.sampled)
        return DraftingRow(index, row, sampled, row.stop + len(outcome.kept), room, []) if room else None

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
