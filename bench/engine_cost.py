"""What the engine itself costs per turn: everything in `Engine.turn` that is not the backend's own work.

    python -m bench.engine_cost [--rows 1,64] [--turns 300] [--context 200] [--json]

Steady decode on the fake backend: every row holds about `--context` tokens and takes one token per turn; nobody arrives
or leaves. A turn's cost is its wall time less `Outcome.seconds`, the time the backend says it took. Prompts are computed
and pages warmed before the first measured turn.
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
WARM = 20  # turns before the first measured one
TARGETS = {1: 0.2, 64: 2.0}  # milliseconds per turn


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds per turn, the backend's own time taken off."""

    rows: int
    turns: int
    context: int  # tokens of a row halfway through
    median: float
    p99: float
    worst: float

    @property
    def verdict(self) -> str:
        target = TARGETS.get(self.rows)
        return "" if target is None else f"{'within' if self.median <= target else 'OVER'} {target:g} ms"


def running_engine(*, rows: int, length: int, room: int) -> Engine:
    """An engine whose rows have computed their prompts and are decoding. Prompts differ from their first token on."""
    longest = length + room
    pages = rows * -(-longest // PAGE_SIZE)
    backend = FakeBackend(vocab=VOCAB, pages=pages, lanes=rows, page_size=PAGE_SIZE, max_context=longest)
    allocator = Allocator(backend.capacity, reuse=True)
    scheduler = Scheduler(allocator=allocator, capacity=backend.capacity, speculator=Speculator(), step_tokens=512)
    engine = Engine(backend=backend, scheduler=scheduler)
    for row in range(rows):
        prompt = tuple((row + 7 * i + i * i) % VOCAB for i in range(length))
        params = SamplingParams(temperature=0.0, max_tokens=room, seed=row)
        engine.add(Request(id=f"r{row}", prompt=prompt, params=params), _nobody)
    while any(sequence.remaining > 1 for sequence in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    return engine


def _nobody(event: Event) -> None:
    """A sink that keeps nothing: the cost of hearing belongs to the hearer."""


def measure(*, rows: int, turns: int, context: int) -> Cost:
    filling = -(-rows * context // 512) + 2  # turns in which early rows decode while late prompts are computed
    length = max(context - WARM - turns // 2, PAGE_SIZE)
    engine = running_engine(rows=rows, length=length, room=turns + WARM + filling)
    for _ in range(WARM):
        engine.step()
    costs: list[float] = []
    gc.collect()
    for _ in range(turns):
        before = engine.stats().step_seconds
        begin = time.perf_counter()
        engine.step()
        spent = time.perf_counter() - begin
        costs.append(1e3 * (spent - (engine.stats().step_seconds - before)))
    if len(engine.scheduler.running) != rows:
        raise AssertionError(f"{len(engine.scheduler.running)} of {rows} rows were left at the end: not a steady decode")
    costs.sort()
    halfway = statistics.fmean(sequence.known for sequence in engine.scheduler.running) - turns / 2
    return Cost(
        rows=rows,
        turns=turns,
        context=round(halfway),
        median=statistics.median(costs),
        p99=costs[int(0.99 * len(costs))],
        worst=costs[-1],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,64", help="rows per turn, comma-separated")
    parser.add_argument("--turns", type=int, default=300, help="measured turns")
    parser.add_argument("--context", type=int, default=200, help="tokens of a row halfway through")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    costs = [measure(rows=int(rows), turns=options.turns, context=options.context) for rows in options.rows.split(",")]
    if options.json:
        print(json.dumps([asdict(cost) for cost in costs], indent=2))
        return
    for cost in costs:
        print(
            f"{cost.rows:3d} row{'s' * (cost.rows > 1)}, {cost.turns} turns, contexts around {cost.context}: "
            f"median {cost.median:.3f} ms, p99 {cost.p99:.3f} ms, worst {cost.worst:.3f} ms   {cost.verdict}"
        )


if __name__ == "__main__":
    main()
