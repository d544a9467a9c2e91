"""The torch backend: a plan in, an outcome out, on a CPU or a CUDA device.

In: a spec, a source of weights, sizes, perhaps a drafter. Out: outcomes. inputs → model → sampler → verification →
commit → guesses. A commit brings kept drafts home: a tree's path to its positions, a state's steps to its lane; the
rejected rest is never read again. Where stages have threads of their own several plans are under way, each in one stage
at a time, and the last stage's thread chooses, commits and guesses. Turns that repeat are recorded where all devices can
(`steady.py`): `submit` starts such a turn on every stage and does not wait for it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from onedraw.backends.base import Capacity, PageGroup, StepHandle
from onedraw.backends.placement import MIN_STAGING_ROWS, max_step_tokens
from onedraw.backends.precision import kv_precision
from onedraw.backends.sampled_rows import read_samples, row_outcome
from onedraw.backends.torch.device import DTYPES, hardware_name
from onedraw.backends.torch.drafters.base import CompletedStep, Drafter
from onedraw.backends.torch.model.transformer import LayerProbe, ResidualStream, Transformer
from onedraw.backends.torch.model.weight_loader import LANE, padded
from onedraw.backends.torch.ops.base import HostCommit, Ops
from onedraw.backends.torch.ops.plain.linear import strictest
from onedraw.backends.torch.ops.plain.ops import TorchOps
from onedraw.backends.torch.runner.cuda_graphs import GraphCache, graph_caches
from onedraw.backends.torch.runner.graph_runner import STEPS, GraphRunner, bucket_of, fault_text, first_faults
from onedraw.backends.torch.runner.graph_segment import GraphStage
from onedraw.backends.torch.runner.in_flight import InFlightSteps, StartedStep
from onedraw.backends.torch.runner.inputs import Bucket, InputLayout, Inputs, make_inputs
from onedraw.backends.torch.runner.pipeline import Pipeline, SameThread, device_locks
from onedraw.backends.torch.runner.stage_boundary import current_device
from onedraw.backends.torch.runner.stages import StageDevice
from onedraw.backends.torch.runner.staging_buffers import StagingBufferFull
from onedraw.backends.torch.sampling.positions import PositionSampler
from onedraw.backends.torch.sampling.sampler import Sampler
from onedraw.backends.torch.selfcheck import RowCheck, self_check
from onedraw.backends.torch.state.kv_pages import KV_DTYPES
from onedraw.backends.torch.state.model_state import CheckpointLogits, StateSizes
from onedraw.backends.torch.state.recurrent_spans import CHUNK
from onedraw.backends.torch.state.snapshots import Snapshots
from onedraw.models.source import WeightSource
from onedraw.models.spec import ModelSpec
from onedraw.types import Logprobs, Outcome, Plan, RowOutcome, SampledToken

GPU_ROWS = 64  # rows of one token that a GPU computes in about the time of one


@dataclass(slots=True)
class Turn:
    """A plan on its way. Owner: the stage it is in."""

    plan: Plan
    inputs: Inputs
    watch: LayerProbe
    held: int  # its first place in the rollback buffer
    bucket: Bucket | None = None  # what stages that record pad it to, beside others that do not
    stream: ResidualStream | None = None  # once it has entered
    seconds: float = 0.0  # in stages, not between them


class TorchBackend:
    """Complete when constructed: weights loaded, pages allocated, self-check done."""

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        *,
        dtype: str,
        device: str = "cpu",
        lanes: int,
        pages: int | tuple[int, ...],
        page_size: int,
        max_context: int,
        drafts: int = 0,
        checkpoints: int = 0,
        ops: Ops | None = None,
        stage_devices: Sequence[StageDevice] = (),
        activation: str | None = None,
        kv_dtype: str | None = None,
        rows: int = MIN_STAGING_ROWS,
        check: bool = True,
        pipeline: Pipeline | None = None,
        max_in_flight: int = 1,
        make_drafter: Callable[[Transformer, Sampler, InputLayout], Drafter] | None = None,
        progress: Callable[[int, int], None] | None = None,
        recorder: GraphCache | None = None,
        ahead: bool | None = None,
    ) -> None:
        assert max_in_flight == 1 or pipeline is not None, "stages that work at once have threads of their own"
        stage_devices = stage_devices or [StageDevice(torch.device(device), ops or TorchOps(torch.device(device)))]
        self.model = Transformer(
            spec,
            source,
            dtype=DTYPES[dtype],
            activation=DTYPES[activation or dtype],
            stage_devices=stage_devices,
            rows=rows,
            max_context=max_context,
            progress=progress,
        )
        self._first, self._device = stage_devices[0].device, self.model.device
        sizes = StateSizes(
            pages=(pages,) * len(spec.windows) if isinstance(pages, int) else pages,
            page_size=page_size,
            windows=spec.windows,
            lanes=lanes,
            drafts=drafts if spec.recurrent else 0,
            checkpoints=checkpoints,
        )
        kept_as = kv_precision(kv_dtype or "auto", products=dtype)
        self.states = self.model.states(sizes, KV_DTYPES[kept_as])
        self._kept = CheckpointLogits(checkpoints, padded(spec.vocab, LANE), self._device)
        layout = InputLayout(
            page_size, sizes.pages, strictest([stage_device.ops.rule for stage_device in stage_devices]), spec.windows
        )
        self.report: RowCheck | None = self_check(self.model, self.states, layout=layout) if check else None
        self.layout = layout if self.report is None else replace(layout, rule=self.report.rule)
        self._sampler = stage_devices[-1].ops.sampler(vocab=spec.vocab, lanes=lanes, device=self._device)
        with current_device(self._device):
            self._drafter = None if make_drafter is None else make_drafter(self.model, self._sampler, self.layout)
        self._picker = PositionSampler(self.model, self._sampler, self._kept, self.layout.rule)
        drafted = None if self._drafter is None else self._drafter.state
        self._snapshots = Snapshots(self.states, drafted, self._kept, self.model.dtype)
        self._locks = (
            device_locks([stage_device.device for stage_device in stage_devices])
            if pipeline is not None
            else [nullcontext() for _ in stage_devices]
        )
        self._parts, self._steady = self._recorded(
            graph_caches(stage_devices, recorder), lanes=lanes, max_in_flight=max_in_flight
        )
        # A drafter looks at what a turn left before the next one runs, and a thread of its own would read histories late.
        waits = self._drafter is not None or max_in_flight > 1 or pipeline is not None
        self._capacity = _capacity(
            spec,
            sizes,
            stage_devices,
            self._drafter,
            max_context=max_context,
            rows=rows,
            max_in_flight=max_in_flight,
            starts=STEPS[-1] if self._steady is not None and self._device.type == "cuda" else 0,
            ahead=not waits and (self._keeps_tokens if ahead is None else ahead),
            dtype=dtype,
            activation=activation or dtype,
            kv_dtype=kept_as,
        )
        self._under_way = InFlightSteps(berths=max_in_flight)
        self._back = 0.0  # when the last steady turn was collected
        self._pipeline: Pipeline | SameThread = SameThread() if pipeline is None else pipeline
        self._hang_up = None
        if pipeline is not None:
            self._hang_up = weakref.finalize(self, pipeline.close)
            self._hang_up.atexit = False  # a stage that computes while the program ends is not waited for

    def _recorded(
        self, recorders: Sequence[GraphCache | None], *, lanes: int, max_in_flight: int
    ) -> tuple[list[GraphStage | None], GraphRunner | None]:
        """The parts of stages that record, beside others that do not; where all do, the parts belong to the steady turns."""
        parts = [
            None
            if recorder is None
            else GraphStage(self.model, i, state, recorder, tokens=STEPS[-1], lock=self._locks[i], sides=max_in_flight + 1)
            for i, (state, recorder) in enumerate(zip(self.states, recorders, strict=True))
        ]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts):
            return parts, None
        return [None] * len(parts), GraphRunner(
            self.model, found, self._sampler, self.layout, lanes=lanes, max_in_flight=max_in_flight
        )

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    @torch.inference_mode()
    def rehearse(self, tell: Callable[[str], None], *, drafts: int = 0) -> None:
        """Record turns that will come, where turns are recorded; rows may have so many drafts. Before the first request."""
        if self._steady is not None:
            capacity = self._capacity
            limits = (drafts, capacity.max_drafts, capacity.draft_positions)
            most = min(limit for limit in limits if limit is not None)
            with current_device(self._device):
                self._steady.rehearse(capacity.lanes, most, self._watch(), tell)

    def submit(self, plan: Plan) -> StepHandle:
        awaits = any(row.awaits_token for row in plan.rows)
        bucket = None if self._steady is None else self._steady.serves(plan)
        if awaits and bucket is not None and not (self._keeps_tokens and isinstance(self._under_way.latest.turn, StartedStep)):
            plan = self._under_way.heard(plan)
        berth = None if awaits else self._under_way.take_berth()  # who awaits a token has no drafts to find a place for
        try:
            turn: StartedStep | Future[Outcome] | None = None if bucket is None else self._begin(plan, bucket, berth=berth or 0)
            if turn is None:
                plan = self._under_way.heard(plan) if awaits else plan
                turn = self._board(plan, berth=berth or 0)
        except BaseException:  # a plan that did not get under way holds none
            self._under_way.give_berth_back(berth)
            raise
        return self._under_way.enter(plan, turn, berth)

    def collect(self, ticket: StepHandle) -> Outcome:
        boarded = self._under_way.leave(ticket)
        try:
            return self._arrive(boarded.turn) if isinstance(boarded.turn, StartedStep) else boarded.turn.result()
        finally:
            self._under_way.give_berth_back(boarded.berth)

    @property
    def _keeps_tokens(self) -> bool:
        """Steady turns find their tokens on the device. Layers with inputs of their own look them up on the host."""
        return self._steady is not None and not self.model.spec.inputs

    def close(self) -> None:
        """Let go of weights and pages now, whoever still holds this object."""
        if self._hang_up is not None:
            self._hang_up()
        self._under_way.plans.clear()
        for name in ("model", "states", "_sampler", "_drafter", "_steady", "_parts", "_picker", "_snapshots"):
            self.__dict__.pop(name, None)

    # ------------------------------------------------------------------ to and from the disk

    @property
    def identity(self) -> str:
        """What computes the bits: operations, hardware, library and how rows are offered to it; not the split."""
        stages = self.model.stages
        parts = sorted({f"{stage.ops.name} on {hardware_name(stage.device)}" for stage in stages})
        choices = sorted({text for stage in stages for text in stage.ops.choices.texts()})
        return f"{', '.join(parts)}; torch {torch.__version__}; {self.layout.rule}; {choices}"

    def export(self, slot: int, pages: Sequence[Sequence[int]]) -> dict[str, npt.NDArray[Any]]:
        return self._snapshots.export(slot, pages)

    def adopt(self, slot: int | None, places: Sequence[Mapping[int, int]], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self._snapshots.adopt(slot, places, arrays)

    # ------------------------------------------------------------------ one turn

    def _held(self, berth: int) -> int:
        """Plans under way at once have places of their own in the rollback buffer; this is the first."""
        return berth * (self._capacity.draft_positions or 0)

    def _board(self, plan: Plan, *, berth: int) -> Future[Outcome]:
        """A turn that goes kernel by kernel: through all stages now, or on their threads."""
        held = self._held(berth)
        inputs, watch = make_inputs(plan, layout=replace(self.layout, held=held), device=self._first), self._watch()
        records = any(self._parts) and watch.finite is None
        turn = Turn(plan, inputs, watch, held, bucket_of(plan, recurrent=self._capacity.recurrent) if records else None)
        steps = [partial(self._step, turn, number) for number in range(len(self.states))]
        return self._pipeline.start(steps)

    def _watch(self) -> LayerProbe:
        return LayerProbe(() if self._drafter is None else self._drafter.captures, finite=self._narrow())

    @torch.inference_mode()
    def _begin(self, plan: Plan, bucket: Bucket, *, berth: int) -> StartedStep | None:
        """A steady turn, begun in all stages and not waited for; None where it brings too much."""
        begin = time.perf_counter()
        assert self._steady is not None
        with current_device(self._device):
            steady = self._steady.begin(plan, bucket, self._watch(), held=self._held(berth))
        return None if steady is None else StartedStep(plan, steady, begin)

    @torch.inference_mode()
    def _arrive(self, started: StartedStep) -> Outcome:
        """What a steady turn chose; what it kept is home already."""
        plan, steady, worked = started.plan, started.steady, started.steady.worked
        steady.wait()
        begin, self._back = max(started.begin, self._back), time.perf_counter()
        choices = iter(read_samples(steady.answers.numpy(), steady.positions))
        chosen = {i: [next(choices) for _ in range(1 + len(row.drafts))] for i, row in enumerate(plan.rows)}
        turn = Turn(plan, steady.inputs, worked.watch, held=0)
        with current_device(self._device):
            rows = self._conclude(turn, worked.hidden, chosen, {}, faults=steady.faults)
        return Outcome(rows, time.perf_counter() - begin)

    @torch.inference_mode()
    def _step(self, turn: Turn, number: int) -> Outcome | None:
        """A plan through one stage, on that stage's thread where it has one; through the last: what became of it."""
        begin = time.perf_counter()
        with self._locks[number], current_device(self.model.stages[number].device):
            self.states[number].open(turn.plan.rows)
            turn.stream = self._advance(turn, number)
            rows = self._finish(turn, self.model.leave(turn.stream)) if number == len(self.states) - 1 else None
        turn.seconds += time.perf_counter() - begin
        return None if rows is None else Outcome(rows, turn.seconds)

    def _advance(self, turn: Turn, number: int) -> ResidualStream:
        part = self._parts[number]
        if part is not None and turn.bucket is not None:
            with suppress(StagingBufferFull):
                return part.advance(turn.stream, turn.plan, turn.bucket, replace(self.layout, held=turn.held), turn.watch)
        stream = self.model.enter(turn.inputs) if turn.stream is None else turn.stream
        return self.model.advance(stream, number, turn.inputs, self.states[number], watch=turn.watch)

    def _finish(self, turn: Turn, hidden: Tensor) -> tuple[RowOutcome, ...]:
        """Choose, commit what was kept on every stage, guess on."""
        scored = self._picker.score(turn.plan, turn.inputs, hidden)
        return self._conclude(turn, hidden, self._picker.choose(turn.plan, turn.inputs, hidden), scored)

    def _conclude(
        self,
        turn: Turn,
        hidden: Tensor,
        chosen: Mapping[int, Sequence[SampledToken | None]],
        scored: Mapping[int, tuple[Logprobs, ...]],
        *,
        faults: Sequence[int] | None = None,
    ) -> tuple[RowOutcome, ...]:
        """`faults`: of a steady turn, which has brought home what it kept, the first layer of each token that was not finite."""
        plan, inputs, watch = turn.plan, turn.inputs, turn.watch
        rows = tuple(row_outcome(row, chosen.get(i, []), scored.get(i, ())) for i, row in enumerate(plan.rows))
        if any(row.no_token_left for row in rows):
            found = first_faults(watch) if faults is None else faults
            rows = tuple(
                replace(row, fault=fault_text(found, inputs.spans[i])) if row.no_token_left else row for i, row in enumerate(rows)
            )
        if faults is None:
            for state, stage in zip(self.states, self.model.stages, strict=True):
                with current_device(stage.device):
                    stage.ops.commit(state, HostCommit(plan.rows, [row.kept for row in rows], turn.held))
        if self._drafter is not None:
            with self._locks[-1]:
                self._drafter.open(plan.rows)
                guesses = self._drafter.guess(CompletedStep(plan, inputs, hidden, watch.features, rows))
            rows = tuple(replace(row, next_drafts=own) for row, own in zip(rows, guesses, strict=True))
        return rows

    def _narrow(self) -> list[Tensor] | None:
        """Models trained in bf16 may leave the range of f16, so where there is any every layer is looked at."""
        return [] if torch.float16 in (self.model.dtype, self.model.activation) else None


def _capacity(
    spec: ModelSpec,
    sizes: StateSizes,
    stage_devices: Sequence[StageDevice],
    drafter: Drafter | None,
    *,
    max_context: int,
    rows: int,
    max_in_flight: int,
    starts: int,
    ahead: bool,
    dtype: str,
    activation: str,
    kv_dtype: str,
) -> Capacity:
    return Capacity(
        vocab=spec.vocab,
        max_context=max_context,
        lanes=sizes.lanes,
        groups=tuple(PageGroup(count, window) for count, window in zip(sizes.pages, sizes.windows, strict=True)),
        page_size=sizes.page_size,
        checkpoints=sizes.checkpoints,
        chunk=CHUNK if spec.recurrent else 1,
        recurrent=spec.recurrent,
        draft_positions=sizes.drafts // max_in_flight if spec.recurrent else None,
        stages=len(stage_devices),
        max_in_flight=max_in_flight,
        async_tokens=starts,
        min_step_rows=GPU_ROWS if stage_devices[-1].device.type == "cuda" else 1,
        async_scheduling=ahead,
        lookahead=0 if drafter is None else drafter.lookahead,
        drafter="" if drafter is None else drafter.name,
        step_tokens=max_step_tokens(rows, chunk=CHUNK) if len(stage_devices) > 1 else None,
        device="+".join(sorted({stage_device.ops.name for stage_device in stage_devices})),
        dtype=dtype,
        activation=activation,
        kv_dtype=kv_dtype,
    )
