"""Chooses among the sources of drafts for each row, and pays for probes.

A row is the work of one sequence in one step: its known tokens, then drafts. Sources are the proposers on the host, asked in
order of their cost, and the backend's own drafter, which runs on the device. `draft_length.py` has the formula for the number of
drafts that pays off, and the estimates of acceptance and cost; this file keeps one set of estimates per request and source,
updates them after each step, and compares the sources by the formula.

A source whose drafts do not pay off is tried again from time to time with a few drafts, because the text may have changed. This
is called a probe. Probes are paid from a small share of the step time, which is saved up.

The choice affects speed only, never a token. Everything here runs on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from time import perf_counter

from onedraw.speculation.draft_length import (
    PRIOR_CALL_SHARE,
    PROBE_SAVINGS,
    PROBE_SHARE,
    PROBE_TOKENS,
    Acceptance,
    CostMeter,
    Probe,
    RowCost,
    best_chain_length,
    best_draft_counts,
    best_tree_size,
    expected_kept,
)
from onedraw.speculation.draft_tree import chain_length, tree_depth
from onedraw.speculation.proposers import Proposer
from onedraw.types import Draft, History, Request

DEVICE = "device"  # the name of the backend's own drafter as a source of drafts
POSITIONS = 16  # depths up to this one have a counter of their own in the statistics
MAX_CHAIN = 32  # a chain has at most this many drafts, unless a length is forced
# A proposer's drafts are used instead of the backend's if the number of them expected to be kept is at least this share of the
# backend's.
PREFERENCE = 0.8


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
    propose_seconds: float = 0.0  # time spent in `propose` and `plan_drafter`, proposers included
    steps_with_drafter: int = 0  # generating steps in which the backend's drafter drafted for a row
    drafter_seconds: float = 0.0  # time that the backend's drafter took in generating steps
    probe_seconds: float = 0.0  # estimated time that probes took
    step_cost: RowCost = field(default_factory=RowCost)  # estimated cost of a step without drafting
    drafter_cost: RowCost = field(default_factory=RowCost)  # estimated cost of a call of the backend's drafter, per drafted token
    acceptance: tuple[tuple[str, float, float], ...] = ()  # (source, rounded temperature, probability that a draft is kept)


@dataclass(slots=True)
class SourceEstimates:
    """The estimates for one source of drafts in one request: how often its drafts are kept, and when to probe it again."""

    acceptance: Acceptance
    overall: Acceptance  # the acceptance of this source over all requests with about the same temperature
    probe: Probe = field(default_factory=Probe)


@dataclass(slots=True)
class RequestEstimates:
    sources: dict[str, SourceEstimates] = field(default_factory=dict)
    host_drafts: int = 0  # number of drafts in this step's row, if they are from a proposer and pay off
    host_expected: float = 0.0  # how many of `host_drafts` are expected to be kept


class Speculator:
    """Chooses the drafts of each row, and how many the backend's drafter makes for the row after it. `draft_tokens` forces their
    number; None carries as many as pay off, or a probe if none do. `tree_nodes` is the size of the trees that the backend's
    drafter makes, 0 for chains."""

    def __init__(self, proposers: Sequence[Proposer] = (), *, draft_tokens: int | None = None, tree_nodes: int = 0) -> None:
        self._proposers = tuple(proposers)
        self._forced = draft_tokens
        self._tree_nodes = tree_nodes
        self._steps, self._calls = CostMeter(), CostMeter()  # cost of a step without the drafter; cost of the backend's drafter
        self._calls_measured = False
        self._requests: dict[str, RequestEstimates] = {}
        self._overall: dict[tuple[str, float], Acceptance] = {}  # by source and rounded temperature, over all requests
        self._by_source: dict[str, tuple[int, int, int]] = {}
        self._kept_depths = [0] * (POSITIONS + 1)  # entry k: rows that kept k drafts; the last entry: that many or more
        self._seconds = 0.0
        self._savings = 0.0  # seconds that are saved up for probes
        self._probe_seconds = self._drafter_seconds = 0.0
        self._drafter_steps = 0

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

    def plan_drafter(self, requests: Sequence[Request], *, limit: int) -> list[int]:
        """Return how many positions, at most `limit`, the backend's drafter drafts after this step for each of its rows. Call it
        after `propose` was called for these rows."""
        if self._forced is not None:
            return [min(self._forced, limit) if request.speculate else 0 for request in requests]
        begin = perf_counter()
        counts = self._drafter_counts(requests, limit)
        for index, request in enumerate(requests):
            if not request.speculate:
                continue
            known = self._of(request, DEVICE)
            if counts[index]:
                known.probe.reset()
                continue
            if known.probe.due() and self._pay_for_probe(self._drafter_cost(), 1):
                known.probe.back_off()
                counts[index] = 1
        self._seconds += perf_counter() - begin
        return counts

    def record_outcome(self, request_id: str, source: str, *, drafted: int, kept: int, depth: int | None = None) -> None:
        """Learn from a verified row: `kept` of its `drafted` drafts were kept, and at most `depth` could be kept together."""
        rows, drafts, accepted = self._by_source.get(source, (0, 0, 0))
        self._by_source[source] = (rows + 1, drafts + drafted, accepted + kept)
        self._kept_depths[min(kept, POSITIONS)] += 1
        reach = drafted if depth is None else depth
        request = self._requests.get(request_id)
        if request is not None and source in request.sources:  # unless the request has ended
            known = request.sources[source]
            known.acceptance.update(depth=reach, kept=kept)
            known.overall.update(depth=reach, kept=kept)

    def record_step(
        self, *, tokens: int, rows: int, seconds: float, drafting_rows: int = 0, drafted: int = 0, drafter_seconds: float = 0.0
    ) -> None:
        """Update the cost estimates by a step without prompt rows. It computed `tokens` positions for `rows` sequences in
        `seconds`; after that the backend's drafter made `drafted` drafts for `drafting_rows` of them in `drafter_seconds`."""
        self._steps.observe(tokens=tokens, rows=rows, seconds=seconds)
        self._drafter_seconds += drafter_seconds
        if drafted:
            self._calls.observe(tokens=drafted, rows=drafting_rows, seconds=drafter_seconds)
            self._calls_measured = True
            self._drafter_steps += 1
        most = PROBE_SAVINGS * self._steps.cost.base_seconds
        self._savings = min(self._savings + PROBE_SHARE * (seconds + drafter_seconds), most)

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        for proposer in self._proposers:
            proposer.forget(request_id)

    def stats(self) -> SpeculationStats:
        kept_at_least = list(accumulate(reversed(self._kept_depths)))[::-1]
        rows, drafted, kept = (sum(column) for column in zip((0, 0, 0), *self._by_source.values(), strict=True))
        return SpeculationStats(
            rows,
            drafted,
            kept,
            tuple(kept_at_least[1:]),
            dict(self._by_source),
            self._seconds,
            self._drafter_steps,
            self._drafter_seconds,
            self._probe_seconds,
            self._steps.cost,
            self._drafter_cost(),
            tuple((source, temperature, known.rate) for (source, temperature), known in list(self._overall.items())),
        )

    def _decide(
        self, request: Request, history: History, own: tuple[Draft, ...], room: int, running: int, tentative: bool
    ) -> Proposal:
        state = self._requests.setdefault(request.id, RequestEstimates())
        state.host_drafts, state.host_expected = 0, 0.0
        own_count, own_expected = self._own(request, own, running) if own else (0, 0.0)
        least = PREFERENCE * own_expected
        for proposer in self._proposers:
            known = self._of(request, proposer.name)
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
                state.host_drafts, state.host_expected = len(drafts), expected_kept(rate, len(drafts))
            elif not tentative:  # After a tentative call the probe is still due, since no row carries its drafts.
                if not self._pay_for_probe(RowCost(0.0, 0.0), len(drafts)):
                    continue
                known.probe.back_off()
            return Proposal(drafts, proposer.name)
        return Proposal(own[:own_count], DEVICE) if own_count else NO_PROPOSAL

    def _own(self, request: Request, own: tuple[Draft, ...], running: int) -> tuple[int, float]:
        """Return how many of the backend's drafts to use, from the first on, and how many of them are kept on average. They are
        made already, so only their verification costs time, and at least one is used."""
        rate = self._of(request, DEVICE).acceptance.rate
        chain = chain_length(own)
        if chain == len(own):
            count = max(self._length(rate, chain, running), 1)
            return count, expected_kept(rate, count)
        deepest = tree_depth(own)
        if self._forced is None:
            cost = self._steps.cost
            count, kept = best_tree_size(rate, chain=chain, depth=deepest, nodes=len(own), cost=cost, running=running)
            return (count, kept) if count else (1, rate)
        reach = min(self._forced, deepest)
        return (len(own) if reach == deepest else reach), expected_kept(rate, reach)

    def _drafter_counts(self, requests: Sequence[Request], limit: int) -> list[int]:
        """Return how many positions to draft for each row, so that all rows together get the most tokens per second."""
        rates, host_drafts, host_kept = [], 0, 0.0
        for request in requests:
            state, rate = self._requests.setdefault(request.id, RequestEstimates()), 0.0
            if request.speculate:
                rate = self._of(request, DEVICE).acceptance.rate
            if state.host_expected > 0.0 and state.host_expected >= PREFERENCE * expected_kept(rate, limit):
                # A proposer whose drafts pay off now is likely to have some for the next row too, at no cost.
                rate, host_drafts, host_kept = 0.0, host_drafts + state.host_drafts, host_kept + state.host_expected
            rates.append(rate)
        return best_draft_counts(
            rates,
            cost=self._steps.cost,
            drafting=self._drafter_cost(),
            running=len(requests),
            limit=limit,
            nodes=self._tree_nodes,
            host_drafts=host_drafts,
            host_kept=host_kept,
        )

    def _drafter_cost(self) -> RowCost:
        """Return the cost of the backend's drafter, where a token is a drafted position."""
        if self._calls_measured:
            return self._calls.cost
        cost = self._steps.cost
        return RowCost(PRIOR_CALL_SHARE * cost.base_seconds, cost.token_seconds)

    def _pay_for_probe(self, drafting: RowCost, count: int) -> bool:
        """Return whether the saved time covers a probe of `count` drafts, and if so subtract the probe's cost from it."""
        price = drafting.base_seconds + drafting.row_seconds + count * (drafting.token_seconds + self._steps.cost.token_seconds)
        # No more than `most` can be saved up. A probe that costs more, perhaps because one call was slow, leaves the savings
        # negative.
        most = PROBE_SAVINGS * self._steps.cost.base_seconds
        if min(price, most) > self._savings:
            return False
        self._savings -= price
        self._probe_seconds += price
        return True

    def _length(self, rate: float, limit: int, running: int) -> int:
        if self._forced is not None:
            return min(self._forced, limit)
        return best_chain_length(rate, cost=self._steps.cost, running=running, limit=min(limit, MAX_CHAIN))

    def _of(self, request: Request, source: str) -> SourceEstimates:
        sources = self._requests.setdefault(request.id, RequestEstimates()).sources
        known = sources.get(source)
        if known is None:
            kind = (source, min(round(request.params.temperature * 4) / 4, 2.0))
            overall = self._overall.setdefault(kind, Acceptance(decay=0.98, weight=64.0))
            known = sources[source] = SourceEstimates(overall.prior_for_new_request(), overall)
        return known
