"""Steps launched kernel by kernel: prompts, checkpoints, and devices whose operations cannot be captured.

In: a step. Out: its result, on the host. If only some stages can be captured, they replay graphs of their layers in decode steps
(`GraphStage.advance`), and sampling and commit are launched kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from onedraw.backends.torch.model.transformer import Transformer
from onedraw.backends.torch.ops.base import HostCommit
from onedraw.backends.torch.runner.graph_runner import GraphStage
from onedraw.backends.torch.runner.inputs import Bucket, InputLayout, Inputs, bucket_of, make_inputs
from onedraw.backends.torch.runner.pipeline import Stage, StageStream, current_device
from onedraw.backends.torch.runner.staging_buffers import StagingBufferFull
from onedraw.backends.torch.runner.step import Step, first_faults, row_outcomes
from onedraw.backends.torch.sampling.positions import PositionSampler
from onedraw.backends.torch.state.model_state import ModelState, StageState
from onedraw.sampling.law import NO_TOKEN
from onedraw.types import Plan, RowOutcome


@dataclass(frozen=True, slots=True)
class EagerInputs:
    step: Step
    inputs: Inputs
    bucket: Bucket | None  # the shape to which captured stages pad the step; None if no stage replays a graph in this step


@dataclass(frozen=True, slots=True)
class EagerResult:
    plan: Plan
    inputs: Inputs
    hidden: Tensor
    features: list[Tensor]
    outcomes: tuple[RowOutcome, ...]

    @property
    def pending(self) -> bool:
        return False

    def wait(self) -> None:
        """No-op: the samples are on the host already."""

    def last_tokens(self) -> dict[int, int]:
        rows = zip(self.plan.rows, self.outcomes, strict=True)
        return {row.lane: outcome.sampled[-1].token if outcome.sampled else NO_TOKEN for row, outcome in rows}

    def rows(self) -> tuple[RowOutcome, ...]:
        return self.outcomes


class EagerRunner:
    """Runs steps kernel by kernel. `graph_stages`: the captured layers of each stage; None for a stage without, and for all
    stages if all can be captured, since a GraphRunner then runs decode steps. Owner: the backend."""

    def __init__(
        self,
        model: Transformer,
        states: Sequence[StageState],
        sampler: PositionSampler,
        layout: InputLayout,
        *,
        locks: Sequence[AbstractContextManager[Any]],
        graph_stages: Sequence[GraphStage | None],
    ) -> None:
        self._model, self._states, self.sampler, self._layout = model, states, sampler, layout
        self._locks, self._graph_stages = locks, graph_stages
        self._first: torch.device = model.embed_device

    @property
    def stages(self) -> int:
        return len(self._states)

    @contextmanager
    def on_stage(self, number: int) -> Iterator[None]:
        with self._locks[number], current_device(self._model.stages[number].device):
            yield

    def lay_out(self, step: Step) -> EagerInputs:
        inputs = make_inputs(step.plan, layout=replace(self._layout, held=step.rollback_start), device=self._first)
        replays = any(self._graph_stages) and step.probe.finite is None
        return EagerInputs(step, inputs, bucket_of(step.plan, recurrent=self._model.spec.recurrent) if replays else None)

    def run_layers(self, laid: EagerInputs, number: int, before: StageStream | None) -> StageStream:
        step, state, graph_stage = laid.step, self._states[number], self._graph_stages[number]
        state.open(step.plan.rows)
        if graph_stage is not None and laid.bucket is not None:
            with suppress(StagingBufferFull):
                layout = replace(self._layout, held=step.rollback_start)
                return graph_stage.advance(before, step.plan, laid.bucket, layout, step.probe)
        stream = self._model.enter(laid.inputs) if before is None else before
        return self._model.advance(stream, number, laid.inputs, state, probe=step.probe)

    def sample(self, laid: EagerInputs, stream: StageStream) -> EagerResult:
        hidden, plan, inputs, probe = self._model.leave(stream), laid.step.plan, laid.inputs, laid.step.probe
        scored = self.sampler.score(plan, inputs, hidden)
        sampled = self.sampler.sample(plan, inputs, hidden)
        outcomes = row_outcomes(plan, inputs, sampled, scored, lambda: first_faults(probe))
        return EagerResult(plan, inputs, hidden, probe.features, outcomes)

    def commit(self, laid: EagerInputs, sampled: EagerResult) -> EagerResult:
        drafts = HostCommit.of(sampled.plan.rows, [row.kept for row in sampled.outcomes], laid.step.rollback_start)
        for state, stage in zip(self._states, self._model.stages, strict=True):
            if isinstance(stage, Stage):
                assert isinstance(state, ModelState)
                stage.commit(state, drafts)
            else:
                stage.commit(drafts)
        return sampled
