"""Turns that repeat: every row takes one known token and perhaps drafts. They are padded to a few shapes and recorded.

In: a plan, and a backend of one device whose operations can be recorded. Out: the turn's hidden states and answers, both still
on the device, and kept drafts brought home there. Everything the host has to say goes through the arena before the work
begins; the work reads device memory alone, so it may be recorded and replayed for every turn of its signature.

This file has the one rule that says which turns are steady. All others run kernel by kernel.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from onedraw.backends.torch.feed import Arena, ArenaFull, Array
from onedraw.backends.torch.graphs import Recorder
from onedraw.backends.torch.inputs import Bucket, Inputs, Shape, fed_inputs
from onedraw.backends.torch.sampler import Position
from onedraw.backends.torch.stack import Ready, Stack, Watch
from onedraw.backends.torch.state import State
from onedraw.sampling.verify import hypotheses
from onedraw.types import Plan, Row

if TYPE_CHECKING:
    from onedraw.backends.torch.kernels.sampler import Choosing

ARENA_BYTES = 16 * 2**20
STEPS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # rows, tokens, and tokens of one row
LEAST_REACH = 512  # positions
LEAST_DEPTH = 8


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
class Steady:
    """A turn under way. `answers` is being copied to the host; `arrived` says when it is there."""

    inputs: Inputs
    worked: Worked
    positions: list[Position]
    answers: Tensor
    arrived: Any


class SteadyTurns:
    """Owner: the backend. One device, and operations and a sampler whose work can be recorded."""

    def __init__(self, stack: Stack, state: State, sampler: Any, shape: Shape, recorder: Recorder) -> None:
        self._stack, self._state, self._sampler, self._shape, self._recorder = stack, state, sampler, shape, recorder
        self._ops: Any = stack.ops
        self._arena = Arena(stack.device, ARENA_BYTES)
        self._recurrent = stack.spec.recurrent

    def begin(self, plan: Plan, watch: Watch) -> Steady | None:
        """Start a turn, where it is a steady one."""
        bucket = bucket_of(plan, recurrent=self._recurrent)
        if bucket is None:
            return None
        arena = self._arena
        arena.begin()
        try:
            inputs = fed_inputs(plan, shape=self._shape, feed=arena, bucket=bucket)
            ready = self._stack.prepare(inputs)
            drafted = arena.put(_row_words(plan, bucket)), arena.put(_parents(plan, bucket))
            positions = positions_of(plan.rows)
            choosing = self._sampler.prepare(positions, feed=arena, rows=bucket.tokens)
        except ArenaFull:
            return None
        arena.note((bucket, watch.captures))
        signature = arena.send()
        worked = self._recorder.run(signature, lambda: self._work(ready, bucket, choosing, drafted, watch))
        answers, arrived = self._fetch(worked.answers)
        return Steady(inputs, worked, positions, answers, arrived)

    def _work(self, ready: Ready, bucket: Bucket, choosing: Choosing, drafted: tuple[Tensor, Tensor], watch: Watch) -> Worked:
        watch = Watch(watch.captures, finite=None if watch.finite is None else [])
        hidden = self._stack.run(ready, [self._state], watch=watch)
        answers = self._sampler.chosen(lambda rows: self._stack.logits(hidden[rows]), choosing)
        if bucket.longest > 1:
            rows, parents = drafted
            self._ops.settle(
                answers[:, 0].contiguous(),
                tokens=ready.tokens,
                parents=parents,
                rows=rows,
                bucket=bucket,
                preparation=ready.stages[0],
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
