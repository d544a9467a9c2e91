"""CUDA graphs of repeated work: captured once per signature, then replayed in one launch.

In: a signature, and work that reads nothing but device memory at fixed addresses. Out: the result of the work, which is the same
whether the work is captured or not. `NoCapture` runs the work itself where there are no CUDA graphs. A signature is the facts
that decide which kernels the work launches, and with which addresses.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from onedraw.backends.torch.runner.pipeline import StageDevice

if TYPE_CHECKING:  # not imported at run time, since remote stages need packages that others do without
    from onedraw.backends.torch.remote.stage import RemoteStage

log = logging.getLogger("onedraw")
ResultT = TypeVar("ResultT")
MOST = 128  # a device keeps this many graphs for each of its stages and once more, then drops the least recently used


class GraphCache(Protocol):
    def run(self, signature: Hashable, work: Callable[[], ResultT]) -> ResultT:
        """Run the work and return its result, or replay the graph that was captured for this signature."""
        ...


class NoCapture:
    def run(self, signature: Hashable, work: Callable[[], ResultT]) -> ResultT:
        return work()


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    graph: Any  # a torch.cuda.CUDAGraph
    result: Any  # tensors in the memory pool that all graphs share, so the next replay of any graph may overwrite them


class CudaGraphs:
    """The graphs of one device. They share a memory pool, since no two of them run at once. Owner: the backend.

    The first work of a signature runs uncaptured, which also compiles its kernels; then it is captured, which computes nothing.
    Work whose capture fails causes one warning and is never captured again.
    """

    def __init__(self, device: torch.device, most: int = MOST) -> None:
        self._device, self._most = device, most
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: OrderedDict[Hashable, CapturedGraph | None] = OrderedDict()
        self.replayed = 0

    def __len__(self) -> int:
        return sum(graph is not None for graph in self._graphs.values())

    def run(self, signature: Hashable, work: Callable[[], ResultT]) -> ResultT:
        if signature not in self._graphs:
            result = work()
            self._graphs[signature] = self._capture(work)
            if len(self._graphs) > self._most:
                self._graphs.popitem(last=False)
            return result
        self._graphs.move_to_end(signature)
        known = self._graphs[signature]
        if known is None:
            return work()
        known.graph.replay()
        self.replayed += 1
        replayed: ResultT = known.result
        return replayed

    def _capture(self, work: Callable[[], Any]) -> CapturedGraph | None:
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
            log.warning("CUDA graph capture failed, so this step shape runs kernel by kernel: %s", error)
            torch.cuda.synchronize(self._device)
            return None
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return CapturedGraph(graph, result)


def graph_caches(stage_devices: Sequence[StageDevice | RemoteStage], given: GraphCache | None = None) -> list[GraphCache | None]:
    """For each stage, the graphs of its device, or None if the stage cannot be captured. `given`: used instead
    for all stages that can be captured."""
    captured = [
        place.device if isinstance(place, StageDevice) and place.ops.capture is not None else None for place in stage_devices
    ]
    made: dict[torch.device, GraphCache] = {}
    for device, stages in Counter(device for device in captured if device is not None).items():
        made[device] = CudaGraphs(device, (stages + 1) * MOST) if device.type == "cuda" else NoCapture()
    return [None if device is None else made[device] if given is None else given for device in captured]
