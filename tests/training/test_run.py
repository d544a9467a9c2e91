"""`onedraw train-draft` on a tiny trained model, in the command line and killed in the middle."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

import onedraw
from onedraw.build.llm import build_llm
from onedraw.checkpoints.open import open_checkpoint
from onedraw.contract.record import RecordingLLM, RecordWriter, read_records
from onedraw.models.dflash import read_drafter_info
from onedraw.settings import Settings
from onedraw.training.run import RunOptions, train
from tests.cli.running import Terminal

TRAINED = Path(__file__).parents[1] / "fixtures" / "trained"
MODEL, DRAFTER = str(TRAINED / "trained_qwen3"), TRAINED / "trained_dflash_qwen3"
HYBRID = str(TRAINED / "trained_qwen3_5")
OPENINGS = (
    *("Return the number of items in", "The value must be a string or", "def read(self, size=-1):", "import os\nimport sys\n"),
    *(
        "The default is None. This",
        "Raise ValueError if",
        "class Path(object):",
        "This module provides",
        "If the file does not exist",
    ),
    *("a list of the names", "The function takes", "Example usage:", "self.assertEqual(", "for line in file:", "the object is"),
)


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(capsys)


def prompts(folder: Path) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in OPENINGS))
    return str(path)


def command(data: str, out: Path, *more: str, model: str = MODEL) -> tuple[str, ...]:
    return ("train-draft", model, "--data", data, "--out", str(out), "--device", "cpu", "--new-tokens", "48", *more)


def tokens_per_step(folder: Path, model: str = MODEL) -> float:
    """What the reader and the engine make of a drafter."""
    llm = onedraw.load(model, draft=str(folder), draft_tokens=7, device="cpu", max_context=256)
    plain = onedraw.load(model, draft="none", device="cpu", max_context=256)
    kept = tokens = 0
    with llm, plain:
        for text in OPENINGS[:5]:
            options = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
            reply, expected = llm.generate(text, **options), plain.generate(text, **options)
            assert reply.token_ids == expected.token_ids
            kept, tokens = kept + reply.usage.kept, tokens + len(reply.token_ids)
    return tokens / (tokens - kept)


def test_a_drafter_is_trained_from_prompts_and_then_serves(terminal: Terminal, tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    result = terminal.json(*command(prompts(tmp_path), out, "--replies", "120", "--steps", "60"))
    assert result["steps"] == 60
    assert result["measured"]["mean"] > 1.1
    assert tokens_per_step(out) > 1.1
    assert tokens_per_step(out / "drafter.gguf") > 1.1
    both = [read_drafter_info(open_checkpoint(path)).spec for path in (out, out / "drafter.gguf")]
    assert (both[0].block, both[0].mask_token, both[0].target_layers) == (
        both[1].block,
        both[1].mask_token,
        both[1].target_layers,
    )
    assert "tokens per step" in (out / "README.md").read_text()
    # The same command again finds its steps done, and only measures again.
    again = terminal.json(*command(prompts(tmp_path), out, "--replies", "120", "--steps", "60"))
    assert (again["steps"], again["kept"], again["sequences"]) == (result["steps"], result["kept"], result["sequences"])
    assert terminal.run(*command(prompts(tmp_path), out, "--block", "4")) == 2
    assert "holds a run with another block (8, not 4)" in terminal.err


@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"])
def test_an_ended_run_goes_on_from_its_state(ended_by: signal.Signals, terminal: Terminal, tmp_path: Path) -> None:
    out, state = tmp_path / "drafter", tmp_path / "drafter" / "training" / "state.safetensors"
    wanted = command(prompts(tmp_path), out, "--replies", "40", "--no-measure")
    process = subprocess.Popen(
        [sys.executable, "-m", "onedraw", *wanted, "--minutes", "3"],
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 120
    while not state.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(ended_by)
    _, told = process.communicate()
    assert state.exists(), told.decode()
    if ended_by == signal.SIGINT:
        assert process.returncode == 130
        assert "the same command goes on" in told.decode()
        assert "Traceback" not in told.decode()
    with safe_open(state, "numpy") as file:
        before = json.loads(file.metadata()["run"])
    sampled = {record.id for record in read_records(out / "training" / "records")}
    result = terminal.json(
        *wanted, "--minutes", "0.3", "--steps", "1"
    )  # These are done already, so what is left is to write the drafter.
    assert result["steps"] >= 1
    assert result["seconds"] >= before["seconds"] > 0
    after = {record.id for record in read_records(out / "training" / "records")}
    assert after >= sampled
    assert (out / "model.safetensors").exists()


def test_a_run_goes_on_when_later_replies_have_its_mask_token(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask token is one that no reply has. With more time more replies are sampled, and one of them may have it."""
    out, data = tmp_path / "drafter", prompts(tmp_path)
    wanted = (*command(data, out, "--replies", "4", "--no-measure"), "--temperatures", "1")
    terminal.json(*wanted, "--steps", "1")
    monkeypatch.setattr("onedraw.build.training.unused_token", lambda *_: 77)  # what it may be after more replies
    assert terminal.json(*wanted, "--steps", "2")["steps"] == 2


def test_training_goes_on_from_a_drafter_with_records(terminal: Terminal, tmp_path: Path) -> None:
    """A run from recorded traffic begins with the drafter it is given, and does not end with a worse one."""
    records = tmp_path / "records"
    for number, text in enumerate(OPENINGS):
        options = ("--max-tokens", "48", "--temperature", "0", "--seed", str(number), "--ignore-eos", "--record", str(records))
        assert terminal.run("generate", MODEL, text, "--device", "cpu", "--draft", "none", *options) == 0, terminal.err
    out = tmp_path / "drafter"
    result = terminal.json(*command(str(records), out, "--steps", "20", "--init", str(DRAFTER)))
    assert result["measured"]["mean"] >= result["begun_with"]["mean"] > 1.2
    spec = read_drafter_info(open_checkpoint(out)).spec
    assert spec == read_drafter_info(open_checkpoint(DRAFTER)).spec


def test_a_drafter_that_learns_on_from_drifted_traffic_keeps_more_drafts(tmp_path: Path) -> None:
    """Requests unlike those that the drafter was trained on: it learns from what --learn-draft keeps of them, and drafts better
    for requests that it has not seen."""
    words = ("ALPHA", "BETA", "GAMMA", "DELTA", "EPSILON", "ZETA", "ETA", "THETA")
    prompts = [f"{first}: {7 * number}, {second.lower()} = {number}" for number, first in enumerate(words) for second in words]
    settings = Settings(model=MODEL, device="cpu", max_context=256)
    with build_llm(replace(settings, draft=("none",))) as plain:
        llm = RecordingLLM(plain, source=MODEL, learning=RecordWriter(tmp_path / "learned", size=2**17, most=2**20))

        async def every() -> None:
            options = {"temperature": 0.7, "max_tokens": 48, "ignore_eos": True}
            await asyncio.gather(*(llm.agenerate(text, seed=seed, **options) for seed, text in enumerate(prompts)))

        asyncio.run(every())
        llm.close()
    out = tmp_path / "drafter"
    options = RunOptions(data=str(tmp_path / "learned"), out=out, steps=24, initial=DRAFTER, minutes=30)
    report = train(settings, options, lambda progress: None)
    assert report.begun_with is not None
    assert report.measured is not None
    assert report.measured.low > report.begun_with.high
    assert tokens_per_step(out) > 1.0


def test_bench_shows_what_a_drafter_gains_on_prompts_of_a_file(terminal: Terminal, tmp_path: Path) -> None:
    drafting = ("--draft", str(DRAFTER), "--draft-tokens", "7", "--temperature", "0", "--new-tokens", "24", "--batch", "4")
    found = terminal.json("bench", MODEL, "--prompts", prompts(tmp_path), *drafting, "--device", "cpu")
    [row] = found["rows"]
    assert row["replies"] == len(OPENINGS)
    assert 1.1 < row["low"] <= row["mean"] <= row["high"] <= 8
    assert row["x_plain"] > 0
    (tmp_path / "prompts.jsonl").write_text("{")
    assert terminal.run("bench", MODEL, "--prompts", str(tmp_path / "prompts.jsonl")) == 2
    assert "prompts.jsonl:1: not JSON" in terminal.err


def test_a_hybrid_gets_a_drafter_of_its_own(terminal: Terminal, tmp_path: Path) -> None:
    """The target has recurrent layers, so rejected drafts are undone in its states, and the drafter reads their features too."""
    out = tmp_path / "drafter"
    steps = ("--replies", "60", "--steps", "40", "--temperatures", "0")
    result = terminal.json(*command(prompts(tmp_path), out, *steps, model=HYBRID))
    assert result["measured"]["mean"] > 1.0
    assert tokens_per_step(out, model=HYBRID) > 1.0


def test_wrong_options_are_refused_before_anything_is_loaded(terminal: Terminal, tmp_path: Path) -> None:
    for more, complaint in (
        (("--minutes", "0"), "--minutes: must be above 0"),
        (("--block", "1"), r"--block: must be in \[2, 64\]"),
        (("--init", str(tmp_path / "no")), "--init: there is no"),
        (("--temperatures", "x"), "not a list of temperatures"),
    ):
        assert terminal.run(*command(prompts(tmp_path), tmp_path / "out", *more)) == 2
        assert re.search(complaint, terminal.err), terminal.err
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").touch()
    assert terminal.run(*command(prompts(tmp_path), tmp_path / "out")) == 2
    assert "already holds a model" in terminal.err
