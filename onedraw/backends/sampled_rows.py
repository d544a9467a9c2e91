"""Sampling results: the positions to sample at, the rows of integers that a device sampler returns, and a row's outcome.

In: SamplingPositions, then [positions, columns] integers from the device. Out: RowOutcomes: kept drafts, then one new token.
All backends use this code. A plan's row is the work of one sequence in one step; a lane is the slot of a sequence's state; the
history is the sequence's prompt and output so far. A position to sample at gives one row of integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from onedraw.sampling.law import NO_TOKEN
from onedraw.sampling.logprobs import read_logprobs
from onedraw.sampling.verify import kept_drafts
from onedraw.types import History, Logprobs, Row, RowOutcome, SampledToken, SamplingParams

Integers = npt.NDArray[np.int64]

TOKEN, CHECKSUM = 0, 1  # columns of a device sampler's row; those of logprobs follow (`sampling/logprobs.py`)


class SamplingPosition(NamedTuple):
    """One position to sample at. `drafts`: the drafted tokens between the history and this position."""

    lane: int
    params: SamplingParams
    history: History
    drafts: tuple[int, ...]
    request_id: str

    @property
    def asked(self) -> tuple[int, ...]:
        """The token ids whose logprobs the request asks for."""
        return () if self.params.logprobs is None else self.params.logprob_token_ids

    @property
    def at(self) -> int:
        return len(self.history) + len(self.drafts)

    @property
    def forced(self) -> int:
        """The token that the request forces here, or NO_TOKEN if one is sampled."""
        token = self.history.forced_at(len(self.drafts)) if self.history.forced else None
        return NO_TOKEN if token is None else token


@dataclass(frozen=True, slots=True)
class CountedHistory:
    """How far a lane's token counts (for penalties) go: they include the request's prompt and its output up to `known` tokens of
    the history. A decode step then adds only the tokens after these."""

    request_id: str
    prompt: tuple[int, ...]
    known: int

    def is_prefix_of(self, position: SamplingPosition) -> bool:
        """Whether the counts may be continued for this position. Known tokens never change, so their number is enough; the
        prompts are compared last because that is the slowest check."""
        same = self.request_id == position.request_id and self.known <= len(position.history)
        return same and (self.prompt is position.history.prompt or self.prompt == position.history.prompt)


def read_samples(rows: Integers, positions: Sequence[SamplingPosition]) -> list[SampledToken | None]:
    """The sampled token of each position; None if the sampling rule left no token. Padding rows after the last position are
    ignored."""
    tokens = enumerate(zip(rows[:, TOKEN].tolist(), positions, strict=False))
    return [None if token == NO_TOKEN else _sample(token, p.params, rows, index) for index, (token, p) in tokens]


def _sample(token: int, params: SamplingParams, rows: Integers, index: int) -> SampledToken:
    if params.logprobs is None and not params.checksums:
        return SampledToken(token)
    logprobs = None
    if params.logprobs is not None:
        both = params.logprobs_mode == "both"
        logprobs = read_logprobs(rows[index], params.logprobs, params.logprob_token_ids, both=both)
    return SampledToken(token, logprobs, int(rows[index, CHECKSUM]) if params.checksums else None)


def row_outcome(row: Row, samples: Sequence[SampledToken | None], scored: tuple[Logprobs, ...] = ()) -> RowOutcome:
    """The outcome of a row from its samples: samples[0] follows the last known token, samples[1 + i] follows draft i. None
    stands for a position at which the sampling rule left no token.

    Samples after the first rejected draft may be missing. A row in the middle of a prompt has no samples at all.
    """
    if not samples:
        return RowOutcome(scored=scored)
    if not row.drafts:
        first = samples[0]
        return RowOutcome(scored=scored, no_token_left=True) if first is None else RowOutcome((first,), scored)
    tokens = [NO_TOKEN if sample is None else sample.token for sample in samples]
    path = kept_drafts(row.drafts, tokens)
    reached = [samples[0], *(samples[1 + index] for index in path)]
    sampled = tuple(sample for sample in reached if sample is not None)
    barren = len(sampled) < len(reached)
    return RowOutcome(_with_draft_counts(row, sampled, kept=len(path)), scored, kept=path, no_token_left=barren)


def _with_draft_counts(row: Row, sampled: tuple[SampledToken, ...], *, kept: int) -> tuple[SampledToken, ...]:
    """Mark the first `kept` tokens as kept drafts, and the last token with the number of rejected drafts."""
    if not sampled:
        return sampled
    marked = [SampledToken(s.token, s.logprobs, s.checksum, kept=index < kept) for index, s in enumerate(sampled)]
    marked[-1] = replace(marked[-1], rejected=len(row.drafts) - kept)
    return tuple(marked)
