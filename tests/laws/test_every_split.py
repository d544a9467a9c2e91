"""Every tiny checkpoint there is, at every legal cut into two and three, with everybody who drafts, at three temperatures:
tokens and checksums of one stage. The whole of it takes long; a sample of it runs always (see also test_split.py)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onedraw.backends.torch.drafters.dflash import DflashDrafter
from onedraw.backends.torch.drafters.draft_model import DraftModel, MtpHead, SmallModel
from onedraw.backends.torch.model.transformer import Transformer
from onedraw.backends.torch.runner.stages import StageDevice
from onedraw.checkpoints.open import open_checkpoint
from onedraw.engine.stats import Stats
from onedraw.models.dflash import check_drafter_fits, read_drafter_info
from onedraw.models.model_info import ModelInfo, read_model_info
from onedraw.models.mtp import read_mtp_info
from onedraw.speculation.draft_tree import build_tree
from onedraw.speculation.ngram import NgramProposer
from onedraw.types import Request, SamplingParams
from tests.laws.harness import Answer, KnownAnswerProposer, Schedule, plain, run
from tests.laws.test_modern import same
from tests.laws.test_split import FAMILIES, splits_of
from tests.support import tiny, tiny_drafters
from tests.support.torch_backend import make_backend

ALL = (*tiny.NAMES, *tiny.MODERN)
TEMPERATURES = (0.0, 0.7, 1.0)
ON_THE_HOST = ("nobody", "ngram", "a chain", "a tree")
CONTEXT = 128
SIZES = {"kernels": False, "check": False, "max_context": CONTEXT, "pages": 60, "drafts": 32, "checkpoints": 4}
SHAPE = {"lanes": 4, "max_context": CONTEXT}
LATE = (0, 0, 7)  # the last comes when the first, whose prompt it has, is through


def requests_at(temperature: float) -> list[Request]:
    """Three tokens are likely, so that guesses at random are right now and then. The first prompt comes back."""
    rng = np.random.default_rng(4)
    long, short = (tuple(int(t) for t in rng.integers(0, tiny.VOCAB, length)) for length in (70, 9))
    params = {
        "temperature": temperature,
        "logit_bias": tuple((token, 30.0) for token in (7, 8, 9)),
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "max_tokens": 8,
        "checksums": True,
    }
    return [Request(f"q{i}", prompt, SamplingParams(seed=i, **params)) for i, prompt in enumerate((long, short, long))]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("every")


@lru_cache
def model(place: Path, name: str) -> Path:
    return tiny.write_safetensors(name, place / name)


@lru_cache
def alone(place: Path, name: str, temperature: float) -> tuple[Answer, ...]:
    one_lane = make_backend(model(place, name), **{**SIZES, "lanes": 1})
    return tuple(plain(lambda: one_lane, requests_at(temperature)))


# ---------------------------------------------------------------------- who drafts on the device


def small_model(place: Path, target: ModelInfo) -> Callable[..., Any]:
    info = read_model_info(open_checkpoint(model(place, "llama")))

    def make(target: Transformer, sampler: object, layout: Any) -> DraftModel:
        stage_device = StageDevice(target.device, target.ops)
        small = Transformer(info.spec, info.weights, dtype=torch.float32, stage_devices=[stage_device], max_context=CONTEXT + 8)
        return DraftModel(SmallModel(small, layout=layout), layout=layout, length=3, **SHAPE)

    return make


def block_drafter(place: Path, target: ModelInfo, budget: int) -> Callable[..., Any]:
    """Random, reading the first layer and the last: features of the first stage cross to the last."""
    depth = len(target.spec.layers)
    folder = place / f"dflash {depth}"
    if not folder.exists():
        tiny_drafters.write_zlab(folder, ids=(0, depth - 1), num_target_layers=depth)
    found = read_drafter_info(open_checkpoint(folder))
    check_drafter_fits(found.spec, target.spec)
    arrange = lambda candidates: build_tree(candidates, budget)  # noqa: E731
    return lambda target, sampler, layout: DflashDrafter(
        found.spec, found.weights, target=target, layout=layout, arrange=arrange, **SHAPE
    )


def own_head(place: Path, name: str, target: ModelInfo) -> Callable[..., Any]:
    head = read_mtp_info(open_checkpoint(model(place, name)), target)

    def make(target: Transformer, sampler: object, layout: Any) -> DraftModel:
        ahead = MtpHead(head.spec, head.weights, target=target, layout=layout, max_context=CONTEXT)
        return DraftModel(ahead, layout=layout, length=3, **SHAPE)

    return make


def drafters_of(place: Path, name: str) -> dict[str, Callable[[], Callable[..., Any]] | None]:
    target = read_model_info(open_checkpoint(model(place, name)))
    found: dict[str, Callable[[], Callable[..., Any]] | None] = dict.fromkeys(ON_THE_HOST)
    found["a small model"] = lambda: small_model(place, target)
    if target.spec.hidden == tiny_drafters.HIDDEN:
        found["dflash"] = lambda: block_drafter(place, target, 0)
        found["dflash, a tree"] = lambda: block_drafter(place, target, 9)
    if name.endswith("_mtp"):
        found["its own head"] = lambda: own_head(place, name, target)
    return found


def compare(place: Path, name: str, cuts: tuple[int, ...], drafter: str, temperature: float) -> Stats:
    requests, expected = requests_at(temperature), list(alone(place, name, temperature))
    make = drafters_of(place, name)[drafter]
    knowing = KnownAnswerProposer({r.id: a.tokens for r, a in zip(requests, expected, strict=True)}, tiny.VOCAB)
    proposers = {
        "ngram": NgramProposer(),
        "a chain": knowing,
        "a tree": KnownAnswerProposer(knowing.answers, tiny.VOCAB, tree=True),
    }
    backend = make_backend(model(place, name), cuts=cuts, make_drafter=None if make is None else make(), **SIZES)
    got, stats = run(backend, requests, Schedule(proposer=proposers.get(drafter), reuse=True, step_tokens=64, arrivals=LATE))
    assert same(got, expected), (name, cuts, drafter, temperature)
    return stats


def counts(stats: Sequence[Stats]) -> Counter[str]:
    counted: Counter[str] = Counter()
    for one in stats:
        counted.update(kept=one.accepted_tokens, rejected=one.draft_tokens - one.accepted_tokens, restores=one.restores)
    return counted


# ---------------------------------------------------------------------- the laws

SAMPLED = [name for name in ALL if name not in FAMILIES]
SEEN: dict[str, list[Stats]] = {}


@pytest.mark.parametrize("name", SAMPLED)
def test_a_sample_of_the_other_checkpoints(place: Path, name: str) -> None:
    """Who drafts and how hot takes turns; the first cut and the last."""
    number = SAMPLED.index(name)
    drafters = [drafter for drafter in drafters_of(place, name) if drafter != "nobody"]
    picks = [drafters[-1], drafters[number % len(drafters)]]
    cuts = splits_of(model(place, name))
    for turn, (drafter, at) in enumerate(zip(picks, (cuts[0], cuts[-1]), strict=True)):
        SEEN.setdefault(name, []).append(compare(place, name, at, drafter, TEMPERATURES[(number + turn) % 3]))


def test_the_sample_kept_rejected_and_restored() -> None:
    """Runs after the sample, in the same process."""
    if SEEN:
        counted = counts([one for found in SEEN.values() for one in found])
        assert all(counted[what] for what in ("kept", "rejected", "restores")), counted


@pytest.mark.long
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", ALL)
def test_no_cut_no_drafter_and_no_temperature_changes_a_bit(place: Path, name: str, temperature: float) -> None:
    ways = itertools.product(splits_of(model(place, name)), drafters_of(place, name))
    counted = counts([compare(place, name, cuts, drafter, temperature) for cuts, drafter in ways])
    assert all(counted[what] for what in ("kept", "rejected", "restores")), counted
