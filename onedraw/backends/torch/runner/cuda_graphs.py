"""Turns that repeat: recorded once, then replayed in one launch.

In: a signature and the work of a turn, which reads nothing but device memory that keeps its place. Out: what the work gives.
The work is the same whether it is captured or not, so `NoCapture` is the fallback of `CudaGraphs`. `ReplayedWork` keeps
the first work of a signature and calls it again, as a graph would: without a GPU it shows whether a turn reads anything that
does not come through its feed.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from onedraw.backends.torch.runner.stages import StageDevice

log = logging.getLogger("onedraw")
Result = TypeVar("Result")
SCRIBBLE = 60_000  # no token of a small model, and a number that float16 still has
MOST = 128  # graphs kept of a stage; the one that was used least recently goes


class GraphCache(Protocol):
    def run(self, signature: Hashable, work: Callable[[], Result]) -> Result:
        """Do the work, or what was recorded of a work with this signature."""
        ...


class NoCapture:
    """Records nothing."""

    def run(self, signature: Hashable, work: Callable[[], Result]) -> Result:
        return work()


class ReplayedWork:
    """The first work of a signature again and again; what a work left is gone when the next begins, as in memory that recorded
    works share. Owner: a test."""

    def __init__(self) -> None:
        self._works: dict[Hashable, Callable[[], Any]] = {}
        self._left: list[Tensor] = []
        self.replayed = 0

    def run(self, signature: Hashable, work: Callable[[], Result]) -> Result:
        for tensor in self._left:
            tensor.fill_(True if tensor.dtype == torch.bool else SCRIBBLE)
        known = self._works.setdefault(signature, work)
        self.replayed += known is not work
        result: Result = known()
        self._left = list(_tensors(result))
        return result


def _tensors(result: object) -> Iterator[Tensor]:
    """All that a work left, but for what shares memory with something that stays."""
    if isinstance(result, Tensor):
        if result._base is None:
            yield result
    elif isinstance(result, list | tuple):
        for part in result:
            yield from _tensors(part)
    elif is_dataclass(result):
        for part in fields(result):
            yield from _tensors(getattr(result, part.name))


@dataclass(frozen=True, slots=True)
class Graph:
    graph: Any  # torch.cuda.CUDAGraph
    result: Any  # tensors in the graph's memory, good until the next replay of any graph


UNSEEN = Graph(None, None)


class CudaGraphs:
    """CUDA graphs in one pool of memory, since no two of them run at once. Owner: the backend.

    The first turn of a signature runs as it is, which also compiles its kernels; then its work is recorded, which computes
    nothing. What cannot be recorded goes on as it is, and is said once.
    """

    def __init__(self, device: torch.device, most: int = MOST) -> None:
        self._device, self._most = device, most
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: OrderedDict[Hashable, Graph | None] = OrderedDict()
        self.replayed = 0

    def __len__(self) -> int:
        return sum(graph is not None for graph in self._graphs.values())

    def run(self, signature: Hashable, work: Callable[[], Result]) -> Result:
        known = self._graphs.get(signature, UNSEEN)
        if known is UNSEEN:
            result = work()
            self._graphs[signature] = self._record(work)
            if len(self._graphs) > self._most:
                self._graphs.popitem(last=False)
            return result
        self._graphs.move_to_end(signature)
        if known is None:
            return work()
        known.graph.replay()
        self.replayed += 1
        replayed: Result = known.result
        return replayed

    def _record(self, work: Callable[[], Any]) -> Graph | None:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = work()
                finally:
                    graph.capture_end()
        except Exception as error:
            log.warning("a turn could not be recorded and runs kernel by kernel: %s", error)
            torch.cuda.synchronize(self._device)
            return None
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return Graph(graph, result)


def graph_caches(stage_devices: Sequence[StageDevice], given: GraphCache | None = None) -> list[GraphCache | None]:
    """One per device, for the stages that record."""
    made: dict[torch.device, GraphCache] = {}
    for device, stages in Counter(
        stage_device.device for stage_device in stage_devices if stage_device.ops.capture is not None
    ).items():
        made[device] = CudaGraphs(device, (stages + 1) * MOST) if device.type == "cuda" else NoCapture()
    return [
        None if stage_device.ops.capture is None else made[stage_device.device] if given is None else given
        for stage_device in stage_devices
    ]
