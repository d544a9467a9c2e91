"""The sampler of `backends/torch/sampling/sampler.py` with its vocabulary-wide work in Triton kernels.

In: logits and positions. Out: the same tokens, logprobs and checksums as the plain sampler. The parameters of all rows are packed
into one table on the device, and so is everything a row requests: a row with a token mask or logprobs is sampled by the same
kernels, beside rows without. Kernels that only some requests need are launched where a row of the step has such a request.
A lane is the slot in which a sequence's tokens are counted. Axes: C positions to sample, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from onedraw.backends.sampled_rows import CHECKSUM, TOKEN, SamplingPosition
from onedraw.backends.torch.ops.cuda.commit import resolve_pending_tokens
from onedraw.backends.torch.ops.cuda.logprobs import NO_LOGPROBS, TOP_CAPACITIES, write_asked, write_logprobs
from onedraw.backends.torch.ops.cuda.sampling_kernels import (
    COLUMNS,
    GREEDY,
    KEY_0,
    LANE,
    TOP_K,
    SamplingResult,
    SamplingTable,
    sample_tokens,
)
from onedraw.backends.torch.runner.staging_buffers import DirectStaging, Staging
from onedraw.backends.torch.sampling.sampler import LaneCounts, Sampler
from onedraw.sampling.adjustments import NO_ADJUSTMENT, Adjustment, adjustment, valid_ids
from onedraw.sampling.law import NO_TOKEN, Filters, checksum_weights, filters
from onedraw.sampling.logprobs import ALL_TOTAL, KEPT_SAMPLED, KEPT_TOTAL, SAMPLED, TOP, TOTAL, asked_columns
from onedraw.sampling.noise import key
from onedraw.types import PENDING_TOKEN, SamplingParams, TokenMask

MAX_CACHED_PARAMS = 4096
_PROCESSED = 1  # a request for processed logprobs without alternatives, encoded as in `SamplingTable.logprobs`


@dataclass(frozen=True, slots=True)
class TritonSamplingInputs:
    """The sampling inputs of a step, on the device."""

    table: SamplingTable
    columns: int  # columns of the samples: the token, then checksum and logprobs where requested
    weights: Tensor | None  # [2, V] int64: token weights of checksums; None if no row requests a checksum
    sampler: TritonSampler

    def sample(self, logits: Callable[[slice], Tensor], last: Tensor | None) -> Tensor:
        return self.sampler.sample_prepared(logits, self, last)


@dataclass(frozen=True, slots=True)
class PackedParams:
    """The sampling parameters of one request in the layout of the kernels' table."""

    params: SamplingParams
    numbers: npt.NDArray[np.int64]  # the values of the table's columns before KEY_0
    greedy: bool
    uses_counts: bool
    has_entries: bool  # whether there are logit biases, or adjustments that need more of the history than token counts
    has_top_k: bool
    has_top_p: bool


class TokenEntries:
    """A flat list of (token id, value) entries of all rows, row by row."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._values: list[float] = []

    def add(self, tokens: Sequence[int]) -> int:
        """Append tokens with value 0; return the index of the first."""
        start = len(self._tokens)
        self._tokens += tokens
        self._values += [0.0] * len(tokens)
        return start

    def add_kinds(self, kinds: Sequence[Sequence[tuple[int, float]]]) -> tuple[int, ...]:
        """Append a row's lists of entries, one for each kind (bias, DRY, bans, drafts); return the start of each and the end of
        the last."""
        bounds = [len(self._tokens)]
        for kind in kinds:
            self._tokens += [token for token, _ in kind]
            self._values += [value for _, value in kind]
            bounds.append(len(self._tokens))
        return tuple(bounds)

    def arrays(self, *, padded: bool) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Token ids and values. `padded`: their length is one of a few, so that captured steps can share a layout."""
        count = len(self._tokens)
        length = _padded_length(count) if padded else max(count, 1)
        tokens, values = np.zeros(length, dtype=np.int32), np.zeros(length, dtype=np.float32)
        tokens[:count], values[:count] = self._tokens, self._values
        return tokens, values


class TokenMasks:
    """The token masks of some positions, and which position has which. Owner: the table being packed."""

    def __init__(self, vocab: int) -> None:
        self._words = -(-vocab // 32)
        self._masks: list[TokenMask] = []
        self._rows: list[tuple[int, int]] = []  # (position, index of its mask)

    def add(self, position: int, mask: TokenMask) -> None:
        self._rows.append((position, len(self._masks)))
        self._masks.append(mask)

    def __len__(self) -> int:
        return len(self._masks)

    def rows(self, count: int) -> npt.NDArray[np.int32]:
        """The index of each position's mask, -1 where it has none: [count]."""
        found = np.full(count, -1, dtype=np.int32)
        for position, index in self._rows:
            found[position] = index
        return found

    def bits(self) -> npt.NDArray[np.int32]:
        """All masks as rows of 32-bit words with a bit per token, cut or filled with zeros to the length of the vocabulary."""
        packed = np.zeros((len(self._masks), self._words), dtype=np.uint32)
        for line, mask in zip(packed, self._masks, strict=True):
            line[: len(mask)] = mask[: self._words]
        return packed.view(np.int32)


class TritonSampler(Sampler):
    """A sampler that launches Triton kernels. `pdl`: with programmatic dependent launch, where a kernel may start while the one
    before it ends (Hopper and later)."""

    def __init__(self, *, vocab: int, lanes: int, device: torch.device, pdl: bool = False) -> None:
        super().__init__(vocab=vocab, lanes=lanes, device=device)
        self._pdl = pdl
        self._packed: dict[int, PackedParams] = {}

    @property
    def capturable(self) -> TritonSampler:
        return self

    def _slab(self, logits: Tensor, positions: Sequence[SamplingPosition], columns: int) -> Tensor:
        inputs = self._prepare(positions, DirectStaging(self._device), rows=0, columns=columns)
        self._update_counts(inputs.table)
        return self._sample_slab(logits, inputs, slice(0, len(positions)))

    def _columns(self, positions: Sequence[SamplingPosition]) -> int:
        """The number of columns of the samples: one of a few numbers, so that captured steps share a layout."""
        counts = [p.params.logprobs for p in positions if p.params.logprobs is not None]
        if counts:
            return TOP + next(capacity for capacity in TOP_CAPACITIES if capacity >= max(counts)) + _asked_capacity(positions)
        return CHECKSUM + 1 if any(p.params.checksums for p in positions) else 1

    def prepare(self, positions: Sequence[SamplingPosition], *, staging: Staging, rows: int = 0) -> TritonSamplingInputs:
        """Pack the positions for the kernels, padded to `rows`. Padding rows sample greedily, and their samples are not used."""
        return self._prepare(positions, staging, rows=rows, columns=self._columns(positions))

    def _prepare(
        self, positions: Sequence[SamplingPosition], staging: Staging, *, rows: int, columns: int
    ) -> TritonSamplingInputs:
        checksums = any(p.params.checksums for p in positions)
        with self._lock:
            inputs = TritonSamplingInputs(
                table=self._sampling_table(positions, staging, rows),
                columns=columns,
                weights=self._weights_of_checksums() if checksums else None,
                sampler=self,
            )
        table = inputs.table
        optional = (table.output, table.masks, table.logprobs, table.asked, table.both, table.forced)
        staging.note((table.has_top_k, table.has_top_p, table.adjusted, *(x is None for x in optional), checksums, columns))
        return inputs

    def sample_prepared(
        self, logits: Callable[[slice], Tensor], inputs: TritonSamplingInputs, last: Tensor | None = None
    ) -> Tensor:
        """Samples [C, columns] for all C rows of prepared inputs; `logits` is called for one slab of rows at a time. `last`: the
        token that each lane sampled last, for rows whose own last token only the device knows."""
        self._update_counts(inputs.table)
        if last is not None and inputs.table.output is not None:
            inputs = replace(inputs, table=replace(inputs.table, tokens=resolve_pending_tokens(inputs.table.tokens, last)))
        rows = len(inputs.table.rows)
        return torch.cat([self._sample_slab(logits(span), inputs, span) for span in self._spans(rows)])

    def sampling_table(self, positions: Sequence[SamplingPosition]) -> SamplingTable:
        """The table of these positions, for callers that launch `sample_tokens` themselves."""
        return self._sampling_table(positions, DirectStaging(self._device), 0)

    def _update_counts(self, table: SamplingTable) -> None:
        """Add the tokens of each lane's history that the lane's counts lack; the kernels count drafts themselves."""
        if table.count_increments is not None and table.output is not None:
            one = torch.ones_like(table.count_increments, dtype=torch.int32)
            table.output.view(-1).scatter_add_(0, table.count_increments, one)

    def _sample_slab(self, logits: Tensor, inputs: TritonSamplingInputs, rows: slice) -> Tensor:
        """Sample the positions in these rows of the table: [C, columns], for `read_samples`."""
        table, sizes = inputs.table.part(rows), {"vocab": self._vocab, "width": self._width}
        result, checksums = sample_tokens(logits, table, **sizes, weights=inputs.weights, pdl=self._pdl)
        if table.forced is not None:  # Where the sampling rule leaves no token (-1), none is forced either.
            known = (table.forced >= 0) & (result.tokens >= 0)
            result = replace(result, tokens=torch.where(known, table.forced, result.tokens))
        if inputs.columns == 1:
            return result.tokens.unsqueeze(1)
        samples = torch.zeros(len(table.rows), inputs.columns, dtype=torch.int64, device=self._device)
        samples[:, TOKEN] = result.tokens
        if checksums is not None:
            samples[:, CHECKSUM] = checksums
        if table.logprobs is not None:
            ranked = samples if table.asked is None else samples[:, : -table.asked.shape[1]]
            write_logprobs(ranked, logits, result, table.logprobs, **sizes, pdl=self._pdl)
            if table.asked is not None:
                write_asked(samples, logits, result, table.logprobs, table.asked)
        if table.both is not None:
            self._write_kept(samples, logits, result, table.both)
        return samples

    def _write_kept(self, samples: Tensor, logits: Tensor, result: SamplingResult, requests: Tensor) -> None:
        """Fill the columns of logprobs mode "both" (before and after the filters): mass and deficit among the kept tokens, then
        the mass of all tokens."""
        unlimited = replace(result, limits=torch.full_like(result.limits, torch.inf))
        for described, columns in ((result, (KEPT_TOTAL, KEPT_SAMPLED)), (unlimited, (ALL_TOTAL,))):
            found = torch.zeros(len(samples), TOP + TOP_CAPACITIES[0], dtype=torch.int64, device=self._device)
            write_logprobs(found, logits, described, requests, vocab=self._vocab, width=self._width, pdl=self._pdl)
            for target, source in zip(columns, (TOTAL, SAMPLED)):
                samples[:, target] = found[:, source]

    def _sampling_table(self, positions: Sequence[SamplingPosition], staging: Staging, rows: int) -> SamplingTable:
        table = np.zeros((max(len(positions), rows), COLUMNS), dtype=np.int64)
        table[len(positions) :] = _PADDING_ROW
        entries, row_words, counting = TokenEntries(), list[tuple[int, ...]](), list[SamplingPosition]()
        masks, logprobs = TokenMasks(self._vocab), [_logprobs_request(p.params) for p in positions]
        both = [_PROCESSED if _wants_both(p.params) else NO_LOGPROBS for p in positions]
        forced = [p.forced for p in positions]
        has_top_k = has_top_p = adjusted = False
        for first, group in _group_by_history(positions):
            head, packed = group[0], self._packed_params(group[0].params)
            known, lane = len(head.history), head.lane if packed.uses_counts else -1
            table[first : first + len(group), :KEY_0] = packed.numbers
            for p, bounds in zip(group, self._entry_bounds(first, group, packed, entries, masks), strict=True):
                row_words.append((*key(p.params.seed, known + len(p.drafts)), packed.greedy, lane, *bounds))
            has_top_k, has_top_p = has_top_k or packed.has_top_k, has_top_p or packed.has_top_p
            adjusted = adjusted or packed.uses_counts or packed.has_entries
            if packed.uses_counts:
                counting.append(head)
        if row_words:
            table[: len(positions), KEY_0:] = row_words
        tensors = [staging.put(array) for array in (table, *entries.arrays(padded=rows > 0))]
        try:
            counts, increments = self._count_increments(counting, rows)
            staged = None if counts is None else staging.put(increments)
            requests = staging.put(_padded_to(len(table), logprobs)) if max(logprobs, default=NO_LOGPROBS) >= 0 else None
            columns = _asked_capacity(positions)
            asked = asked_columns([p.asked for p in positions], rows=len(table), columns=columns)
            ids = staging.put(asked) if columns else None
            kept = staging.put(_padded_to(len(table), both)) if max(both, default=NO_LOGPROBS) >= 0 else None
            taken = staging.put(_padded_to(len(table), forced).astype(np.int64)) if max(forced, default=NO_TOKEN) >= 0 else None
            mask_rows = staging.put(masks.rows(len(table))) if len(masks) else None
            bits = staging.put_rows(masks.bits(), len(table)) if len(masks) else None
        except BaseException:  # such as an array that does not fit: the counts were noted as added, but the step will not run
            if self._counts is not None:
                self._counts.forget(position.lane for position in counting)
            raise
        return SamplingTable(
            rows=tensors[0],
            tokens=tensors[1],
            values=tensors[2],
            output=None if counts is None else counts.output,
            prompt=None if counts is None else counts.prompt,
            count_increments=staged,
            mask_rows=mask_rows,
            masks=bits,
            logprobs=requests,
            asked=ids,
            both=kept,
            forced=taken,
            has_top_k=has_top_k,
            has_top_p=has_top_p,
            adjusted=adjusted or bits is not None,
        )

    def _entry_bounds(
        self,
        first: int,
        group: Sequence[SamplingPosition],
        packed: PackedParams,
        entries: TokenEntries,
        masks: TokenMasks,
    ) -> Iterator[tuple[int, ...]]:
        """For each position from `first` on, the index of its first entry of each kind, and the end of the last kind's
        entries. Its mask goes to `masks`."""
        if packed.has_entries or group[0].history.constraint is not None:
            for index, p in enumerate(group, first):
                host = self._adjustment(p)
                if host.allowed is not None:
                    masks.add(index, host.allowed)
                yield entries.add_kinds(self._entry_kinds(p, host))
        else:
            path = _draft_tokens(max(group, key=lambda p: len(p.drafts))) if packed.uses_counts else ()
            first = entries.add(path)
            for p in group:  # positions of a chain share prefixes of one path, so their entries are stored once
                drafts = _draft_tokens(p) if packed.uses_counts else ()
                start = first if drafts == path[: len(drafts)] else entries.add(drafts)
                yield (start, start, start, start, start + len(drafts))

    def _adjustment(self, p: SamplingPosition) -> Adjustment:
        """The adjustment of a position. A position with a constraint is sampled only after the host knows its history. If its
        last token is pending even then, the request ended in the step before, and the sample of this position is not read."""
        if p.drafts == (PENDING_TOKEN,) and p.history.constraint is not None:
            return NO_ADJUSTMENT
        return adjustment(p.params, p.history, p.drafts, self._recall(p))

    def _packed_params(self, params: SamplingParams) -> PackedParams:
        """The parameters in the kernels' layout. They are cached by identity, because a request has one object for all its
        positions."""
        packed = self._packed.get(id(params))
        if packed is None or packed.params is not params:
            if len(self._packed) > MAX_CACHED_PARAMS:
                self._packed.clear()
            numbers = np.zeros(KEY_0, dtype=np.int64)
            applied = filters(params, self._vocab)
            numbers[:6].view(np.float64)[:] = _numbers(params, applied)
            numbers[TOP_K] = applied.top_k
            has_entries = bool(params.dry is not None or params.bad_words or params.min_tokens or params.logit_bias)
            has_top_k, has_top_p = bool(applied.top_k), params.temperature > 0 and params.top_p < 1
            packed = PackedParams(params, numbers, params.greedy, params.counts_history, has_entries, has_top_k, has_top_p)
            self._packed[id(params)] = packed
        return packed

    def _entry_kinds(self, p: SamplingPosition, host: Adjustment) -> list[list[tuple[int, float]]]:
        """The entries of a position: logit bias, DRY penalties, bans, and the drafts that penalties count."""
        bias = [(t, v) for t, v in p.params.logit_bias if 0 <= t < self._vocab]
        kinds = [bias, list(host.penalized), [(t, 0.0) for t in valid_ids(host.banned, self._vocab)]]
        return [*kinds, [(t, 0.0) for t in _draft_tokens(p)] if p.params.counts_history else []]

    def _count_increments(
        self, counting: Sequence[SamplingPosition], rows: int
    ) -> tuple[LaneCounts | None, npt.NDArray[np.int64]]:
        """The lanes' token counts, and the flat indices to increment; padding indices belong to a lane that no row uses."""
        if not counting:
            return None, np.zeros(0, dtype=np.int64)
        if self._counts is None:
            self._counts = LaneCounts(vocab=self._width, lanes=self._lanes, device=self._device)
        grown = [lane * self._width + token for lane, token in self._counts.grown(counting)]
        increments = np.full(_padded_length(len(grown)) if rows else len(grown), self._lanes * self._width, dtype=np.int64)
        increments[: len(grown)] = grown
        return self._counts, increments

    def _weights_of_checksums(self) -> Tensor:
        """The weights, by token, of logits and of kept scores in a checksum: [2, V] int64."""
        if self._checksum_weights is None:
            self._checksum_weights = torch.from_numpy(np.stack(checksum_weights(self._vocab))).to(self._device)
        return self._checksum_weights


def _draft_tokens(p: SamplingPosition) -> tuple[int, ...]:
    """The drafted tokens between the history and the position; -1 - lane stands for a token that only the device knows."""
    return (-1 - p.lane,) if p.drafts == (PENDING_TOKEN,) else p.drafts


def _logprobs_request(params: SamplingParams) -> int:
    """Encode which logprobs a request asks for, as a number of `SamplingTable.logprobs`."""
    return NO_LOGPROBS if params.logprobs is None else 2 * params.logprobs + (params.logprobs_mode == "processed")


def _asked_capacity(positions: Sequence[SamplingPosition]) -> int:
    """The number of columns for tokens that are asked for: one of a few numbers, or 0 if none are."""
    most = max((len(p.asked) for p in positions), default=0)
    return next(capacity for capacity in TOP_CAPACITIES if capacity >= most) if most else 0


def _wants_both(params: SamplingParams) -> bool:
    return params.logprobs is not None and params.logprobs_mode == "both"


def _padded_to(count: int, values: Sequence[int]) -> npt.NDArray[np.int32]:
    """Values of the positions, and -1 (no logprobs, no token) for padding."""
    padded = np.full(count, -1, dtype=np.int32)
    padded[: len(values)] = values
    return padded


def _padded_length(count: int) -> int:
    """The length to which a list is padded: the next power of two, and at least 64, so that captured steps share few layouts."""
    return max(64, 1 << (count - 1).bit_length())


def _group_by_history(positions: Sequence[SamplingPosition]) -> Iterator[tuple[int, Sequence[SamplingPosition]]]:
    """Runs of positions that share one history and parameters, each with the index of its first position."""
    first = 0
    for index, p in enumerate(positions):
        if p.history is not positions[first].history or p.params is not positions[first].params:
            yield first, positions[first:index]
            first = index
    if positions:
        yield first, positions[first:]


def _numbers(params: SamplingParams, applied: Filters) -> list[float]:
    """The values of the table's first six columns, which hold floats."""
    return [
        applied.divisor,
        applied.limit,
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
        applied.top_p,
    ]


def _greedy_row() -> npt.NDArray[np.int64]:
    row = np.zeros(COLUMNS, dtype=np.int64)
    row[:6].view(np.float64)[:] = _numbers(SamplingParams(temperature=0.0), Filters())
    row[GREEDY], row[LANE] = 1, -1
    return row


_PADDING_ROW = _greedy_row()
