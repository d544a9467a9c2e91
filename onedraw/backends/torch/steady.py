"""Turns that repeat: every row takes one known token and perhaps drafts. They are padded to a few shapes and recorded.

In: a plan, and stages whose operations can be recorded. Out: the turn's hidden states and answers, both still on the device,
and kept drafts brought home on every stage. Everything the host has to say goes through arenas before the work begins; the
work reads device memory alone, so each stage's part (`part.py`) is recorded and replayed for every turn of its signature. Nobody
waits between the parts: turns that follow each other overlap on stages of several devices by themselves. While a turn runs, the
next one is laid out as it will most likely be: the same rows, one token further.

This file has the one rule that says which turns are steady. All others run kernel by kernel.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from onedraw.backends.answers import Position
from onedraw.backends.torch.boundary import current
from onedraw.backends.torch.feed import ArenaFull, Array
from onedraw.backends.torch.graphs import Recorder
from onedraw.backends.torch.inputs import Bucket, Inputs, Shape, fed_inputs
from onedraw.backends.torch.part import LaidPart, Part
from onedraw.backends.torch.stack import Stack, Stream, Watch
from onedraw.backends.torch.state import State
from onedraw.sampling.verify import hypotheses
from onedraw.types import History, Plan, Row, SamplingParams

if TYPE_CHECKING:
    from onedraw.backends.torch.kernels.sampler import Choosing

STEPS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # rows, tokens, and tokens of one row
LEAST_REACH = 512  # positions
LEAST_DEPTH = 8
REHEARSAL_SECONDS = 40
REHEARSED = (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9))


def bucket_of(plan: Plan, *, recurrent: bool) -> Bucket | None:
    """The shape that a turn is padded to; None where it is not steady.

    Steady is a turn whose rows choose, from one generated token each, with what the sampling kernels can do alone: logprobs
    and constraints are left to the host's part of the sampler, and checkpoints and prompts come once per request.
    """
    rows = plan.rows
    if not rows or not all(_steady(row, recurrent=recurrent) for row in rows):
        return None
    tokens = sum(1 + len(row.drafts) for row in rows)
    if tokens > STEPS[-1]:
        return None
    longest = _step(max(1 + len(row.drafts) for row in rows))
    padded_rows = _step(len(rows))
    last = max(row.stop + len(row.drafts) for row in rows)
    depth = None
    if any(draft.parent != index - 1 for row in rows for index, draft in enumerate(row.drafts)):
        depth = max(LEAST_DEPTH, 1 << (longest - 1).bit_length())
    return Bucket(
        rows=padded_rows,
        tokens=padded_rows if longest == 1 else max(_step(tokens), padded_rows),
        longest=longest,
        reach=max(LEAST_REACH, 1 << (last - 1).bit_length()),
        depth=depth,
    )


def _steady(row: Row, *, recurrent: bool) -> bool:
    plain = row.chooses and len(row.tokens) == 1 and not (row.scores or row.copies or row.saves) and row.restore is None
    chooses = row.params.logprobs is None and row.params.constraint is None
    return plain and chooses and (row.start >= row.prompt_stop or not recurrent)


def _step(count: int) -> int:
    return STEPS[bisect_left(STEPS, count)]


@dataclass(frozen=True, slots=True)
class Worked:
    """What a turn left on the device of the last stage."""

    hidden: Tensor  # [T, E]
    watch: Watch
    answers: Tensor  # [T, columns]


@dataclass(frozen=True, slots=True)
class Laid:
    """A turn laid out in the arenas of all stages."""

    bucket: Bucket
    parts: list[LaidPart]
    positions: list[Position]
    choosing: Choosing

    @property
    def tokens(self) -> Tensor:
        return self.parts[0].ready.tokens


@dataclass(frozen=True, slots=True)
class Steady:
    """A turn under way. `answers` is being copied to the host; `arrived` says when it is there."""

    inputs: Inputs
    worked: Worked
    positions: list[Position]
    answers: Tensor
    arrived: Any


@dataclass(frozen=True, slots=True)
class Foreseen:
    """The next turn, laid out while this one runs, as it will be if every row goes on by the one token it chooses.

    It may be started already, with the tokens that this one leaves on the device. If it does not come, its keys and values lie
    behind everything that is settled, where they are written again before anybody reads them.
    """

    rows: tuple[tuple[str, int, int, SamplingParams, tuple[list[int], ...]], ...]  # request, lane, start, params, pages
    laid: Laid
    started: Steady | None = None  # it runs already
    source: Steady | None = None  # the turn whose choices are its tokens, where it does

    def is_for(self, plan: Plan) -> bool:
        if self.source is not None and not self._has_tokens_of(plan, self.source):
            return False
        return len(plan.rows) == len(self.rows) and all(
            not row.drafts
            and row.request_id == request
            and row.lane == lane
            and row.start == start
            and row.params is params
            and all(list(held) == known for held, known in zip(row.pages, pages, strict=True))
            for row, (request, lane, start, params, pages) in zip(plan.rows, self.rows)
        )

    def _has_tokens_of(self, plan: Plan, source: Steady) -> bool:
        if source.arrived is not None and not source.arrived.query():
            return False
        chosen = source.answers[: len(plan.rows), 0].tolist()
        return chosen == [row.tokens[0] for row in plan.rows]


def rehearsed_starts(max_context: int) -> list[int]:
    """Where rehearsed rows stand: a position of each of the first two reaches, as far as the context goes."""
    return sorted({min(start, max_context - 1) for start in (LEAST_REACH // 2, LEAST_REACH)})


class SteadyTurns:
    """Owner: the backend. Operations of all stages, and a sampler, whose work can be recorded; a recorder per stage. `ahead`:
    foreseen turns are started, too, where no layer has a state. `several`: turns are started before the one before is read, so
    what a turn leaves is copied out of the memory that recorded turns share."""

    def __init__(
        self,
        stack: Stack,
        states: Sequence[State],
        sampler: Any,
        shape: Shape,
        recorders: Sequence[Recorder],
        *,
        ahead: bool = False,
        several: bool = False,
    ) -> None:
        self._stack, self._sampler, self._shape, self._several = stack, sampler, shape, several
        numbered = enumerate(zip(states, recorders, strict=True))
        self._parts = [Part(stack, number, state, recorder, tokens=STEPS[-1]) for number, (state, recorder) in numbered]
        self._recurrent = stack.spec.recurrent
        self._ahead = ahead and not self._recurrent  # a state that was moved on cannot be taken back
        self._foreseen: Foreseen | None = None
        self._riders: list[str] = []  # of the last turn
        self.foreseen = self.started = 0  # turns that were laid out, and started, before they came

    def begin(self, plan: Plan, watch: Watch, *, held: int = 0) -> Steady | None:
        """Start a turn, where it is a steady one. `held`: its first place in the rollback buffer."""
        bucket = bucket_of(plan, recurrent=self._recurrent)
        foreseen, self._foreseen = self._foreseen, None
        if bucket is None:
            return None
        expected = foreseen is not None and foreseen.is_for(plan)
        self.foreseen += expected
        if foreseen is not None and expected and foreseen.started is not None:
            steady = foreseen.started
            self.started += 1
        else:
            try:
                laid = foreseen.laid if foreseen is not None and expected else self._lay(plan, bucket, held)
            except ArenaFull:
                return None
            if expected:
                tokens = np.zeros(bucket.tokens, dtype=np.int64)
                tokens[: len(plan.rows)] = [row.tokens[0] for row in plan.rows]
                for part in self._parts:
                    part.arena.rewrite_first(tokens)
            steady = self._launch(laid, watch)
        # A drafter makes the next turn another one, and layers with inputs of their own look tokens up on the host.
        if not watch.captures and not self._stack.spec.inputs and self._goes_on(plan):
            self._foresee(plan, steady, watch)
        return steady

    def _goes_on(self, plan: Plan) -> bool:
        """Whether the next turn is likely one of the same rows. Where several are under way, they come in turn: not if this
        one was not of the same rows as the one before."""
        before, self._riders = self._riders, [row.request_id for row in plan.rows]
        return not self._several or self._riders == before

    def _launch(self, laid: Laid, watch: Watch, source: Steady | None = None) -> Steady:
        """Start a turn that was laid out; its tokens are what `source` chose, where it is given."""
        signatures = [part.send(watch.captures) for part in self._parts]
        if source is not None:
            with current(laid.tokens.device):
                torch.clamp(source.worked.answers[:, 0].to(laid.tokens.device), min=0, out=laid.tokens)
        seen = Watch(watch.captures, finite=None if watch.finite is None else [])
        stream: Stream | None = None
        for part, own, signature in zip(self._parts[:-1], laid.parts, signatures):
            entered = part.enter(stream)
            stream, watched = part.record(signature, partial(part.pass_through, own, entered, watch))
            self._gather(seen, watched)
        last, entered = self._parts[-1], self._parts[-1].enter(stream)
        worked = last.record(signatures[-1], partial(self._work, laid, entered, watch))
        for part, own, signature in zip(self._parts[:-1], laid.parts, signatures):
            part.settle_late(signature, own, worked.answers)
        with current(last.device):
            if len(self._parts) > 1:
                self._gather(seen, worked.watch)
                hidden = worked.hidden.clone() if self._several else worked.hidden
                worked = Worked(hidden, seen, worked.answers)
            return Steady(laid.parts[-1].inputs, worked, laid.positions, *self._fetch(worked.answers))

    def _gather(self, seen: Watch, watched: Watch) -> None:
        """What a stage showed, out of the memory that the next one works in."""
        seen.features.extend(feature.to(self._stack.device, copy=True) for feature in watched.features)
        if seen.finite is not None:
            seen.finite.extend(finite.clone() for finite in watched.finite or ())

    def rehearse(self, lanes: int, watch: Watch, tell: Callable[[str], None]) -> None:
        """Record the turns of plain decoding before anybody waits for them: every number of rows, short contexts, greedy and
        sampled. Rehearsed rows lie on the page that nobody reads. What takes too long is recorded when it first comes."""
        deadline = time.monotonic() + REHEARSAL_SECONDS
        counts = [count for count in STEPS if count <= lanes] or [1]
        for number, count in enumerate(counts, start=1):
            tell(f"recording turns, {number} of {len(counts)}")
            for params, start in itertools.product(REHEARSED, rehearsed_starts(self._stack.max_context)):
                if time.monotonic() > deadline:
                    tell(f"recording turns: the rest when they first come, after {REHEARSAL_SECONDS} s")
                    return
                plan = Plan(tuple(self._rehearsed(lane, start, params) for lane in range(count)))
                self.begin(plan, watch)
                self._foreseen = None

    def _rehearsed(self, lane: int, start: int, params: SamplingParams) -> Row:
        pages = tuple((page,) * (start // self._shape.page_size + 1) for page in self._shape.scratch)
        history = History((0,) * start, [0])
        return Row(f"rehearsal {lane}", lane, pages, start, (0,), (), start, True, params, history)

    def _lay(self, plan: Plan, bucket: Bucket, held: int = 0) -> Laid:
        shape, last = replace(self._shape, held=held), self._parts[-1].arena
        inputs = fed_inputs(plan, shape=shape, feed=last, bucket=bucket)
        rows, parents = _row_words(plan, bucket, held), _parents(plan, bucket)
        parts = [part.lay(inputs, bucket, rows, parents) for part in self._parts]
        positions = positions_of(plan.rows)
        return Laid(bucket, parts, positions, self._sampler.prepare(positions, feed=last, rows=bucket.tokens))

    def _foresee(self, plan: Plan, steady: Steady, watch: Watch) -> None:
        """Lay out the turn after this one, where nothing of it but the tokens hangs on what this one chooses, and start it."""
        size = self._shape.page_size
        for row in plan.rows:
            params = row.params
            if row.drafts or params.counts_history or params.dry is not None or params.bad_words:
                return
            if any((row.start + 1) // size >= len(held) for held in row.pages):
                return  # a page will be added
            if len(row.history.output) + 2 > params.max_tokens:
                return  # this one is its last
        ahead = tuple(replace(row, start=row.start + 1, tokens=(0,), history=_longer(row.history)) for row in plan.rows)
        bucket = bucket_of(Plan(ahead), recurrent=self._recurrent)
        if bucket is None:
            return
        try:
            laid = self._lay(Plan(ahead), bucket)
        except ArenaFull:
            return
        rows = tuple((row.request_id, row.lane, row.start, row.params, tuple(list(held) for held in row.pages)) for row in ahead)
        alike = watch.finite is None and len(laid.tokens) == len(steady.worked.answers)
        if self._ahead and alike:
            self._foreseen = Foreseen(rows, laid, self._launch(laid, watch, steady), steady)
        else:
            self._foreseen = Foreseen(rows, laid)

    def _work(self, laid: Laid, entered: Stream | None, watch: Watch) -> Worked:
        """The last stage: its layers, then choose, and bring its own kept drafts home."""
        last, own = self._parts[-1], laid.parts[-1]
        stream, seen = last.pass_through(own, entered, watch)
        hidden = self._stack.leave(stream)
        answers = self._sampler.chosen(lambda rows: self._stack.scores(hidden[rows]), laid.choosing)
        if laid.bucket.longest > 1:
            last.settle(own, answers[:, 0].contiguous())
        return Worked(hidden, seen, answers)

    def _fetch(self, answers: Tensor) -> tuple[Tensor, Any]:
        if answers.device.type != "cuda":
            return answers, None
        there = torch.empty(answers.shape, dtype=answers.dtype, pin_memory=True)
        there.copy_(answers, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return there, arrived


def _longer(history: History) -> History:
    """As long as it will be after one more token, which is not known."""
    return History(history.prompt, [0] * (len(history.output) + 1))


def positions_of(rows: Sequence[Row]) -> list[Position]:
    """Where a steady turn chooses: after every token."""
    return [
        Position(row.lane, row.params, row.history, drafts, row.request_id) for row in rows for drafts in hypotheses(row.drafts)
    ]


def _row_words(plan: Plan, bucket: Bucket, held: int) -> Array:
    """[R, 5]: first token, tokens, lane, first place in the rollback buffer, slot of the first draft."""
    words = np.zeros((bucket.rows, 5), dtype=np.int32)
    first = 0
    for line, row in zip(words, plan.rows):
        line[:] = first, 1 + len(row.drafts), row.lane, held, row.stop
        first, held = first + 1 + len(row.drafts), held + len(row.drafts)
    return words


def _parents(plan: Plan, bucket: Bucket) -> Array:
    parents = np.full(bucket.tokens, -2, dtype=np.int32)
    first = 0
    for row in plan.rows:
        parents[first + 1 : first + 1 + len(row.drafts)] = [draft.parent for draft in row.drafts]
        first += 1 + len(row.drafts)
    return parents
