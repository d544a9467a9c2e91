"""The time a GPU waits for its host between two turns: from the arrival of a turn's answers to the start of the next turn.

    python -m bench.host_step [--turns 400] [--profile] [--json out.json]

In: nothing. Out: microseconds per turn, median and best, of the engine with the backend for GPUs whose recorded work is left out:
what was chosen comes from a script (4 drafts of 15 kept). No GPU is needed, and none of its calls are in the figure: a small
copy each way, an event and the launch of a graph. Turns are not sent off ahead, so all of it is waited for; what is done
beside the device (sinks hear of the turn before) is not in it.
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
from onedraw.backends.torch.model.transformer import LayerProbe, ResidualStream
from onedraw.backends.torch.ops.cuda.ops import TritonOps
from onedraw.backends.torch.runner.graph_runner import CapturedStep, GraphStage
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
ANSWER = tuple(i % VOCAB for i in range(4096))


class Scripted:
    """Records nothing and computes nothing: every position chooses what stands in the answer there. Notes how long ago the
    answers before were there."""

    def __init__(self) -> None:
        self.arrived, self.waited = 0.0, list[float]()

    def run(self, signature: Hashable, work: Callable[[], Any]) -> Any:
        given = work.args  # type: ignore[attr-defined]
        if isinstance(given[0], GraphStage):
            self.waited.append(time.perf_counter() - self.arrived)
            return ResidualStream(torch.zeros(given[1].bucket.tokens, HIDDEN), None, 0), LayerProbe()
        laid, asked, _ = given
        answers = torch.zeros(laid.bucket.tokens, 1, dtype=torch.int64)
        places = torch.tensor([len(p.history.output) + len(p.drafts) for p in asked.positions])
        answers[: len(places), 0] = places % VOCAB
        return answers


def backend_of(recorder: Scripted, *, recurrent: bool, lanes: int) -> TorchBackend:
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
        graph_cache=recorder,
    )
    backend._capacity = replace(backend.capacity, async_scheduling=False, async_tokens=256)
    return backend


def turns(
    backend: TorchBackend, script: Scripted, params: SamplingParams, *, rows: int, kept: int | None, count: int
) -> list[float]:
    """Seconds that turns of so many rows waited for the host; their prompts count as computed."""
    proposers = []
    if kept is not None:
        proposer = RecordedProposer(kept=kept, length=15, vocab=VOCAB)
        proposer.answers = {prompt_of(row): ANSWER for row in range(rows)}
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
        sequence.history.output.append(ANSWER[0])
        sequence.computed = PROMPT
    script.waited.clear()
    for _ in range(count):
        engine.step()
    engine.fail_all(StepFailed("over"))
    return script.waited[10:]


def prompt_of(row: int) -> tuple[int, ...]:
    return (row, *range(1, PROMPT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=400)
    parser.add_argument("--profile", action="store_true", help="where the time of the first case goes")
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    script = Scripted()
    CapturedStep.wait = lambda steady: setattr(script, "arrived", time.perf_counter())  # type: ignore[method-assign]
    for recurrent in (False, True):
        backend = backend_of(script, recurrent=recurrent, lanes=8)
        for label, params in (("T 1.0 with penalties", PENALIZED), ("T 0.8, top-p .95", SAMPLED)):
            for rows, kept in ((1, 4), (1, None), (8, 4)):
                count = min(given.turns, 600)
                name = f"{'hybrid' if recurrent else 'attention'}, {rows} rows, {label}, {'drafted' if kept else 'plain'}"
                if given.profile:
                    with cProfile.Profile() as profile:
                        turns(backend, script, params, rows=rows, kept=kept, count=count)
                    print(name)
                    pstats.Stats(profile).sort_stats("cumtime").print_stats(70)
                    return
                times = turns(backend, script, params, rows=rows, kept=kept, count=count)
                found[name] = [round(1e6 * t) for t in (statistics.median(times), min(times))]
                print(f"{name:60s} median {found[name][0]:6.0f} us, best {found[name][1]:6.0f} us", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
