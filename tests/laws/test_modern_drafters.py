"""Drafters on hybrids: a DFlash pair trained for one, a dense draft model, the checkpoint's own MTP head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onedraw.backends.torch.drafters.base import CANDIDATES
from onedraw.backends.torch.drafters.dflash import DflashDrafter
from onedraw.backends.torch.drafters.draft_model import DraftModel, MtpHead, SmallModel
from onedraw.backends.torch.model.transformer import Transformer
from onedraw.backends.torch.runner.pipeline import StageDevice
from onedraw.checkpoints.open import open_checkpoint
from onedraw.models.dflash import read_drafter_info
from onedraw.models.mtp import read_mtp_info
from onedraw.models.registry import read_model_info
from onedraw.speculation.draft_tree import build_tree
from onedraw.types import Request, SamplingParams
from tests.laws.harness import Schedule, plain, run, same
from tests.support import tiny
from tests.support.torch_backend import make_backend

TRAINED = Path(__file__).parents[1] / "fixtures" / "trained"
CONTEXT = 400
SIZES = {"lanes": 4, "max_context": CONTEXT}


def dflash(target: Path, budget: int) -> Callable[..., Any]:
    info = read_drafter_info(open_checkpoint(TRAINED / "trained_dflash_qwen3_5"))
    arrange = lambda candidates: build_tree(candidates, budget)  # noqa: E731
    return lambda target, sampler, layout: DflashDrafter(
        info.spec, info.weights, target=target, layout=layout, arrange=arrange, width=CANDIDATES if budget else 1, **SIZES
    )


def dense(target: Path) -> Callable[..., Any]:
    info = read_model_info(open_checkpoint(TRAINED / "trained_qwen3"))

    def make(target: Transformer, sampler: object, layout: Any) -> DraftModel:
        small = Transformer(
            info.spec,
            info.weights,
            dtype=torch.float32,
            stage_devices=[StageDevice(target.device, target.ops)],
            max_context=CONTEXT + 8,
        )
        return DraftModel(SmallModel(small, layout=layout), layout=layout, length=4, **SIZES)

    return make


def mtp(target: Path) -> Callable[..., Any]:
    source = open_checkpoint(target)
    head = read_mtp_info(source, read_model_info(source))
    return lambda target, sampler, layout: DraftModel(
        MtpHead(head.spec, head.weights, target=target, layout=layout, max_context=CONTEXT), layout=layout, length=3, **SIZES
    )


@pytest.fixture(scope="module")
def with_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_safetensors("qwen3_5_mtp", tmp_path_factory.mktemp("mtp") / "hf")


def requests_of(vocab: int) -> list[Request]:
    """Three tokens are likely, so that random drafts are sometimes right; one prompt is sent twice."""
    rng = np.random.default_rng(3)
    likely = tuple((int(t), 60.0) for t in rng.choice(vocab, 3, replace=False))
    found = []
    for i, length in enumerate((90, 20, 90, 130, 7)):
        prompt = tuple(int(t) for t in np.random.default_rng(length).integers(0, vocab, length))
        params = SamplingParams(
            temperature=(0.0, 0.7, 1.0)[i % 3],
            logit_bias=likely,
            presence_penalty=0.5,
            repetition_penalty=1.05,
            seed=i,
            max_tokens=24,
            checksums=True,
        )
        found.append(Request(f"q{i}", prompt, params))
    return found


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("name", ["dflash", "dflash tree", "dense model", "mtp"])
def test_no_drafter_changes_tokens_or_scores_of_a_hybrid(name: str, kernels: bool, with_head: Path) -> None:
    target = with_head if name == "mtp" else TRAINED / "trained_qwen3_5"
    make = {"dflash": lambda: dflash(target, 0), "dflash tree": lambda: dflash(target, 20), "dense model": lambda: dense(target)}
    requests = requests_of(read_model_info(open_checkpoint(target)).spec.vocab)
    one_lane = make_backend(target, kernels=kernels, lanes=1)
    expected = plain(lambda: one_lane, requests)
    counted: Counter[str] = Counter()
    for pages, schedule in (
        (200, Schedule(reuse=True, arrivals=(0, 0, 9, 9, 20))),
        (30, Schedule(step_tokens=70, reuse=True)),
    ):
        drafter = make.get(name, lambda: mtp(target))()
        got, stats = run(make_backend(target, kernels=kernels, pages=pages, make_drafter=drafter), requests, schedule)
        assert same(got, expected)
        counted.update(kept=stats.accepted_tokens, rejected=stats.draft_tokens - stats.accepted_tokens)
        counted.update(preempted=stats.preemptions, whole=stats.whole_prompts)
    assert all(counted[what] for what in ("kept", "rejected", "preempted", "whole")), counted


def test_the_trained_pair_keeps_as_many_drafts_as_it_was_trained_for() -> None:
    target = TRAINED / "trained_qwen3_5"
    prompt = tuple(int(t) for t in np.random.default_rng(1).integers(8, 1024, 16))
    request = Request("g", prompt, SamplingParams(temperature=0.0, max_tokens=120, checksums=True))
    [answer], stats = run(make_backend(target, make_drafter=dflash(target, 0)), [request], Schedule())
    assert (len(answer.tokens) - 1) / (stats.steps - 1) > 1.4
