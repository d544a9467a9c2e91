"""The contract with keys and values as codes of 8 bits: written once, read by every form alike, their scales beside them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onedraw.backends.torch.backend import TorchBackend
from onedraw.backends.torch.ops.plain.ops import TorchAttentionInputs
from onedraw.backends.torch.state.kv_pages import PageStore
from onedraw.models.spec import AttentionSpec
from tests.laws.harness import Answer, KnownAnswerProposer, Schedule, plain, run
from tests.laws.test_modern import LATE, PAGES, same
from tests.laws.test_modern import REQUESTS as CONVERSATION
from tests.laws.test_snapshots import folder_of
from tests.support import tiny
from tests.support.torch_backend import make_backend

KINDS = ("int8", "fp8")
FAMILIES = ("llama", "qwen3_5_odd", "gemma4_e2b", "laguna_odd")
REQUESTS = [CONVERSATION[i] for i in (0, 2, 3, 4)]  # openings, a second turn, one that leaves the first in its middle


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("codes")
    return {name: tiny.write_safetensors(name, place / name) for name in FAMILIES}


def made(folder: Path, kind: str | None, **changes: Any) -> TorchBackend:
    return make_backend(folder, kv_dtype=kind, **{"check": False, **changes})


def alone(folder: Path, kind: str, **changes: Any) -> list[Answer]:
    one_lane = made(folder, kind, lanes=1, **changes)
    return plain(lambda: one_lane, REQUESTS)


def drafts_of(expected: list[Answer], *, tree: bool = False) -> KnownAnswerProposer:
    return KnownAnswerProposer({r.id: a.tokens for r, a in zip(REQUESTS, expected, strict=True)}, tiny.VOCAB, tree=tree)


SHOWN = [
    *((name, kind, "kernels") for name in FAMILIES for kind in KINDS),
    ("llama", "fp8", "torch"),
    ("gemma4_e2b", "int8", "torch"),
]


@pytest.mark.parametrize(("name", "kind", "ops"), SHOWN)
def test_no_schedule_changes_a_bit(folders: dict[str, Path], tmp_path: Path, name: str, kind: str, ops: str) -> None:
    """Batched, in small chunks, preempted, restarted, drafted, in trees, split: the bits of the plain run."""
    folder, given = folders[name], {"kernels": ops == "kernels"}
    expected = alone(folder, kind, **given)
    drafts, trees = drafts_of(expected), drafts_of(expected, tree=True)
    run(made(folder, kind, **given), REQUESTS[:1], Schedule(reuse=True, snapshots=folder_of(tmp_path)))
    counted: Counter[str] = Counter()
    for label, backend, schedule in (
        ("small turns", made(folder, kind, **given), Schedule(step_tokens=64, arrivals=(5, 0, 2, 9, 1, 3))),
        ("restarted", made(folder, kind, **given), Schedule(reuse=True, arrivals=LATE, snapshots=folder_of(tmp_path))),
        ("drafts, split", made(folder, kind, cuts=(1,), **given), Schedule(proposer=drafts, reuse=True, arrivals=LATE[::2])),
        ("trees, few pages", made(folder, kind, pages=PAGES + 10, **given), Schedule(proposer=trees, step_tokens=80, reuse=True)),
    ):
        got, stats = run(backend, REQUESTS, schedule)
        assert same(got, expected), label
        counted.update(kept=stats.accepted_tokens, trees=stats.draft_trees, hits=stats.prefix_hits, chunks=stats.middle_chunks)
        counted.update(preempted=stats.preemptions, copies=stats.page_copies, restored=stats.snapshots_restored)
    assert all(counted.values()), counted
    exact = plain(lambda: made(folder, None, lanes=1, **given), REQUESTS[:1])
    assert exact[0].checksums != expected[0].checksums  # the codes are what is read


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_narrower_numbers_keep_the_contract_too(folders: dict[str, Path], kind: str) -> None:
    expected = alone(folders["llama"], kind)
    got, _ = run(made(folders["llama"], kind), REQUESTS, Schedule(proposer=drafts_of(expected, tree=True), step_tokens=64))
    assert same(got, expected)


# ---------------------------------------------------------------------- planted faults


def left_behind(name: str) -> Any:
    """A store whose scales do not travel with `name`."""
    real = getattr(PageStore, name)

    def without(self: PageStore, *given: Any) -> None:
        kept = [scales.clone() for scales in (self.key_scales, self.value_scales) if scales is not None]
        real(self, *given)
        for scales, before in zip((self.key_scales, self.value_scales), kept, strict=True):
            assert scales is not None
            scales.copy_(before)

    return without


@pytest.mark.parametrize("fault", ["copy_pages", "move", "fill"])
def test_a_scale_that_does_not_travel_with_its_page_is_caught(
    folders: dict[str, Path], tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders["llama"]
    expected = alone(folder, "int8")
    run(made(folder, "int8"), REQUESTS[:1], Schedule(reuse=True, snapshots=folder_of(tmp_path)))
    monkeypatch.setattr(PageStore, fault, left_behind(fault))
    schedule = {
        "copy_pages": Schedule(reuse=True, arrivals=LATE, snapshots=folder_of(tmp_path)),
        "move": Schedule(proposer=drafts_of(expected, tree=True)),
        "fill": Schedule(reuse=True, arrivals=LATE, snapshots=folder_of(tmp_path)),
    }[fault]
    got, _ = run(made(folder, "int8"), REQUESTS, schedule)
    assert not same(got, expected)


def test_a_chunk_that_reads_its_own_keys_before_they_are_codes_is_caught(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn's own keys and values lie in the pages of a twin in float32 while it attends, and become codes after it."""
    folder = folders["llama"]
    expected = alone(folder, "int8", kernels=False)
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
    whole, _ = run(made(folder, "int8", kernels=False), REQUESTS, Schedule())
    cut, _ = run(made(folder, "int8", kernels=False), REQUESTS, Schedule(step_tokens=64))
    assert not same(whole, expected)
    assert not same(cut, whole)


def test_the_last_answer_of_a_page_store_is_its_own(folders: dict[str, Path]) -> None:
    """Codes of another kind are other numbers: nothing is shared between them."""
    answers = {kind: alone(folders["llama"], kind)[0].checksums for kind in (*KINDS, "bf16")}
    assert len({str(found) for found in answers.values()}) == len(answers)
    assert dataclasses.asdict(made(folders["llama"], "fp8").capacity)["kv_dtype"] == "fp8"
