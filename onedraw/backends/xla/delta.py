"""Gated DeltaNet in jax: the formulas of `backends/torch/ops/plain/delta.py`, with loops on the device. Everything is float32.

In: projections of the step's tokens, work lists (`inputs.py`), a layer's states. Out: the layer's output at every token, the new
states, and the state increments of drafts. Prompt positions use the chunked form, generated positions and drafts the recurrent
form. Chunks and positions are computed one after the other in fixed shapes, so neither batch nor schedule changes a bit of a row.
Axes: T tokens, Hk key heads of size Dk, Hv value heads of size Dv, C convolution channels, n = CHUNK positions. A lane is the
slot of a sequence's state; the increments of a draft are what the commit needs to repeat its update.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from onedraw.backends.xla.inputs import CHUNK, ShapeBucket
from onedraw.backends.xla.layers import activated, gate_value, row_sum, times
from onedraw.backends.xla.platform import Array
from onedraw.backends.xla.weights import Weights
from onedraw.models.spec import DeltaSpec

L2_EPS = 1e-6  # added to the sum of squares in the L2 normalization of queries and keys
BLOCK = 16  # rows of a diagonal block in the forward substitution of a chunk
HIGHEST = lax.Precision.HIGHEST
RecurrentInputs = dict[str, Any]


def delta(
    projected: Array, store: Weights, runs: RecurrentInputs, weights: Weights, spec: DeltaSpec, bucket: ShapeBucket, eps: float
) -> tuple[Array, Weights, Weights]:
    """Run the layer: projected [T, C + Hv * Dv + 2 Hv], columns of qkv, z, a and b → outputs [T, Hv * Dv], the new store, and the
    state increments of drafts."""
    heads, inner = spec.value_heads, spec.value_heads * spec.value_dim
    fed, z, a, b = jnp.split(projected, [spec.channels, spec.channels + inner, spec.channels + inner + heads], axis=1)
    windows = store["windows"].reshape(-1, spec.channels)
    source = jnp.concatenate([fed, windows, jnp.zeros((1, spec.channels), jnp.float32)])
    gated = _gate(source, a, b, runs, weights, spec)
    out = jnp.zeros((bucket.tokens, heads, spec.value_dim), jnp.float32)
    states, saved, out = _chunks(store["states"], store["saved_states"], out, gated, runs)
    states, out = _recurrent_positions(states, out, gated, runs)
    increments: Weights = {}
    if bucket.drafts:
        out, increments = _drafts(states, out, gated, runs, bucket)
        increments["fed"] = fed[runs["node_token"]]
    moved = {
        "states": states,
        "windows": store["windows"].at[runs["closing_lanes"]].set(source[runs["closings"]]),
        "saved_states": saved,
        "saved_windows": store["saved_windows"].at[runs["chunk_slot"]].set(source[runs["kept"]]),
    }
    return _close(out, z, weights, spec, eps), moved, increments


def commit(store: Weights, increments: Weights, kept: Array, drafts: RecurrentInputs) -> Weights:
    """Apply the increments of kept drafts to the states, by the same operations as in the recurrent form, so with the same
    bits."""

    def one(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        states, windows = carry
        lane = drafts["lanes"][index]
        state, window = states[lane], windows[lane]
        moved = _advance(state, increments["decay"][index], increments["key"][index], increments["change"][index])
        line = jnp.concatenate([window[1:], increments["fed"][index][None]])
        states = states.at[lane].set(jnp.where(kept[index], moved, state))
        return states, windows.at[lane].set(jnp.where(kept[index], line, window))

    states, windows = lax.fori_loop(0, drafts["count"], one, (store["states"], store["windows"]))
    return {**store, "states": states, "windows": windows}


# ------------------------------------------------------------------ convolution, gates and output norm


def _gate(source: Array, a: Array, b: Array, runs: RecurrentInputs, weights: Weights, spec: DeltaSpec) -> Weights:
    """Queries and keys [T, Hk, Dk], values [T, Hv, Dv] and gates [T, Hv] of every token."""
    total = len(a)
    mixed = source[runs["taps"][:, 0]] * weights["conv"][0]
    for tap in range(1, spec.conv):
        mixed = mixed + source[runs["taps"][:, tap]] * weights["conv"][tap]
    mixed = activated(mixed, "silu")
    keys = spec.key_heads * spec.key_dim
    q, k, v = jnp.split(mixed, [keys, 2 * keys], axis=1)
    g = weights["decay"] * gate_value(a + weights["delta_bias"], "softplus")
    return {
        "q": _unit(q.reshape(total, spec.key_heads, -1)) * spec.key_dim**-0.5,
        "k": _unit(k.reshape(total, spec.key_heads, -1)),
        "v": v.reshape(total, spec.value_heads, -1),
        "g": g,
        "decay": jnp.exp(g),
        "beta": gate_value(b, "sigmoid"),
    }


def _unit(x: Array) -> Array:
    return x * lax.rsqrt(row_sum(x * x) + L2_EPS)


def _close(out: Array, z: Array, weights: Weights, spec: DeltaSpec, eps: float) -> Array:
    scale = lax.rsqrt(row_sum(out * out) * (1 / spec.value_dim) + eps)
    normed = out * scale * weights["delta_norm"]
    return normed.reshape(len(out), -1) * activated(z, "silu")


# ------------------------------------------------------------------ state updates


def _chunks(states: Array, saved: Array, out: Array, gated: Weights, runs: RecurrentInputs) -> tuple[Array, Array, Array]:
    """Compute the chunked form for prompt positions, one chunk at a time. A partial chunk is padded with zeros, which do not
    change the state."""
    padded = {name: jnp.pad(x, ((0, CHUNK), *((0, 0),) * (x.ndim - 1))) for name, x in gated.items()}
    out = jnp.pad(out, ((0, CHUNK), (0, 0), (0, 0)))
    inside = jnp.arange(CHUNK)

    def one(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        states, saved, out = carry
        first, lane = runs["chunk_first"][index], runs["chunk_lane"][index]
        real = inside < runs["chunk_count"][index]
        tile = {}
        for name, x in padded.items():
            rows = lax.dynamic_slice_in_dim(x, first, CHUNK)
            tile[name] = jnp.where(real.reshape(-1, *(1,) * (x.ndim - 1)), rows, 0)
        state = jnp.where(runs["chunk_fresh"][index], 0, states[lane])
        state, output = _chunk(state, tile)
        old = lax.dynamic_slice_in_dim(out, first, CHUNK)
        out = lax.dynamic_update_slice_in_dim(out, jnp.where(real[:, None, None], output, old), first, 0)
        return states.at[lane].set(state), saved.at[runs["chunk_slot"][index]].set(state), out

    states, saved, out = lax.fori_loop(0, runs["chunks"], one, (states, saved, out))
    return states, saved, out[:-CHUNK]


def _chunk(state: Array, tile: Weights) -> tuple[Array, Array]:
    """Compute one chunk for all heads: state [Hv, Dk, Dv] → the state after the chunk, and the chunk's outputs [n, Hv, Dv]."""
    repeats = state.shape[0] // tile["k"].shape[1]
    q, k = (jnp.repeat(tile[name].transpose(1, 0, 2), repeats, axis=0) for name in "qk")  # [Hv, n, Dk]
    v, beta = tile["v"].transpose(1, 0, 2), tile["beta"].T[:, :, None]
    total = jnp.cumsum(tile["g"].T, axis=1)  # [Hv, n]
    lower = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
    fade = jnp.where(lower, jnp.exp(jnp.where(lower, total[:, :, None] - total[:, None], 0)), 0)
    so_far = jnp.exp(total)[:, :, None]
    products = _mul(k, k.transpose(0, 2, 1))
    system = jnp.where(jnp.tril(lower, -1), beta * products * fade, 0)
    right = beta * (v - so_far * _mul(k, state))
    changes = _solve(system, right)
    output = so_far * _mul(q, state) + _mul(_mul(q, k.transpose(0, 2, 1)) * fade, changes)
    rest = jnp.exp(total[:, -1:] - total)[:, :, None]
    state = state * so_far[:, -1:] + _mul((k * rest).transpose(0, 2, 1), changes)
    return state, output.transpose(1, 0, 2)


def _mul(left: Array, right: Array) -> Array:
    return jnp.matmul(left, right, precision=HIGHEST)


def _solve(system: Array, right: Array) -> Array:
    """Solve (1 + system) x = right [Hv, n, Dv] for x, where system [Hv, n, n] is zero on the diagonal and above, by forward
    substitution: block by block, with the inverses of the diagonal blocks. A library's triangular solve would be a call that
    other runtimes do not have."""
    heads, count = len(system), CHUNK // BLOCK
    blocks = system.reshape(heads, count, BLOCK, count, BLOCK)
    inverses = _inverted(jnp.stack([blocks[:, i, :, i] for i in range(count)], axis=1))
    sides = right.reshape(heads, count, BLOCK, -1)
    solved: list[Array] = []
    for i in range(count):
        side = sides[:, i]
        for j, known in enumerate(solved):
            side = side - _mul(blocks[:, i, :, j], known)
        solved.append(_mul(inverses[:, i], side))
    return jnp.concatenate(solved, axis=1)


def _inverted(blocks: Array) -> Array:
    """The inverses of 1 + blocks [..., m, m], which are zero on the diagonal and above, row by row."""
    identity = jnp.eye(BLOCK, dtype=jnp.float32)

    def one(row: Array, found: Array) -> Array:
        line = lax.dynamic_slice_in_dim(blocks, row, 1, axis=-2)
        return lax.dynamic_update_slice_in_dim(found, identity[row] - _mul(line, found), row, axis=-2)

    return lax.fori_loop(0, BLOCK, one, jnp.zeros_like(blocks))


def _advance(state: Array, decay: Array, key: Array, change: Array) -> Array:
    """The state after one update, state · decay + key ⊗ change. Each product is rounded before the sum, as a fused multiply-add
    would not; XLA might fuse in one program only, and then the commit, which repeats the update, would get other bits."""
    repeats = state.shape[0] // key.shape[0]
    return times(state, decay[:, None, None]) + times(jnp.repeat(key, repeats, axis=0)[:, :, None], change[:, None, :])


def _recurrent_position(state: Array, gated: Weights, token: Array) -> tuple[Array, Array, Array]:
    """Compute the recurrent form for one position: the state after it, its output [Hv, Dv], and the change written to the
    state."""
    decay, key = gated["decay"][token], gated["k"][token]
    repeats = state.shape[0] // key.shape[0]
    wide, query = jnp.repeat(key, repeats, axis=0), jnp.repeat(gated["q"][token], repeats, axis=0)  # [Hv, Dk]
    recalled = jnp.einsum("hkv,hk->hv", state * decay[:, None, None], wide, precision=HIGHEST)
    change = (gated["v"][token] - recalled) * gated["beta"][token][:, None]
    state = _advance(state, decay, key, change)
    return state, jnp.einsum("hkv,hk->hv", state, query, precision=HIGHEST), change


def _recurrent_positions(states: Array, out: Array, gated: Weights, runs: RecurrentInputs) -> tuple[Array, Array]:
    """Compute the recurrent form for generated positions, one at a time."""

    def one(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        states, out = carry
        token, lane = runs["step_token"][index], runs["step_lane"][index]
        state = jnp.where(runs["step_fresh"][index], 0, states[lane])
        state, output, _ = _recurrent_position(state, gated, token)
        return states.at[lane].set(state), out.at[token].set(output)

    return lax.fori_loop(0, runs["steps"], one, (states, out))


def _drafts(states: Array, out: Array, gated: Weights, runs: RecurrentInputs, bucket: ShapeBucket) -> tuple[Array, Weights]:
    """Compute the recurrent form for drafts, each from its parent's state. Unless the parent is the preceding draft, the parent's
    state is rebuilt from increments. Returns the outputs and the increments; the lanes' states stay unchanged."""
    tokens = runs["node_token"]
    increments = {"decay": gated["decay"][tokens], "key": gated["k"][tokens]}
    changes = jnp.zeros((bucket.drafts, *out.shape[1:]), jnp.float32)

    def one(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        work, changes, out = carry

        def replay(depth: Array, state: Array) -> Array:
            place = runs["node_path"][index, depth]
            return _advance(state, increments["decay"][place], increments["key"][place], changes[place])

        begin = jnp.where(runs["node_goes_on"][index], work, states[runs["node_lane"][index]])
        work = lax.fori_loop(0, jnp.where(runs["node_goes_on"][index], 0, runs["node_depth"][index]), replay, begin)
        work, output, change = _recurrent_position(work, gated, tokens[index])
        return work, changes.at[index].set(change), out.at[tokens[index]].set(output)

    _, changes, out = lax.fori_loop(0, runs["nodes"], one, (states[0], changes, out))
    return out, {**increments, "change": changes}
