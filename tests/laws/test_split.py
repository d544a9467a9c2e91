"""The contract over a split: layers in two and three stages give the tokens and the scores of one stage."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from onedraw.backends.placement import legal_cuts
from onedraw.backends.torch.model.weight_loader import WeightLoader
from onedraw.backends.torch.ops.cpu.ops import CpuOps
from onedraw.backends.torch.ops.plain.ops import TorchOps
from onedraw.backends.torch.runner.pipeline import StageBoundary
from onedraw.backends.torch.sampling import positions as picking
from onedraw.backends.torch.state.model_state import ModelState
from onedraw.checkpoints.open import open_checkpoint
from onedraw.models.model_info import read_model_info
from onedraw.types import DryParams, History, Request, SamplingParams
from tests.laws.harness import Answer, KnownAnswerProposer, Schedule, plain, run
from tests.laws.test_modern import same
from tests.laws.test_modern_drafters import TRAINED, dense, dflash, mtp
from tests.laws.test_modern_drafters import requests_of as drafted_requests
from tests.support import tiny
from tests.support.torch_backend import make_backend

FAMILIES = (
    *("llama31", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_5_odd", "qwen3_5_moe"),
    *("gemma4_31b", "gemma4_26b", "gemma4_e4b", "laguna_odd"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("split")
    return {name: tiny.write_safetensors(name, place / name) for name in (*FAMILIES, "qwen3_5_mtp")}


def conversation() -> list[Request]:
    rng = np.random.default_rng(9)
    text = tuple(int(t) for t in rng.integers(0, tiny.VOCAB, 110))
    prompts = [text[:80], text[:80], text, text[:9]]  # again, from a checkpoint; a second turn; a short one
    return [
        Request(
            f"q{i}",
            prompt,
            SamplingParams(
                temperature=(0.0, 0.7, 1.0)[i % 3],
                repetition_penalty=1.2,
                frequency_penalty=0.3,
                presence_penalty=0.2,
                min_p=0.02,
                dry=DryParams(multiplier=0.5) if i == 2 else None,
                seed=i,
                max_tokens=7,
                logprobs=1,
                checksums=True,
            ),
        )
        for i, prompt in enumerate(prompts)
    ]


REQUESTS = conversation()
LATE = (0, 8, 8, 0)
SIZES = {"kernels": False, "check": False, "max_context": 160, "pages": 60, "drafts": 32, "checkpoints": 4}


def answers_of(folder: Path) -> tuple[list[Answer], KnownAnswerProposer]:
    """What one stage says to each alone, cold and without drafts, and who knows it."""
    one_lane = make_backend(folder, **{**SIZES, "lanes": 1})
    expected = plain(lambda: one_lane, REQUESTS)
    return expected, KnownAnswerProposer({r.id: a.tokens for r, a in zip(REQUESTS, expected, strict=True)}, tiny.VOCAB)


def splits_of(folder: Path) -> list[tuple[int, ...]]:
    """Every legal cut into two and into three."""
    cuts = legal_cuts(read_model_info(open_checkpoint(folder)).spec.layers)
    return [*itertools.combinations(cuts, 1), *itertools.combinations(cuts, 2)]


@pytest.mark.parametrize("name", FAMILIES)
def test_no_legal_cut_changes_a_bit(folders: dict[str, Path], name: str) -> None:
    expected, drafts = answers_of(folders[name])
    counted: Counter[str] = Counter()
    for number, cuts in enumerate(splits_of(folders[name])):
        proposer = replace(drafts, tree=bool(number % 2))
        schedule = Schedule(proposer=proposer, reuse=True, step_tokens=64, arrivals=LATE)
        got, stats = run(make_backend(folders[name], cuts=cuts, **SIZES), REQUESTS, schedule)
        assert same(got, expected), cuts
        counted.update(kept=stats.accepted_tokens, rejected=stats.draft_tokens - stats.accepted_tokens)
        counted.update(restores=stats.restores, hits=stats.prefix_hits, middle=stats.middle_chunks, mixed=stats.mixed_steps)
    assert all(counted[what] for what in ("kept", "rejected", "restores", "middle", "mixed")), counted


@pytest.mark.parametrize("name", ["qwen3_5_odd", "gemma4_e4b"])
def test_kernels_and_their_self_check_hold_over_a_cut(folders: dict[str, Path], name: str) -> None:
    one_lane = make_backend(folders[name], lanes=1)
    expected = plain(lambda: one_lane, REQUESTS)
    split = make_backend(folders[name], cuts=splits_of(folders[name])[0])
    assert split.report is not None
    assert split.report.passed
    assert split.capacity.device == one_lane.capacity.device
    got, _ = run(split, REQUESTS, Schedule(reuse=True, arrivals=LATE))
    assert same(got, expected)


@pytest.mark.parametrize("name", ["dflash", "dflash tree", "dense model", "mtp"])
def test_every_drafter_works_on_a_split(name: str, folders: dict[str, Path]) -> None:
    target = folders["qwen3_5_mtp"] if name == "mtp" else TRAINED / "trained_qwen3_5"
    made: dict[str, Callable[[], Callable[..., object]]] = {
        "dflash": lambda: dflash(target, 0),
        "dflash tree": lambda: dflash(target, 12),
        "dense model": lambda: dense(target),
        "mtp": lambda: mtp(target),
    }
    requests = drafted_requests(read_model_info(open_checkpoint(target)).spec.vocab)[:4]
    one_lane = make_backend(target, kernels=False, lanes=1, check=False)
    expected = plain(lambda: one_lane, requests)
    counted: Counter[str] = Counter()
    for cuts in ((2,), (1, 3)):
        backend = make_backend(target, kernels=False, check=False, cuts=cuts, make_drafter=made[name]())
        got, stats = run(backend, requests, Schedule(reuse=True, arrivals=(0, 0, 9, 9)))
        assert same(got, expected)
        counted.update(kept=stats.accepted_tokens, rejected=stats.draft_tokens - stats.accepted_tokens)
    assert all(counted.values()), counted


def test_a_drafter_on_a_split_guesses_what_it_guesses_on_one_device() -> None:
    """The features that it reads crossed from other stages; a lost one would keep the tokens and spoil the guesses."""
    target = TRAINED / "trained_qwen3_5"
    requests = drafted_requests(read_model_info(open_checkpoint(target)).spec.vocab)[:3]
    figures = []
    for cuts in ((), (1, 3)):
        backend = make_backend(target, kernels=False, check=False, cuts=cuts, make_drafter=dflash(target, 0))
        stats = run(backend, requests, Schedule())[1]
        figures.append((stats.draft_tokens, stats.accepted_tokens, stats.steps))
    assert figures[0] == figures[1]


@pytest.mark.parametrize("name", ["dflash", "mtp"])
def test_a_drafter_on_a_split_has_no_embedding_and_no_head_of_its_own(
    name: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks up on the first stage and multiplies on the last: of a vocabulary there is one table and one head."""
    target = folders["qwen3_5_mtp"] if name == "mtp" else TRAINED / "trained_qwen3_5"
    make = dflash(target, 0) if name == "dflash" else mtp(target)
    asked: list[str] = []

    def making(*given: object) -> object:
        for method in ("linear", "kept", "norm"):
            real = getattr(WeightLoader, method)
            noting = lambda self, layer, *names, real=real, **how: asked.extend(names) or real(self, layer, *names, **how)  # noqa: E731
            monkeypatch.setattr(WeightLoader, method, noting)
        return make(*given)

    make_backend(target, kernels=False, check=False, cuts=(1, 3), make_drafter=making)
    assert asked
    assert not {"embed", "head"} & set(asked), asked


# ---------------------------------------------------------------------- planted faults


def round_at_the_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    real = StageBoundary.cross
    rounded = lambda self, x, *given: real(self, x.bfloat16().float(), *given)  # noqa: E731
    monkeypatch.setattr(StageBoundary, "cross", rounded)


def forget_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A penalty looks at prompt and output on one device and at output alone on a split."""
    real = picking.SamplingPosition

    def position(lane: int, params: SamplingParams, history: History, *rest: object) -> object:
        return real(lane, params, History((0,) * len(history.prompt), history.output), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(picking, "SamplingPosition", position)


def commit_the_last_stage_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for ops in (TorchOps, CpuOps):
        real = ops.commit
        late = lambda self, state, drafts, real=real: real(self, state, drafts) if state.first else None  # noqa: E731
        monkeypatch.setattr(ops, "commit", late)


def open_the_last_stage_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModelState.open
    monkeypatch.setattr(ModelState, "open", lambda self, rows: real(self, rows) if self.first else None)


def lose_a_layers_input(monkeypatch: pytest.MonkeyPatch) -> None:
    real = StageBoundary.cross
    shifted = lambda self, x, own, *given: real(self, x, own.roll(1, dims=1), *given)  # noqa: E731
    monkeypatch.setattr(StageBoundary, "cross", shifted)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (round_at_the_boundary, "qwen2"),
        (forget_the_prompt, "qwen2"),
        (commit_the_last_stage_alone, "qwen3_5_odd"),
        (open_the_last_stage_alone, "qwen3_5_odd"),
        (lose_a_layers_input, "gemma4_e4b"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_planted_fault_is_caught(
    folders: dict[str, Path], fault: Callable[[pytest.MonkeyPatch], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, drafts = answers_of(folders[name])
    fault(monkeypatch)
    split = make_backend(folders[name], cuts=splits_of(folders[name])[0], **SIZES)
    got, _ = run(split, REQUESTS, Schedule(proposer=drafts, reuse=True, step_tokens=64, arrivals=LATE))
    assert not same(got, expected)


# ---------------------------------------------------------------------- the stream


def test_a_stream_of_another_dtype_than_the_products_holds_the_law(folders: dict[str, Path]) -> None:
    folder, seen = folders["gemma4_e4b"], []
    for dtype, activation in (("bf16", "f32"), ("bf16", "bf16"), ("f32", "bf16")):
        sizes = {**SIZES, "dtype": dtype, "activation": activation}
        one_lane = make_backend(folder, **{**sizes, "lanes": 1})
        expected = plain(lambda one_lane=one_lane: one_lane, REQUESTS[:3])
        got, _ = run(make_backend(folder, cuts=(1,), **sizes), REQUESTS[:3], Schedule(reuse=True, step_tokens=64))
        assert same(got, expected), (dtype, activation)
        seen.append([answer.checksums for answer in expected])
    assert seen[0] != seen[1] != seen[2] != seen[0]  # each is a precision of its own


def test_a_boundary_holds_a_turn_and_no_more(folders: dict[str, Path]) -> None:
    boundary = make_backend(folders["gemma4_e4b"], cuts=(1,), **SIZES).model.stages[1].entrance
    assert boundary is not None
    assert boundary.nbytes == 8192 * (2 * 64 + 5 * 16) * 4
    with pytest.raises(AssertionError, match="8193 rows crosses a boundary of 8192"):
        boundary.cross(torch.zeros(8193, 64), None)
    with pytest.raises(AssertionError, match="float64"):
        boundary.cross(torch.zeros(2, 64, dtype=torch.float64), None)
