"""Kill replicas while they serve, and report errors, differences from one process, and how long the streams pause.

    python -m bench.replicas_kill [MODEL] [--streams 200] [--replicas 2] [--tokens 64] [--max-batch 48] [--json]

First `onedraw serve MODEL` answers all requests in one process, then `onedraw serve MODEL --replicas N` answers them again, while
replicas are killed with SIGKILL: a random one once an eighth of the streams has begun, and another one 5 seconds after all serve
again, for as long as streams run. The requests are streamed at the same time. They differ in path and parameters (temperature 1
with penalties, a JSON schema, a tool call, n = 2, stop strings, logprobs). Token ids, texts, logprobs and finish reasons are
compared.

The pause of a stream is the longest time between two of its chunks around a kill. Its parts: until the server has noticed the
death and given the requests to others (from the server's log), and from there until the next token, in which the prompt and the
tokens so far are computed again, beside all other work.
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
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.load import events, percentile

START_SECONDS = 600.0  # to start a server
BEGUN = 8  # The first replica is killed when one of so many streams has begun.
BETWEEN_KILLS = 5.0  # from the moment at which all replicas serve to the next kill
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}, "tall": {"type": "boolean"}},
    "required": ["name", "age", "tall"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "save", "description": "Save a person.", "parameters": SCHEMA}}
KINDS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("penalties", "/v1/completions", {"frequency_penalty": 0.4, "presence_penalty": 0.2, "repetition_penalty": 1.1}),
    (
        "schema",
        "/v1/chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}},
    ),
    ("tool", "/v1/chat/completions", {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}),
    ("two choices", "/v1/completions", {"n": 2, "presence_penalty": 0.5}),
    ("stop", "/v1/completions", {"stop": [" the", "\n\n"], "min_tokens": 8}),
    ("logprobs", "/v1/completions", {"logprobs": 2, "top_p": 0.95}),
)
SUBJECTS = ("the sea", "a bridge", "winter", "bread", "a lighthouse", "two brothers", "the moon", "a long train")


@dataclass(frozen=True, slots=True)
class Case:
    kind: str
    path: str
    body: bytes


def workload(count: int, *, tokens: int) -> list[Case]:
    """Requests of all kinds in turn, whose replies have at most so many tokens."""
    found = []
    for number in range(count):
        kind, path, options = KINDS[number % len(KINDS)]
        subject = SUBJECTS[number // len(KINDS) % len(SUBJECTS)]
        text = f"Tell me about {subject}, in story {number}."
        prompt = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text, "ignore_eos": True}
        body = {"temperature": 1.0, "seed": number, "max_tokens": tokens, "stream": True, "return_token_ids": True}
        found.append(Case(kind, path, json.dumps(body | prompt | options).encode()))
    return found


@dataclass(slots=True)
class Choice:
    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    finish: str | None = None

    def add(self, part: dict[str, Any]) -> None:
        delta = part.get("delta") or {}
        calls = delta.get("tool_calls") or ()
        self.ids += part.get("token_ids") or ()
        self.text += (part.get("text") or "") + (delta.get("content") or "")
        self.text += "".join((call["function"].get("name") or "") + call["function"]["arguments"] for call in calls)
        if part.get("logprobs"):
            self.logprobs.append(part["logprobs"])
        self.finish = part["finish_reason"] or self.finish

    def content(self) -> tuple[Any, ...]:
        """What may not depend on the number of chunks."""
        lists: dict[str, list[Any]] = {}
        for part in self.logprobs:
            for name, values in part.items():
                lists.setdefault(name, []).extend(values or ())
        return self.ids, self.text, lists, self.finish


@dataclass(slots=True)
class Answer:
    """What a client got. `times` are those of its chunks with tokens, in seconds since the epoch."""

    choices: dict[int, Choice] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    error: str = ""

    def content(self) -> list[tuple[Any, ...]]:
        return [self.choices[index].content() for index in sorted(self.choices)]


async def ask(case: Case, *, port: int, answer: Answer) -> None:
    """Fill `answer` with what the server streams."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST {case.path} HTTP/1.1\r\nhost: bench\r\nconnection: close\r\ncontent-length: {len(case.body)}\r\n\r\n"
        writer.write(head.encode() + case.body)
        status = (await reader.readline()).decode().strip()
        while (await reader.readline()).strip():
            pass
        if " 200 " not in status:
            answer.error = f"{status}: {(await reader.read()).decode()[:300]}"
            return
        async for event in events(reader):
            if event == b"[DONE]":
                return
            chunk = json.loads(event)
            if "error" in chunk:
                answer.error = chunk["error"]["message"]
                return
            for part in chunk["choices"]:
                answer.choices.setdefault(part["index"], Choice()).add(part)
                if part.get("token_ids"):
                    answer.times.append(time.time())
        answer.error = "the stream ended without [DONE]"
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
        answer.error = repr(error)
    finally:
        writer.close()


async def ask_all(cases: Sequence[Case], *, port: int, answers: Sequence[Answer]) -> None:
    await asyncio.gather(*(ask(case, port=port, answer=answer) for case, answer in zip(cases, answers, strict=True)))


# ---------------------------------------------------------------------------------------------- the server


@dataclass(frozen=True, slots=True)
class ServerProcess:
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def port(self) -> int:
        found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", self.log.read_text())
        assert found is not None
        return int(found[1])

    def wait_for(self, pattern: str, count: int = 1) -> None:
        """Wait until the log has so many lines with this pattern."""
        deadline = time.monotonic() + START_SECONDS
        while len(re.findall(pattern, self.log.read_text(), re.MULTILINE)) < count:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server does not start, or has ended:\n{self.log.read_text()}")
            time.sleep(0.05)

    def pids(self) -> dict[str, int]:
        """The latest process of each replica, by the replica's number."""
        return {name: int(pid) for name, pid in re.findall(r"replica (\d+)[.\d]* serves in process (\d+)", self.log.read_text())}

    def moves(self) -> list[float]:
        """When the server has noticed each death, in seconds since the epoch."""
        return self._moments(r"WARNING replica \S+ died")

    def moved(self) -> int:
        """How many streams lost their replica."""
        return sum(int(count) for count in re.findall(r"replica \S+ died; (\d+) requests", self.log.read_text()))

    def replacements(self) -> list[float]:
        """When each replica that replaces another one has begun to serve."""
        return self._moments(r"INFO replica \d+\.\d+ serves")

    def _moments(self, pattern: str) -> list[float]:
        found = re.findall(rf"^(\S+ \S+) {pattern}", self.log.read_text(), re.MULTILINE)
        return [datetime.fromisoformat(moment).timestamp() for moment in found]


@contextmanager
def server(model: str, *arguments: str) -> Iterator[ServerProcess]:
    """Run `onedraw serve` on a free port until the block ends, then stop it with SIGTERM."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "onedraw.cli.main", "serve", model, "--port", "0", "--drain-seconds", "5", *arguments]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        served = ServerProcess(process, log)
        try:
            served.wait_for("^ready")
            yield served
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def kill_while(
    running: asyncio.Task[None], served: ServerProcess, replicas: int, answers: Sequence[Answer], seed: int, most: int
) -> list[float]:
    """Kill random replicas until the streams have ended, at most so many. Return when each was killed."""
    chance, killed = random.Random(seed), list[float]()
    while not running.done() and BEGUN * sum(bool(answer.times) for answer in answers) < len(answers):
        await asyncio.sleep(0.05)
    known = served.pids()
    while not running.done() and len(killed) < most:
        victim = chance.choice(sorted(known))
        killed.append(time.time())
        os.kill(known[victim], signal.SIGKILL)
        while not running.done() and served.pids()[victim] == known[victim]:
            await asyncio.sleep(0.05)
        known = served.pids()
        await asyncio.wait([running], timeout=BETWEEN_KILLS)
    return killed


async def ask_and_kill(
    cases: Sequence[Case], served: ServerProcess, *, replicas: int, seed: int = 0, most: int = 1000
) -> tuple[list[Answer], list[float]]:
    """Stream all cases at the same time while replicas are killed. Return the answers, and when replicas were killed."""
    answers = [Answer() for _ in cases]
    running = asyncio.create_task(ask_all(cases, port=served.port, answers=answers))
    killed = await kill_while(running, served, replicas, answers, seed, most)
    await running
    return answers, killed


# ---------------------------------------------------------------------------------------------- results


@dataclass(frozen=True, slots=True)
class Result:
    streams: int
    tokens: int
    kills: int
    paused: int  # streams that paused for a kill
    errors: int
    different: int
    notice_ms: float  # median time from a kill until the server has noticed it
    replaced_s: float  # median time from a kill until another replica serves
    pause_median_s: float
    pause_p99_s: float
    usual_gap_p99_s: float  # between chunks, away from kills
    seconds_one_process: float
    seconds_replicas: float
    notes: tuple[str, ...] = ()


def pauses(answers: Sequence[Answer], killed: Sequence[float], noticed: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the gaps between chunks that lie around a kill, and all others. A stream of another replica has a gap there as well,
    which is short."""
    around, others = list[float](), list[float]()
    for answer in answers:
        for before, after in zip(answer.times, answer.times[1:], strict=False):
            (
                around if any(before <= seen and after >= kill for kill, seen in zip(killed, noticed, strict=False)) else others
            ).append(after - before)
    return around, others


def metric(port: int, name: str) -> float:
    from urllib.request import urlopen

    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        found = re.search(rf"^{name}{{[^}}]*}} (\S+)", answer.read().decode(), re.MULTILINE)
    return float(found[1]) if found else 0.0


def measure(model: str, *, streams: int, replicas: int, tokens: int, max_batch: int, context: int, kv_memory: str) -> Result:
    cases = workload(streams, tokens=tokens)
    common = ["--threads", "1", "--max-batch", str(max_batch), "--max-context", str(context), "--queue-limit", str(4 * streams)]
    common += ["--kv-memory", kv_memory]
    with server(model, *common) as one:
        expected = [Answer() for _ in cases]
        start = time.monotonic()
        asyncio.run(ask_all(cases, port=one.port, answers=expected))
        seconds_one = time.monotonic() - start
    with server(model, *common, "--replicas", str(replicas)) as many:
        many.wait_for(r"replica \S+ serves in process", replicas)
        start = time.monotonic()
        answers, killed = asyncio.run(ask_and_kill(cases, many, replicas=replicas))
        seconds_many = time.monotonic() - start
        noticed, replaced, moved = many.moves(), many.replacements(), many.moved()
    around, others = pauses(answers, killed, noticed)
    longest = sorted(around)[-moved:] if moved else []
    wrong = [
        f"{case.kind}: {answer.content()} instead of {right.content()}"[:600]
        for case, answer, right in zip(cases, answers, expected, strict=True)
        if answer.content() != right.content()
    ]
    errors = [f"{case.kind}: {one.error}" for case, one in zip(cases, [*answers], strict=True) if one.error]
    errors += [f"one process, {case.kind}: {one.error}" for case, one in zip(cases, expected, strict=True) if one.error]
    return Result(
        streams=streams,
        tokens=sum(len(choice.ids) for answer in answers for choice in answer.choices.values()),
        kills=len(killed),
        paused=moved,
        errors=len(errors),
        different=len(wrong),
        notice_ms=1000 * statistics.median([seen - kill for kill, seen in zip(killed, noticed, strict=False)] or [0.0]),
        replaced_s=statistics.median([back - kill for kill, back in zip(killed, replaced, strict=False)] or [0.0]),
        pause_median_s=statistics.median(longest or [0.0]),
        pause_p99_s=percentile(longest, 0.99),
        usual_gap_p99_s=percentile(others, 0.99),
        seconds_one_process=seconds_one,
        seconds_replicas=seconds_many,
        notes=tuple(errors[:3] + wrong[:3]),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill replicas while they serve, and compare the replies with one process.")
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64, help="longest reply")
    parser.add_argument("--max-batch", type=int, default=48)
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--kv-memory", default="600MiB", help="of each engine")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(
        options.model,
        streams=options.streams,
        replicas=options.replicas,
        tokens=options.tokens,
        max_batch=options.max_batch,
        context=options.context,
        kv_memory=options.kv_memory,
    )
    if options.json:
        print(json.dumps(asdict(result)))
    else:
        for name, value in asdict(result).items():
            print(f"{name:24}{value:.3f}" if isinstance(value, float) else f"{name:24}{value}")
    return 1 if result.errors or result.different or not result.paused else 0


if __name__ == "__main__":
    sys.exit(main())
