"""Mixtures of experts in jax: the experts of every token and their weights, then one product per expert and some of its tokens.

In: a layer's weights, normed activations h of a step's tokens. Out: the weighted sum of each token's experts. The tokens of an
expert are computed in tiles of a fixed number of rows (`ShapeBucket.rows`), and the outputs of a token's experts are added in the
order of expert numbers, so neither the batch nor the grouping of tokens changes a bit. Axes: T tokens, E hidden width, F width of
an expert, `used` experts of a token.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from onedraw.backends.xla.inputs import ShapeBucket
from onedraw.backends.xla.layers import activated, gate_value, linear, over, row_sum, softcapped, times
from onedraw.backends.xla.platform import Array
from onedraw.backends.xla.weights import Weights
from onedraw.models.spec import LayerSpec, MoeSpec


def experts_of(layer: LayerSpec) -> MoeSpec | None:
    """The layer's experts, instead of a dense feed-forward or in parallel with it; None if it has none."""
    return layer.feed_forward if isinstance(layer.feed_forward, MoeSpec) else layer.parallel_experts


def choose_experts(logits: Array, weights: Weights, spec: MoeSpec) -> tuple[Array, Array]:
    """The experts of each token, in order of their numbers, and their weights, [T, used] each, from the router's logits
    [T, experts]. Of experts with equal scores the lowest numbers are used."""
    logits = logits.astype(jnp.float32)
    if spec.softcap is not None:
        logits = softcapped(logits, spec.softcap)
    if spec.scores == "sigmoid":
        scores = gate_value(logits, "sigmoid")
    else:
        exponentials = jnp.exp(logits - logits.max(1, keepdims=True))
        scores = over(exponentials, row_sum(exponentials))
    order = scores + weights["select_bias"] if spec.select_bias else scores
    ids = jnp.sort(jnp.argsort(-order, axis=1, stable=True)[:, : spec.used], axis=1).astype(jnp.int32)
    shares = jnp.take_along_axis(scores, ids, axis=1)
    if spec.normalised:
        total = shares[:, :1]
        for place in range(1, spec.used):
            total = total + shares[:, place : place + 1]
        shares = over(shares, total)
    return ids, shares * weights["expert_scale"][ids] if spec.expert_scale else shares


def run_experts(
    h: Array, ids: Array, shares: Array, weights: Weights, *, spec: MoeSpec, bucket: ShapeBucket, pieces: Array
) -> Array:
    """The sum of each token's experts `ids` with the weights `shares`, [T, E] in h's dtype. Tokens after the first `pieces`
    pieces of the step are padding; their sums are zero."""
    rows, count = bucket.rows, bucket.tokens * spec.used
    real = jnp.arange(bucket.tokens, dtype=jnp.int32) < pieces * rows
    expert_of = jnp.where(real[:, None], ids, spec.experts).reshape(-1)  # [T * used]: one entry per token and expert
    entries = jnp.argsort(expert_of, stable=True).astype(jnp.int32)  # the entries by expert, those of padding last
    sizes = (expert_of[:, None] == jnp.arange(spec.experts, dtype=jnp.int32)).sum(0, dtype=jnp.int32)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    tiles = -(-sizes // rows)
    last_tiles = jnp.cumsum(tiles, dtype=jnp.int32)

    def one(tile: Array, answers: Array) -> Array:
        expert = (last_tiles <= tile).sum(dtype=jnp.int32)
        first = ends[expert] - sizes[expert] + (tile - last_tiles[expert] + tiles[expert]) * rows
        places = first + jnp.arange(rows, dtype=jnp.int32)
        mine = entries[jnp.minimum(places, count - 1)]
        both = linear(h[mine // spec.used], weights["expert_gate_up"][expert]).astype(jnp.float32)
        mixed = activated(both[:, : spec.width], spec.activation) * both[:, spec.width :]
        answer = linear(mixed.astype(h.dtype), weights["expert_down"][expert])
        return answers.at[jnp.where(places < ends[expert], mine, count)].set(answer)  # entry `count` is never read

    answers = lax.fori_loop(0, last_tiles[-1], one, jnp.zeros((count + 1, h.shape[1]), h.dtype))
    answers = answers[:-1].reshape(bucket.tokens, spec.used, -1).astype(jnp.float32)
    out = times(answers[:, 0], shares[:, :1])
    for place in range(1, spec.used):
        out = out + times(answers[:, place], shares[:, place : place + 1])
    return (out if spec.scale == 1 else times(out, jnp.float32(spec.scale))).astype(h.dtype)
