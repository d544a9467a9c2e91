"""Layers in jax: norms, matrix products, rotary embedding, paged attention, feed-forward. Pure functions.

In: weights of a layer, activations of a step's tokens. Out: new activations of these tokens. Three rules make a token's bits
independent of the batch: every reduction is over the last axis of an array with a fixed shape (`inputs.py`); keys are read in
blocks of absolute positions, in order; masked keys add exact zeros. A tile is some queries of one sequence. Axes: T tokens, H
query heads, K KV heads, G = H / K, D size of a head, d rotary dimensions of a head, N tiles of h queries, W columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_never

import jax
import jax.numpy as jnp
from jax import lax

from onedraw.backends.xla.inputs import COLUMNS, KEYS, MAX_PRODUCT_ROWS, MIN_PRODUCT_ROWS, CompiledShapes, ShapeBucket, round_up
from onedraw.backends.xla.platform import Array
from onedraw.backends.xla.weights import Weights
from onedraw.models.spec import Activation, AttentionSpec, Gate, MlpSpec

RowArrays = tuple[Array, ...]


def in_pieces(function: Callable[..., RowArrays], bucket: ShapeBucket, pieces: Array, *arrays: Array) -> RowArrays:
    """Apply `function` to the rows of `arrays` in pieces of `bucket.rows` rows, so that its matrix products have a fixed shape.
    `pieces`: the number of pieces with tokens; the others are skipped and their results stay zero."""
    if bucket.tokens == bucket.rows:
        return function(*arrays)
    rows = bucket.rows

    def one(index: Array, found: RowArrays) -> RowArrays:
        start = index * rows
        part = function(*(lax.dynamic_slice_in_dim(array, start, rows) for array in arrays))
        return tuple(lax.dynamic_update_slice_in_dim(whole, new, start, 0) for whole, new in zip(found, part, strict=True))

    shapes = jax.eval_shape(function, *(array[:rows] for array in arrays))
    empty = tuple(jnp.zeros((bucket.tokens, *shape.shape[1:]), shape.dtype) for shape in shapes)
    return lax.fori_loop(0, pieces, one, empty)


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = lax.dot(x, weight, precision=precision, preferred_element_type=jnp.float32)
    return (out if bias is None else out + bias).astype(x.dtype)


def row_sum(x: Array) -> Array:
    """Sums over the last axis, [..., W] → [..., 1], as a matrix product with ones: the rounding of XLA's own sum depends on the
    number of rows, that of a product with several columns does not."""
    flat = x.reshape(-1, x.shape[-1])
    sums = lax.dot(flat, jnp.ones((x.shape[-1], COLUMNS), x.dtype), precision=lax.Precision.HIGHEST)
    return sums[:, :1].reshape(*x.shape[:-1], 1)


def times(x: Array, y: Array) -> Array:
    """The product x · y, rounded before it is added to anything: the `where` keeps the compiler from fusing product and sum into
    one fused multiply-add."""
    return jnp.where(jnp.isnan(x), x, x * y)


def over(x: Array, y: Array) -> Array:
    """The quotient x / y as a true division: for a broadcast y the compiler would multiply with 1 / y, which rounds twice."""
    return x / jnp.where(jnp.isnan(x), 1, y)


def rms_norm(x: Array, weight: Array | None, eps: float) -> Array:
    """RMSNorm, x / sqrt(mean(x²) + eps) · weight; None stands for a weight of ones. A float32 weight is applied before rounding
    to x's dtype, any other after it."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(row_sum(wide * wide) * (1 / x.shape[-1]) + eps)
    normed = times(wide, scale)
    if weight is None:
        return normed.astype(x.dtype)
    if weight.dtype == jnp.float32:
        return times(normed, weight).astype(x.dtype)
    return times(normed.astype(x.dtype), weight)


def rotary(x: Array, angles: Array) -> Array:
    """Rotary embedding of x [T, heads, D] by `angles` [T, 2, d/2] (cos, sin): dimension i is paired with i + d/2 (half-split),
    and dimensions from d on are unchanged."""
    half = angles.shape[-1]
    cos, sin = angles[:, :1], angles[:, 1:]
    first, second = x[..., :half], x[..., half : 2 * half]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]], axis=-1)


def activated(x: Array, activation: Activation) -> Array:
    match activation:
        case "silu":
            return x * jax.nn.sigmoid(x)
        case "gelu_tanh":
            return jax.nn.gelu(x, approximate=True)
        case _:
            assert_never(activation)


def gate_value(x: Array, gate: Gate) -> Array:
    match gate:
        case "sigmoid":
            return jax.nn.sigmoid(x)
        case "softplus":
            return jax.nn.softplus(x)
        case _:
            assert_never(gate)


def softcapped(x: Array, cap: float) -> Array:
    return times(jnp.tanh(x / cap), jnp.float32(cap))


def feed_forward(h: Array, weights: Weights, spec: MlpSpec, *, prefix: str = "") -> Array:
    """The gated feed-forward whose weights have these names, with `prefix` before them."""
    both = linear(h, weights[f"{prefix}gate_up"], weights.get(f"{prefix}gate_up_bias")).astype(jnp.float32)
    mixed = activated(both[:, : spec.width], spec.activation) * both[:, spec.width :]
    return linear(mixed.astype(h.dtype), weights[f"{prefix}down"], weights.get(f"{prefix}down_bias"))


# ------------------------------------------------------------------ attention


def project(h: Array, angles: Array, weights: Weights, spec: AttentionSpec, eps: float) -> RowArrays:
    """Queries [T, H, D], keys and values [T, K, D], and the projection [T, W] of the output gate, from normalized activations
    h. A layer that reuses the keys and values of another layer has K = 0."""
    rows, dim = len(h), spec.head_dim
    heads = 0 if spec.reuses is not None else spec.kv_heads
    counts = [spec.heads, heads, 0 if spec.keys_as_values else heads]
    out = linear(h, weights["qkv"], weights.get("qkv_bias"))
    *parts, gate = jnp.split(out, [sum(counts[:stop]) * dim for stop in (1, 2, 3)], axis=1)
    q, k, v = (part.reshape(rows, count, dim) for part, count in zip(parts, counts, strict=True))
    v = k if spec.keys_as_values else v
    if spec.qk_norm:
        q = rms_norm(q, weights["q_norm"], eps)
        k = rms_norm(k, weights["k_norm"], eps) if heads else k
    if spec.v_norm and heads:
        v = rms_norm(v, None, eps)
    angles = angles.astype(h.dtype)
    return rotary(q, angles), rotary(k, angles), v, gate


def write(pages: Weights, k: Array, v: Array, places: Array) -> Weights:
    """Write keys and values [T, K, D] to `places`, their slots counted over all pages. A value that is not finite is stored as a
    NaN key and a zero value: queries that attend to it become NaN, but masked queries are not affected, as they would be by 0 ·
    inf = NaN."""
    broken = ~jnp.isfinite(v).all(-1, keepdims=True)
    k, v = jnp.where(broken, jnp.nan, k), jnp.where(broken, 0, v)
    return {"keys": pages["keys"].at[places].set(k), "values": pages["values"].at[places].set(v)}


def attend(
    q: Array, pages: Weights, inputs: dict[str, Any], bucket: ShapeBucket, shape: CompiledShapes, spec: AttentionSpec
) -> Array:
    """Attention of queries q [T, H, D] over the pages of a layer → [T, H * D]."""
    group = shape.windows.index(spec.window)
    kv, per, dim = spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim
    height = round_up(per * bucket.tile, MIN_PRODUCT_ROWS)
    most = MAX_PRODUCT_ROWS if bucket.rows <= MAX_PRODUCT_ROWS else height
    tiles = (q.astype(jnp.float32) * spec.scale).astype(q.dtype)[inputs["tile_queries"]]  # [N, h, H, D]
    tiles = tiles.reshape(-1, bucket.tile, kv, per, dim).transpose(0, 2, 3, 1, 4).reshape(-1, kv, per * bucket.tile, dim)
    tiles = jnp.pad(tiles, ((0, 0), (0, 0), (0, height - per * bucket.tile), (0, 0)))
    # The last position that each query attends to, [N, G * h].
    ends = jnp.tile(inputs["positions"][inputs["tile_queries"]], (1, per))
    ends = jnp.pad(ends, ((0, 0), (0, height - per * bucket.tile)))

    def step(number: Array, out: Array) -> Array:
        def part(array: Array) -> Array:
            return lax.dynamic_slice_in_dim(array, number * bucket.step, bucket.step)

        rows = (part(inputs["tile_rows"]), part(inputs["tile_tails"]), part(inputs["tile_paths"]))
        queries, last = part(tiles), part(ends)

        def block(index: Array, carry: RowArrays) -> RowArrays:
            positions = index * KEYS + jnp.arange(KEYS, dtype=jnp.int32)
            places = _places(positions, rows, inputs["tables"][group], shape)
            seen = positions <= last[:, :, None]
            if spec.window is not None:
                seen &= positions > last[:, :, None] - spec.window
            return _block(queries, pages["keys"][places], pages["values"][places], seen[:, None], carry, most)

        none = (bucket.step, kv, height)
        carry = (jnp.full(none, -jnp.inf, jnp.float32), jnp.zeros(none, jnp.float32), jnp.zeros((*none, dim), jnp.float32))
        _, total, mixed = lax.fori_loop(inputs["first_blocks"][group, number], inputs["last_blocks"][number], block, carry)
        found = mixed / jnp.where(total == 0, 1, total)[..., None]
        return lax.dynamic_update_slice_in_dim(out, found, number * bucket.step, 0)

    out = jnp.zeros((bucket.tiles, kv, height, dim), jnp.float32)
    if bucket.tiles == bucket.step:
        out = step(jnp.int32(0), out)
    else:
        out = lax.fori_loop(0, inputs["tile_steps"], step, out)
    out = out[:, :, : per * bucket.tile]
    out = out.reshape(-1, kv, per, bucket.tile, dim).transpose(0, 3, 1, 2, 4).reshape(bucket.tiles * bucket.tile, -1)
    return out[inputs["token_slots"]].astype(q.dtype)


def _places(positions: Array, rows: RowArrays, table: Array, shape: CompiledShapes) -> Array:
    """Slots of each tile's keys, counted over all pages, [tiles, KEYS]: known positions first, then the drafts on the path of a
    node of a draft tree."""
    row, tail, path = rows
    depth = jnp.clip(positions - tail[:, None], 0, path.shape[1] - 1)
    slots = jnp.where(positions < tail[:, None], positions, tail[:, None] + jnp.take_along_axis(path, depth, axis=1))
    page = jnp.minimum(slots // shape.page_size, shape.table - 1)
    return table[row[:, None], page] * shape.page_size + slots % shape.page_size


def _block(queries: Array, keys: Array, values: Array, seen: Array, carry: RowArrays, most: int) -> RowArrays:
    """Add a block of keys to the online softmax, whose state `carry` is the maximum, the sum and the weighted values so far. A
    fully masked block changes no bit. `most`: the most rows of a product."""
    peak, total, mixed = carry
    precision = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None
    dots: dict[str, Any] = {"precision": precision, "preferred_element_type": jnp.float32}

    def product(pattern: str, left: Array, right: Array) -> Array:
        parts = (left[:, :, start : start + most] for start in range(0, left.shape[2], most))
        return jnp.concatenate([jnp.einsum(pattern, part, right, **dots) for part in parts], axis=2)

    scores = product("nkmd,nbkd->nkmb", queries, keys)
    scores = jnp.where(seen, scores, -jnp.inf)
    top = jnp.maximum(peak, scores.max(-1))
    base = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.where(seen, jnp.exp(scores - base[..., None]), 0)
    scale = jnp.where(peak == top, 1, jnp.exp(peak - base))
    scale = jnp.where(peak == -jnp.inf, 0, scale)
    added = product("nkmb,nbkd->nkmd", weights.astype(values.dtype), values)
    return top, total * scale + row_sum(weights)[..., 0], mixed * scale[..., None] + added
