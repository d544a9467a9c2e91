"""The turn: plan → submit → collect → accept → tell. Plans of disjoint sequences may be under way at once, and where the
backend goes ahead a plan and the one behind it: then the host's work on a turn falls into the time of the next. Where the
backend only starts a turn, what the last one gave is told when the next is under way: nobody waits for the telling.

In: requests with sinks, cancellations. Out: events to the sinks. One thread owns everything here (see service.py).
A turn that fails fails its rows, gives back what they held, and the engine goes on.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from onedraw.backends.base import Backend, StepHandle
from onedraw.engine.checkpoint_offload import CheckpointOffload
from onedraw.engine.isolated_constraint import Watched
from onedraw.engine.scheduler import Member, Scheduler
from onedraw.engine.sequence import Sequence
from onedraw.engine.stats import DraftStats, Stats
from onedraw.errors import NonFiniteLogits, NoTokenLeft, OnedrawError, StepFailed
from onedraw.speculation.draft_tree import chain_length, depth
from onedraw.types import Finish, Logprobs, Outcome, Plan, Request, Row, RowOutcome, SampledToken, Usage

log = logging.getLogger("onedraw.engine")


@dataclass(frozen=True, slots=True)
class Event:
    """What a request's sink hears after a turn. The last one has a finish or an error."""

    request_id: str
    sampled: tuple[SampledToken, ...] = ()
    finish: Finish | None = None
    stop_id: int | None = None
    usage: Usage = field(default_factory=Usage)
    scored: tuple[Logprobs, ...] | None = None  # logprobs of the prompt's tokens but the first, once, when asked for
    error: OnedrawError | None = None
    kept: int = 0  # how many of `chosen`, from the first on, were drafts


Sink = Callable[[Event], None]
Observer = Callable[[Row, RowOutcome], None]  # sees every row that carried drafts, and what became of them
COUNTED = (
    *("prompt_tokens", "completion_tokens", "drafts", "draft_trees", "draft_tokens", "accepted_tokens"),
    *(
        "middle_chunks",
        "mixed_steps",
        "failed_steps",
        "steps",
        "overlapped_steps",
        "steps_ahead",
        "restores",
        "whole_prompts",
        "page_copies",
    ),
)


class Engine:
    """Owner: the engine thread of the service, or whoever calls `turn` in a test."""

    def __init__(
        self,
        *,
        backend: Backend,
        scheduler: Scheduler,
        observer: Observer | None = None,
        offload: CheckpointOffload | None = None,
    ) -> None:
        self.backend = backend
        self.scheduler = scheduler
        self._observer, self._offload = observer, offload
        self._live: dict[str, tuple[Sequence, Sink]] = {}
        self._under_way: deque[tuple[StepHandle, list[Member]]] = deque()  # in order of submission
        self._news: deque[tuple[Sink, Event]] = deque()  # not told yet, in order
        self._totals = dict.fromkeys(COUNTED, 0)
        self._seconds = 0.0

    @property
    def busy(self) -> bool:
        """Another thread may look while a sequence moves between the queues."""
        return bool(self._live or self._under_way or self._news)

    def add(self, request: Request, sink: Sink) -> None:
        if request.params.constraint is not None:
            request = replace(request, params=replace(request.params, constraint=Watched(request.params.constraint)))
        sequence = Sequence(request)
        self._live[request.id] = (sequence, sink)
        self.scheduler.waiting.append(sequence)

    def cancel(self, request_id: str) -> None:
        """Forget a request; unknown ids have finished already. One that rides gives back what it holds on its return."""
        if request_id in self._live:
            sequence, sink = self._remove(request_id)
            self._news.append((sink, Event(request_id, finish="cancelled", usage=sequence.usage)))
            self._tell()

    def step(self) -> None:
        """Send off what the backend takes, then hear what became of the oldest."""
        if self.scheduler.waiting:
            self._tell()  # who is admitted may be looked up on the disk
        self._send()
        self._send_ahead()
        self._tell()
        if not self._under_way:
            return
        ticket, members = self._under_way.popleft()
        try:
            outcome = self.backend.collect(ticket)
        except BaseException as error:  # a panic below Python is no Exception
            gone = self._let_go(members)
            self._fail([member for member in members if member.sequence not in gone], error)
            return
        gone = self._let_go(members)
        self._count(members, outcome)
        for member, result in zip(members, outcome.rows, strict=True):
            if member.sequence not in gone:
                self._settle(member, result)
        saved = self.scheduler.allocator.take_saved()  # in every step, so that the list stays short
        offloads = self._offload is not None and bool(saved)
        if offloads or not self.backend.capacity.async_tokens:
            self._tell()
        if self._offload is not None and offloads:  # when everybody has heard
            self._offload.keep(saved)

    def _tell(self) -> None:
        """Everybody hears what became of them so far."""
        while self._news:
            sink, event = self._news.popleft()
            sink(event)

    def _send(self) -> None:
        while len(self._under_way) < self.backend.capacity.max_in_flight:
            if not self._sent(self.scheduler.plan(), "overlapped_steps", bool(self._under_way)):
                return

    def _send_ahead(self) -> None:
        """The turn behind the one under way, where that is all there is to do."""
        if len(self._under_way) == 1:
            self._sent(self.scheduler.behind(self._under_way[0][1]), "steps_ahead", True)

    def _sent(self, members: list[Member], counter: str, counts: bool) -> bool:
        """Whether a plan is under way now; where the backend does not take it, its rows fail."""
        if not members:
            return False
        if not self._quick(members):
            self._tell()
        try:
            ticket = self.backend.submit(Plan(tuple(m.row for m in members)))
        except BaseException as error:
            self._fail(members, error)
            return False
        self._totals[counter] += counts
        self._under_way.append((ticket, members))
        self.scheduler.away(members)
        return True

    def _quick(self, members: list[Member]) -> bool:
        """To submit these takes no time worth speaking of: they are only started, and nothing else that computes is under way,
        which could hold a device."""
        plans = [members, *(others for _, others in self._under_way)]
        return all(self.backend.capacity.submits_async([member.row for member in plan]) for plan in plans)

    def _let_go(self, members: list[Member]) -> set[Sequence]:
        """Their plan is back. Those who ended on the way are, and give back what they hold, unless they still ride."""
        self.scheduler.back(members)
        gone = {member.sequence for member in members if member.sequence.ended}
        for sequence in gone:
            if sequence not in self.scheduler.riding:
                self.scheduler.finish(sequence)
        return gone

    def close(self) -> None:
        if self._offload is not None:
            self._offload.close()
        self.backend.close()

    def stats(self) -> Stats:
        allocator, guessed = self.scheduler.allocator, self.scheduler.speculator.stats()
        return Stats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            pages_used=allocator.pages_held,
            pages_total=allocator.pages_total,
            pages_let_go=allocator.let_go,
            checkpoints_used=allocator.slots.kept,
            checkpoints_total=allocator.slots.count,
            checkpoints_saved=allocator.saved,
            checkpoints_evicted=allocator.slots.evictions,
            prefix_queries=allocator.queried,
            prefix_hits=allocator.hit,
            preemptions=self.scheduler.preemptions,
            step_seconds=self._seconds,
            accepted_per_position=guessed.accepted_per_position,
            drafted_by=tuple(DraftStats(source, *counts) for source, counts in guessed.by_source.items()),
            snapshots_saved=0 if self._offload is None else self._offload.saved,
            snapshots_restored=0 if self._offload is None else self._offload.restored,
            propose_seconds=guessed.propose_seconds,
            **self._totals,
        )

    def fail_all(self, error: OnedrawError) -> None:
        """Everybody hears this; what cannot be given back or told in good order keeps nobody else waiting."""
        while self._under_way:
            ticket, members = self._under_way.popleft()
            try:
                self.backend.collect(ticket)
            except BaseException as failure:
                log.error("a turn failed that nobody waited for", exc_info=failure)
            self.scheduler.back(members)
        self.scheduler.riding.clear()  # nothing is under way any more
        for request_id, (_, sink) in list(self._live.items()):
            try:
                self._remove(request_id)
            except BaseException as failure:
                log.error("a request could not be taken off", exc_info=failure)
                self._live.pop(request_id, None)
            self._news.append((sink, Event(request_id, error=error)))
        while self._news:
            try:
                self._tell()
            except BaseException as failure:
                log.error("a request could not be told that it failed", exc_info=failure)
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:  # those who were cancelled on the way
            try:
                self.scheduler.finish(sequence)
            except BaseException as failure:
                log.error("a request could not be taken off", exc_info=failure)

    def _settle(self, member: Member, result: RowOutcome) -> None:
        sequence, row = member.sequence, member.row
        if row.drafts:
            kept = len(result.kept)
            drafted, deepest = len(row.drafts), depth(row.drafts)
            self.scheduler.speculator.learn(row.request_id, member.source, drafted=drafted, kept=kept, depth=deepest)
            if self._observer is not None:
                self._observer(row, result)
        kept_before = sequence.kept
        chosen, finish = sequence.accept(row, result)
        assert sequence.lease is not None
        ahead = self.scheduler.riding[sequence]
        sequence.lease.settle(min(sequence.computed, sequence.known), sequence.history, ahead=ahead)
        self._totals["completion_tokens"] += len(chosen)
        scored = self._scores(sequence)
        sink = self._live[row.request_id][1]
        error = _barren(sequence, result) if result.no_token_left and finish is None else None
        if finish is not None or error is not None:
            self._remove(row.request_id)
        if chosen or finish or scored is not None:
            stop_id = chosen[-1].token if finish == "stop" else None
            kept = sequence.kept - kept_before
            self._news.append((sink, Event(row.request_id, chosen, finish, stop_id, sequence.usage, scored, kept=kept)))
        if error is not None:  # told by itself: a stop string in what was chosen before it ends the reply in good order
            self._news.append((sink, Event(row.request_id, usage=sequence.usage, error=error)))

    def _scores(self, sequence: Sequence) -> tuple[Logprobs, ...] | None:
        """The prompt's logprobs, once, when its last position is computed."""
        if not sequence.bypasses_cache or sequence.told_scores or sequence.computed < len(sequence.request.prompt):
            return None
        sequence.told_scores = True
        return tuple(sequence.scored)

    def _remove(self, request_id: str) -> tuple[Sequence, Sink]:
        sequence, sink = self._live[request_id]
        if sequence not in self.scheduler.riding:
            self.scheduler.finish(sequence)
        self.scheduler.speculator.forget(request_id)
        sequence.ended = True
        del self._live[request_id]  # last: whoever is live still hears when this fails
        return sequence, sink

    def _fail(self, members: list[Member], error: BaseException) -> None:
        """Their turn failed, and they with it."""
        number = secrets.token_hex(6)
        log.error("turn failed, error id %s", number, exc_info=error)
        self._totals["failed_steps"] += 1
        for member in members:
            _, sink = self._remove(member.row.request_id)
            told = StepFailed(f"the turn failed; error id {number} stands in the server's log")
            self._news.append((sink, Event(member.row.request_id, error=told)))
        self._tell()

    def _count(self, members: list[Member], outcome: Outcome) -> None:
        totals = self._totals
        totals["steps"] += 1
        totals["mixed_steps"] += len(members) > 1
        self._seconds += outcome.seconds
        if all(len(member.row.tokens) == 1 for member in members):
            tokens = sum(1 + len(member.row.drafts) for member in members)
            self.scheduler.speculator.observe(tokens=tokens, rows=len(members), seconds=outcome.seconds)
        for member, result in zip(members, outcome.rows, strict=True):
            row = member.row
            totals["prompt_tokens"] += max(min(row.stop, row.prompt_stop) - row.start, 0)
            totals["middle_chunks"] += row.stop < member.sequence.known
            totals["drafts"] += bool(row.drafts)
            totals["draft_trees"] += chain_length(row.drafts) < len(row.drafts)
            totals["draft_tokens"] += len(row.drafts)
            totals["accepted_tokens"] += len(result.kept)
            if row.restore is not None:
                totals["restores"] += 1
                totals["whole_prompts"] += not row.tokens
                totals["page_copies"] += len(row.copies)


def _barren(sequence: Sequence, result: RowOutcome) -> OnedrawError:
    if result.fault:
        return NonFiniteLogits(f"the model's numbers overflowed: {result.fault}")
    constraint = sequence.request.params.constraint
    failure = constraint.failure(sequence.history.output) if isinstance(constraint, Watched) else None
    if failure is not None:
        return failure
    return NoTokenLeft(_NO_TOKEN_LEFT) if sequence.request.params.may_ban_all else NonFiniteLogits(_NOT_FINITE)


_NOT_FINITE = (
    "the model's numbers are not finite, so there is no token to choose; its weights may be damaged, or need a wider --dtype"
)
_NO_TOKEN_LEFT = (
    "the sampling parameters leave no token to choose at this position (bans, bias of -inf, a constraint and filters "
    "together); relax logit_bias, bad_words, min_tokens or the constraint"
)
