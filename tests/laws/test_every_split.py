"""Every tiny checkpoint, split at every legal cut into two and three stages, with every drafter, at three temperatures, gives
the tokens and checksums of one stage. All combinations take long (`-m long`); a sample always runs (see also test_split.py)."""

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

from onedraw.backends.torch.drafters.base import CANDIDATES
from onedraw.backends.torch.drafters.dflash import DflashDrafter
from onedraw.backends.torch.drafters.draft_model import DraftModel, MtpHead, SmallModel
from onedraw.backends.torch.model.transformer import Transformer
from onedraw.backends.torch.runner.pipeline import StageDevice
from onedraw.checkpoints.open import open_checkpoint
from onedraw.engine.stats import Stats
from onedraw.models.dflash import check_drafter_fits, read_drafter_info
from onedraw.models.mtp import read_mtp_info
from onedraw.models.registry import ModelInfo, read_model_info
from onedraw.speculation.draft_tree import build_tree
from onedraw.speculation.proposers import NgramProposer
from onedraw.types import Request, SamplingParams
from tests.laws.harness import Answer, KnownAnswerProposer, Schedule, plain, run, same
from tests.laws.test_split import FAMILIES, splits_of
from tests.support import tiny, tiny_drafters
from tests.support.torch_backend import make_backend

ALL = (*tiny.NAMES, *tiny.MODERN)
TEMPERATURES = (0.0, 0.7, 1.0)
HOST_PROPOSERS = ("none", "ngram", "chain", "tree")
CONTEXT = 128
SIZES = {"kernels": False, "check": False, "max_context": CONTEXT, "pages": 60, "drafts": 32, "checkpoints": 4}
SHAPE = {"lanes": 4, "max_context": CONTEXT}
LATE = (0, 0, 7)  # the last request arrives when the first one, which has the same prompt, has finished


def requests_at(temperature: float) -> list[Request]:
    """Three tokens are likely, so that random drafts are sometimes right. The first prompt is sent twice."""
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
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("every")


@lru_cache
def model(root: Path, name: str) -> Path:
    return tiny.write_safetensors(name, root / name)


@lru_cache
def plain_answers(root: Path, name: str, temperature: float) -> tuple[Answer, ...]:
    one_lane = make_backend(model(root, name), **{**SIZES, "lanes": 1})
    return tuple(plain(lambda: one_lane, requests_at(temperature)))


# ---------------------------------------------------------------------- drafters on the device


def small_model(root: Path, target: ModelInfo) -> Callable[..., Any]:
    info = read_model_info(open_checkpoint(model(root, "llama")))

    def make(target: Transformer, sampler: object, layout: Any) -> DraftModel:
        stage_device = StageDevice(target.device, target.ops)
        small = Transformer(info.spec, info.weights, dtype=torch.float32, stage_devices=[stage_device], max_context=CONTEXT + 8)
        return DraftModel(SmallModel(small, layout=layout), layout=layout, length=3, **SHAPE)

    return make


def block_drafter(root: Path, target: ModelInfo, budget: int) -> Callable[..., Any]:
    """A random DFlash drafter that reads the first and the last layer, so features of the first stage cross to the last."""
    depth = len(target.spec.layers)
    folder = root / f"dflash {depth}"
    if not folder.exists():
        tiny_drafters.write_zlab(folder, ids=(0, depth - 1), num_target_layers=depth)
    found = read_drafter_info(open_checkpoint(folder))
    check_drafter_fits(found.spec, target.spec)
    arrange = lambda candidates: build_tree(candidates, budget)  # noqa: E731
    return lambda target, sampler, layout: DflashDrafter(
        found.spec, found.weights, target=target, layout=layout, arrange=arrange, width=CANDIDATES if budget else 1, **SHAPE
    )


def mtp_head(root: Path, name: str, target: ModelInfo) -> Callable[..., Any]:
    head = read_mtp_info(open_checkpoint(model(root, name)), target)

    def make(target: Transformer, sampler: object, layout: Any) -> DraftModel:
        proposer = MtpHead(head.spec, head.weights, target=target, layout=layout, max_context=CONTEXT)
        return DraftModel(proposer, layout=layout, length=3, **SHAPE)

    return make


def drafters_of(root: Path, name: str) -> dict[str, Callable[[], Callable[..., Any]] | None]:
    target = read_model_info(open_checkpoint(model(root, name)))
    found: dict[str, Callable[[], Callable[..., Any]] | None] = dict.fromkeys(HOST_PROPOSERS)
    found["draft model"] = lambda: small_model(root, target)
    if target.spec.hidden == tiny_drafters.HIDDEN:
        found["dflash"] = lambda: block_drafter(root, target, 0)
        found["dflash tree"] = lambda: block_drafter(root, target, 9)
    if name.endswith("_mtp"):
        found["mtp head"] = lambda: mtp_head(root, name, target)
    return found


def compare(root: Path, name: str, cuts: tuple[int, ...], drafter: str, temperature: float) -> Stats:
    requests, expected = requests_at(temperature), list(plain_answers(root, name, temperature))
    make = drafters_of(root, name)[drafter]
    known = KnownAnswerProposer({r.id: a.tokens for r, a in zip(requests, expected, strict=True)}, tiny.VOCAB)
    proposers = {
        "ngram": NgramProposer(),
        "chain": known,
        "tree": KnownAnswerProposer(known.answers, tiny.VOCAB, tree=True),
    }
    backend = make_backend(model(root, name), cuts=cuts, make_drafter=None if make is None else make(), **SIZES)
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
def test_a_sample_of_the_other_checkpoints(root: Path, name: str) -> None:
    """The first and the last cut, with drafters and temperatures that alternate between checkpoints."""
    number = SAMPLED.index(name)
    drafters = [drafter for drafter in drafters_of(root, name) if drafter != "none"]
    selected = [drafters[-1], drafters[number % len(drafters)]]
    cuts = splits_of(model(root, name))
    for offset, (drafter, at) in enumerate(zip(selected, (cuts[0], cuts[-1]), strict=True)):
        SEEN.setdefault(name, []).append(compare(root, name, at, drafter, TEMPERATURES[(number + offset) % 3]))


def test_the_sample_kept_rejected_and_restored() -> None:
    """Runs after the sample, in the same process."""
    if SEEN:
        counted = counts([one for found in SEEN.values() for one in found])
        assert all(counted[what] for what in ("kept", "rejected", "restores")), counted


@pytest.mark.long
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", ALL)
def test_no_cut_no_drafter_and_no_temperature_changes_a_bit(root: Path, name: str, temperature: float) -> None:
    combinations = itertools.product(splits_of(model(root, name)), drafters_of(root, name))
    counted = counts([compare(root, name, cuts, drafter, temperature) for cuts, drafter in combinations])
    assert all(counted[what] for what in ("kept", "rejected", "restores")), counted
