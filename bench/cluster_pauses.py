"""How long streams pause when replicas die, in steps of an engine: the order in which the replica set continues them.

    python -m bench.cluster_pauses [--streams 240] [--lanes 64] [--tokens 40] [--start-steps 32] [--kills 2] [--json]

Two replicas run in this process. A step takes the same time whatever runs in it (fake backend), so the result does not depend on
the machine, as long as it is not too busy to sleep. All streams begin at once. A replica dies when the streams have had half of
their tokens, another one joins after `--start-steps`, and the other one dies as long after that. All tokens are compared
with those of one engine.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.load import percentile
from onedraw.backends.fake import FakeBackend
from onedraw.build.llm import make_service
from onedraw.cluster.replica_set import ReplicaSet
from onedraw.engine.client import EngineClient, Event
from onedraw.settings import Settings
from onedraw.speculation.speculator import Speculator
from onedraw.types import Plan, Request, SamplingParams
from tests.cluster.mortal import Mortal


class Timed(FakeBackend):
    """A backend whose steps all take the same time."""

    def __init__(self, *, lanes: int, step: float) -> None:
        super().__init__(lanes=lanes, max_context=256, pages=64 * lanes)
        self._step = step

    def submit(self, plan: Plan) -> Any:
        time.sleep(self._step)
        return super().submit(plan)


@dataclass(slots=True)
class Heard:
    """What a caller received, and when."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str = ""
    over: threading.Event = field(default_factory=threading.Event)

    def sink(self, event: Event) -> None:
        self.tokens += [sampled.token for sampled in event.sampled]
        self.times.append(time.monotonic())
        if event.finish is not None or event.error is not None:
            self.error = str(event.error or "")
            self.over.set()


@dataclass(frozen=True, slots=True)
class Result:
    """Pauses are the longest gap of each stream that a death has interrupted. Times are numbers of steps."""

    kills: int
    paused: int
    errors: int
    different: int
    pause_median: float
    pause_p99: float
    first_token_p99: float
    steps: float


def submit(client: EngineClient, options: argparse.Namespace) -> list[Heard]:
    found = []
    for number in range(options.streams):
        params = SamplingParams(max_tokens=options.tokens, temperature=1.0, seed=number)
        request = Request(f"q{number}", (1 + number % 50, 2, 3 + number // 50), params)
        found.append(Heard())
        client.submit([(client.check(request), found[-1].sink)])
    return found


def measure(options: argparse.Namespace) -> Result:
    def replica(step: float) -> Mortal:
        settings = Settings(queue_limit=4 * options.streams)
        return Mortal(make_service(lambda: Timed(lanes=options.lanes, step=step), settings, Speculator()))

    expected = submit(replica(0.0), options)  # type: ignore[arg-type]
    for one in expected:
        one.over.wait()
    replicas, alive, kills = ReplicaSet("one"), list[Mortal](), 0
    for number in range(2):
        alive.append(replica(options.step))
        replicas.add(str(number), alive[-1], fingerprint="one")  # type: ignore[arg-type]
    begin = time.monotonic()
    heard = submit(replicas, options)
    time.sleep(options.step * options.tokens / 2)
    while kills < options.kills and not all(one.over.is_set() for one in heard):
        kills += 1
        alive.pop(0).die()
        time.sleep(options.step * options.start_steps)
        alive.append(replica(options.step))
        replicas.add(f"new {kills}", alive[-1], fingerprint="one")  # type: ignore[arg-type]
        time.sleep(options.step * options.start_steps)
    for one in heard:
        one.over.wait()
    gaps = [max(after - before for before, after in zip(one.times, one.times[1:], strict=False)) for one in heard]
    pauses = sorted(gap / options.step for gap in gaps if gap > 3 * options.step)
    return Result(
        kills=kills,
        paused=len(pauses),
        errors=sum(bool(one.error) for one in heard),
        different=sum(one.tokens != right.tokens for one, right in zip(heard, expected, strict=True)),
        pause_median=percentile(pauses, 0.5),
        pause_p99=percentile(pauses, 0.99),
        first_token_p99=percentile(sorted((one.times[0] - begin) / options.step for one in heard), 0.99),
        steps=(max(one.times[-1] for one in heard) - begin) / options.step,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure in steps how long streams pause when replicas die.")
    parser.add_argument("--streams", type=int, default=240)
    parser.add_argument("--lanes", type=int, default=64, help="of each replica")
    parser.add_argument("--tokens", type=int, default=40, help="of each stream")
    parser.add_argument("--step", type=float, default=0.25, metavar="SECONDS")
    parser.add_argument("--start-steps", type=int, default=32, help="steps until another replica serves")
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = asdict(measure(options))
    print(json.dumps(result) if options.json else "\n".join(f"{name:18}{value:.0f}" for name, value in result.items()))
    return 1 if result["errors"] or result["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
