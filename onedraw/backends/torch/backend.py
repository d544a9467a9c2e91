"""The torch backend: a plan in, an outcome out, on a CPU or a CUDA device.

In: a spec, a source of weights, sizes, perhaps a drafter. Out: outcomes. A plan becomes a step (`runner/step.py`). Plain decode
steps run as captured CUDA graphs where all devices can be captured: `submit` starts them and does not wait. All other steps run
eagerly, kernel by kernel, in `submit` or on the threads of their stages; then several may be in flight, each in one stage at a
time. A row is the work of one sequence in one step; a lane is the slot of a sequence's state. A row awaits a token if the step in
flight before it samples that token. A slot is the part of the rollback buffer (state increments of drafts) that a plan
in flight uses. The row rule says with how many rows products are called, so that no row's result depends on the others.
"""

from __future__ import annotations

import itertools
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch

from onedraw.backends.base import Capacity, PageGroup, StepHandle
from onedraw.backends.devices import kv_precision
from onedraw.backends.placement import MIN_STAGING_ROWS, max_step_tokens
from onedraw.backends.torch.device import DTYPES, hardware_name, is_out_of_memory
from onedraw.backends.torch.drafters.base import Drafter
from onedraw.backends.torch.model.transformer import Transformer
from onedraw.backends.torch.model.weight_loader import LANE, padded
from onedraw.backends.torch.ops.base import Ops
from onedraw.backends.torch.ops.plain.linear import strictest
from onedraw.backends.torch.ops.plain.ops import TorchOps
from onedraw.backends.torch.runner.cuda_graphs import GraphCache, graph_caches
from onedraw.backends.torch.runner.eager_runner import EagerRunner
from onedraw.backends.torch.runner.graph_runner import GraphRunner, GraphStage
from onedraw.backends.torch.runner.inputs import PADDED, InputLayout
from onedraw.backends.torch.runner.pipeline import (
    LayerProbe,
    Pipeline,
    SameThread,
    Stage,
    StageDevice,
    current_device,
    device_locks,
)
from onedraw.backends.torch.runner.staging_buffers import StagingBufferFull
from onedraw.backends.torch.runner.step import Step, StepExecutor, StepResult
from onedraw.backends.torch.sampling.positions import PositionSampler
from onedraw.backends.torch.sampling.sampler import Sampler
from onedraw.backends.torch.selfcheck import RowCheck, logits_are_finite, self_check
from onedraw.backends.torch.state.kv_pages import KV_DTYPES
from onedraw.backends.torch.state.model_state import CheckpointLogits, ModelState, Snapshots, StageState, StateSizes
from onedraw.backends.torch.state.recurrent_state import CHUNK
from onedraw.errors import OutOfMemory, StateLost, Unsupported, UnsupportedModel
from onedraw.models.source import WeightSource
from onedraw.models.spec import ModelSpec
from onedraw.sampling.law import NO_TOKEN
from onedraw.types import PENDING_TOKEN, Outcome, Plan

if TYPE_CHECKING:  # stages in other processes need packages that only they use
    from onedraw.backends.torch.remote.group import StageGroup
    from onedraw.backends.torch.remote.stage import RemoteStage


@dataclass(frozen=True, slots=True)
class InFlightStep:
    plan: Plan
    running: Future[Outcome | StepResult]
    slot: int | None  # its part of the rollback buffer; None if rows await tokens, since such rows have no drafts
    captured: bool  # whether it ran as CUDA graphs: then its sampled tokens stay on the device, where the next step can read them
    begin: float = field(default_factory=time.perf_counter)
    sample_late: Callable[[], StepResult] | None = None  # starts sampling; None if it was started with the layers

    def ensure_sampled(self) -> None:
        """Start sampling if only the layers were started. Call it when the step before has been committed, so that its tokens are
        in the histories that constraints, DRY and bad words read."""
        if self.sample_late is None or self.running.done():
            return
        try:
            self.running.set_result(self.sample_late())
        except BaseException as error:
            self.running.set_exception(error)

    def last_tokens(self) -> dict[int, int]:
        """Wait until the step has sampled, and return each lane's last token."""
        found = self.running.result()
        if not isinstance(found, Outcome):
            found.wait()
            return found.last_tokens()
        rows = zip(self.plan.rows, found.rows, strict=True)
        return {row.lane: outcome.sampled[-1].token if outcome.sampled else NO_TOKEN for row, outcome in rows}


class InFlightSteps:
    """The steps that were submitted and not yet collected, in order. Owner: the backend."""

    def __init__(self, slots: int) -> None:
        self._handles = itertools.count()
        self.free_slots = list(range(slots))
        self.steps: dict[StepHandle, InFlightStep] = {}

    @property
    def latest(self) -> InFlightStep:
        return self.steps[max(self.steps)]

    def take_slot(self) -> int:
        return self.free_slots.pop()

    def return_slot(self, slot: int | None) -> None:
        if slot is not None:
            self.free_slots.append(slot)

    def add(self, step: InFlightStep) -> StepHandle:
        handle = StepHandle(next(self._handles))
        self.steps[handle] = step
        return handle

    def remove(self, handle: StepHandle) -> InFlightStep:
        """Remove a step and return it. The caller returns the step's slot once the outcome is there."""
        return self.steps.pop(handle)

    def with_tokens(self, plan: Plan) -> Plan:
        """Wait for the tokens of the latest step that rows of this plan await, and return the plan with them. Where no token was
        sampled, token 0 takes its place, because the row's outcome is then discarded."""
        tokens = self.latest.last_tokens()
        rows = (replace(row, tokens=(max(tokens[row.lane], 0),)) if row.awaits_token else row for row in plan.rows)
        return Plan(tuple(rows))


# ------------------ The torch backend


GPU_ROWS = 64  # A GPU computes up to this many one-token rows in about the time of one row.


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """All that a backend releases when it is closed. Owner: the backend."""

    model: Transformer
    states: list[StageState]
    checkpoint_logits: CheckpointLogits
    sampler: Sampler
    executor: StepExecutor
    eager_runner: EagerRunner
    graph_runner: GraphRunner | None  # runs captured steps; None if some stage cannot be captured
    snapshots: Snapshots


class TorchBackend:
    """A model on devices of torch. When it is constructed, weights are loaded, pages allocated, and the self-check is done."""

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
        stage_devices: Sequence[StageDevice | RemoteStage] = (),
        stage_dtypes: Sequence[str] = (),
        stage_group: StageGroup | None = None,
        activation: str | None = None,
        kv_dtype: str | None = None,
        rows: int = MIN_STAGING_ROWS,
        step_tokens: int | None = None,
        check: bool = True,
        pipeline: Pipeline | None = None,
        max_in_flight: int = 1,
        make_drafter: Callable[[Transformer, Sampler, InputLayout], Drafter] | None = None,
        progress: Callable[[int, int], None] | None = None,
        graph_cache: GraphCache | None = None,
        capture: bool = True,
        ahead: bool | None = None,
    ) -> None:
        """`dtype` is that of products on the last device; `stage_dtypes` has that of each stage, if they differ. `stage_group`
        owns the stages that are in other processes. The backend closes it."""
        assert max_in_flight == 1 or pipeline is not None, "stages that work at once have threads of their own"
        stage_devices = stage_devices or [StageDevice(torch.device(device), ops or TorchOps(torch.device(device)))]
        stage_dtypes = stage_dtypes or (dtype,) * len(stage_devices)
        self._stage_dtypes = tuple(stage_dtypes)
        model = Transformer(
            spec,
            source,
            dtype=DTYPES[dtype],
            activation=DTYPES[activation or dtype],
            stage_devices=stage_devices,
            stage_dtypes=[DTYPES[one] for one in stage_dtypes],
            rows=rows,
            max_context=max_context,
            progress=progress,
        )
        last = model.device
        sizes = StateSizes(
            pages=(pages,) * len(spec.windows) if isinstance(pages, int) else pages,
            page_size=page_size,
            windows=spec.windows,
            lanes=lanes,
            drafts=drafts if spec.recurrent else 0,
            checkpoints=checkpoints,
        )
        kept_as = kv_precision(kv_dtype or "auto", products=dtype)
        states = model.states(sizes, KV_DTYPES[kept_as])
        logits = CheckpointLogits(checkpoints, padded(spec.vocab, LANE), last)
        layout = InputLayout(page_size, sizes.pages, strictest([one.rule for one in stage_devices]), spec.windows)
        self.report: RowCheck | None = self_check(model, states, layout=layout) if check else None
        self.layout = layout if self.report is None else replace(layout, rule=self.report.rule)
        for stage in model.remote_stages:
            stage.use_rule(self.layout.rule, check=False)
        sampler = model.ops.sampler(vocab=spec.vocab, lanes=lanes, device=last)
        with current_device(last):
            drafter = None if make_drafter is None else make_drafter(model, sampler, self.layout)
        devices = [one.device for one in stage_devices]
        locks = [nullcontext() for _ in devices] if pipeline is None else device_locks(devices)
        graph_stages = [
            None
            if graphs is None or not capture or not isinstance(state, ModelState)
            else GraphStage(model, i, state, graphs, tokens=PADDED[-1], lock=locks[i], sides=max_in_flight + 1)
            for i, (state, graphs) in enumerate(zip(states, graph_caches(stage_devices, graph_cache), strict=True))
        ]
        captured = [stage for stage in graph_stages if stage is not None]
        whole = len(captured) == len(graph_stages)  # otherwise captured stages replay graphs of their layers inside eager steps
        self._stage_group = stage_group
        self._loaded: LoadedModel | None = LoadedModel(
            model=model,
            states=states,
            checkpoint_logits=logits,
            sampler=sampler,
            executor=StepExecutor(drafter, locks[-1]),
            eager_runner=EagerRunner(
                model,
                states,
                PositionSampler(model, sampler, logits, self.layout.rule),
                self.layout,
                locks=locks,
                graph_stages=[None] * len(graph_stages) if whole else graph_stages,
            ),
            graph_runner=GraphRunner(model, captured, sampler, self.layout, lanes=lanes, max_in_flight=max_in_flight)
            if whole
            else None,
            snapshots=Snapshots(states, None if drafter is None else drafter.state, logits, model.dtype),
        )
        self._feature_layers = () if drafter is None else drafter.feature_layers
        # No step is submitted ahead (async scheduling) if there is a drafter, which reads a step's results before the next step
        # runs, or if stages have threads, which could read a history after the next token was appended to it.
        waits = drafter is not None or max_in_flight > 1 or pipeline is not None
        self._capacity = _capacity(
            spec,
            sizes,
            stage_devices,
            stage_dtypes,
            drafter,
            max_context=max_context,
            step_tokens=max_step_tokens(rows, chunk=CHUNK) if len(stage_devices) > 1 else step_tokens,
            max_in_flight=max_in_flight,
            async_tokens=PADDED[-1] if whole and last.type == "cuda" else 0,
            async_scheduling=not waits and (self._keeps_tokens if ahead is None else ahead),
            activation=activation or dtype,
            kv_dtype=kept_as,
        )
        self._in_flight = InFlightSteps(slots=max_in_flight)
        self._collected = 0.0  # the time at which the last captured step was collected
        self._threads: Pipeline | SameThread = SameThread() if pipeline is None else pipeline
        self._close_pipeline = None
        if pipeline is not None:
            self._close_pipeline = weakref.finalize(self, pipeline.close)
            self._close_pipeline.atexit = False  # at interpreter exit, do not wait for a stage that is still computing

    @property
    def _open(self) -> LoadedModel:
        assert self._loaded is not None, "the backend is closed"
        return self._loaded

    @property
    def model(self) -> Transformer:
        return self._open.model

    @property
    def states(self) -> list[StageState]:
        return self._open.states

    @property
    def checkpoint_logits(self) -> CheckpointLogits:
        return self._open.checkpoint_logits

    @property
    def eager_runner(self) -> EagerRunner:
        return self._open.eager_runner

    @property
    def graph_runner(self) -> GraphRunner | None:
        return self._open.graph_runner

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    @torch.inference_mode()
    def warm_up(self, notify: Callable[[str], None], *, drafts: int = 0) -> None:
        """Capture the usual decode steps before the first request, so that no request waits for a capture. Rows have up to
        `drafts` drafts. Without capture this does nothing."""
        graphs = self.graph_runner
        if graphs is None:
            return
        capacity = self._capacity
        limits = (drafts, capacity.max_drafts, capacity.draft_positions)

        def start(plan: Plan) -> None:
            with suppress(StagingBufferFull):
                self._open.executor.start(graphs, Step(plan, self._probe(), 0), SameThread())

        graphs.warm_up(capacity.lanes, min(limit for limit in limits if limit is not None), start, notify)

    def submit(self, plan: Plan) -> StepHandle:
        with self._step_errors():
            return self._submit(plan)

    def _submit(self, plan: Plan) -> StepHandle:
        for step in self._in_flight.steps.values():
            step.ensure_sampled()
        awaits = any(row.awaits_token for row in plan.rows)
        graphs = self.graph_runner
        captures = graphs is not None and graphs.bucket(plan) is not None
        if awaits and captures and not (self._keeps_tokens and self._in_flight.latest.captured):
            plan = self._in_flight.with_tokens(plan)
        slot = None if awaits else self._in_flight.take_slot()  # rows that await a token have no drafts to roll back
        try:
            if graphs is not None and captures:
                with suppress(StagingBufferFull):
                    return self._in_flight.add(self._start_captured(graphs, plan, slot))
            plan = self._in_flight.with_tokens(plan) if awaits else plan
            return self._in_flight.add(self._start_eager(plan, slot))
        except BaseException:  # a plan that was not started must not keep its slot
            self._in_flight.return_slot(slot)
            raise

    def _start_captured(self, graphs: GraphRunner, plan: Plan, slot: int | None) -> InFlightStep:
        """Run a step as CUDA graphs. If sampling needs a token on the host that the step before is still sampling, only the
        layers start now; sampling starts when the step before has been committed, while these layers still run."""
        begin = time.perf_counter()
        step, executor = self._step(plan, slot), self._open.executor
        if any(row.tokens == (PENDING_TOKEN,) and row.samples_by_history for row in plan.rows):
            late = executor.start_layers(graphs, step)
            return InFlightStep(plan, Future(), slot, captured=True, begin=begin, sample_late=late)
        running = executor.start(graphs, step, SameThread())
        return InFlightStep(plan, running, slot, captured=True, begin=begin)

    def _start_eager(self, plan: Plan, slot: int | None) -> InFlightStep:
        """Run a step kernel by kernel, through all stages now, or on their threads."""
        running = self._open.executor.start(self.eager_runner, self._step(plan, slot), self._threads)
        return InFlightStep(plan, running, slot, captured=False)

    def _step(self, plan: Plan, slot: int | None) -> Step:
        return Step(plan, self._probe(), (slot or 0) * (self._capacity.draft_positions or 0))

    def collect(self, handle: StepHandle) -> Outcome:
        with self._step_errors():
            return self._collect(handle)

    @contextmanager
    def _step_errors(self) -> Iterator[None]:
        """As `_memory_errors`. After any error the penalties of all sequences are counted again, because those of a failed step
        may be computed again in the same lanes."""
        try:
            with self._memory_errors():
                yield
        except BaseException:
            self._open.sampler.forget_counts()
            raise

    @contextmanager
    def _memory_errors(self) -> Iterator[None]:
        """Raise OutOfMemory if there was no memory for a step, after the step's tensors have been freed."""
        try:
            yield
            return
        except BaseException as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).partition("\n")[0] or type(error).__name__
            traceback.clear_frames(error.__traceback__)  # The error refers to frames, which hold tensors.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise OutOfMemory(reason)

    def _collect(self, handle: StepHandle) -> Outcome:
        step = self._in_flight.remove(handle)
        step.ensure_sampled()
        try:
            found = step.running.result()
            return found if isinstance(found, Outcome) else self._finish(found, step.begin)
        finally:
            self._in_flight.return_slot(step.slot)

    @torch.inference_mode()
    def _finish(self, result: StepResult, begin: float) -> Outcome:
        """The outcome of a captured step, which has been committed on the device."""
        result.wait()
        begin, done = max(begin, self._collected), time.perf_counter()
        with current_device(self.model.device):
            outcome = self._open.executor.drafted(result, done - begin)
        self._collected = time.perf_counter()
        return outcome

    @property
    def _keeps_tokens(self) -> bool:
        """Whether captured steps read their tokens on the device. Layers with inputs of their own need the tokens on the host
        instead, to look up these inputs."""
        return self.graph_runner is not None and not self.model.spec.inputs

    def _probe(self) -> LayerProbe:
        return LayerProbe(self._feature_layers, finite=[] if self._checks_range() else None)

    def _checks_range(self) -> bool:
        """Whether every layer's output is checked for infinities: if any dtype is f16, since activations of
        models trained in bf16 may exceed its range."""
        return torch.float16 in (self.model.activation, *(DTYPES[dtype] for dtype in self._stage_dtypes))

    def recover(self) -> None:
        """Restart the stages in other processes that ended. Call it when a step raised StateLost, with no step in flight."""
        if self._stage_group is None:
            raise StateLost("this backend has no stages in other processes")
        self._stage_group.restart()

    def replace_weights(self, source: WeightSource) -> None:
        """Replace the weights of the model in place, and check again that batching does not change results. A drafter keeps its
        own weights; those that it shares with the model, such as the head, are replaced. If the check fails, the old weights are
        put back and UnsupportedModel is raised."""
        if self.model.remote_stages:
            raise Unsupported("weights cannot be replaced while layers are in other processes; restart the server with them")
        assert not self._in_flight.steps, "a step in flight reads the weights"
        with self._memory_errors():
            update = self.model.load_update(source)
            update.swap()
            try:
                self._check_again()
            except BaseException:
                update.swap()
                self.model.obey(self.layout.rule)
                raise

    def _check_again(self) -> None:
        if not logits_are_finite(self.model, self.states, layout=self.layout):
            raise UnsupportedModel("the logits of the new weights are not finite; the weights in use stay")
        if self.report is None:
            return
        tiled = [(stage.ops, stage.ops.tile_heights) for stage in self.model.local_stages if isinstance(stage.ops, TorchOps)]
        found = self_check(self.model, self.states, layout=self.layout)
        if found.rule != self.layout.rule or (self.report.passed and not found.passed):
            for ops, heights in tiled:
                ops.tile_heights = heights
            failed = ", ".join(result.check for result in found.results if not result.passed)
            raise UnsupportedModel(
                f"the new weights fail the self-check ({failed or 'products need another number of rows'}): batching would "
                "change results; the weights in use stay"
            )

    def close(self) -> None:
        """Release weights and pages now, also while other objects still refer to this one."""
        if self._close_pipeline is not None:
            self._close_pipeline()
        self._in_flight.steps.clear()
        self._loaded = None
        if self._stage_group is not None:
            self._stage_group.close()

    # ------------------------------------------------------------------ to and from the disk

    @property
    def identity(self) -> str:
        """A text that names everything that decides the bits of results: operations, hardware, library and row rule, and the
        layers of each device, where devices compute different bits."""
        stages, others = self.model.local_stages, self.model.remote_stages
        places = [
            f"{stage.ops.name} on {hardware_name(stage.device)}"
            if isinstance(stage, Stage)
            else f"{stage.name} on {stage.facts.hardware}"
            for stage in self.model.stages
        ]
        parts = layers_by_kind(places, self._stage_dtypes, [stage.stop for stage in self.model.stages])
        named = {text for stage in stages for text in stage.ops.choices.texts()}
        named |= {text for linear in self.model.linears() for text in linear.choices}
        choices = sorted(named | {text for stage in others for text in stage.facts.choices})
        return f"{', '.join(parts)}; torch {torch.__version__}; {self.layout.rule}; {choices}"

    def export_checkpoint(self, slot: int, pages: Sequence[Sequence[int]]) -> dict[str, npt.NDArray[Any]]:
        return self._open.snapshots.export_checkpoint(slot, pages)

    def import_checkpoint(
        self, slot: int | None, page_maps: Sequence[Mapping[int, int]], arrays: Mapping[str, npt.NDArray[Any]]
    ) -> None:
        self._open.snapshots.import_checkpoint(slot, page_maps, arrays)


def layers_by_kind(names: Sequence[str], dtypes: Sequence[str], stops: Sequence[int]) -> list[str]:
    """The kinds of devices of a split. One kind: its name alone, since a split over equal devices changes no bits. Several: each
    in order with its number of layers, because the layer before which the model is cut then affects the bits. `stops`: the layer
    before which each stage stops."""
    kinds = list(zip(names, dtypes, strict=True))
    if len(set(kinds)) == 1:
        return [names[0]]
    found, start = [], 0
    for (name, _), group in itertools.groupby(range(len(kinds)), key=kinds.__getitem__):
        stop = stops[list(group)[-1]]
        found.append(f"{name}:{stop - start}")
        start = stop
    return found


def _capacity(
    spec: ModelSpec,
    sizes: StateSizes,
    stage_devices: Sequence[StageDevice | RemoteStage],
    stage_dtypes: Sequence[str],
    drafter: Drafter | None,
    *,
    max_context: int,
    step_tokens: int | None,
    max_in_flight: int,
    async_tokens: int,
    async_scheduling: bool,
    activation: str,
    kv_dtype: str,
) -> Capacity:
    stops = [len(spec.layers) if one.stop is None else one.stop for one in stage_devices]
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
        async_tokens=async_tokens,
        min_step_rows=GPU_ROWS if stage_devices[-1].device.type == "cuda" else 1,
        async_scheduling=async_scheduling,
        lookahead=0 if drafter is None else drafter.lookahead,
        drafter="" if drafter is None else drafter.name,
        step_tokens=step_tokens,
        device="+".join(layers_by_kind([one.name for one in stage_devices], stage_dtypes, stops)),
        dtype="+".join(dict.fromkeys(stage_dtypes)),
        activation=activation,
        kv_dtype=kv_dtype,
    )
