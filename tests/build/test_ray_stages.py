"""Stages in real Ray actors on this machine: the tokens of one process, also after a stage was killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onedraw.backends.torch.backend import TorchBackend
from onedraw.build.llm import torch_backend
from onedraw.build.ray_connection import started_here
from onedraw.checkpoints.open import open_checkpoint
from onedraw.errors import BadSetting, ModelError
from onedraw.models.registry import read_model_info
from onedraw.settings import Settings
from onedraw.types import Request
from tests.laws.harness import KnownAnswerProposer, Schedule, plain, random_params, run, same
from tests.support import tiny

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
SIZES: dict[str, Any] = {"max_context": 160, "max_batch": 20, "self_check": False, "threads": 1, "draft_tokens": 8}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster of one node, which ends with the tests of this module."""
    started_here("--devices", cpus=2)
    try:
        yield
    finally:
        ray.shutdown()


def backend_of(folder: Path, **how: Any) -> TorchBackend:
    checkpoint = open_checkpoint(folder)
    settings = Settings(model=str(folder), **{**SIZES, **how})
    backend = torch_backend(settings, read_model_info(checkpoint), print, None, weights=checkpoint.fingerprint(), warm_up=False)
    assert isinstance(backend, TorchBackend)
    return backend


def streams(count: int) -> list[Request]:
    rng = np.random.default_rng(3)
    requests = []
    for number in range(count):
        prompt = tuple(int(t) for t in rng.integers(0, tiny.VOCAB, 5 + 3 * number))
        params = random_params(rng, vocab=tiny.VOCAB, max_tokens=75, calm=True)
        requests.append(Request(f"q{number}", prompt, params))
    return requests


def test_a_stage_actor_that_is_killed_ends_and_changes_no_stream(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 streams on a hybrid model over two actors and this process; kill -9 of the first actor after step 50."""
    folder = tiny.write_safetensors("qwen3_5_odd", tmp_path / "hybrid")
    requests = streams(20)
    one = backend_of(folder, device="cpu", max_batch=1)
    expected = plain(lambda: one, requests)
    one.close()
    drafts = KnownAnswerProposer(
        {r.id: a.tokens for r, a in zip(requests, expected, strict=True)}, tiny.VOCAB, wrong_every=2, empty_every=2
    )
    backend = backend_of(folder, devices="ray:0/cpu,ray:0/cpu,cpu", split="1,2,1")
    try:
        group = backend._stage_group
        assert group is not None
        assert [stage.stop for stage in group.stages] == [1, 3]
        first: Any = group._hosted[0].host
        before, collected, real = first.pid, 0, backend.collect

        def collect(handle: Any) -> Any:
            nonlocal collected
            collected += 1
            outcome = real(handle)
            if collected == 50:
                os.kill(before, signal.SIGKILL)
            return outcome

        monkeypatch.setattr(backend, "collect", collect)
        got, stats = run(backend, requests, Schedule(proposer=drafts, reuse=True, step_tokens=200))
        assert stats.state_losses == 1
        assert stats.accepted_tokens
        assert first.pid != before
        assert same(got, expected)
    finally:
        backend.close()


def test_a_device_that_is_not_there_is_refused_by_name(cluster: None, tmp_path: Path) -> None:
    folder = tiny.write_safetensors("llama31", tmp_path / "llama")
    with pytest.raises(BadSetting, match="no node is called 'nowhere' in this Ray cluster; it has 0 "):
        backend_of(folder, devices="ray:nowhere/cpu,cpu")
    with pytest.raises(BadSetting, match="the last device must be one of this machine"):
        backend_of(folder, devices="cpu,ray:0/cpu")
    with pytest.raises(BadSetting, match=r"node 0: .*finds no CUDA device"):
        backend_of(folder, devices="ray:0/cuda:0,cpu")
    with pytest.raises(BadSetting, match="write ray:NODE/DEVICE"):
        backend_of(folder, devices="ray:0,cpu")


def test_a_node_with_other_weights_is_refused(cluster: None, tmp_path: Path) -> None:
    folder = tiny.write_safetensors("llama31", tmp_path / "llama")
    checkpoint = open_checkpoint(folder)
    settings = Settings(model=str(folder), devices="ray:0/cpu,cpu", **SIZES)
    with pytest.raises(ModelError, match="ray:0/cpu has other weights"):
        torch_backend(settings, read_model_info(checkpoint), print, None, weights="another fingerprint", warm_up=False)
