"""Measure the cost of HTTP per token: many streams at once through the real server, and the CPU time of each process.

    python -m bench.http_streams [--streams 64] [--new-tokens 256] [--seconds 10] [--model scripted] [--flags='--…'] [--json]

`onedraw serve MODEL` runs as users run it. The default model is `scripted`, whose steps cost a few microseconds a token, so that
nearly all of the time is the server's own; `fake` and real models work too. The clients are one process that reads streams and
counts tokens without decoding JSON. CPU time is read from the kernel and hardly depends on what else the machine does; tokens
per second depend on it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Result:
    model: str
    flags: str
    streams: int
    tokens: int
    tokens_per_second: float
    server_us: float  # CPU microseconds per token of the process that answers HTTP
    engine_us: float  # the same of the engine's process; 0 where it is the server's
    client_us: float


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def children(pid: int) -> list[int]:
    """Return the engine's process, if there is one."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(") ")[2].split()[1])
                command = (folder / "cmdline").read_bytes()
            except (OSError, ValueError):
                continue
            if parent == pid and b"engine_process" in command:
                found.append(int(folder.name))
    return found


class Stream(asyncio.Protocol):
    """One connection that sends the same request again and again, and counts the chunks of the replies."""

    def __init__(self, request: bytes, counts: list[int]) -> None:
        self._request, self._counts, self._tail = request, counts, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        # A chunk has the token's id in this field, and no other field begins so. The tail joins what two reads cut in half.
        joined = self._tail + data
        self._counts[0] += joined.count(b'"token_ids":[') - self._tail.count(b'"token_ids":[')
        self._tail = joined[-24:]
        if b"data: [DONE]" in joined:
            self._tail = b""
            self._transport.write(self._request)
        elif b"HTTP/1.1 4" in joined or b"HTTP/1.1 5" in joined:
            raise RuntimeError(joined.decode(errors="replace"))


async def measure(options: argparse.Namespace) -> Result:
    command = [sys.executable, "-m", "onedraw.cli.main", "serve", options.model, "--port", "0", "--log-level", "error"]
    command += ["--max-batch", str(options.streams), *shlex.split(options.flags)]
    command += ["--backend", "fake"] if options.model in ("fake", "scripted") else []
    server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    try:
        greeting = (await server.stdout.readline()).decode()
        found = re.search(r"127\.0\.0\.1:(\d+)", greeting)
        if found is None:
            raise SystemExit(f"the server did not start: {greeting!r}")
        body = json.dumps(
            {
                "prompt": "Once upon a time",
                "stream": True,
                "return_token_ids": True,
                "max_tokens": options.new_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "seed": 1,
            }
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        counts, loop = [0], asyncio.get_running_loop()
        streams = [
            (await loop.create_connection(lambda: Stream(head + body, counts), "127.0.0.1", int(found[1])))[0]
            for _ in range(options.streams)
        ]
        await asyncio.sleep(options.warm_up)
        engine = children(server.pid)

        def readings() -> tuple[float, int, float, float, float]:
            return (
                time.perf_counter(),
                counts[0],
                cpu_seconds(server.pid),
                sum(map(cpu_seconds, engine)),
                time.process_time(),
            )

        before = readings()
        await asyncio.sleep(options.seconds)
        seconds, tokens, serving, stepping, reading = (now - then for now, then in zip(readings(), before, strict=True))
        for stream in streams:
            stream.abort()
    finally:
        server.send_signal(signal.SIGTERM)
        await server.communicate()
    per_token = 1e6 / max(tokens, 1)
    return Result(
        model=options.model,
        flags=options.flags,
        streams=options.streams,
        tokens=int(tokens),
        tokens_per_second=tokens / seconds,
        server_us=serving * per_token,
        engine_us=stepping * per_token,
        client_us=reading * per_token,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The cost of HTTP per token.")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--warm-up", type=float, default=2.0)
    parser.add_argument("--model", default="scripted")
    parser.add_argument("--flags", default="", help="further flags of `onedraw serve`")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    result = asyncio.run(measure(options))
    if options.json:
        print(json.dumps(asdict(result)))
    else:
        for name, value in asdict(result).items():
            print(f"{name:24}{value:.1f}" if isinstance(value, float) else f"{name:24}{value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
