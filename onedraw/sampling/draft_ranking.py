"""How a drafter ranks its candidates: by its own distribution under the request's sampling rule, plus the target's noise.

The target is the model whose next tokens the drafter predicts. The input is a drafter's most likely candidates at one position
with their logits; the output is (token, score), the best first. The target samples argmax(log p + g), where p is its distribution
and g the noise. A drafter with distribution q that ranks by s · log q + g, with the same g and a factor s (`sharpness`), drafts
the sampled token far more often than one that takes argmax q. The ranking may be approximate, since drafts cannot change the
answer: it considers only the most likely candidates, and neither DRY penalties nor bans.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from onedraw.sampling.law import SMALLEST_TEMPERATURE, min_p_limit
from onedraw.sampling.noise import gumbel_at
from onedraw.types import History, SamplingParams

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


class HistoryCounts:
    """Counts how often each token occurs in the output of one growing history, and holds the set of the prompt's tokens. A
    drafter has one per lane (slot of a sequence)."""

    def __init__(self) -> None:
        self._history: History | None = None
        self._known = 0
        self._output: Counter[int] = Counter()
        self._prompt: frozenset[int] = frozenset()

    def of(self, history: History) -> tuple[Counter[int], frozenset[int]]:
        if history is not self._history:
            self._history, self._known = history, 0
            self._output, self._prompt = Counter(), frozenset(history.prompt)
        self._output.update(history.output[self._known :])
        self._known = len(history.output)
        return self._output, self._prompt


def rank_candidates(
    ids: Ids,
    logits: Floats,
    params: SamplingParams,
    *,
    position: int,
    sharpness: float,
    seen: tuple[Counter[int], frozenset[int]] | None,
) -> list[tuple[int, float]]:
    """Rank candidates under the request's sampling rule and noise. Scores are like log-probabilities; the best comes first.
    `seen` is the result of `HistoryCounts.of`, or None if the request has no penalties."""
    scores = logits.astype(np.float32, copy=True)
    for token, bias in params.logit_bias:
        scores[ids == token] += np.float32(bias)
    if seen is not None:
        scores = _penalized(ids, scores, params, seen)
    order = np.argsort(-scores, kind="stable")
    ids, scores = ids[order], scores[order]
    if not params.greedy:
        temperature = max(params.temperature, SMALLEST_TEMPERATURE)
        scores = (scores - scores[0]) / np.float32(temperature)
        kept = _filtered(scores, params)
        ids = ids[:kept]
        scores = np.float32(sharpness) * scores[:kept] + gumbel_at(params.seed, position, ids)
        order = np.argsort(-scores, kind="stable")
        ids, scores = ids[order], scores[order]
    scores = scores - scores[0]
    logs = scores - np.log(np.exp(scores).sum())
    return list(zip(ids.tolist(), logs.tolist(), strict=True))


def _penalized(ids: Ids, scores: Floats, params: SamplingParams, seen: tuple[Counter[int], frozenset[int]]) -> Floats:
    output, prompt = seen
    counts = np.array([output.get(int(i), 0) for i in ids], dtype=np.float32)
    occurred = np.array([int(i) in prompt for i in ids]) | (counts > 0)
    penalty = np.float32(params.repetition_penalty)
    scores = np.where(occurred, np.where(scores > 0, scores / penalty, scores * penalty), scores)
    reduced: Floats = scores - counts * np.float32(params.frequency_penalty)
    reduced -= (counts > 0) * np.float32(params.presence_penalty)
    return reduced.astype(np.float32)


def _filtered(scores: Floats, params: SamplingParams) -> int:
    """Return how many of the candidates min-p, top-k and top-p keep, at least one. `scores` is sorted, and the best score is
    0."""
    kept = max(int((scores >= -np.float32(min_p_limit(params.min_p))).sum()), 1)
    if params.top_k:
        kept = min(kept, params.top_k)
    if params.top_p < 1:
        running = np.exp(scores[:kept]).cumsum()
        kept = min(kept, int(np.searchsorted(running, params.top_p * running[-1])) + 1)
    return kept
