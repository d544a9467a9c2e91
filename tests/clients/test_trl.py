"""TRL's AsyncGRPOTrainer, unmodified, trains on the rollouts of a server: its rollout worker samples, its client pauses, updates
and resumes, and the reward rises. `trainer/loop.py` says what takes the place of a GPU."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.clients.conftest import PATIENCE, ROOT, running

TRL = ROOT / ".venv-trl" / "bin" / "python"
MODEL = ROOT / "tests/fixtures/trained/trained_qwen3"
TOKEN = "sesame"


@pytest.mark.long  # installing it takes longer than all other clients
def test_trl_trains_on_rollouts(tmp_path: Path) -> None:
    if not TRL.exists():
        pytest.skip("TRL is not installed: make test-long installs it")
    weights, answer = tmp_path / "weights", tmp_path / "answer.json"
    weights.mkdir()
    flags = ("--dtype", "f32", "--max-context", "512", "--update-token", TOKEN, "--weight-dir", str(weights), "--no-self-check")
    with running(*flags, model=(str(MODEL),), key="") as server:
        before = httpx.get(f"{server.url}/server_info").json()["fingerprint"]
        done = subprocess.run(
            [
                TRL,
                ROOT / "tests/clients/trainer/loop.py",
                MODEL,
                server.url.replace("://", f"://trainer:{TOKEN}@"),
                weights,
                answer,
            ],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=4 * PATIENCE,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        after = httpx.get(f"{server.url}/server_info").json()["fingerprint"]
    steps = [row for row in json.loads(answer.read_text()) if "reward" in row]
    rewards = [row["reward"] for row in steps]
    assert after != before
    assert len(list(weights.iterdir())) == len(steps) + 1  # before the first step, and after each
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards
