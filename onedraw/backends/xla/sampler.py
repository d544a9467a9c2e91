"""Choosing tokens on the device for a slab of positions, by the law of `sampling/law.py`.

In: residuals of picked tokens (or logits kept with checkpoints) and Wants. Out: a row of integers per position
(`backends/answers.py`), the kept logits, and the chosen tokens, which the commit reads without the host in between.

One program has everything; what no row of a slab asks for is skipped on the device. Sums over the vocabulary are sums of
integers and thresholds are found by halving the range of float bits, so nothing depends on the other rows.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from onedraw.backends.xla.layers import linear, over, rms_norm, times
from onedraw.backends.xla.noise import gumbel
from onedraw.backends.xla.platform import Array
from onedraw.sampling.law import MASS_BITS, NO_TOKEN
from onedraw.types import MAX_TOP_LOGPROBS

Wants = dict[str, Any]
NO_BITS = 0x7F800000  # of infinity: no deficit has more


def logits_of(weights: dict[str, Any], x: Array, *, eps: float, vocab: int) -> Array:
    """Float32 logits [C, V'] of residuals x [C, E]; -inf behind the vocabulary."""
    hidden = rms_norm(x, weights["norm"], eps).astype(weights["head"].dtype)
    logits = linear(hidden, weights["head"]).astype(jnp.float32)
    return jnp.where(jnp.arange(logits.shape[1]) < vocab, logits, -jnp.inf)


def choose(
    weights: dict[str, Any],
    sums: Array,
    kept: Array,
    chosen: Array,
    counts: tuple[Array, Array],
    picked: Array,
    slab: dict[str, Any],
    wants: Wants,
    *,
    rows: int,
    eps: float,
    vocab: int,
) -> tuple[Array, Array, Array]:
    """Picks [offset, offset + rows) of the turn: kept logits, all chosen tokens so far, and the answers of these rows."""
    x = lax.dynamic_slice_in_dim(picked, slab["offset"], rows)
    logits = logits_of(weights, x, eps=eps, vocab=vocab)
    logits = jnp.where((slab["restore"] >= 0)[:, None], kept[jnp.maximum(slab["restore"], 0)], logits)
    kept = kept.at[slab["keep"]].set(logits)
    answers = answer(logits, sums, counts, wants, vocab=vocab)
    return kept, lax.dynamic_update_slice_in_dim(chosen, answers[:, 0].astype(jnp.int32), slab["offset"], 0), answers


def answer(logits: Array, sums: Array, counts: tuple[Array, Array], wants: Wants, *, vocab: int) -> Array:
    """What the host needs to know of these rows.   [C, TOP + most logprobs] int64"""
    scores = adjusted(logits, counts, wants)
    best = _top(scores)
    sound = (best > -jnp.inf) & (best < jnp.inf) & (logits.max(1) < jnp.inf)
    deficit = over(best[:, None] - scores, wants["divisor"][:, None])
    limit = _limit(deficit, wants)[:, None]
    lawful = jnp.where(deficit > limit, jnp.inf, deficit)
    noise = lax.cond(wants["noisy"].any(), lambda: gumbel(wants["keys"], logits.shape[1]), lambda: jnp.zeros_like(logits))
    values = jnp.where(wants["noisy"][:, None], noise, 0) - lawful
    token = jnp.argmax(values, axis=1).astype(jnp.int64)
    parts = [jnp.where(sound, token, NO_TOKEN)[:, None], _checksums(logits, lawful, sums, wants)[:, None]]
    seen = jnp.where(wants["raw"][:, None], _deficits(logits), lawful)
    parts += _described(seen, token, wants["raw"] | wants["lawful"], wants["top"], vocab)
    return jnp.concatenate(parts, axis=1)


def score(weights: dict[str, Any], x: Array, index: Array, tokens: Array, top: Array, *, eps: float, vocab: int) -> Array:
    """The model's own logprobs of given tokens after positions of a turn, as rows of answers."""
    deficit = _deficits(logits_of(weights, x[index], eps=eps, vocab=vocab))
    nothing = jnp.zeros((len(index), 2), jnp.int64)
    return jnp.concatenate([nothing, *_described(deficit, tokens, jnp.ones(len(index), bool), top, vocab)], axis=1)


# ── steps 1 to 3: bias, penalties, bans ───────────────────────────────────────────────────────────────────────────────


def adjusted(logits: Array, counts: tuple[Array, Array], wants: Wants) -> Array:
    def sparse(name: str, scores: Array, change: Any) -> Array:
        flat = scores.reshape(-1)
        changed = lambda: change(flat.at[wants[f"{name}_at"]], wants[f"{name}_by"]).reshape(scores.shape)  # noqa: E731
        return lax.cond(wants[f"{name}_any"], changed, lambda: scores)

    scores = sparse("bias", logits, lambda at, by: at.add(by, mode="drop"))
    scores = lax.cond(wants["counting"].any(), lambda: _penalized(scores, counts, wants), lambda: scores)
    scores = sparse("lost", scores, lambda at, by: at.add(-by, mode="drop"))
    scores = sparse("banned", scores, lambda at, by: at.set(-jnp.inf, mode="drop"))
    return lax.cond(wants["constrained"].any(), lambda: _held(scores, wants), lambda: scores)


def _penalized(scores: Array, counts: tuple[Array, Array], wants: Wants) -> Array:
    """Repetition, frequency, presence, in this order, on the rows that count their history."""
    lanes = wants["lane"]
    output = counts[0][lanes].astype(jnp.float32)
    output = output.reshape(-1).at[wants["drafted_at"]].add(wants["drafted_by"], mode="drop").reshape(scores.shape)
    seen = (output > 0) | counts[1][lanes]
    penalty, frequency, presence = (wants[name][:, None] for name in ("repetition", "frequency", "presence"))
    part = jnp.where(seen, jnp.where(scores > 0, over(scores, penalty), scores * penalty), scores)
    part = part - times(output, frequency)
    part = part - (output > 0).astype(jnp.float32) * presence
    return jnp.where(wants["counting"][:, None], part, scores)


def _held(scores: Array, wants: Wants) -> Array:
    """Nothing but the allowed tokens on constrained rows. The sets come packed, a bit per token."""
    bits = wants["allowed"][:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    allowed = (bits > 0).reshape(len(scores), -1) | ~wants["constrained"][:, None]
    return jnp.where(allowed, scores, -jnp.inf)


# ── steps 5 to 7: the filters as one limit per row ────────────────────────────────────────────────────────────────────


def _limit(deficit: Array, wants: Wants) -> Array:
    limit = wants["limit"]
    counted, shared = wants["top_k"] > 0, wants["top_p"] < 1

    def by_count() -> Array:
        weights = jnp.ones(deficit.shape, jnp.int32)
        found = reach(deficit, weights, jnp.maximum(wants["top_k"], 1).astype(jnp.int32))
        return jnp.where(counted, jnp.minimum(limit, found), limit)

    limit = lax.cond(counted.any(), by_count, lambda: limit)

    def by_mass() -> Array:
        weights = jnp.where(deficit <= limit[:, None], masses(deficit), 0)
        total = weights.sum(1)
        wish = jnp.ceil(wants["top_p"] * total.astype(jnp.float64)).astype(jnp.int64)
        found = reach(deficit, weights, jnp.clip(wish, 1, jnp.maximum(total, 1)))
        return jnp.where(shared, jnp.minimum(limit, found), limit)

    return lax.cond(shared.any(), by_mass, lambda: limit)


def reach(deficit: Array, weights: Array, target: Array) -> Array:
    """Per row the smallest value t with sum(weights where deficit <= t) >= target.

    Floats that are not negative have the order of their bits: the range is halved until one value is left.
    """
    bits = lax.bitcast_convert_type(deficit, jnp.int32)

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        enough = jnp.where(bits <= middle[:, None], weights, 0).sum(1) >= target
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    begin = (jnp.zeros(len(bits), jnp.int32), jnp.full(len(bits), NO_BITS, jnp.int32))
    _, found = lax.fori_loop(0, 31, halve, begin)
    return lax.bitcast_convert_type(found, jnp.float32)


def masses(deficit: Array) -> Array:
    """floor(exp(-deficit) * 2^40), integers that add up exactly in any order."""
    share = jnp.where(deficit == jnp.inf, 0, jnp.exp(-deficit))
    return (jnp.where(deficit == 0, 1, share) * jnp.float32(2.0**MASS_BITS)).astype(jnp.int64)


# ── what is reported beside the token ─────────────────────────────────────────────────────────────────────────────────


def _described(deficit: Array, token: Array, wanted: Array, top: Array, vocab: int) -> list[Array]:
    """Total mass, deficit of the token, and the likeliest tokens where any row wants them."""
    count = min(MAX_TOP_LOGPROBS, vocab)

    def mass() -> Array:
        chosen = jnp.take_along_axis(deficit, token[:, None], axis=1)
        return jnp.concatenate([masses(deficit).sum(1, keepdims=True), _bits(chosen)], axis=1)

    def likeliest() -> Array:
        ranked = _bits(deficit) << 32 | jnp.arange(deficit.shape[1], dtype=jnp.int64)
        return -lax.top_k(-ranked, count)[0]

    shapes = [(len(deficit), 2), (len(deficit), count)]
    return [
        lax.cond(wanted.any(), mass, lambda: jnp.zeros(shapes[0], jnp.int64)),
        lax.cond(top > 0, likeliest, lambda: jnp.zeros(shapes[1], jnp.int64)),
    ]


def _checksums(logits: Array, lawful: Array, sums: Array, wants: Wants) -> Array:
    """63 bits over the exact bits of logits and scores."""

    def summed() -> Array:
        scores = jnp.where(lawful == 0, 0, -lawful)  # 0 - 0 is 0, never -0
        return ((_bits(logits) * sums[0]).sum(1) + (_bits(scores) * sums[1]).sum(1)) & (2**63 - 1)

    return lax.cond(wants["summed"], summed, lambda: jnp.zeros(len(logits), jnp.int64))


def _top(scores: Array) -> Array:
    best = scores.max(1)
    return jnp.where(best == 0, 0, best)  # -0.0 becomes 0.0


def _deficits(logits: Array) -> Array:
    return _top(logits)[:, None] - logits


def _bits(values: Array) -> Array:
    return lax.bitcast_convert_type(values, jnp.int32).astype(jnp.int64)
