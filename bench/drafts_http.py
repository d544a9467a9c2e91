"""Compare the default drafting with another --draft through HTTP: two servers, requests in turn, tokens compared.

    python -m bench.drafts_http [MODEL] [--temperatures 0,0.7,1] [--batch 1,4,8] [--new-tokens 160] [--repeats 2] [--json]
                                [--flags "--dtype f32"] [--kinds chat,edit,quote] [--against none]

Both servers run all the time, and only one of them works at a time: each group of requests goes to one server, then to the
other. What is timed is a group, from its first token to its last. Both servers get the same requests in the same order, so the
prefix cache saves the same on both sides. The ratio of processor time is of use on a machine with other load. The exit status is
1 if the tokens of a reply differ.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from bench.http_streams import cpu_seconds
from onedraw.cli.terminal import table

PROMPTS = Path(__file__).parent / "prompts"


@dataclass(frozen=True, slots=True)
class Timed:
    """One reply: its tokens, and when its first and last token arrived."""

    ids: tuple[int, ...]
    first: float
    last: float


class Server:
    def __init__(self, model: str, flags: Sequence[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [sys.executable, "-m", "onedraw", "serve", model, "--port", str(self.port), "--no-self-check", *flags]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ))
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                return
            except OSError:
                if self._process.poll() is not None:
                    raise SystemExit(f"the server ended: {shlex.join(command)}") from None
                time.sleep(0.2)
        raise SystemExit("the server did not start")

    def reply(self, body: dict[str, Any]) -> Timed:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            data=json.dumps({**body, "stream": True, "return_token_ids": True}).encode(),
            headers={"content-type": "application/json"},
        )
        ids: list[int] = []
        first = last = 0.0
        with urllib.request.urlopen(request, timeout=600) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                for choice in json.loads(line[6:])["choices"]:
                    found = choice.get("token_ids") or []
                    if found:
                        last = time.perf_counter()
                        first = first or last
                        ids += found
        return Timed(tuple(ids), first, last)

    def processor_seconds(self) -> float:
        return cpu_seconds(self._process.pid)

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)


def group(server: Server, bodies: Sequence[dict[str, Any]]) -> tuple[float, float, list[tuple[int, ...]]]:
    """Send all at once; return seconds from the first token of any to the last of all, processor seconds, and the tokens."""
    before = server.processor_seconds()
    with ThreadPoolExecutor(len(bodies)) as pool:
        found = list(pool.map(server.reply, bodies))
    took = max(one.last for one in found) - min(one.first for one in found)
    return took, server.processor_seconds() - before, [one.ids for one in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--temperatures", default="0,0.7,1")
    parser.add_argument("--batch", default="1,4,8")
    parser.add_argument("--kinds", default="chat,edit,quote")
    parser.add_argument("--new-tokens", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--flags", default="", help="for both servers, as one text")
    parser.add_argument("--against", default="none", metavar="DRAFT", help="the --draft of the other server")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sides = {"default": [], "other": ["--draft", options.against]}
    servers = {side: Server(options.model, [*flags, *shlex.split(options.flags)]) for side, flags in sides.items()}
    rows, wrong, seed = [], 0, 0
    try:
        for kind in options.kinds.split(","):
            files = sorted(PROMPTS.glob(f"{kind}-*.json"))
            prompts = [json.loads(file.read_text(encoding="utf-8"))["messages"] for file in files]
            for batch in map(int, options.batch.split(",")):
                for temperature in map(float, options.temperatures.split(",")):
                    seconds: dict[str, list[float]] = {side: [] for side in servers}
                    processor = dict.fromkeys(servers, 0.0)
                    tokens = 0
                    for _ in range(options.repeats):
                        for start in range(0, len(prompts), batch):
                            seed += 1
                            picked = list(islice(cycle(prompts), start, start + batch))
                            sizes = {"max_tokens": options.new_tokens, "ignore_eos": True, "temperature": temperature, "top_p": 1}
                            bodies = [
                                {"messages": messages, "seed": 1000 * seed + index, **sizes}
                                for index, messages in enumerate(picked)
                            ]
                            ids = {}
                            for side in sorted(servers, reverse=seed % 2 == 0):
                                took, used, ids[side] = group(servers[side], bodies)
                                seconds[side].append(took)
                                processor[side] += used
                            wrong += ids["default"] != ids["other"]
                            tokens += sum(len(one) for one in ids["default"])
                    ratios = [other / default for other, default in zip(seconds["other"], seconds["default"], strict=True)]
                    cell = Cell(
                        kind,
                        temperature,
                        batch,
                        ratio=sum(seconds["other"]) / sum(seconds["default"]),
                        median=statistics.median(ratios),
                        processor=processor["other"] / processor["default"],
                        rate=tokens / sum(seconds["default"]),
                    )
                    rows.append(cell)
                    print(cell, file=sys.stderr, flush=True)
    finally:
        for server in servers.values():
            server.close()
    if options.json:
        print(json.dumps({"cells": [asdict(row) for row in rows], "groups_with_other_tokens": wrong}, indent=2))
    else:
        heads = ("text", "T", "batch", f"default / {options.against}", "median", "processor", "tokens/s")
        lines = [
            [r.kind, f"{r.temperature:g}", str(r.batch), *(f"{x:.2f}" for x in (r.ratio, r.median, r.processor)), f"{r.rate:.0f}"]
            for r in rows
        ]
        table("", heads, lines)
        print(f"groups of requests with other tokens: {wrong}")
    return 1 if wrong else 0


@dataclass(frozen=True, slots=True)
class Cell:
    kind: str
    temperature: float
    batch: int
    ratio: float  # seconds of the other server over seconds by default, all groups together
    median: float  # of the same per group
    processor: float  # the same of processor time, prompts included
    rate: float  # tokens per second by default


if __name__ == "__main__":
    raise SystemExit(main())
