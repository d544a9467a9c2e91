"""Measure how long a GPU waits for the host between two steps: from the arrival of the sampled tokens to the next graph launch.

    python -m bench.host_step [--steps 400] [--profile] [--json out.json]

Prints the median and the shortest time in microseconds. The engine and the torch backend run as on a GPU, but graph replays are
replaced by a fixed script of sampled tokens (4 of 15 drafts kept). So no GPU is needed, and the GPU calls of a step (copies, an
event, graph launches) are not measured. Async scheduling is off, so the GPU would wait for all of this time. Work that overlaps
the device, such as delivering the events of the previous step, is not included.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from onedraw.backends.torch.backend import TorchBackend
from onedraw.backends.torch.ops.cuda.ops import TritonOps
from onedraw.backends.torch.runner.graph_runner import CapturedStep, GraphStage
from onedraw.backends.torch.runner.pipeline import LayerProbe, ResidualStream
from onedraw.checkpoints.random_weights import random_weights
from onedraw.engine.engine import Engine
from onedraw.engine.scheduler import Scheduler
from onedraw.errors import StepFailed
from onedraw.lab.recorded_drafts import RecordedProposer
from onedraw.memory.allocator import Allocator
from onedraw.models.spec import AttentionSpec, DeltaSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from onedraw.speculation.speculator import Speculator
from onedraw.types import Request, SamplingParams

VOCAB, PAGE, PROMPT, HIDDEN = 4096, 16, 960, 64
ATTENTION = AttentionSpec(heads=4, kv_heads=2, head_dim=16, rope=RopeSpec(1e4, 16), scale=0.25)
DELTA = DeltaSpec(key_heads=1, value_heads=2, key_dim=16, value_dim=16, conv=4)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=4096)
PENALIZED = SamplingParams(temperature=1.0, repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1, max_tokens=4096)
SCRIPT = tuple(i % VOCAB for i in range(4096))


class ScriptedGraphs:
    """A graph cache that captures and computes nothing: every position samples the token of SCRIPT at that position. It records
    the time from the arrival of the previous step's tokens to the launch of the layers."""

    def __init__(self) -> None:
        self.arrived, self.waited = 0.0, list[float]()

    def run(self, signature: Hashable, work: Callable[[], Any]) -> Any:
        arguments = work.args  # type: ignore[attr-defined]
        if isinstance(arguments[0], GraphStage):
            self.waited.append(time.perf_counter() - self.arrived)
            return ResidualStream(torch.zeros(arguments[1].bucket.tokens, HIDDEN), None, 0), LayerProbe()
        layout, request, _ = arguments
        sampled = torch.zeros(layout.bucket.tokens, 1, dtype=torch.int64)
        positions = torch.tensor([len(p.history.output) + len(p.drafts) for p in request.positions])
        sampled[: len(positions), 0] = positions % VOCAB
        return sampled


def make_backend(graphs: ScriptedGraphs, *, recurrent: bool, lanes: int) -> TorchBackend:
    mixers = (DELTA, ATTENTION) if recurrent else (ATTENTION, ATTENTION)
    layers = tuple(LayerSpec(mixer, MlpSpec(64)) for mixer in mixers)
    spec = ModelSpec(family="llama", layers=layers, hidden=HIDDEN, vocab=VOCAB, eps=1e-5, tied=False, max_context=8192)
    backend = TorchBackend(
        spec,
        random_weights(spec, seed=1),
        dtype="f32",
        lanes=lanes,
        pages=lanes * 512,
        page_size=PAGE,
        max_context=8192,
        drafts=15 * lanes,
        ops=TritonOps(torch.device("cpu")),
        check=False,
        graph_cache=graphs,
    )
    backend._capacity = replace(backend.capacity, async_scheduling=False, async_tokens=256)
    return backend


def host_seconds(
    backend: TorchBackend, graphs: ScriptedGraphs, params: SamplingParams, *, rows: int, kept: int | None, count: int
) -> list[float]:
    """Return the seconds that each step waits for the host. The prompts are marked as computed, without computing them."""
    proposers = []
    if kept is not None:
        proposer = RecordedProposer(kept=kept, length=15, vocab=VOCAB)
        proposer.answers = {prompt_of(row): SCRIPT for row in range(rows)}
        proposers = [proposer]
    speculator = Speculator(proposers, draft_tokens=15 if proposers else None)
    capacity = backend.capacity
    scheduler = Scheduler(allocator=Allocator(capacity, reuse=False), capacity=capacity, speculator=speculator, step_tokens=2048)
    engine = Engine(backend=backend, scheduler=scheduler)
    for row in range(rows):
        engine.add(Request(f"r{row}", prompt_of(row), params), lambda event: None)
    scheduler._admit()
    for sequence in scheduler.running:
        sequence.lease.reserve(PROMPT)  # type: ignore[union-attr]
        sequence.history.output.append(SCRIPT[0])
        sequence.computed = PROMPT
    graphs.waited.clear()
    for _ in range(count):
        engine.step()
    engine.fail_all(StepFailed("over"))
    return graphs.waited[10:]


def prompt_of(row: int) -> tuple[int, ...]:
    return (row, *range(1, PROMPT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", "--turns", type=int, default=400)
    parser.add_argument("--profile", action="store_true", help="profile the first case instead of timing all")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    graphs = ScriptedGraphs()

    def wait(self: CapturedStep) -> None:
        graphs.arrived = time.perf_counter()

    CapturedStep.wait = wait  # type: ignore[method-assign]
    for recurrent in (False, True):
        backend = make_backend(graphs, recurrent=recurrent, lanes=8)
        for label, params in (("T 1.0 with penalties", PENALIZED), ("T 0.8, top-p .95", SAMPLED)):
            for rows, kept in ((1, 4), (1, None), (8, 4)):
                count = min(options.steps, 600)
                name = f"{'hybrid' if recurrent else 'attention'}, {rows} rows, {label}, {'drafted' if kept else 'plain'}"
                if options.profile:
                    with cProfile.Profile() as profile:
                        host_seconds(backend, graphs, params, rows=rows, kept=kept, count=count)
                    print(name)
                    pstats.Stats(profile).sort_stats("cumtime").print_stats(70)
                    return
                times = host_seconds(backend, graphs, params, rows=rows, kept=kept, count=count)
                found[name] = [round(1e6 * t) for t in (statistics.median(times), min(times))]
                print(f"{name:60s} median {found[name][0]:6.0f} us, best {found[name][1]:6.0f} us", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
