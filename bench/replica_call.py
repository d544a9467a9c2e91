"""What it costs that an engine is in another process, or a replica in a Ray cluster: per request, per step and per token.

    python -m bench.replica_call [--streams 100] [--tokens 200] [--json]

The backend's steps take a few microseconds (`--backend fake`, model `scripted`), so all of the time is that of the engine and of
the way to it. A round trip is a request of one token, alone. CPU time is that of the client's process, without HTTP and text.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from dataclasses import asdict, dataclass

from onedraw.build.engine_process import EngineProcess, StartEngine
from onedraw.build.llm import build_llm
from onedraw.cluster.autoscaling import AutoscalingConfig
from onedraw.cluster.ray_replicas import RayReplicas, ReplicaOptions
from onedraw.engine.client import EngineClient, Event
from onedraw.settings import Settings
from onedraw.types import Request, SamplingParams

ROUNDS = 300


@dataclass(frozen=True, slots=True)
class Cost:
    round_trip_ms: float  # median
    round_trip_p99_ms: float
    step_ms: float  # one stream
    step_cpu_ms: float
    token_us: float  # many streams
    token_cpu_us: float


def ask(engine: EngineClient, name: str, count: int, tokens: int) -> float:
    """Return the seconds until so many requests of so many tokens have ended."""
    done = threading.Semaphore(0)

    def sink(event: Event) -> None:
        if event.finish is not None or event.error is not None:
            assert event.error is None, event.error
            done.release()

    params = SamplingParams(max_tokens=tokens, temperature=0.0)
    requests = [Request(id=f"{name}-{i}", prompt=(97, 98, 99 + i % 20), params=params, speculate=False) for i in range(count)]
    checked = [(engine.check(request), sink) for request in requests]
    start = time.perf_counter()
    engine.submit(checked)
    for _ in range(count):
        done.acquire()
    return time.perf_counter() - start


def measure(start_engine: StartEngine | None, *, streams: int, tokens: int) -> Cost:
    settings = Settings(backend="fake", model="scripted", max_batch=streams, max_context=tokens + 16, draft=("none",))
    with build_llm(settings, start_engine=start_engine) as llm:
        engine = llm.service
        ask(engine, "warm", streams, 20)
        trips = sorted(ask(engine, f"trip{i}", 1, 1) for i in range(ROUNDS))
        before = time.process_time()
        one = ask(engine, "one", 1, tokens)
        one_cpu = time.process_time() - before
        before = time.process_time()
        many = ask(engine, "many", streams, tokens)
        many_cpu = time.process_time() - before
    return Cost(
        round_trip_ms=1000 * statistics.median(trips),
        round_trip_p99_ms=1000 * trips[int(0.99 * len(trips))],
        step_ms=1000 * one / tokens,
        step_cpu_ms=1000 * one_cpu / tokens,
        token_us=1e6 * many / (streams * tokens),
        token_cpu_us=1e6 * many_cpu / (streams * tokens),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what an engine elsewhere costs.")
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    places: dict[str, StartEngine | None] = {
        "this process": None,
        "own process": EngineProcess,
        "replica": lambda settings: RayReplicas(settings, ReplicaOptions(AutoscalingConfig(1, 1))),
    }
    for place, start_engine in places.items():
        cost = measure(start_engine, streams=options.streams, tokens=options.tokens)
        if options.json:
            print(json.dumps({"place": place, **asdict(cost)}))
        else:
            print(f"{place:14}" + "  ".join(f"{name} {value:.3f}" for name, value in asdict(cost).items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
