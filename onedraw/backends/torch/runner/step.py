"""One step of the model: lay out inputs, run the layers stage by stage, sample and verify, commit, draft.

In: a plan. Out: its outcome. The order of the phases is here, once; a `StepRunner` executes them, kernel by kernel
(`eager_runner.py`) or as captured CUDA graphs (`graph_runner.py`). A row is the work of one sequence in one step; a lane is the
slot of a sequence's state. A fault is a layer after which a token's numbers are not finite. Axes: T tokens, E hidden width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from onedraw.backends.sampled_rows import row_outcome
from onedraw.backends.torch.drafters.base import CompletedStep, Drafter
from onedraw.backends.torch.runner.inputs import Inputs, Span
from onedraw.backends.torch.runner.pipeline import LayerProbe, Pipeline, SameThread, StageStream
from onedraw.types import Logprobs, Outcome, Plan, RowOutcome, SampledToken

Laid = TypeVar("Laid")
Sampled = TypeVar("Sampled")


@dataclass(frozen=True, slots=True)
class Step:
    plan: Plan
    probe: LayerProbe
    rollback_start: int  # the step's first slot of the rollback buffer; steps in flight use separate slots


class StepResult(Protocol):
    """A step after its commit."""

    @property
    def plan(self) -> Plan: ...

    @property
    def inputs(self) -> Inputs: ...

    @property
    def hidden(self) -> Tensor:
        """Hidden states of the tokens after the last norm, [T, E]."""
        ...

    @property
    def features(self) -> list[Tensor]:
        """The residual stream after each layer that the step's probe names, [T, E] each."""
        ...

    @property
    def pending(self) -> bool:
        """Whether the device may still be computing the step. If so, drafts are made only when the outcome is collected."""
        ...

    def wait(self) -> None:
        """Wait until the samples are on the host."""
        ...

    def last_tokens(self) -> dict[int, int]:
        """Return the last token that was sampled in each lane. Call it after `wait`."""
        ...

    def rows(self) -> tuple[RowOutcome, ...]:
        """Samples, kept drafts and faults of every row. Call it after `wait`."""
        ...


class StepRunner(Protocol[Laid, Sampled]):
    @property
    def stages(self) -> int: ...

    def on_stage(self, number: int) -> AbstractContextManager[Any]:
        """A context in which a stage works: it holds the stage's lock, and makes its device the current one."""
        ...

    def lay_out(self, step: Step) -> Laid:
        """Lay out the step's inputs. A GraphRunner raises StagingBufferFull if they do not fit, before anything has been
        computed."""
        ...

    def run_layers(self, laid: Laid, number: int, before: StageStream | None) -> StageStream:
        """Run the layers of one stage. `before`: what the stage before it returned; None for the first stage."""
        ...

    def sample(self, laid: Laid, stream: StageStream) -> Sampled:
        """After the last stage, sample a token for every position that samples, and find which drafts are kept."""
        ...

    def commit(self, laid: Laid, sampled: Sampled) -> StepResult:
        """Make kept drafts part of the state, on every stage (`Ops.commit`), and return the result of the step."""
        ...


class StepExecutor:
    """Runs steps phase by phase. `lock`: that of the last stage, where drafters compute. Owner: the backend."""

    def __init__(self, drafter: Drafter | None, lock: AbstractContextManager[Any]) -> None:
        self._drafter, self._lock = drafter, lock

    @torch.inference_mode()
    def start(
        self, runner: StepRunner[Laid, Sampled], step: Step, threads: Pipeline | SameThread
    ) -> Future[Outcome | StepResult]:
        """Run a step. Returns its outcome, or a result that is still pending on the device."""
        laid = runner.lay_out(step)
        stream: StageStream | None = None
        seconds = 0.0  # time spent in stages, without waiting times between them

        def run_stage(number: int) -> Outcome | StepResult | None:
            nonlocal stream, seconds
            begin = time.perf_counter()
            with torch.inference_mode(), runner.on_stage(number):
                stream = runner.run_layers(laid, number, stream)
                if number == runner.stages - 1:
                    result = _sample_and_commit(runner, laid, stream)
                    if result.pending:
                        return result
                    seconds += time.perf_counter() - begin
                    return self.drafted(result, seconds)
            seconds += time.perf_counter() - begin
            return None

        return threads.start([partial(run_stage, number) for number in range(runner.stages)])

    @torch.inference_mode()
    def start_layers(self, runner: StepRunner[Laid, Sampled], step: Step) -> Callable[[], StepResult]:
        """Run the layers of all stages now; the function that is returned samples and commits. Used for a step whose tokens
        the host does not know yet, if sampling needs them on the host."""
        laid = runner.lay_out(step)
        stream: StageStream | None = None
        for number in range(runner.stages):
            with runner.on_stage(number):
                stream = runner.run_layers(laid, number, stream)
        assert stream is not None
        return partial(self._sample_late, runner, laid, stream)

    @torch.inference_mode()
    def _sample_late(self, runner: StepRunner[Laid, Sampled], laid: Laid, stream: StageStream) -> StepResult:
        with runner.on_stage(runner.stages - 1):
            return _sample_and_commit(runner, laid, stream)

    def drafted(self, result: StepResult, seconds: float) -> Outcome:
        """Return the outcome of a step that took `seconds`, with the drafter's drafts for the next step. Call it after `wait`."""
        rows = result.rows()
        if self._drafter is None:
            return Outcome(rows, seconds)
        begin = time.perf_counter()
        with self._lock:
            self._drafter.open(result.plan.rows)
            drafts = self._drafter.draft(CompletedStep(result.plan, result.inputs, result.hidden, result.features, rows))
        rows = tuple(replace(row, next_drafts=own) if own else row for row, own in zip(rows, drafts, strict=True))
        return Outcome(rows, seconds, time.perf_counter() - begin)


def _sample_and_commit(runner: StepRunner[Laid, Sampled], laid: Laid, stream: StageStream) -> StepResult:
    return runner.commit(laid, runner.sample(laid, stream))


# ------------------------------------------------------------------ verification on the host


def row_outcomes(
    plan: Plan,
    inputs: Inputs,
    sampled: Mapping[int, Sequence[SampledToken | None]],
    scored: Mapping[int, tuple[Logprobs, ...]],
    faults: Callable[[], Sequence[int]],
) -> tuple[RowOutcome, ...]:
    """The outcomes of all rows. `sampled`, `scored`: by row of the plan. `faults`: for each token the first layer after which it
    was not finite, else -1."""
    rows = tuple(row_outcome(row, sampled.get(i, []), scored.get(i, ())) for i, row in enumerate(plan.rows))
    if not any(row.no_token_left for row in rows):
        return rows
    found = faults()
    return tuple(
        replace(row, fault=fault_text(found, inputs.spans[i])) if row.no_token_left else row for i, row in enumerate(rows)
    )


def first_fault(finite: Sequence[Tensor]) -> Tensor:
    """For each token the first layer after which it is not finite, -1 where there is none: [T, 1]."""
    sound = torch.stack(list(finite)).to(torch.int64).cumprod(0).sum(0)
    return torch.where(sound == len(finite), -1, sound)[:, None]


def first_faults(probe: LayerProbe) -> list[int]:
    """The first fault of each token, on the host; empty if layers are not checked."""
    return [] if not probe.finite else first_fault([finite.cpu() for finite in probe.finite])[:, 0].tolist()


def fault_text(found: Sequence[int], span: Span) -> str:
    """A text that names the layer after which a row's numbers were not finite; empty if all were, or if layers are not
    checked."""
    layers = [layer for layer in found[span.first : span.first + span.count] if layer >= 0]
    return "" if not layers else f"layer {min(layers)} left the range of f16; run with --dtype and --activation-dtype bf16 or f32"
