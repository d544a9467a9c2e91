"""Choosing tokens on the device for a slab of positions, by the law of `sampling/law.py`.

In: residuals of picked tokens (or logits kept with checkpoints) and SamplingInputs. Out: a row of integers per position
(`backends/sampled_rows.py`), the kept logits, and the chosen tokens, which the commit reads without the host in between.

One program has everything; what no row of a slab asks for is skipped on the device. Sums over the vocabulary are sums of
integers and thresholds are found by halving the range of float bits, so nothing depends on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from onedraw.backends.sampled_rows import SamplingPosition
from onedraw.backends.xla.inputs import round_up
from onedraw.backends.xla.layers import linear, over, rms_norm, times
from onedraw.backends.xla.platform import Array
from onedraw.sampling.adjustments import Recall, adjustment, inside
from onedraw.sampling.law import MASS_BITS, NO_TOKEN, filters
from onedraw.sampling.noise import BITS, HALF, MULTIPLIERS_32, SHIFTS_32, key
from onedraw.types import MAX_TOP_LOGPROBS

# -------------------- What the positions of a slab ask of the law, as arrays of fixed shapes.


# How many sparse entries a program is compiled for: the smallest that holds them; past the last, a multiple of it.
SPARSE = (256, 4096, 65536, 2**20)
OFF = 2.0  # a top-p that filters nothing
Entries = list[tuple[int, int, float]]


class DryHistories:
    """Histories as arrays, one per lane, for DRY. Owner: the sampler."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, Recall]] = {}

    def of(self, position: SamplingPosition) -> Recall | None:
        if position.params.dry is None:
            return None
        known = self._known.get(position.lane)
        if known is None or known[0] != position.request_id:
            known = self._known[position.lane] = (position.request_id, Recall())
        return known[1]


def sampling_inputs(
    positions: Sequence[SamplingPosition], recalls: DryHistories, *, rows: int, vocab: int, width: int, lanes: int
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


def _dense(positions: Sequence[SamplingPosition], rows: int, vocab: int, lanes: int) -> dict[str, Any]:
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


# -------------------- The noise of `sampling/noise.py` for many positions at once: the same integers, XLA's loga


def uniform_bits(keys: Array, vocab: int) -> Array:
    """24 uniform bits for every token id.   [C, 2] uint32 -> [C, V] uint32"""
    words = jnp.arange(vocab, dtype=jnp.uint32)[None] ^ keys[:, :1]
    words = _mix32(words) + keys[:, 1:]
    return _mix32(words) >> (32 - BITS)


def gumbel(keys: Array, vocab: int) -> Array:
    """-log(-log u) for every token id.   [C, 2] uint32 -> [C, V] float32"""
    bits = uniform_bits(keys, vocab)
    whole = bits.astype(jnp.float32)
    below = (whole + 0.5) * 2.0**-BITS  # u, exact in the lower half
    above = jnp.minimum((2.0**BITS - whole - 0.5) * 2.0**-BITS, 0.5)  # 1 - u, exact in the upper half
    return -jnp.log(-jnp.where(bits < HALF, jnp.log(below), jnp.log1p(-above)))


def _mix32(words: Array) -> Array:
    first, second, third = SHIFTS_32
    words = (words ^ words >> first) * jnp.uint32(MULTIPLIERS_32[0])
    words = (words ^ words >> second) * jnp.uint32(MULTIPLIERS_32[1])
    return words ^ words >> third


# -------------------- Choosing tokens on the device for a slab of positions, by the law of `sampling/law.py`.


SamplingInputs = dict[str, Any]
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
    wants: SamplingInputs,
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


def answer(logits: Array, sums: Array, counts: tuple[Array, Array], wants: SamplingInputs, *, vocab: int) -> Array:
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


def adjusted(logits: Array, counts: tuple[Array, Array], wants: SamplingInputs) -> Array:
    def sparse(name: str, scores: Array, change: Any) -> Array:
        flat = scores.reshape(-1)
        changed = lambda: change(flat.at[wants[f"{name}_at"]], wants[f"{name}_by"]).reshape(scores.shape)  # noqa: E731
        return lax.cond(wants[f"{name}_any"], changed, lambda: scores)

    scores = sparse("bias", logits, lambda at, by: at.add(by, mode="drop"))
    scores = lax.cond(wants["counting"].any(), lambda: _penalized(scores, counts, wants), lambda: scores)
    scores = sparse("lost", scores, lambda at, by: at.add(-by, mode="drop"))
    scores = sparse("banned", scores, lambda at, by: at.set(-jnp.inf, mode="drop"))
    return lax.cond(wants["constrained"].any(), lambda: _held(scores, wants), lambda: scores)


def _penalized(scores: Array, counts: tuple[Array, Array], wants: SamplingInputs) -> Array:
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


def _held(scores: Array, wants: SamplingInputs) -> Array:
    """Nothing but the allowed tokens on constrained rows. The sets come packed, a bit per token."""
    bits = wants["allowed"][:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    allowed = (bits > 0).reshape(len(scores), -1) | ~wants["constrained"][:, None]
    return jnp.where(allowed, scores, -jnp.inf)


# ── steps 5 to 7: the filters as one limit per row ────────────────────────────────────────────────────────────────────


def _limit(deficit: Array, wants: SamplingInputs) -> Array:
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


def _checksums(logits: Array, lawful: Array, sums: Array, wants: SamplingInputs) -> Array:
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
