"""Which guesses a row carries: proposers in order of cost, the backend's own guesses last, each as long as it pays off.

In: a request, its history, the backend's guesses, the room there is, and what verification kept so far. Out: drafts and
their source. Owner: the engine thread. Nothing here can change a token, only how soon it comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from time import perf_counter

from onedraw.speculation.draft_length import PROBE_TOKENS, Acceptance, CostMeter, Probe, expected, how_many, how_much_of_a_tree
from onedraw.speculation.draft_tree import chain_length, depth
from onedraw.speculation.proposer import Proposer
from onedraw.types import Draft, History, Request

DEVICE = "device"  # source of the backend's own guesses
POSITIONS = 16  # draft positions that are counted one by one
LONGEST = 32  # drafts of a chain, unless a length is forced
PREFERENCE = 0.8  # a proposer goes before the backend's own guesses unless it is expected to keep less than this share


@dataclass(frozen=True, slots=True)
class Proposal:
    drafts: tuple[Draft, ...] = ()
    source: str = ""


NOTHING = Proposal()


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Counters since the start, over rows that carried drafts."""

    drafts: int = 0  # rows
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = (0,) * POSITIONS  # rows that kept a draft at depth 1, 2, …
    by_source: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)  # source → rows, drafted, kept
    propose_seconds: float = 0.0  # spent in deciding and proposing


@dataclass(slots=True)
class SourceEstimate:
    """What is known of one source for one request."""

    acceptance: Acceptance
    probe: Probe = field(default_factory=Probe)


class Speculator:
    """`draft_tokens` forces the length of every proposal; None: as long as pays off, and a small probe where nothing does."""

    def __init__(self, proposers: Sequence[Proposer] = (), *, draft_tokens: int | None = None) -> None:
        self._proposers = tuple(proposers)
        self._forced = draft_tokens
        self._meter = CostMeter()
        self._records: dict[str, dict[str, SourceEstimate]] = {}  # by request, then source
        self._overall: dict[str, Acceptance] = {}  # by source, over all requests
        self._by_source: dict[str, tuple[int, int, int]] = {}
        self._kept_depths = [0] * (POSITIONS + 1)  # rows by how many drafts they kept
        self._seconds = 0.0

    def propose(
        self,
        request: Request,
        history: History,
        own: tuple[Draft, ...],
        *,
        room: int,
        running: int,
        tentative: bool = False,
    ) -> Proposal:
        """Drafts for the row that reaches the end of `history`. `own` are the backend's; `running` rows share the turn.
        `tentative`: nobody will carry them; is there anything to propose?"""
        if not request.speculate or room <= 0 or self._forced == 0 or not (own or self._proposers):
            return NOTHING
        begin = perf_counter()
        proposal = self._decide(request, history, own[:room], room, running, tentative)
        self._seconds += perf_counter() - begin
        return proposal

    def learn(self, request_id: str, source: str, *, drafted: int, kept: int, depth: int | None = None) -> None:
        """What verification made of a proposal: of `drafted` drafts, at most `depth` of which fit together, `kept` were kept."""
        rows, drafts, accepted = self._by_source.get(source, (0, 0, 0))
        self._by_source[source] = (rows + 1, drafts + drafted, accepted + kept)
        self._kept_depths[min(kept, POSITIONS)] += 1
        reach = drafted if depth is None else depth
        self._overall.setdefault(source, Acceptance(memory=0.98, weight=64.0)).learn(depth=reach, kept=kept)
        record = self._records.get(request_id, {}).get(source)
        if record is not None:  # else the request is over
            record.acceptance.learn(depth=reach, kept=kept)

    def observe(self, *, tokens: int, rows: int, seconds: float) -> None:
        """What a turn without prompt rows cost: `tokens` computed for `rows` sequences."""
        self._meter.observe(tokens=tokens, rows=rows, seconds=seconds)

    def forget(self, request_id: str) -> None:
        self._records.pop(request_id, None)
        for proposer in self._proposers:
            proposer.forget(request_id)

    def stats(self) -> SpeculationStats:
        kept_at_least = list(accumulate(reversed(self._kept_depths)))[::-1]
        rows, drafted, kept = (sum(column) for column in zip((0, 0, 0), *self._by_source.values(), strict=True))
        return SpeculationStats(rows, drafted, kept, tuple(kept_at_least[1:]), dict(self._by_source), self._seconds)

    # ------------------------------------------------------------------ one decision

    def _decide(
        self, request: Request, history: History, own: tuple[Draft, ...], room: int, running: int, tentative: bool
    ) -> Proposal:
        records = self._records.setdefault(request.id, {})
        own_count, own_expected = self._own(records, own, running) if own else (0, 0.0)
        least = PREFERENCE * own_expected
        for proposer in self._proposers:
            record = self._record(records, proposer.name)
            rate = record.acceptance.rate
            count = self._length(rate, room, running)
            pays = count > 0 and expected(rate, count) >= least
            if not pays and not record.probe.due():
                continue
            count = count or min(PROBE_TOKENS, room)
            drafts = proposer.propose(request, history, count)[:count]
            if not drafts or (pays and expected(rate, len(drafts)) < least):
                continue
            if pays:
                record.probe.rest()
            elif not tentative:  # else it stays due
                record.probe.spend()
            return Proposal(drafts, proposer.name)
        if not own:
            return NOTHING
        probe = self._record(records, DEVICE).probe
        if own_count:
            probe.rest()
        elif probe.due():
            if not tentative:
                probe.spend()
            own_count = PROBE_TOKENS
        return Proposal(own[:own_count], DEVICE) if own_count else NOTHING

    def _own(self, records: dict[str, SourceEstimate], own: tuple[Draft, ...], running: int) -> tuple[int, float]:
        """How many of the backend's guesses to take, from the first on, and how many are kept on average."""
        rate = self._record(records, DEVICE).acceptance.rate
        chain = chain_length(own)
        if chain == len(own):
            count = self._length(rate, chain, running)
            return count, expected(rate, count)
        deepest = depth(own)
        if self._forced is None:
            return how_much_of_a_tree(rate, chain=chain, depth=deepest, nodes=len(own), cost=self._meter.cost, running=running)
        reach = min(self._forced, deepest)
        return (len(own) if reach == deepest else reach), expected(rate, reach)

    def _length(self, rate: float, limit: int, running: int) -> int:
        if self._forced is not None:
            return min(self._forced, limit)
        return how_many(rate, cost=self._meter.cost, running=running, limit=min(limit, LONGEST))

    def _record(self, records: dict[str, SourceEstimate], source: str) -> SourceEstimate:
        record = records.get(source)
        if record is None:
            overall = self._overall.get(source)
            record = records[source] = SourceEstimate(overall.successor() if overall else Acceptance())
        return record
