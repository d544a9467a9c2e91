"""Decode steps as captured CUDA graphs: every row takes one known token and perhaps drafts.

In: a step, and stages whose operations can be captured. Out: a result that is still pending on the device, with kept drafts
committed on every stage. Steps are padded to a few shapes (`Bucket`). All host arrays are copied to the device before a graph
runs, so a graph reads only device memory and serves every step with the same signature. The layers of each stage are one graph;
sampling is another, laid out while the layers run, so graphs of the layers serve every kind of sampling, and the host computes
token masks while the layers run. The host waits for no graph, so consecutive steps overlap on the devices of several stages. The
token that each lane sampled stays on the device, where the next step may start from it before the host has read it.

A row is the work of one sequence in one step; a lane is the slot of a sequence's state; the rollback buffer holds drafts until
the commit. A probe (`LayerProbe`) collects layer outputs that a drafter reads, and which tokens are finite. Answers are the
samples as integers, for `read_samples`. Axes: T tokens of a step, R rows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from onedraw.backends.sampled_rows import SamplingPosition, read_samples
from onedraw.backends.torch.model.transformer import StageInputs, Transformer
from onedraw.backends.torch.ops.base import DeviceCommit
from onedraw.backends.torch.runner.cuda_graphs import GraphCache
from onedraw.backends.torch.runner.inputs import LEAST_REACH, PADDED, Bucket, InputLayout, Inputs, bucket_of, staged_inputs
from onedraw.backends.torch.runner.pipeline import LayerProbe, ResidualStream, Stage, StageStream, current_device
from onedraw.backends.torch.runner.staging_buffers import DirectStaging, HostArray, Staging, StagingBuffer, StagingBufferFull
from onedraw.backends.torch.runner.step import Step, first_fault, row_outcomes
from onedraw.backends.torch.sampling.sampler import Sampler, SamplingInputs
from onedraw.backends.torch.state.model_state import ModelState
from onedraw.sampling.verify import draft_prefixes
from onedraw.types import PENDING_TOKEN, Constraint, Draft, History, Plan, Row, RowOutcome, SamplingParams, TokenMask

STAGE_BYTES = 16 * 2**20  # size of the staging buffer of a stage
SAMPLING_BYTES = 16 * 2**20  # size of the staging buffer of sampling; token masks take a bit per token and position
# Seconds after the start of warm-up when it stops capturing shapes: NEAR for short contexts, FAR for long ones, DRAFTS for
# drafts.
NEAR_SECONDS, FAR_SECONDS, DRAFTS_SECONDS = 40, 15, 25
MOST_WARM_UP = 96  # most shapes that are warmed up; each has a graph of the layers, and the cache keeps more graphs than that
WARM_UP_PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_p=0.9),
)
WARM_UP_LOGPROBS = SamplingParams(temperature=1.0, logprobs=5)
NOTHING = np.zeros(0, dtype=np.int32)
UNLOCKED: AbstractContextManager[Any] = nullcontext()
ResultT = TypeVar("ResultT")


# ------------------------------------------------------------------ one stage


@dataclass(frozen=True, slots=True)
class GraphStageInputs:
    """The inputs of a step that the graphs of a stage read, besides weights and state."""

    bucket: Bucket
    inputs: Inputs
    ready: StageInputs
    rows: Tensor  # [R, 5]: the rows as `_row_words` describes them; empty if no row has drafts
    parents: Tensor  # [T]: the draft that each draft follows; empty if no row has drafts


class GraphStage:
    """The captured layers and commit of one stage. Owner: the backend.

    One thread launches all stages of a step, then those of the next step, so every device computes steps in this order. While the
    next step is being laid out, the device may still read the inputs of earlier steps, so the staging buffer has several host
    copies. `tokens`: the most tokens of a step. `lock`: held while kernels are launched, if other threads launch kernels on this
    device too. `sides`: the number of host copies of the staging buffer, which is one more than the number of steps that may be
    in flight.
    """

    def __init__(
        self,
        model: Transformer,
        number: int,
        state: ModelState,
        graphs: GraphCache,
        *,
        tokens: int,
        lock: AbstractContextManager[Any] = UNLOCKED,
        sides: int = 2,
    ) -> None:
        stage = model.stages[number]
        assert isinstance(stage, Stage)
        capture = stage.ops.capture
        assert capture is not None, "a stage without capture runs eagerly"
        self.device, self.graphs = stage.device, graphs
        self._model, self._number, self._state = model, number, state
        self._ops, self._capture = stage.ops, capture
        self._lock = lock
        self.staging = StagingBuffer(stage.device, STAGE_BYTES, sides=sides)
        self._samples = torch.zeros(tokens, dtype=torch.int64, device=stage.device)
        # Eager steps, which may run on threads of their own, use the boundary of the stage itself.
        self._boundary = None if number == 0 else model.boundary(number, rows=tokens)

    def lay_out(self, inputs: Inputs, bucket: Bucket, rows: HostArray, parents: HostArray) -> GraphStageInputs:
        staging = self.staging
        staging.begin()
        own = inputs if inputs.staging is staging else replace(inputs, staging=staging)
        ready = self._model.prepare(own, self._number)  # this puts the token ids into the buffer, before all other arrays
        staging.note((self._number, bucket))
        return GraphStageInputs(bucket, own, ready, staging.put(rows), staging.put(parents))

    def send(self, probed: Hashable) -> Hashable:
        """Copy the staging buffer to the device, and return the signature of the step's graphs."""
        self.staging.note(probed)
        with current_device(self.device):
            return self.staging.send()

    def replay(self, signature: Hashable | None, work: Callable[[], ResultT]) -> ResultT:
        """Run the work, or replay its graph if it was captured. Without a signature the work is not captured."""
        with self._lock, current_device(self.device):
            return work() if signature is None else self.graphs.run(signature, work)

    def cross(self, before: StageStream | None, bucket: Bucket, probe: LayerProbe) -> ResidualStream | None:
        """Copy the residual stream of the stage before into a fixed buffer of this stage."""
        if before is None or self._boundary is None:
            return None
        with current_device(self.device):
            return before.cross(self._boundary, bucket.tokens, probe)

    def run_layers(
        self, laid: GraphStageInputs, entered: ResidualStream | None, last: Tensor | None, probe: LayerProbe
    ) -> ResidualStream:
        """Run the layers of this stage. `last`: the token that each lane sampled last, if the step has tokens that only the
        device knows."""
        ready = laid.ready if last is None else replace(laid.ready, tokens=self._capture.resolve_tokens(laid.ready.tokens, last))
        return self._model.pass_stage(self._number, ready, entered, self._state, probe=probe)

    def advance(
        self, before: StageStream | None, plan: Plan, bucket: Bucket, layout: InputLayout, probe: LayerProbe
    ) -> ResidualStream:
        """Run the layers of this stage as a graph, in a step whose other stages are run kernel by kernel. The residual stream
        that is returned is a copy, which no later replay overwrites. StagingBufferFull may be raised before anything has been
        computed."""
        inputs = staged_inputs(plan, layout=layout, staging=self.staging, bucket=bucket)
        laid = self.lay_out(inputs, bucket, NOTHING, NOTHING)
        signature, entered = self.send(probe.layers), self.cross(before, bucket, probe)

        def work() -> tuple[ResidualStream, LayerProbe]:
            own = LayerProbe(probe.layers)
            return self.run_layers(laid, entered, None, own), own

        stream, seen = self.replay(signature, work)
        with current_device(self.device):
            probe.features.extend(feature.to(self._model.device, copy=True) for feature in seen.features)
            return ResidualStream(stream.x.clone(), None if stream.own is None else stream.own.clone(), stream.left)

    def commit(self, laid: GraphStageInputs, samples: Tensor) -> None:
        """Commit the drafts that equal the samples [T], which are on this device."""
        prepared = laid.ready.prepared
        tables = {spec: prepared.attention(spec).page_table for spec in self._state.addresses}
        drafts = DeviceCommit(samples, laid.ready.tokens, laid.parents, laid.rows, laid.bucket, tables)
        self._ops.commit(self._state, drafts)

    def commit_late(self, signature: Hashable, laid: GraphStageInputs, answers: Tensor) -> None:
        """Commit in a graph of its own, with the answers [T, columns] of the last stage copied to a fixed buffer."""
        if not self._state.commits(laid.bucket):
            return
        with self._lock, current_device(self.device):
            samples = self._samples[: len(answers)]
            samples.copy_(answers[:, 0])
            self.graphs.run(("commit", signature), lambda: self.commit(laid, samples))


# ------------------------------------------------------------------ all stages


@dataclass(frozen=True, slots=True)
class GraphInputs:
    """A step that is laid out and copied to all stages. `seen`: what the probe has found on the stages so far."""

    step: Step
    bucket: Bucket
    stages: list[GraphStageInputs]
    signatures: list[Hashable]
    seen: LayerProbe


@dataclass(frozen=True, slots=True)
class GraphSampling:
    """The inputs of sampling. `signature`: None if they did not fit into the staging buffer, so that sampling is not captured."""

    positions: list[SamplingPosition]
    lanes: Tensor  # [T]: the lane of each token, if no row has drafts; else empty
    inputs: SamplingInputs
    signature: Hashable | None


@dataclass(frozen=True, slots=True)
class GraphSamples:
    positions: list[SamplingPosition]
    hidden: Tensor
    answers: Tensor  # [T, columns] on the device; if layers are checked, the last column is the first faulty layer


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A step in flight. `answers` is complete on the host after the event `arrived`, or at once if there is no event."""

    plan: Plan
    inputs: Inputs
    hidden: Tensor
    probe: LayerProbe
    positions: list[SamplingPosition]
    answers: Tensor
    arrived: torch.cuda.Event | None

    @property
    def pending(self) -> bool:
        return True

    @property
    def features(self) -> list[Tensor]:
        return self.probe.features

    def wait(self) -> None:
        if self.arrived is not None:
            self.arrived.synchronize()

    def last_tokens(self) -> dict[int, int]:
        return {row.lane: int(token) for row, token in zip(self.plan.rows, self.answers[:, 0].tolist(), strict=False)}

    def rows(self) -> tuple[RowOutcome, ...]:
        columns = None if self.probe.finite is None else -1  # without the first faulty layer
        samples = iter(read_samples(self.answers.numpy()[:, :columns], self.positions))
        sampled = {i: [next(samples) for _ in range(1 + len(row.drafts))] for i, row in enumerate(self.plan.rows)}
        return row_outcomes(self.plan, self.inputs, sampled, {}, self._faults)

    def _faults(self) -> list[int]:
        return [] if self.probe.finite is None else self.answers[:, -1].tolist()


class GraphRunner:
    """Runs decode steps as captured graphs. With several stages, the results of a step are copied out of the memory that graphs
    share, since graphs of other steps run before the results are read. Owner: the backend."""

    def __init__(
        self,
        model: Transformer,
        stages: Sequence[GraphStage],
        sampler: Sampler,
        layout: InputLayout,
        *,
        lanes: int,
        max_in_flight: int = 1,
    ) -> None:
        capture, capturable = model.ops.capture, sampler.capturable
        assert capture is not None, "the last stage samples in a captured step"
        assert capturable is not None, "the last stage samples in a captured step"
        self._model, self._layout, self._capture, self._sampler = model, layout, capture, capturable
        self._stages = list(stages)
        self._lanes = lanes
        # `_last`: the token that each lane sampled last, on the device that samples. `_next`: the same on the device where the
        # next step begins. Padding has a lane of its own.
        self._last = torch.zeros(lanes + 1, dtype=torch.int64, device=model.device)
        first = self._stages[0].device
        self._next = self._last if first == model.device else torch.zeros_like(self._last, device=first)
        self._results = ResultBuffers(max_in_flight + 2)
        # The hidden states after the last layer, which sampling reads, are outside the memory that graphs share.
        self._hidden = torch.zeros(PADDED[-1], model.spec.hidden, dtype=model.dtype, device=model.device)
        self._staging, self._max_in_flight = StagingBuffer(model.device, SAMPLING_BYTES, sides=max_in_flight + 1), max_in_flight
        self.started_ahead = 0  # steps that began before the host knew their tokens

    @property
    def stages(self) -> int:
        return len(self._stages)

    @property
    def graphs(self) -> GraphCache:
        """The graphs of the last stage, which include those of sampling."""
        return self._stages[-1].graphs

    def bucket(self, plan: Plan) -> Bucket | None:
        """The shape that a step is padded to; None where it cannot be captured."""
        return bucket_of(plan, recurrent=self._model.spec.recurrent)

    def on_stage(self, number: int) -> AbstractContextManager[Any]:
        return current_device(self._model.device)  # no lock here: each graph takes the stage's lock

    def lay_out(self, step: Step) -> GraphInputs:
        bucket = self.bucket(step.plan)
        assert bucket is not None, "only plain decode steps are captured"
        with current_device(self._model.device):
            plan, start = step.plan, step.rollback_start
            layout, last = replace(self._layout, held=start) if start else self._layout, self._stages[-1].staging
            inputs = staged_inputs(plan, layout=layout, staging=last, bucket=bucket)
            single = bucket.longest == 1
            rows, parents = (NOTHING, NOTHING) if single else (_row_words(plan, bucket, start), _parents(plan, bucket))
            laid = [stage.lay_out(inputs, bucket, rows, parents) for stage in self._stages]
            self.started_ahead += plan.rows[0].tokens == (PENDING_TOKEN,)
            signatures = [stage.send(step.probe.layers) for stage in self._stages]
        return GraphInputs(step, bucket, laid, signatures, step.probe.empty())

    def run_layers(self, laid: GraphInputs, number: int, before: StageStream | None) -> ResidualStream:
        stage, own = self._stages[number], laid.stages[number]
        work = partial(self._layers, stage, own, stage.cross(before, laid.bucket, laid.step.probe), laid.step.probe)
        stream, probed = stage.replay(laid.signatures[number], work)
        with current_device(stage.device):
            self._gather(laid.seen, probed)
        return stream

    def _layers(
        self, stage: GraphStage, own: GraphStageInputs, entered: ResidualStream | None, probe: LayerProbe
    ) -> tuple[ResidualStream, LayerProbe]:
        """Run the layers of a stage. In steps without drafts the first stage fills in tokens that only the device knows; the last
        stage leaves the hidden states where sampling reads them."""
        probe = probe.empty()
        awaits = entered is None and own.bucket.longest == 1
        stream = stage.run_layers(own, entered, self._next if awaits else None, probe)
        if stage is self._stages[-1]:
            hidden = self._hidden[: own.bucket.tokens]
            hidden.copy_(self._model.leave(stream))
            stream = ResidualStream(hidden, None, 0)
        return stream, probe

    def _gather(self, seen: LayerProbe, probed: LayerProbe) -> None:
        """Copy what the probe of a stage found out of the memory that graphs share."""
        seen.features.extend(feature.to(self._model.device, copy=True) for feature in probed.features)
        if seen.finite is not None and probed.finite:
            seen.finite.extend(torch.stack(probed.finite).to(self._model.device))

    def sample(self, laid: GraphInputs, stream: StageStream) -> GraphSamples:
        """Sample, and commit on the last stage in the same graph."""
        assert isinstance(stream, ResidualStream)
        sampling, last = self._lay_out_sampling(laid), self._stages[-1]
        # With drafts, the sampling graph reads the layer graph's index buffers, so its key includes that graph's signature.
        key = sampling.signature
        if key is not None and laid.bucket.longest > 1:
            key = (laid.signatures[-1], key)
        answers = last.replay(key, partial(self._sample, laid, sampling, stream.x))
        with current_device(last.device):
            hidden, answers = self._taken(stream.x, answers, laid.seen)
        return GraphSamples(sampling.positions, hidden, answers)

    def _lay_out_sampling(self, laid: GraphInputs) -> GraphSampling:
        """Lay out the inputs of sampling, while the device runs the layers. If they do not fit into the staging buffer, each is
        copied by itself, and sampling is not captured."""
        positions, staging = sampling_positions(laid.step.plan.rows), self._staging
        with current_device(self._stages[-1].device):
            try:
                staging.begin()
                lanes, inputs = self._sampling_inputs(laid, positions, staging)
                return GraphSampling(positions, lanes, inputs, staging.send())
            except StagingBufferFull:
                lanes, inputs = self._sampling_inputs(laid, positions, DirectStaging(staging.device))
                return GraphSampling(positions, lanes, inputs, None)

    def _sampling_inputs(
        self, laid: GraphInputs, positions: list[SamplingPosition], staging: Staging
    ) -> tuple[Tensor, SamplingInputs]:
        bucket = laid.bucket
        lanes = staging.put(_lane_words(laid.step.plan, bucket, self._lanes) if bucket.longest == 1 else NOTHING)
        staging.note(bucket.tokens)
        return lanes, self._sampler.prepare(positions, staging=staging, rows=bucket.tokens)

    def _sample(self, laid: GraphInputs, sampling: GraphSampling, hidden: Tensor) -> Tensor:
        """Sample: answers [T, columns]. With drafts, also verify them and commit them on the last stage; without, keep the
        sampled tokens on the device for the next step."""
        single = laid.bucket.longest == 1
        scores = lambda rows: self._model.scores(hidden[rows])  # noqa: E731
        answers = sampling.inputs.sample(scores, self._last if single else None)
        if single:
            self._capture.keep_last_tokens(answers, sampling.lanes, self._last)
        else:
            self._stages[-1].commit(laid.stages[-1], answers[:, 0].contiguous())
        return answers

    def _taken(self, hidden: Tensor, answers: Tensor, seen: LayerProbe) -> tuple[Tensor, Tensor]:
        """Hidden states and answers, copied out of the memory that graphs share if graphs of other stages run next."""
        several = len(self._stages) > 1
        if seen.finite is not None:
            answers = torch.cat([answers, first_fault(seen.finite)], 1)
        elif several:
            answers = answers.clone()
        return hidden.clone() if several else hidden, answers

    def commit(self, laid: GraphInputs, sampled: GraphSamples) -> CapturedStep:
        """Commit on all stages but the last, which committed in the graph that samples; then start the copy of the answers to the
        host."""
        for stage, own, signature in zip(self._stages[:-1], laid.stages, laid.signatures, strict=False):
            stage.commit_late(signature, own, sampled.answers)
        with current_device(self._stages[-1].device):
            # If several steps may be in flight, no step awaits a token, and this copy would only make the devices wait for each
            # other.
            if self._next is not self._last and self._max_in_flight == 1:
                self._next.copy_(self._last)
            answers, arrived = self._results.send(sampled.answers)
        plan, inputs = laid.step.plan, laid.stages[-1].inputs
        return CapturedStep(plan, inputs, sampled.hidden, laid.seen, sampled.positions, answers, arrived)

    def warm_up(self, lanes: int, drafts: int, start: Callable[[Plan], None], notify: Callable[[str], None]) -> None:
        """Capture decode steps before the first request: greedy, sampled, with logprobs and with token masks; without drafts and
        with up to `drafts`. The rows of these steps write to scratch pages. Shapes left when the time for them is over are
        captured at their first use."""
        begin, late = time.monotonic(), False
        groups = warm_up_shapes(lanes, self._model.max_context, drafts)
        shapes = [(seconds, shape) for seconds, group in groups for shape in group][:MOST_WARM_UP]
        for number, (seconds, shape) in enumerate(shapes, start=1):
            if time.monotonic() - begin > seconds:
                late = True
                continue
            notify(f"capturing CUDA graphs, {number} of {len(shapes)}")
            kinds: list[tuple[SamplingParams, Constraint | None]] = [(params, None) for params in WARM_UP_PARAMS]
            # Each shape with drafts has its own sampling graphs, so those of rarer requests are captured at first use.
            if not shape.drafts:
                kinds += [(WARM_UP_LOGPROBS, None), (SamplingParams(temperature=1.0), AnyToken(self._model.spec.vocab))]
            for params, constraint in kinds:
                start(Plan(tuple(self._warm_up_row(lane, shape, params, constraint) for lane in range(shape.rows))))
        if late:
            notify(f"capturing CUDA graphs: the rest at first use, after {time.monotonic() - begin:.0f} s")

    def _warm_up_row(self, lane: int, shape: WarmUpShape, params: SamplingParams, constraint: Constraint | None) -> Row:
        start, drafts = shape.start, tuple(Draft(0, i - 1) for i in range(shape.drafts))
        pages = tuple((page,) * ((start + len(drafts)) // self._layout.page_size + 1) for page in self._layout.scratch)
        history = History((0,) * start, [0], constraint)
        return Row(f"warm-up {lane}", lane, pages, start, (0,), drafts, start, True, params, history)


class ResultBuffers:
    """Pinned host buffers for samples, used in turn. `count`: buffers per shape, more than there are steps in flight. Owner:
    GraphRunner."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._buffers: dict[tuple[int, ...], deque[tuple[Tensor, torch.cuda.Event]]] = {}

    def send(self, answers: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Copy answers to the host. Returns the copy and the event after which it is complete; no event if it already is."""
        if answers.device.type != "cuda":
            return answers.clone(), None
        buffers = self._buffers.get(answers.shape)
        if buffers is None:
            buffers = self._buffers[answers.shape] = deque(_result_buffer(answers) for _ in range(self._count))
        buffers.rotate(1)
        there, arrived = buffers[0]
        there.copy_(answers, non_blocking=True)
        arrived.record()
        return there, arrived


def _result_buffer(answers: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return torch.empty(answers.shape, dtype=answers.dtype, pin_memory=True), event


# ------------------------------------------------------------------ shapes to warm up


class AnyToken:
    """A constraint with a mask that allows every token, to warm up steps with masks."""

    def __init__(self, vocab: int) -> None:
        self._mask = np.full(-(-vocab // 32), 2**32 - 1, dtype=np.uint32)

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> TokenMask:
        return self._mask

    def legal(self, output: Sequence[int]) -> int:
        return len(output)


class WarmUpShape(NamedTuple):
    """A step of `rows` rows at position `start`, each with `drafts` drafts."""

    rows: int
    start: int
    drafts: int = 0


def warm_up_shapes(lanes: int, max_context: int, drafts: int = 0) -> list[tuple[float, list[WarmUpShape]]]:
    """Groups of shapes in the order of warm-up, each with the seconds until which its shapes are captured: every number of rows
    in the two shortest reaches; one row in longer contexts; one row with up to `drafts` drafts; more rows in longer contexts."""
    counts = [count for count in PADDED if count <= lanes] or [1]
    lengths = sorted({min(count - 1, drafts) for count in PADDED} - {0})  # most drafts of each bucket
    starts = (LEAST_REACH // 2, LEAST_REACH)
    far = [LEAST_REACH << power for power in range(1, 32) if LEAST_REACH << power < max_context]
    near = [WarmUpShape(rows, start) for rows in counts for start in _within(starts, max_context)]
    drafted = [WarmUpShape(1, start, length) for length in lengths for start in _within(starts, max_context - length)]
    alone = [WarmUpShape(1, start) for start in far]
    more = [WarmUpShape(rows, start) for start in far for rows in counts if rows > 1]
    return [(NEAR_SECONDS, near), (FAR_SECONDS, alone), (DRAFTS_SECONDS, drafted), (FAR_SECONDS, more)]


def _within(starts: Sequence[int], stop: int) -> list[int]:
    """Positions that a row's last known token may have, where the row ends before `stop`."""
    return sorted({min(start, stop - 1) for start in starts}) if stop > 0 else []


# ------------------------------------------------------------------ host arrays


def sampling_positions(rows: Sequence[Row]) -> list[SamplingPosition]:
    """The positions after every token of the rows."""
    return [
        SamplingPosition(row.lane, row.params, row.history, drafts, row.request_id)
        for row in rows
        for drafts in (draft_prefixes(row.drafts) if not _awaits(row) else (row.tokens,))
    ]


def _awaits(row: Row) -> bool:
    """Whether the row's token is missing in the history. It is present if sampling is prepared after the step before was
    committed."""
    return row.awaits_token and len(row.history) <= row.start


def _lane_words(plan: Plan, bucket: Bucket, lanes: int) -> HostArray:
    """The lane of each token, [T]. Padding has the lane after the last."""
    words = np.full(bucket.tokens, lanes, dtype=np.int32)
    words[: len(plan.rows)] = [row.lane for row in plan.rows]
    return words


def _row_words(plan: Plan, bucket: Bucket, rollback_start: int) -> HostArray:
    """The rows as the commit reads them, [R, 5]: index of the first token, number of tokens, lane, first slot of the rollback
    buffer, slot of the first draft in the row's pages."""
    words = np.zeros((bucket.rows, 5), dtype=np.int32)
    first = 0
    for line, row in zip(words, plan.rows):
        line[:] = first, 1 + len(row.drafts), row.lane, rollback_start, row.stop
        first, rollback_start = first + 1 + len(row.drafts), rollback_start + len(row.drafts)
    return words


def _parents(plan: Plan, bucket: Bucket) -> HostArray:
    """The parent of each token, [T]: for a draft, the index of the draft that it follows, or -1 for the row's known token; -2 for
    all other tokens."""
    parents = np.full(bucket.tokens, -2, dtype=np.int32)
    first = 0
    for row in plan.rows:
        parents[first + 1 : first + 1 + len(row.drafts)] = [draft.parent for draft in row.drafts]
        first += 1 + len(row.drafts)
    return parents
