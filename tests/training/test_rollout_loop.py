"""Reinforcement learning on our own rollouts: sample over HTTP, train in torch, send the weights, until the reward has risen.

The server is asked as TRL's rollout worker asks it. In every round the trainer's logprobs have the bits of the sampler's, so the
ratio between the policy that is trained and the one that acted is exactly 1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import onedraw
from onedraw.build.llm import build_llm
from onedraw.server.config import ServerOptions
from onedraw.settings import Settings
from tests.server.running import Served, serving
from tests.support import tiny

TOKEN = "trainer"
ROUNDS, REPLIES, LENGTH = 12, 16, 8
PROMPT = list(range(20, 30))


def reward_of(reply: list[int]) -> float:
    """The share of even token ids."""
    return sum(token % 2 == 0 for token in reply) / len(reply)


def rollout(served: Served, seed: int) -> tuple[list[int], list[float]]:
    body: dict[str, Any] = {"model": served.model, "prompt": PROMPT, "max_tokens": LENGTH, "temperature": 1.0, "top_p": 1.0}
    body |= {"top_k": 0, "repetition_penalty": 1.0, "n": 1, "return_token_ids": True, "logprobs": 0, "seed": seed}
    answer = served.post("/v1/completions", **body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def send_weights(served: Served, model: torch.nn.Module, folder: Path, source: Path) -> str:
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    tensors = {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    http, auth = served.http, ("trainer", TOKEN)
    assert http.post("/pause", params={"mode": "keep"}, auth=auth).status_code == 200
    assert http.post("/start_weight_update", json={"is_checkpoint_format": True}, auth=auth).status_code == 200
    answer = http.post("/update_weights", json={"update_info": {"weight_dir": folder.name}}, auth=auth)
    assert answer.status_code == 200, answer.text
    assert http.post("/finish_weight_update", auth=auth).status_code == 200
    assert http.post("/resume", auth=auth).status_code == 200
    return str(json.loads(answer.text)["fingerprint"])


@pytest.mark.long
def test_the_reward_of_rollouts_rises(tmp_path: Path) -> None:
    start = tiny.write_safetensors("qwen3", tmp_path / "start", seed=3)
    model = onedraw.torch_forward(start)
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-3)
    options = ServerOptions(update_token=TOKEN, weight_dir=tmp_path)
    means, fingerprints = [], set()
    settings = Settings(model=str(start), dtype="f32", max_context=128)
    with build_llm(settings) as llm, serving(llm, options) as served:
        for number in range(ROUNDS):
            found = [rollout(served, seed=(number << 40) + index) for index in range(REPLIES)]
            rewards = torch.tensor([reward_of(reply) for reply, _ in found])
            means.append(float(rewards.mean()))
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            values = model.batch_logprobs([(PROMPT, reply) for reply, _ in found])
            for own, (_, sampled) in zip(values, found, strict=True):
                assert own.tolist() == sampled
            loss = -torch.stack([own.mean() * advantage for own, advantage in zip(values, advantages, strict=True)]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            fingerprints.add(send_weights(served, model, tmp_path / f"step-{number}", start))
    assert len(fingerprints) == ROUNDS
    assert sum(means[-2:]) / 2 > sum(means[:2]) / 2 + 0.15, means
