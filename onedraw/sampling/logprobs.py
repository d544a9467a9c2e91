"""Logprobs as a definition, and as every backend reads them from the integers that its sampler returns.

A logprob is a log-softmax. Its normalizer is a sum of masses, floor(exp(-deficit) * 2^40), where a token's deficit is the best
score minus its own: sums of integers are exact in any order, so a logprob has the same bits for any number of rows, threads or
blocks. `logprobs` is the definition; `read_logprobs` computes the same from a row of integers. V is the size of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from onedraw.sampling.noise import Floats
from onedraw.types import Logprobs

MASS_BITS = 40  # probabilities are counted in units of 2^-40 of the best token's

# Columns of a device sampler's row that hold logprobs. TOTAL: the sum of all masses. SAMPLED: the bits of the sampled token's
# deficit. From TOP on: the most likely tokens, each as (bits of its deficit) << 32 | token id. The last columns are the tokens
# that the request asks for by id, in the same form; where another row of the step asks for more, those before them are NOT_ASKED.
# With the mode "both" these are of the logits; KEPT_TOTAL and KEPT_SAMPLED are the same two numbers of the scores that the
# filters keep, and ALL_TOTAL is the sum of all masses before the filters.
TOTAL, SAMPLED, KEPT_TOTAL, KEPT_SAMPLED, ALL_TOTAL, TOP = 2, 3, 4, 5, 6, 7
NOT_ASKED = 0x7F800000 << 32  # an infinite deficit, so that it cannot be taken for one of the most likely tokens

Integers = npt.NDArray[np.int64]


def logprobs(scores: Floats, token: int, top: int, ids: Sequence[int] = ()) -> Logprobs:
    """Return the log-softmax of `scores` at `token`, and the `top` most likely tokens, best first and the lowest id first among
    equals, without excluded tokens; then at the tokens `ids`. `scores` are the logits for the modes "raw" and "both", and the
    scores after the filters for the mode "processed".
    """
    deficit = (scores.max() + np.float32(0)) - scores
    values = log_shares(deficit, int(masses(deficit).sum()))
    order = np.argsort(deficit, kind="stable")[:top]
    likeliest = tuple((int(i), float(values[i])) for i in order if deficit[i] < np.inf)
    return Logprobs(float(values[token]), likeliest, asked=tuple((i, float(values[i])) for i in ids))


def with_processed(found: Logprobs, deficit: Floats, limit: np.float32, token: int) -> Logprobs:
    """Return raw logprobs together with the token's logprob among the tokens that the filters keep, and their share of the mass.
    `deficit` is the deficits before the filters, `limit` the largest deficit that the filters keep.   [V]"""
    kept = np.where(deficit > limit, np.float32(np.inf), deficit)
    total = int(masses(kept).sum())
    return _with_processed(found, kept[token : token + 1], total, int(masses(deficit).sum()))


def _with_processed(found: Logprobs, deficit: Floats, kept: int, everything: int) -> Logprobs:
    return replace(found, processed=float(log_shares(deficit, kept)[0]), mass=kept / everything if everything > 0 else 0.0)


def read_logprobs(row: Integers, top: int, ids: Sequence[int] = (), *, both: bool = False) -> Logprobs:
    """Return the logprobs that a device sampler has written into a row of integers. They have the same bits as the result of
    `logprobs` for the same scores, or with `both` the same bits as the result of `with_processed`."""
    end = len(row) - len(ids)
    likeliest = row[TOP : min(TOP + top, end)]
    bits = np.concatenate([row[SAMPLED : SAMPLED + 1], likeliest >> 32, row[end:] >> 32]).astype(np.int32)
    deficit = bits.view(np.float32)
    values = log_shares(deficit, int(row[TOTAL])).tolist()
    first = 1 + len(likeliest)
    ranked = zip((likeliest & 0xFFFFFFFF).tolist(), values[1:first], np.isfinite(deficit[1:first]).tolist(), strict=True)
    found = Logprobs(
        values[0],
        tuple((token, value) for token, value, finite in ranked if finite),
        asked=tuple(zip(ids, values[first:], strict=True)),
    )
    if not both:
        return found
    kept = row[KEPT_SAMPLED : KEPT_SAMPLED + 1].astype(np.int32).view(np.float32)
    return _with_processed(found, kept, int(row[KEPT_TOTAL]), int(row[ALL_TOTAL]))


def asked_columns(asked: Sequence[Sequence[int]], *, rows: int, columns: int) -> npt.NDArray[np.int32]:
    """Return the token ids that rows ask for as a table, each row's at its end and -1 before them: [rows, columns]."""
    table = np.full((rows, columns), -1, dtype=np.int32)
    for line, ids in zip(table, asked, strict=False):
        line[columns - len(ids) :] = ids
    return table


def log_shares(deficit: Floats, total: int) -> Floats:
    """Return the logprobs of tokens from their deficits (best score - score), given that the masses of all tokens add up to
    `total`. They are rounded from float64 to float32.

    If a logit is NaN, the total is not positive, since NaN becomes the lowest integer; then every logprob is -inf.
    """
    if total <= 0:
        return np.full(deficit.shape, -np.inf, dtype=np.float32)
    return ((0.0 - deficit.astype(np.float64)) - math.log(total / 2**MASS_BITS)).astype(np.float32)


def masses(deficit: Floats) -> Integers:
    """Return the mass of each token, floor(exp(-deficit) * 2^40), where deficit = best score - score. That of the best token is
    exactly 2^40."""
    return (np.exp(-deficit) * np.float32(2.0**MASS_BITS)).astype(np.int64)
