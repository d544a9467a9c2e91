"""The scheduler: it decides which sequences run in the next step and how many tokens each of them computes.

It reads the waiting and running sequences, the allocator and a token budget (the most tokens of a step), and returns rows, which
are what single sequences compute in the step, each with its sequence.

Lanes (the places of running sequences) go to callers in turn, then to the requests of a caller (see `fairness.py`). A waiting
request may preempt sequences of a caller that holds more, the newest first. With strict order of arrival (the policy `fcfs`),
all sequences count as one request, and background ones as another. Each generating sequence gets one token, and drafts if there
is room; the rest of the budget goes to prompts, one after the other. A prompt row that does not reach the end of its prompt
stops at a multiple of the backend's chunk, the number of positions that recurrent layers compute at once. If a sequence needs
KV pages and none is free, a sequence without a row in this plan is preempted. A sequence whose whole prompt comes from a
checkpoint (saved state and last logits) generates at once, with a row that has no tokens to compute.

If the backend takes several plans at once, each plan gets only an even share of the sequences, so that the next plan has some
too. A plan gets more than its share if more rows cost no extra time. A row is in flight from its submission until its outcome is
collected; meanwhile its sequence gets no second row and is not preempted.

With asynchronous scheduling, while a plan of plain decode rows is in flight, `plan_ahead` returns the plan after it: the same
sequences, one token further. If there is anything else to do, the next plan is made after the one in flight is collected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass, replace

from onedraw.backends.base import Capacity
from onedraw.engine.fairness import (
    PATIENCE,
    TRIES,
    TURN_TOKENS,
    PromptTurns,
    RunningRow,
    TurnKey,
    displaced,
    newest_of_most,
    turn_length,
)
from onedraw.engine.sequence import Sequence
from onedraw.engine.step_size import StepSize
from onedraw.engine.waiting_queue import WaitingQueue
from onedraw.memory.allocator import Allocator, Lease
from onedraw.memory.pages import longest_row
from onedraw.speculation.proposers import NO_PROPOSAL, Proposal, chain
from onedraw.speculation.speculator import Speculator
from onedraw.types import History, Row

FORCED = "forced"  # the source of drafts that are the forced tokens of a request; they are not counted as speculation
SHARED_TURN = TurnKey("", "")  # the key of all sequences when order of arrival decides, so that none takes another's turn

Fetch = Callable[[History], None]  # loads a snapshot of the prompt into the prefix cache, if there is one on disk


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """A row of a plan, and the sequence to which it belongs."""

    sequence: Sequence
    row: Row
    source: str = ""  # the name of the proposer that made the row's drafts, "device" for the backend's drafter, or FORCED
    match: int = 0  # `Proposal.match` of the row's drafts


class Scheduler:
    """Plans steps by the rules above, from its queues of waiting and running sequences. `running` is in order of admission. The
    engine owns the scheduler."""

    def __init__(
        self,
        *,
        allocator: Allocator,
        capacity: Capacity,
        speculator: Speculator,
        step_tokens: int,
        fetch: Fetch | None = None,
        fair: bool = True,
        turn_tokens: int = TURN_TOKENS,
        step_seconds: float | None = None,
    ) -> None:
        self.allocator = allocator
        self.capacity = capacity
        self.speculator = speculator
        most = step_tokens if capacity.step_tokens is None else min(step_tokens, capacity.step_tokens)
        self.step_tokens = max(most, capacity.chunk)  # not less than one chunk, since a prompt advances by whole chunks
        self.longest_row = min(
            self.step_tokens,
            longest_row(capacity.groups, page_size=capacity.page_size, max_context=capacity.max_context, chunk=capacity.chunk),
        )
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.in_flight: Counter[Sequence] = Counter()  # sequence → number of its rows that are submitted and not collected
        self.preemptions = 0
        self.turn_preemptions = 0  # how many of `preemptions` gave the lane to another caller or request
        self._fetch = fetch
        self.fair, self._turn_tokens = fair, turn_tokens
        self._prompt_turns = PromptTurns()
        self._size = StepSize(rows=capacity.lanes, tokens=self.step_tokens, chunk=capacity.chunk, seconds=step_seconds)
        # Set when all lanes are taken and no waiting sequence may displace a running one: the number of sequences past their turn
        # at that time. While that number is the same, another try to admit a sequence would fail too.
        self._full_with: int | None = None
        self._awaits_victim = False  # whether admission waits until a sequence to be preempted has no row in flight

    def add(self, sequence: Sequence) -> None:
        if not self.fair:
            sequence.key = SHARED_TURN._replace(background=sequence.request.background)
        self.waiting.add(sequence)
        self._full_with = None

    def plan(self) -> list[ScheduledRow]:
        """Admit waiting sequences and return the rows of the next step."""
        self._admit()
        members: list[ScheduledRow] = []
        planned: set[Sequence] = set()
        step_tokens = self._size.tokens
        share = max(-(-len(self.running) // self.capacity.max_in_flight), self.capacity.min_step_rows)
        free = [s for s in self.running if s not in self.in_flight]
        generating = [s for s in free if s.remaining <= 1][:share]
        prompts = self._by_turn([s for s in free if s.remaining > 1])[: share - len(generating)]
        drafts_left = step_tokens - len(generating)
        if self.capacity.draft_positions is not None:
            drafts_left = min(drafts_left, self.capacity.draft_positions)
        for sequence in generating:
            drafts = sequence.remaining == 1 and not sequence.saves
            proposal = self._propose(sequence, drafts_left, len(generating)) if drafts else NO_PROPOSAL
            if self._add_row(sequence, sequence.remaining, proposal, members, planned):
                drafts_left -= len(members[-1].row.drafts)
        if not prompts:
            return self._with_draft_limits(members)
        left = step_tokens - sum(1 + len(m.row.drafts) for m in members)
        # whether a reply outside of the background is being generated, whose next token prompts should not delay for long
        waits = any(s.remaining <= 1 and not s.request.background for s in self.running)
        budget = max(min(left, self._size.prompt_tokens(generating=waits)), self.capacity.chunk)
        for sequence in prompts:
            length = self._chunk_length(sequence, budget)
            if length and self._add_row(sequence, length, NO_PROPOSAL, members, planned):
                budget -= length
                self._prompt_turns.record(sequence.key, length)
        return self._with_draft_limits(members)

    def shrink_steps(self, *, rows: int, tokens: int) -> bool:
        """Plan smaller steps from now on, because the device had no memory for a step of this size. Return whether that is
        possible."""
        return self._size.shrink(rows=rows, tokens=tokens)

    def record_step(self, members: List[ScheduledRow], seconds: float) -> None:
        """Record how long a step took, which decides how much of a prompt later steps compute."""
        tokens = sum(len(member.row.tokens) for member in members if len(member.row.tokens) > 1)
        if self._size.record(prompt_tokens=tokens, seconds=seconds):
            self._full_with = None

    def _by_turn(self, prompts: list[Sequence]) -> list[Sequence]:
        return [prompts[index] for index in self._prompt_turns.order([s.key for s in prompts])] if prompts else prompts

    def plan_ahead(self, members: List[ScheduledRow]) -> list[ScheduledRow]:
        """Return the plan after the one in flight: one row per sequence, for the token that is being sampled. It is empty if the
        next plan must wait until the one in flight is collected: because a sequence is not in flight, has drafts, gets no page or
        is to be preempted."""
        if not self.capacity.async_scheduling or any(member.row.drafts or member.sequence.lost for member in members):
            return []
        self._admit()
        planned = {member.sequence for member in members}
        if self._awaits_victim or not all(sequence in planned or sequence.ended for sequence in self.running):
            return []
        continuing = [member for member in members if not member.sequence.ended and member.sequence.room > 1]
        if not all(self._can_run_ahead(member, len(continuing)) for member in continuing):
            return []
        return [ScheduledRow(member.sequence, member.sequence.row_ahead(member.row)) for member in continuing]

    def _can_run_ahead(self, member: ScheduledRow, running: int) -> bool:
        """Whether the sequence's next row depends on the outcome of this row only through the sampled token."""
        sequence, row = member.sequence, member.row
        if not row.samples or len(row.tokens) != 1 or row.start < row.prompt_stop:
            return False  # After preemption, tokens beyond this row may be known, and the row samples nothing new.
        if self._propose(sequence, self.step_tokens, running, tentative=True).drafts:
            return False
        return sequence.lease is not None and sequence.lease.reserve(row.stop + 1)

    def mark_in_flight(self, members: Iterable[ScheduledRow]) -> None:
        for member in members:
            self.in_flight[member.sequence] += 1

    def mark_collected(self, members: Iterable[ScheduledRow]) -> None:
        for member in members:
            self.in_flight[member.sequence] -= 1
            if self.in_flight[member.sequence] <= 0:
                del self.in_flight[member.sequence]

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence from its queue and release its lease (lane, pages and checkpoint)."""
        assert sequence not in self.in_flight, "a row in flight still writes to the pages of this lease"
        self._full_with = None
        if sequence.lease is not None:
            sequence.lease.release()
            sequence.lease = None
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def _admit(self) -> None:
        """Admit waiting sequences, each time the one whose turn it is. A sequence for which there are too few KV pages may be
        passed by others PATIENCE times; then the others wait for it."""
        self._awaits_victim = False
        while self.waiting and not self._rightly_full():
            blocked: list[Sequence] = []
            for sequence in self.waiting.candidates([s.key for s in self.running], TRIES):
                if self._admit_one(sequence):
                    break
                blocked.append(sequence)
                if self._awaits_victim or sequence.passed >= PATIENCE:
                    return
            else:
                if not self._has_lane():
                    self._full_with = self._past_turn()
                return
            for sequence in blocked:
                sequence.passed += 1

    def _rightly_full(self) -> bool:
        """Whether another attempt to admit a sequence would fail: all lanes are taken, and nothing has changed since the last
        attempt found no running sequence to displace."""
        return self._full_with is not None and not self._has_lane() and self._full_with == self._past_turn()

    def _has_lane(self) -> bool:
        return self.allocator.lanes.available > 0 and len(self.running) < self._size.rows

    def _past_turn(self) -> int:
        return sum(sequence.overtime >= 0 for sequence in self.running)

    def _admit_one(self, sequence: Sequence) -> bool:
        """Admit a sequence if there are a lane and enough pages, if necessary by preempting sequences of callers or requests that
        hold more. Return whether it was admitted."""
        lease = self._allocate(sequence) if self._has_lane() else None
        if lease is None:
            victims = self._victims(sequence)
            self._awaits_victim = any(victim in self.in_flight for victim in victims)
            if not victims or self._awaits_victim:
                return False
            for victim in victims:
                self.preempt(victim, last=victim.overtime >= 0)
            self.turn_preemptions += len(victims)
            lease = self._allocate(sequence)
            if lease is None:
                return False
        self.waiting.admit(sequence)
        sequence.begin(lease, turn=turn_length(sequence.known, self._turn_tokens))
        self.running.append(sequence)
        return True

    def _allocate(self, sequence: Sequence) -> Lease | None:
        reuse, more = not sequence.bypasses_cache, min(sequence.room, 1)
        if self._fetch is not None and reuse and not sequence.looked_up:
            sequence.looked_up = True
            self._fetch(sequence.history)
        return self.allocator.allocate(sequence.history, reuse=reuse, more=more, step=self.longest_row)

    def _victims(self, sequence: Sequence) -> list[Sequence]:
        """Return the fewest sequences whose preemption makes room for this one, among those that it may displace (see
        `fairness.displaced`). Empty if all of them together do not make enough room."""
        rows = [RunningRow(s.key, s.overtime) for s in self.running]
        order = [self.running[index] for index in displaced(sequence.key, rows)]
        leases = [s.lease for s in order if s.lease is not None]
        if not leases:
            return []
        reuse, more = not sequence.bypasses_cache, min(sequence.room, 1)
        count = self.allocator.releases_needed(leases, sequence.history, reuse=reuse, more=more, step=self.longest_row)
        if count is None:
            return []
        count = max(count, len(self.running) - self._size.rows + 1)
        return order[:count] if count <= len(order) else []

    def _propose(self, sequence: Sequence, left: int, running: int, *, tentative: bool = False) -> Proposal:
        room = min(left, sequence.room - 1, self.capacity.max_drafts, self.capacity.max_context - sequence.known - 1)
        if room <= 0 or not self.capacity.logits_per_position:
            return NO_PROPOSAL
        if sequence.history.forced:
            forced = sequence.history.forced[len(sequence.history.output) :][:room] if sequence.request.speculate else ()
            return Proposal(chain(forced), FORCED) if forced else NO_PROPOSAL
        known = (sequence.request, sequence.history, sequence.next_drafts)
        proposal = self.speculator.propose(*known, room=room, running=running, tentative=tentative)
        drafts = proposal.drafts[:room]
        vocab, legal = self.capacity.vocab, 0
        for token, parent in drafts:  # A drafter may err: keep only the drafts before the first invalid token or parent.
            if not (0 <= token < vocab and -1 <= parent < legal):
                break
            legal += 1
        return replace(proposal, drafts=drafts[:legal]) if legal else NO_PROPOSAL

    def _with_draft_limits(self, members: list[ScheduledRow]) -> list[ScheduledRow]:
        """Tell the backend's own drafter how many drafts to make for the row after each row that samples."""
        if not self.capacity.drafter:
            return members
        sampling = [i for i, member in enumerate(members) if member.row.samples and not member.row.history.forced]
        requests = [members[index].sequence.request for index in sampling]
        limits = self.speculator.plan_drafter(requests, limit=self.capacity.lookahead - 1)
        for index, limit in zip(sampling, limits, strict=True):
            if limit:
                members[index] = replace(members[index], row=replace(members[index].row, draft_limit=limit))
        return members

    def _chunk_length(self, sequence: Sequence, budget: int) -> int:
        """Return how many known tokens a prompt row computes: all that remain, or as many as the budget allows. A row that ends
        inside the prompt ends at a multiple of the chunk; if none fits, the number is 0."""
        budget = min(budget, self.longest_row)
        if budget >= sequence.remaining:
            return sequence.remaining
        stop = sequence.computed + budget
        if stop < len(sequence.request.prompt):
            stop -= stop % self.capacity.chunk
        return max(stop - sequence.computed, 0)

    def _add_row(
        self, sequence: Sequence, length: int, proposal: Proposal, members: list[ScheduledRow], planned: set[Sequence]
    ) -> bool:
        """Reserve pages for a row and add it to the plan. If necessary, sequences without a row are preempted. Return whether the
        row was added."""
        if sequence.lease is None:  # An earlier row of this plan has preempted it.
            return False
        needed = sequence.computed + length + len(proposal.drafts)
        if proposal.drafts and not sequence.lease.reserve(needed):  # Drop the drafts rather than preempt a sequence for them.
            proposal, needed = NO_PROPOSAL, sequence.computed + length
        while not sequence.lease.reserve(needed):
            candidates = [i for i, s in enumerate(self.running) if s not in planned and s not in self.in_flight]
            victim = self.running[newest_of_most([s.key for s in self.running], candidates)]
            if victim is sequence and self.in_flight:  # Wait instead: rows in flight may release pages when they are collected.
                return False
            self.preempt(victim, last=False)
            if victim is sequence:
                return False
        if self.capacity.lookahead:  # Reserve pages for the backend's own drafter, if that needs no preemption.
            sequence.lease.reserve(min(needed + self.capacity.lookahead, self.capacity.max_context))
        row = sequence.row(length=length, drafts=proposal.drafts)
        members.append(ScheduledRow(sequence, row, proposal.source, proposal.match))
        planned.add(sequence)
        return True

    def preempt(self, sequence: Sequence, *, last: bool) -> None:
        """Release a sequence's lease and put it back into the waiting queue; its tokens are computed again later. With `last` its
        turn is over, so it goes behind the other requests, else before them."""
        sequence.rewind()
        self.running.remove(sequence)
        self.waiting.put_back(sequence, last=last)
        self.preemptions += 1
        self._full_with = None
