"""What a row's choices amount to: kept drafts, then one new token. The same for every backend.

In: a row and the choice after its last known token and after each draft. Out: RowOutcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from onedraw.sampling.law import NO_TOKEN, log_shares
from onedraw.sampling.verify import kept
from onedraw.types import Choice, History, Logprobs, Row, RowOutcome, SamplingParams

# -------------------- A position to choose at, and the row of integers in which a sampler on a device answers. T


Integers = npt.NDArray[np.int64]

# Columns of what comes back to the host, in front of the likeliest tokens.
TOKEN, CHECKSUM, TOTAL, CHOSEN, TOP = range(5)


class SamplingPosition(NamedTuple):
    """One position at which a token is chosen. `drafts` are the guessed tokens between history and position."""

    lane: int
    params: SamplingParams
    history: History
    drafts: tuple[int, ...]
    request_id: str

    @property
    def at(self) -> int:
        return len(self.history) + len(self.drafts)


def read_samples(rows: Integers, positions: Sequence[SamplingPosition]) -> list[Choice | None]:
    """What rows say of positions, as far as there are both."""
    asked = enumerate(zip(rows[:, TOKEN].tolist(), positions, strict=False))
    return [None if token == NO_TOKEN else _choice(token, p.params, rows, line) for line, (token, p) in asked]


def _choice(token: int, params: SamplingParams, rows: Integers, line: int) -> Choice:
    if params.logprobs is None and not params.checksums:
        return Choice(token)
    logprobs = None if params.logprobs is None else read_logprobs(rows[line], params.logprobs)
    return Choice(token, logprobs, int(rows[line, CHECKSUM]) if params.checksums else None)


def read_logprobs(row: Integers, top: int) -> Logprobs:
    bits = np.concatenate([row[CHOSEN : CHOSEN + 1], row[TOP : TOP + top] >> 32]).astype(np.int32)
    deficit = bits.view(np.float32)
    values = log_shares(deficit, int(row[TOTAL])).tolist()
    ids = (row[TOP : TOP + top] & 0xFFFFFFFF).tolist()
    kept = zip(ids, values[1:], np.isfinite(deficit[1:]).tolist(), strict=True)
    return Logprobs(values[0], tuple((token, value) for token, value, finite in kept if finite))


# -------------------- What a row's choices amount to: kept drafts, then one new token. The same for every backen


def row_outcome(row: Row, choices: Sequence[Choice | None], scored: tuple[Logprobs, ...] = ()) -> RowOutcome:
    """choices[0] stands after the last known token, choices[1 + i] after draft i; None: the law left no token there.

    Choices a mismatch makes unreachable may be missing at the end. No choices at all: a middle chunk.
    """
    if not choices:
        return RowOutcome(scored=scored)
    if not row.drafts:
        first = choices[0]
        return RowOutcome(scored=scored, barren=True) if first is None else RowOutcome((first,), scored)
    tokens = [NO_TOKEN if choice is None else choice.token for choice in choices]
    path = kept(row.drafts, tokens)
    reached = [choices[0], *(choices[1 + index] for index in path)]
    chosen = tuple(choice for choice in reached if choice is not None)
    barren = len(chosen) < len(reached)
    return RowOutcome(_told(row, chosen, kept=len(path)), scored, kept=path, barren=barren)


def _told(row: Row, chosen: tuple[Choice, ...], *, kept: int) -> tuple[Choice, ...]:
    """The choices, saying how they came: the first are kept drafts, the last stands where the other drafts went."""
    if not row.drafts or not chosen:
        return chosen
    told = [Choice(c.token, c.logprobs, c.checksum, kept=index < kept) for index, c in enumerate(chosen)]
    told[-1] = replace(told[-1], rejected=len(row.drafts) - kept)
    return tuple(told)
