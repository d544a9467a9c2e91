"""What it costs per step that a pipeline stage is in another process, a Ray actor, beside the time its bytes need on the link.

    python -m bench.remote_stage [MODEL] [--rows 1,16] [--tokens 48] [--rounds 5] [--json]

The same greedy requests run with two stages in this process, and with the first of them in an actor on this machine, in turn.
Every stage has one thread, and one step runs at a time. The difference is the cost of the remote stage: its message, two
crossings of the residual stream and the switch between processes. Floor: the two crossings at the speed of the link, which a
transfer of 64 MiB tells; and an echo, which sends the same bytes there and back and computes nothing. All tokens and checksums
must be equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial

import torch

from bench.split_overlap import Answer, requests, run_all
from onedraw.backends.torch.remote.link import CONTROL, STREAM, Link, Rendezvous, RendezvousServer
from onedraw.build.checkpoint import find_checkpoint
from onedraw.build.drafters import make_speculator
from onedraw.build.llm import make_service, torch_backend
from onedraw.build.ray_connection import started_here
from onedraw.models.registry import read_model_info
from onedraw.settings import Settings

LOOPBACK, SECONDS = "127.0.0.1", 60.0
LARGE = 64 * 2**20  # bytes of the transfer that tells the link's speed
LAYOUTS = {"here": "cpu,cpu", "remote": "ray:0/cpu,cpu"}


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians, in milliseconds per step."""

    rows: int
    here_ms: float
    remote_ms: float
    added_ms: float
    echo_ms: float
    floor_ms: float
    stream_bytes: int  # of one crossing


class Echo:
    """A process that sends back what it receives."""

    def __init__(self) -> None:
        self._rendezvous = RendezvousServer(LOOPBACK, SECONDS)
        self._process = subprocess.Popen([sys.executable, "-m", "bench.remote_stage", "--echo", str(self._rendezvous.port)])
        self._link = connect(self._rendezvous.port, 0)

    def round_trip(self, size: int, *, rounds: int = 30) -> float:
        """Return the median time in seconds for so many bytes there and back."""
        data, times = torch.zeros(size, dtype=torch.uint8), []
        for _ in range(rounds):
            begin = time.perf_counter()
            self._link.send(torch.tensor([size]), 1, CONTROL)
            self._link.send(data, 1, STREAM)
            self._link.receive(data, 1, STREAM)
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    def close(self) -> None:
        self._link.send(torch.tensor([0]), 1, CONTROL)
        self._process.wait(SECONDS)


def connect(port: int, rank: int) -> Link:
    return Link(Rendezvous(LOOPBACK, port, incarnation=1, rank=rank, size=2), address=LOOPBACK, seconds=SECONDS)


def echo(port: int) -> None:
    link, size = connect(port, 1), torch.zeros(1, dtype=torch.int64)
    while True:
        link.receive(size, 0, CONTROL)
        if not size.item():
            return
        data = torch.empty(int(size.item()), dtype=torch.uint8)
        link.receive(data, 0, STREAM)
        link.send(data, 0, STREAM)


def measure(options: argparse.Namespace, rows: list[int]) -> list[Cost]:
    checkpoint = find_checkpoint(Settings.of(model=options.model))
    info = read_model_info(checkpoint)
    services = {}
    for layout, devices in LAYOUTS.items():
        settings = Settings.of(
            model=options.model,
            devices=devices,
            dtype="f32",
            threads=1,
            overlap="off",
            draft=("none",),
            max_batch=max(rows),
            max_context=options.tokens + 64,
            prefix_cache=False,
            self_check=False,
        )
        backend = partial(torch_backend, settings, info, print, None, weights=checkpoint.fingerprint(), warm_up=False)
        services[layout] = make_service(backend, settings, make_speculator(settings))
    link = Echo()
    speed = 2 * LARGE / link.round_trip(LARGE, rounds=5)
    costs = []
    try:
        for count in rows:
            asked = requests(info.spec.vocab, count=count, prompt=4, new=options.tokens, seed=count, checksums=True)
            times: dict[str, list[float]] = {layout: [] for layout in services}
            answers: dict[str, list[Answer]] = {}
            for number in range(options.rounds + 1):
                for layout, service in services.items():
                    found = run_all(service, asked)
                    answers[layout] = found.answers
                    if number:  # the first round warms up
                        times[layout].append(1000 * found.seconds / options.tokens)
            for one, other in zip(*answers.values(), strict=True):
                if (one.tokens, one.checksums) != (other.tokens, other.checksums):
                    raise SystemExit("a remote stage changed a reply")
            crossing = count * info.spec.hidden * 4
            here, remote = (statistics.median(found) for found in times.values())
            added = statistics.median(far - near for near, far in zip(*times.values(), strict=True))
            floor, trip = 2 * crossing / speed, link.round_trip(crossing)
            costs.append(Cost(count, here, remote, added, 1000 * trip, 1000 * floor, crossing))
    finally:
        link.close()
        for service in services.values():
            service.close()
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--rows", default="1,16", help="requests at once")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--echo", type=int, help=argparse.SUPPRESS)  # the port to connect to, in the process that echoes
    options = parser.parse_args()
    if options.echo is not None:
        return echo(options.echo)
    import ray

    started_here("--devices", cpus=2)
    try:
        costs = measure(options, [int(text) for text in options.rows.split(",")])
    finally:
        ray.shutdown()
    if options.json:
        return print(json.dumps([asdict(one) for one in costs], indent=1))
    for one in costs:
        print(
            f"{one.rows:3d} rows: {one.here_ms:.2f} ms per step here, {one.remote_ms:.2f} with a remote stage: "
            f"{one.added_ms:.2f} ms more; an echo of its {one.stream_bytes:,} bytes {one.echo_ms:.3f} ms, "
            f"their time at the link's speed {one.floor_ms:.4f} ms"
        )
    return None


if __name__ == "__main__":
    main()
