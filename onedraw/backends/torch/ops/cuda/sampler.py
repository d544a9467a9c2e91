"""The sampler of `backends/torch/sampling/sampler.py` with its vocabulary-wide work in Triton kernels.

In: logits and positions. Out: the same choices: tokens, logprobs and checksums. What the host knows of the rows becomes one
table; logprobs, which few ask for, are described by the plain sampler from the kernels' deficits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from onedraw.backends.sampled_rows import CHECKSUM, TOKEN, SamplingPosition
from onedraw.backends.torch.ops.cuda.commit import awaited
from onedraw.backends.torch.ops.cuda.sampling import COLUMNS, GREEDY, KEY_0, LANE, TOP_K, Chosen, Wishes, choose
from onedraw.backends.torch.runner.staging_buffers import DirectStaging, Staging, StagingBufferFull
from onedraw.backends.torch.sampling.sampler import FilteredScores, Sampler, _deficits
from onedraw.backends.torch.sampling.token_counts import LaneCounts
from onedraw.sampling.adjustments import Adjustment, adjustment, inside
from onedraw.sampling.law import NO_TOKEN, Filters, checksum_weights, filters
from onedraw.sampling.noise import key
from onedraw.types import PENDING_TOKEN, SamplingParams

MOST_KNOWN = 4096  # parameters that are remembered


@dataclass(frozen=True, slots=True)
class Choosing:
    """What the positions of a turn ask for, on the device."""

    wishes: Wishes
    columns: int
    weights: Tensor | None  # of checksums
    sampler: TritonSampler

    def sample(self, logits: Callable[[slice], Tensor], last: Tensor | None) -> Tensor:
        return self.sampler.chosen(logits, self, last)


@dataclass(frozen=True, slots=True)
class Wish:
    """One request's parameters as the kernels read them."""

    params: SamplingParams
    numbers: npt.NDArray[np.int64]  # the table's columns up to the keys
    greedy: bool
    counts: bool
    more: bool  # something hangs on the history besides its counts, or tokens have a bias
    counted: bool  # a number of tokens is kept
    shared: bool  # a share of the mass is kept


class Entries:
    """Tokens with a number each, one after the other."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._values: list[float] = []

    def add(self, tokens: Sequence[int]) -> int:
        """Where they begin."""
        begin = len(self._tokens)
        self._tokens += tokens
        self._values += [0.0] * len(tokens)
        return begin

    def kinds(self, kinds: Sequence[Sequence[tuple[int, float]]]) -> tuple[int, ...]:
        """Where the entries of each kind begin, and where the last one ends."""
        fences = [len(self._tokens)]
        for kind in kinds:
            self._tokens += [token for token, _ in kind]
            self._values += [value for _, value in kind]
            fences.append(len(self._tokens))
        return tuple(fences)

    def lines(self, *, padded: bool) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """`padded`: to few different lengths."""
        count = len(self._tokens)
        room = _padded(count) if padded else max(count, 1)
        tokens, values = np.zeros(room, dtype=np.int32), np.zeros(room, dtype=np.float32)
        tokens[:count], values[:count] = self._tokens, self._values
        return tokens, values


class TritonSampler(Sampler):
    """`pdl`: a kernel may start while the one before it ends."""

    def __init__(self, *, vocab: int, lanes: int, device: torch.device, pdl: bool = False) -> None:
        super().__init__(vocab=vocab, lanes=lanes, device=device)
        self._pdl = pdl
        self._known: dict[int, Wish] = {}

    @property
    def capturable(self) -> TritonSampler:
        return self

    def _slab(self, logits: Tensor, positions: Sequence[SamplingPosition], columns: int) -> Tensor:
        if any(p.params.constraint is not None for p in positions):  # the plain sampler chooses alike, and takes sets of tokens
            return super()._slab(logits.float(), positions, columns)
        choosing = self.prepare(positions, staging=DirectStaging(self._device), columns=columns)
        self.count(choosing)
        answers, chosen = self._choose(logits, choosing, slice(0, len(positions)))
        self._report(answers, logits, chosen, positions)
        return answers

    def prepare(self, positions: Sequence[SamplingPosition], *, staging: Staging, columns: int = 1, rows: int = 0) -> Choosing:
        """Everything the kernels need to know of the positions, as many rows as asked for: those behind the last position
        choose greedily and concern nobody."""
        checksums = any(p.params.checksums for p in positions)
        with self._lock:
            choosing = Choosing(
                wishes=self._wishes(positions, staging, rows),
                columns=max(columns, CHECKSUM + 1) if checksums else columns,
                weights=self._checksum_weights() if checksums else None,
                sampler=self,
            )
        wishes = choosing.wishes
        staging.note((wishes.counted, wishes.shared, wishes.adjusted, wishes.output is None, checksums, choosing.columns))
        return choosing

    def count(self, choosing: Choosing) -> None:
        """Bring the lanes' counts up to date; drafts are counted where they are looked at."""
        wishes = choosing.wishes
        if wishes.grown is not None and wishes.output is not None:
            one = torch.ones_like(wishes.grown, dtype=torch.int32)
            wishes.output.view(-1).scatter_add_(0, wishes.grown, one)

    def chosen(self, logits: Callable[[slice], Tensor], choosing: Choosing, last: Tensor | None = None) -> Tensor:
        """Answers for all rows of a prepared turn, [C, columns]; logits are asked for slab by slab. `last`: what each lane
        chose last, where rows may await it."""
        self.count(choosing)
        if last is not None and choosing.wishes.output is not None:
            choosing = replace(choosing, wishes=replace(choosing.wishes, tokens=awaited(choosing.wishes.tokens, last)))
        rows = len(choosing.wishes.table)
        return torch.cat([self._choose(logits(span), choosing, span)[0] for span in self._spans(rows)])

    def _choose(self, logits: Tensor, choosing: Choosing, rows: slice) -> tuple[Tensor, Chosen]:
        wishes = replace(choosing.wishes, table=choosing.wishes.table[rows])
        chosen, checksums = choose(logits, wishes, vocab=self._vocab, width=self._width, weights=choosing.weights, pdl=self._pdl)
        if choosing.columns == 1:
            return chosen.tokens.unsqueeze(1), chosen
        answers = torch.zeros(len(wishes.table), choosing.columns, dtype=torch.int64, device=self._device)
        answers[:, TOKEN] = chosen.tokens
        if checksums is not None:
            answers[:, CHECKSUM] = checksums
        return answers, chosen

    def _report(self, answers: Tensor, logits: Tensor, chosen: Chosen, positions: Sequence[SamplingPosition]) -> None:
        """Logprobs of the rows that ask for them."""
        tokens = chosen.tokens.clamp(min=0)
        for mode in ("raw", "processed"):
            asking = [i for i, p in enumerate(positions) if p.params.logprobs is not None and p.params.logprobs_mode == mode]
            if not asking:
                continue
            rows = self._rows(asking, len(positions))
            if mode == "raw":
                raw = self._padded(logits.float())
                self._describe(answers, rows, _deficits(raw if rows is None else raw[rows]), tokens)
            else:
                law = FilteredScores(chosen.deficits, chosen.limits[:, None], chosen.tokens != NO_TOKEN)
                self._describe(answers, rows, law.kept(rows), tokens)

    def wishes(self, positions: Sequence[SamplingPosition]) -> Wishes:
        """For who calls the kernels by hand."""
        return self._wishes(positions, DirectStaging(self._device), 0)

    def _wishes(self, positions: Sequence[SamplingPosition], staging: Staging, rows: int) -> Wishes:
        table = np.zeros((max(len(positions), rows), COLUMNS), dtype=np.int64)
        table[len(positions) :] = _NOBODY
        entries, words, asking = Entries(), list[tuple[int, ...]](), list[SamplingPosition]()
        counted = shared = adjusted = False
        for first, own in _rows_of(positions):
            head, wish = own[0], self._wish(own[0].params)
            known, lane = len(head.history), head.lane if wish.counts else -1
            table[first : first + len(own), :KEY_0] = wish.numbers
            for p, fences in zip(own, self._fences(own, wish, entries), strict=True):
                words.append((*key(p.params.seed, known + len(p.drafts)), wish.greedy, lane, *fences))
            counted, shared, adjusted = counted or wish.counted, shared or wish.shared, adjusted or wish.counts or wish.more
            if wish.counts:
                asking.append(head)
        if words:
            table[: len(positions), KEY_0:] = words
        there = [staging.put(array) for array in (table, *entries.lines(padded=rows > 0))]
        counts, grown = self._counted(asking, rows)
        try:
            added = None if counts is None else staging.put(grown)
        except StagingBufferFull:  # nobody adds what these lanes' marks say was added
            if counts is not None:
                counts.forget(asking)
            raise
        return Wishes(
            table=there[0],
            tokens=there[1],
            values=there[2],
            output=None if counts is None else counts.output,
            prompt=None if counts is None else counts.prompt,
            grown=added,
            counted=counted,
            shared=shared,
            adjusted=adjusted,
        )

    def _fences(self, own: Sequence[SamplingPosition], wish: Wish, entries: Entries) -> Iterator[tuple[int, ...]]:
        """Where the entries of each kind begin, and the last ends, for each position of a row."""
        if wish.more:
            for p in own:
                host = adjustment(p.params, p.history, p.drafts, self._recall(p))
                yield entries.kinds(self._entries_of(p, host))
        else:
            path = _counted_drafts(max(own, key=lambda p: len(p.drafts))) if wish.counts else ()
            begin = entries.add(path)
            for p in own:  # a chain's positions have the beginnings of one path
                drafts = _counted_drafts(p) if wish.counts else ()
                start = begin if drafts == path[: len(drafts)] else entries.add(drafts)
                yield (start, start, start, start, start + len(drafts))

    def _wish(self, params: SamplingParams) -> Wish:
        """What does not change from position to position, remembered for as long as the parameters live."""
        known = self._known.get(id(params))
        if known is None or known.params is not params:
            if len(self._known) > MOST_KNOWN:
                self._known.clear()
            numbers = np.zeros(KEY_0, dtype=np.int64)
            asked = filters(params, self._vocab)
            numbers[:6].view(np.float64)[:] = _numbers(params, asked)
            numbers[TOP_K] = asked.top_k
            more = bool(params.dry is not None or params.bad_words or params.min_tokens or params.logit_bias)
            counted, shared = bool(asked.top_k), params.temperature > 0 and params.top_p < 1
            known = Wish(params, numbers, params.greedy, params.counts_history, more, counted, shared)
            self._known[id(params)] = known
        return known

    def _entries_of(self, p: SamplingPosition, host: Adjustment) -> list[list[tuple[int, float]]]:
        """Tokens with a number each: bias, DRY, bans, and drafts where they count."""
        bias = [(t, v) for t, v in p.params.logit_bias if 0 <= t < self._vocab]
        kinds = [bias, list(host.penalized), [(t, 0.0) for t in inside(host.banned, self._vocab)]]
        return [*kinds, [(t, 0.0) for t in _counted_drafts(p)] if p.params.counts_history else []]

    def _counted(self, counting: Sequence[SamplingPosition], rows: int) -> tuple[LaneCounts | None, npt.NDArray[np.int64]]:
        """The lanes' counts, and where one is to be added to them; padding goes to the lane that nobody reads."""
        if not counting:
            return None, np.zeros(0, dtype=np.int64)
        if self._counts is None:
            self._counts = LaneCounts(vocab=self._width, lanes=self._lanes, device=self._device)
        grown = [lane * self._width + token for lane, token in self._counts.grown(counting)]
        room = _padded(len(grown)) if rows else len(grown)
        places = np.full(room, self._lanes * self._width, dtype=np.int64)
        places[: len(grown)] = grown
        return self._counts, places

    def _checksum_weights(self) -> Tensor:
        """[2, V]"""
        if self._weights is None:
            self._weights = torch.from_numpy(np.stack(checksum_weights(self._vocab))).to(self._device)
        return self._weights


def _counted_drafts(p: SamplingPosition) -> tuple[int, ...]:
    """What stands between history and position; a token that only the device knows as -1 - lane."""
    return (-1 - p.lane,) if p.drafts == (PENDING_TOKEN,) else p.drafts


def _padded(count: int) -> int:
    """Room for so many, of few different sizes."""
    return max(64, 1 << (count - 1).bit_length())


def _rows_of(positions: Sequence[SamplingPosition]) -> Iterator[tuple[int, Sequence[SamplingPosition]]]:
    """Neighbours of one history and its parameters, and the place of the first."""
    first = 0
    for place, p in enumerate(positions):
        if p.history is not positions[first].history or p.params is not positions[first].params:
            yield first, positions[first:place]
            first = place
    if positions:
        yield first, positions[first:]


def _numbers(params: SamplingParams, asked: Filters) -> list[float]:
    return [
        asked.divisor,
        asked.limit,
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
        asked.top_p,
    ]


def _nobody() -> npt.NDArray[np.int64]:
    """A row of the table that asks for nothing."""
    line = np.zeros(COLUMNS, dtype=np.int64)
    line[:6].view(np.float64)[:] = _numbers(SamplingParams(temperature=0.0), Filters())
    line[GREEDY], line[LANE] = 1, -1
    return line


_NOBODY = _nobody()
