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
from onedraw.backends.torch.sampling import positions
from onedraw.backends.torch.state.model_state import ModelState
from onedraw.checkpoints.open import open_checkpoint
from onedraw.models.registry import read_model_info
from onedraw.types import DryParams, History, Request, SamplingParams
from tests.laws.harness import Answer, KnownAnswerProposer, Schedule, plain, run, same
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
    prompts = [text[:80], text[:80], text, text[:9]]  # a prompt, the same again from its checkpoint, a second turn, a short one
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
    """The plain answers of a single stage, and a proposer that knows them."""
    one_lane = make_backend(folder, **{**SIZES, "lanes": 1})
    expected = plain(lambda: one_lane, REQUESTS)
    return expected, KnownAnswerProposer({r.id: a.tokens for r, a in zip(REQUESTS, expected, strict=True)}, tiny.VOCAB)


def splits_of(folder: Path) -> list[tuple[int, ...]]:
    """Every legal cut into two and into three stages."""
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
def test_the_kernels_pass_their_self_check_on_a_split(folders: dict[str, Path], name: str) -> None:
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


def test_a_drafter_on_a_split_drafts_the_same_tokens_as_on_one_device() -> None:
    """It reads features that cross from other stages; a lost feature would change the number of kept drafts, not the tokens."""
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
    """It uses the embedding of the first stage and the head of the last one, so each exists once in memory."""
    target = folders["qwen3_5_mtp"] if name == "mtp" else TRAINED / "trained_qwen3_5"
    make = dflash(target, 0) if name == "dflash" else mtp(target)
    loaded: list[str] = []

    def recording(*given: object) -> object:
        for method in ("linear", "kept", "norm"):
            real = getattr(WeightLoader, method)
            recorded = lambda self, layer, *names, real=real, **how: loaded.extend(names) or real(self, layer, *names, **how)  # noqa: E731
            monkeypatch.setattr(WeightLoader, method, recorded)
        return make(*given)

    make_backend(target, kernels=False, check=False, cuts=(1, 3), make_drafter=recording)
    assert loaded
    assert not {"embed", "head"} & set(loaded), loaded


# ---------------------------------------------------------------------- planted faults


def round_at_the_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual stream is rounded to bfloat16 between two stages."""
    real = StageBoundary.cross
    rounded = lambda self, x, *given: real(self, x.bfloat16().float(), *given)  # noqa: E731
    monkeypatch.setattr(StageBoundary, "cross", rounded)


def forget_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a split the repetition penalty counts the output alone, without the prompt."""
    real = positions.SamplingPosition

    def position(lane: int, params: SamplingParams, history: History, *rest: object) -> object:
        return real(lane, params, History((0,) * len(history.prompt), history.output), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(positions, "SamplingPosition", position)


def commit_only_the_last_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    for ops in (TorchOps, CpuOps):
        real = ops.commit
        late = lambda self, state, drafts, real=real: real(self, state, drafts) if state.first else None  # noqa: E731
        monkeypatch.setattr(ops, "commit", late)


def reset_only_the_last_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModelState.open
    monkeypatch.setattr(ModelState, "open", lambda self, rows: real(self, rows) if self.first else None)


def shift_the_per_layer_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer of the second stage reads the per-layer input of its neighbour."""
    real = StageBoundary.cross
    shifted = lambda self, x, own, *given: real(self, x, own.roll(1, dims=1), *given)  # noqa: E731
    monkeypatch.setattr(StageBoundary, "cross", shifted)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (round_at_the_boundary, "qwen2"),
        (forget_the_prompt, "qwen2"),
        (commit_only_the_last_stage, "qwen3_5_odd"),
        (reset_only_the_last_stage, "qwen3_5_odd"),
        (shift_the_per_layer_inputs, "gemma4_e4b"),
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


# ---------------------------------------------------------------------- the residual stream


def test_a_split_changes_no_bit_where_the_residual_stream_has_another_dtype_than_the_weights(folders: dict[str, Path]) -> None:
    folder, seen = folders["gemma4_e4b"], []
    for dtype, activation in (("bf16", "f32"), ("bf16", "bf16"), ("f32", "bf16")):
        sizes = {**SIZES, "dtype": dtype, "activation": activation}
        one_lane = make_backend(folder, **{**sizes, "lanes": 1})
        expected = plain(lambda one_lane=one_lane: one_lane, REQUESTS[:3])
        got, _ = run(make_backend(folder, cuts=(1,), **sizes), REQUESTS[:3], Schedule(reuse=True, step_tokens=64))
        assert same(got, expected), (dtype, activation)
        seen.append([answer.checksums for answer in expected])
    assert seen[0] != seen[1] != seen[2] != seen[0]  # three different precisions


def test_a_stage_boundary_has_room_for_one_step_and_refuses_more(folders: dict[str, Path]) -> None:
    boundary = make_backend(folders["gemma4_e4b"], cuts=(1,), **SIZES).model.stages[1].entrance
    assert boundary is not None
    assert boundary.nbytes == 8192 * (2 * 64 + 5 * 16) * 4
    with pytest.raises(AssertionError, match="8193 rows crosses a boundary of 8192"):
        boundary.cross(torch.zeros(8193, 64), None)
    with pytest.raises(AssertionError, match="float64"):
        boundary.cross(torch.zeros(2, 64, dtype=torch.float64), None)
