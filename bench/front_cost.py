"""Measure the work of a front per request and per token: routing at several numbers of replicas, and what an event costs.

    python -m bench.front_cost [--replicas 4,256,4096] [--prompt-tokens 2048] [--rows 1,16,128] [--json]

In microseconds of CPU time on one thread, the least of five rounds. Per request: the hashes of the prompt's pages, and the choice
of a replica with a table that is full. Per event, which is a step of a request: reading it from an engine's process in a frame of
--rows events, passing it on in the replica set, and turning it into text. HTTP and JSON are not included: `bench.load` measures
them.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence

from onedraw.backends.base import Capacity
from onedraw.build.llm import build_llm
from onedraw.cluster.replica_set import ReplicaSet
from onedraw.cluster.routing import MAX_PAGES_SENT, Loads, SentPages, choose_replica, page_hashes
from onedraw.engine.client import CheckedRequest, Event, FixedWeights, Sink
from onedraw.engine.stats import Stats
from onedraw.engine.wire import Events, decode_from_engine, encode
from onedraw.llm.llm import LLM
from onedraw.llm.reply_stream import ReplyStream
from onedraw.llm.request_options import RequestOptions, generation_for
from onedraw.settings import Settings
from onedraw.types import Request, SampledToken, SamplingParams, Usage

PAGE_SIZE = 16
ROUNDS = 5
LANES = 64


class Idle(FixedWeights):
    """An engine client that accepts requests and does nothing. Its sinks are called by the benchmark."""

    where = "this replica"

    ready, failed, max_requests = True, False, 10**6

    def __init__(self, llm: LLM) -> None:
        self.capacity: Capacity = llm.service.capacity
        self.sinks: dict[str, Sink] = {}

    def stats(self) -> Stats:
        return Stats()

    def check(self, request: Request) -> CheckedRequest:
        return CheckedRequest(request)

    def check_count(self, replies: int, *, param: str | None = None) -> None:
        pass

    def submit(self, requests: Sequence[tuple[CheckedRequest, Sink]]) -> None:
        self.sinks.update({checked.request.id: sink for checked, sink in requests})

    def cancel(self, request_id: str) -> None:
        pass

    def close(self, drain_seconds: float = 0.0) -> None:
        pass


def microseconds(work: Callable[[], object], count: int) -> float:
    """CPU time of each of the `count` pieces of work that a call does."""
    times = []
    for _ in range(ROUNDS):
        begin = time.thread_time()
        work()
        times.append(time.thread_time() - begin)
    return 1e6 * min(times) / count


def routing_cost(replicas: int, prompts: Sequence[tuple[bytes, ...]], entries: int) -> float:
    """Route requests for these prompts, with so many replicas that all have some requests, and end the oldest ones."""
    table: SentPages[int] = SentPages(entries)
    loads: Loads[int] = Loads()
    draw = random.Random(0)
    for replica in range(replicas):
        loads.add(replica)
        loads.change(replica, draw.randrange(LANES // 2))
    for number in range(entries):
        table.add((b"%08d" % number,), draw.randrange(replicas))

    def route() -> None:
        for pages in prompts:
            chosen = choose_replica(table.matches(pages), loads, page_size=PAGE_SIZE, lanes=LANES)
            assert chosen is not None
            table.add(pages, chosen)
            loads.change(chosen, 1)
            loads.change(chosen, -1)

    return microseconds(route, len(prompts))


def event(request_id: str, number: int) -> Event:
    return Event(request_id, (SampledToken(65 + number % 26),), usage=Usage(prompt=10, completion=number))


def reading_cost(rows: int) -> float:
    frames = [encode(Events(tuple(event(f"chatcmpl-{row:024d}", step) for row in range(rows)))) for step in range(200)]
    return microseconds(lambda: [decode_from_engine(frame) for frame in frames], rows * len(frames))


def writing_cost(rows: int) -> float:
    steps = [Events(tuple(event(f"chatcmpl-{row:024d}", step) for row in range(rows))) for step in range(200)]
    return microseconds(lambda: [encode(step) for step in steps], rows * len(steps))


def replica_set_cost(llm: LLM, events: int = 2000) -> float:
    client = Idle(llm)
    replicas = ReplicaSet("one")
    replicas.add("r0", client, fingerprint="one")
    request = Request("a", (1, 2, 3), SamplingParams(seed=1, max_tokens=events))
    replicas.submit([(CheckedRequest(request), lambda event: None)])
    sent = [event("a", number) for number in range(events)]
    found = microseconds(lambda: [client.sinks["a"](one) for one in sent], events)
    replicas.close()
    return found


def text_cost(llm: LLM, events: int = 1000) -> float:
    generation = generation_for(llm, "The sea", RequestOptions.of(max_tokens=ROUNDS * events + 1, temperature=1.0))
    stream = ReplyStream(0, generation, llm.tokenizer)
    sent = [event("a", number) for number in range(events)]
    return microseconds(lambda: [stream.push(one) for one in sent], events)


def measure(
    replicas: Sequence[int], rows: Sequence[int], prompt_tokens: int, *, entries: int = MAX_PAGES_SENT
) -> dict[str, float]:
    """Return microseconds by what they are spent on. `entries`: of the full table."""
    draw = random.Random(1)
    stems = [[draw.randrange(50_000) for _ in range(prompt_tokens // 2)] for _ in range(20)]
    prompts = [[*stems[number % 20], *(draw.randrange(50_000) for _ in range(prompt_tokens // 2))] for number in range(200)]
    found = {f"hashes of a prompt of {prompt_tokens}": microseconds(lambda: [page_hashes(p, PAGE_SIZE) for p in prompts], 200)}
    hashed = [page_hashes(prompt, PAGE_SIZE) for prompt in prompts]
    for count in replicas:
        found[f"choice among {count} replicas"] = routing_cost(count, hashed, entries)
    for count in rows:
        found[f"event written, frame of {count}"] = writing_cost(count)
        found[f"event read, frame of {count}"] = reading_cost(count)
    with build_llm(Settings(model="fake", backend="fake", max_context=8192)) as llm:
        found["event passed on by the replica set"] = replica_set_cost(llm)
        found["event to text"] = text_cost(llm)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="4,256,4096")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--rows", default="1,16,128", help="events in a frame")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(
        [int(n) for n in options.replicas.split(",")], [int(n) for n in options.rows.split(",")], options.prompt_tokens
    )
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for name, cost in found.items():
        print(f"{name:40s} {cost:10.1f} us")


if __name__ == "__main__":
    main()
