"""`onedraw train-draft` on a tiny trained model, in the command line and killed in the middle."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import safe_open

import onedraw
from onedraw.checkpoints.open import open_checkpoint
from onedraw.contract.record import read_records
from onedraw.models.dflash import read_drafter_info
from tests.cli.running import Terminal

TRAINED = Path(__file__).parents[1] / "fixtures" / "trained"
MODEL, DRAFTER = str(TRAINED / "trained_qwen3"), TRAINED / "trained_dflash_qwen3"
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


def command(data: str, out: Path, *more: str) -> tuple[str, ...]:
    return ("train-draft", MODEL, "--data", data, "--out", str(out), "--device", "cpu", "--new-tokens", "48", *more)


def tokens_per_step(folder: Path) -> float:
    """What the reader and the engine make of a drafter."""
    llm = onedraw.load(MODEL, draft=str(folder), draft_tokens=7, device="cpu", max_context=256)
    plain = onedraw.load(MODEL, draft="none", device="cpu", max_context=256)
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


def test_a_killed_run_goes_on_from_its_state(terminal: Terminal, tmp_path: Path) -> None:
    out, state = tmp_path / "drafter", tmp_path / "drafter" / "training" / "state.safetensors"
    wanted = command(prompts(tmp_path), out, "--replies", "40", "--no-measure")
    process = subprocess.Popen(
        [sys.executable, "-m", "onedraw", *wanted, "--minutes", "0.6"],
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 120
    while not state.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    _, told = process.communicate()
    assert state.exists(), told.decode()
    with safe_open(state, "numpy") as file:
        before = json.loads(file.metadata()["run"])
    sampled = {record.id for record in read_records(out / "training" / "records")}
    result = terminal.json(*wanted, "--steps", "1")  # These are done already, so what is left is to write the drafter.
    assert result["steps"] >= 1
    assert result["seconds"] >= before["seconds"] > 0
    after = {record.id for record in read_records(out / "training" / "records")}
    assert after >= sampled
    assert (out / "model.safetensors").exists()


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
