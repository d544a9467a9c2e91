"""Chooses among the sources of drafts for each row, and pays for probes.

A row is the work of one sequence in one step: its known tokens, then drafts. Sources are the proposers on the host, asked in
order of their cost, and the backend's own drafter, which runs on the device. `draft_length.py` has the formula for the number of
drafts that pays off, and the estimates of acceptance and cost; this file keeps one set of estimates per request and source,
updates them after each step, and compares the sources by the formula.

A source whose drafts do not pay off is tried again from time to time with a few drafts, because the text may have changed. This
is called a probe. Probes are paid from a small share of the step time, which is saved up for each source. When the backend's
drafter runs again, it first reads the tokens of the steps in which it did not run; this catching up is part of the price of its
probe.

The choice affects speed only, never a token. Everything here runs on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from math import prod
from time import perf_counter

from onedraw.speculation.draft_length import (
    PRIOR_CALL_SHARE,
    PRIOR_CATCH_UP_SHARE,
    PROBE_SAVINGS,
    PROBE_SHARE,
    PROBE_TOKENS,
    Acceptance,
    CostMeter,
    Probe,
    RowCost,
    StepCosts,
    best_chain_length,
    best_draft_counts,
    best_tree_size,
    expected_kept,
    match_at,
    split_by_match,
)
from onedraw.speculation.draft_tree import chain_length, tree_depth
from onedraw.speculation.proposers import LONGEST_MATCH, NO_PROPOSAL, PREDICTION, Proposal, Proposer
from onedraw.types import Draft, History, Request

DEVICE = "device"  # the name of the backend's own drafter as a source of drafts
POSITIONS = 16  # depths up to this one have a counter of their own in the statistics
MAX_CHAIN = 32  # a chain has at most this many drafts, unless a length is forced
# The backend's drafter does not run for a row if a proposer, whose drafts cost nothing to make, is expected to have drafts for
# the next row too, and at least this share of what would be kept of the drafter's is expected to be kept of these.
PREFERENCE = 0.8
OVERALL_WEIGHT = 8.0  # the acceptance of a source over all requests counts as much as this many drafts of a request
FIRST_SAVINGS = 2.0  # what a source may spend on probes before anything is saved up, as a multiple of the base cost of a step
MISSES, LONGEST_BREAK = 8, 3  # after 8, 16, … misses in a row the proposers are not asked for 1, 2, … steps, at most 3
LOOK_AGAIN = 3  # If a probe of the backend's drafter is due and cannot be paid, it is tried again after this many steps.
CATCH_UP_STEPS = 16  # a drafter that pays off runs for at least this many steps, over which the cost of catching up is spread
LONGEST_PAUSE = 64  # the most steps until a request for which no drafts pay off is looked at again


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Counters since the start, over all rows that carried drafts."""

    drafts: int = 0  # rows that carried drafts
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = (0,) * POSITIONS  # entry i: rows that kept more than i drafts
    by_source: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)  # source → (rows, drafted, kept)
    propose_seconds: float = 0.0  # time spent in `propose` and `plan_drafter`, proposers included
    steps_with_drafter: int = 0  # steps without prompt rows in which the backend's drafter drafted
    drafter_seconds: float = 0.0  # time that the backend's drafter took in steps without prompt rows
    probe_seconds: float = 0.0  # estimated time that probes took
    step_cost: RowCost = field(default_factory=RowCost)  # estimated cost of a step without drafting
    drafter_cost: RowCost = field(default_factory=RowCost)  # estimated cost of a call of the backend's drafter, per drafted token
    acceptance: tuple[tuple[str, float, float], ...] = ()  # (source, rounded temperature, probability that a draft is kept)


@dataclass(slots=True)
class SourceEstimates:
    """The estimates for one source of drafts in one request: how often its drafts are kept, and when to probe it again."""

    overall: dict[int, Acceptance]  # by match, the acceptance of this source over all requests with about the same temperature
    own: dict[int, Acceptance] = field(default_factory=dict)  # by match, the acceptance in this request
    probe: Probe = field(default_factory=Probe)

    def rate(self, match: int = 0) -> float:
        """The probability that a draft with this match is kept. The acceptance of other requests always counts a little, since
        that of one request is estimated from few drafts."""
        overall, own = self._overall(match), self.own.get(match)
        if own is None:
            return overall.rate
        return (own.kept + OVERALL_WEIGHT * overall.rate) / (own.kept + own.lost + OVERALL_WEIGHT)

    def rates(self, match: int, count: int) -> list[float]:
        """The probabilities of being kept of a chain's drafts, each if those before it are kept."""
        if not match:
            return [self.rate()] * count
        found = [self.rate(at) for at in range(match, min(match + count, LONGEST_MATCH + 1))]
        return found + found[-1:] * (count - len(found))

    def update(self, match: int, *, depth: int, kept: int) -> None:
        for at, count, good in split_by_match(match, depth, kept):
            overall = self._overall(at)
            own = self.own.get(at)
            if own is None:
                own = self.own[at] = overall.prior_for_new_request()
            own.update(depth=count, kept=good)
            overall.update(depth=count, kept=good)

    def _overall(self, match: int) -> Acceptance:
        found = self.overall.get(match)
        if found is None:
            found = self.overall[match] = Acceptance.assumed(match, decay=0.98, weight=64.0)
        return found


@dataclass(slots=True)
class RequestEstimates:
    proposers: tuple[Proposer, ...]  # those that may have drafts for the request
    sources: dict[str, SourceEstimates] = field(default_factory=dict)
    host_drafts: int = 0  # number of drafts in this step's row, if they are from a proposer and pay off
    host_expected: float = 0.0  # how many of `host_drafts` are expected to be kept
    host_next: float = 0.0  # how many drafts of the same proposer are expected to be kept in the row after this one
    step: int = 0  # counts calls of `propose` for this request
    misses: int = 0  # how often in a row there were no drafts to carry
    ask_at: int = 0  # the proposers are asked again from this step on
    drafter_step: int = 0  # counts calls of `plan_drafter` for this request
    plan_at: int = 0  # whether the drafter pays off for this request alone is computed again from this step on
    behind: int = 0  # how many steps the drafter has to catch up with


class Speculator:
    """Chooses the drafts of each row, and how many the backend's drafter makes for the row after it. `draft_tokens` forces the
    number of drafts; with None a row carries as many as pay off, or a probe if none do. `tree_nodes` is the size of the trees
    that the backend's drafter makes, 0 for chains."""

    def __init__(self, proposers: Sequence[Proposer] = (), *, draft_tokens: int | None = None, tree_nodes: int = 0) -> None:
        self._proposers = tuple(proposers)
        self._forced = draft_tokens
        self._longest = MAX_CHAIN if draft_tokens is None else draft_tokens
        self._tree_nodes = tree_nodes
        self._steps = StepCosts()  # cost of a step without the drafter
        self._calls = CostMeter(most=8.0)  # cost of the backend's drafter by drafted positions, if it also ran in the step before
        self._returns = CostMeter(most=8.0)  # cost of the backend's drafter by drafted positions and those it caught up with
        self._calls_measured = self._returns_measured = False
        self._catching_up = 0  # positions that the drafter catches up with in the step that was planned last
        self._sampling = 0  # number of rows in the last call of `plan_drafter`
        self._requests: dict[str, RequestEstimates] = {}
        # by source and rounded temperature, then by match, over all requests
        self._overall: dict[tuple[str, float], dict[int, Acceptance]] = {}
        self._by_source: dict[str, tuple[int, int, int]] = {}
        self._kept_depths = [0] * (POSITIONS + 1)  # entry k: rows that kept k drafts; the last entry: that many or more
        self._seconds = 0.0
        self._savings: dict[str, float] = {}  # by source, seconds that are saved up for its probes
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
        """Return drafts for the row that reaches the end of `history`. `own` are the drafts of the backend's drafter for that
        row, `room` is the most drafts that the row can carry, and `running` is the number of rows in the step. With `tentative`
        the caller only wants to know whether there are drafts, and no row will carry them."""
        if not request.speculate or room <= 0 or self._forced == 0 or not (own or self._proposers):
            return NO_PROPOSAL
        begin = perf_counter()
        state = self._state(request)
        state.step += 1
        state.host_drafts, state.host_expected, state.host_next = 0, 0.0, 0.0
        proposal = NO_PROPOSAL
        if own or self._forced is not None or (state.step >= state.ask_at and not self._steps.needs_plain_step(running)):
            proposal = self._decide(state, request, history, own[:room], room, running, tentative)
            state.misses = 0 if proposal.drafts else state.misses + 1
            state.ask_at = state.step + 1 + min(state.misses // MISSES, LONGEST_BREAK)
        self._seconds += perf_counter() - begin
        return proposal

    def plan_drafter(self, requests: Sequence[Request], *, limit: int) -> list[int]:
        """Return how many positions, at most `limit`, the backend's drafter drafts after this step for each of its rows. Call it
        after `propose` was called for these rows."""
        if self._forced is not None:
            return [min(self._forced, limit) if request.speculate else 0 for request in requests]
        begin = perf_counter()
        states = [self._state(request) for request in requests]
        counts = [0] * len(requests)
        asks = len(requests) != self._sampling
        self._sampling = len(requests)
        for state in states:
            state.drafter_step += 1
            asks = asks or state.drafter_step >= state.plan_at
        if asks and not self._steps.needs_plain_step(len(requests)):
            counts = self._drafter_counts(requests, states, limit)
            self._add_probes(counts, requests, states)
        self._catching_up = 0
        for state, count in zip(states, counts, strict=True):
            self._catching_up += state.behind if count else 0
            state.behind = 0 if count else state.behind + 1
        self._seconds += perf_counter() - begin
        return counts

    def _add_probes(self, counts: list[int], requests: Sequence[Request], states: Sequence[RequestEstimates]) -> None:
        """Change the count of rows that draft nothing to 1, if a probe is due and paid. As the rows of a step share the drafter's
        call, others probe too when one does; then each learns from more drafts at hardly more cost."""
        call, token = self._return_cost(), self._steps.of(len(counts)).token_seconds
        waiting = []
        for index, (request, state) in enumerate(zip(requests, states, strict=True)):
            probe, now = self._of(request, state, DEVICE).probe, state.drafter_step
            if counts[index]:
                probe.reset(now)
                state.plan_at = now + 1
            elif request.speculate:
                # While a proposer's drafts pay off, the drafter has to take over as soon as they end.
                state.plan_at = now + 1 if state.host_expected else min(max(probe.due_at, now + 1), now + LONGEST_PAUSE)
                waiting.append((now < probe.due_at, index, probe))
        waiting.sort(key=lambda entry: entry[:2])  # those whose probe is due come first
        probing = False
        for early, index, probe in waiting:
            state, now = states[index], states[index].drafter_step
            if early and not probing:
                return
            price = call.row_seconds + call.token_seconds * (1 + state.behind) + token
            if self._pay_for_probe(DEVICE, price if any(counts) else price + call.base_seconds):
                counts[index], probing = 1, True
                probe.back_off(now)
                state.plan_at = now + 1
            elif not early:
                state.plan_at = now + LOOK_AGAIN

    def record_outcome(
        self, request_id: str, source: str, *, drafted: int, kept: int, depth: int | None = None, match: int = 0
    ) -> None:
        """Learn from a verified row: `kept` of its `drafted` drafts were kept, and at most `depth` could be kept together.
        `match` is that of the proposal."""
        rows, drafts, accepted = self._by_source.get(source, (0, 0, 0))
        self._by_source[source] = (rows + 1, drafts + drafted, accepted + kept)
        self._kept_depths[min(kept, POSITIONS)] += 1
        reach = drafted if depth is None else depth
        request = self._requests.get(request_id)
        if request is not None and source in request.sources:  # unless the request has ended
            request.sources[source].update(match, depth=reach, kept=kept)

    def record_step(
        self, *, tokens: int, rows: int, seconds: float, drafting_rows: int = 0, drafted: int = 0, drafter_seconds: float = 0.0
    ) -> None:
        """Update the cost estimates by a step without prompt rows. It computed `tokens` positions for `rows` sequences in
        `seconds`; after that the backend's drafter made `drafted` drafts for `drafting_rows` of them in `drafter_seconds`."""
        self._steps.observe(tokens=tokens, rows=rows, seconds=seconds)
        self._drafter_seconds += drafter_seconds
        if drafted:
            self._drafter_steps += 1
            call = self._drafter_cost()
            usual = call.base_seconds + call.row_seconds * drafting_rows + call.token_seconds * drafted
            if self._catching_up:
                self._returns.observe(tokens=drafted + self._catching_up, rows=drafting_rows, seconds=drafter_seconds)
                self._returns_measured = True
            # A call that is so much faster than usual shows that the calls before it were warm-up.
            if not self._catching_up or drafter_seconds * 8.0 < usual:
                self._calls.observe(tokens=drafted, rows=drafting_rows, seconds=drafter_seconds)
                self._calls_measured = True
        most, earned = PROBE_SAVINGS * self._steps.cost.base_seconds, PROBE_SHARE * (seconds + drafter_seconds)
        for source, saved in self._savings.items():
            self._savings[source] = min(saved + earned, most)

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
            tuple(
                (source, temperature, _mean_rate(list(by_match.values())))
                for (source, temperature), by_match in list(self._overall.items())
                if by_match
            ),
        )

    def _decide(
        self,
        state: RequestEstimates,
        request: Request,
        history: History,
        own: tuple[Draft, ...],
        room: int,
        running: int,
        tentative: bool,
    ) -> Proposal:
        own_count, own_expected = self._own(request, state, own, running) if own else (0, 0.0)
        now = state.step
        most = min(room, self._longest)
        for proposer in state.proposers:
            proposal = proposer.propose(request, history, most)
            if not proposal.drafts:
                continue
            drafts, known = proposal.drafts[:most], self._of(request, state, proposer.name)
            rates = known.rates(proposal.match, len(drafts))
            count = self._length(rates, running)
            expected = expected_kept(rates[:count])
            if count and expected >= own_expected:
                known.probe.reset(now)
                state.host_drafts, state.host_expected = count, expected
                # If all are kept, the copied text is likely to go on, and the next row to have such drafts again.
                further = known.rates(match_at(proposal.match, count), count)
                state.host_next = prod(rates[:count]) * expected_kept(further)
            else:
                count = min(PROBE_TOKENS, len(drafts))
                price = count * self._steps.of(running).token_seconds
                if now < known.probe.due_at or not self._pay_for_probe(proposer.name, price, tentative=tentative):
                    continue
                if not tentative:  # After a tentative call the probe is still due, since no row carries its drafts.
                    known.probe.back_off(now)
            return Proposal(drafts[:count], proposer.name, proposal.match)
        return Proposal(own[:own_count], DEVICE) if own_count else NO_PROPOSAL

    def _own(self, request: Request, state: RequestEstimates, own: tuple[Draft, ...], running: int) -> tuple[int, float]:
        """Return how many of the backend's drafts to use, from the first on, and how many of them are kept on average. They are
        made already, so only their verification costs time, and at least one is used."""
        rate = self._of(request, state, DEVICE).rate()
        chain = chain_length(own)
        if chain == len(own):
            count = max(self._length([rate] * min(chain, self._longest), running), 1)
            return count, expected_kept(repeat(rate, count))
        deepest = tree_depth(own)
        if self._forced is None:
            cost = self._steps.of(running)
            count, kept = best_tree_size(rate, chain=chain, depth=deepest, nodes=len(own), cost=cost, running=running)
            return (count, kept) if count else (1, rate)
        reach = min(self._forced, deepest)
        return (len(own) if reach == deepest else reach), expected_kept(repeat(rate, reach))

    def _drafter_counts(self, requests: Sequence[Request], states: Sequence[RequestEstimates], limit: int) -> list[int]:
        """Return how many positions to draft for each row, so that all rows together get the most tokens per second."""
        rates, host_drafts, host_kept = [], 0, 0.0
        for request, state in zip(requests, states, strict=True):
            rate = 0.0
            if request.speculate:
                rate = self._of(request, state, DEVICE).rate()
            if state.host_next > 0.0 and state.host_next >= PREFERENCE * expected_kept(repeat(rate, limit)):
                rate, host_drafts, host_kept = 0.0, host_drafts + state.host_drafts, host_kept + state.host_expected
            rates.append(rate)
        return best_draft_counts(
            rates,
            cost=self._steps.of(len(requests)),
            drafting=self._drafter_cost(),
            catch_up=[self._return_cost().token_seconds * state.behind / CATCH_UP_STEPS for state in states],
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

    def _return_cost(self) -> RowCost:
        """Return the cost of the backend's drafter after steps without it, where a token is a position that is drafted or that it
        catches up with."""
        if self._returns_measured:
            return self._returns.cost
        base = self._steps.cost.base_seconds
        return RowCost(PRIOR_CALL_SHARE * base, PRIOR_CATCH_UP_SHARE * base)

    def _pay_for_probe(self, source: str, price: float, *, tentative: bool = False) -> bool:
        """Return whether the saved time covers a probe, and if so subtract the probe's price from it unless the call is
        tentative."""
        # No more than `most` can be saved up. A probe that costs more, perhaps because one call was slow, leaves the savings
        # negative.
        base = self._steps.cost.base_seconds
        most, saved = PROBE_SAVINGS * base, self._savings.setdefault(source, FIRST_SAVINGS * base)
        if min(price, most) > saved:
            return False
        if not tentative:
            self._savings[source] = saved - price
            self._probe_seconds += price
        return True

    def _length(self, rates: Sequence[float], running: int) -> int:
        """Return how many drafts of a chain to use, from the first on, by their probabilities of being kept."""
        return best_chain_length(rates, cost=self._steps.of(running), running=running) if self._forced is None else len(rates)

    def _state(self, request: Request) -> RequestEstimates:
        state = self._requests.get(request.id)
        if state is None:
            proposers = tuple(p for p in self._proposers if request.predicted or p.name != PREDICTION)
            state = self._requests[request.id] = RequestEstimates(proposers)
        return state

    def _of(self, request: Request, state: RequestEstimates, source: str) -> SourceEstimates:
        known = state.sources.get(source)
        if known is None:
            kind = (source, min(round(request.params.temperature * 4) / 4, 2.0))
            known = state.sources[source] = SourceEstimates(self._overall.setdefault(kind, {}))
        return known


def _mean_rate(estimates: Sequence[Acceptance]) -> float:
    """Return the rate over all matches, each weighted by how often it was tried lately."""
    return sum(e.kept for e in estimates) / sum(e.kept + e.lost for e in estimates)
