"""Decides which drafts a row carries: from the proposers, cheapest first, or from the backend's own drafter; as many as pay off.

The decision depends on the request, its history, the backend's drafts, the room in the step, and how many earlier drafts were
kept. It affects speed only, never a token. Everything here runs on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from time import perf_counter

from onedraw.speculation.draft_length import (
    PROBE_TOKENS,
    Acceptance,
    CostMeter,
    Probe,
    best_chain_length,
    best_tree_size,
    expected_kept,
)
from onedraw.speculation.draft_tree import chain_length, tree_depth
from onedraw.speculation.proposers import Proposer
from onedraw.types import Draft, History, Request

DEVICE = "device"  # the name of the backend's own drafter as a source of drafts
POSITIONS = 16  # depths up to this one have a counter of their own in the statistics
MAX_CHAIN = 32  # a chain has at most this many drafts, unless a length is forced
PREFERENCE = 0.8  # a proposer is preferred to the backend's drafts if it is expected to keep at least this share of theirs


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts for one row, and the name of the source that made them."""

    drafts: tuple[Draft, ...] = ()
    source: str = ""


NO_PROPOSAL = Proposal()


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Counters since the start, over all rows that carried drafts."""

    drafts: int = 0  # rows that carried drafts
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = (0,) * POSITIONS  # entry i: rows that kept more than i drafts
    by_source: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)  # source → (rows, drafted, kept)
    propose_seconds: float = 0.0  # time spent in `propose`, proposers included


@dataclass(slots=True)
class SourceEstimates:
    """What is known about one source of drafts for one request: how often drafts are kept, and when to try it again."""

    acceptance: Acceptance
    probe: Probe = field(default_factory=Probe)


class Speculator:
    """Chooses the drafts of each row. `draft_tokens` forces their number; with None it is as many as pay off, and a few
    occasionally if none do."""

    def __init__(self, proposers: Sequence[Proposer] = (), *, draft_tokens: int | None = None) -> None:
        self._proposers = tuple(proposers)
        self._forced = draft_tokens
        self._meter = CostMeter()
        self._estimates: dict[str, dict[str, SourceEstimates]] = {}  # request id → source → estimates
        self._overall: dict[str, Acceptance] = {}  # source → its acceptance over all requests
        self._by_source: dict[str, tuple[int, int, int]] = {}
        self._kept_depths = [0] * (POSITIONS + 1)  # entry k: rows that kept k drafts; the last entry: that many or more
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
        """Return drafts for the row that reaches the end of `history`. `own` are the backend's drafts, `running` is the number of
        rows in the step. With `tentative` the caller only wants to know whether there are drafts, and no row will carry them."""
        if not request.speculate or room <= 0 or self._forced == 0 or not (own or self._proposers):
            return NO_PROPOSAL
        begin = perf_counter()
        proposal = self._decide(request, history, own[:room], room, running, tentative)
        self._seconds += perf_counter() - begin
        return proposal

    def record_outcome(self, request_id: str, source: str, *, drafted: int, kept: int, depth: int | None = None) -> None:
        """Learn from a verified row: `kept` of its `drafted` drafts were kept, and at most `depth` could be kept together."""
        rows, drafts, accepted = self._by_source.get(source, (0, 0, 0))
        self._by_source[source] = (rows + 1, drafts + drafted, accepted + kept)
        self._kept_depths[min(kept, POSITIONS)] += 1
        reach = drafted if depth is None else depth
        self._overall.setdefault(source, Acceptance(decay=0.98, weight=64.0)).update(depth=reach, kept=kept)
        known = self._estimates.get(request_id, {}).get(source)
        if known is not None:  # It is None if the request has ended.
            known.acceptance.update(depth=reach, kept=kept)

    def record_step(self, *, tokens: int, rows: int, seconds: float) -> None:
        """Learn from the duration of a step without prompt rows, which computed `tokens` positions for `rows` sequences."""
        self._meter.observe(tokens=tokens, rows=rows, seconds=seconds)

    def forget(self, request_id: str) -> None:
        self._estimates.pop(request_id, None)
        for proposer in self._proposers:
            proposer.forget(request_id)

    def stats(self) -> SpeculationStats:
        kept_at_least = list(accumulate(reversed(self._kept_depths)))[::-1]
        rows, drafted, kept = (sum(column) for column in zip((0, 0, 0), *self._by_source.values(), strict=True))
        return SpeculationStats(rows, drafted, kept, tuple(kept_at_least[1:]), dict(self._by_source), self._seconds)

    def _decide(
        self, request: Request, history: History, own: tuple[Draft, ...], room: int, running: int, tentative: bool
    ) -> Proposal:
        estimates = self._estimates.setdefault(request.id, {})
        own_count, own_expected = self._own(estimates, own, running) if own else (0, 0.0)
        least = PREFERENCE * own_expected
        for proposer in self._proposers:
            known = self._estimates_of(estimates, proposer.name)
            rate = known.acceptance.rate
            count = self._length(rate, room, running)
            pays = count > 0 and expected_kept(rate, count) >= least
            if not pays and not known.probe.due():
                continue
            count = count or min(PROBE_TOKENS, room)
            drafts = proposer.propose(request, history, count)[:count]
            if not drafts or (pays and expected_kept(rate, len(drafts)) < least):
                continue
            if pays:
                known.probe.reset()
            elif not tentative:  # After a tentative call the probe is still due, since no row carries its drafts.
                known.probe.back_off()
            return Proposal(drafts, proposer.name)
        if not own:
            return NO_PROPOSAL
        probe = self._estimates_of(estimates, DEVICE).probe
        if own_count:
            probe.reset()
        elif probe.due():
            if not tentative:
                probe.back_off()
            own_count = PROBE_TOKENS
        return Proposal(own[:own_count], DEVICE) if own_count else NO_PROPOSAL

    def _own(self, estimates: dict[str, SourceEstimates], own: tuple[Draft, ...], running: int) -> tuple[int, float]:
        """Return how many of the backend's drafts to use, from the first on, and how many of them are kept on average."""
        rate = self._estimates_of(estimates, DEVICE).acceptance.rate
        chain = chain_length(own)
        if chain == len(own):
            count = self._length(rate, chain, running)
            return count, expected_kept(rate, count)
        deepest = tree_depth(own)
        if self._forced is None:
            return best_tree_size(rate, chain=chain, depth=deepest, nodes=len(own), cost=self._meter.cost, running=running)
        reach = min(self._forced, deepest)
        return (len(own) if reach == deepest else reach), expected_kept(rate, reach)

    def _length(self, rate: float, limit: int, running: int) -> int:
        if self._forced is not None:
            return min(self._forced, limit)
        return best_chain_length(rate, cost=self._meter.cost, running=running, limit=min(limit, MAX_CHAIN))

    def _estimates_of(self, estimates: dict[str, SourceEstimates], source: str) -> SourceEstimates:
        known = estimates.get(source)
        if known is None:
            overall = self._overall.get(source)
            known = estimates[source] = SourceEstimates(overall.prior_for_new_request() if overall else Acceptance())
        return known
