"""A GPU whose memory another process takes while requests run: rows are preempted, and no reply ends or changes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from onedraw.backends.base import StepHandle
from onedraw.backends.torch.backend import TorchBackend
from onedraw.checkpoints.random_weights import random_weights
from onedraw.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from onedraw.types import Plan, Request, SamplingParams
from tests.laws.harness import Schedule, plain, run, same

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LEFT = 96 * 2**20  # bytes that the other process leaves; a step of 6,000 tokens needs more, a small one does not
SPEC = ModelSpec(
    family="llama",
    layers=(LayerSpec(AttentionSpec(heads=8, kv_heads=2, head_dim=64, rope=RopeSpec(1e4, 64), scale=0.125), MlpSpec(8192)),) * 2,
    hidden=512,
    vocab=4000,
    eps=1e-5,
    tied=False,
    max_context=8192,
)
TAKES_ALL = """
import sys, torch
taken, size = [], 2**33
while size >= 2**22:
    free = torch.cuda.mem_get_info()[0]
    if free - size < {left}:
        size //= 2
        continue
    try:
        taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        size //= 2
print("taken", flush=True)
sys.stdin.read()
"""


class Crowded(TorchBackend):
    """Another process takes the device's free memory before the step with the long prompt."""

    other: subprocess.Popen[str] | None = None

    def submit(self, plan: Plan) -> StepHandle:
        if self.other is None and any(len(row.tokens) > 1000 for row in plan.rows):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            command = [sys.executable, "-c", TAKES_ALL.format(left=LEFT)]
            self.other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert self.other.stdout is not None
            assert self.other.stdout.readline() == "taken\n"
        return super().submit(plan)


def backend_of(kind: type[TorchBackend], **sizes: Any) -> Any:
    given = {"dtype": "bf16", "device": "cuda:0", "pages": 700, "page_size": 16, "max_context": 8192, "check": False, **sizes}
    return kind(SPEC, random_weights(SPEC, seed=1), **given)


def test_memory_that_another_process_takes_ends_and_changes_no_reply() -> None:
    def request(name: str, length: int, tokens: int) -> Request:
        prompt = tuple(i * i * length % SPEC.vocab for i in range(length))
        return Request(name, prompt, SamplingParams(max_tokens=tokens, checksums=True, seed=length))

    requests = [*(request(f"stream-{i}", 30 + i, 80) for i in range(3)), request("long", 6000, 8)]
    expected = plain(lambda: backend_of(TorchBackend, lanes=1), requests)
    backend = backend_of(Crowded, lanes=4)
    try:
        got, stats = run(backend, requests, Schedule(reuse=True, step_tokens=8192, arrivals=(0, 0, 0, 20)))
    finally:
        if backend.other is not None:
            backend.other.communicate("")
    assert stats.out_of_memory_steps > 0, "the step of the long prompt had enough memory"
    assert stats.failed_steps == 0
    assert same(got, expected)
