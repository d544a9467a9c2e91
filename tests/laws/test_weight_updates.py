"""After an update of the weights, every reply has the tokens and checksums of an engine that was started with the new weights.

Requests that run during the update go on with the new weights, as if they were continued from the tokens that they have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from onedraw.backends.base import Backend
from onedraw.backends.torch.backend import TorchBackend
from onedraw.backends.torch.model.weight_update import WeightUpdate
from onedraw.checkpoints.open import open_checkpoint
from onedraw.engine.engine import Engine
from onedraw.engine.scheduler import Scheduler
from onedraw.errors import UnsupportedModel
from onedraw.memory.allocator import Allocator
from onedraw.memory.disk_snapshots import SnapshotFolder
from onedraw.models.registry import read_model_info
from onedraw.speculation.speculator import Speculator
from onedraw.types import Request
from tests.laws.harness import Answer, KnownAnswerProposer, plain, random_params, same
from tests.support import tiny
from tests.support.torch_backend import make_backend

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_5_odd", "gemma4_e2b")


def requests_of(seed: int) -> list[Request]:
    """Prompts that share prefixes, one of them twice, with mixed parameters."""
    rng = np.random.default_rng(seed)
    text = [tuple(int(t) for t in rng.integers(0, tiny.VOCAB, n)) for n in (150, 40)]
    prompts = [text[0], text[0], text[0][:100] + text[1], text[1]]
    return [
        Request(f"q{i}", prompt, random_params(rng, vocab=tiny.VOCAB, max_tokens=12, calm=True))
        for i, prompt in enumerate(prompts)
    ]


def no_snapshots(backend: Backend) -> SnapshotFolder:
    raise AssertionError("this engine has no snapshots")


def weights_of(folder: Path) -> Any:
    return read_model_info(open_checkpoint(folder)).weights


def finished(engine: Engine, requests: Sequence[Request], answers: list[Answer]) -> list[Answer]:
    for request, answer in zip(requests, answers, strict=True):
        engine.add(request, answer.add_event)
    while engine.busy:
        engine.step()
        engine.scheduler.allocator.audit_all()
    return answers


def updated(
    make: Callable[..., TorchBackend],
    old: Path,
    new: Path,
    requests: Sequence[Request],
    *,
    steps: int,
    change: Callable[[Engine, Path], None],
) -> tuple[list[Answer], list[Answer], list[int], Counter[str]]:
    """Run the requests, so that the cache is warm, then start them again, update after some steps, finish them, and run all of
    them a third time. Return the answers of the second and third time, and how many tokens each had at the update."""
    backend = make(old)
    allocator = Allocator(backend.capacity, reuse=True)
    answers = plain(lambda: make(old), requests)
    proposer = KnownAnswerProposer({r.id: a.tokens for r, a in zip(requests, answers, strict=True)}, tiny.VOCAB)
    scheduler = Scheduler(
        allocator=allocator, capacity=backend.capacity, speculator=Speculator([proposer], draft_tokens=4), step_tokens=4096
    )
    engine = Engine(backend=backend, scheduler=scheduler)
    first = finished(engine, requests, [Answer() for _ in requests])
    assert same(first, answers)
    during = [Answer() for _ in requests]
    for request, answer in zip(requests, during, strict=True):
        engine.add(request, answer.add_event)
    for _ in range(steps):
        engine.step()
    change(engine, new)
    had = [len(answer.tokens) for answer in during]
    while engine.busy:
        engine.step()
        allocator.audit_all()
    hits = engine.stats().prefix_hits
    after = finished(engine, requests, [Answer() for _ in requests])
    stats = engine.stats()
    seen = Counter(
        preemptions=stats.preemptions,
        hits=stats.prefix_hits - hits,
        begun=sum(0 < count < len(answer.tokens) for count, answer in zip(had, during, strict=True)),
        drafts=stats.draft_tokens,
    )
    return during, after, had, seen


def replaced(engine: Engine, folder: Path) -> None:
    engine.replace_weights(lambda backend: backend.replace_weights(weights_of(folder)), no_snapshots)  # type: ignore[attr-defined]


def law_holds(make: Callable[..., TorchBackend], old: Path, new: Path, change: Callable[[Engine, Path], None]) -> Counter[str]:
    """Raise AssertionError if a reply after the update, or the rest of a reply during it, is not that of the new weights."""
    requests = requests_of(3)
    expected = plain(lambda: make(new), requests)
    assert not same(expected, plain(lambda: make(old), requests))
    during, after, had, seen = updated(make, old, new, requests, steps=4, change=change)
    assert same(after, expected)
    for request, answer, count in zip(requests, during, had, strict=True):
        if count == len(answer.tokens):
            continue
        rest = plain(lambda: make(new), [replace(request, given=tuple(answer.tokens[:count]))])[0]
        assert answer.tokens[count:] == rest.tokens
        assert answer.checksums[count:] == rest.checksums
        assert answer.finish == rest.finish
    return seen


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_replies_after_an_update_are_those_of_the_new_weights(name: str, kernels: bool, tmp_path: Path) -> None:
    old = tiny.write_safetensors(name, tmp_path / "old", seed=1)
    new = tiny.write_safetensors(name, tmp_path / "new", seed=2)
    seen = law_holds(lambda folder: make_backend(folder, kernels=kernels), old, new, replaced)
    assert all(seen[what] > 0 for what in ("preemptions", "hits", "begun", "drafts")), seen


def test_packed_weights_and_stages_are_updated(tmp_path: Path) -> None:
    folders = [tiny.write_safetensors("qwen3", tmp_path / f"{seed}", seed=seed) for seed in (1, 2)]
    law_holds(lambda folder: make_backend(folder, cuts=(1,)), *folders, replaced)
    files = []
    for seed in (1, 2):
        folder = tmp_path / f"gguf{seed}"
        folder.mkdir()
        files.append(tiny.write_gguf("qwen3", folder / "model.gguf", seed=seed))
    law_holds(lambda path: make_backend(path), *files, replaced)


def test_an_update_back_to_the_old_weights_gives_the_old_replies(tmp_path: Path) -> None:
    old = tiny.write_safetensors("llama", tmp_path / "old", seed=1)
    new = tiny.write_safetensors("llama", tmp_path / "new", seed=2)

    def twice(engine: Engine, folder: Path) -> None:
        replaced(engine, old)
        replaced(engine, folder)
        replaced(engine, old)

    requests = requests_of(3)
    _, after, _, _ = updated(make_backend, old, new, requests, steps=4, change=twice)
    assert same(after, plain(lambda: make_backend(old), requests))


# ---------------------------------------------------------------------------------------------- failures


def with_tensors(folder: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    target.mkdir()
    for file in folder.glob("*.json"):
        (target / file.name).write_text(file.read_text())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def spoil(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = torch.nan


@pytest.mark.parametrize("kernels", [True, False])
def test_weights_without_finite_logits_leave_the_old_ones(kernels: bool, tmp_path: Path) -> None:
    old = tiny.write_safetensors("qwen3", tmp_path / "old", seed=1)
    bad = with_tensors(old, tmp_path / "bad", spoil)

    def refused(engine: Engine, folder: Path) -> None:
        with pytest.raises(UnsupportedModel, match="not finite"):
            replaced(engine, folder)

    requests = requests_of(3)
    make = lambda folder: make_backend(folder, kernels=kernels)  # noqa: E731
    during, after, _, seen = updated(make, old, bad, requests, steps=4, change=refused)
    expected = plain(lambda: make(old), requests)
    assert same(during, expected)
    assert same(after, expected)
    assert seen["begun"] > 0


def test_an_update_that_breaks_off_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tiny.write_safetensors("qwen3", tmp_path / "old", seed=1)
    new = tiny.write_safetensors("qwen3", tmp_path / "new", seed=2)
    from onedraw.backends.torch.model import weight_update

    whole, calls = weight_update.exchange, Counter[str]()

    def breaks(used: torch.Tensor, other: torch.Tensor) -> None:
        calls["exchanges"] += 1
        if calls["exchanges"] == 5:
            raise RuntimeError("the device failed")
        whole(used, other)

    def fails(engine: Engine, folder: Path) -> None:
        monkeypatch.setattr(weight_update, "exchange", breaks)
        with pytest.raises(RuntimeError, match="the device failed"):
            replaced(engine, folder)

    requests = requests_of(3)
    _, after, _, _ = updated(make_backend, old, new, requests, steps=4, change=fails)
    assert calls["exchanges"] == 9  # four of them were undone
    assert same(after, plain(lambda: make_backend(old), requests))


# ---------------------------------------------------------------------------------------------- planted faults


def keeps_cache(engine: Engine, folder: Path) -> None:
    """Planted: the prefix cache is not emptied, so its pages of the old weights are met again."""
    engine.settle()
    for sequence in engine.scheduler.running[::-1]:
        engine.scheduler.preempt(sequence, last=False)
    backend = engine.backend
    assert isinstance(backend, TorchBackend)
    backend.report = None  # else the self-check would overwrite some of them
    backend.replace_weights(weights_of(folder))


def keeps_state(engine: Engine, folder: Path) -> None:
    """Planted: running sequences keep the keys and values of the old weights."""
    engine.settle()
    backend = engine.backend
    assert isinstance(backend, TorchBackend)
    backend.report = None
    backend.replace_weights(weights_of(folder))
    for sequence in engine.scheduler.running:
        assert sequence.lease is not None


def test_a_cache_that_is_kept_is_caught(tmp_path: Path) -> None:
    old = tiny.write_safetensors("qwen3", tmp_path / "old", seed=1)
    new = tiny.write_safetensors("qwen3", tmp_path / "new", seed=2)
    with pytest.raises(AssertionError):
        law_holds(make_backend, old, new, keeps_cache)
    with pytest.raises(AssertionError):
        law_holds(make_backend, old, new, keeps_state)


def test_a_weight_that_is_left_out_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tiny.write_safetensors("qwen3", tmp_path / "old", seed=1)
    new = tiny.write_safetensors("qwen3", tmp_path / "new", seed=2)
    match = WeightUpdate.match

    def skips(self: WeightUpdate, before: object, after: object, path: str = "") -> None:
        if path != "mixer.k_norm":
            match(self, before, after, path)

    monkeypatch.setattr(WeightUpdate, "match", skips)
    with pytest.raises(AssertionError):
        law_holds(make_backend, old, new, replaced)
