"""A position to choose at, and the row of integers in which a sampler on a device answers. The same for every backend.

In: a row of integers from the device: token, checksum, total mass, the deficit of the token, then the likeliest tokens as
(bits of the deficit, id). Out: a Choice, or Logprobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from onedraw.sampling.law import NO_TOKEN, log_shares
from onedraw.types import Choice, History, Logprobs, SamplingParams

Integers = npt.NDArray[np.int64]

# Columns of what comes back to the host, in front of the likeliest tokens.
TOKEN, CHECKSUM, TOTAL, CHOSEN, TOP = range(5)


class Position(NamedTuple):
    """One position at which a token is chosen. `drafts` are the guessed tokens between history and position."""

    lane: int
    params: SamplingParams
    history: History
    drafts: tuple[int, ...]
    request_id: str

    @property
    def at(self) -> int:
        return len(self.history) + len(self.drafts)


def read_choices(rows: Integers, positions: Sequence[Position]) -> list[Choice | None]:
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
