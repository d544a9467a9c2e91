"""The protocol of drafters on the device, and the ranking of their candidates.

In: logits of drafted positions and the rows they belong to. Out: (token, score) per position, best first. Candidates are ranked
by s · log q + g, where q is the drafter's distribution, g the noise that the target's sampler adds, and s the sharpness: usually
the value with the best measured acceptance, and every few calls another one, to measure it too. An arm is the index of a
sharpness in SHARPNESS. A row is the work of one sequence in one step; a lane is the slot of a sequence's state; the target is the
model that is drafted for. Axes: T tokens of a step, E hidden width, C positions, V' the target's vocabulary with padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from onedraw.backends.sampled_rows import SamplingPosition
from onedraw.backends.torch.model.transformer import Transformer
from onedraw.backends.torch.runner.inputs import Inputs
from onedraw.backends.torch.sampling.sampler import Sampler
from onedraw.backends.torch.state.model_state import StageState
from onedraw.sampling.draft_ranking import HistoryCounts, rank_candidates
from onedraw.types import Draft, History, Plan, Row, RowOutcome, SamplingParams


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """The results of a step that a drafter reads."""

    plan: Plan
    inputs: Inputs
    hidden: Tensor  # [T, E]: hidden states after the last norm
    features: list[Tensor]  # [T, E] each, the residual stream after each of the drafter's `feature_layers`
    rows: tuple[RowOutcome, ...]


class Drafter(Protocol):
    """Drafts on the device from the hidden states of the target. A wrong draft costs time; it cannot change a token."""

    @property
    def name(self) -> str: ...

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the target whose outputs the drafter reads."""
        ...

    @property
    def lookahead(self) -> int:
        """The number of positions after the end of a row to which the drafter writes keys and values."""
        ...

    @property
    def state(self) -> StageState:
        """The drafter's KV pages, by the numbers of the target's first page group."""
        ...

    def open(self, rows: Sequence[Row]) -> None:
        """Copy the drafter's pages as the rows' copy orders say, before the step with these rows."""
        ...

    def draft(self, step: CompletedStep) -> list[tuple[Draft, ...]]:
        """Read the step's committed tokens, and return for each row the drafts of its next step."""
        ...


# How many of the likeliest tokens of a position are ranked. At temperature 1 an unlikely token often wins by its noise.
CANDIDATES = 256
SHARPNESS = (1.0, 1.25, 1.5)
EXPLORE = 8  # every eighth call uses the next sharpness in turn instead of the best one, to measure it
FORGET = 0.98  # at each new measurement of acceptance, the weight of the older ones is multiplied by this


def room_ahead(row: Row, outcome: RowOutcome, *, limit: int, page_size: int, max_context: int) -> int:
    """How many drafts may follow a row's last sampled token; 0 in the middle of a prompt, at a reply's end, or without pages.

    The last token of a reply is sampled, never drafted, and every draft needs a slot after that of the sampled token.
    """
    if not outcome.sampled or outcome.no_token_left or outcome.sampled[-1].token in row.params.stop_ids:
        return 0
    limit = min(limit, row.draft_limit)
    left = row.params.max_tokens - len(row.history.output) - len(outcome.sampled)
    held = min(len(row.pages[0]) * page_size, max_context) - row.stop - len(outcome.kept)
    return max(min(limit, left - 1, held - 1), 0)


class DraftedPosition(NamedTuple):
    """A position to draft a token for: `depth` positions after the last of the tokens that the row `sampled`."""

    row: Row
    sampled: tuple[int, ...]
    depth: int


def drafting_sampler(target: Transformer, lanes: int, vocab: int | None = None) -> tuple[Sampler, int]:
    """Return a sampler for drafted positions, and the size of its vocabulary: the first `vocab` tokens of the target's."""
    vocab = vocab or target.spec.vocab
    return target.ops.sampler(vocab=vocab, lanes=lanes, device=target.device), vocab


class Ranker:
    """Ranks tokens for drafted positions, as the request's sampling rule and noise would. Owner: a drafter.

    It keeps the drafts that each lane was given last, to learn with which sharpness most drafts are kept.
    """

    def __init__(self, lanes: int, sampler: Sampler, vocab: int) -> None:
        self._sampler, self._vocab = sampler, vocab
        self._tallies = [HistoryCounts() for _ in range(lanes)]
        # by lane: the request's parameters, the arm (index in SHARPNESS), and the parameters that were sharpened by it
        self._params: dict[int, tuple[SamplingParams, int, SamplingParams]] = {}
        self._given: list[tuple[str, tuple[Draft, ...], int] | None] = [None] * lanes
        self._kept = [0.0] * len(SHARPNESS)
        self._weight = [1e-9] * len(SHARPNESS)
        self._count = 0

    def best(self, logits: Tensor, positions: Sequence[DraftedPosition], *, arm: int, ids: Tensor | None = None) -> list[int]:
        """Return, for each position, the token that the target's sampling rule takes from its logits [C, V']; -1 if it takes
        none.

        `ids` are the tokens of the columns, if these are not the target's vocabulary in order.
        """
        if ids is not None or logits.shape[1] < self._vocab:
            full = logits.new_full((len(logits), self._vocab), -torch.inf)
            full[:, slice(logits.shape[1]) if ids is None else ids] = logits
            logits = full
        places = [
            SamplingPosition(
                row.lane,
                self._params_for_drafts(row, arm),
                History(row.history.prompt, row.history.output),
                (*sampled, *[sampled[-1]] * (depth - 1)),  # stand-ins for unknown drafts: noise depends on the position
                row.request_id,
            )
            for row, sampled, depth in positions
        ]
        found = self._sampler.sample(logits, places)
        return [-1 if choice is None else choice.token for choice in found]

    def _params_for_drafts(self, row: Row, arm: int) -> SamplingParams:
        """Return the request's parameters for drafting: with the sharpness of `arm`, without DRY, bad words and min_tokens, which
        the host applies, and without logprobs and checksums, which do not affect the token."""
        known = self._params.get(row.lane)
        if known is None or known[0] is not row.params or known[1] != arm:
            temperature = row.params.temperature / SHARPNESS[arm]
            made = replace(
                row.params, temperature=temperature, dry=None, bad_words=(), min_tokens=0, logprobs=None, checksums=False
            )
            known = self._params[row.lane] = row.params, arm, made
        return known[2]

    def candidates(self, logits: Tensor) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return ids and logits of the likeliest tokens of each row, on the host: [C, CANDIDATES] each."""
        found = logits.topk(min(CANDIDATES, logits.shape[1]), dim=1)
        return found.indices.cpu().numpy(), found.values.cpu().numpy()

    def learn(self, plan: Plan, rows: Sequence[RowOutcome]) -> None:
        """Record how many of the latest drafts were kept; drafts of other proposers are ignored."""
        for row, outcome in zip(plan.rows, rows, strict=True):
            mine, self._given[row.lane] = self._given[row.lane], None
            if mine is None or not row.drafts or row.params.greedy:
                continue
            request_id, drafts, arm = mine
            if request_id == row.request_id and row.drafts == drafts[: len(row.drafts)]:
                self._kept[arm] = self._kept[arm] * FORGET + len(outcome.kept)
                self._weight[arm] = self._weight[arm] * FORGET + 1

    def choose_arm(self) -> int:
        """The index in SHARPNESS of the value for the next drafts."""
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
