"""Turns that repeat: every row takes one known token and perhaps drafts. They are padded to a few shapes and recorded.

In: a plan, and a backend of one device whose operations can be recorded. Out: the turn's hidden states and answers, both still
on the device, and kept drafts brought home there. Everything the host has to say goes through the arena before the work
begins; the work reads device memory alone, so it may be recorded and replayed for every turn of its signature. While a turn
runs, the next one is laid out as it will most likely be: the same rows, one token further.

This file has the one rule that says which turns are steady. All others run kernel by kernel.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from onedraw.backends.answers import Position
from onedraw.backends.torch.feed import Arena, ArenaFull, Array
from onedraw.backends.torch.graphs import Recorder
from onedraw.backends.torch.inputs import Bucket, Inputs, Shape, fed_inputs
from onedraw.backends.torch.stack import Ready, Stack, Watch
from onedraw.backends.torch.state import State
from onedraw.sampling.verify import hypotheses
from onedraw.types import History, Plan, Row, SamplingParams

if TYPE_CHECKING:
    from onedraw.backends.torch.kernels.sampler import Choosing

ARENA_BYTES = 16 * 2**20
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
    """What a turn left on the device."""

    hidden: Tensor  # [T, E]
    watch: Watch
    answers: Tensor  # [T, columns]


@dataclass(frozen=True, slots=True)
class Laid:
    """A turn laid out in the arena: all that its work reads beside weights and state."""

    bucket: Bucket
    inputs: Inputs
    ready: Ready
    rows: Tensor  # [R, 5]
    parents: Tensor  # [T]
    positions: list[Position]
    choosing: Choosing


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
    """Owner: the backend. One device, and operations and a sampler whose work can be recorded. `ahead`: foreseen turns are
    started, too, where no layer has a state."""

    def __init__(
        self, stack: Stack, state: State, sampler: Any, shape: Shape, recorder: Recorder, *, ahead: bool = False
    ) -> None:
        self._stack, self._state, self._sampler, self._shape, self._recorder = stack, state, sampler, shape, recorder
        self._ops: Any = stack.ops
        self._arena = Arena(stack.device, ARENA_BYTES)
        self._recurrent = stack.spec.recurrent
        self._ahead = ahead and not self._recurrent  # a state that was moved on cannot be taken back
        self._foreseen: Foreseen | None = None
        self.foreseen = self.started = 0  # turns that were laid out, and started, before they came

    def begin(self, plan: Plan, watch: Watch) -> Steady | None:
        """Start a turn, where it is a steady one."""
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
                laid = foreseen.laid if foreseen is not None and expected else self._lay(plan, bucket)
            except ArenaFull:
                return None
            if expected:
                tokens = np.zeros(bucket.tokens, dtype=np.int64)
                tokens[: len(plan.rows)] = [row.tokens[0] for row in plan.rows]
                self._arena.rewrite_first(tokens)
            steady = self._launch(laid, watch)
        # A drafter makes the next turn another one, and layers with inputs of their own look tokens up on the host.
        if not watch.captures and not self._stack.spec.inputs:
            self._foresee(plan, steady, watch)
        return steady

    def _launch(self, laid: Laid, watch: Watch, source: Steady | None = None) -> Steady:
        """Start a turn that was laid out; its tokens are what `source` chose, where it is given."""
        self._arena.note(watch.captures)
        signature = self._arena.send()
        if source is not None:
            torch.clamp(source.worked.answers[:, 0], min=0, out=laid.ready.tokens)
        worked = self._recorder.run(signature, lambda: self._work(laid, watch))
        return Steady(laid.inputs, worked, laid.positions, *self._fetch(worked.answers))

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

    def _lay(self, plan: Plan, bucket: Bucket) -> Laid:
        arena = self._arena
        arena.begin()
        inputs = fed_inputs(plan, shape=self._shape, feed=arena, bucket=bucket)
        ready = self._stack.prepare(inputs)  # the tokens come first
        rows, parents = arena.put(_row_words(plan, bucket)), arena.put(_parents(plan, bucket))
        positions = positions_of(plan.rows)
        choosing = self._sampler.prepare(positions, feed=arena, rows=bucket.tokens)
        arena.note(bucket)
        return Laid(bucket, inputs, ready, rows, parents, positions, choosing)

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
        alike = watch.finite is None and len(laid.ready.tokens) == len(steady.worked.answers)
        if self._ahead and alike:
            self._foreseen = Foreseen(rows, laid, self._launch(laid, watch, steady), steady)
        else:
            self._foreseen = Foreseen(rows, laid)

    def _work(self, laid: Laid, watch: Watch) -> Worked:
        watch = Watch(watch.captures, finite=None if watch.finite is None else [])
        hidden = self._stack.run(laid.ready, self._state, watch=watch)
        answers = self._sampler.chosen(lambda rows: self._stack.scores(hidden[rows]), laid.choosing)
        if laid.bucket.longest > 1:
            self._ops.settle(
                answers[:, 0].contiguous(),
                tokens=laid.ready.tokens,
                parents=laid.parents,
                rows=laid.rows,
                bucket=laid.bucket,
                preparation=laid.ready.preparation,
                state=self._state,
            )
        return Worked(hidden, watch, answers)

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


def _row_words(plan: Plan, bucket: Bucket) -> Array:
    """[R, 5]: first token, tokens, lane, first place in the rollback buffer, slot of the first draft."""
    words = np.zeros((bucket.rows, 5), dtype=np.int32)
    first = held = 0
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
