"""The sampling rule ("the law") as a definition: slow and plain, one position at a time. Every fast sampler is tested against it.

The input is the logits of a position, the sampling parameters, and the history and drafts before it. The output is scores, a
token, logprobs and a checksum. V in shape comments is the size of the vocabulary.

Order of the rule, all in float32:
    1  logit bias
    2  repetition, frequency and presence penalties, then DRY
    3  bans: bad words, minimum length, a constraint
    4  temperature: scores become (score - best) / temperature, so the best is 0 and nothing overflows;
       temperature 0 only subtracts the best, and is not filtered
    5  min-p: not below log(min_p)
    6  top-k: not below the k-th value
    7  top-p: the smallest set {score >= threshold} with enough of the mass that 5 and 6 left

Filters 5 to 7 keep everything not below a threshold, so ties stay together and there is always a token left. Sums over the
vocabulary are sums of integers, mass = floor(exp(score - best) * 2^40): exact in any order, hence equal for any number of rows,
threads or blocks. Inside, a token's *deficit* is best - score: zero or more, infinite if banned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from onedraw.sampling.adjustments import adjustment, mask_to_bools, valid_ids
from onedraw.sampling.logprobs import Integers, logprobs, masses, with_processed
from onedraw.sampling.noise import Floats, gumbel
from onedraw.types import History, Logprobs, SampledToken, SamplingParams

SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)  # a smaller one could become 0 in float32
NO_TOKEN = -1  # takes the place of a token id if every token is excluded


@dataclass(frozen=True, slots=True)
class Filters:
    """The parameters of temperature, min-p, top-k and top-p (steps 4 to 7) in the form in which fast samplers use them."""

    divisor: float = 1.0  # the temperature, by which scores are divided
    limit: float = math.inf  # min-p as a bound: tokens whose deficit (best score - score) is larger are excluded
    top_k: int = 0  # top-k; 0 turns it off
    top_p: float = 1.0  # top-p; 1 turns it off


def law(logits: Floats, params: SamplingParams, history: History, drafts: Sequence[int] = ()) -> Floats:
    """Return the scores of all tokens. The best is 0, and excluded tokens have -inf.   [V]

    If a logit is NaN or +inf, the logits are not a distribution but an error of the model, so every token is excluded.
    """
    deficit, limit = deficits(logits, params, history, drafts)
    return np.subtract(np.float32(0), np.where(deficit > limit, np.float32(np.inf), deficit))


def deficits(logits: Floats, params: SamplingParams, history: History, drafts: Sequence[int] = ()) -> tuple[Floats, np.float32]:
    """Return the deficits of all tokens after steps 1 to 4 of the rule, and the largest that the filters keep.   [V]"""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # Extreme parameters may give ±inf or NaN.
        scores = _adjusted(logits, params, history, drafts)
        best = scores.max() + np.float32(0)  # adding 0 turns -0.0 into 0.0
        if not (logits.max() < np.inf and np.isfinite(best)):
            return np.full_like(logits, np.inf), np.float32(np.inf)
        deficit: Floats = best - scores
        if params.temperature > 0:
            deficit /= np.float32(max(params.temperature, SMALLEST_TEMPERATURE))
            return deficit, _limit(deficit, params)
    return deficit, np.float32(np.inf)


def sample(logits: Floats, params: SamplingParams, history: History, drafts: Sequence[int] = ()) -> SampledToken | None:
    """Return the token at the position after `history` and `drafts`, with the logprobs and checksum that the parameters request.
    None if the rule excludes every token. A token that the history forces is taken instead of the sampled one."""
    scores = law(logits, params, history, drafts)
    token = _sample_id(scores, params, len(history) + len(drafts))
    if token == NO_TOKEN:
        return None
    forced = history.forced_at(len(drafts))
    token = token if forced is None else forced
    found: Logprobs | None = None
    if params.logprobs is not None:
        described = scores if params.logprobs_mode == "processed" else logits
        found = logprobs(described, token, params.logprobs, params.logprob_token_ids)
        if params.logprobs_mode == "both":
            found = with_processed(found, *deficits(logits, params, history, drafts), token)
    return SampledToken(token, found, checksum(logits, scores) if params.checksums else None)


def min_p_limit(min_p: float) -> float:
    """Return the largest deficit (best score - score) of a token that min-p keeps. The caller rounds it to float32."""
    return -math.log(min_p) if min_p > 0 else math.inf


def filters(params: SamplingParams, vocab: int) -> Filters:
    """Return the filters of a request. Temperature 0 leaves the scores unscaled and excludes nothing."""
    if params.temperature <= 0:
        return Filters()
    top_k = params.top_k if 0 < params.top_k < vocab else 0
    return Filters(max(params.temperature, SMALLEST_TEMPERATURE), min_p_limit(params.min_p), top_k, params.top_p)


def checksum(logits: Floats, scores: Floats) -> int:
    """Return 63 bits computed from all bits of logits and scores. The order of summation does not matter, and changing a single
    value always changes the result."""
    first, second = checksum_weights(len(logits))
    total = int((_bits(logits) * first).sum()) + int((_bits(scores) * second).sum())  # both sums are modulo 2^64
    return total & (2**63 - 1)


@lru_cache(maxsize=8)
def checksum_weights(vocab: int) -> tuple[Integers, Integers]:
    """Return odd 64-bit weights by token id: one vector for logits and one for scores."""
    words = np.arange(1, 2 * vocab + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    weights = (words | np.uint64(1)).view(np.int64)
    return weights[:vocab], weights[vocab:]


def _sample_id(scores: Floats, params: SamplingParams, position: int) -> int:
    if scores.max() == -np.inf:
        return NO_TOKEN
    if not params.greedy:
        scores = scores + gumbel(params.seed, position, len(scores))
    return int(scores.argmax())  # numpy returns the first of equal scores, which has the lowest id


def _adjusted(logits: Floats, params: SamplingParams, history: History, drafts: Sequence[int]) -> Floats:
    """Apply steps 1 to 3 of the rule (logit bias, penalties, bans) to the logits and return the new scores."""
    scores = logits.copy()
    for token, value in params.logit_bias:
        if 0 <= token < len(scores):
            scores[token] += np.float32(value)
    if params.counts_history:
        output = np.bincount(np.array([*history.output, *drafts], dtype=np.int64), minlength=len(scores))
        seen = output > 0
        seen[list(history.prompt)] = True
        penalty = np.float32(params.repetition_penalty)
        scores = np.where(seen, np.where(scores > 0, scores / penalty, scores * penalty), scores)
        scores -= output.astype(np.float32) * np.float32(params.frequency_penalty)
        scores -= (output > 0).astype(np.float32) * np.float32(params.presence_penalty)
    host = adjustment(params, history, drafts)
    for token, value in host.penalized:
        scores[token] -= np.float32(value)
    scores[list(valid_ids(host.banned, len(scores)))] = -np.inf
    if host.allowed is not None:
        scores[~mask_to_bools(host.allowed, len(scores))] = -np.inf
    return scores


def _limit(deficit: Floats, params: SamplingParams) -> np.float32:
    """Return min-p, top-k and top-p as one threshold: the largest deficit (best score - score) of a token that is kept."""
    limit = np.float32(min_p_limit(params.min_p))
    if 0 < params.top_k < len(deficit):
        limit = min(limit, np.sort(deficit)[params.top_k - 1])
    if params.top_p < 1:
        kept = np.sort(deficit[deficit <= limit])
        running = masses(kept).cumsum()
        total = int(running[-1])
        target = min(max(math.ceil(params.top_p * float(total)), 1), total)
        limit = min(limit, kept[np.searchsorted(running, target)])
    return limit


def _bits(values: Floats) -> Integers:
    return np.ascontiguousarray(values).view(np.int32).astype(np.int64)
