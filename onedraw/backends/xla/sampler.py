"""Sampling on the device for a slab of positions, by the rule of `sampling/law.py`.

In: residuals of picked tokens (or logits saved with checkpoints) and XlaSamplingInputs. Out: one row of integers per position
(columns in `backends/sampled_rows.py`), the saved logits, and the sampled tokens, which the commit reads on the device. Axes: C
positions of a slab, E hidden width, V tokens of the vocabulary, V' V with padding. A lane is the slot in which a sequence's
tokens are counted.

A slab is a fixed number of positions. One program contains every sampling feature; features that no row of a slab uses are
skipped on the device. Sums over the vocabulary are sums of integers, and thresholds are found by bisection over float bits, so a
row's result does not depend on the other rows. A deficit is the best score minus a token's score; for sampling, but not for the
model's own logprobs, it is divided by the temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from onedraw.backends.sampled_rows import CountedHistory, SamplingPosition
from onedraw.backends.xla.inputs import round_up
from onedraw.backends.xla.layers import linear, over, rms_norm, softcapped, times
from onedraw.backends.xla.platform import Array
from onedraw.models.spec import ModelSpec
from onedraw.sampling.adjustments import HistoryTokens, adjustment, valid_ids
from onedraw.sampling.law import NO_TOKEN, filters
from onedraw.sampling.logprobs import MASS_BITS, NOT_ASKED, asked_columns
from onedraw.sampling.noise import BITS, HALF, MULTIPLIERS_32, SHIFTS_32, key
from onedraw.types import MAX_LOGPROB_TOKEN_IDS, MAX_TOP_LOGPROBS

# Lengths of the sparse (row, token, value) lists that the program is compiled for. The smallest sufficient one is used, or a
# multiple of the last.
SPARSE = (256, 4096, 65536, 2**20)
OFF = 2.0  # a value of top-p that stands for "not used"
INFINITY_BITS = 0x7F800000  # the bits of float32 infinity, which is the largest deficit
COUNT_BATCH = 512  # (lane, token) pairs per call of the program that updates token counts

Entries = list[tuple[int, int, float]]
XlaSamplingInputs = dict[str, Any]


def logits_of(weights: dict[str, Any], x: Array, *, spec: ModelSpec) -> Array:
    """Float32 logits [C, V'] of residuals x [C, E]; the padding after the vocabulary is -inf."""
    hidden = rms_norm(x, weights["norm"], spec.eps).astype(weights["head"].dtype)
    logits = linear(hidden, weights["head"]).astype(jnp.float32)
    vocab, logits = spec.vocab, logits if spec.softcap is None else softcapped(logits, spec.softcap)
    return jnp.where(jnp.arange(logits.shape[1]) < vocab, logits, -jnp.inf)


def sample(
    weights: dict[str, Any],
    sums: Array,
    saved: Array,
    sampled: Array,
    counts: tuple[Array, Array],
    picked: Array,
    slab: dict[str, Any],
    inputs: XlaSamplingInputs,
    *,
    rows: int,
    spec: ModelSpec,
) -> tuple[Array, Array, Array]:
    """Sample picks [offset, offset + rows) of the step. Returns the logits saved for checkpoints, all sampled tokens so far, and
    the result rows of this slab."""
    x = lax.dynamic_slice_in_dim(picked, slab["offset"], rows)
    logits = logits_of(weights, x, spec=spec)
    logits = jnp.where((slab["restore"] >= 0)[:, None], saved[jnp.maximum(slab["restore"], 0)], logits)
    saved = saved.at[slab["keep"]].set(logits)
    results = sample_rows(logits, sums, counts, inputs, vocab=spec.vocab)
    return saved, lax.dynamic_update_slice_in_dim(sampled, results[:, 0].astype(jnp.int32), slab["offset"], 0), results


def sample_rows(logits: Array, sums: Array, counts: tuple[Array, Array], inputs: XlaSamplingInputs, *, vocab: int) -> Array:
    """Return a result row per position, [C, 7 + n + m] int64: token, checksum, then the columns of `sampling/logprobs.py` (total
    mass, deficit of the token, three for the logprobs mode "both", the n most likely tokens, and m tokens asked for by id). n and
    m are the most that a request may ask for."""
    scores = adjusted(logits, counts, inputs)
    best = _top(scores)
    valid = (best > -jnp.inf) & (best < jnp.inf) & (logits.max(1) < jnp.inf)
    deficit = over(best[:, None] - scores, inputs["divisor"][:, None])
    limit = _limit(deficit, inputs)[:, None]
    filtered = jnp.where(deficit > limit, jnp.inf, deficit)
    noise = lax.cond(inputs["noisy"].any(), lambda: gumbel(inputs["keys"], logits.shape[1]), lambda: jnp.zeros_like(logits))
    values = jnp.where(inputs["noisy"][:, None], noise, 0) - filtered
    token = jnp.argmax(values, axis=1).astype(jnp.int64)
    token = jnp.where(inputs["forced"] >= 0, inputs["forced"], token)
    parts = [jnp.where(valid, token, NO_TOKEN)[:, None], _checksums(logits, filtered, sums, inputs)[:, None]]
    seen = jnp.where(inputs["raw"][:, None], _deficits(logits), filtered)
    kept = _kept_columns(filtered, deficit, token, inputs["both"])
    parts += _logprob_columns(seen, token, inputs["raw"] | inputs["processed"], kept, inputs["top"], vocab)
    return jnp.concatenate([*parts, _asked_columns(seen, inputs["asked"])], axis=1)


def score(weights: dict[str, Any], x: Array, index: Array, tokens: Array, top: Array, *, spec: ModelSpec) -> Array:
    """The raw logprobs of given tokens, each predicted at position `index` of the step, as result rows. They are for prompt
    logprobs."""
    deficit = _deficits(logits_of(weights, x[index], spec=spec))
    nothing, kept = jnp.zeros((len(index), 2), jnp.int64), jnp.zeros((len(index), 3), jnp.int64)
    return jnp.concatenate(
        [nothing, *_logprob_columns(deficit, tokens, jnp.ones(len(index), bool), kept, top, spec.vocab)], axis=1
    )


# ── steps 1 to 3 of the sampling rule in `sampling/law.py`: bias, penalties, bans
# ────────────────────────────────────────────────────────────


def adjusted(logits: Array, counts: tuple[Array, Array], inputs: XlaSamplingInputs) -> Array:
    def sparse(name: str, scores: Array, change: Any) -> Array:
        flat = scores.reshape(-1)
        changed = lambda: change(flat.at[inputs[f"{name}_at"]], inputs[f"{name}_by"]).reshape(scores.shape)  # noqa: E731
        return lax.cond(inputs[f"{name}_any"], changed, lambda: scores)

    scores = sparse("bias", logits, lambda at, by: at.add(by, mode="drop"))
    scores = lax.cond(inputs["counting"].any(), lambda: _penalized(scores, counts, inputs), lambda: scores)
    scores = sparse("dry", scores, lambda at, by: at.add(-by, mode="drop"))
    scores = sparse("banned", scores, lambda at, by: at.set(-jnp.inf, mode="drop"))
    return lax.cond(inputs["constrained"].any(), lambda: _constrain(scores, inputs), lambda: scores)


def _penalized(scores: Array, counts: tuple[Array, Array], inputs: XlaSamplingInputs) -> Array:
    """Apply repetition, frequency and presence penalty, in this order, to rows that use one of them."""
    lanes = inputs["lane"]
    output = counts[0][lanes].astype(jnp.float32)
    output = output.reshape(-1).at[inputs["drafted_at"]].add(inputs["drafted_by"], mode="drop").reshape(scores.shape)
    seen = (output > 0) | counts[1][lanes]
    penalty, frequency, presence = (inputs[name][:, None] for name in ("repetition", "frequency", "presence"))
    part = jnp.where(seen, jnp.where(scores > 0, over(scores, penalty), scores * penalty), scores)
    part = part - times(output, frequency)
    part = part - (output > 0).astype(jnp.float32) * presence
    return jnp.where(inputs["counting"][:, None], part, scores)


def _constrain(scores: Array, inputs: XlaSamplingInputs) -> Array:
    """Ban all tokens but the allowed ones in constrained rows. The masks are packed, one bit per token."""
    bits = inputs["allowed"][:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    allowed = (bits > 0).reshape(len(scores), -1) | ~inputs["constrained"][:, None]
    return jnp.where(allowed, scores, -jnp.inf)


# ── steps 5 to 7: min-p, top-k and top-p as one limit per row ────────────────────────────────────────────────────────────


def _limit(deficit: Array, inputs: XlaSamplingInputs) -> Array:
    limit = inputs["limit"]
    has_top_k, has_top_p = inputs["top_k"] > 0, inputs["top_p"] < 1

    def by_count() -> Array:
        weights = jnp.ones(deficit.shape, jnp.int32)
        found = threshold(deficit, weights, jnp.maximum(inputs["top_k"], 1).astype(jnp.int32))
        return jnp.where(has_top_k, jnp.minimum(limit, found), limit)

    limit = lax.cond(has_top_k.any(), by_count, lambda: limit)

    def by_mass() -> Array:
        weights = jnp.where(deficit <= limit[:, None], masses(deficit), 0)
        total = weights.sum(1)
        goal = jnp.ceil(inputs["top_p"] * total.astype(jnp.float64)).astype(jnp.int64)
        found = threshold(deficit, weights, jnp.clip(goal, 1, jnp.maximum(total, 1)))
        return jnp.where(has_top_p, jnp.minimum(limit, found), limit)

    return lax.cond(has_top_p.any(), by_mass, lambda: limit)


def threshold(deficit: Array, weights: Array, target: Array) -> Array:
    """For each row, the smallest t for which the weights of tokens with deficit <= t add up to at least `target`.

    It is found by bisection over float bits, because non-negative floats are ordered like their bits.
    """
    bits = lax.bitcast_convert_type(deficit, jnp.int32)

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        enough = jnp.where(bits <= middle[:, None], weights, 0).sum(1) >= target
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    begin = (jnp.zeros(len(bits), jnp.int32), jnp.full(len(bits), INFINITY_BITS, jnp.int32))
    _, found = lax.fori_loop(0, 31, halve, begin)
    return lax.bitcast_convert_type(found, jnp.float32)


def masses(deficit: Array) -> Array:
    """Probability masses floor(exp(-deficit) * 2^40). Their sums are exact in any order, because they are integers."""
    share = jnp.where(deficit == jnp.inf, 0, jnp.exp(-deficit))
    return (jnp.where(deficit == 0, 1, share) * jnp.float32(2.0**MASS_BITS)).astype(jnp.int64)


# ── logprobs and checksums ────────────────────────────────────────────────────────────


def _kept_columns(filtered: Array, deficit: Array, token: Array, wanted: Array) -> Array:
    """Columns for the logprobs mode "both" (before and after the filters), [C, 3]: the mass of the kept tokens, the deficit of
    the token among them, and the mass before the filters; zeros if no row has that mode."""

    def found() -> Array:
        sampled = jnp.take_along_axis(filtered, token[:, None], axis=1)
        totals = [masses(one).sum(1, keepdims=True) for one in (filtered, deficit)]
        return jnp.concatenate([totals[0], _bits(sampled), totals[1]], axis=1)

    return lax.cond(wanted.any(), found, lambda: jnp.zeros((len(filtered), 3), jnp.int64))


def _logprob_columns(deficit: Array, token: Array, wanted: Array, kept: Array, top: Array, vocab: int) -> list[Array]:
    """Columns for logprobs: total mass, deficit of the token, the columns `kept`, and the most likely tokens; zeros if no row
    requests them."""
    count = min(MAX_TOP_LOGPROBS, vocab)

    def mass() -> Array:
        sampled = jnp.take_along_axis(deficit, token[:, None], axis=1)
        return jnp.concatenate([masses(deficit).sum(1, keepdims=True), _bits(sampled)], axis=1)

    def likeliest() -> Array:
        ranked = _bits(deficit) << 32 | jnp.arange(deficit.shape[1], dtype=jnp.int64)
        return -lax.top_k(-ranked, count)[0]

    shapes = [(len(deficit), 2), (len(deficit), count)]
    return [
        lax.cond(wanted.any(), mass, lambda: jnp.zeros(shapes[0], jnp.int64)),
        kept,
        lax.cond(top > 0, likeliest, lambda: jnp.zeros(shapes[1], jnp.int64)),
    ]


def _asked_columns(deficit: Array, asked: Array) -> Array:
    """Columns for the tokens that rows ask for by id, [C, ids]; where `asked` is -1 the deficit is infinite."""

    def found() -> Array:
        own = jnp.take_along_axis(deficit, jnp.maximum(asked, 0), axis=1)
        return jnp.where(asked >= 0, _bits(own) << 32 | asked.astype(jnp.int64), NOT_ASKED)

    return lax.cond((asked >= 0).any(), found, lambda: jnp.full(asked.shape, NOT_ASKED, jnp.int64))


def _checksums(logits: Array, filtered: Array, sums: Array, inputs: XlaSamplingInputs) -> Array:
    """The 63-bit checksums of the exact bits of logits and filtered scores, [C]; zeros if no row requests them."""

    def summed() -> Array:
        scores = jnp.where(filtered == 0, 0, -filtered)  # the rule computes 0 - deficit, which is never -0
        return ((_bits(logits) * sums[0]).sum(1) + (_bits(scores) * sums[1]).sum(1)) & (2**63 - 1)

    return lax.cond(inputs["summed"], summed, lambda: jnp.zeros(len(logits), jnp.int64))


def _top(scores: Array) -> Array:
    best = scores.max(1)
    return jnp.where(best == 0, 0, best)  # this turns -0.0 into 0.0


def _deficits(logits: Array) -> Array:
    return _top(logits)[:, None] - logits


def _bits(values: Array) -> Array:
    return lax.bitcast_convert_type(values, jnp.int32).astype(jnp.int64)


# ---------------------------------------------------------------------- noise: the integers of `sampling/noise.py`


def uniform_bits(keys: Array, vocab: int) -> Array:
    """24 uniform bits for every token id, hashed from keys [C, 2] uint32: [C, V] uint32."""
    words = jnp.arange(vocab, dtype=jnp.uint32)[None] ^ keys[:, :1]
    words = _mix32(words) + keys[:, 1:]
    return _mix32(words) >> (32 - BITS)


def gumbel(keys: Array, vocab: int) -> Array:
    """Gumbel noise -log(-log u) for every token id, from keys [C, 2] uint32: [C, V] float32."""
    bits = uniform_bits(keys, vocab)
    whole = bits.astype(jnp.float32)
    below = (whole + 0.5) * 2.0**-BITS  # the uniform number u, exact in the lower half
    above = jnp.minimum((2.0**BITS - whole - 0.5) * 2.0**-BITS, 0.5)  # 1 - u, exact in the upper half
    return -jnp.log(-jnp.where(bits < HALF, jnp.log(below), jnp.log1p(-above)))


def _mix32(words: Array) -> Array:
    first, second, third = SHIFTS_32
    words = (words ^ words >> first) * jnp.uint32(MULTIPLIERS_32[0])
    words = (words ^ words >> second) * jnp.uint32(MULTIPLIERS_32[1])
    return words ^ words >> third


# ---------------------------------------------------------------------- host: sampling parameters as arrays


class DryHistories:
    """The token history of each lane's request, indexed for the DRY penalty and banned words. Owner: the backend."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, HistoryTokens]] = {}

    def of(self, position: SamplingPosition) -> HistoryTokens | None:
        if position.params.dry is None and not position.params.bad_words:
            return None
        known = self._known.get(position.lane)
        if known is None or known[0] != position.request_id:
            known = self._known[position.lane] = (position.request_id, HistoryTokens())
        return known[1]


def sampling_inputs(
    positions: Sequence[SamplingPosition], histories: DryHistories, *, rows: int, vocab: int, width: int, lanes: int
) -> dict[str, Any]:
    """The sampling parameters as arrays of `rows` rows: one row per position, then padding with values that change nothing."""
    inputs = _dense(positions, rows, vocab, lanes)
    host = [adjustment(p.params, p.history, p.drafts, histories.of(p)) for p in positions]
    bias: Entries = [(row, t, v) for row, p in enumerate(positions) for t, v in p.params.logit_bias if 0 <= t < vocab]
    dry: Entries = [(row, token, value) for row, known in enumerate(host) for token, value in known.penalized]
    banned: Entries = [(row, token, 0.0) for row, known in enumerate(host) for token in valid_ids(known.banned, vocab)]
    drafted: Entries = [(row, token, 1.0) for row, p in enumerate(positions) if p.params.counts_history for token in p.drafts]
    most = max(map(len, (bias, dry, banned, drafted)))
    size = next((size for size in SPARSE if size >= most), round_up(most, SPARSE[-1]))
    for name, entries in (("bias", bias), ("dry", dry), ("banned", banned), ("drafted", drafted)):
        places = np.full(size, rows * width, dtype=np.int32)
        values = np.zeros(size, dtype=np.float32)
        if entries:
            at, tokens, by = zip(*entries, strict=True)
            places[: len(entries)] = np.asarray(at) * width + np.asarray(tokens)
            values[: len(entries)] = by
        inputs[f"{name}_at"], inputs[f"{name}_by"], inputs[f"{name}_any"] = places, values, np.bool_(bool(entries))
    words = np.zeros((rows, width // 32), dtype=np.uint32)
    for row, known in enumerate(host):
        if known.allowed is not None:
            inputs["constrained"][row] = True
            words[row, : len(known.allowed)] = known.allowed[: width // 32]
    inputs["allowed"] = words
    return inputs


def _dense(positions: Sequence[SamplingPosition], rows: int, vocab: int, lanes: int) -> dict[str, Any]:
    """Every parameter as an array with one value per row; padding rows have values that change nothing."""

    def column(values: Sequence[Any], neutral: Any, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.asarray([*values, *[neutral] * (rows - len(values))], dtype=dtype)

    params = [p.params for p in positions]
    chains = [filters(p, vocab) for p in params]
    float32, boolean = np.float32, np.bool_
    shares = [f.top_p if f.top_p < 1 else OFF for f in chains]
    words = [key(p.params.seed, p.at) for p in positions]
    raw = [p.logprobs is not None and p.logprobs_mode in ("raw", "both") for p in params]
    both = [p.logprobs is not None and p.logprobs_mode == "both" for p in params]
    processed = [p.logprobs is not None and p.logprobs_mode == "processed" for p in params]
    return {
        "keys": np.asarray([*words, *[(0, 0)] * (rows - len(words))], dtype=np.uint32),
        "noisy": column([not p.greedy for p in params], False, boolean),
        "divisor": column([f.divisor for f in chains], 1.0, float32),
        "limit": column([f.limit for f in chains], np.inf, float32),
        "top_k": column([f.top_k for f in chains], 0, np.int64),
        "top_p": column(shares, OFF, np.float64),
        "lane": column([p.lane for p in positions], lanes, np.int32),
        "counting": column([p.counts_history for p in params], False, boolean),
        "repetition": column([p.repetition_penalty for p in params], 1.0, float32),
        "frequency": column([p.frequency_penalty for p in params], 0.0, float32),
        "presence": column([p.presence_penalty for p in params], 0.0, float32),
        "constrained": np.zeros(rows, dtype=boolean),
        "forced": column([p.forced for p in positions], NO_TOKEN, np.int64),
        "raw": column(raw, False, boolean),
        "both": column(both, False, boolean),
        "processed": column(processed, False, boolean),
        "top": np.int32(max((p.logprobs or 0 for p in params), default=0)),
        "asked": asked_columns([p.asked for p in positions], rows=rows, columns=MAX_LOGPROB_TOKEN_IDS),
        "summed": np.bool_(any(p.checksums for p in params)),
    }


# ---------------------------------------------------------------------- token counts for the penalties


@partial(jax.jit, donate_argnums=(0, 1))
def add_counts(output: Array, prompt: Array, new_lanes: Array, grown: Array, prompted: Array) -> tuple[Array, Array]:
    """Clear the counts of lanes in `new_lanes`, then count the tokens of output (`grown`) and prompt (`prompted`), which are
    given as rows of (lane, token)."""
    output, prompt = jnp.where(new_lanes[:, None], 0, output), jnp.where(new_lanes[:, None], False, prompt)
    return output.at[grown[:, 0], grown[:, 1]].add(1), prompt.at[prompted[:, 0], prompted[:, 1]].set(True)


class XlaTokenCounts:
    """Token counts [lanes + 1, V'] for the penalties: how often each token occurs in the output of each lane's request, and
    whether it occurs in its prompt. Owner: the backend."""

    def __init__(self, *, width: int, lanes: int, device: jax.Device) -> None:
        self.output = jax.device_put(np.zeros((lanes + 1, width), np.int32), device)
        self.prompt = jax.device_put(np.zeros((lanes + 1, width), np.bool_), device)
        self._counted: list[CountedHistory | None] = [None] * lanes
        self._lanes = lanes

    @property
    def arrays(self) -> tuple[Array, Array]:
        return self.output, self.prompt

    def follow(self, positions: Sequence[SamplingPosition]) -> None:
        """Update the counts of the lanes whose positions use penalties. For a lane that continues its request, only new tokens
        are counted."""
        new_lanes = np.zeros(self._lanes + 1, dtype=np.bool_)
        grown: list[tuple[int, int]] = []
        prompted: list[tuple[int, int]] = []
        for position in positions:
            if not position.params.counts_history:
                continue
            history, counted, lane = position.history, self._counted[position.lane], position.lane
            start = len(history.prompt)
            if counted is None or not counted.is_prefix_of(position):
                new_lanes[lane] = True
                prompted += [(lane, token) for token in history.prompt]
            else:
                start = counted.known
            grown += [(lane, token) for token in history.slice(start, len(history))]
            self._counted[lane] = CountedHistory(position.request_id, history.prompt, len(history))
        for part in range(-(-max(len(grown), len(prompted), int(new_lanes.any())) // COUNT_BATCH)):
            pairs = self._part(grown, part), self._part(prompted, part)
            self.output, self.prompt = add_counts(self.output, self.prompt, new_lanes & (part == 0), *pairs)

    def _part(self, pairs: list[tuple[int, int]], part: int) -> Any:
        found = np.full((COUNT_BATCH, 2), (self._lanes, 0), dtype=np.int32)
        here = pairs[part * COUNT_BATCH : (part + 1) * COUNT_BATCH]
        if here:
            found[: len(here)] = here
        return found
