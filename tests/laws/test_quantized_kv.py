"""The contract with keys and values of 8 and 4 bits: quantized once when written, with a scale per vector, and read by every
kernel."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onedraw.backends.torch.backend import TorchBackend
from onedraw.backends.torch.ops.plain.ops import TorchAttentionInputs
from onedraw.backends.torch.state import kv_pages
from onedraw.backends.torch.state.kv_pages import PageStore, encode
from onedraw.models.spec import AttentionSpec
from tests.laws.harness import Answer, KnownAnswerProposer, Schedule, plain, run, same
from tests.laws.test_modern import LATE, PAGES
from tests.laws.test_modern import REQUESTS as CONVERSATION
from tests.laws.test_snapshots import folder_of
from tests.support import tiny
from tests.support.torch_backend import make_backend

KINDS = ("int8", "fp8", "int4")
FAMILIES = ("llama", "qwen3_5_odd", "gemma4_e2b", "laguna_odd")
REQUESTS = [CONVERSATION[i] for i in (0, 2, 3, 4)]  # first messages, a second turn, a prompt that shares a part of the first one


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("codes")
    return {name: tiny.write_safetensors(name, place / name) for name in FAMILIES}


def backend_of(folder: Path, kind: str | None, **changes: Any) -> TorchBackend:
    return make_backend(folder, kv_dtype=kind, **{"check": False, **changes})


def plain_answers(folder: Path, kind: str, **changes: Any) -> list[Answer]:
    one_lane = backend_of(folder, kind, lanes=1, **changes)
    return plain(lambda: one_lane, REQUESTS)


def drafts_of(expected: list[Answer], *, tree: bool = False) -> KnownAnswerProposer:
    return KnownAnswerProposer({r.id: a.tokens for r, a in zip(REQUESTS, expected, strict=True)}, tiny.VOCAB, tree=tree)


COVERED = [
    *((name, kind, "kernels") for name in FAMILIES for kind in KINDS),
    ("llama", "fp8", "torch"),
    ("gemma4_e2b", "int8", "torch"),
    ("llama", "int4", "torch"),
]


@pytest.mark.parametrize(("name", "kind", "ops"), COVERED)
def test_no_schedule_changes_a_bit(folders: dict[str, Path], tmp_path: Path, name: str, kind: str, ops: str) -> None:
    """Batches, small chunks, preemption, restart, drafts, draft trees and splits give the bits of the plain run."""
    folder, given = folders[name], {"kernels": ops == "kernels"}
    expected = plain_answers(folder, kind, **given)
    drafts, trees = drafts_of(expected), drafts_of(expected, tree=True)
    run(backend_of(folder, kind, **given), REQUESTS[:1], Schedule(reuse=True, snapshots=folder_of(tmp_path)))
    counted: Counter[str] = Counter()
    for label, backend, schedule in (
        ("small steps", backend_of(folder, kind, **given), Schedule(step_tokens=64, arrivals=(5, 0, 2, 9, 1, 3))),
        ("restarted", backend_of(folder, kind, **given), Schedule(reuse=True, arrivals=LATE, snapshots=folder_of(tmp_path))),
        (
            "drafts, split",
            backend_of(folder, kind, cuts=(1,), **given),
            Schedule(proposer=drafts, reuse=True, arrivals=LATE[::2]),
        ),
        (
            "trees, few pages",
            backend_of(folder, kind, pages=PAGES + 10, **given),
            Schedule(proposer=trees, step_tokens=80, reuse=True),
        ),
    ):
        got, stats = run(backend, REQUESTS, schedule)
        assert same(got, expected), label
        counted.update(kept=stats.accepted_tokens, trees=stats.draft_trees, hits=stats.prefix_hits, chunks=stats.middle_chunks)
        counted.update(preempted=stats.preemptions, copies=stats.page_copies, restored=stats.snapshots_restored)
    assert all(counted.values()), counted
    exact = plain(lambda: backend_of(folder, None, lanes=1, **given), REQUESTS[:1])
    assert exact[0].checksums != expected[0].checksums  # attention reads the quantized values


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_keys_and_values_of_16_bits_keep_the_contract_too(folders: dict[str, Path], kind: str) -> None:
    expected = plain_answers(folders["llama"], kind)
    got, _ = run(backend_of(folders["llama"], kind), REQUESTS, Schedule(proposer=drafts_of(expected, tree=True), step_tokens=64))
    assert same(got, expected)


# ---------------------------------------------------------------------- planted faults


def without_scales(name: str) -> Any:
    """The method `name` of a page store, except that it leaves the scales as they were."""
    real = getattr(PageStore, name)

    def faulty(self: PageStore, *given: Any) -> None:
        kept = [scales.clone() for scales in (self.key_scales, self.value_scales) if scales is not None]
        real(self, *given)
        for scales, before in zip((self.key_scales, self.value_scales), kept, strict=True):
            assert scales is not None
            scales.copy_(before)

    return faulty


@pytest.mark.parametrize(("fault", "kind"), [("copy_pages", "int8"), ("move", "int8"), ("fill", "int8"), ("move", "int4")])
def test_a_scale_that_is_not_copied_with_its_page_is_caught(
    folders: dict[str, Path], tmp_path: Path, fault: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders["llama"]
    expected = plain_answers(folder, kind)
    run(backend_of(folder, kind), REQUESTS[:1], Schedule(reuse=True, snapshots=folder_of(tmp_path)))
    monkeypatch.setattr(PageStore, fault, without_scales(fault))
    schedule = {
        "copy_pages": Schedule(reuse=True, arrivals=LATE, snapshots=folder_of(tmp_path)),
        "move": Schedule(proposer=drafts_of(expected, tree=True)),
        "fill": Schedule(reuse=True, arrivals=LATE, snapshots=folder_of(tmp_path)),
    }[fault]
    got, _ = run(backend_of(folder, kind), REQUESTS, schedule)
    assert not same(got, expected)


def test_a_scale_that_all_heads_of_a_step_share_is_caught(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of a step get one scale together, which a neighbour with a larger key changes."""
    folder = folders["llama"]
    expected = plain_answers(folder, "int4", kernels=False)
    monkeypatch.setattr(kv_pages, "encode", with_one_scale)
    alone = plain_answers(folder, "int4", kernels=False)
    batch, _ = run(backend_of(folder, "int4", kernels=False), REQUESTS, Schedule())
    assert not same(alone, expected)
    assert not same(batch, alone)


def with_one_scale(heads: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    codes, scales = encode(heads.flatten(), dtype)
    return codes.view(*heads.shape[:-1], -1), scales.expand(heads.shape[:-1])


def test_a_chunk_that_reads_its_own_keys_before_they_are_quantized_is_caught(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention reads the step's own keys and values from a float32 copy of the pages; they are quantized only afterwards."""
    folder = folders["llama"]
    expected = plain_answers(folder, "int8", kernels=False)
    real = TorchAttentionInputs.attend

    def unrounded(self: TorchAttentionInputs, qkv: Tensor, *, spec: AttentionSpec, store: PageStore, **given: Any) -> Tensor:
        pages = len(store.keys) // spec.kv_heads - 1
        wide = PageStore(spec, pages=pages, page_size=8, dtype=torch.float32, device=store.keys.device)
        for codes, scales, numbers in (
            (store.keys, store.key_scales, wide.keys),
            (store.values, store.value_scales, wide.values),
        ):
            assert scales is not None
            numbers.view(-1, spec.head_dim).copy_(codes.view(-1, spec.head_dim) * scales.view(-1, 1))
        found = real(self, qkv, spec=spec, store=wide, **given)
        real(self, qkv, spec=spec, store=store, **given)
        return found

    monkeypatch.setattr(TorchAttentionInputs, "attend", unrounded)
    whole, _ = run(backend_of(folder, "int8", kernels=False), REQUESTS, Schedule())
    cut, _ = run(backend_of(folder, "int8", kernels=False), REQUESTS, Schedule(step_tokens=64))
    assert not same(whole, expected)
    assert not same(cut, whole)


def test_each_kv_dtype_gives_its_own_scores(folders: dict[str, Path]) -> None:
    answers = {kind: plain_answers(folders["llama"], kind)[0].checksums for kind in (*KINDS, "bf16")}
    assert len({str(found) for found in answers.values()}) == len(answers)
    assert backend_of(folders["llama"], "fp8").capacity.kv_dtype == "fp8"
