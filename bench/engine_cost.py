"""Measure the engine overhead per step: the time in `Engine.step` outside the backend.

    python -m bench.engine_cost [--rows 1,64] [--steps 300] [--context 200] [--json]

Decodes a constant batch on the fake backend: every row holds about --context tokens and gets one token per step, and no request
starts or finishes. The overhead of a step is its wall time minus `Outcome.seconds`, the duration that the backend reports.
All prompts are computed before the first measured step.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from dataclasses import asdict, dataclass

from onedraw.backends.fake import FakeBackend
from onedraw.engine.engine import Engine, Event
from onedraw.engine.scheduler import Scheduler
from onedraw.memory.allocator import Allocator
from onedraw.speculation.speculator import Speculator
from onedraw.types import Request, SamplingParams

PAGE_SIZE = 16
VOCAB = 61
WARM_UP = 20  # steps before the first measured one
TARGETS = {1: 0.2, 64: 2.0}  # largest median, in milliseconds per step, by rows


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds per step outside the backend."""

    rows: int
    steps: int
    context: int  # tokens per row, halfway through the measurement
    median: float
    p99: float
    worst: float

    @property
    def verdict(self) -> str:
        target = TARGETS.get(self.rows)
        return "" if target is None else f"{'within' if self.median <= target else 'OVER'} {target:g} ms"


def decoding_engine(*, rows: int, length: int, new_tokens: int) -> Engine:
    """Return an engine whose rows are all decoding. Their prompts differ in the first token, so no pages are shared."""
    longest = length + new_tokens
    pages = rows * -(-longest // PAGE_SIZE)
    backend = FakeBackend(vocab=VOCAB, pages=pages, lanes=rows, page_size=PAGE_SIZE, max_context=longest)
    allocator = Allocator(backend.capacity, reuse=True)
    scheduler = Scheduler(allocator=allocator, capacity=backend.capacity, speculator=Speculator(), step_tokens=512)
    engine = Engine(backend=backend, scheduler=scheduler)
    for row in range(rows):
        prompt = tuple((row + 7 * i + i * i) % VOCAB for i in range(length))
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, seed=row)
        engine.add(Request(id=f"r{row}", prompt=prompt, params=params), ignore_event)
    while any(sequence.remaining > 1 for sequence in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    return engine


def ignore_event(event: Event) -> None:
    """Discard the event, since the cost of a sink is not part of the engine."""


def measure(*, rows: int, steps: int, context: int) -> Cost:
    filling = -(-rows * context // 512) + 2  # steps in which the first rows decode while later prompts are computed
    length = max(context - WARM_UP - steps // 2, PAGE_SIZE)
    engine = decoding_engine(rows=rows, length=length, new_tokens=steps + WARM_UP + filling)
    for _ in range(WARM_UP):
        engine.step()
    costs: list[float] = []
    gc.collect()
    for _ in range(steps):
        before = engine.stats().step_seconds
        begin = time.perf_counter()
        engine.step()
        spent = time.perf_counter() - begin
        costs.append(1e3 * (spent - (engine.stats().step_seconds - before)))
    if len(engine.scheduler.running) != rows:
        raise AssertionError(
            f"{len(engine.scheduler.running)} of {rows} rows were still running at the end: the batch was not constant"
        )
    costs.sort()
    halfway = statistics.fmean(sequence.known for sequence in engine.scheduler.running) - steps / 2
    return Cost(
        rows=rows,
        steps=steps,
        context=round(halfway),
        median=statistics.median(costs),
        p99=costs[int(0.99 * len(costs))],
        worst=costs[-1],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,64", help="rows per step, comma-separated")
    parser.add_argument("--steps", "--turns", type=int, default=300, help="number of measured steps")
    parser.add_argument("--context", type=int, default=200, help="tokens per row, halfway through the measurement")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    costs = [measure(rows=int(rows), steps=options.steps, context=options.context) for rows in options.rows.split(",")]
    if options.json:
        print(json.dumps([asdict(cost) for cost in costs], indent=2))
        return
    for cost in costs:
        print(
            f"{cost.rows:3d} row{'s' * (cost.rows > 1)}, {cost.steps} steps, about {cost.context} tokens per row: "
            f"median {cost.median:.3f} ms, p99 {cost.p99:.3f} ms, worst {cost.worst:.3f} ms   {cost.verdict}"
        )


if __name__ == "__main__":
    main()
