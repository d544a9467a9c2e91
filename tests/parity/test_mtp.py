"""The torch MTP head against the reference: the logits of every draft after every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onedraw.backends.torch.drafters.draft_model import DraftModel, MtpHead
from onedraw.checkpoints.open import open_checkpoint
from onedraw.errors import UnsupportedModel
from onedraw.models.mtp import MtpInfo, read_mtp_info
from onedraw.models.registry import read_model_info
from onedraw.types import Request, SamplingParams
from tests.laws.harness import Schedule, run
from tests.reference import forward
from tests.reference import mtp as reference
from tests.support import tiny
from tests.support.torch_backend import make_backend

LENGTH = 3  # drafts per step
RecordedDraft = tuple[list[int], np.ndarray]  # the text before a draft, and its logits


class Recording(DraftModel):
    """Records the text before every draft, and its logits."""

    seen: list[RecordedDraft]

    def draft(self, turn: Any) -> list[Any]:
        [row], [outcome] = turn.plan.rows, turn.rows
        settled = [*row.history.prompt, *row.history.output, *(choice.token for choice in outcome.sampled)]
        best, ranked = self._ranker.best, []

        def keep(logits: Any, *given: Any, **named: Any) -> Any:
            ranked.append(logits[0].numpy().copy())
            return best(logits, *given, **named)

        self._ranker.best = keep  # type: ignore[method-assign]
        drafts = super().draft(turn)
        self._ranker.best = best  # type: ignore[method-assign]
        for depth, logits in enumerate(ranked):
            self.seen.append(([*settled, *(d.token for d in drafts[0][:depth])], logits))
        return drafts


def recorded(folder: Path, head: MtpInfo, *, kernels: bool, step_tokens: int) -> list[RecordedDraft]:
    made: list[Recording] = []

    def make(target: Any, sampler: object, layout: Any) -> DraftModel:
        model = MtpHead(head.spec, head.weights, target=target, layout=layout, max_context=300)
        made.append(Recording(model, layout=layout, lanes=1, max_context=300, length=LENGTH))
        made[0].seen = []
        return made[0]

    prompt = tuple(np.random.default_rng(2).integers(0, tiny.VOCAB, 100).tolist())
    params = SamplingParams(temperature=0.0, logit_bias=tuple((t, 30.0) for t in range(40, 44)), max_tokens=12)
    backend = make_backend(folder, kernels=kernels, max_context=300, lanes=1, make_drafter=make)
    _, stats = run(backend, [Request("m", prompt, params)], Schedule(step_tokens=step_tokens))
    assert stats.accepted_tokens  # after accepted drafts the head continues from their hidden states
    return made[0].seen


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("name", ["qwen3_5_mtp", "qwen3_5_moe_mtp"])
def test_every_draft_equals_the_reference(name: str, kernels: bool, tmp_path: Path) -> None:
    folder = tiny.write_safetensors(name, tmp_path / "hf")
    source = open_checkpoint(folder)
    target = read_model_info(source)
    head = read_mtp_info(source, target)
    seen = recorded(folder, head, kernels=kernels, step_tokens=64)
    assert len({len(text) for text, _ in seen}) > 8
    for drafts in by_step(seen):
        for depth, (text, got) in enumerate(drafts):
            expected = expected_logits(target.weights, head, text, drafts=depth)
            assert np.abs(expected - got).max() < 1e-3, (len(text), depth)


def by_step(seen: list[RecordedDraft]) -> list[list[RecordedDraft]]:
    """Group drafts by step: each further draft of a step has one more token before it."""
    found: list[list[RecordedDraft]] = []
    for text, logits in seen:
        if found and len(found[-1]) < LENGTH and text[:-1] == found[-1][-1][0]:
            found[-1].append((text, logits))
        else:
            found.append([(text, logits)])
    return found


def expected_logits(weights: Any, head: MtpInfo, text: list[int], *, drafts: int) -> np.ndarray:
    """The head over the whole text: with hidden states of the target where it has computed them, then with the head's own."""
    known = len(text) - 1 - drafts  # positions the target computed: all except the last sampled token and the drafts
    residuals = forward.forward(weights, text[:known])[1]
    hidden = forward.norm(residuals[-1], weights.read(None, "norm"), weights.spec)
    for _ in range(drafts + 1):
        logits, read = reference.mtp_logits(weights, head.weights, hidden, text[1 : len(hidden) + 1])
        hidden = np.concatenate([hidden, read[-1:]])
    return logits[-1]


def test_a_checkpoint_without_a_head_is_refused_by_name(tmp_path: Path) -> None:
    for name, words in (("qwen3_5", "has no MTP head"), ("llama", "llama model has no MTP head")):
        source = open_checkpoint(tiny.write_safetensors(name, tmp_path / name))
        with pytest.raises(UnsupportedModel, match=words):
            read_mtp_info(source, read_model_info(source))
