"""A batch whose process is killed again and again ends with the bytes of one that ran undisturbed, whatever the size of the
engine's batches and the drafters of each process."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from onedraw.build.llm import build_llm
from onedraw.llm.llm import LLM
from onedraw.server.batch.offline import errors_path, run_file
from onedraw.server.batch.store import Batch, BatchStore
from onedraw.server.config import ServerOptions
from onedraw.settings import Settings
from tests.server.running import PATIENCE, serving, wait_until

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests/fixtures/trained/trained_qwen3"
CHAT = "/v1/chat/completions"
LINES = 150
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "logprobs": True, "top_logprobs": 2, "return_checksums": True},
    {"n": 2, "frequency_penalty": 0.5},
    {"guided_json": SCHEMA, "max_tokens": 40},
    {"top_p": 7},
)
VARIED = (("--max-batch", "8"), ("--max-batch", "3", "--draft", "none"), ("--max-batch", "16", "--draft", "ngram"))
MANY = pytest.param(20, marks=pytest.mark.long)


def content() -> bytes:
    rows = []
    for number in range(LINES):
        messages = [{"role": "user", "content": f"Question {number}: " + "what is it? " * (number % 7)}]
        body = {"messages": messages, "max_tokens": 8 + number % 40, "ignore_eos": number % 2 == 0, **KINDS[number % len(KINDS)]}
        if "guided_json" in body:
            body["ignore_eos"] = False
        rows.append({"custom_id": str(number), "method": "POST", "url": CHAT, "body": body})
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with build_llm(Settings(model=str(MODEL), max_context=256)) as built:
        yield built


def killed(command: Sequence[str], results: Path, *, times: int) -> int:
    """Start the command so often, and kill it while it works. Return how often a result was there before and after."""
    survived = 0
    for number in range(times):
        until = LINES * (number + 1) // (times + 2)
        with subprocess.Popen([*command, *VARIED[number % len(VARIED)]], stdout=subprocess.DEVNULL, cwd=ROOT) as process:
            deadline = time.monotonic() + PATIENCE
            while count(results) < until:
                assert process.poll() is None, "the process ended before it was killed"
                assert time.monotonic() < deadline
                time.sleep(0.001)
            process.kill()
        survived += 0 < count(results) < LINES
    return survived


def count(results: Path) -> int:
    return results.read_bytes().count(b"\n") - 1 if results.exists() else 0


def program(command: str, *given: str) -> list[str]:
    return [sys.executable, "-m", "onedraw", command, *given, "--max-context", "256", "--no-self-check"]


@pytest.mark.parametrize("times", [1, MANY])
def test_a_file_is_the_same_after_kills(llm: LLM, tmp_path: Path, times: int) -> None:
    source, output, expected = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "expected.jsonl"
    source.write_bytes(content())
    summary = asyncio.run(run_file(llm, source, expected))
    assert (summary.completed, summary.failed) == (LINES - LINES // 5, LINES // 5)
    command = program("batch", str(source), str(output), "--model", str(MODEL), "--json")
    partial = tmp_path / "out.jsonl.partial"
    assert killed(command, partial, times=times) == times
    assert not output.exists()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr  # some lines fail
    assert json.loads(done.stdout)["resumed"] > 0
    assert output.read_bytes() == expected.read_bytes()
    assert errors_path(output).read_bytes() == errors_path(expected).read_bytes()
    assert not partial.exists()


@pytest.mark.parametrize("times", [3, MANY])
def test_a_batch_of_a_server_is_the_same_after_kills(llm: LLM, tmp_path: Path, times: int) -> None:
    folder, copy = tmp_path / "killed", tmp_path / "expected"
    store = BatchStore(folder, most_bytes=2**30, clock=time.time)
    uploaded = store.add_file(io.BytesIO(content()), owner=None, filename="in", purpose="batch", lifetime=None)
    now, day = int(time.time()), 24 * 3600
    print_of = llm.card.fingerprint
    batch = Batch("batch_0", None, CHAT, uploaded.id, "24h", now, now + day, seed=5, fingerprint=print_of, model=llm.card.name)
    store.add_batch(batch)
    store.close()
    shutil.copytree(folder, copy)

    def output_of(folder: Path) -> Callable[[], dict[str, Any]]:
        def read() -> dict[str, Any]:
            found: dict[str, Any] = json.loads((folder / "batches/batch_0.json").read_bytes())
            return found

        return read

    with serving(llm, ServerOptions(batch_dir=copy)):
        wait_until(lambda: output_of(copy)()["status"] == "completed")
    command = program("serve", str(MODEL), "--port", "0", "--batch-dir", str(folder), "--log-level", "error")
    assert killed(command, folder / "batches/batch_0.results", times=times) == times
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT, env={**os.environ}) as process:
        wait_until(lambda: output_of(folder)()["status"] == "completed" or process.poll() is not None)
        process.terminate()
    found, expected = output_of(folder)(), output_of(copy)()
    assert (found["completed"], found["failed"]) == (LINES - LINES // 5, LINES // 5)
    for name in ("output_file_id", "error_file_id"):
        contents = [(where / "files" / f"{one[name]}.jsonl").read_bytes() for where, one in ((folder, found), (copy, expected))]
        assert contents[0] == contents[1]
