"""The pipeline between stages: a thread per stage, the buffers that rows cross between two devices, and the locks of devices.

In: per stage, a function that its thread calls first (to pin itself to processors), then jobs of one call per stage. Out: a
Future of the last call's result. A stage takes jobs one at a time, in the order in which they were started; a call that fails
ends its own job alone. A stage is the layers on one device; a boundary is the buffers between two stages. Axes: T tokens, E
hidden width; `width`: of the inputs that layers of some models have of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from onedraw.backends.placement import layer_inputs_after
from onedraw.backends.torch.model.layer import Layer, LayerRun, load_layer, rope_tables, runs_of_layers
from onedraw.backends.torch.model.weight_loader import LANE, WeightLoader
from onedraw.backends.torch.ops.base import Ops
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


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers [start, start + len(layers)) on one device, and the boundary before it."""

    device: torch.device
    ops: Ops
    start: int
    layers: list[Layer]
    runs: list[LayerRun]
    ropes: dict[RopeSpec, Tensor]
    entrance: StageBoundary | None  # the boundary before the stage; None for the first stage
    mixers: tuple[AttentionSpec | DeltaSpec, ...]  # the kinds of mixers of its layers, each once

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return tuple(layer.spec for layer in self.layers)


def load_stage(
    stage_device: StageDevice,
    before: Stage | None,
    spec: ModelSpec,
    source: WeightSource,
    *,
    dtype: torch.dtype,
    activation: torch.dtype,
    max_context: int,
    rows: int,
    progress: Callable[[int, int], None] | None,
) -> Stage:
    """Load the layers from the end of stage `before` to the layer at which the device stops."""
    start = 0 if before is None else before.start + len(before.layers)
    stop = len(spec.layers) if stage_device.stop is None else stage_device.stop
    loader = WeightLoader(source, ops=stage_device.ops, dtype=dtype, device=stage_device.device, norm=spec.norm)
    layers = []
    for index in range(start, stop):
        layers.append(load_layer(index, spec.layers[index], loader, stage_device.ops, spec.eps))
        if progress is not None:
            progress(index + 1, len(spec.layers))
    positions = max(max_context, LANE)  # padding tokens have any position of a page, also where the context is shorter
    return Stage(
        device=stage_device.device,
        ops=stage_device.ops,
        start=start,
        layers=layers,
        runs=runs_of_layers(layers, stage_device.ops, spec.eps),
        ropes=rope_tables(spec.layers[start:stop], positions, dtype=dtype, device=stage_device.device),
        entrance=None
        if before is None
        else stage_boundary(before.device, stage_device.device, spec, start, rows=rows, dtype=activation),
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
            if thread is not threading.current_thread():  # a stage may hold the last reference to the backend
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
        first.pop()()  # The function is not kept, because it may refer to operations with threads of their own.
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
    One buffer sends (in pinned host memory where only one side is a GPU), one receives: the sender's tensors are free as soon as
    they are in the first.
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
        except (RuntimeError, MemoryError):  # torch reports missing memory like this
            raise OutOfMemory(f"the {rows} rows between {source} and {target} do not fit; lower --turn-tokens") from None
        self._gpu = next((device for device in (source, target) if device.type == "cuda"), None) if pinned else None

    @property
    def nbytes(self) -> int:
        return self._sent.nbytes + self._received.nbytes + self._inputs.nbytes

    def cross(self, x: Tensor, own: Tensor | None, rows: int | None = None) -> tuple[Tensor, Tensor | None]:
        """Copy x [T, E] and own [T, later layers, width] to the second device. `rows`: the number of rows to which the second
        stage pads the step, if it pads differently; rows beyond len(x) are padding, with values of an earlier step."""
        rows = len(x) if rows is None else rows
        count = min(len(x), rows)
        if max(count, rows) > len(self._sent):
            raise AssertionError(f"a step of {max(count, rows)} rows crosses a boundary of {len(self._sent)}")
        if x.dtype != self._sent.dtype:
            raise AssertionError(f"a stream of {x.dtype} crosses a boundary of {self._sent.dtype}")
        sent = self._sent[:count]
        self._synchronize()  # the copy of the step before out of this buffer must be complete
        sent.copy_(x[:count], non_blocking=True)
        if self._source.type == "cuda":
            self._synchronize()  # the host reads the buffer next
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
    """Kernels are launched on the current device, wherever their arguments are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
