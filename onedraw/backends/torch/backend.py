"""The torch backend: a plan in, an outcome out, on a CPU or a CUDA device.

In: a spec, a source of weights, sizes. Out: outcomes. inputs → stack → sampler → verification → commit; on families
without recurrent state a commit is nothing more than the engine forgetting the rejected positions.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from onedraw.backends.base import Capacity, Ticket
from onedraw.backends.outcome import row_outcome
from onedraw.backends.torch.inputs import Inputs, Shape, make_inputs
from onedraw.backends.torch.ops import Ops, TorchOps
from onedraw.backends.torch.sampler import Position, Sampler
from onedraw.backends.torch.selfcheck import SelfCheck, self_check
from onedraw.backends.torch.stack import Stack, WeightSource
from onedraw.backends.torch.state import State
from onedraw.models.spec import ModelSpec
from onedraw.sampling.verify import hypotheses
from onedraw.types import Choice, Logprobs, Outcome, Plan

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
LOGITS_BYTES = 256 * 2**20  # float32 logits held at once


class TorchBackend:
    """Complete when constructed: weights loaded, pages allocated, self-check done."""

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        *,
        dtype: str,
        device: str,
        lanes: int,
        pages: int,
        page_size: int,
        max_context: int,
        ops: Ops | None = None,
        check: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._device = torch.device(device)
        ops = ops or TorchOps(self._device)
        self._stack = Stack(
            spec,
            source,
            dtype=DTYPES[dtype],
            device=self._device,
            ops=ops,
            max_context=max_context,
            progress=progress,
        )
        self._state = State(spec, pages=pages, page_size=page_size, dtype=DTYPES[dtype], device=self._device)
        self._shape = Shape(page_size, self._state.scratch_page, ops.rule)
        self.report: SelfCheck | None = None
        if check:
            self.report = _checked(self._stack, self._state, self._shape)
            self._shape = replace(self._shape, rule=self.report.rule)
        self._sampler = Sampler(vocab=spec.vocab, lanes=lanes, device=self._device)
        self._slice = max(LOGITS_BYTES // (4 * spec.vocab), 1)
        self._capacity = Capacity(
            vocab=spec.vocab,
            max_context=max_context,
            lanes=lanes,
            pages=pages,
            page_size=page_size,
            device=ops.name,
            dtype=dtype,
        )
        self._tickets = itertools.count()
        self._outcomes: dict[Ticket, Outcome] = {}

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    def submit(self, plan: Plan) -> Ticket:
        ticket = Ticket(next(self._tickets))
        self._outcomes[ticket] = self._run(plan)
        return ticket

    def collect(self, ticket: Ticket) -> Outcome:
        return self._outcomes.pop(ticket)

    def close(self) -> None:
        self._outcomes.clear()

    # ------------------------------------------------------------------ one turn

    @torch.inference_mode()
    def _run(self, plan: Plan) -> Outcome:
        begin = time.perf_counter()
        inputs = make_inputs(plan, shape=self._shape, device=self._device)
        hidden = self._stack.hidden(inputs, self._state)
        scored = self._score(plan, inputs, hidden)
        chosen = self._choose(plan, inputs, hidden)
        rows = tuple(row_outcome(row, chosen.get(i, []), scored.get(i, ())) for i, row in enumerate(plan.rows))
        return Outcome(rows, time.perf_counter() - begin)

    def _logits(self, hidden: Tensor, tokens: list[int]) -> Tensor:
        """Logits of these tokens of the turn: [C', V'], the first C rows wanted."""
        padding = self._shape.rule.padded(len(tokens)) - len(tokens)
        index = torch.tensor([*tokens, *tokens[-1:] * padding], dtype=torch.long, device=self._device)
        return self._stack.logits(hidden.index_select(0, index))[: len(tokens)]

    def _choose(self, plan: Plan, inputs: Inputs, hidden: Tensor) -> dict[int, list[Choice | None]]:
        """Per choosing row, a choice after its last known token and after each draft."""
        tokens: list[int] = []
        owners: list[int] = []
        positions: list[Position] = []
        for i, (row, spot) in enumerate(zip(plan.rows, inputs.spots, strict=False)):  # padding has spots of its own
            if not row.chooses:
                continue
            for k, drafts in enumerate(hypotheses(row.drafts)):
                tokens.append(spot.first + len(row.tokens) - 1 + k)
                owners.append(i)
                positions.append(Position(row.lane, row.params, row.history, drafts, row.request_id))
        chosen: dict[int, list[Choice | None]] = {}
        for start in range(0, len(tokens), self._slice):
            stop = start + self._slice
            choices = self._sampler.choose(self._logits(hidden, tokens[start:stop]), positions[start:stop])
            for owner, choice in zip(owners[start:stop], choices, strict=True):
                chosen.setdefault(owner, []).append(choice)
        return chosen

    def _score(self, plan: Plan, inputs: Inputs, hidden: Tensor) -> dict[int, tuple[Logprobs, ...]]:
        """Per scoring row, the logprobs of the prompt tokens its positions predict."""
        scored: dict[int, tuple[Logprobs, ...]] = {}
        for i, (row, spot) in enumerate(zip(plan.rows, inputs.spots, strict=False)):  # padding has spots of its own
            if not row.scores:
                continue
            targets = row.history.prompt[row.start + 1 : row.stop + 1]
            found: list[Logprobs] = []
            step = min(self._slice, 64)
            for start in range(0, len(targets), step):
                part = targets[start : start + step]
                logits = self._logits(hidden, list(range(spot.first + start, spot.first + start + len(part))))
                found.extend(self._sampler.score(logits, part, row.params.prompt_logprobs or 0))
            scored[i] = tuple(found)
        return scored


@torch.inference_mode()
def _checked(stack: Stack, state: State, shape: Shape) -> SelfCheck:
    return self_check(stack, state, shape=shape)
