"""What the benchmarks share: print and collect their figures, and time work on a GPU.

In: named values, and calls that launch GPU work. Out: printed lines, one JSON file of all figures, milliseconds.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FIGURES: dict[str, Any] = {}  # every figure of this process, by name


def report(name: str, value: Any) -> None:
    """Print a figure and keep it for `write_figures`."""
    FIGURES[name] = value
    print(f"{name:72s} {f'{value:.4g}' if isinstance(value, float) else value}", flush=True)


def write_figures(path: str | Path) -> None:
    Path(path).write_text(json.dumps(FIGURES, indent=1, default=str))


def device_ms(work: Callable[[], Any], *, repeats: int = 20, warm_up: int = 3) -> float:
    """Return the median time of one call on the GPU in milliseconds, measured between CUDA events."""
    times: list[float] = []
    for _ in range(warm_up):
        work()
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def capture(work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Record a call as a CUDA graph, after one call that compiles its kernels."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replay_ms(work: Callable[[], Any], *, repeats: int = 20, calls: int = 1) -> float:
    """Return the median time per call, with `calls` calls in one CUDA graph, so launches from the host are not measured."""
    return device_ms(capture(lambda: [work() for _ in range(calls)]).replay, repeats=repeats) / calls
