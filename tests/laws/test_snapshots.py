"""The contract over a restart: a prompt restored from a disk snapshot gives the tokens and scores of a cold run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onedraw.backends.base import Backend
from onedraw.backends.fake import FakeBackend
from onedraw.backends.torch.backend import TorchBackend
from onedraw.memory.disk_snapshots import Snapshot, SnapshotFolder
from onedraw.types import Request, SamplingParams
from tests.laws.harness import Answer, Schedule, plain, run, same
from tests.laws.test_modern_drafters import TRAINED, dflash, mtp
from tests.support import tiny
from tests.support.torch_backend import make_backend

VOCAB = 61
PAGE = 8


def requests_of(vocab: int) -> list[Request]:
    """Prompts, the same ones with other parameters, and prompts that extend them or share a prefix with them."""
    rng = np.random.default_rng(2)
    text = [tuple(int(t) for t in rng.integers(0, vocab, n)) for n in (150, 90, 30)]
    prompts = [text[0], text[1], text[0], text[0] + text[2], text[1][:70] + text[2], text[0][:128], text[2]]
    return [
        Request(
            f"q{i}",
            prompt,
            SamplingParams(
                temperature=(1.0, 0.7, 0.0)[i % 3],
                repetition_penalty=1.1,
                presence_penalty=0.3,
                seed=50 + i,
                max_tokens=8,
                logprobs=1,
                checksums=True,
            ),
        )
        for i, prompt in enumerate(prompts)
    ]


def folder_of(path: Path, *, page_size: int = PAGE) -> SnapshotFolder:
    return SnapshotFolder(path, fingerprint="one", page_size=page_size, budget=10**10, max_queued=99)


def restarted(
    make: Callable[[], Backend], again: Callable[[], Backend], requests: list[Request], path: Path
) -> tuple[list[Answer], Counter[str]]:
    """Run the first two prompts, then each prompt alone with a new engine, so that only the disk can provide cached state."""
    run(make(), requests[:2], Schedule(reuse=True, snapshots=folder_of(path)))
    answers, counted = [], Counter[str]()
    backend = again()
    for request in requests:
        # A new allocator does not know the content of the backend's pages.
        [answer], stats = run(backend, [request], Schedule(reuse=True, snapshots=folder_of(path)))
        answers.append(answer)
        counted.update(restored=stats.snapshots_restored, whole=stats.whole_prompts, hits=stats.prefix_hits)
    return answers, counted


KINDS: dict[str, dict[str, Any]] = {
    "attention": {},
    "windows": {"windows": (None, 20)},
    "sliding alone": {"windows": (24,)},
    "recurrent": {"recurrent": True, "chunk": 16},
    "recurrent, windows": {"recurrent": True, "chunk": 16, "windows": (None, 12)},
}


def fake(**changes: Any) -> FakeBackend:
    return FakeBackend(**{"vocab": VOCAB, "pages": 80, "page_size": PAGE, "max_context": 256, "checkpoints": 8, **changes})


@pytest.mark.parametrize("kind", KINDS)
def test_restored_and_cold_are_the_same(kind: str, tmp_path: Path) -> None:
    requests = requests_of(VOCAB)
    expected = plain(lambda: fake(**KINDS[kind]), requests)
    got, counted = restarted(lambda: fake(**KINDS[kind]), lambda: fake(**KINDS[kind]), requests, tmp_path)
    assert same(got, expected)
    assert counted["restored"] >= 4
    assert counted["whole"] >= 3
    assert got[0].cached == 150


def test_many_requests_and_few_pages_change_nothing(tmp_path: Path) -> None:
    """Snapshots are restored as far as there are free pages; other requests compute their prompts."""
    requests = requests_of(VOCAB)
    expected = plain(lambda: fake(recurrent=True, chunk=16), requests)
    run(fake(recurrent=True, chunk=16), requests[:2], Schedule(reuse=True, snapshots=folder_of(tmp_path)))
    restored = 0
    for pages, slots in ((26, 8), (40, 1), (60, 2), (30, 3)):
        backend = fake(recurrent=True, chunk=16, pages=pages, checkpoints=slots)
        schedule = Schedule(reuse=True, step_tokens=40, arrivals=(0, 1, 2, 0, 5, 3), snapshots=folder_of(tmp_path))
        got, stats = run(backend, requests, schedule)
        assert same(got, expected), (pages, slots)
        restored += stats.snapshots_restored
    assert restored


FAMILIES = ("qwen3", "qwen3_5_odd", "gemma4_e4b")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("snapshots")
    return {name: tiny.write_safetensors(name, place / name) for name in (*FAMILIES, "qwen3_5_mtp")}


SIZES: dict[str, Any] = {"kernels": False, "check": False, "max_context": 256, "pages": 80, "checkpoints": 6}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_snapshot_of_one_split_restores_on_another(folders: dict[str, Path], name: str, dtype: str, tmp_path: Path) -> None:
    requests = requests_of(tiny.VOCAB)[: 7 if dtype == "f32" else 4]
    sizes = {**SIZES, "dtype": dtype}
    one_lane = make_backend(folders[name], **{**sizes, "lanes": 1})
    expected = plain(lambda: one_lane, requests)
    made = lambda cuts: lambda: make_backend(folders[name], cuts=cuts, **sizes)  # noqa: E731
    cut = (1,) if name.startswith("gemma") else (2,)
    for number, (before, after) in enumerate((((), cut), (cut, ()))):
        got, counted = restarted(made(before), made(after), requests, tmp_path / str(number))
        assert same(got, expected), (before, after)
        assert counted["restored"] >= 3
        assert counted["whole"] >= 2


@pytest.mark.parametrize("drafter", ["dflash", "mtp"])
def test_a_snapshot_restores_the_drafters_context_too(folders: dict[str, Path], drafter: str, tmp_path: Path) -> None:
    target = folders["qwen3_5_mtp"] if drafter == "mtp" else TRAINED / "trained_qwen3_5"
    make = {"dflash": lambda: dflash(target, 0), "mtp": lambda: mtp(target)}[drafter]
    prompt = tuple(int(t) for t in np.random.default_rng(1).integers(8, 500, 100))
    request = Request("g", prompt, SamplingParams(temperature=0.0, max_tokens=40, checksums=True))
    made: Callable[[], TorchBackend] = lambda: make_backend(target, make_drafter=make(), **SIZES)  # noqa: E731
    [cold], before = run(made(), [request], Schedule(reuse=True, snapshots=folder_of(tmp_path)))
    [warm], after = run(made(), [request], Schedule(reuse=True, snapshots=folder_of(tmp_path)))
    assert same([warm], [cold])
    assert after.whole_prompts == after.snapshots_restored == 1
    # Without its restored context the drafter would have far fewer kept drafts.
    if drafter == "dflash":
        assert after.accepted_tokens >= 0.8 * before.accepted_tokens > 0


# ---------------------------------------------------------------------- planted faults


def without_last_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    real = FakeBackend.export_checkpoint
    zeroed = lambda self, slot, pages: real(self, slot, pages) | {"logits": np.zeros(VOCAB, np.float32)}  # noqa: E731
    monkeypatch.setattr(FakeBackend, "export_checkpoint", zeroed)


def with_another_prompts_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = FakeBackend.export_checkpoint, [np.ones(VOCAB, np.float32)]

    def shifted(self: FakeBackend, slot: int, pages: Any) -> Any:
        found = real(self, slot, pages)
        seen.append(found.get("logits", seen[-1]))
        return found | {"logits": seen[-2]}

    monkeypatch.setattr(FakeBackend, "export_checkpoint", shifted)


def with_another_prompts_state(monkeypatch: pytest.MonkeyPatch) -> None:
    real = FakeBackend.export_checkpoint
    monkeypatch.setattr(FakeBackend, "export_checkpoint", lambda self, slot, pages: real(self, (slot + 1) % 8, pages))


def with_pages_out_of_order(monkeypatch: pytest.MonkeyPatch) -> None:
    real = FakeBackend.export_checkpoint
    monkeypatch.setattr(FakeBackend, "export_checkpoint", lambda self, slot, pages: real(self, slot, [p[::-1] for p in pages]))


def for_any_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is restored from the snapshot of another prompt."""
    real = SnapshotFolder.read

    def careless(self: SnapshotFolder, snapshot: Snapshot) -> Any:
        others = [s for s in self._index.values() if s.tokens[0] != snapshot.tokens[0] and len(s.tokens) > len(snapshot.tokens)]
        return real(self, others[0] if others else snapshot)

    monkeypatch.setattr(SnapshotFolder, "read", careless)


@pytest.mark.parametrize(
    "fault",
    [without_last_logits, with_another_prompts_logits, with_another_prompts_state, with_pages_out_of_order, for_any_prompt],
    ids=lambda fault: fault.__name__,
)
def test_a_planted_fault_is_caught(fault: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: Any) -> None:
    requests = requests_of(VOCAB)
    make = lambda: fake(recurrent=True, chunk=16)  # noqa: E731
    expected = plain(make, requests)
    fault(monkeypatch)
    got, counted = restarted(make, make, requests, tmp_path)
    assert counted["restored"]
    assert not same(got, expected)
