"""Turns that repeat: every row takes one known token and perhaps drafts. They are padded to a few shapes and recorded.

In: a plan, and stages whose operations can be recorded. Out: the turn's hidden states and answers, both still on the device,
and kept drafts brought home on every stage. Everything the host has to say goes through arenas before a work begins; the
work reads device memory alone, so each stage's part (`part.py`) is recorded and replayed for every turn of its signature. The
layers are one work and choosing is another: what is asked of the choosing is laid out while the layers run, and layers that were
recorded once serve whatever is asked. Nobody waits between the works: turns that follow each other overlap on stages of several
devices by themselves. What a turn of single tokens chose stays on the device, lane by lane: a turn may begin with it before the
host has heard of it.

Which rows are steady is said once, in `backends/base.py`. Turns with others run kernel by kernel.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from onedraw.backends.base import is_plain_decode
from onedraw.backends.sampled_rows import SamplingPosition
from onedraw.backends.torch.model.transformer import LayerProbe, ResidualStream, Transformer
from onedraw.backends.torch.runner.graph_segment import NOTHING, GraphStage, GraphStageInputs
from onedraw.backends.torch.runner.inputs import Bucket, InputLayout, Inputs, Span, fed_inputs
from onedraw.backends.torch.runner.stage_boundary import current_device
from onedraw.backends.torch.runner.staging_buffers import Array, DirectStaging, Staging, StagingBuffer, StagingBufferFull
from onedraw.backends.torch.sampling.sampler import Sampler, SamplingInputs
from onedraw.sampling.verify import draft_prefixes
from onedraw.types import PENDING_TOKEN, Draft, History, Plan, Row, SamplingParams

STEPS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # rows, tokens, and tokens of one row
LEAST_REACH = 512  # positions
LEAST_DEPTH = 8
WISHES_BYTES = 8 * 2**20
NEAR_SECONDS, FAR_SECONDS, DRAFTS_SECONDS = 40, 15, 25  # of a start: short contexts, and as much else as there is time for
MOST_REHEARSED = 96  # places, each with a recording of the layers: fewer than the recorder keeps
REHEARSED = (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9))


def bucket_of(plan: Plan, *, recurrent: bool) -> Bucket | None:
    """The layout that a turn is padded to; None where some row is not steady, or there are too many."""
    rows = plan.rows
    if not rows or not all(is_plain_decode(row, recurrent=recurrent) for row in rows):
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


def _step(count: int) -> int:
    return STEPS[bisect_left(STEPS, count)]


@dataclass(frozen=True, slots=True)
class Worked:
    """What a turn left on the device of the last stage."""

    hidden: Tensor  # [T, E]
    watch: LayerProbe
    answers: Tensor  # [T, columns], and the first layer that was not finite where that is watched


@dataclass(frozen=True, slots=True)
class Laid:
    """What the layers of a turn read, in the arenas of all stages."""

    plan: Plan
    bucket: Bucket
    parts: list[GraphStageInputs]


@dataclass(frozen=True, slots=True)
class Asked:
    """What choosing reads: in an arena of its own, and then it has a signature."""

    positions: list[SamplingPosition]
    lanes: Tensor  # [T], of single tokens
    sampling: SamplingInputs
    signature: Hashable | None


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A turn under way. `answers` is being copied to the host; `arrived` says when it is there."""

    inputs: Inputs
    worked: Worked
    positions: list[SamplingPosition]
    answers: Tensor
    arrived: Any

    def wait(self) -> None:
        """Until the answers are there."""
        if self.arrived is not None:
            self.arrived.synchronize()

    @property
    def faults(self) -> list[int]:
        """Per token the first layer that was not finite; nothing where nobody looked. When the answers are there."""
        return [] if self.worked.watch.finite is None else self.answers[:, -1].tolist()


class WarmUpShape(NamedTuple):
    """Of a turn that is rehearsed: so many rows at this position, each with so many drafts."""

    rows: int
    start: int
    drafts: int = 0


def warm_up_shapes(lanes: int, max_context: int, drafts: int = 0) -> list[tuple[float, list[WarmUpShape]]]:
    """What is rehearsed, in this order, and until how many seconds after the beginning: every number of rows in the first two
    reaches; one row as far as the context goes; one row with drafts, up to so many; and more rows from near to far."""
    counts = [count for count in STEPS if count <= lanes] or [1]
    lengths = sorted({min(step - 1, drafts) for step in STEPS} - {0})  # the longest of each bucket
    starts = (LEAST_REACH // 2, LEAST_REACH)
    far = [LEAST_REACH << step for step in range(1, 32) if LEAST_REACH << step < max_context]
    near = [WarmUpShape(rows, start) for rows in counts for start in _within(starts, max_context)]
    drafted = [WarmUpShape(1, start, length) for length in lengths for start in _within(starts, max_context - length)]
    alone, more = (
        [WarmUpShape(1, start) for start in far],
        [WarmUpShape(rows, start) for start in far for rows in counts if rows > 1],
    )
    return [(NEAR_SECONDS, near), (FAR_SECONDS, alone), (DRAFTS_SECONDS, drafted), (FAR_SECONDS, more)]


def _within(starts: Sequence[int], stop: int) -> list[int]:
    """Positions that a row's last known token may have, where all that comes with it ends before `stop`."""
    return sorted({min(start, stop - 1) for start in starts}) if stop > 0 else []


class GraphRunner:
    """Owner: the backend. A part per stage, and a sampler whose work can be recorded. What a turn of several stages leaves is
    copied out of the recorder's memory: others work there before it is read. `max_in_flight`: turns under way at once."""

    def __init__(
        self,
        model: Transformer,
        parts: Sequence[GraphStage],
        sampler: Sampler,
        layout: InputLayout,
        *,
        lanes: int,
        max_in_flight: int = 1,
    ) -> None:
        self._model, self._layout = model, layout
        capture, capturable = model.ops.capture, sampler.capturable
        assert capture is not None, "the last stage samples in a captured step"
        assert capturable is not None, "the last stage samples in a captured step"
        self._capture, self._sampler = capture, capturable
        self._parts = list(parts)
        self._recurrent = model.spec.recurrent
        self._lanes = lanes
        # What each lane chose last, padding has one more: where it is chosen, and where the next turn begins.
        self._last = torch.zeros(lanes + 1, dtype=torch.int64, device=model.device)
        first = self._parts[0].device
        self._next = self._last if first == model.device else torch.zeros_like(self._last, device=first)
        self._mail = ResultBuffers(max_in_flight + 2)
        # Out of the memory that recorded works share: what the layers left, for the choosing.
        self._hidden = torch.zeros(STEPS[-1], model.spec.hidden, dtype=model.dtype, device=model.device)
        self._wishes, self._tickets = StagingBuffer(model.device, WISHES_BYTES, sides=max_in_flight + 1), max_in_flight
        self.awaited = 0  # turns that began before their tokens were known to the host

    def serves(self, plan: Plan) -> Bucket | None:
        """The layout of a steady turn; None where the turn is none."""
        return bucket_of(plan, recurrent=self._recurrent)

    def begin(self, plan: Plan, bucket: Bucket, watch: LayerProbe, *, held: int = 0) -> CapturedStep | None:
        """Start a turn; None where it brings too much. `held`: its first place in the rollback buffer."""
        try:
            laid = self._lay(plan, bucket, held)
        except StagingBufferFull:
            return None
        self.awaited += plan.rows[0].tokens == (PENDING_TOKEN,)
        return self._launch(laid, watch)

    def _launch(self, laid: Laid, watch: LayerProbe) -> CapturedStep:
        """Start a turn that was laid out: all stages, one behind the other, then the choosing, and nobody waits."""
        signatures = [part.send(watch.captures) for part in self._parts]
        seen = LayerProbe(watch.captures, finite=None if watch.finite is None else [])
        stream: ResidualStream | None = None
        for part, own, signature in zip(self._parts, laid.parts, signatures, strict=True):
            work = partial(self._pass, part, own, part.enter(stream, laid.bucket), watch)
            stream, watched = part.record(signature, work)
            with current_device(part.device):
                self._gather(seen, watched)
        assert stream is not None
        asked = self._ask(laid)
        answers = self._answered(laid, asked, stream.x, signatures[-1])
        with current_device(self._parts[-1].device):
            worked = self._taken(stream.x, answers, seen)
        for part, own, signature in zip(self._parts[:-1], laid.parts, signatures):
            part.commit_late(signature, own, worked.answers)
        with current_device(self._parts[-1].device):
            if self._next is not self._last and self._tickets == 1:  # else nobody awaits a token, and devices would wait for it
                self._next.copy_(self._last)
            return CapturedStep(laid.parts[-1].inputs, worked, asked.positions, *self._mail.send(worked.answers))

    def _gather(self, seen: LayerProbe, watched: LayerProbe) -> None:
        """What a stage showed, out of the memory that the next work has."""
        seen.features.extend(feature.to(self._model.device, copy=True) for feature in watched.features)
        if seen.finite is not None and watched.finite:
            seen.finite.extend(torch.stack(watched.finite).to(self._model.device))

    def _taken(self, hidden: Tensor, answers: Tensor, seen: LayerProbe) -> Worked:
        """What all stages left, as if there were one; out of the memory that works share where others settle next."""
        several = len(self._parts) > 1
        if seen.finite is not None:
            answers = torch.cat([answers, first_fault(seen.finite)], 1)
        elif several:
            answers = answers.clone()
        return Worked(hidden.clone() if several else hidden, seen, answers)

    def rehearse(self, lanes: int, drafts: int, watch: LayerProbe, tell: Callable[[str], None]) -> None:
        """Record the turns of decoding before anybody waits for them, greedy and sampled, without drafts and with up to so many.
        Rehearsed rows lie on the page that nobody reads. What takes too long is recorded when it first comes."""
        begin, groups = time.monotonic(), warm_up_shapes(lanes, self._model.max_context, drafts)
        asked = [(seconds, place) for seconds, places in groups for place in places][:MOST_REHEARSED]
        late = False
        for number, (seconds, place) in enumerate(asked, start=1):
            if time.monotonic() - begin > seconds:
                late = True
                continue
            tell(f"recording turns, {number} of {len(asked)}")
            for params in REHEARSED:
                plan = Plan(tuple(self._rehearsed(lane, place, params) for lane in range(place.rows)))
                bucket = self.serves(plan)
                assert bucket is not None
                self.begin(plan, bucket, watch)
        if late:
            tell(f"recording turns: the rest when they first come, after {time.monotonic() - begin:.0f} s")

    def _rehearsed(self, lane: int, place: WarmUpShape, params: SamplingParams) -> Row:
        start, drafts = place.start, tuple(Draft(0, i - 1) for i in range(place.drafts))
        pages = tuple((page,) * ((start + len(drafts)) // self._layout.page_size + 1) for page in self._layout.scratch)
        history = History((0,) * start, [0])
        return Row(f"rehearsal {lane}", lane, pages, start, (0,), drafts, start, True, params, history)

    def _lay(self, plan: Plan, bucket: Bucket, held: int) -> Laid:
        layout, last = replace(self._layout, held=held) if held else self._layout, self._parts[-1].arena
        inputs = fed_inputs(plan, layout=layout, staging=last, bucket=bucket)
        single = bucket.longest == 1
        rows, parents = (NOTHING, NOTHING) if single else (_row_words(plan, bucket, held), _parents(plan, bucket))
        return Laid(plan, bucket, [part.lay(inputs, bucket, rows, parents) for part in self._parts])

    def _ask(self, laid: Laid) -> Asked:
        """The layers run by now, so what is too much for the arena goes without it, and is not recorded."""
        positions, arena = positions_of(laid.plan.rows), self._wishes
        with current_device(self._parts[-1].device):
            try:
                arena.begin()
                lanes, sampling = self._wished(laid, positions, arena)
                return Asked(positions, lanes, sampling, arena.send())
            except StagingBufferFull:
                lanes, sampling = self._wished(laid, positions, DirectStaging(arena.device))
                return Asked(positions, lanes, sampling, None)

    def _wished(self, laid: Laid, positions: list[SamplingPosition], staging: Staging) -> tuple[Tensor, SamplingInputs]:
        bucket = laid.bucket
        lanes = staging.put(_lane_words(laid.plan, bucket, self._lanes) if bucket.longest == 1 else NOTHING)
        staging.note(bucket.tokens)
        return lanes, self._sampler.prepare(positions, staging=staging, rows=bucket.tokens)

    def _pass(
        self, part: GraphStage, own: GraphStageInputs, entered: ResidualStream | None, watch: LayerProbe
    ) -> tuple[ResidualStream, LayerProbe]:
        """A stage's layers; the first finds the tokens that the host does not know, the last leaves what choosing reads."""
        watch = LayerProbe(watch.captures, finite=None if watch.finite is None else [])
        awaits = entered is None and own.bucket.longest == 1
        stream = part.pass_through(own, entered, self._next if awaits else None, watch)
        if part is self._parts[-1]:
            hidden = self._hidden[: own.bucket.tokens]
            hidden.copy_(self._model.leave(stream))
            stream = ResidualStream(hidden, None, 0)
        return stream, watch

    def _answered(self, laid: Laid, asked: Asked, hidden: Tensor, signature: Hashable) -> Tensor:
        """[T, columns]. Drafts that are kept come home by what the layers were told, so recorded choosing belongs to theirs."""
        own = asked.signature
        together = own if own is None or laid.bucket.longest == 1 else (signature, own)
        return self._parts[-1].record(together, partial(self._choose, laid, asked, hidden))

    def _choose(self, laid: Laid, asked: Asked, hidden: Tensor) -> Tensor:
        """Choose, and bring the last stage's kept drafts home."""
        single = laid.bucket.longest == 1
        scores = lambda rows: self._model.scores(hidden[rows])  # noqa: E731
        answers: Tensor = asked.sampling.sample(scores, self._last if single else None)
        if single:
            self._capture.keep_last_tokens(answers, asked.lanes, self._last)
        else:
            self._parts[-1].commit(laid.parts[-1], answers[:, 0].contiguous())
        return answers


def first_fault(finite: Sequence[Tensor]) -> Tensor:
    """[T, 1]: the first layer after which a token is not finite, -1 where there is none."""
    sound = torch.stack(list(finite)).to(torch.int64).cumprod(0).sum(0)
    return torch.where(sound == len(finite), -1, sound)[:, None]


def first_faults(watch: LayerProbe) -> list[int]:
    """The same on the host, per token; nothing where nobody looked."""
    return [] if not watch.finite else first_fault([finite.cpu() for finite in watch.finite])[:, 0].tolist()


def fault_text(found: Sequence[int], span: Span) -> str:
    """Where the numbers of a row stopped being finite; empty where they are, or nobody looked."""
    layers = [layer for layer in found[span.first : span.first + span.count] if layer >= 0]
    return "" if not layers else f"layer {min(layers)} left the range of f16; run with --dtype and --activation-dtype bf16 or f32"


class ResultBuffers:
    """Answers on their way to the host, in buffers that are used again; `boxes`: more than turns may be under way. Owner:
    GraphRunner."""

    def __init__(self, boxes: int) -> None:
        self._count = boxes
        self._boxes: dict[tuple[int, ...], deque[tuple[Tensor, Any]]] = {}

    def send(self, answers: Tensor) -> tuple[Tensor, Any]:
        """Where they will be, and the event that says when; None where they are there already."""
        if answers.device.type != "cuda":
            return answers.clone(), None
        boxes = self._boxes.get(answers.shape)
        if boxes is None:
            boxes = self._boxes[answers.shape] = deque(_box(answers) for _ in range(self._count))
        boxes.rotate(1)
        there, arrived = boxes[0]
        there.copy_(answers, non_blocking=True)
        arrived.record()
        return there, arrived


def _box(answers: Tensor) -> tuple[Tensor, Any]:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return torch.empty(answers.shape, dtype=answers.dtype, pin_memory=True), event


def positions_of(rows: Sequence[Row]) -> list[SamplingPosition]:
    """Where a steady turn chooses: after every token. A token that its row awaits is not in the history yet."""
    return [
        SamplingPosition(
            row.lane, row.params, row.history, (*row.tokens, *drafts) if row.awaits_token else drafts, row.request_id
        )
        for row in rows
        for drafts in draft_prefixes(row.drafts)
    ]


def _lane_words(plan: Plan, bucket: Bucket, lanes: int) -> Array:
    """[T]: the lane of each token; padding has the one behind the last."""
    words = np.full(bucket.tokens, lanes, dtype=np.int32)
    words[: len(plan.rows)] = [row.lane for row in plan.rows]
    return words


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
