"""The protocol of drafters on the device, and the ranking of their candidates.

In: logits of drafted positions and the rows they belong to. Out: (token, score) per position, best first. The sharpness s of `s
· log q + g` follows measured acceptance: mostly the best of a few values, now and then another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from onedraw.backends.torch.runner.inputs import Inputs
from onedraw.backends.torch.state.model_state import ModelState
from onedraw.sampling.draft_ranking import HistoryCounts, rank_candidates
from onedraw.types import Draft, Plan, Row, RowOutcome


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A step's results, as a drafter reads them."""

    plan: Plan
    inputs: Inputs
    hidden: Tensor  # [T, E] after the last norm
    features: list[Tensor]  # [T, E] per captured layer
    rows: tuple[RowOutcome, ...]


class Drafter(Protocol):
    """Drafts on the device from what the target computed. A wrong draft costs time; it cannot change a token."""

    @property
    def name(self) -> str: ...

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the target whose outputs it reads."""
        ...

    @property
    def lookahead(self) -> int:
        """Positions past a row that it writes to."""
        ...

    @property
    def state(self) -> ModelState:
        """Its pages, numbered like those of the target's first group."""
        ...

    def open(self, rows: Sequence[Row]) -> None:
        """Before a step: make the page copies of its rows."""
        ...

    def draft(self, step: CompletedStep) -> list[tuple[Draft, ...]]:
        """Take in the step's committed tokens and draft: per row, the drafts of the row after it."""
        ...


CANDIDATES = 256  # of a position, that the noise ranks: at temperature 1 the tail wins often enough to count
SHARPNESS = (1.0, 1.25, 1.5)
EXPLORE = 8  # every so many calls another sharpness is tried
FORGET = 0.98


def room_ahead(row: Row, outcome: RowOutcome, *, limit: int, page_size: int, max_context: int) -> int:
    """How many drafts may follow a row's last sampled token; 0 for a middle chunk, at a reply's end, or without pages.

    The last token of a reply is sampled, never drafted, and every draft but the last needs a slot after the sampled token.
    """
    if not outcome.sampled or outcome.no_token_left or outcome.sampled[-1].token in row.params.stop_ids:
        return 0
    left = row.params.max_tokens - len(row.history.output) - len(outcome.sampled)
    held = min(len(row.pages[0]) * page_size, max_context) - row.stop - len(outcome.kept)
    return max(min(limit, left - 1, held - 1), 0)


class Ranker:
    """Owner: a drafter. Per lane, counts of seen tokens and the drafts given last."""

    def __init__(self, lanes: int) -> None:
        self._tallies = [HistoryCounts() for _ in range(lanes)]
        self._given: list[tuple[str, tuple[Draft, ...], int] | None] = [None] * lanes
        self._kept = [0.0] * len(SHARPNESS)
        self._weight = [1e-9] * len(SHARPNESS)
        self._count = 0

    def best(self, logits: Tensor) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Ids and logits of the likeliest tokens of each row, on the host: [C, CANDIDATES] each."""
        found = logits.topk(min(CANDIDATES, logits.shape[1]), dim=1)
        return found.indices.cpu().numpy(), found.values.cpu().numpy()

    def learn(self, plan: Plan, rows: Sequence[RowOutcome]) -> None:
        """How many of the drafts given last were kept; drafts of other proposers are ignored."""
        for row, outcome in zip(plan.rows, rows, strict=True):
            mine, self._given[row.lane] = self._given[row.lane], None
            if mine is None or not row.drafts or row.params.greedy:
                continue
            request_id, drafts, arm = mine
            if request_id == row.request_id and row.drafts == drafts[: len(row.drafts)]:
                self._kept[arm] = self._kept[arm] * FORGET + len(outcome.kept)
                self._weight[arm] = self._weight[arm] * FORGET + 1

    def choose_arm(self) -> int:
        """The index of the sharpness that the next drafts use."""
        self._count += 1
        if self._count % EXPLORE == 0:
            return self._count // EXPLORE % len(SHARPNESS)
        means = [kept / weight for kept, weight in zip(self._kept, self._weight, strict=True)]
        return max(range(len(SHARPNESS)), key=means.__getitem__)

    def rank(
        self, row: Row, ids: npt.NDArray[np.int64], logits: npt.NDArray[np.float32], *, position: int, arm: int
    ) -> list[tuple[int, float]]:
        params = row.params
        seen = self._tallies[row.lane].of(row.history) if params.counts_history else None
        return rank_candidates(ids, logits, params, position=position, sharpness=SHARPNESS[arm], seen=seen)

    def remember(self, row: Row, drafts: tuple[Draft, ...], arm: int) -> None:
        self._given[row.lane] = (row.request_id, drafts, arm)
