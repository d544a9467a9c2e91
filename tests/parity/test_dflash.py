"""The torch DFlash drafter against the reference: features, logits, and contexts written in several pieces."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from onedraw.backends.torch.backend import TorchBackend
from onedraw.backends.torch.device import pick_ops
from onedraw.backends.torch.drafters.dflash import DflashDrafter, DraftBlock
from onedraw.backends.torch.ops.plain.ops import TorchOps
from onedraw.checkpoints.open import open_checkpoint
from onedraw.models.dflash import DrafterInfo, read_drafter_info
from onedraw.models.registry import read_model_info
from onedraw.settings import default_cache_dir
from onedraw.speculation.draft_tree import build_tree
from onedraw.types import Draft, Request, SamplingParams
from tests.laws.harness import Schedule, run
from tests.reference.dflash import Drafter, Target, block_logits

TRAINED = Path(__file__).parents[1] / "fixtures" / "trained"


class Recording(DflashDrafter):
    """Records every block with its logits."""

    seen: list[tuple[DraftBlock, np.ndarray]]

    def _arranged(self, blocks: list[DraftBlock], logits: Tensor, hidden: Tensor) -> list[tuple[Draft, ...]]:
        slot = 0
        for block in blocks:
            self.seen.append((block, logits[slot : slot + block.count - 1].numpy().copy()))
            slot += block.count - 1
        return super()._arranged(blocks, logits, hidden)


def described_drafter(kind: str) -> DrafterInfo:
    """The trained drafter unchanged, or with a first layer that has a window and is causal in the block."""
    found = read_drafter_info(open_checkpoint(TRAINED / "trained_dflash_qwen3"))
    if kind == "trained":
        return found
    first, *rest = found.spec.layers
    sliding = dataclasses.replace(first, mixer=dataclasses.replace(first.mixer, window=21))
    causal = (True, *found.spec.causal_in_block[1:])
    spec = dataclasses.replace(found.spec, layers=(sliding, *rest), causal_in_block=causal)
    found.weights.spec = spec
    return DrafterInfo(spec, found.weights)


def recorded(info: DrafterInfo, *, kernels: bool, step_tokens: int) -> list[tuple[list[int], int, np.ndarray]]:
    """(tokens before the anchor, anchor, logits) of every block of a greedy run."""
    target = read_model_info(open_checkpoint(TRAINED / "trained_qwen3"))
    made: list[Recording] = []

    def make(target, sampler, layout):  # type: ignore[no-untyped-def]
        recording = Recording(
            info.spec,
            info.weights,
            target=target,
            layout=layout,
            lanes=2,
            max_context=300,
            arrange=lambda candidates: build_tree(candidates, 0),
        )
        recording.seen = []
        made.append(recording)
        return recording

    backend = TorchBackend(
        target.spec,
        target.weights,
        dtype="f32",
        device="cpu",
        lanes=2,
        pages=60,
        page_size=8,
        max_context=300,
        ops=pick_ops("cpu", "f32", cache=default_cache_dir()) if kernels else TorchOps(torch.device("cpu")),
        check=False,
        make_drafter=make,
    )
    prompt = tuple(np.random.default_rng(2).integers(8, 1024, 70).tolist())
    request = Request("d", prompt, SamplingParams(temperature=0.0, max_tokens=24))
    [answer], _ = run(backend, [request], Schedule(step_tokens=step_tokens))
    text = [*prompt, *answer.tokens]
    return [(text[: block.start], block.sampled[-1], logits) for block, logits in made[0].seen]


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("kind", ["trained", "sliding"])
def test_logits_equal_the_reference_for_every_schedule(kind: str, kernels: bool) -> None:
    info = described_drafter(kind)
    target, drafter = Target(read_model_info(open_checkpoint(TRAINED / "trained_qwen3")).weights), Drafter(info.weights)
    whole = recorded(info, kernels=kernels, step_tokens=4096)
    assert len(whole) > 3
    for context, anchor, logits in whole[:6]:
        features = target.run(context, info.spec.target_layers)[1]
        expected = block_logits(drafter, features, anchor, embed=target.embed, head=target.head)[: len(logits)]
        error = np.abs(expected - logits).max()
        assert error < 1e-5 * max(1.0, np.abs(expected).max())
    pieces = recorded(info, kernels=kernels, step_tokens=9)  # context appended in other pieces, never recomputed
    for (_, _, logits), (_, _, other) in zip(whole, pieces, strict=True):
        assert (logits == other).all()
