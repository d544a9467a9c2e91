"""The engine step: plan rows, submit them to the backend, collect their outcomes, commit them, and deliver events.

Requests come with a sink, a function that the engine calls with the request's events. All state here belongs to one thread, which
`service.py` runs.

A plan is a list of rows. A row is what one sequence computes in a step; a row together with its sequence is a member of the plan.
A plan is in flight from its submission until its outcome is collected. Several plans with different sequences may be in flight
at once. With asynchronous scheduling a plan is submitted before the tokens of the previous one are known, so the host prepares
a step while the device computes another. Where `submit` returns before the step is computed, the events of a step are delivered
after the next one is submitted, so the device does not wait for them. If a step raises, its own rows fail and release their
pages, and the engine continues.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from onedraw.backends.base import Backend, StepHandle, SupportsRecovery
from onedraw.engine.checkpoint_offload import CheckpointOffload
from onedraw.engine.isolated_constraint import IsolatedConstraint
from onedraw.engine.scheduler import FORCED, ScheduledRow, Scheduler
from onedraw.engine.sequence import Sequence
from onedraw.engine.stats import DraftingEstimates, DraftStats, Stats
from onedraw.errors import NonFiniteLogits, NoTokenLeft, OnedrawError, OutOfMemory, StateLost, StepFailed
from onedraw.memory.disk_snapshots import SnapshotFolder
from onedraw.speculation.draft_tree import chain_length, tree_depth
from onedraw.types import Constraint, Finish, Logprobs, Outcome, Plan, Request, Row, RowOutcome, SampledToken, Usage

log = logging.getLogger("onedraw.engine")


@dataclass(frozen=True, slots=True)
class Event:
    """The result of a step for one request. The last event of a request has a finish reason or an error."""

    request_id: str
    sampled: tuple[SampledToken, ...] = ()
    finish: Finish | None = None
    stop_id: int | None = None
    usage: Usage = field(default_factory=Usage)
    scored: tuple[Logprobs, ...] | None = None  # logprobs of all prompt tokens but the first; sent once, if requested
    error: OnedrawError | None = None
    kept: int = 0  # number of leading tokens of `sampled` that had been drafted


Sink = Callable[[Event], None]  # receives the events of one request on the engine's thread, so it must not block
Observer = Callable[[Row, RowOutcome], None]  # called with each row that carried drafts, and its outcome


def nothing(*_: object) -> None:
    """Do nothing, whatever the arguments: the callback where none is given."""


COUNTERS = (  # the fields of Stats that the engine itself counts; the scheduler, allocator and speculator count the others
    "prompt_tokens",
    "completion_tokens",
    "given_tokens",
    "forced_tokens",
    "drafts",
    "draft_trees",
    "draft_tokens",
    "accepted_tokens",
    "middle_chunks",
    "mixed_steps",
    "failed_steps",
    "out_of_memory_steps",
    "state_losses",
    "steps",
    "overlapped_steps",
    "steps_ahead",
    "mixed_logprobs",
    "mixed_constraints",
    "restores",
    "whole_prompts",
    "page_copies",
)


MOST_LOSSES = 3  # Requests fail if the backend loses all state more often than this without a completed step in between.


class Engine:
    """Runs steps for all live requests. Its methods may only be called on one thread, except for `busy`."""

    def __init__(
        self,
        *,
        backend: Backend,
        scheduler: Scheduler,
        observer: Observer | None = None,
        offload: CheckpointOffload | None = None,
        delivered: Callable[[], None] = nothing,
    ) -> None:
        """`delivered` is called after the sinks have received all pending events; those of one step come together."""
        self.backend = backend
        self.scheduler = scheduler
        self._observer, self._offload, self._delivered = observer, offload, delivered
        self._live: dict[str, tuple[Sequence, Sink]] = {}
        self._in_flight: deque[tuple[StepHandle, list[ScheduledRow]]] = deque()  # submitted steps, oldest first
        self._undelivered: deque[tuple[Sink, Event]] = deque()  # events whose sinks were not called yet, oldest first
        self._totals = dict.fromkeys(COUNTERS, 0)
        self._seconds = 0.0
        self._losses = 0  # how often the state was lost since a step was last collected, or since requests failed because of it
        self.paused = False  # while it is set, plans in flight are collected and no others are submitted

    @property
    def busy(self) -> bool:
        """Whether work is left. Another thread may read this, even while a sequence moves between queues."""
        return bool(self._live or self._in_flight or self._undelivered)

    @property
    def unfinished(self) -> int:
        """The number of requests that have not ended. Another thread may read this; when a sink gets the last event of a request,
        the request does not count any more."""
        return len(self._live)

    @property
    def idle(self) -> bool:
        """Whether `step` has nothing to do, also because the engine is paused."""
        return not (self._in_flight or self._undelivered or (self._live and not self.paused))

    def add(self, request: Request, sink: Sink, constraint: Constraint | None = None) -> None:
        """Add a request. `constraint` was built from `request.constraint`, and no other request uses the same object."""
        sequence = Sequence(request, None if constraint is None else IsolatedConstraint(constraint))
        self._totals["given_tokens"] += len(request.given)
        if sequence.ending is not None and not sequence.bypasses_cache:
            # The given tokens are the whole reply, and the prompt's logprobs are not requested, so there is nothing to compute.
            stop_id = request.given[-1] if sequence.ending == "stop" else None
            self._undelivered.append((sink, Event(request.id, (), sequence.ending, stop_id, sequence.usage)))
            return
        self._live[request.id] = (sequence, sink)
        self.scheduler.add(sequence)

    def cancel(self, request_id: str) -> None:
        """End a request early. An unknown id belongs to a request that has finished, so it is ignored. If the request has a row
        in flight, its pages are released when that row is collected."""
        if request_id in self._live:
            sequence, sink = self._remove(request_id)
            self._undelivered.append((sink, Event(request_id, finish="cancelled", usage=sequence.usage)))
            self._deliver()

    def step(self) -> None:
        """Submit as many plans as the backend accepts, then collect and commit the oldest one in flight. If the backend has lost
        the state of all sequences, they are preempted, and the next step computes them again."""
        try:
            self._step()
        except StateLost as error:
            self._recover(error)

    def _step(self) -> None:
        if self.scheduler.waiting:
            self._deliver()  # Admission may read a snapshot from disk, and events must not wait for that.
        if not self.paused:
            self._submit_plans()
            self._submit_ahead()
        self._deliver()
        if not self._in_flight:
            return
        handle, members = self._in_flight.popleft()
        try:
            outcome = self.backend.collect(handle)
        except BaseException as error:  # not only Exception, since a panic in native code is raised as a BaseException
            ended = self._release_ended(members)
            self._step_raised([member for member in members if member.sequence not in ended], error)
            return
        self._losses = 0
        ended = self._release_ended(members)
        self.scheduler.record_step(members, outcome.seconds)
        self._count(members, outcome)
        for member, result in zip(members, outcome.rows, strict=True):
            if member.sequence not in ended:
                self._commit(member, result)
        saved = self.scheduler.allocator.take_saved()  # also without offload: the allocator's list would grow
        offloads = self._offload is not None and bool(saved)
        # Deliver now if the export below, or the next `submit`, would keep this thread busy meanwhile.
        if offloads or not self.backend.capacity.async_tokens:
            self._deliver()
        if self._offload is not None and offloads:  # Events were delivered above, so that no reply waits for the export.
            self._offload.save(saved)

    def _deliver(self) -> None:
        """Call the sinks with all events that were not delivered yet, oldest first."""
        if not self._undelivered:
            return
        while self._undelivered:
            sink, event = self._undelivered.popleft()
            sink(event)
        self._delivered()

    def _submit_plans(self) -> None:
        while len(self._in_flight) < self.backend.capacity.max_in_flight:
            if not self._submit(self.scheduler.plan(), "overlapped_steps", bool(self._in_flight)):
                return

    def _submit_ahead(self) -> None:
        """Submit the step after the only one in flight, before the tokens that the one in flight samples are known."""
        if len(self._in_flight) == 1:
            self._submit(self.scheduler.plan_ahead(self._in_flight[0][1]), "steps_ahead", True)

    def _submit(self, members: list[ScheduledRow], counter: str, counts: bool) -> bool:
        """Submit a plan and return whether that worked. If so, and if `counts` is set, the counter with the name `counter` goes
        up. `_step_raised` handles an exception of the backend."""
        if not members:
            return False
        if not self._returns_at_once(members):
            self._deliver()
        try:
            handle = self.backend.submit(Plan(tuple(m.row for m in members)))
        except BaseException as error:
            self._step_raised(members, error)
            return False
        self._totals[counter] += counts
        self._in_flight.append((handle, members))
        self.scheduler.mark_in_flight(members)
        return True

    def _returns_at_once(self, members: list[ScheduledRow]) -> bool:
        """Whether the backend's `submit` returns before this plan is computed. It can only do so if every plan in flight
        allows that too, because the device computes those first."""
        plans = [members, *(others for _, others in self._in_flight)]
        return all(self.backend.capacity.submits_async([member.row for member in plan]) for plan in plans)

    def _release_ended(self, members: list[ScheduledRow]) -> set[Sequence]:
        """Note that the plan of these members was collected. Return the sequences among them that had ended before or whose state
        was lost, and release the pages of those without another row in flight."""
        self.scheduler.mark_collected(members)
        dropped = [member.sequence for member in reversed(members) if member.sequence.ended or member.sequence.lost]
        for sequence in dropped:
            if not sequence.ended:
                self._preempt_lost(sequence)
            elif sequence not in self.scheduler.in_flight:
                self.scheduler.finish(sequence)
        return set(dropped)

    def settle(self) -> None:
        """Collect and commit all plans in flight, without submitting others."""
        paused, self.paused = self.paused, True
        try:
            while self._in_flight:
                self.step()
        finally:
            self.paused = paused

    def end_all(self, finish: Finish) -> None:
        """End every request, with the tokens that it has."""
        self.settle()
        for request_id in list(self._live):
            sequence, sink = self._remove(request_id)
            self._undelivered.append((sink, Event(request_id, finish=finish, usage=sequence.usage)))
        self._deliver()

    def replace_weights(self, replace: Callable[[Backend], None], snapshots: Callable[[Backend], SnapshotFolder]) -> None:
        """Have `replace` replace the backend's weights. All sequences are preempted before, and the prefix cache, which the old
        weights computed, is emptied; requests go on with the new weights, as if they were continued from their tokens.
        `snapshots` opens the folder of the new weights' snapshots."""
        self.settle()
        self._forget_state()
        folder = None if self._offload is None else snapshots(self.backend)
        try:
            replace(self.backend)
        except BaseException:
            if folder is not None:
                folder.close()
            raise
        if self._offload is not None and folder is not None:
            self._offload.change_folder(folder)

    def close(self) -> None:
        if self._offload is not None:
            self._offload.close()
        self.backend.close()

    def stats(self) -> Stats:
        allocator, drafting = self.scheduler.allocator, self.scheduler.speculator.stats()
        return Stats(
            replicas=1,
            replicas_wanted=1,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            pages_used=allocator.pages_held,
            pages_total=allocator.pages_total,
            window_pages_freed=allocator.window_pages_freed,
            checkpoints_used=allocator.checkpoint_slots.used,
            checkpoints_total=allocator.checkpoint_slots.count,
            checkpoints_saved=allocator.checkpoints_saved,
            checkpoints_evicted=allocator.checkpoint_slots.evictions,
            prefix_queries=allocator.tokens_queried,
            prefix_hits=allocator.tokens_hit,
            preemptions=self.scheduler.preemptions,
            turn_preemptions=self.scheduler.turn_preemptions,
            step_seconds=self._seconds,
            accepted_per_position=drafting.accepted_per_position,
            drafted_by=tuple(DraftStats(source, *counts) for source, counts in drafting.by_source.items()),
            snapshots_saved=0 if self._offload is None else self._offload.saved,
            snapshots_restored=0 if self._offload is None else self._offload.restored,
            propose_seconds=drafting.propose_seconds,
            drafter_steps=drafting.steps_with_drafter,
            drafter_seconds=drafting.drafter_seconds,
            probe_seconds=drafting.probe_seconds,
            drafting=DraftingEstimates(
                step_cost=drafting.step_cost.parts, drafter_cost=drafting.drafter_cost.parts, acceptance=drafting.acceptance
            ),
            **self._totals,
        )

    def fail_all(self, error: OnedrawError) -> None:
        """End every request with this error. A failure to end one request must not keep the others from their last event."""
        while self._in_flight:
            handle, members = self._in_flight.popleft()
            try:
                self.backend.collect(handle)
            except BaseException as failure:
                log.error("a step in flight failed during shutdown", exc_info=failure)
            self.scheduler.mark_collected(members)
        self.scheduler.in_flight.clear()  # Every plan has been collected above.
        for request_id, (_, sink) in list(self._live.items()):
            try:
                self._remove(request_id)
            except BaseException as failure:
                log.error("a request could not be removed", exc_info=failure)
                self._live.pop(request_id, None)
            self._undelivered.append((sink, Event(request_id, error=error)))
        while self._undelivered:
            try:
                self._deliver()
            except BaseException as failure:
                log.error("the error event of a request could not be delivered", exc_info=failure)
        # The sequences that are left were cancelled while a row was in flight, so they still hold their pages.
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            try:
                self.scheduler.finish(sequence)
            except BaseException as failure:
                log.error("a request could not be removed", exc_info=failure)

    def _commit(self, member: ScheduledRow, result: RowOutcome) -> None:
        sequence, row = member.sequence, member.row
        if row.drafts and member.source != FORCED:
            kept = len(result.kept)
            drafted, deepest = len(row.drafts), tree_depth(row.drafts)
            counts = {"drafted": drafted, "kept": kept, "depth": deepest, "match": member.match}
            self.scheduler.speculator.record_outcome(row.request_id, member.source, **counts)
            if self._observer is not None:
                self._observer(row, result)
        kept_before = sequence.kept
        sampled, finish = sequence.accept(row, result)
        assert sequence.lease is not None
        ahead = self.scheduler.in_flight[sequence]
        sequence.lease.commit(min(sequence.computed, sequence.known), sequence.history, ahead=ahead)
        self._totals["completion_tokens"] += len(sampled)
        known = len(sequence.history.output)
        self._totals["forced_tokens"] += max(min(len(sequence.history.forced), known) - (known - len(sampled)), 0)
        scored = self._prompt_logprobs(sequence)
        sink = self._live[row.request_id][1]
        error = _no_token_error(sequence, result) if result.no_token_left and finish is None else None
        if finish is not None or error is not None:
            self._remove(row.request_id)
        if sampled or finish or scored is not None:
            stop_id = sequence.history.output[-1] if finish == "stop" else None
            kept = sequence.kept - kept_before
            self._undelivered.append((sink, Event(row.request_id, sampled, finish, stop_id, sequence.usage, scored, kept=kept)))
        if error is not None:  # The error is a separate event, because a stop string in the tokens above may end the reply first.
            self._undelivered.append((sink, Event(row.request_id, usage=sequence.usage, error=error)))

    def _prompt_logprobs(self, sequence: Sequence) -> tuple[Logprobs, ...] | None:
        """Return the prompt's logprobs when its last position has been computed, once per request; else None."""
        if not sequence.bypasses_cache or sequence.logprobs_sent or sequence.computed < len(sequence.request.prompt):
            return None
        sequence.logprobs_sent = True
        return tuple(sequence.scored)

    def _remove(self, request_id: str) -> tuple[Sequence, Sink]:
        sequence, sink = self._live[request_id]
        if sequence not in self.scheduler.in_flight:
            self.scheduler.finish(sequence)
        self.scheduler.speculator.forget(request_id)
        sequence.ended = True
        del self._live[request_id]  # last: if something above raises, the request still gets an error event
        return sequence, sink

    def _step_raised(self, members: list[ScheduledRow], error: BaseException) -> None:
        """Handle an error that was raised in the step of these rows. If the device had no memory for the step, the sequences are
        preempted and computed again from the beginning in smaller steps, since their state on the device is undefined; if steps
        cannot be smaller, their requests end with OutOfMemory. StateLost concerns all sequences, so `step` handles it. After any
        other error the requests of these rows end with that error."""
        if isinstance(error, StateLost):
            raise error
        if not isinstance(error, OutOfMemory):
            error_id = secrets.token_hex(6)
            log.error("step failed, error id %s", error_id, exc_info=error)
            self._fail(members, StepFailed(f"the step failed; see error id {error_id} in the server's log"))
            return
        self._totals["out_of_memory_steps"] += 1
        rows, tokens = len(members), sum(len(member.row.tokens) + len(member.row.drafts) for member in members)
        log.warning("the device has no memory left for a step of %d rows and %d tokens: %s", rows, tokens, error)
        if not members:  # All requests of the step have ended meanwhile.
            return
        if not self.scheduler.shrink_steps(rows=rows, tokens=tokens):
            self._fail(members, OutOfMemory(_NO_MEMORY))
            return
        for member in reversed(members):  # Each goes to the front of the queue, the oldest last, so it is admitted first again.
            member.sequence.lost = True
            self._preempt_lost(member.sequence)

    def _preempt_lost(self, sequence: Sequence) -> None:
        if sequence.lost and sequence not in self.scheduler.in_flight:
            sequence.lost = False
            self.scheduler.preempt(sequence, last=False)

    def _recover(self, error: StateLost) -> None:
        """Preempt all sequences, empty the prefix cache, and have the backend restart what it lost. Requests fail only if the
        backend cannot, or if it loses the state more than MOST_LOSSES times without a completed step in between."""
        log.warning("the state of all sequences is lost, and is computed again: %s", error)
        self._totals["state_losses"] += 1
        self._losses += 1
        while self._in_flight:
            handle, members = self._in_flight.popleft()
            try:
                self.backend.collect(handle)  # The outcome is dropped, because the step's sequences are computed again.
            except BaseException as failure:
                log.debug("a step in flight failed too, after the state was lost", exc_info=failure)
            self._release_ended(members)
        self._forget_state()
        try:
            if self._losses > MOST_LOSSES or not isinstance(self.backend, SupportsRecovery):
                raise error
            self.backend.recover()
        except StateLost as failure:
            log.error("the backend cannot be restored: %s", failure)
            self._losses = 0  # the next requests try again
            for request_id in list(self._live):
                _, sink = self._remove(request_id)
                self._undelivered.append((sink, Event(request_id, error=StateLost(_NOT_RESTORED))))
        self._deliver()

    def _forget_state(self) -> None:
        """Preempt all sequences and empty the prefix cache. No plan may be in flight."""
        for sequence in self.scheduler.running[::-1]:  # Each goes to the front of the queue, so the oldest is admitted first.
            sequence.lost = False
            self.scheduler.preempt(sequence, last=False)
        self.scheduler.allocator.forget_cached()

    def _fail(self, members: list[ScheduledRow], error: OnedrawError) -> None:
        """End the requests of these rows with an error."""
        self._totals["failed_steps"] += 1
        for member in members:
            _, sink = self._remove(member.row.request_id)
            self._undelivered.append((sink, Event(member.row.request_id, error=error)))
        self._deliver()

    def _count(self, members: list[ScheduledRow], outcome: Outcome) -> None:
        totals = self._totals
        totals["steps"] += 1
        totals["mixed_steps"] += len(members) > 1
        totals["mixed_logprobs"] += _in_some([member.row.params.logprobs is not None for member in members])
        totals["mixed_constraints"] += _in_some([member.row.history.constraint is not None for member in members])
        self._seconds += outcome.seconds + outcome.drafter_seconds
        if all(len(member.row.tokens) == 1 for member in members):
            tokens = sum(1 + len(member.row.drafts) for member in members)
            drafted = [tree_depth(row.next_drafts) for row in outcome.rows if row.next_drafts]
            self.scheduler.speculator.record_step(
                tokens=tokens,
                rows=len(members),
                seconds=outcome.seconds,
                drafting_rows=len(drafted),
                drafted=sum(drafted),
                drafter_seconds=outcome.drafter_seconds,
            )
        for member, result in zip(members, outcome.rows, strict=True):
            row, speculative = member.row, member.source != FORCED
            totals["prompt_tokens"] += max(min(row.stop, row.prompt_stop) - row.start, 0)
            totals["middle_chunks"] += row.stop < member.sequence.known
            totals["drafts"] += bool(row.drafts) and speculative
            totals["draft_trees"] += chain_length(row.drafts) < len(row.drafts)
            totals["draft_tokens"] += len(row.drafts) * speculative
            totals["accepted_tokens"] += len(result.kept) * speculative
            if row.restore is not None:
                totals["restores"] += 1
                totals["whole_prompts"] += not row.tokens
                totals["page_copies"] += len(row.copies)


def _in_some(found: list[bool]) -> bool:
    return any(found) and not all(found)


def _no_token_error(sequence: Sequence, result: RowOutcome) -> OnedrawError:
    if result.fault:
        return NonFiniteLogits(f"the model's activations overflowed: {result.fault}")
    constraint = sequence.history.constraint
    failure = constraint.failure(sequence.history.output) if isinstance(constraint, IsolatedConstraint) else None
    if failure is not None:
        return failure
    may_ban_all = sequence.request.params.may_ban_all or constraint is not None
    return NoTokenLeft(_NO_TOKEN_LEFT) if may_ban_all else NonFiniteLogits(_NOT_FINITE)


_NOT_FINITE = (
    "the logits of the model are not finite, so no token can be sampled; its weights may be damaged, or need a wider --dtype"
)
_NOT_RESTORED = "the backend lost the state of all sequences and could not be restored; see the server's log, and try again later"
_NO_MEMORY = (
    "the device has no memory left to compute even one request; free memory on it, or serve with a smaller --kv-memory, "
    "--max-batch or --turn-tokens"
)
_NO_TOKEN_LEFT = (
    "the sampling parameters leave no token to sample at this position (bans, bias of -inf, a constraint and filters "
    "together); relax logit_bias, bad_words, min_tokens or the constraint"
)
