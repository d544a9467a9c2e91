"""Load test with many streaming clients on the fake backend: lost or mixed streams, memory growth, server overhead per token.

    python -m bench.load [--clients 200] [--seconds 60] [--disconnect 0.1] [--json]

The server runs in its own process. Every client streams one request after the other, each over a new connection. The requests are
drawn from a few dozen cases whose tokens were computed one at a time beforehand, and every stream is compared with these tokens.
Some clients disconnect in the middle of a reply. The overhead of a token is the time from the engine event (on the engine thread)
until its bytes are passed to the socket: detokenization, protocol, JSON, and waiting for the event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import sys
import time
from array import array
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from onedraw.build.llm import build_llm
from onedraw.llm.llm import LLM
from onedraw.llm.request_options import RequestOptions, make_generation
from onedraw.settings import Settings

CASES = 48
LONGEST = 48  # tokens of the longest reply
SETTLE_SECONDS = 10.0  # time for the server to free everything after the last client has left
MEMORY_GROWTH = 1.15  # largest ratio of memory at the end to memory after the first quarter


@dataclass(frozen=True, slots=True)
class Case:
    """A request and its tokens when it runs alone."""

    body: bytes
    tokens: tuple[int, ...]


@dataclass(slots=True)
class Tally:
    """What the clients observed. Only the event loop of the clients writes to it."""

    finished: int = 0
    disconnected: int = 0
    lost: int = 0  # refused, or ended before [DONE]
    mixed: int = 0  # tokens that differ from the request run alone
    tokens: int = 0
    first: list[float] = field(default_factory=list)  # seconds to the first token
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Result:
    clients: int
    seconds: float
    finished: int
    disconnected: int
    lost: int
    mixed: int
    tokens_per_second: float
    first_token_median_ms: float
    first_token_p99_ms: float
    overhead_median_ms: float
    overhead_p99_ms: float
    memory_first_mib: float  # after the first quarter of the time
    memory_last_mib: float
    left_running: float
    left_waiting: float
    left_pages: float
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        clean = not (self.lost or self.mixed or self.left_running or self.left_waiting or self.left_pages)
        return clean and self.finished > 0 and self.memory_last_mib <= MEMORY_GROWTH * self.memory_first_mib


def settings(clients: int) -> Settings:
    """Settings with room for all clients, but few pages, so that some requests are preempted and resumed."""
    return Settings(backend="fake", model="fake", max_batch=clients, queue_limit=4 * clients, max_context=256)


def cases() -> list[Case]:
    """Return requests with different lengths and sampling parameters, and their tokens when run one at a time without drafts."""
    found: list[Case] = []
    with build_llm(Settings(backend="fake", model="fake", max_batch=1, draft=("none",), prefix_cache=False)) as llm:
        for number in range(CASES):
            rng = random.Random(number)
            prompt = [rng.randrange(97, 122) for _ in range(rng.randrange(4, 40))]
            options: dict[str, Any] = {
                "temperature": rng.choice((0.0, 0.7, 1.0)),
                "frequency_penalty": rng.choice((0.0, -1.0, 0.5)),
                "seed": number,
                "max_tokens": rng.randrange(8, LONGEST),
                "ignore_eos": True,
            }
            (reply,) = llm.run(make_generation(RequestOptions.of(**options), llm=llm, prompt=tuple(prompt)))
            body = {"prompt": prompt, "stream": True, "return_token_ids": True, **options}
            found.append(Case(json.dumps(body).encode(), tuple(reply.token_ids)))
    return found


# ---------------------------------------------------------------------------------------------- clients


async def events(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the data of the server-sent events of a response in chunked encoding."""
    pending = b""
    while size := int(await reader.readline() or b"0", 16):
        pending += await reader.readexactly(size)
        await reader.readexactly(2)
        *whole, pending = pending.split(b"\n\n")
        for event in whole:
            yield event.removeprefix(b"data: ")


async def stream(case: Case, *, port: int, disconnect_after: int | None, tally: Tally) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        start = time.perf_counter()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\ncontent-length: {len(case.body)}\r\n\r\n"
        writer.write(head.encode() + case.body)
        status = await reader.readline()
        while (await reader.readline()).strip():
            pass
        if b" 200 " not in status:
            tally.lost += 1
            tally.notes.append(status.decode().strip())
            return
        tokens: list[int] = []
        async for event in events(reader):
            if event == b"[DONE]":
                tally.finished += 1
                tally.mixed += tuple(tokens) != case.tokens
                return
            new_tokens = json.loads(event)["choices"][0]["token_ids"]
            if new_tokens and not tokens:
                tally.first.append(time.perf_counter() - start)
            tokens += new_tokens
            tally.tokens += len(new_tokens)
            if disconnect_after is not None and len(tokens) >= disconnect_after:
                tally.disconnected += 1
                tally.mixed += tuple(tokens) != case.tokens[: len(tokens)]
                return
        tally.lost += 1
        tally.notes.append(f"a stream ended after {len(tokens)} tokens without [DONE]")
    finally:
        writer.close()


async def client(number: int, *, port: int, until: float, disconnect: float, cases: Sequence[Case], tally: Tally) -> None:
    """Run at least one stream, then more until the time is over."""
    rng = random.Random(f"client {number}")
    while True:
        case = rng.choice(cases)
        disconnect_after = rng.randrange(1, len(case.tokens)) if rng.random() < disconnect else None
        try:
            await stream(case, port=port, disconnect_after=disconnect_after, tally=tally)
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            tally.lost += 1
            tally.notes.append(repr(error))
        if time.monotonic() >= until:
            return


def memory_mib(pid: int) -> float:
    with open(f"/proc/{pid}/status") as status:
        found = re.search(r"VmRSS:\s+(\d+) kB", status.read())
    return int(found[1]) / 1024 if found else 0.0


async def watch_memory(pid: int, until: float, samples: list[float]) -> None:
    while time.monotonic() < until:
        await asyncio.sleep(0.25)
        samples.append(memory_mib(pid))


async def leftovers(port: int) -> dict[str, float]:
    """Return the running and waiting requests and the used share of the KV cache after all clients have left. Polls the metrics
    until all are zero or SETTLE_SECONDS have passed."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        left = {name: float(re.search(rf"^{name}{{[^}}]*}} (\S+)", text, re.MULTILINE)[1]) for name in names}  # type: ignore[index]
        if not any(left.values()) or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.1)


async def load(*, clients: int, seconds: float, disconnect: float) -> Result:
    expected, tally, samples = cases(), Tally(), list[float]()
    command = [sys.executable, "-m", "bench.load", "--serve", "--clients", str(clients)]
    server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    try:
        greeting = (await server.stdout.readline()).decode()
        found = re.search(r"127\.0\.0\.1:(\d+)", greeting)
        assert found is not None, greeting
        port, until = int(found[1]), time.monotonic() + seconds
        streams = (client(n, port=port, until=until, disconnect=disconnect, cases=expected, tally=tally) for n in range(clients))
        await asyncio.gather(*streams, watch_memory(server.pid, until, samples))
        left = await leftovers(port)
    finally:
        server.send_signal(signal.SIGTERM)
        rest, _ = await server.communicate()
    overhead = json.loads(rest)
    quarter = max(len(samples) // 4, 1)
    return Result(
        clients=clients,
        seconds=seconds,
        finished=tally.finished,
        disconnected=tally.disconnected,
        lost=tally.lost,
        mixed=tally.mixed,
        tokens_per_second=tally.tokens / seconds,
        first_token_median_ms=1000 * statistics.median(tally.first or [0]),
        first_token_p99_ms=1000 * percentile(tally.first, 0.99),
        overhead_median_ms=overhead["median_ms"],
        overhead_p99_ms=overhead["p99_ms"],
        memory_first_mib=statistics.median(samples[quarter : 2 * quarter] or samples),
        memory_last_mib=statistics.median(samples[-quarter:]),
        left_running=left["num_requests_running"],
        left_waiting=left["num_requests_waiting"],
        left_pages=left["kv_cache_usage_perc"],
        notes=tuple(sorted(set(tally.notes))[:5]),
    )


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] if values else 0.0


# ---------------------------------------------------------------------------------------------- the server


class Histogram:
    """Counts durations in steps of 0.1 ms up to 20 seconds, in constant memory."""

    def __init__(self) -> None:
        self._counts = array("L", [0]) * 200_000
        self._total = 0

    def add(self, seconds: float) -> None:
        self._counts[min(int(seconds * 10_000), len(self._counts) - 1)] += 1
        self._total += 1

    def quantile(self, share: float) -> float:
        """Return the milliseconds below which this share of the durations lies."""
        seen = 0
        for tenths, count in enumerate(self._counts):
            seen += count
            if seen > share * self._total:
                return (tenths + 1) / 10
        return 0.0


class Overhead:
    """ASGI middleware that times every engine event until its bytes have been passed to the socket."""

    def __init__(self, app: Any, llm: LLM) -> None:
        self._app = app
        self._event_times: dict[str, deque[float]] = defaultdict(deque)
        self.histogram = Histogram()
        submit = llm.service.submit

        def stamped(requests: Any) -> None:
            submit([(request, self._stamp(request.request.id.rsplit("-", 2)[0], sink)) for request, sink in requests])

        llm.service.submit = stamped  # type: ignore[method-assign]

    def _stamp(self, key: str, sink: Any) -> Any:
        stamps = self._event_times[key]

        def stamped_sink(event: Any) -> None:
            if event.sampled:
                stamps.append(time.perf_counter())
            sink(event)

        return stamped_sink

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        key = ""

        async def timed(message: Any) -> None:
            nonlocal key
            if message["type"] == "http.response.start":
                key = dict(message["headers"]).get(b"x-request-id", b"").decode()
            await send(message)
            now, events = time.perf_counter(), message.get("body", b"").count(b"data: {")
            stamps = self._event_times.get(key) or deque()
            for _ in range(min(events, len(stamps))):  # one message may carry several events
                self.histogram.add(now - stamps.popleft())

        try:
            await self._app(scope, receive, timed)
        finally:
            self._event_times.pop(key, None)


def serve(clients: int) -> None:
    """Serve until SIGTERM, then print the measured overhead."""
    from onedraw.server.config import ServerOptions
    from onedraw.server.serve import Server

    llm = build_llm(settings(clients))
    server = Server(llm, ServerOptions(port=0, log_level="error", drain_seconds=5))
    overhead = Overhead(server.config.app, llm)
    server.config.app = overhead
    server.run()
    print(json.dumps({"median_ms": overhead.histogram.quantile(0.5), "p99_ms": overhead.histogram.quantile(0.99)}))


def main() -> int:
    parser = argparse.ArgumentParser(description="Load test with many streaming clients on the fake backend.")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--disconnect", "--vanish", type=float, default=0.1, help="share of requests whose client disconnects in the middle"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.clients)
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    result = asyncio.run(load(clients=options.clients, seconds=options.seconds, disconnect=options.disconnect))
    if options.json:
        print(json.dumps({**asdict(result), "passed": result.passed}))
    else:
        for name, value in asdict(result).items():
            print(f"{name:24}{value:.2f}" if isinstance(value, float) else f"{name:24}{value}")
        print(f"{'passed':24}{result.passed}")
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
