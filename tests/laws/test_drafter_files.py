"""Every file of one drafter drafts the same tokens, those of the slow reference, and changes no token of the target.

Trained drafters of three kinds (DFlash, Laguna, DFlash2) are written in each layout by `tests/support/drafter_files.py`, and read
back. Drafts are compared position by position along the target's greedy text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onedraw.backends.torch.drafters.base import CANDIDATES
from onedraw.backends.torch.drafters.dflash import CandidateSelector, DflashDrafter
from onedraw.backends.torch.model.block_convolution import BlockConvolution
from onedraw.checkpoints.open import open_checkpoint
from onedraw.models.dflash import DrafterInfo, check_drafter_fits, read_drafter_info
from onedraw.models.registry import read_model_info
from onedraw.speculation.draft_tree import build_tree
from onedraw.speculation.proposers import NO_PROPOSAL, Proposal
from onedraw.speculation.speculator import Speculator
from onedraw.types import Draft, History, Request, SamplingParams
from tests.laws.harness import Schedule, plain, random_requests, run, same
from tests.reference.dflash import Drafter, Target, drafted
from tests.support import drafter_files as files
from tests.support.torch_backend import make_backend

TRAINED = Path(__file__).parents[1] / "fixtures" / "trained"
TARGET = TRAINED / "trained_qwen3"
KINDS = {"DFlash": "trained_dflash_qwen3", "Laguna": "trained_laguna_qwen3", "DFlash2": "trained_dflash2_qwen3"}
DEPTH = 6
Write = Callable[[Path, Path], Path]


def lucebox(**changes: Any) -> Write:
    return lambda folder, out: files.write_lucebox(folder, out, **changes)


def llama_cpp(kind: str) -> Write:
    return lambda folder, out: files.write_llama_cpp(folder, out, kind)


# Files with the same numbers: float32 in every layout, then each narrower type in two.
LAYOUTS: dict[str, dict[str, Write]] = {
    "F32": {
        "z-lab": lambda folder, out: folder,
        "q, k and v apart": files.write_folder,
        "speculators": files.write_speculators,
        "llama.cpp": llama_cpp("F32"),
        "qwen35-dflash-draft": lucebox(),
        "dflash-draft": lucebox(arch="dflash-draft"),
        "aliases": lucebox(aliases=True),
    },
    **{kind: {"llama.cpp": llama_cpp(kind), "Lucebox": lucebox(kind=kind)} for kind in ("F16", "BF16", "Q8_0", "Q4_K")},
}


def written(folder: Path, tmp_path: Path, kind: str) -> dict[str, DrafterInfo]:
    """The drafter in every layout that can hold it, with weights of one type."""
    if kind == "Q4_K":
        folder = files.widened(folder, tmp_path / "widened")
    found = {}
    for name, write in LAYOUTS[kind].items():
        if name != "speculators" or folder.name == KINDS["DFlash"]:
            found[name] = read_drafter_info(open_checkpoint(write(folder, tmp_path / f"{name}.gguf")), DEPTH)
    return found


def drafter_of(info: DrafterInfo, budget: int = 0) -> Callable[..., DflashDrafter]:
    return lambda target, sampler, layout: DflashDrafter(
        info.spec,
        info.weights,
        target=target,
        layout=layout,
        lanes=4,
        max_context=400,
        arrange=lambda candidates: build_tree(candidates, budget),
        width=CANDIDATES if budget else 1,
    )


class ListeningSpeculator(Speculator):
    """Lets the drafter draft at every step, notes its drafts by position, and carries none."""

    def __init__(self) -> None:
        super().__init__([])
        self.drafts: dict[int, tuple[int, ...]] = {}

    def propose(self, request: Request, history: History, own: tuple[Draft, ...], **how: Any) -> Proposal:
        if own:
            self.drafts[len(history)] = tuple(draft.token for draft in own)
        return NO_PROPOSAL

    def plan_drafter(self, requests: Sequence[Request], *, limit: int) -> list[int]:
        return [limit for _ in requests]


PROMPT = tuple(np.random.default_rng(6).integers(8, 1024, 20).tolist())


def listen(info: DrafterInfo, *, kernels: bool = True) -> tuple[list[int], dict[int, tuple[int, ...]]]:
    """The target's greedy text, and the drafts at each of its positions."""
    request = Request("w", PROMPT, SamplingParams(temperature=0.0, max_tokens=80))
    listener = ListeningSpeculator()
    backend = make_backend(TARGET, kernels=kernels, make_drafter=drafter_of(info), check=False)
    [answer], _ = run(backend, [request], Schedule(speculator=listener))
    return [*PROMPT, *answer.tokens], listener.drafts


def kept(text: list[int], drafts: dict[int, tuple[int, ...]]) -> float:
    """How many drafts equal the target's tokens, up to the first that does not; mean over all positions."""
    counts = []
    for at, own in drafts.items():
        pairs = list(zip(own, text[at:], strict=False))
        counts.append(next((i for i, (draft, token) in enumerate(pairs) if draft != token), len(pairs)))
    return float(np.mean(counts))


def reference_drafts(info: DrafterInfo, text: list[int], positions: Sequence[int]) -> dict[int, tuple[int, ...]]:
    target, drafter = Target(read_model_info(open_checkpoint(TARGET)).weights), Drafter(info.weights)
    features = target.run(text, info.spec.target_layers)[1]
    return {
        at: tuple(drafted(drafter, features[: at - 1], text[at - 1], embed=target.embed, head=target.head)) for at in positions
    }


def differing(info: DrafterInfo, text: list[int], drafts: dict[int, tuple[int, ...]]) -> int:
    """How many of some positions have other drafts than the reference's."""
    positions = sorted(drafts)[:40:4]
    expected = reference_drafts(info, text, positions)
    return sum(drafts[at] != expected[at][: len(drafts[at])] for at in positions)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("name", KINDS)
def test_every_file_of_a_drafter_drafts_what_the_reference_drafts(name: str, kind: str, tmp_path: Path) -> None:
    infos = written(TRAINED / KINDS[name], tmp_path, kind)
    target = read_model_info(open_checkpoint(TARGET)).spec
    found = {}
    for layout, info in infos.items():
        check_drafter_fits(info.spec, target)
        found[layout] = listen(info)
    text, drafts = next(iter(found.values()))
    assert kept(text, drafts) > 0.3
    for layout, (other_text, other) in found.items():
        assert other_text == text, layout
        assert other == drafts, layout
    assert differing(next(iter(infos.values())), text, drafts) == 0


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("budget", [0, 20], ids=["chain", "tree"])
@pytest.mark.parametrize("name", ["Laguna", "DFlash2"])
def test_no_kind_of_drafter_changes_tokens_or_scores(name: str, budget: int, kernels: bool) -> None:
    info = read_drafter_info(open_checkpoint(TRAINED / KINDS[name]))
    requests = random_requests(np.random.default_rng(11), count=5, vocab=1024, longest=80, max_tokens=30)
    one_lane = make_backend(TARGET, kernels=kernels, lanes=1, check=False)
    expected = plain(lambda: one_lane, requests)
    backend = make_backend(TARGET, kernels=kernels, make_drafter=drafter_of(info, budget), pages=60, check=False)
    got, stats = run(backend, requests, Schedule(step_tokens=24, arrivals=(5, 0, 2, 9, 1)))
    assert same(got, expected)
    assert 0 < stats.accepted_tokens < stats.draft_tokens


# ---------------------------------------------------------------------- planted faults


@pytest.mark.parametrize(
    "fault", ["no feature norms", "context without the layer's norm", "taps of another block", "no selector"]
)
def test_a_planted_fault_changes_the_drafts(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "Laguna" if fault in ("no feature norms", "context without the layer's norm") else "DFlash2"
    info = read_drafter_info(open_checkpoint(TRAINED / KINDS[name]))
    made: list[DflashDrafter] = []
    start = DflashDrafter.__init__

    def remember(self: DflashDrafter, *args: Any, **more: Any) -> None:
        start(self, *args, **more)
        made.append(self)
        if fault == "no feature norms":
            self._feature_norms = None
        if fault == "context without the layer's norm":
            object.__setattr__(self._spec, "normed_context", False)

    monkeypatch.setattr(DflashDrafter, "__init__", remember)
    if fault == "taps of another block":
        convolve = BlockConvolution._convolve
        monkeypatch.setattr(
            BlockConvolution, "_convolve", lambda self, z, k, slots: convolve(self, z, k, torch.full_like(slots, 9))
        )
    if fault == "no selector":
        monkeypatch.setattr(CandidateSelector, "scores", lambda self, before, ids, logits, hidden: logits)
    text, drafts = listen(info)
    assert len(made) == 1
    assert differing(info, text, drafts) > 0
