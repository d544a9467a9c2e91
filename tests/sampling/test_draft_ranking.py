"""A drafter's ranking of candidates: any scores give at least one candidate and no exception."""

from __future__ import annotations

import numpy as np
import pytest

from onedraw.sampling.draft_ranking import rank_candidates
from onedraw.types import SamplingParams


@pytest.mark.parametrize("top_p", [1.0, 0.9, 1e-6])
@pytest.mark.parametrize("value", [-np.inf, np.nan, np.inf, 3e38, -3e38])
@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1.0])
def test_candidates_with_non_finite_scores_are_ranked(value: float, top_p: float, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=3)
    for first in (value, 1.0):
        logits = np.array([first, value, value, value], dtype=np.float32)
        with np.errstate(all="ignore"):
            found = rank_candidates(np.arange(4), logits, params, position=3, sharpness=1.0, seen=None)
        assert found
        assert {token for token, _ in found} <= set(range(4))
