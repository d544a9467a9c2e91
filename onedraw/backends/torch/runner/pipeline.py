"""Pipeline stages: the layers on one device, the threads on which stages run, and the buffers between two devices.

In: the residual stream and the inputs of a step. Out: the residual stream after the stage's layers. A `Pipeline` has a thread
per stage: it takes, per stage, a function that the thread calls first (to pin itself to processors), then jobs of one call per
stage, and returns a Future of the last call's result. A stage takes jobs one at a time, in the order in which they were started;
a call that fails ends its own job alone. A boundary is the buffers between two stages. A stage may be in another process
(`backends/torch/remote`); it runs the same code. Axes: T tokens, E hidden width; `width`: of the inputs that layers of some
models have of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

from onedraw.backends.placement import layer_inputs_after
from onedraw.backends.torch.model.layer import Layer, LayerRun, load_layer, rope_tables, run_fused, run_layer, runs_of_layers
from onedraw.backends.torch.model.weight_loader import LANE, WeightLoader
from onedraw.backends.torch.ops.base import DraftCommit, Ops, PreparedInputs
from onedraw.backends.torch.ops.plain.linear import Linear, RowRule
from onedraw.backends.torch.runner.inputs import Inputs
from onedraw.backends.torch.state.model_state import ModelState
from onedraw.errors import OutOfMemory
from onedraw.models.source import WeightSource
from onedraw.models.spec import AttentionSpec, DeltaSpec, LayerSpec, ModelSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class StageDevice:
    """A device, its operations, and the layer before which its stage stops; None stands for the end of the model."""

    device: torch.device
    ops: Ops
    stop: int | None = None

    @staticmethod
    def named(device: str, ops: Ops, *, stop: int | None = None) -> StageDevice:
        return StageDevice(torch.device(device), ops, stop)

    @property
    def name(self) -> str:
        return self.ops.name

    @property
    def rule(self) -> RowRule:
        return self.ops.rule


@dataclass(frozen=True, slots=True)
class LayerProbe:
    """Layer outputs that a pass over the layers collects. Owner: the caller of the pass."""

    layers: tuple[int, ...] = ()  # numbers of the layers whose outputs are wanted
    features: list[Tensor] = field(default_factory=list)  # the residual stream after each of them, [T, E]
    # For each layer, which tokens are finite after it, [T], on its device; None: layers are not checked.
    finite: list[Tensor] | None = None

    def empty(self) -> LayerProbe:
        return LayerProbe(self.layers, finite=None if self.finite is None else [])


class StageStream(Protocol):
    """The residual stream between two stages, in this process or in another."""

    @property
    def left(self) -> int:
        """The number of layers still to run."""
        ...

    def cross(self, boundary: StageBoundary, rows: int, probe: LayerProbe) -> ResidualStream:
        """Copy the stream across a boundary to the device of the next stage, where the step is padded to `rows` rows. With a
        stream from another process arrives what the probe asked of the stages there; it is added to the probe."""
        ...


@dataclass(frozen=True, slots=True)
class ResidualStream:
    """The hidden states between two stages, in this process."""

    x: Tensor  # the residual stream, [T, E]
    own: Tensor | None  # [T, later layers, width]: own inputs of the layers still to run; None if layers have none
    left: int  # number of layers still to run

    def cross(self, boundary: StageBoundary, rows: int, probe: LayerProbe) -> ResidualStream:
        return ResidualStream(*boundary.cross(self.x, self.own, rows), self.left)


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers [start, start + len(layers)) on one device, and the boundary before it."""

    device: torch.device
    ops: Ops
    eps: float
    start: int
    layers: list[Layer]
    runs: list[LayerRun]
    ropes: dict[RopeSpec, Tensor]
    entrance: StageBoundary | None  # the boundary before the stage; None for the first stage
    mixers: tuple[AttentionSpec | DeltaSpec, ...]  # the attention and Gated DeltaNet specs of its layers, each once

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return tuple(layer.spec for layer in self.layers)

    @property
    def stop(self) -> int:
        return self.start + len(self.layers)

    @property
    def linears(self) -> list[Linear]:
        return [linear for layer in self.layers for linear in layer.linears]

    def advance(self, before: StageStream, inputs: Inputs, state: ModelState, *, probe: LayerProbe) -> ResidualStream:
        """Copy the residual stream across the boundary to this stage, if there is one, and run the stage's layers."""
        with current_device(self.device):
            if self.entrance is not None:
                before = before.cross(self.entrance, len(inputs.host_tokens), probe)
            assert isinstance(before, ResidualStream), "a stage in another process is followed by a boundary"
            prepared = PreparedInputs(self.ops, inputs.on(self.device), self.ropes)
            stream = self.run(before, prepared, state, probe=probe)
            if self.entrance is not None and stream.own is not None:
                # Cloned, because the next step may overwrite the boundary's buffer before later stages have read these inputs.
                return replace(stream, own=stream.own.clone())
            return stream

    def run(self, stream: ResidualStream, prepared: PreparedInputs, state: ModelState, *, probe: LayerProbe) -> ResidualStream:
        """Run the layers of this stage, or fewer if the stream ends at an earlier layer."""
        x = self._run_layers(stream, prepared, state, probe)
        own = None if stream.own is None else stream.own[:, len(self.layers) :]
        return ResidualStream(x, own, max(stream.left - len(self.layers), 0))

    def _run_layers(self, stream: ResidualStream, prepared: PreparedInputs, state: ModelState, probe: LayerProbe) -> Tensor:
        x, own, ops = stream.x, stream.own, self.ops
        for run in self.runs:
            span = range(run.start, min(run.stop, stream.left))
            if run.fused is not None and probe.finite is None and span:
                x = run_fused(run.fused, span, x, self, state, prepared, probe)
                continue
            for index in span:
                layer, own_input = self.layers[index], None if own is None else own[:, index]
                store = state.stores[index]
                x = run_layer(x, layer, ops=ops, store=store, prepared=prepared, eps=self.eps, own_input=own_input)
                if self.start + index in probe.layers:
                    probe.features.append(x)
                if probe.finite is not None:
                    probe.finite.append(torch.isfinite(x).all(1))
        return x

    def commit(self, state: ModelState, drafts: DraftCommit) -> None:
        with current_device(self.device):
            self.ops.commit(state, drafts)


def load_stage(
    stage_device: StageDevice,
    before: torch.device | None,
    spec: ModelSpec,
    source: WeightSource,
    *,
    start: int,
    dtype: torch.dtype,
    activation: torch.dtype,
    max_context: int,
    rows: int,
    progress: Callable[[int, int], None] | None = None,
) -> Stage:
    """Load the layers from `start` to the layer at which the device stops. `before`: the device from which the residual stream
    comes; None for the first stage, which makes the stream."""
    stop = len(spec.layers) if stage_device.stop is None else stage_device.stop
    loader = WeightLoader(source, ops=stage_device.ops, dtype=dtype, device=stage_device.device, norm=spec.norm)
    layers = []
    for index in range(start, stop):
        layers.append(load_layer(index, spec.layers[index], loader, stage_device.ops, spec.eps))
        if progress is not None:
            progress(index + 1, len(spec.layers))
    positions = max(max_context, LANE)  # padding tokens may have any position of a page, even beyond the context
    return Stage(
        device=stage_device.device,
        ops=stage_device.ops,
        eps=spec.eps,
        start=start,
        layers=layers,
        runs=runs_of_layers(layers, stage_device.ops, spec.eps),
        ropes=rope_tables(spec.layers[start:stop], positions, dtype=dtype, device=stage_device.device),
        entrance=None
        if before is None
        else stage_boundary(before, stage_device.device, spec, start, rows=rows, dtype=activation),
        mixers=tuple(dict.fromkeys(layer.spec.mixer for layer in layers)),
    )


def stage_boundary(
    source: torch.device, target: torch.device, spec: ModelSpec, start: int, *, rows: int, dtype: torch.dtype
) -> StageBoundary:
    """The boundary from one device to the stage that begins with layer `start` on another."""
    return StageBoundary(source, target, rows=rows, hidden=spec.hidden, inputs=layer_inputs_after(spec, start), dtype=dtype)


# ------------------------------------------------------------------ the pipeline


StageCall = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class StageJob:
    calls: Sequence[StageCall]
    result: Future[Any] = field(default_factory=Future)


class Pipeline:
    """A thread per stage. Owner: the backend. Between jobs the threads refer to their queues alone, so they do not keep the
    backend alive."""

    def __init__(self, first_calls: Sequence[Callable[[], None]]) -> None:
        self._queues: list[SimpleQueue[StageJob | None]] = [SimpleQueue() for _ in first_calls]
        following = [*self._queues[1:], None]
        self._threads = [
            threading.Thread(target=_work, args=(number, [first], own, after), name=f"onedraw-stage-{number}", daemon=True)
            for number, (first, own, after) in enumerate(zip(first_calls, self._queues, following, strict=True))
        ]
        for thread in self._threads:
            thread.start()

    def start(self, calls: Sequence[StageCall]) -> Future[Any]:
        """Start a job of one call per stage, and return at once."""
        assert len(calls) == len(self._queues)
        job = StageJob(calls)
        self._queues[0].put(job)
        return job.result

    def close(self) -> None:
        """End the threads, after the jobs that were started are finished."""
        for queue, thread in zip(self._queues, self._threads, strict=True):
            queue.put(None)
            if thread is not threading.current_thread():  # a thread cannot join itself
                thread.join()


class SameThread:
    """A pipeline without threads: `start` makes all calls before it returns, and raises their errors."""

    def start(self, calls: Sequence[StageCall]) -> Future[Any]:
        result: Future[Any] = Future()
        for call in calls:
            found = call()
        result.set_result(found)
        return result


def device_locks(devices: Sequence[torch.device]) -> list[AbstractContextManager[Any]]:
    """One lock per GPU, held while kernels are launched: operations keep buffers between their kernels, and no other thread may
    launch while one captures. CPU stages need none."""
    made = {device: threading.RLock() for device in devices}
    return [made[device] if device.type == "cuda" else nullcontext() for device in devices]


def _work(
    number: int, first: list[Callable[[], None]], own: SimpleQueue[StageJob | None], after: SimpleQueue[StageJob | None] | None
) -> None:
    failed: BaseException | None = None
    try:
        first.pop()()  # Drop the function after the call: it may hold operations that own threads.
    except BaseException as error:  # every job on this thread then raises this error
        failed = error
    while (job := own.get()) is not None:
        try:
            if failed is not None:
                raise failed
            found = job.calls[number]()
        except BaseException as error:
            job.result.set_exception(error)
        else:
            if after is None:
                job.result.set_result(found)
            else:
                after.put(job)
            del found
        del job


# ------------------------------------------------------------------ between two stages


class StageBoundary:
    """Buffers between two stages, allocated once. Owner: the second stage. Rows are valid until the next step crosses.

    In: the residual stream [T, E] on the first device, and the inputs of later layers. Out: the same bits on the second device.
    One buffer sends (in pinned host memory where only one side is a GPU), one receives: the sender's tensors are free once copied
    to the sending buffer.
    """

    def __init__(
        self, source: torch.device, target: torch.device, *, rows: int, hidden: int, inputs: int, dtype: torch.dtype
    ) -> None:
        self._source, self._target = source, target
        pinned = source.type != target.type
        try:
            place = torch.device("cpu") if pinned else source
            self._sent = torch.empty(rows, hidden, dtype=dtype, device=place, pin_memory=pinned)
            self._received = torch.zeros(rows, hidden, dtype=dtype, device=target)
            self._inputs = torch.zeros(rows, inputs, dtype=dtype, device=target)
        except (RuntimeError, MemoryError):  # torch raises these when memory is exhausted
            raise OutOfMemory(f"the {rows} rows between {source} and {target} do not fit; lower --turn-tokens") from None
        self._gpu = next((device for device in (source, target) if device.type == "cuda"), None) if pinned else None

    @property
    def nbytes(self) -> int:
        return self._sent.nbytes + self._received.nbytes + self._inputs.nbytes

    def cross(self, x: Tensor, own: Tensor | None, rows: int | None = None) -> tuple[Tensor, Tensor | None]:
        """Copy x [T, E], and the own inputs [T, later layers, width] of the later layers, to the second device. `rows`: the
        number of rows to which the second stage pads the step, if it pads differently; rows beyond len(x) are padding, with
        values of an earlier step."""
        rows = len(x) if rows is None else rows
        count = min(len(x), rows)
        if max(count, rows) > len(self._sent):
            raise AssertionError(f"a step of {max(count, rows)} rows crosses a boundary of {len(self._sent)}")
        if x.dtype != self._sent.dtype:
            raise AssertionError(f"a stream of {x.dtype} crosses a boundary of {self._sent.dtype}")
        sent = self._sent[:count]
        self._synchronize()  # wait until the previous step's copy out of this buffer is complete
        sent.copy_(x[:count], non_blocking=True)
        if self._source.type == "cuda":
            self._synchronize()  # wait for the copy, because the host reads the buffer next
        self._received[:count].copy_(sent, non_blocking=True)
        if own is None:
            return self._received[:rows], None
        inputs = self._inputs[:rows].view(rows, *own.shape[1:])
        inputs[:count].copy_(own[:count])
        return self._received[:rows], inputs

    def _synchronize(self) -> None:
        if self._gpu is not None:
            torch.cuda.current_stream(self._gpu).synchronize()


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that makes `device` current: kernels are launched on the current device, wherever their arguments are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
