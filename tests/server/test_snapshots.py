"""Snapshots over HTTP: a server that was killed while writing restores the complete ones and no others."""

from __future__ import annotations

import json
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from onedraw.build.llm import build_llm
from onedraw.checkpoints.open import open_checkpoint
from onedraw.llm.request_options import RequestOptions, make_generation
from onedraw.settings import Settings
from tests.server.running import PATIENCE, Served, fake_llm, serving, wait_until
from tests.support import tiny

# The disk of this server is slow and blocks before one of its writes, so that the process is killed while writing.
PROGRAM = """
import itertools, sys, time
from pathlib import Path
from onedraw.memory.disk_snapshots import SnapshotFolder
from onedraw.server.config import ServerOptions
from onedraw.server.serve import serve
from tests.server.running import fake_llm
parts, count = SnapshotFolder._parts, itertools.count()
def slow(self, *given):
    for part in parts(self, *given):
        if next(count) == int(sys.argv[2]):
            Path(sys.argv[1], "still").touch()
            time.sleep(10**6)
        yield part
        time.sleep(0.01)
SnapshotFolder._parts = slow
serve(fake_llm(cache_dir=Path(sys.argv[1]), cache_budget=10**9), ServerOptions(port=0, log_level="critical"))
"""


def prompt(number: int) -> str:
    return f"{number:04d} " + " ".join(random.Random(number).choices(("a", "layer", "of", "keys", "and", "values"), k=30))


def asked(number: int) -> dict[str, Any]:
    return {"model": "fake", "prompt": prompt(number), "max_tokens": 6, "temperature": 0.9, "seed": number, "logprobs": 1}


def answers(served: Served, count: int) -> list[Any]:
    return [served.post("/v1/completions", **asked(number)).json()["choices"] for number in range(count)]


def killed_while_writing(place: Path, numbers: range, *, still_before: int = -1, delay: float = 0.0) -> None:
    """Kill the server when the disk blocks before this write, or some time after the last reply."""
    command = [sys.executable, "-c", PROGRAM, str(place), str(still_before)]
    still = place / "still"
    still.unlink(missing_ok=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            line = child.stdout.readline()
            assert child.stderr is not None
            assert line.startswith("curl "), child.stderr.read()
            url = shlex.split(line)[1].split("/v1")[0]
            for number in numbers:
                assert httpx.post(f"{url}/v1/completions", json=asked(number), timeout=PATIENCE).status_code == 200
            if still_before >= 0:
                wait_until(still.exists)
            time.sleep(delay)
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()


def kill_again_and_again(place: Path, kills: list[dict[str, Any]], snapshot_warnings: list[str]) -> None:
    caught = 0
    for life, how in enumerate(kills):
        killed_while_writing(place, range(life * 2, life * 2 + 2), **how)
        caught += len(list(place.glob("snapshots/*/*.part")))  # the next process removes them
    wholes = list(place.glob("snapshots/*/*.snapshot"))
    with fake_llm() as llm, serving(llm) as served:
        expected = answers(served, len(kills) * 2)
    with fake_llm(cache_dir=place, cache_budget=10**9) as llm, serving(llm) as served:
        assert answers(served, len(kills) * 2) == expected
        assert llm.service.stats().snapshots_restored == len(wholes)
    assert not snapshot_warnings
    assert not list(place.glob("snapshots/*/*.part"))
    assert wholes
    assert caught  # at least one process was killed while writing


def test_a_kill_while_writing_loses_no_complete_snapshot_and_restores_no_partial_one(
    tmp_path: Path, snapshot_warnings: list[str]
) -> None:
    # A snapshot is seven writes: the first is cut at its beginning, in its middle and before its end, then the second.
    kill_again_and_again(tmp_path, [{"still_before": write} for write in (0, 3, 6, 7, 11)], snapshot_warnings)


@pytest.mark.long
def test_a_hundred_kills(tmp_path: Path, snapshot_warnings: list[str]) -> None:
    chance = random.Random(3)
    kill_again_and_again(tmp_path, [{"delay": chance.uniform(0.0, 0.08)} for _ in range(100)], snapshot_warnings)


def test_a_restart_restores_the_prompt_also_with_another_split(tmp_path: Path) -> None:
    path = tiny.write_safetensors("qwen3_5", tmp_path / "hf")
    body = {"model": "tiny", "prompt": list(range(3, 203)), "max_tokens": 8, "temperature": 0.7, "seed": 5, "logprobs": 1}
    seen = []
    for devices in ({"device": "cpu"}, {"device": "cpu"}, {"devices": "cpu,cpu"}):
        settings = Settings(
            model=str(path), max_context=256, served_name="tiny", cache_dir=tmp_path / "cache", cache_budget=10**9, **devices
        )
        with build_llm(settings) as llm, serving(llm) as served:
            reply = served.post("/v1/completions", **body).json()
            seen.append((reply["choices"], reply["system_fingerprint"]))
            restored = llm.service.stats().snapshots_restored
            metrics = served.get("/metrics").text
        assert restored == (len(seen) > 1)
        assert f'prompt_snapshots_restored_total{{model_name="tiny"}} {float(restored)}' in metrics
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == (200 if restored else 0)
    assert seen[0] == seen[1] == seen[2]


def test_snapshots_of_other_weights_at_the_same_path_are_not_restored(tmp_path: Path) -> None:
    """The weights differ in bytes that the fingerprint does not sample."""
    path = tiny.write_safetensors("llama", tmp_path / "hf")
    file = path / "model.safetensors"

    def asked(budget: int | None) -> tuple[list[int], int]:
        settings = Settings(
            model=str(path), max_context=256, device="cpu", cache_dir=tmp_path / "cache", cache_budget=budget, self_check=False
        )
        with build_llm(settings) as llm:
            request_options = RequestOptions(temperature=0.0, max_tokens=8, ignore_eos=True, seed=1)
            (reply,) = llm.run(make_generation(request_options, llm=llm, prompt=tuple(range(3, 203))))
            return reply.token_ids, llm.service.stats().snapshots_restored

    first, again = asked(10**9), asked(10**9)
    assert again == (first[0], 1)
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    entry = json.loads(data[8:start])["model.embed_tokens.weight"]
    begin, end = (start + offset for offset in entry["data_offsets"])
    before = open_checkpoint(path).fingerprint()
    middle = (begin + end) // 2
    data[begin : middle - 1024] = data[middle + 1024 : end][: middle - 1024 - begin]
    file.write_bytes(data)
    assert open_checkpoint(path).fingerprint() == before
    cold = asked(None)
    assert cold[0] != first[0]
    assert asked(10**9) == cold
