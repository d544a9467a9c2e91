"""The contract on hybrids, experts, shared keys and sliding layers: states, checkpoints and windows change no bit."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from onedraw.backends.torch.backend import TorchBackend
from onedraw.backends.torch.ops.plain import delta, recurrent_rollback
from onedraw.backends.torch.state import model_state as state
from onedraw.backends.torch.state import recurrent_state as lanes
from onedraw.backends.torch.state import recurrent_state as recurrent_spans
from onedraw.types import DryParams, Request, SamplingParams
from tests.laws.harness import KnownAnswerProposer, Schedule, plain, run, same
from tests.support import tiny
from tests.support.torch_backend import make_backend

HYBRIDS = ("qwen3_5_odd", "qwen3_5_moe")
SLIDING = ("gemma4_e2b", "gemma4_26b", "laguna_odd")
WINDOWS = ("window_pages_freed",)
STATES = ("restores", "whole_prompts", "page_copies", "checkpoints_saved")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("modern")
    return {name: tiny.write_safetensors(name, place / name) for name in (*HYBRIDS, *SLIDING, "qwen3_moe")}


def params(seed: int) -> SamplingParams:
    """Temperatures 0, 0.7 and 1 in turn, with penalties."""
    return SamplingParams(
        temperature=(0.0, 0.7, 1.0)[seed % 3],
        repetition_penalty=1.1,
        frequency_penalty=0.3,
        presence_penalty=0.2,
        min_p=0.02 if seed % 2 else 0.0,
        dry=DryParams(multiplier=0.5) if seed % 4 == 3 else None,
        seed=seed,
        max_tokens=10 + seed % 4,
        checksums=True,
    )


def conversation() -> list[Request]:
    """First messages, the same prompts again, prompts with a common prefix, and second turns that contain a first prompt."""
    rng = np.random.default_rng(5)
    text = [tuple(int(t) for t in rng.integers(0, tiny.VOCAB, n)) for n in (150, 70, 90, 40)]
    prompts = [
        text[0],
        text[0],  # exactly the same prompt, another seed
        text[0] + text[1],  # the next turn of the conversation: extends the first prompt
        text[0][:100] + text[2],  # differs from the first prompt from the middle of a chunk on
        text[3],
        text[0][:128],  # ends at a chunk boundary, where a checkpoint may be saved
        text[3],
        text[0] + text[1] + text[3],
    ]
    return [Request(f"q{i}", prompt, params(i)) for i, prompt in enumerate(prompts)]


LATE = tuple(range(0, 8 * 16, 16))  # each arrives when the one before has finished
REQUESTS = conversation()
PAGES = -(-(300 + 13) // 8)


def variations(folder: Path, kind: str, drafts: KnownAnswerProposer) -> dict[str, tuple[TorchBackend, Schedule]]:
    def make(**changes: int) -> TorchBackend:
        return make_backend(folder, kernels=kind == "kernels", **changes)

    trees = dataclasses.replace(drafts, tree=True)
    return {
        "batched": (make(), Schedule()),
        "small steps": (make(), Schedule(step_tokens=64, arrivals=(5, 0, 2, 9, 1, 3))),
        "checkpoints": (make(), Schedule(reuse=True, arrivals=LATE)),
        "few pages, few slots": (make(pages=PAGES + 8, checkpoints=2), Schedule(reuse=True, step_tokens=100)),
        "drafts": (make(), Schedule(proposer=drafts, reuse=True, arrivals=LATE[::2])),
        "trees": (make(), Schedule(proposer=trees)),
        "trees, few pages": (make(pages=PAGES + 10, drafts=12), Schedule(proposer=trees, step_tokens=80, reuse=True)),
    }


@pytest.mark.parametrize("kind", ["kernels", "torch"])
@pytest.mark.parametrize("name", [*HYBRIDS, *SLIDING, "qwen3_moe"])
def test_no_schedule_changes_a_bit(folders: dict[str, Path], name: str, kind: str) -> None:
    one_lane = make_backend(folders[name], kernels=kind == "kernels", lanes=1)
    expected = plain(lambda: one_lane, REQUESTS)
    drafts = KnownAnswerProposer({r.id: a.tokens for r, a in zip(REQUESTS, expected, strict=True)}, tiny.VOCAB)
    counted: Counter[str] = Counter()
    for label, (backend, schedule) in variations(folders[name], kind, drafts).items():
        got, stats = run(backend, REQUESTS, schedule)
        assert same(got, expected), label
        counted.update(
            {field: getattr(stats, field) for field in (*STATES, *WINDOWS, "preemptions", "middle_chunks", "draft_trees")}
        )
        counted.update(kept=stats.accepted_tokens, rejected=stats.draft_tokens - stats.accepted_tokens, hits=stats.prefix_hits)
    missing = [what for what, count in counted.items() if not count]
    assert missing == ([] if name in SLIDING else [*WINDOWS]), counted


@pytest.mark.parametrize("name", [HYBRIDS[0], SLIDING[0]])
def test_the_second_turn_of_a_conversation_is_the_same_cold_warm_and_after_a_restart(folders: dict[str, Path], name: str) -> None:
    first = REQUESTS[0]
    [opening] = plain(lambda: make_backend(folders[name], lanes=1), [first])
    second = Request("second", first.prompt + tuple(opening.tokens) + REQUESTS[4].prompt, params(2))
    [cold] = plain(lambda: make_backend(folders[name], lanes=1), [second])
    warm, stats = run(make_backend(folders[name]), [first, second], Schedule(reuse=True, arrivals=(0, 40)))
    assert stats.prefix_hits >= 128  # the first prompt, up to its last chunk
    [restarted], _ = run(make_backend(folders[name]), [second], Schedule(reuse=True))
    assert same([warm[1], restarted], [cold, cold])


# ---------------------------------------------------------------------- planted faults


def forget_to_roll_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft is committed to the lane's state, kept or not."""
    real = delta._recur

    def recur(run: recurrent_spans.RecurrentSpan, gated: delta.DeltaGates, out: torch.Tensor, store: lanes.LaneStore) -> None:
        real(run, gated, out, store)
        if run.drafts:
            kept = lanes.KeptDrafts(run.lane, tuple(run.held + i for i in range(len(run.drafts))))
            recurrent_rollback.commit_states(store, [kept])

    monkeypatch.setattr(delta, "_recur", recur)


def read_stale_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit reads the slot after the one that the step wrote."""
    real = state.KeptDrafts
    monkeypatch.setattr(state, "KeptDrafts", lambda lane, slots: real(lane, tuple(slot + 1 for slot in slots)))


def shift_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """The convolution window ends one position early."""
    real = recurrent_spans.recurrent_spans

    def off_by_one(*given: object, **named: object) -> recurrent_spans.RecurrentSpans:
        found = real(*given, **named)  # type: ignore[arg-type]
        return dataclasses.replace(found, host_closings=np.maximum(found.host_closings - 1, 0))

    monkeypatch.setattr("onedraw.backends.torch.ops.plain.ops.recurrent_spans", off_by_one)


def cut_off_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are counted from the row's start, and rows stop anywhere."""
    monkeypatch.setattr("onedraw.engine.scheduler.Scheduler._chunk_length", lambda self, sequence, budget: min(budget, 36))
    real = recurrent_spans._recurrent_span
    monkeypatch.setattr(
        recurrent_spans,
        "_recurrent_span",
        lambda span: real(dataclasses.replace(span, start=span.start and 64, prompt_stop=9999)),
    )


def keep_the_old_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint restores the pages and leaves the lane's state as it was."""
    monkeypatch.setattr(lanes.LaneStore, "restore", lambda self, slots, lanes: None)


def save_logits_in_another_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of a prompt's end are saved in the slot of another prompt."""
    real = state.CheckpointLogits.keep
    monkeypatch.setattr(
        state.CheckpointLogits, "keep", lambda self, slot, logits: real(self, (slot + 1) % len(self.rows), logits)
    )


FAULTS = (
    forget_to_roll_back,
    read_stale_scratch,
    shift_the_window,
    cut_off_the_grid,
    keep_the_old_state,
    save_logits_in_another_slot,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_caught(folders: dict[str, Path], fault: object, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folders["qwen3_5_odd"]
    one_lane = make_backend(folder, kernels=False, lanes=1)
    expected = plain(lambda: one_lane, REQUESTS[:4])
    drafts = KnownAnswerProposer({r.id: a.tokens for r, a in zip(REQUESTS, expected, strict=False)}, tiny.VOCAB)
    fault(monkeypatch)  # type: ignore[operator]
    faulty = make_backend(folder, kernels=False, check=False)
    got, _ = run(faulty, REQUESTS[:4], Schedule(proposer=drafts, reuse=True, step_tokens=80, arrivals=LATE))
    assert not same(got, expected)
