"""Run servers for an hour under hostile clients and faults; check that no answer is lost, mixed or wrong and memory stays flat.

    python -m bench.soak [--minutes 60] [--seed 0] [--out FOLDER] [--json]

Two servers run at once. The steady one (smollm2, default drafter) lives for the whole run; its memory, file descriptors and
the longest silence of its streams are watched. The other one is killed with SIGKILL and restarted every minute, each time with
the next of LAUNCHES: the tiny model families with every drafter, layer splits, few KV pages, disk snapshots and records. Clients
stream, hang up, read slowly and send bad requests; a disk fills up and has room again; the wall clock jumps.

The steady server's clients are all well-behaved for CALM_SECONDS of every CALM_EVERY. The longest silence of a stream while no
hostile request was in flight is the model's own time, which includes what the machine does besides. The longest silence at other
times minus that is what hostile requests cost a healthy stream.

Every answer belongs to one of a fixed set of seeded requests (Case). At the end a judge runs each of these alone, on a
server without drafts, batches and caches, and all answers that were received, whole or cut, must equal the judge's: token ids,
log-probabilities, text and ending. The exit status is 1 if the report does not hold (`Report.broken`).
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from onedraw.contract.record import read_records
from onedraw.errors import BadSetting
from tests.fixtures.hostile_formats import CORPUS

ROOT = Path(__file__).parents[1]
FIXTURES = ROOT / "tests" / "fixtures"
TRAINED, GGUF = FIXTURES / "trained", FIXTURES / "gguf"
CLOCK_SHIFT = Path(__file__).with_name("clock_shift.c")

NAMES = ("ada", "bob", "eve")  # of the API keys
CASES = 120  # distinct requests per model
PATIENCE = 120.0  # seconds without a byte after which a request counts as lost
DISK = 48 * 2**20  # bytes of the file system that records and snapshots are written to
SETTLE_SECONDS = 20.0
WARM_UP = 0.25  # share of the run before memory is measured
CALM_EVERY, CALM_SECONDS = 60.0, 15.0
LONG_RUN = 30.0  # minutes from which on the bounds on memory and silence hold
MOST_SLOPE = 5.0  # MiB per 10,000 requests
MOST_SILENCE = 1.0  # seconds beyond the model's own time
MORE_DESCRIPTORS = 4  # that an idle server may have after the run: files it opened on its first request


@dataclass(frozen=True, slots=True)
class Launch:
    """One way to start a server. Flags must not change an answer: the judge runs the same model with none of them."""

    name: str
    model: str
    flags: tuple[str, ...] = ()
    chat: bool = True
    snapshots: bool = True


# Few enough KV pages that all of them have been written to when memory is measured.
STEADY = Launch("smollm2", "smollm2", ("--threads", "1", "--max-context", "2048", "--kv-memory", "256MiB"))
_HYBRID = str(TRAINED / "trained_qwen3_5")
_DENSE = str(TRAINED / "trained_qwen3")
_MTP = "qwen3_5_mtp"  # written for each run
_EXPERTS = str(GGUF / "qwen3_5_moe.gguf")
LAUNCHES = (
    Launch("qwen3, block drafter", _DENSE, ("--draft", str(TRAINED / "trained_dflash_qwen3"))),
    Launch("qwen3.5, block drafter, tree", _HYBRID, ("--draft", str(TRAINED / "trained_dflash_qwen3_5"), "--tree-budget", "12")),
    Launch("qwen3.5, few pages", _HYBRID, ("--kv-memory", "1280KiB", "--max-batch", "6")),
    Launch("qwen3.5, split in two", _HYBRID, ("--devices", "cpu,cpu", "--overlap", "on", "--draft", "ngram")),
    Launch("qwen3, draft model", _DENSE, ("--draft", _DENSE, "--draft-tokens", "3")),
    Launch("gemma4, split in three", str(GGUF / "gemma4_26b.gguf"), ("--devices", "cpu,cpu,cpu"), chat=False),
    Launch("laguna, few pages", str(GGUF / "laguna.gguf"), ("--kv-memory", "1536KiB"), chat=False),
    Launch("smollm2, n-grams, small steps", "smollm2", ("--draft", "ngram", "--turn-tokens", "64")),
    Launch("qwen3.5, no checkpoints", _EXPERTS, ("--draft", "ngram", "--checkpoint-memory", "0"), chat=False, snapshots=False),
    Launch("qwen3.5, MTP head", _MTP, ("--draft", "mtp")),
)


# ---------------------------------------------------------------------------------------------- requests and answers

_WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "to", "red", "barn", "while", "one", "two", "birds", "sang")
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]}


def write_mtp_model(folder: Path) -> None:
    """In a process of its own, since it imports torch and transformers."""
    write = "import sys, pathlib; from tests.support import tiny; tiny.write_safetensors(sys.argv[1], pathlib.Path(sys.argv[2]))"
    subprocess.run([sys.executable, "-W", "ignore", "-c", write, _MTP, str(folder)], cwd=ROOT, check=True, capture_output=True)


@dataclass(frozen=True, slots=True)
class Case:
    """A request whose answer is the same whenever and wherever it runs."""

    number: int
    path: str
    body: dict[str, Any]


def make_case(number: int, launch: Launch, *, seed: int) -> Case:
    """Prompts share beginnings, so that the prefix cache and snapshots are used."""
    dice = random.Random(f"{seed} {Path(launch.model).name} {number}")
    words = random.Random(f"{seed} {number % 7}").choices(_WORDS, k=dice.choice((4, 30, 30, 60, 150)))
    text = " ".join([*words, *dice.choices(_WORDS, k=3)])
    body: dict[str, Any] = {"seed": number, "max_tokens": dice.randrange(4, 40), "return_token_ids": True}
    body["temperature"] = dice.choice((0.0, 0.7, 1.0, 1.0))
    extras: list[dict[str, Any]] = [
        {"top_p": 0.9, "min_p": 0.02},
        {"frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.1},
        {"stop": [" a", "the"]},
        {"n": 2},
        {"dry_multiplier": 0.8},
        {"bad_words": [" cat"], "logit_bias": {"30": 2}},
        {"prediction": {"type": "content", "content": text}},
        {"ignore_eos": True},
    ]
    for extra in dice.sample(extras, k=dice.randrange(3)):
        body |= extra
    constrained = dice.random()
    if constrained < 0.06:
        body["guided_json"] = _SCHEMA
    elif constrained < 0.12:
        body["guided_regex"] = "(the|a) [a-z]{3,8}( [a-z]+){1,4}"
    elif constrained < 0.18:
        body["guided_grammar"] = 'start: item ("," item)*\nitem: /[a-z]{1,5}/'
    if any(name.startswith("guided") for name in body):
        body.pop("ignore_eos", None)
    if launch.chat and dice.random() < 0.5:
        body |= {"messages": [{"role": "user", "content": text}], "logprobs": dice.random() < 0.5}
        return Case(number, "/v1/chat/completions", body)
    body |= {"prompt": text}
    if dice.random() < 0.5:
        body["logprobs"] = dice.choice((0, 3))
    return Case(number, "/v1/completions", body)


@dataclass(slots=True)
class Choice:
    """One choice of an answer, as far as it was received."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish: str | None = None

    def add(self, part: dict[str, Any]) -> None:
        self.ids += part.get("token_ids") or []
        found = part.get("logprobs") or {}
        self.logprobs += found.get("token_logprobs") or [token["logprob"] for token in found.get("content") or []]
        said = part.get("delta") or part.get("message") or part
        self.text += said.get("text") or said.get("content") or ""
        self.finish = part.get("finish_reason") or self.finish

    def begins(self, other: Choice) -> bool:
        """Whether this choice, which may have been cut off, agrees with a whole one."""
        ids, logprobs = other.ids[: len(self.ids)], other.logprobs[: len(self.logprobs)]
        return (self.ids, self.logprobs) == (ids, logprobs) and other.text.startswith(self.text)


Answer = dict[int, Choice]  # by the index of the choice


def digest(answer: Answer) -> str:
    whole = {index: asdict(choice) for index, choice in sorted(answer.items())}
    return hashlib.blake2b(json.dumps(whole, sort_keys=True).encode(), digest_size=16).hexdigest()


def completion(**fields: Any) -> tuple[str, bytes]:
    return "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 4, **fields}).encode()


def _results_of_tools(many: int) -> list[dict[str, Any]]:
    calls = [{"function": {"name": "f"}}] * many
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": calls},
        *[{"role": "tool", "content": "a"}] * many,
    ]


@cache
def bad_requests() -> dict[str, tuple[str, bytes]]:
    """Requests that must be refused, or served, without hurting any other request: path and body by name."""

    tool = {"name": "f", "strict": True, "parameters": CORPUS["items_chain"](1_200)["guided_json"]}
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": tool}]}
    return {
        "strict tool": ("/v1/chat/completions", json.dumps(chat | {"tool_choice": "required", "max_tokens": 4}).encode()),
        "prompt of 4 MB": completion(prompt="ab c" * 1_000_000),
        "prediction of 4 MB": completion(prediction={"type": "content", "content": "ab c" * 1_000_000}),
        "a million lists": completion(prompt=[[5]] * 1_000_000),
        "not JSON": ("/v1/completions", b'{"prompt": "a", '),
        "wrong type": completion(temperature="warm"),
        "unknown field": completion(temprature=1),
        "unknown token": completion(prompt=[10**9]),
        "prompt beyond the context": completion(prompt=[5] * 200_000),
        "no such model": completion(model="nothing"),
        "wrong regex": completion(guided_regex="(a"),
        "no text matches": completion(guided_regex="[^\\s\\S]"),
        "deep JSON": ("/v1/completions", b'{"prompt": ' + b"[" * 100_000),
        "not UTF-8": ("/v1/completions", b'{"prompt": "\xff\xfe"}'),
        "5,000 stop strings": completion(stop=[f"s{i}" for i in range(5_000)]),
        "many choices": completion(n=24, max_tokens=8, seed=1),
        "9,000 bad words": completion(bad_words=[f"w{i}" for i in range(9_000)], n=4),
        "logprobs of long prompts": completion(prompt=[[5] * 900] * 40, echo=True, logprobs=100, max_tokens=0),
        "20,000 results of tools": ("/api/chat", json.dumps({"messages": _results_of_tools(20_000), "stream": False}).encode()),
        "20,000 system messages": (
            "/v1/chat/completions",
            json.dumps(
                {"messages": [{"role": "user", "content": "a"}, *[{"role": "system", "content": "a" * 90}] * 20_000]}
            ).encode(),
        ),
    }


@cache
def hostile_formats() -> dict[str, tuple[str, bytes]]:
    """The same of response formats that once cost too much, in sizes that may be served and in sizes that may not."""
    sizes = {name: (50, 120 if name.startswith("nested") else 3_000) for name in CORPUS}  # a body may have 256 levels
    return {f"{name}({size})": completion(**CORPUS[name](size)) for name in CORPUS for size in sizes[name]}


# ---------------------------------------------------------------------------------------------- HTTP


def key_of(name: str) -> str:
    return f"key-of-{name}"


class Cut(Exception):
    """The connection ended before the answer did."""


@dataclass(frozen=True, slots=True)
class Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    status: int


def head(path: str, length: int, key: str) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {key}\r\ncontent-length: {length}\r\n\r\n"
    ).encode()


async def post(port: int, path: str, body: bytes, *, key: str, receive_buffer: int = 2**16) -> Connection:
    """Send a request and read the head of its answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=receive_buffer)
    try:
        writer.write(head(path, len(body), key) + body)
        async with asyncio.timeout(PATIENCE):
            status = await reader.readline()
            while (await reader.readline()).strip():
                pass
        if not status:
            raise Cut("no answer")
        return Connection(reader, writer, int(status.split()[1]))
    except BaseException:
        writer.close()
        raise


async def blocks(reader: asyncio.StreamReader, *, pause: float = 0.0) -> AsyncIterator[bytes]:
    """The parts of a body in chunked encoding, as the server wrote them."""
    while True:
        async with asyncio.timeout(PATIENCE):
            line = await reader.readline()
            if not line:
                raise Cut("the body ended early")
            size = int(line, 16)
            block = await reader.readexactly(size)
            await reader.readexactly(2)
        if size == 0:
            return
        yield block
        if pause:
            await asyncio.sleep(pause)


async def events(reader: asyncio.StreamReader, *, pause: float = 0.0) -> AsyncIterator[bytes]:
    pending = b""
    async for block in blocks(reader, pause=pause):
        *whole, pending = (pending + block).split(b"\n\n")
        for event in whole:
            yield event.removeprefix(b"data: ")


async def get(port: int, path: str, *, key: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(
            f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nauthorization: Bearer {key}\r\n\r\n".encode()
        )
        async with asyncio.timeout(PATIENCE):
            return (await reader.read()).decode()
    finally:
        writer.close()


# ---------------------------------------------------------------------------------------------- servers


class Clock:
    """The wall clock of a server, which can jump."""

    def __init__(self, folder: Path) -> None:
        self._library, self._file = folder / "clock_shift.so", folder / "clock_shift"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(self._library), str(CLOCK_SHIFT)], check=True)
        self._file.write_bytes(struct.pack("=q", 0))

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "CLOCK_SHIFT_FILE": str(self._file)}

    def jump(self, seconds: int) -> None:
        with self._file.open("r+b", buffering=0) as file:  # the server has mapped this file
            file.write(struct.pack("=q", seconds))


class ServerProcess:
    """A server in a process of its own. `epoch` counts its lives; it is odd while the server is down or about to be killed."""

    def __init__(self, out: Path, name: str, keys: Path, *, clock: Clock | None = None) -> None:
        self._log = out / f"{name}.log"
        self._keys, self._clock = keys, clock
        self._process: asyncio.subprocess.Process | None = None
        self.launch = STEADY
        self.port, self.epoch = 0, 1
        self.up = asyncio.Event()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self, launch: Launch, *flags: str) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        if self._clock is not None:
            environment |= self._clock.environment
        command = ["-m", "onedraw", "serve", launch.model, "--port", "0", "--api-key-file", str(self._keys)]
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, *command, *launch.flags, *flags),
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment,
                cwd=ROOT,
            )
        assert self._process.stdout is not None
        while found := await self._process.stdout.readline():
            if match := re.search(rb"http://127\.0\.0\.1:(\d+)/", found):
                self.port, self.launch = int(match[1]), launch
                self.epoch += 1
                self.up.set()
                return
        await self._process.wait()
        raise RuntimeError(f"{launch.name} did not start: {self._log.read_text(errors='replace')[-2000:]}")

    async def kill(self) -> bool:
        """Returns whether the server was still alive."""
        self.up.clear()
        self.epoch += 1
        assert self._process is not None
        alive = self.alive
        if alive:
            self._process.kill()
        await self._process.wait()
        return alive

    async def stop(self) -> int:
        """The exit status after a graceful shutdown."""
        self.up.clear()
        self.epoch += 1
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE):
            return await self._process.wait()

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def memory_mib(self) -> float:
        return _memory_mib(self.pid)

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


def _memory_mib(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


# ---------------------------------------------------------------------------------------------- clients


REQUESTS = ("finished", "hung up", "bad requests", "other", "busy", "refused", "lost", "cut by a kill")


@dataclass(slots=True)
class Tally:
    """What the clients of one server received. Owner: the event loop."""

    counts: Counter[str] = field(default_factory=Counter)
    whole: dict[tuple[str, int], dict[str, tuple[Answer, int]]] = field(default_factory=lambda: defaultdict(dict))
    partial: dict[tuple[str, int], dict[str, Answer]] = field(default_factory=lambda: defaultdict(dict))
    hostile: int = 0  # hostile requests in flight
    hostile_begun: int = 0  # since the start
    longest_calm: float = 0.0  # seconds between two events of a stream while no hostile request was in flight
    longest_disturbed: float = 0.0  # at other times
    first_token: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return sum(self.counts[kind] for kind in REQUESTS)

    @contextmanager
    def hostility(self) -> Iterator[None]:
        self.hostile += 1
        self.hostile_begun += 1
        try:
            yield
        finally:
            self.hostile -= 1

    def received(self, model: str, case: Case, answer: Answer, *, whole: bool) -> None:
        mark = digest(answer)
        if whole:
            seen = self.whole[model, case.number].get(mark, (answer, 0))[1]
            self.whole[model, case.number][mark] = (answer, seen + 1)
        elif answer:
            self.partial[model, case.number][mark] = answer

    def note(self, text: str) -> None:
        if len(self.notes) < 200:
            self.notes.append(text)


class Client:
    """Sends one request after the other to a server, until the end of the run."""

    def __init__(
        self, number: int, server: ServerProcess, tally: Tally, *, begun: float, until: float, seed: int, key: str
    ) -> None:
        self._dice = random.Random(f"{seed} client {number}")
        self._server, self._tally, self._begun, self._until = server, tally, begun, until
        self._seed, self._key = seed, key
        self._doing = ""  # names the request in notes

    async def run(self) -> None:
        while time.monotonic() < self._until:
            if not (self._server.up.is_set() and self._server.alive):
                await asyncio.sleep(0.1)
                continue
            epoch, self._doing = self._server.epoch, ""
            try:
                await self._act()
            except (OSError, ValueError, Cut, TimeoutError, asyncio.IncompleteReadError) as error:
                if self._server.epoch == epoch:
                    self._tally.counts["lost"] += 1
                    self._tally.note(f"{self._server.launch.name}: lost {self._doing}: {error!r}")
                else:
                    self._tally.counts["cut by a kill"] += 1

    async def _act(self) -> None:
        launch, roll = self._server.launch, self._dice.random()
        case = make_case(self._dice.randrange(CASES), launch, seed=self._seed)
        self._doing = f"case {case.number}"
        calm = (time.monotonic() - self._begun) % CALM_EVERY < CALM_SECONDS
        if roll < 0.04:
            await get(self._server.port, self._dice.choice(("/metrics", "/v1/models", "/health")), key=self._key)
            self._tally.counts["other"] += 1
        elif roll < 0.12:
            await self._ask(launch, case)
        elif roll < 0.36 and not calm:
            with self._tally.hostility():
                if roll < 0.2:
                    await self._send_bad()
                elif roll < 0.22:
                    await self._send_half(case)
                elif roll < 0.3:
                    await self.stream(launch, case, leave_after=self._dice.randrange(1, 12))
                else:
                    await self.stream(launch, case, pause=self._dice.choice((0.05, 0.2)))
        else:
            await self.stream(launch, case)

    async def _send_bad(self) -> None:
        kind = self._dice.choice((bad_requests, hostile_formats))()
        name = self._doing = self._dice.choice(list(kind))
        path, body = kind[name]
        connection = await post(self._server.port, path, body, key=self._key)
        connection.writer.close()
        self._tally.counts["bad requests"] += 1
        if connection.status >= 500 and connection.status != 503:
            self._tally.counts["server errors"] += 1
            self._tally.note(f"{self._server.launch.name}: {name}: status {connection.status}")

    async def _send_half(self, case: Case) -> None:
        """Hang up in the middle of a body."""
        _, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        try:
            writer.write(head(case.path, 10_000, self._key) + json.dumps(case.body).encode())
            await writer.drain()
            await asyncio.sleep(self._dice.choice((0.0, 0.5)))
        finally:
            writer.close()
        self._tally.counts["hung up"] += 1

    async def _ask(self, launch: Launch, case: Case) -> None:
        """A reply that is not streamed."""
        connection = await post(self._server.port, case.path, json.dumps(case.body).encode(), key=self._key)
        try:
            async with asyncio.timeout(PATIENCE):
                data = await connection.reader.read()
        finally:
            connection.writer.close()
        if not self._accepted(connection.status, data, launch, case):
            return
        answer: Answer = defaultdict(Choice)
        for choice in json.loads(data)["choices"]:
            answer[choice["index"]].add(choice)
        self._tally.counts["finished"] += 1
        self._tally.received(launch.model, case, answer, whole=True)

    async def stream(self, launch: Launch, case: Case, *, leave_after: int | None = None, pause: float = 0.0) -> None:
        body = json.dumps({**case.body, "stream": True}).encode()
        tally, begun = self._tally, time.monotonic()
        last, hostile, hostile_begun = begun, tally.hostile, tally.hostile_begun
        connection = await post(self._server.port, case.path, body, key=self._key, receive_buffer=2**12 if pause else 2**16)
        answer: Answer = defaultdict(Choice)
        finished = False
        try:
            if connection.status != 200:
                self._accepted(connection.status, await connection.reader.read(), launch, case)
                return
            async for event in events(connection.reader, pause=pause):
                now = time.monotonic()
                if event == b"[DONE]":
                    finished = True
                    break
                chunk = json.loads(event)
                if "error" in chunk:
                    raise ValueError(f"an error in the stream: {chunk['error']}")
                if not answer:
                    tally.first_token.append(now - begun)
                elif hostile or hostile_begun != tally.hostile_begun:
                    tally.longest_disturbed = max(tally.longest_disturbed, 0.0 if pause else now - last)
                else:
                    tally.longest_calm = max(tally.longest_calm, now - last)
                last, hostile, hostile_begun = now, tally.hostile, tally.hostile_begun
                for choice in chunk["choices"]:
                    answer[choice["index"]].add(choice)
                if leave_after is not None and sum(len(choice.ids) for choice in answer.values()) >= leave_after:
                    self._tally.counts["hung up"] += 1
                    return
            if not finished:
                raise Cut("the stream ended without [DONE]")
            self._tally.counts["finished"] += 1
        finally:
            connection.writer.close()
            self._tally.received(launch.model, case, answer, whole=finished)

    def _accepted(self, status: int, data: bytes, launch: Launch, case: Case) -> bool:
        if status == 200:
            return True
        if status in (429, 503):
            self._tally.counts["busy"] += 1
        else:
            self._tally.counts["refused"] += 1
            self._tally.note(f"{launch.name}: case {case.number} refused with {status}: {data[:300]!r}")
        return False


# ---------------------------------------------------------------------------------------------- faults


async def restart(
    server: ServerProcess,
    launches: Sequence[Launch],
    state: Path,
    tally: Tally,
    *,
    seconds: float,
    until: float,
    faults: Counter[str],
) -> None:
    """Kill the server every `seconds` and start the next launch. Snapshots and records of a model outlive the kill."""
    number = 0
    while time.monotonic() < until:
        launch = launches[number % len(launches)]
        place = state / re.sub(r"\W+", "-", Path(launch.model).name)
        snapshots = ("--cache-budget", "4MiB", "--snapshot-dir", str(place / "snapshots")) if launch.snapshots else ()
        records = ("--record", str(place / "records"), "--record-size", "256KiB")
        await server.start(launch, *snapshots, *records, "--log-level", "warning")
        await asyncio.sleep(max(min(seconds, until - time.monotonic()), 0))
        faults["kills"] += 1
        number += 1
        if not await server.kill():
            tally.counts["crashes"] += 1
            tally.note(f"{launch.name}: the server ended before it was killed")


async def fill_disk(state: Path, *, until: float, dice: random.Random, faults: Counter[str]) -> None:
    """Now and then no byte is left on the disk that holds records and snapshots."""
    ballast = state / "ballast"
    while time.monotonic() < until:
        await asyncio.sleep(dice.uniform(20, 60))
        try:
            with ballast.open("wb", buffering=0) as file:
                while file.write(b"\0" * 65536):
                    pass
        except OSError:
            faults["full disks"] += 1
        await asyncio.sleep(dice.uniform(3, 10))
        ballast.unlink(missing_ok=True)
        for records in state.glob("*/records/*.jsonl"):  # keep room for what comes: whole files of the past may go
            if records.stat().st_mtime < time.time() - 300:
                shutil.move(records, state.parent / "kept" / f"{records.parent.parent.name}-{records.name}")


async def move_clock(clock: Clock, *, until: float, dice: random.Random, faults: Counter[str]) -> None:
    """The wall clock of the restarted server jumps by up to a day, forwards and back."""
    while time.monotonic() < until:
        await asyncio.sleep(dice.uniform(20, 60))
        clock.jump(dice.randrange(-86_400, 86_400))
        faults["clock jumps"] += 1


async def watch(
    server: ServerProcess, tally: Tally, samples: list[tuple[float, int, float, int]], *, begun: float, until: float
) -> None:
    """Samples of (seconds, requests, MiB, descriptors) of the steady server."""
    while time.monotonic() < until:
        await asyncio.sleep(1.0)
        if not server.alive:
            tally.counts["crashes"] += 1
            tally.note("the steady server ended")
            return
        samples.append((time.monotonic() - begun, tally.requests, server.memory_mib(), server.descriptors()))


async def leftovers(port: int, key: str) -> dict[str, float]:
    """What still runs, waits or holds pages once all clients are gone."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        text = await get(port, "/metrics", key=key)
        left = {name: float(value) for name in names for value in re.findall(rf"^{name}{{[^}}]*}} (\S+)", text, re.MULTILINE)}
        if not any(left.values()) or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.2)


# ---------------------------------------------------------------------------------------------- the judge


@dataclass(slots=True)
class Judgement:
    judged: int = 0  # whole answers
    partial: int = 0  # distinct answers that were cut off
    wrong: int = 0
    mixed: int = 0  # wrong, and equal to the answer to another request
    notes: list[str] = field(default_factory=list)


async def judge(tallies: Sequence[Tally], launches: Sequence[Launch], out: Path, keys: Path, *, seed: int) -> Judgement:
    """Run every request that was answered once more, alone, and compare."""
    verdict = Judgement()
    seen: dict[str, set[int]] = defaultdict(set)
    for tally in tallies:
        for model, number in (*tally.whole, *tally.partial):
            seen[model].add(number)
    for model, numbers in seen.items():
        launch = next(launch for launch in launches if launch.model == model)
        plain = Launch(f"judge of {model}", model, ("--draft", "none", "--max-batch", "2", "--no-prefix-cache"))
        server = ServerProcess(out, "judge", keys)
        await server.start(plain, "--log-level", "warning")
        try:
            alone = {number: await _answer(make_case(number, launch, seed=seed), plain, server) for number in sorted(numbers)}
        finally:
            await server.kill()
        compare(model, alone, tallies, verdict)
    return verdict


async def _answer(case: Case, launch: Launch, server: ServerProcess) -> Answer:
    tally = Tally()
    await Client(0, server, tally, begun=0.0, until=0.0, seed=0, key=key_of(NAMES[0])).stream(launch, case)
    if tally.notes:
        raise RuntimeError(f"the judge has no answer: {tally.notes[0]}")
    ((answer, _),) = tally.whole[launch.model, case.number].values()
    return answer


def compare(model: str, alone: dict[int, Answer], tallies: Sequence[Tally], verdict: Judgement) -> None:
    """Add what the clients received from this model to the verdict. `alone`: the judge's answers by case number."""
    marks = {digest(answer): number for number, answer in alone.items()}
    for tally in tallies:
        for (name, number), answers in tally.whole.items():
            for mark, (_, count) in answers.items():
                if name == model:
                    verdict.judged += count
                    if mark != digest(alone[number]):
                        verdict.wrong += count
                        verdict.mixed += count if mark in marks else 0
                        verdict.notes.append(
                            f"{model}: case {number} answered {count} times as {mark}, alone {digest(alone[number])}"
                        )
        for (name, number), cut in tally.partial.items():
            for answer in cut.values():
                if name == model:
                    verdict.partial += 1
                    if not all(choice.begins(alone[number][index]) for index, choice in answer.items()):
                        verdict.wrong += 1
                        verdict.notes.append(f"{model}: case {number}, cut off, is not the beginning of its answer")


def count_records(state: Path, kept: Path) -> tuple[int, list[str]]:
    """How many records can be read, and what is wrong with lines that are none. A kill may leave an incomplete last line."""
    found, faults = 0, list[str]()
    for file in (*state.glob("*/records/*.jsonl"), *kept.glob("*.jsonl")):
        try:
            found += len(read_records(file, damaged=faults.append))
        except BadSetting as error:
            faults.append(str(error))
    return found, [fault for fault in faults if not fault.endswith(("an incomplete last line", "holds no records yet"))]


# ---------------------------------------------------------------------------------------------- the run


@dataclass(frozen=True, slots=True)
class Report:
    minutes: float
    requests: int
    steady: dict[str, int]
    restarted: dict[str, int]
    faults: dict[str, int]
    judged: int
    partial_answers: int
    crashes: int  # servers that ended by themselves
    lost: int
    mixed: int
    wrong: int
    server_errors: int
    refused: int
    records_read: int
    records_damaged: int
    memory_slope_mib_per_10k: float  # of the steady server, after WARM_UP
    memory_last_mib: float
    descriptors_first: int  # of the steady server before its first request
    descriptors_most: int
    descriptors_last: int  # when all clients are gone
    longest_silence_s: float  # between two events of a stream of the steady server, with hostile requests in flight
    longest_silence_calm_s: float  # without: the model's own time
    first_token_p99_s: float
    left_behind: dict[str, float]
    exit_status: int
    notes: tuple[str, ...]

    @property
    def silence_beyond_s(self) -> float:
        """What hostile requests cost a healthy stream."""
        return round(max(self.longest_silence_s - self.longest_silence_calm_s, 0.0), 3)

    @property
    def broken(self) -> list[str]:
        """The promises that this run has broken."""
        none = ("crashes", "lost", "mixed", "wrong", "server_errors", "refused", "records_damaged", "exit_status")
        found = [name for name in none if getattr(self, name)]
        found += [name for name, value in self.left_behind.items() if value]
        found += ["nothing was judged"] * (not self.judged)
        found += ["descriptors_last"] * (self.descriptors_last > self.descriptors_first + MORE_DESCRIPTORS)
        if self.minutes >= LONG_RUN:
            found += ["memory_slope_mib_per_10k"] * (self.memory_slope_mib_per_10k >= MOST_SLOPE)
            found += ["silence_beyond_s"] * (self.silence_beyond_s >= MOST_SILENCE)
        return found

    def whole(self) -> dict[str, Any]:
        return {**asdict(self), "silence_beyond_s": self.silence_beyond_s, "broken": self.broken}


def slope(samples: Sequence[tuple[float, int, float, int]]) -> float:
    """MiB per 10,000 requests, by least squares."""
    if len(samples) < 2:
        return 0.0
    x = [sample[1] / 10_000 for sample in samples]
    y = [sample[2] for sample in samples]
    middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - middle_x) ** 2 for a in x)
    return sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True)) / spread if spread else 0.0


async def soak(*, minutes: float, seed: int, out: Path, notify: bool = True) -> Report:
    out.mkdir(parents=True, exist_ok=True)
    state, kept, keys = out / "state", out / "kept", out / "keys"
    for folder in (state, kept):
        folder.mkdir(exist_ok=True)
    keys.write_text("".join(f"{name} {key_of(name)}\n" for name in NAMES))
    keys.chmod(0o600)
    write_mtp_model(out / _MTP)
    launches = tuple(replace(launch, model=str(out / _MTP)) if launch.model == _MTP else launch for launch in LAUNCHES)
    mounted = (
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(state)], capture_output=True).returncode == 0
    )
    faults: Counter[str] = Counter({"full disks": 0})
    steady, restarted = Tally(), Tally()
    dice = random.Random(seed)
    samples: list[tuple[float, int, float, int]] = []
    clock = Clock(out)
    first, second = ServerProcess(out, "steady", keys), ServerProcess(out, "restarted", keys, clock=clock)
    try:
        await first.start(STEADY, "--log-level", "warning", "--record", str(out / "steady-records"))
        descriptors_first = first.descriptors()
        begun = time.monotonic()
        until = begun + 60 * minutes
        every = min(60.0, 60 * minutes / len(launches))
        tasks = [restart(second, launches, state, restarted, seconds=every, until=until, faults=faults)]
        tasks.append(watch(first, steady, samples, begun=begun, until=until))
        tasks.append(move_clock(clock, until=until, dice=dice, faults=faults))
        if mounted:
            tasks.append(fill_disk(state, until=until, dice=dice, faults=faults))
        for number in range(9):
            server, tally = (first, steady) if number < 6 else (second, restarted)
            key = key_of(NAMES[number % len(NAMES)])
            tasks.append(Client(number, server, tally, begun=begun, until=until, seed=seed, key=key).run())
        if notify:
            tasks.append(_progress(begun, until, steady, restarted, faults, samples))
        await asyncio.gather(*tasks)
        left, memory, descriptors_last, status = {"crashed": 1.0}, 0.0, 0, 1
        if first.alive:
            left, memory = await leftovers(first.port, key_of(NAMES[0])), first.memory_mib()
            descriptors_last = first.descriptors()
            status = await first.stop()
        records, damaged = count_records(state, kept)
        verdict = await judge((steady, restarted), (STEADY, *launches), out, keys, seed=seed)
    finally:
        for server in (first, second):
            if server.alive:
                await server.kill()
        if mounted:
            subprocess.run(["umount", "-l", str(state)], check=False)
    total = steady.counts + restarted.counts
    measured = [sample for sample in samples if sample[0] >= WARM_UP * 60 * minutes]
    return Report(
        minutes=minutes,
        requests=steady.requests + restarted.requests,
        steady=dict(steady.counts),
        restarted=dict(restarted.counts),
        faults=dict(faults),
        judged=verdict.judged,
        partial_answers=verdict.partial,
        crashes=total["crashes"],
        lost=total["lost"],
        mixed=verdict.mixed,
        wrong=verdict.wrong,
        server_errors=total["server errors"],
        refused=total["refused"],
        records_read=records,
        records_damaged=len(damaged),
        memory_slope_mib_per_10k=round(slope(measured), 2),
        memory_last_mib=round(memory, 1),
        descriptors_first=descriptors_first,
        descriptors_most=max((sample[3] for sample in samples), default=0),
        descriptors_last=descriptors_last,
        longest_silence_s=round(steady.longest_disturbed, 3),
        longest_silence_calm_s=round(steady.longest_calm, 3),
        first_token_p99_s=round(
            sorted(steady.first_token)[int(len(steady.first_token) * 0.99)] if steady.first_token else 0.0, 3
        ),
        left_behind=left,
        exit_status=status,
        notes=tuple((*steady.notes, *restarted.notes, *verdict.notes, *damaged)[:40]),
    )


async def _progress(
    begun: float,
    until: float,
    steady: Tally,
    restarted: Tally,
    faults: Counter[str],
    samples: list[tuple[float, int, float, int]],
) -> None:
    while (now := time.monotonic()) < until:
        await asyncio.sleep(min(30.0, until - now))
        total = steady.counts + restarted.counts
        memory = f"{samples[-1][2]:.0f} MiB, {samples[-1][3]} descriptors" if samples else ""
        print(
            f"{(time.monotonic() - begun) / 60:5.1f} min: {total['finished']} finished, {total['lost']} lost, "
            f"{total['server errors']} server errors, {faults['kills']} kills, {memory}",
            file=sys.stderr,
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Servers under a hostile mix of clients and faults.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for logs, records and snapshots (default: a temporary one)")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        report = asyncio.run(soak(minutes=given.minutes, seed=given.seed, out=given.out or Path(temporary)))
    if given.json:
        print(json.dumps(report.whole()))
    else:
        for name, value in report.whole().items():
            for item in value if name == "notes" else (value,):
                print(f"{name:28}{item}")
    return 1 if report.broken else 0


if __name__ == "__main__":
    sys.exit(main())
