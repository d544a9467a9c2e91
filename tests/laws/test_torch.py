"""The contract on the torch backend: tiny models of each family, compared by tokens and checksums."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from onedraw.backends.torch.backend import TorchBackend
from onedraw.backends.torch.device import pick_ops
from onedraw.backends.torch.ops.plain import attention
from onedraw.backends.torch.ops.plain.ops import TorchOps
from onedraw.checkpoints.open import open_checkpoint
from onedraw.models.registry import read_model_info
from onedraw.settings import default_cache_dir
from onedraw.types import Request
from tests.laws.harness import Answer, KnownAnswerProposer, Schedule, plain, random_requests, run, same
from tests.support import tiny

OPS = {"kind": "kernels"}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@pytest.fixture(params=["kernels", "torch"])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every law runs on our kernels and on the plain torch operations."""
    monkeypatch.setitem(OPS, "kind", request.param)
    return str(request.param)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_safetensors(request.param, tmp_path_factory.mktemp(request.param) / "hf")


def backend_of(path: Path, *, lanes: int = 4, pages: int = 200, threads: int | None = None) -> TorchBackend:
    info = read_model_info(open_checkpoint(path))
    device = torch.device("cpu")
    ours = OPS["kind"] == "kernels"
    operations = pick_ops("cpu", "f32", cache=default_cache_dir(), threads=threads) if ours else TorchOps(device)
    return TorchBackend(
        info.spec,
        info.weights,
        dtype="f32",
        device="cpu",
        lanes=lanes,
        pages=pages,
        page_size=8,
        max_context=400,
        ops=operations,
    )


def requests_of(seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    requests = random_requests(rng, count=6, vocab=tiny.VOCAB, longest=150, max_tokens=12)
    return [dataclasses.replace(r, id=f"{r.id}-{seed}") for r in requests]


def answers_of(requests: list[Request], expected: list[Answer]) -> KnownAnswerProposer:
    return KnownAnswerProposer({r.id: a.tokens for r, a in zip(requests, expected, strict=True)}, tiny.VOCAB)


def test_no_schedule_changes_a_bit(folder: Path, ops: str) -> None:
    requests = requests_of(3)
    one_lane = backend_of(folder, lanes=1)
    expected = plain(lambda: one_lane, requests)
    longest = max(len(r.prompt) + r.params.max_tokens for r in requests)
    drafts = answers_of(requests, expected)
    trees = dataclasses.replace(drafts, tree=True)
    variations = {
        "batched": (backend_of(folder), Schedule()),
        "small steps": (backend_of(folder), Schedule(step_tokens=7)),
        "late arrivals": (backend_of(folder), Schedule(step_tokens=64, arrivals=(5, 0, 2, 9, 1, 3))),
        "prefix hits": (backend_of(folder), Schedule(reuse=True, arrivals=(0, 3, 6, 9, 12, 15))),
        "few pages": (backend_of(folder, pages=-(-longest // 8) + 6), Schedule(reuse=True)),
        "drafts": (backend_of(folder), Schedule(proposer=drafts)),
        "trees": (backend_of(folder), Schedule(proposer=trees)),
        "trees, few pages": (
            backend_of(folder, pages=-(-longest // 8) + 9),
            Schedule(proposer=trees, step_tokens=60, reuse=True),
        ),
        "drafts, few pages": (
            backend_of(folder, pages=-(-longest // 8) + 6),
            Schedule(proposer=drafts, step_tokens=40, reuse=True),
        ),
    }
    counted: Counter[str] = Counter()
    for name, (backend, schedule) in variations.items():
        got, stats = run(backend, requests, schedule)
        assert same(got, expected), name
        counted.update(kept=stats.accepted_tokens, preemptions=stats.preemptions, hits=stats.prefix_hits)
        counted.update(rejected=stats.draft_tokens - stats.accepted_tokens, chunks=stats.middle_chunks, mixed=stats.mixed_steps)
    assert all(counted[what] > 0 for what in ("kept", "rejected", "preemptions", "hits", "chunks", "mixed")), counted


def test_threads_do_not_change_a_bit(folder: Path, ops: str) -> None:
    requests = requests_of(4)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(run(backend_of(folder, threads=threads), requests, Schedule())[0])
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


def test_the_self_check_passes_on_this_machine(folder: Path, ops: str) -> None:
    report = backend_of(folder).report
    assert report is not None
    assert report.passed, report.results


# ---------------------------------------------------------------------- planted faults


def test_a_product_that_follows_the_row_count_is_noticed_by_the_self_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix product whose bits change with the number of rows: the self-check must fall back to blocks of a fixed height."""
    from onedraw.backends.torch.ops.plain.linear import Linear

    monkeypatch.setitem(OPS, "kind", "torch")
    path = tiny.write_safetensors("llama", tmp_path / "hf")
    real = Linear._product
    monkeypatch.setattr(Linear, "_product", lambda self, x: real(self, x) * (1 + (len(x) % 3) * 2.0**-23))
    report = backend_of(path).report
    assert report is not None
    assert report.rule.block is not None  # only blocks of one fixed height can pass here


@pytest.mark.parametrize("fault", ["blocks by tile", "mask by batch", "stale page"])
def test_a_planted_fault_is_caught(folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPS, "kind", "torch")
    requests = requests_of(3)
    one_lane = backend_of(folder, lanes=1)
    expected = plain(lambda: one_lane, requests)
    match fault:
        case "blocks by tile":  # the sum over key blocks depends on the tile height
            real = attention._ordered_sum
            monkeypatch.setattr(
                attention, "_ordered_sum", lambda parts, group: real(parts, group) * (1 + (group.height == 16) * 2.0**-23)
            )
        case "mask by batch":  # a query loses its last key if the step has an odd number of queries
            from onedraw.backends.torch.ops.plain import attention as tiles

            mask = tiles._mask
            short = lambda highest: np.maximum(highest - len(highest) % 2, 0)  # noqa: E731
            monkeypatch.setattr(tiles, "_mask", lambda lowest, highest, block: mask(lowest, short(highest), block))
        case "stale page":  # one position too many counts as cached, so its page keeps an older key
            from onedraw.memory.allocator import Allocator

            allocate = Allocator.allocate

            def stale(self: Allocator, history: object, **named: object) -> object:
                lease = allocate(self, history, **named)  # type: ignore[arg-type]
                if lease is not None and lease.cached:
                    lease.cached += 1
                return lease

            monkeypatch.setattr(Allocator, "allocate", stale)
    got, _ = run(backend_of(folder), requests, Schedule(step_tokens=33, reuse=True, arrivals=(0, 3, 6, 9, 12, 15)))
    assert not same(got, expected)
