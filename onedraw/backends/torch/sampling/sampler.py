"""Samples tokens for many positions at once, by the sampling rule of `sampling/law.py`.

In: logits [C, V'] and for each row its parameters, history and drafts. Out: a SampledToken per row, or None where the rule left
no token. A row's token, logprobs and checksum have the same bits whatever the other rows are (see `exact.py`).

Work that no row needs is skipped, and work that some rows need is done on those rows alone. Nothing is copied to the host before
the end, when one small integer tensor holds all results. A row is one position to sample at; a slab is as many rows as are
processed at once; a lane is the slot in which a sequence's tokens are counted. A token's deficit is the best score minus its own,
divided by the temperature. Axes: C rows; V tokens of the vocabulary, padded to whole vectors (`exact.padded`); V' columns of the
given logits, which may have padding of the model's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from onedraw.backends.sampled_rows import (
    CHECKSUM,
    TOKEN,
    CountedHistory,
    SamplingPosition,
    read_samples,
)
from onedraw.backends.torch.runner.staging_buffers import Staging
from onedraw.backends.torch.sampling.exact import (
    Scratch,
    apply_elementwise,
    drop_beyond,
    first_best,
    likeliest,
    masses,
    padded,
    reach,
)
from onedraw.sampling.adjustments import HistoryTokens, adjustment, valid_ids
from onedraw.sampling.law import NO_TOKEN, checksum_weights, filters
from onedraw.sampling.logprobs import (
    ALL_TOTAL,
    KEPT_SAMPLED,
    KEPT_TOTAL,
    NOT_ASKED,
    SAMPLED,
    TOP,
    TOTAL,
    asked_columns,
    read_logprobs,
)
from onedraw.sampling.noise import BITS, MULTIPLIERS_32, SHIFTS_32, key
from onedraw.types import Logprobs, SampledToken, TokenMask


class LaneCounts:
    """How often tokens occur in the output of each lane, and whether they occur in its prompt. It is made when the first position
    with penalties is sampled. Token ids from `vocab` on are not counted: the sampler of a drafter may know only the first tokens
    of the vocabulary. Owner: the sampler."""

    def __init__(self, *, vocab: int, lanes: int, device: torch.device) -> None:
        # There is one lane more than needed: padding of a step is counted there and never read.
        self.output = torch.zeros(lanes + 1, vocab, dtype=torch.int32, device=device)
        self.prompt = torch.zeros(lanes + 1, vocab, dtype=torch.bool, device=device)
        self._marks: list[CountedHistory | None] = [None] * lanes
        self._vocab, self._device = vocab, device

    def read(self, places: Sequence[SamplingPosition]) -> tuple[Tensor, Tensor]:
        """Counts in the output, and whether a token is in prompt or output, drafts included.   [C, V] each"""
        _add(self.output, self.grown(places))
        lanes = torch.tensor([place.lane for place in places], device=self._device)
        counts = self.output[lanes]
        _add(counts, [(row, token) for row, place in enumerate(places) for token in place.drafts if token < self._vocab])
        return counts, (counts > 0).logical_or_(self.prompt[lanes])

    def grown(self, places: Sequence[SamplingPosition]) -> list[tuple[int, int]]:
        """The tokens by which the histories of these lanes have grown since the last call, as (lane, token). The caller adds them
        to `output`. A lane that belonged to another request is cleared first."""
        grown: list[tuple[int, int]] = []
        before: SamplingPosition | None = None
        for place in places:
            if before is not None and place.history is before.history and place.lane == before.lane:
                continue  # The position before this one was of the same sequence.
            before = place
            history, mark = place.history, self._marks[place.lane]
            known = len(history)
            if mark is None or not mark.is_prefix_of(place):
                self._open(place.lane, history.prompt)
                start = len(history.prompt)
            else:
                start = mark.known
            grown.extend((place.lane, token) for token in history.slice(start, known) if token < self._vocab)
            self._marks[place.lane] = CountedHistory(place.request_id, history.prompt, known)
        return grown

    def forget(self, lanes: Iterable[int]) -> None:
        """Make the next use of these lanes count from the beginning, because tokens that `grown` returned were not added to
        `output`."""
        for lane in lanes:
            self._marks[lane] = None

    def _open(self, lane: int, prompt: tuple[int, ...]) -> None:
        self.output[lane] = 0
        self.prompt[lane] = False
        known = [token for token in prompt if token < self._vocab]
        self.prompt[lane, torch.tensor(known, dtype=torch.int64, device=self._device)] = True


def _add(counts: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Add one for each (row, token). A pair that occurs twice is counted twice."""
    if pairs:
        rows, tokens = torch.tensor(pairs, device=counts.device).unbind(1)
        one = torch.ones((), dtype=counts.dtype, device=counts.device)
        counts.index_put_((rows, tokens), one, accumulate=True)


# ------------------------------------------------------------------ noise, with the integers of `sampling/noise.py`


def key_words(keys: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Keys as two columns of int32, whose arithmetic has the same bits as the unsigned one of `noise.py`.   [C, 1] each"""
    words = torch.tensor(keys, dtype=torch.int64).to(torch.int32).to(device)
    return words[:, :1], words[:, 1:]


def uniform_bits(first: Tensor, second: Tensor, vocab: int, scratch: Scratch) -> Tensor:
    """24 uniform bits for every token id.   [C, 1] and [C, 1] -> [C, V] int32"""
    words, spare = (scratch.take(name, (len(first), vocab), torch.int32) for name in ("words", "spare"))
    torch.bitwise_xor(_ids(vocab, first.device), first, out=words)
    _mix32(words, spare)
    words += second
    _mix32(words, spare)
    return _shift(words, 32 - BITS, words)


def gumbel(first: Tensor, second: Tensor, vocab: int, scratch: Scratch) -> Tensor:
    """Gumbel noise -log(-log u) for every token id.   [C, 1] and [C, 1] -> [C, V] float32"""
    odd = uniform_bits(first, second, vocab, scratch).mul_(2).add_(1)  # u * 2^25
    rest, upper = (scratch.take(name, odd.shape, torch.int32) for name in ("rest", "spare"))
    above, below = (scratch.take(name, odd.shape, torch.float32) for name in ("above", "below"))
    # log u without a branch, as log(below) + log1p(above). For u < 1/2, `below` is u and `above` is 0; otherwise `below` is 1 and
    # `above` is u - 1. Both are exact, and one of the two logarithms is 0.
    torch.sub(odd, _word(2 ** (BITS + 1), odd.device), out=rest)
    torch.sub(_word(2**BITS, odd.device), odd, out=upper).bitwise_right_shift_(_word(31, odd.device))
    rest &= upper
    above.copy_(rest).mul_(2.0 ** -(BITS + 1))
    below.copy_(odd.sub_(rest)).mul_(2.0 ** -(BITS + 1))
    apply_elementwise(torch.log, below, out=below)
    noise = apply_elementwise(torch.log1p, above, out=above).add_(below).neg_()
    return apply_elementwise(torch.log, noise, out=noise).neg_()


@lru_cache(maxsize=8)
def _ids(vocab: int, device: torch.device) -> Tensor:
    return torch.arange(vocab, dtype=torch.int32, device=device)


def _mix32(words: Tensor, spare: Tensor) -> None:
    first, second, third = SHIFTS_32
    words ^= _shift(words, first, spare)
    words *= _word(MULTIPLIERS_32[0], words.device)
    words ^= _shift(words, second, spare)
    words *= _word(MULTIPLIERS_32[1], words.device)
    words ^= _shift(words, third, spare)


def _shift(words: Tensor, count: int, out: Tensor) -> Tensor:
    """Shift right and fill with zeros; torch's own shift copies the sign."""
    torch.bitwise_right_shift(words, _word(count, words.device), out=out)
    return out.bitwise_and_(_word(2 ** (32 - count) - 1, words.device))


@lru_cache(maxsize=64)
def _word(value: int, device: torch.device) -> Tensor:
    """A 32-bit constant as a tensor, which is kept because torch would convert a Python number at every use."""
    return torch.tensor(value - 2**32 if value >= 2**31 else value, dtype=torch.int32, device=device)


# ------------------------------------------------------------------ sampler


SLAB_ELEMENTS = {"cpu": 2**19, "cuda": 2**24}  # logits in one slab: few enough for caches


@dataclass(frozen=True, slots=True)
class FilteredScores:
    """The filtered distribution of each row. A deficit is (best score - score) / temperature."""

    deficit: Tensor  # [C, V] float32: the deficit of each token
    limit: Tensor | None  # [C, 1] float32: the largest deficit that is kept; None: every token is kept
    sound: Tensor  # [C] bool: whether the rule leaves a token

    def kept(self, rows: Tensor | None = None) -> Tensor:
        """Deficits in which dropped tokens are infinite.   [C, V]"""
        deficit = self.deficit if rows is None else self.deficit[rows]
        if self.limit is None:
            return deficit
        limit = self.limit if rows is None else self.limit[rows]
        return deficit.masked_fill(deficit > limit, torch.inf)


class SamplingInputs(Protocol):
    """The inputs of sampling on the device, for some positions."""

    def sample(self, logits: Callable[[slice], Tensor], last: Tensor | None) -> Tensor:
        """Sample all rows: [rows, columns] int64 for `read_samples`. `logits` is called for one slab of rows at a time. `last`:
        the token that each lane sampled last, for rows whose last token only the device knows."""
        ...


class CapturableSampler(Protocol):
    """A sampler that reads only device memory once its inputs are prepared, so that CUDA graphs can capture it."""

    def prepare(self, positions: Sequence[SamplingPosition], *, staging: Staging, rows: int) -> SamplingInputs:
        """Put the inputs of these positions on the device. `rows`: the number of rows after padding. Padding rows sample
        greedily, and their samples are not used."""
        ...


class Sampler:
    """Samples rows of logits. It keeps no state that could change an answer, only caches that save time. Owner: the backend."""

    def __init__(self, *, vocab: int, lanes: int, device: torch.device) -> None:
        self._vocab = vocab
        self._width = padded(vocab)
        self._lanes = lanes
        self._device = device
        self._scratch = Scratch(device)
        self._counts: LaneCounts | None = None
        # By lane: a request id, and the request's tokens, indexed for the DRY penalty and bad words.
        self._recalls: dict[int, tuple[str, HistoryTokens]] = {}
        self._checksum_weights: Tensor | None = None  # [2, V] int64: by token, of logits and of scores
        self._lock = threading.RLock()  # steps in flight at once may be prepared and sampled on two threads

    @property
    def capturable(self) -> CapturableSampler | None:
        return None

    def forget_counts(self) -> None:
        """Count the history of every lane from its beginning when it is used next. Call it after a step has failed, because that
        step may have noted tokens as counted, or cleared a lane, without counting them."""
        with self._lock:
            if self._counts is not None:
                self._counts.forget(range(self._lanes))

    def sample(self, logits: Tensor, positions: Sequence[SamplingPosition]) -> list[SampledToken | None]:
        """One sample per row of `logits` ([C, V'] float32; columns past the vocabulary are never sampled)."""
        return read_samples(self.answers(logits, positions).cpu().numpy(), positions) if positions else []

    def answers(self, logits: Tensor, positions: Sequence[SamplingPosition]) -> Tensor:
        """The samples on the device, without waiting for them: [C, columns] int64, for `read_samples`."""
        columns = self._columns(positions)
        with torch.inference_mode(), self._lock:
            return torch.cat([self._slab(logits[span], positions[span], columns) for span in self._spans(len(positions))])

    def _columns(self, positions: Sequence[SamplingPosition]) -> int:
        """How many integers describe a sample, for the position that requests most."""
        counts = [p.params.logprobs for p in positions if p.params.logprobs is not None]
        if not counts and not any(p.params.checksums for p in positions):
            return 1
        return TOP + min(max(counts, default=0), self._vocab) + max(len(p.asked) for p in positions)

    def score(self, logits: Tensor, tokens: Sequence[int], top: int) -> list[Logprobs]:
        """The model's own logprobs of given tokens, and of the `top` most likely tokens at their positions."""
        if not tokens:
            return []
        with torch.inference_mode(), self._lock:
            answers = torch.cat([self._scored(logits[span], tokens[span], top) for span in self._spans(len(tokens))])
            rows = answers.cpu().numpy()
        return [read_logprobs(row, top) for row in rows]

    def _scored(self, logits: Tensor, tokens: Sequence[int], top: int) -> Tensor:
        raw = self._padded(logits)
        answers = torch.zeros(len(raw), TOP + min(top, self._vocab), dtype=torch.int64, device=self._device)
        self._describe(answers, None, _deficits(raw), self._index(tokens), top=answers.shape[1] - TOP)
        return answers

    def _spans(self, rows: int) -> list[slice]:
        step = max(1, SLAB_ELEMENTS.get(self._device.type, 2**19) // self._width)
        return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]

    def _padded(self, logits: Tensor) -> Tensor:
        """The logits of the vocabulary, followed by -inf up to a whole number of vectors."""
        if logits.shape[1] == self._width == self._vocab:
            return logits
        raw = torch.full((len(logits), self._width), -torch.inf, dtype=torch.float32, device=self._device)
        raw[:, : self._vocab] = logits[:, : self._vocab]
        return raw

    # ── one slab ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _slab(self, logits: Tensor, positions: Sequence[SamplingPosition], columns: int) -> Tensor:
        """Sample one slab.   [C, columns] int64, for `read_samples`"""
        raw = self._padded(logits)
        law, tokens = self._chosen(raw, self._adjusted(raw, positions), positions)
        forced = [(row, p.forced) for row, p in enumerate(positions) if p.history.forced and p.forced != NO_TOKEN]
        if forced:
            rows, known = torch.tensor(forced, device=self._device).unbind(1)
            tokens[rows] = known
        answers = torch.zeros(len(positions), columns, dtype=torch.int64, device=self._device)
        if columns > TOP:
            answers[:, TOP:] = NOT_ASKED
        answers[:, TOKEN] = torch.where(law.sound, tokens, NO_TOKEN)
        counts = [p.params.logprobs for p in positions if p.params.logprobs is not None]
        top, asked = min(max(counts, default=0), self._vocab), self._asked(positions)
        modes = [p.params.logprobs_mode if p.params.logprobs is not None else "" for p in positions]
        if own := [row for row, mode in enumerate(modes) if mode in ("raw", "both")]:
            which = self._rows(own, len(positions))
            deficit = _deficits(raw if which is None else raw[which])
            self._describe(answers, which, deficit, tokens, top=top, asked=asked)
        if lawful := [row for row, mode in enumerate(modes) if mode == "processed"]:
            which = self._rows(lawful, len(positions))
            self._describe(answers, which, law.kept(which), tokens, top=top, asked=asked)
        if both := [row for row, mode in enumerate(modes) if mode == "both"]:
            self._describe_kept(answers, self._index(both), law, tokens)
        if any(p.params.checksums for p in positions):
            answers[:, CHECKSUM] = self._checksums(raw, law)
        return answers

    def _chosen(self, raw: Tensor, scores: Tensor, positions: Sequence[SamplingPosition]) -> tuple[FilteredScores, Tensor]:
        """The filtered scores and each row's token, an arbitrary one where the filters leave none. `scores`: adjusted, or `raw`
        itself."""
        law = self._law(raw, scores, positions)
        return law, first_best(self._values(law, positions))

    def _law(self, raw: Tensor, scores: Tensor, positions: Sequence[SamplingPosition]) -> FilteredScores:
        best = scores.amax(1) + 0.0  # adding 0 turns -0.0 into 0.0
        sound = (best > -torch.inf) & (best < torch.inf)
        if scores is not raw:
            sound &= raw.amax(1) < torch.inf  # an infinite logit leaves no token, even if a ban has removed it from the scores
        deficit = self._scratch.take("deficit", scores.shape, torch.float32)
        torch.sub(best[:, None], scores, out=deficit)
        if any(p.params.temperature not in (0, 1) for p in positions):
            deficit /= self._column([filters(p.params, self._vocab).divisor for p in positions])
        return FilteredScores(deficit, self._limit(deficit, positions), sound)

    def _values(self, law: FilteredScores, positions: Sequence[SamplingPosition]) -> Tensor:
        """The values whose largest is sampled: noise minus deficit, without noise for greedy rows.   [C, V]"""
        noisy = [row for row, p in enumerate(positions) if not p.params.greedy]
        if noisy:
            noise = gumbel(*key_words(self._keys([positions[row] for row in noisy]), self._device), self._width, self._scratch)
        if len(noisy) == len(positions):
            values = noise.sub_(law.deficit)
        else:
            values = torch.neg(law.deficit, out=self._scratch.take("values", law.deficit.shape, torch.float32))
            if noisy:
                values[self._index(noisy)] += noise
        if law.limit is not None:
            drop_beyond(values, law.deficit, law.limit, self._scratch)
        return values

    def _keys(self, positions: Sequence[SamplingPosition]) -> list[tuple[int, int]]:
        return [key(p.params.seed, p.at) for p in positions]

    # ── steps 1 to 3 of the sampling rule (`sampling/law.py`): bias, penalties, bans ──────────────────────────────

    def _adjusted(self, raw: Tensor, positions: Sequence[SamplingPosition]) -> Tensor:
        """Scores after bias, penalties and bans; `raw` itself if no row has any."""
        host = [adjustment(p.params, p.history, p.drafts, self._recall(p)) for p in positions]
        biased = [(row, *pair) for row, p in enumerate(positions) for pair in p.params.logit_bias if 0 <= pair[0] < self._vocab]
        counting = [row for row, p in enumerate(positions) if p.params.counts_history]
        penalized = [(row, *pair) for row, known in enumerate(host) for pair in known.penalized]
        banned = [(row, token) for row, known in enumerate(host) for token in valid_ids(known.banned, self._vocab)]
        constrained = [(row, known.allowed) for row, known in enumerate(host) if known.allowed is not None]
        if not (biased or counting or penalized or banned or constrained):
            return raw
        scores = raw.clone()
        if biased:
            rows, tokens, values = self._entries(biased)
            scores[rows, tokens] += values
        if counting:
            self._penalize(scores, counting, positions)
        if penalized:
            rows, tokens, values = self._entries(penalized)
            scores[rows, tokens] -= values
        if banned:
            rows, tokens = torch.tensor(banned, device=self._device).unbind(1)
            scores[rows, tokens] = -torch.inf
        if constrained:
            self._keep_only(scores, constrained)
        return scores

    def _keep_only(self, scores: Tensor, constrained: Sequence[tuple[int, TokenMask]]) -> None:
        """Remove all but the allowed tokens on these rows. The sets are copied to the device as bits, one per token."""
        words = -(-self._width // 32)
        packed = np.zeros((len(constrained), words), dtype=np.uint32)
        for line, (_, bits) in zip(packed, constrained, strict=True):
            line[: len(bits)] = bits[:words]
        sets = torch.from_numpy(packed.view(np.int32)).to(self._device)  # [constrained rows, words]
        allowed = (sets[:, :, None] >> torch.arange(32, dtype=torch.int32, device=self._device)) & 1
        allowed = allowed.reshape(len(constrained), -1)[:, : self._width]  # [constrained rows, V']
        rows = self._index([row for row, _ in constrained])
        scores[rows] = scores[rows].masked_fill_(allowed == 0, -torch.inf)

    def _penalize(self, scores: Tensor, counting: Sequence[int], positions: Sequence[SamplingPosition]) -> None:
        """Apply repetition, frequency and presence penalties, in this order, to the rows that count their history."""
        if self._counts is None:
            self._counts = LaneCounts(vocab=self._width, lanes=self._lanes, device=self._device)
        places = [positions[row] for row in counting]
        output, seen = self._counts.read(places)
        rows = self._rows(counting, len(positions))
        part = scores if rows is None else scores[rows]
        if any(p.params.repetition_penalty != 1 for p in places):
            penalty = self._column([p.params.repetition_penalty for p in places])
            part = torch.where(seen, torch.where(part > 0, part / penalty, part * penalty), part)
        if any(p.params.frequency_penalty != 0 for p in places):
            part -= output.to(torch.float32) * self._column([p.params.frequency_penalty for p in places])
        if any(p.params.presence_penalty != 0 for p in places):
            part -= (output > 0).to(torch.float32) * self._column([p.params.presence_penalty for p in places])
        if rows is None:
            scores.copy_(part)
        else:
            scores[rows] = part

    def _recall(self, position: SamplingPosition) -> HistoryTokens | None:
        if position.params.dry is None and not position.params.bad_words:
            return None
        known = self._recalls.get(position.lane)
        if known is None or known[0] != position.request_id:
            known = self._recalls[position.lane] = (position.request_id, HistoryTokens())
        return known[1]

    # ── steps 5 to 7 of the sampling rule: the filters as one limit per row ───────────────────────────────────────

    def _limit(self, deficit: Tensor, positions: Sequence[SamplingPosition]) -> Tensor | None:
        row_filters = [filters(p.params, self._vocab) for p in positions]
        counted = [(row, f.top_k) for row, f in enumerate(row_filters) if f.top_k]
        shared = [(row, f.top_p) for row, f in enumerate(row_filters) if f.top_p < 1]
        if not (counted or shared or any(f.limit < torch.inf for f in row_filters)):
            return None
        limit = self._column([f.limit for f in row_filters])
        if counted:
            self._lower(limit, deficit, counted, by_mass=False)
        if shared:
            self._lower(limit, deficit, shared, by_mass=True)
        return limit

    def _lower(self, limit: Tensor, deficit: Tensor, wanted: Sequence[tuple[int, float]], *, by_mass: bool) -> None:
        """Lower the limits of some rows. `wanted`: pairs of a row and its top-k (a count) or, `by_mass`, its top-p (a share of
        the mass within the limit so far)."""
        rows = self._rows([row for row, _ in wanted], len(deficit))
        part = deficit if rows is None else deficit[rows]
        value = torch.tensor([one for _, one in wanted], dtype=torch.float64).to(self._device)
        bound = limit if rows is None else limit[rows]
        if by_mass:
            weights = masses(part, self._scratch, bound)
            total = weights.sum(1)
            target = torch.minimum((value * total.to(torch.float64)).ceil().to(torch.int64).clamp_(min=1), total)
        else:
            weights = torch.ones((), dtype=torch.int64, device=self._device).expand_as(part)
            target = value.to(torch.int64)
        bound = torch.minimum(bound, reach(part, weights, target, self._scratch)[:, None])
        if rows is None:
            limit.copy_(bound)
        else:
            limit[rows] = bound

    # ── what is reported beside the token ─────────────────────────────────────────────────────────────────────────

    def _describe(
        self,
        answers: Tensor,
        rows: Tensor | None,
        deficit: Tensor,
        tokens: Tensor,
        *,
        top: int,
        asked: Tensor | None = None,
    ) -> None:
        """Write total mass, deficit of the token, the `top` most likely tokens and those that are asked for (of all rows, -1 for
        none, [C, ids]) to these rows of `answers`."""
        chosen = deficit.gather(1, (tokens if rows is None else tokens[rows])[:, None])
        parts = [masses(deficit, self._scratch).sum(1, keepdim=True), chosen.view(torch.int32).to(torch.int64)]
        last = answers.shape[1]
        columns = [TOTAL, SAMPLED, *range(TOP, TOP + top)]
        if top:
            parts.append(likeliest(deficit, top))
        if asked is not None:
            ids = asked if rows is None else asked[rows]
            parts.append(asked_keys(deficit.gather(1, ids.clamp(min=0)), ids))
            columns += range(last - asked.shape[1], last)
        found = torch.cat(parts, 1)
        places = torch.tensor(columns, device=self._device)
        if rows is None:
            answers[:, places] = found
        else:
            answers[rows[:, None], places] = found

    def _asked(self, positions: Sequence[SamplingPosition]) -> Tensor | None:
        """The token ids whose logprobs the rows ask for, -1 before them; None if no row asks for any.   [C, ids]"""
        asked = [p.asked for p in positions]
        columns = max(map(len, asked))
        if not columns:
            return None
        return torch.from_numpy(asked_columns(asked, rows=len(asked), columns=columns)).to(self._device, torch.int64)

    def _describe_kept(self, answers: Tensor, rows: Tensor, law: FilteredScores, tokens: Tensor) -> None:
        """Write total mass and deficit of the token among the kept tokens, and the mass before the filters."""
        kept = law.kept(rows)
        chosen = kept.gather(1, tokens[rows][:, None])
        answers[rows, KEPT_TOTAL] = masses(kept, self._scratch).sum(1)
        answers[rows, KEPT_SAMPLED] = chosen.view(torch.int32).to(torch.int64)[:, 0]
        answers[rows, ALL_TOTAL] = masses(law.deficit[rows], self._scratch).sum(1)

    def _checksums(self, raw: Tensor, law: FilteredScores) -> Tensor:
        if self._checksum_weights is None:
            weights = torch.from_numpy(np.stack(checksum_weights(self._vocab)))
            self._checksum_weights = torch.nn.functional.pad(weights, (0, self._width - self._vocab)).to(self._device)
        first, second = self._checksum_weights
        scores = 0.0 - law.kept()
        total: Tensor = (raw.view(torch.int32).to(torch.int64) * first).sum(1)
        total += (scores.view(torch.int32).to(torch.int64) * second).sum(1)
        total &= 2**63 - 1
        return total

    # ── small tensors ─────────────────────────────────────────────────────────────────────────────────────────────

    def _rows(self, rows: Sequence[int], count: int) -> Tensor | None:
        """Row numbers as an index; None for all rows, so that they need not be copied."""
        return None if len(rows) == count else self._index(rows)

    def _index(self, rows: Sequence[int]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64).to(self._device)

    def _column(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).to(self._device)[:, None]

    def _entries(self, entries: Sequence[tuple[int, int, float]]) -> tuple[Tensor, Tensor, Tensor]:
        rows, tokens, values = zip(*entries, strict=True)
        return self._index(rows), self._index(tokens), self._column(values)[:, 0]


def asked_keys(deficit: Tensor, ids: Tensor) -> Tensor:
    """Token ids and their deficits as columns of `sampling/logprobs.py`; an id of -1 stands for none.   [C, ids] each"""
    return torch.where(ids >= 0, deficit.view(torch.int32).to(torch.int64) << 32 | ids, NOT_ASKED)


def _deficits(raw: Tensor) -> Tensor:
    return (raw.amax(1) + 0.0)[:, None] - raw
