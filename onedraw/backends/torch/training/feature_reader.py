"""Reads what a drafter learns from: the target's features and likeliest next tokens at every position of known sequences.

A FeatureReader takes the place of the drafter in the backend, so that it gets exactly the inputs that a drafter gets when a model
is served. It never drafts. The target is the model that is drafted for; a feature is its residual stream after a layer that the
drafter names. Axes: S positions of a sequence, n layers with features, Et hidden width of the target, K likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onedraw.backends.torch.drafters.base import CompletedStep
from onedraw.backends.torch.model.transformer import Transformer
from onedraw.backends.torch.runner.inputs import InputLayout
from onedraw.backends.torch.state.model_state import ModelState, StateSizes
from onedraw.types import Draft, Row

LIKELIEST = 16  # K: the tokens per position whose probabilities are kept
LOGIT_ROWS = 256  # positions whose logits are computed at once, which bounds the memory that they take


@dataclass(frozen=True, slots=True)
class ReadSequence:
    """The features and the likeliest next tokens of one sequence. The label at position t is the target's distribution of the
    token at t + 1."""

    features: Tensor  # [S, n * Et]
    likeliest: Tensor  # [S, K] token ids, int32
    logprobs: Tensor  # [S, K] their log-probabilities at temperature 1, float32

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.features, self.likeliest, self.logprobs))


class FeatureReader:
    """Keeps the features of every request that the backend runs, until `take`. Owner: the backend."""

    name = ""  # empty: the engine then plans no drafts
    lookahead = 0

    def __init__(self, layers: Sequence[int], *, target: Transformer, layout: InputLayout) -> None:
        self.feature_layers = tuple(sorted(set(layers)))
        self._columns = [self.feature_layers.index(layer) for layer in layers]
        self._target, self._rule = target, layout.alone.rule
        self._dtype = torch.float32 if target.device.type == "cpu" else torch.bfloat16
        sizes = StateSizes(pages=layout.alone.scratch, page_size=layout.page_size)
        self.state = ModelState((), sizes, dtype=target.dtype, device=target.device)  # without layers, so without pages
        self._parts: dict[str, list[ReadSequence]] = {}

    def open(self, rows: Sequence[Row]) -> None:
        """No-op: there are no pages to copy."""

    def draft(self, step: CompletedStep) -> list[tuple[Draft, ...]]:
        for row, span in zip(step.plan.rows, step.inputs.spans, strict=False):
            positions = slice(span.first, span.first + len(row.tokens))
            features = torch.cat([step.features[column][positions] for column in self._columns], dim=1).to(self._dtype)
            ids, logprobs = self._labels(step.hidden[positions])
            with torch.inference_mode(False):  # Tensors of inference mode cannot be used in training, but their copies can.
                part = ReadSequence(features.clone(), ids.to(torch.int32).clone(), logprobs.clone())
            self._parts.setdefault(row.request_id, []).append(part)
        return [()] * len(step.plan.rows)

    def take(self, request_id: str) -> ReadSequence:
        """Return the features of a request that has ended, and drop them here."""
        parts = self._parts.pop(request_id)
        return ReadSequence(
            torch.cat([part.features for part in parts]),
            torch.cat([part.likeliest for part in parts]),
            torch.cat([part.logprobs for part in parts]),
        )

    def _labels(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest tokens after each position and their log-probabilities, [S, K] each."""
        vocab, found = self._target.spec.vocab, []
        for part in torch.split(hidden, LOGIT_ROWS):
            rows = len(part)
            index = torch.arange(self._rule.padded(rows), device=part.device).clamp(max=rows - 1)
            logits = self._target.logits(part.index_select(0, index))[:rows, :vocab].float()
            top = logits.topk(min(LIKELIEST, vocab), dim=1)
            found.append((top.indices, top.values - logits.logsumexp(1, keepdim=True)))
        return torch.cat([ids for ids, _ in found]), torch.cat([values for _, values in found])
