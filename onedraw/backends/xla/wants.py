"""What the positions of a slab ask of the law, as arrays of fixed shapes.

In: positions, each with its parameters, history and drafts. Out: Wants: numpy arrays for the sampler's program. Sparse
adjustments are (place, value) with place = row · V' + token; a place behind the end is padding and dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from onedraw.backends.answers import Position
from onedraw.backends.xla.buckets import round_up
from onedraw.sampling.adjust import Recall, adjustment, inside
from onedraw.sampling.law import filters
from onedraw.sampling.noise import key

# How many sparse entries a program is compiled for: the smallest that holds them; past the last, a multiple of it.
SPARSE = (256, 4096, 65536, 2**20)
OFF = 2.0  # a top-p that filters nothing
Entries = list[tuple[int, int, float]]


class Recalls:
    """Histories as arrays, one per lane, for DRY. Owner: the sampler."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, Recall]] = {}

    def of(self, position: Position) -> Recall | None:
        if position.params.dry is None:
            return None
        known = self._known.get(position.lane)
        if known is None or known[0] != position.request_id:
            known = self._known[position.lane] = (position.request_id, Recall())
        return known[1]


def make_wants(
    positions: Sequence[Position], recalls: Recalls, *, rows: int, vocab: int, width: int, lanes: int
) -> dict[str, Any]:
    """Arrays of `rows` rows, of which the first are the positions and the others ask for nothing."""
    wants = _dense(positions, rows, vocab, lanes)
    host = [adjustment(p.params, p.history, p.drafts, recalls.of(p)) for p in positions]
    bias: Entries = [(row, t, v) for row, p in enumerate(positions) for t, v in p.params.logit_bias if 0 <= t < vocab]
    lost: Entries = [(row, token, value) for row, known in enumerate(host) for token, value in known.penalized]
    banned: Entries = [(row, token, 0.0) for row, known in enumerate(host) for token in inside(known.banned, vocab)]
    drafted: Entries = [(row, token, 1.0) for row, p in enumerate(positions) if p.params.counts_history for token in p.drafts]
    most = max(map(len, (bias, lost, banned, drafted)))
    size = next((size for size in SPARSE if size >= most), round_up(most, SPARSE[-1]))
    for name, entries in (("bias", bias), ("lost", lost), ("banned", banned), ("drafted", drafted)):
        places = np.full(size, rows * width, dtype=np.int32)
        values = np.zeros(size, dtype=np.float32)
        if entries:
            at, tokens, by = zip(*entries, strict=True)
            places[: len(entries)] = np.asarray(at) * width + np.asarray(tokens)
            values[: len(entries)] = by
        wants[f"{name}_at"], wants[f"{name}_by"], wants[f"{name}_any"] = places, values, np.bool_(bool(entries))
    words = np.zeros((rows, width // 32), dtype=np.uint32)
    for row, known in enumerate(host):
        if known.allowed is not None:
            wants["constrained"][row] = True
            words[row, : len(known.allowed)] = known.allowed[: width // 32]
    wants["allowed"] = words
    return wants


def _dense(positions: Sequence[Position], rows: int, vocab: int, lanes: int) -> dict[str, Any]:
    """A number per row for every parameter; neutral behind the last position."""

    def column(values: Sequence[Any], neutral: Any, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.asarray([*values, *[neutral] * (rows - len(values))], dtype=dtype)

    params = [p.params for p in positions]
    asked = [filters(p, vocab) for p in params]
    float32, boolean = np.float32, np.bool_
    shares = [f.top_p if f.top_p < 1 else OFF for f in asked]
    words = [key(p.params.seed, p.at) for p in positions]
    raw = [p.logprobs is not None and p.logprobs_mode == "raw" for p in params]
    lawful = [p.logprobs is not None and p.logprobs_mode == "processed" for p in params]
    return {
        "keys": np.asarray([*words, *[(0, 0)] * (rows - len(words))], dtype=np.uint32),
        "noisy": column([not p.greedy for p in params], False, boolean),
        "divisor": column([f.divisor for f in asked], 1.0, float32),
        "limit": column([f.limit for f in asked], np.inf, float32),
        "top_k": column([f.top_k for f in asked], 0, np.int64),
        "top_p": column(shares, OFF, np.float64),
        "lane": column([p.lane for p in positions], lanes, np.int32),
        "counting": column([p.counts_history for p in params], False, boolean),
        "repetition": column([p.repetition_penalty for p in params], 1.0, float32),
        "frequency": column([p.frequency_penalty for p in params], 0.0, float32),
        "presence": column([p.presence_penalty for p in params], 0.0, float32),
        "constrained": np.zeros(rows, dtype=boolean),
        "raw": column(raw, False, boolean),
        "lawful": column(lawful, False, boolean),
        "top": np.int32(max((p.logprobs or 0 for p in params), default=0)),
        "summed": np.bool_(any(p.checksums for p in params)),
    }
