"""`onedraw serve --replicas 2` with real Ray actors: replicas are killed and replaced while they serve, and every reply is that
of one process."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.replicas_kill import KINDS, Answer, Case, ServerProcess, ask_all, ask_and_kill, metric, server, workload
from onedraw.build.llm import build_llm
from onedraw.settings import Settings
from tests.server.running import serving
from tests.support import tiny

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra `ray` is not installed")
CASES = workload(24, tokens=160)
SIZES = {"threads": 1, "max_context": 800, "max_batch": 8}
FLAGS = [text for name, value in SIZES.items() for text in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_safetensors("llama31", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Answer]:
    """The replies of one process."""
    answers = [Answer() for _ in CASES]
    with build_llm(Settings(model=str(model), self_check=False, **SIZES)) as llm, serving(llm) as served:  # type: ignore[arg-type]
        port = int(served.url.rpartition(":")[2])
        asyncio.run(ask_all(CASES, port=port, answers=answers))
    assert not [answer.error for answer in answers if answer.error]
    assert {case.kind for case in CASES} == {kind for kind, _, _ in KINDS}
    return answers


@pytest.fixture(scope="module")
def replicas(model: Path) -> Iterator[ServerProcess]:
    with server(str(model), "--replicas", "2", "--no-self-check", *FLAGS) as served:
        served.wait_for(r"replica \S+ serves in process", 2)
        yield served
    assert served.process.returncode == 0


def same(answers: list[Answer], expected: list[Answer]) -> None:
    assert [answer.error for answer in answers if answer.error] == []
    for case, answer, right in zip(CASES[: len(expected)], answers, expected, strict=True):
        assert answer.content() == right.content(), case.kind


def serves_again(served: ServerProcess) -> None:
    deadline = time.monotonic() + 300
    while metric(served.port, "replicas") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_killed_replicas_end_and_change_no_stream(replicas: ServerProcess, expected: list[Answer]) -> None:
    """Every kind of request runs when one replica gets kill -9, twice."""
    for seed in (1, 2):
        lost, moved = metric(replicas.port, "replicas_lost_total"), metric(replicas.port, "requests_moved_total")
        answers, killed = asyncio.run(ask_and_kill(CASES, replicas, replicas=2, seed=seed, most=1))
        same(answers, expected)
        assert len(killed) == 1
        assert metric(replicas.port, "replicas_lost_total") == lost + 1
        assert metric(replicas.port, "requests_moved_total") > moved
        serves_again(replicas)


def test_a_rolling_restart_moves_the_streams(replicas: ServerProcess, expected: list[Answer]) -> None:
    serves_again(replicas)
    before, lost = replicas.pids(), metric(replicas.port, "replicas_lost_total")
    moved = metric(replicas.port, "requests_moved_total")

    async def restart() -> list[Answer]:
        answers = [Answer() for _ in CASES]
        running = asyncio.create_task(ask_all(CASES, port=replicas.port, answers=answers))
        while not all(answer.times for answer in answers[:4]):
            await asyncio.sleep(0.01)
        replicas.process.send_signal(signal.SIGHUP)
        await running
        return answers

    same(asyncio.run(restart()), expected)
    replicas.wait_for("all replicas are replaced")
    assert set(before.values()).isdisjoint(replicas.pids().values())
    assert metric(replicas.port, "replicas_lost_total") == lost
    assert metric(replicas.port, "requests_moved_total") > moved


def test_the_number_of_replicas_follows_the_load(model: Path, expected: list[Answer]) -> None:
    """One replica, then two under load, then one again; requests are never refused, and each reply is that of one process."""
    few = CASES[:8]
    scaling = ["--replicas", "1..2", "--target-ongoing-requests", "2", "--upscale-delay", "0", "--downscale-delay", "2"]
    with server(str(model), *scaling, "--no-self-check", *FLAGS) as served:
        assert (metric(served.port, "replicas"), metric(served.port, "replicas_wanted")) == (1, 1)

        async def load() -> None:
            serving = 1.0
            while serving < 2:
                serving = await asyncio.to_thread(metric, served.port, "replicas")
                answers = [Answer() for _ in few]
                await ask_all(few, port=served.port, answers=answers)
                same(answers, expected[: len(few)])

        asyncio.run(load())
        served.wait_for(r"scaling from 1 to 2 replicas: \d+ requests")
        served.wait_for("scaling from 2 to 1 replicas: 0 requests")
        while metric(served.port, "replicas") > 1:
            time.sleep(0.1)
        assert metric(served.port, "replicas_wanted") == 1
        assert metric(served.port, "replicas_lost_total") == 0


def test_a_replica_that_finds_no_room_is_given_up_when_the_load_falls() -> None:
    """The cluster has room for one replica. Ray's own autoscaler could add a node for the second one, and here nobody does."""
    program = """
import threading, time
from onedraw.build.llm import build_llm
from onedraw.build.ray_connection import started_here
from onedraw.cluster.autoscaling import AutoscalingConfig
from onedraw.cluster.ray_replicas import RayReplicas, ReplicaOptions
from onedraw.settings import Settings

ray = started_here("--replicas", cpus=1)
scaling = AutoscalingConfig(1, 2, target_ongoing_requests=1, upscale_delay=0, downscale_delay=0)
settings = Settings(model="fake", backend="fake", threads=1, max_batch=4)
with build_llm(settings, start_engine=lambda given: RayReplicas(given, ReplicaOptions(scaling, "auto"))) as llm:
    def wanted(count):
        while llm.service.stats().replicas_wanted != count:
            time.sleep(0.05)
    over = threading.Event()
    def ask(seed):
        while not over.is_set():
            assert llm.generate("The sea", seed=seed, max_tokens=50).usage.completion == 50
    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    wanted(2)
    assert llm.service.stats().replicas == 1
    over.set()
    for thread in threads:
        thread.join()
    wanted(1)
    assert llm.service.stats().replicas == 1
print("given up")
ray.shutdown()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "given up" in ended.stdout, ended.stderr


def test_prompts_go_where_their_beginning_is_cached(replicas: ServerProcess) -> None:
    serves_again(replicas)
    hits = metric(replicas.port, "prefix_cache_hits_total")
    cases = [Case("same", "/v1/completions", CASES[0].body)] * 6
    for case in cases:
        asyncio.run(ask_all([case], port=replicas.port, answers=[Answer()]))
    assert metric(replicas.port, "prefix_cache_hits_total") >= hits + 5 * 16


def test_nothing_listens_beyond_this_machine(replicas: ServerProcess) -> None:
    """Ray's processes are children of the server, and their sockets are those of their file descriptors."""
    sockets = {
        os.readlink(link)
        for pid in family(replicas.process.pid)
        for link in Path(f"/proc/{pid}/fd").iterdir()
        if link.is_symlink() and os.readlink(link).startswith("socket:")
    }
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in sockets:
                listening.append(columns[1].partition(":")[0])
    assert len(listening) > 5
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert set(listening) <= loopback


def family(pid: int) -> list[int]:
    children = [int(one) for task in Path(f"/proc/{pid}/task").iterdir() for one in (task / "children").read_text().split()]
    return [pid, *(other for child in children for other in family(child))]


def test_options_of_replicas_without_replicas_are_refused() -> None:
    command = [sys.executable, "-m", "onedraw.cli.main", "serve", "fake", "--backend", "fake", "--port", "0"]
    for extra in (["--ray-address", "auto"], ["--replica-gpus", "1"], ["--upscale-delay", "1"]):
        ended = subprocess.run([*command, *extra], capture_output=True, text=True)
        assert re.search(rf"{extra[0]}: needs --replicas", ended.stderr)
        assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--replicas", "4..1"], r"--replicas: .* not 4\.\.1"),
        (["--replicas", "many"], "argument --replicas: not a number of replicas: 'many'"),
        (["--replicas", "2", "--downscale-delay", "1"], "--downscale-delay: the number of replicas is fixed"),
    ],
)
def test_numbers_of_replicas_that_make_no_sense_are_refused(options: list[str], message: str) -> None:
    command = [sys.executable, "-m", "onedraw.cli.main", "serve", "fake", "--backend", "fake", "--port", "0", *options]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode
    assert re.search(message, ended.stderr), ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_server_of_one_process_does_not_import_ray() -> None:
    program = (
        "import sys\n"
        "from onedraw.build.llm import build_llm\n"
        "from onedraw.settings import Settings\n"
        "import onedraw.cli.serve, onedraw.server.serve\n"
        "build_llm(Settings(model='fake', backend='fake')).close()\n"
        "assert 'ray' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
