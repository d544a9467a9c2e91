"""Who runs this turn, and how much: sequences → Plan.

In: sequences waiting and running, the allocator, a token budget. Out: rows and the sequences behind them, in one list.

Order: first come, first served. Sequences that generate take one token each (and drafts where there is room), then the
rest of the budget goes to prompts in order of arrival. A prompt row that does not reach its prompt's end stops at a
multiple of the backend's chunk. A sequence that needs pages drives out the latest comer that has no row yet. One whose
whole prompt comes from a checkpoint generates at once, with a row of no tokens.

Where the backend takes several plans at once, each has an even share of the sequences, or as many as ride for nothing, so
that the next finds some too.
Who rides in a plan that is still under way is left alone: no second row, and nobody drives it out.

Where the backend goes ahead, a plan of plain decoding is followed by the next one before it is back (`behind`): the same
sequences, each one token further. As soon as there is anything else to do the chain ends, and the next plan is made when
everybody is back.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass

from onedraw.backends.base import Capacity
from onedraw.engine.sequence import Sequence
from onedraw.memory.allocator import Allocator
from onedraw.memory.pages import longest_row
from onedraw.speculation.speculator import NOTHING, Proposal, Speculator
from onedraw.types import History, Row, SamplingParams

Fetch = Callable[[History], None]  # loads the snapshot of a prompt, if the disk has one, into the prefix cache


@dataclass(frozen=True, slots=True)
class Member:
    """A row and the sequence it belongs to."""

    sequence: Sequence
    row: Row
    source: str = ""  # who guessed the row's drafts


class Scheduler:
    """Owner: the engine. `running` is in order of admission, `waiting` in order of arrival."""

    def __init__(
        self, *, allocator: Allocator, capacity: Capacity, speculator: Speculator, turn_tokens: int, fetch: Fetch | None = None
    ) -> None:
        self.allocator = allocator
        self.capacity = capacity
        self.speculator = speculator
        # Every running sequence can take its token and a prompt still moves by one chunk.
        most = turn_tokens if capacity.step_tokens is None else min(turn_tokens, capacity.step_tokens)
        self.turn_tokens = max(most, capacity.chunk)
        self.longest_row = min(
            self.turn_tokens,
            longest_row(capacity.groups, page_size=capacity.page_size, max_context=capacity.max_context, chunk=capacity.chunk),
        )
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.riding: Counter[Sequence] = Counter()  # those with rows under way, and how many
        self.preemptions = 0
        self._fetch = fetch

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def plan(self) -> list[Member]:
        self._admit()
        members: list[Member] = []
        planned: set[Sequence] = set()
        share = max(-(-len(self.running) // self.capacity.max_in_flight), self.capacity.min_step_rows)
        free = [s for s in self.running if s not in self.riding]
        generating = [s for s in free if s.remaining <= 1][:share]
        prompts = [s for s in free if s.remaining > 1][: share - len(generating)]
        drafts_left = self.turn_tokens - len(generating)
        if self.capacity.draft_positions is not None:
            drafts_left = min(drafts_left, self.capacity.draft_positions)
        for sequence in generating:
            drafts = sequence.remaining == 1 and not sequence.saves
            proposal = self._propose(sequence, drafts_left, len(generating)) if drafts else NOTHING
            if self._place(sequence, sequence.remaining, proposal, members, planned):
                drafts_left -= len(members[-1].row.drafts)
        budget = max(self.turn_tokens - sum(1 + len(m.row.drafts) for m in members), self.capacity.chunk)
        for sequence in prompts:
            length = self._chunk_length(sequence, budget)
            if length and self._place(sequence, length, NOTHING, members, planned):
                budget -= length
        return members

    def behind(self, members: List[Member]) -> list[Member]:
        """The plan behind the one under way: every sequence by the one token that is being chosen for it. Nobody, where
        the next plan is better made when this one is back: somebody does not ride, has drafts, or lacks a page."""
        if not self.capacity.async_scheduling or any(member.row.drafts for member in members):
            return []
        self._admit()
        riding = {member.sequence for member in members}
        if not all(sequence in riding or sequence.ended for sequence in self.running):
            return []
        going = [member for member in members if not member.sequence.ended and member.sequence.room > 1]
        if not all(self._goes_on(member, len(going)) for member in going):
            return []
        return [Member(member.sequence, member.sequence.row_behind(member.row)) for member in going]

    def _goes_on(self, member: Member, running: int) -> bool:
        """Nothing of the sequence's next row but its token hangs on what this one chooses."""
        sequence, row = member.sequence, member.row
        if not row.samples or len(row.tokens) != 1 or row.start < row.prompt_stop or not _alike(row.params):
            return False  # who is computed again may know the next token already
        if self._propose(sequence, self.turn_tokens, running, tentative=True).drafts:
            return False
        return sequence.lease is not None and sequence.lease.cover(row.stop + 1)

    def away(self, members: Iterable[Member]) -> None:
        """Their plan is under way."""
        for member in members:
            self.riding[member.sequence] += 1

    def back(self, members: Iterable[Member]) -> None:
        """Their plan is not under way any more."""
        for member in members:
            self.riding[member.sequence] -= 1
            if self.riding[member.sequence] <= 0:
                del self.riding[member.sequence]

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence off, wherever it is, and give back what it holds."""
        assert sequence not in self.riding, "what a row under way writes to is not given to others"
        if sequence.lease is not None:
            sequence.lease.release()
            sequence.lease = None
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def _admit(self) -> None:
        while self.waiting:
            sequence = self.waiting[0]
            more, reuse = min(sequence.room, 1), not sequence.bypasses_cache
            if self._fetch is not None and reuse and self.allocator.lanes.available and not sequence.looked_up:
                sequence.looked_up = True
                self._fetch(sequence.history)
            lease = self.allocator.lend(sequence.history, reuse=reuse, more=more, step=self.longest_row)
            if lease is None:
                return
            self.waiting.popleft()
            sequence.begin(lease)
            self.running.append(sequence)

    def _propose(self, sequence: Sequence, left: int, running: int, *, tentative: bool = False) -> Proposal:
        room = min(left, sequence.room - 1, self.capacity.max_drafts, self.capacity.max_context - sequence.known - 1)
        if room <= 0 or not self.capacity.logits_per_position:
            return NOTHING
        known = (sequence.request, sequence.history, sequence.next_drafts)
        proposal = self.speculator.propose(*known, room=room, running=running, tentative=tentative)
        drafts = proposal.drafts[:room]
        vocab, legal = self.capacity.vocab, 0
        for token, parent in drafts:  # in the vocabulary, and after a draft that stands before it
            if not (0 <= token < vocab and -1 <= parent < legal):
                break
            legal += 1
        return Proposal(drafts[:legal], proposal.source) if legal else NOTHING

    def _chunk_length(self, sequence: Sequence, budget: int) -> int:
        """How many known tokens a prompt row may take: all, or up to a multiple of the chunk."""
        budget = min(budget, self.longest_row)
        if budget >= sequence.remaining:
            return sequence.remaining
        stop = sequence.computed + budget
        if stop < len(sequence.request.prompt):
            stop -= stop % self.capacity.chunk
        return max(stop - sequence.computed, 0)

    def _place(self, sequence: Sequence, length: int, proposal: Proposal, members: list[Member], planned: set[Sequence]) -> bool:
        """Cover the row with pages, driving out latecomers if need be, and add it to the turn."""
        if sequence.lease is None:  # driven out earlier in this turn
            return False
        needed = sequence.computed + length + len(proposal.drafts)
        if proposal.drafts and not sequence.lease.cover(needed):  # nobody has to go for a proposal
            proposal, needed = NOTHING, sequence.computed + length
        while not sequence.lease.cover(needed):
            victim = next((s for s in reversed(self.running) if s not in planned and s not in self.riding), sequence)
            if victim is sequence and self.riding:  # those under way will give pages back, or be driven out themselves
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        if self.capacity.lookahead:  # room for the backend's own drafter, if nobody has to go for it
            sequence.lease.cover(min(needed + self.capacity.lookahead, self.capacity.max_context))
        members.append(Member(sequence, sequence.row(length=length, drafts=proposal.drafts), proposal.source))
        planned.add(sequence)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        sequence.rewind()
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1


def _alike(params: SamplingParams) -> bool:
    """A choice asks for nothing that the host makes of the tokens before it."""
    plain = params.logprobs is None and params.constraint is None
    return plain and params.dry is None and not params.bad_words
