"""The formula for the best number of drafts, and the estimates of acceptance and cost that it is computed from.

A row is the work of one sequence in one step: its known tokens, then drafts. Acceptance is the probability that a draft is kept,
which means that it equals the token that the target model samples. `speculator.py` owns the estimates, feeds them with the
results of steps, and decides with this formula which source's drafts a row carries. The formula returns the number of drafts
that gives the most tokens per second, under this model:

    draft i is kept with probability a_i, if those before are    expected_kept = a_1 + a_1 · a_2 + … + a_1 · … · a_k
    a step of R rows with k drafts each                          base + R · (row + token · (1 + k)) seconds
    speed of a row                                               (1 + expected_kept) / (base / R + row + token · (1 + k))

Each further draft costs the same and adds at most as much as the one before, so drafts are added until one does not pay off: what
it adds has to be worth PAYS times the time that it costs. There are no drafts if many rows share the base cost, or if drafts are
rarely kept. Then drafts are only tried occasionally, which is called a probe.

Acceptance is estimated for each match (`Proposal.match`): a draft copied from a place before which eight tokens agree is kept far
more often than one before which two do. With each kept draft one more token agrees, so later drafts are likelier than the first.

Drafts of the backend's own drafter cost its time too: a call, which the rows that draft in a step share, and each position
that it drafts. Drafting has to beat a step in which the drafter does not run. A drafter that did not run for some steps also
has to catch up: it reads the tokens of these steps first. The probes of a source take at most PROBE_SHARE of the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat

from onedraw.speculation.proposers import LONGEST_MATCH

# By match, the probability that a draft is kept, assumed for a source that has not been tried. Measured with n-grams at
# temperatures from 0 to 1; the first is for sources without matches.
PRIOR_ACCEPTANCE = (0.5, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.9)
PRIOR_WEIGHT = 8.0  # it counts as much as this many observed drafts
REQUEST_WEIGHT = 3.0  # at the start of a request, the acceptance in other requests counts as much as this many of its own drafts
PRIOR_STEPS = 3.0  # the cost of a draft that other steps suggest counts as much as this many measured steps
PRIOR_TOKEN_SHARE = 0.05  # the cost of one token as a share of the base cost, assumed until it is measured
CHAIN_SHARE = 0.7  # acceptance of the chain of best candidates as a share of the acceptance of the whole tree
PRIOR_CALL_SHARE = 0.25  # the cost of a call of the backend's drafter as a share of the base cost, until it is measured
PRIOR_CATCH_UP_SHARE = 0.01  # the cost of catching up by one token as a share of the base cost, until it is measured
REFINEMENTS = 3  # The best number of drafts depends on the step's speed and the speed on the number: both are refined this often.
# What a draft brings has to be worth this multiple of what it costs. Both are estimates, and other rows of the step only lose.
PAYS = 1.5
CALL_PAYS = 1.1  # the same for a call of the backend's drafter and all drafts that it makes
PROBE_TOKENS = 2  # number of drafts of a proposer's probe
FIRST_PROBE_GAP, LAST_PROBE_GAP = 2, 64  # steps from one probe to the next, at first and at most
PLAIN_STEPS = 2.0  # for each number of rows, the cost of a step without drafts counts as known after this many
BATCH_WEIGHT = 64.0  # for each number of rows, costs are means over about this many of the latest steps
PROBE_SHARE = 0.005  # the probes of a source take at most this share of the time
PROBE_SAVINGS = 8.0  # the most time for a source's probes that can be saved up, as a multiple of the base cost of a step


# ---------------------------------------------------------------------- decision


@dataclass(frozen=True, slots=True)
class RowCost:
    """The cost of a step is base + rows * row + tokens * token, in seconds. Decisions depend on the proportions only."""

    base_seconds: float = 1.0
    token_seconds: float = PRIOR_TOKEN_SHARE
    row_seconds: float = 0.0

    @property
    def parts(self) -> tuple[float, float, float]:
        """Return the cost per step, per row and per token."""
        return self.base_seconds, self.row_seconds, self.token_seconds


def expected_kept(rates: Iterable[float]) -> float:
    """Return the average number of kept drafts in a chain whose drafts have these probabilities of being kept, each if those
    before it are."""
    kept, reached = 0.0, 1.0
    for rate in rates:
        reached *= rate
        kept += reached
    return kept


def speed(kept: float, drafts: int, *, cost: RowCost, running: int) -> float:
    """Return the tokens per second of a row that carries `drafts` and keeps `kept` on average, among `running` such rows."""
    return (1.0 + kept) / (cost.base_seconds / running + cost.row_seconds + cost.token_seconds * (1 + drafts))


def best_chain_length(rates: Sequence[float], *, cost: RowCost, running: int) -> int:
    """Return how many drafts of a chain pay off, from the first one on. `rates` are their probabilities of being kept."""
    running = max(running, 1)
    seconds = cost.base_seconds / running + cost.row_seconds + cost.token_seconds
    tokens, reached, price = 1.0, 1.0, PAYS * cost.token_seconds
    for count, rate in enumerate(rates):
        reached *= rate
        if reached * seconds <= price * tokens:
            return count
        tokens += reached
        seconds += cost.token_seconds
    return len(rates)


def best_tree_size(acceptance: float, *, chain: int, depth: int, nodes: int, cost: RowCost, running: int) -> tuple[int, float]:
    """Return how many drafts of a tree to carry (all `nodes`, or some of the first `chain`, which are the chain of
    best candidates), and how many are kept on average.

    `acceptance` is that of the whole tree, where a sibling may be kept if the chain of best candidates is wrong.
    """
    rates = [acceptance * CHAIN_SHARE] * chain
    count = best_chain_length(rates, cost=cost, running=running)
    whole, part = expected_kept(repeat(acceptance, depth)), expected_kept(rates[:count])
    running = max(running, 1)
    if speed(whole, nodes, cost=cost, running=running) > speed(part, count, cost=cost, running=running):
        return nodes, whole
    return count, part


def best_draft_counts(
    rates: Sequence[float],
    *,
    cost: RowCost,
    drafting: RowCost,
    running: int,
    limit: int,
    catch_up: Sequence[float] = (),
    nodes: int = 0,
    host_drafts: int = 0,
    host_kept: float = 0.0,
) -> list[int]:
    """Return how many positions the backend's drafter should draft for each row, given the rows' rates of acceptance.

    `running` rows share the step, and all that draft share a call of the drafter, whose cost is `drafting` (with drafted
    positions in place of tokens). `catch_up` has for each row the seconds per step that catching up costs, if the row drafts.
    With `nodes` the drafts of `limit` positions are a tree of that many nodes, and a rate is that of the tree. Other rows of the
    step carry `host_drafts` drafts of proposers, of which `host_kept` are kept on average.

    A draft pays off if its probability of being kept exceeds PAYS times the number of tokens that the step, at its present speed,
    samples in the time that the draft costs. The call pays off if all drafts bring CALL_PAYS times what they and it cost.
    """
    if not rates:
        return []  # No row samples. The step's fitted cost may be zero then, and the code below divides by it.
    seconds = cost.base_seconds + running * (cost.row_seconds + cost.token_seconds) + host_drafts * cost.token_seconds
    tokens = running + host_kept
    best = [0] * len(rates)
    fastest = tokens / seconds
    for _ in range(REFINEMENTS):
        found = [
            _drafts_at(fastest, rate, begin, cost=cost, drafting=drafting, limit=limit, nodes=nodes)
            for rate, begin in zip(rates, catch_up or [0.0] * len(rates), strict=True)
        ]
        kept = sum(expected for _, expected, _ in found)
        took = sum(price for _, _, price in found)
        extra = drafting.base_seconds + took
        speed_then = (tokens + kept) / (seconds + extra)
        if not kept or speed_then <= fastest or kept * seconds <= CALL_PAYS * tokens * extra:
            break
        fastest, best = speed_then, [count for count, _, _ in found]
    return best


def _drafts_at(
    tokens_per_second: float, rate: float, begin: float, *, cost: RowCost, drafting: RowCost, limit: int, nodes: int
) -> tuple[int, float, float]:
    """Return how many positions to draft for a row, how many drafts it will keep on average, and how many seconds they cost.
    `begin`: seconds that drafting for the row costs, whatever the number of drafts."""
    begin += drafting.row_seconds
    price = drafting.token_seconds + cost.token_seconds
    chain_rate = rate * CHAIN_SHARE if nodes else rate
    count, gain = 0, chain_rate
    while count < limit and gain > PAYS * tokens_per_second * price:
        count, gain = count + 1, gain * chain_rate
    kept = expected_kept(repeat(chain_rate, count))
    options = [(count, kept, begin + count * price if count else 0.0)]
    if nodes and limit:
        tree = begin + limit * drafting.token_seconds + nodes * cost.token_seconds
        options.append((limit, expected_kept(repeat(rate, limit)), tree))
    chosen = max(options, key=lambda option: option[1] - tokens_per_second * option[2])
    return chosen if chosen[1] > tokens_per_second * chosen[2] else (0, 0.0, 0.0)


# ---------------------------------------------------------------------- estimate of acceptance


@dataclass(slots=True)
class Acceptance:
    """Estimates from recent rows the probability that a draft is kept, given that those before it are kept.

    A row that keeps k of d drafts counts as k successes, and one failure if k < d. Each new row weights older ones down by
    `decay`, and their total weight is at most `weight`, so that one long copied passage does not dominate the estimate.
    """

    kept: float = PRIOR_ACCEPTANCE[0] * PRIOR_WEIGHT
    lost: float = (1.0 - PRIOR_ACCEPTANCE[0]) * PRIOR_WEIGHT
    decay: float = 0.9
    weight: float = 24.0

    @staticmethod
    def assumed(match: int, *, decay: float, weight: float) -> Acceptance:
        """Return the estimate for drafts with this match before any were tried."""
        rate = PRIOR_ACCEPTANCE[match]
        return Acceptance(rate * PRIOR_WEIGHT, (1.0 - rate) * PRIOR_WEIGHT, decay, weight)

    @property
    def rate(self) -> float:
        return self.kept / (self.kept + self.lost)

    def update(self, *, depth: int, kept: int) -> None:
        if depth <= 0:
            return
        self.kept = self.kept * self.decay + kept
        self.lost = self.lost * self.decay + (kept < depth)
        excess = (self.kept + self.lost) / self.weight
        if excess > 1.0:
            self.kept, self.lost = self.kept / excess, self.lost / excess

    def prior_for_new_request(self) -> Acceptance:
        """Return the first estimate of a new request: this acceptance, with little weight, because requests differ."""
        return Acceptance(self.rate * REQUEST_WEIGHT, (1.0 - self.rate) * REQUEST_WEIGHT)


def match_at(match: int, draft: int) -> int:
    """Return the match of the draft with this index in a chain that begins with `match`."""
    return min(match + draft, LONGEST_MATCH) if match else 0


def split_by_match(match: int, depth: int, kept: int) -> Iterator[tuple[int, int, int]]:
    """Split the drafts of a row, of which at most `depth` could be kept, by their matches. Yields a match, the number of drafts
    with it, and how many of them were kept, up to the first draft that was not."""
    for draft in range(min(kept + 1, depth)):
        at = match_at(match, draft)
        if at in (0, LONGEST_MATCH):  # the match of all drafts that follow
            yield at, depth - draft, kept - draft
            return
        yield at, 1, int(kept > draft)


@dataclass(slots=True)
class Probe:
    """Decides when a source of drafts that does not pay off is tried again: after 2 steps, then after 4, 8 and so on up to 64
    further ones. Steps are those of the request, counted from 0."""

    gap: int = FIRST_PROBE_GAP
    due_at: int = FIRST_PROBE_GAP  # the step from which on it is tried

    def back_off(self, step: int) -> None:
        """Note that the source was tried in this step. The next time comes after twice as many steps."""
        self.gap = min(self.gap * 2, LAST_PROBE_GAP)
        self.due_at = step + self.gap

    def reset(self, step: int) -> None:
        """Note that the source pays off in this step, so that it needs no probe."""
        self.gap = FIRST_PROBE_GAP
        self.due_at = step + self.gap


# ---------------------------------------------------------------------- estimate of step cost


@dataclass(slots=True)
class CostMeter:
    """Estimates the duration of a step from its numbers of tokens and rows, with least squares that weight older steps down.

    While the observed steps do not separate the cost of tokens from the cost of rows, the fit stays near the prior ratio of token
    cost to base cost. The prior weighs as much as `ridge` steps that differ from the mean by one token.
    """

    decay: float = 0.99
    ridge: float = 4.0
    most: float = 2.0  # a slow step counts as at most this multiple of the usual time
    cost: RowCost = field(default_factory=RowCost)
    _weight: float = 0.0
    _means: tuple[float, float, float] = (0.0, 0.0, 0.0)  # weighted means of tokens, rows and seconds
    # Weighted sums of (x - mean of x) * (y - mean of y). The field's name is _x_y.
    _tokens_tokens: float = 0.0
    _tokens_rows: float = 0.0
    _rows_rows: float = 0.0
    _tokens_seconds: float = 0.0
    _rows_seconds: float = 0.0

    def observe(self, *, tokens: int, rows: int, seconds: float) -> None:
        if tokens <= 0 or rows <= 0 or not 0.0 < seconds < float("inf"):
            return
        if self._weight > 0.0:
            cost = self.cost
            usual = cost.base_seconds + cost.row_seconds * rows + cost.token_seconds * tokens
            if seconds * 8.0 < usual:
                self._weight = 0.0  # This step is so much faster that those before must have been warm-up; they are discarded.
            elif self._weight > 4.0:
                seconds = min(seconds, self.most * usual)  # so that one slow step hardly changes the estimate
        self._add(float(tokens), float(rows), seconds)
        self.cost = self._fit()

    def _add(self, tokens: float, rows: float, seconds: float) -> None:
        fade = self.decay if self._weight > 0.0 else 0.0
        self._weight = self._weight * fade + 1.0
        was = self._means
        by_tokens, by_rows, by_seconds = tokens - was[0], rows - was[1], seconds - was[2]
        share = 1.0 / self._weight
        self._means = (was[0] + share * by_tokens, was[1] + share * by_rows, was[2] + share * by_seconds)
        rest = 1.0 - share  # The new step deviates from the new mean by this share of its deviation from the old mean.
        self._tokens_tokens = fade * self._tokens_tokens + rest * by_tokens * by_tokens
        self._tokens_rows = fade * self._tokens_rows + rest * by_tokens * by_rows
        self._rows_rows = fade * self._rows_rows + rest * by_rows * by_rows
        self._tokens_seconds = fade * self._tokens_seconds + rest * by_tokens * by_seconds
        self._rows_seconds = fade * self._rows_seconds + rest * by_rows * by_seconds

    def _fit(self) -> RowCost:
        """Fit costs by ridge regression of the deviations from the prior, and keep them from being negative."""
        mean_tokens, mean_rows, mean_seconds = self._means
        prior = mean_seconds / (1.0 / PRIOR_TOKEN_SHARE + mean_tokens)
        tt, rr, tr = self._tokens_tokens + self.ridge, self._rows_rows + self.ridge, self._tokens_rows
        ts = self._tokens_seconds - prior * self._tokens_tokens
        rs = self._rows_seconds - prior * tr
        determinant = tt * rr - tr * tr  # positive, since the ridge is added to both tt and rr
        token = prior + (ts * rr - rs * tr) / determinant
        row = (rs * tt - ts * tr) / determinant
        if row < 0.0:
            token, row = prior + ts / tt, 0.0
        least = 1e-3 * prior
        if token < least:
            token, row = least, max((self._rows_seconds - least * tr) / rr, 0.0)
        scale = min(1.0, mean_seconds / (token * mean_tokens + row * mean_rows))  # so that the base cost is not negative
        token, row = token * scale, row * scale
        return RowCost(max(mean_seconds - token * mean_tokens - row * mean_rows, 0.0), token, row)


@dataclass(slots=True)
class BatchCost:
    """For steps with a certain number of rows: the mean seconds of a step without drafts, and the mean that each draft adds."""

    plain_seconds: float = 0.0
    draft_seconds: float = 0.0
    plain_weight: float = 0.0
    draft_weight: float = 0.0
    drafted: int = 0  # number of steps with drafts that were observed before the cost without drafts was known

    @property
    def known(self) -> bool:
        return self.plain_weight >= PLAIN_STEPS

    def observe(self, *, drafts: int, seconds: float, prior: float) -> None:
        """Update the means with a step. `prior`: the seconds of a draft, assumed until they are measured."""
        usual = self.plain_seconds + drafts * self.draft(prior)
        if seconds * 8.0 < usual:
            self.plain_weight = self.draft_weight = 0.0  # as in `CostMeter`: the steps before must have been warm-up
        elif self.known:
            seconds = min(seconds, 2.0 * usual)
        if not drafts:
            self.plain_weight = min(self.plain_weight + 1.0, BATCH_WEIGHT)
            self.plain_seconds += (seconds - self.plain_seconds) / self.plain_weight
        elif not self.known:
            self.drafted += 1
        else:
            self.draft_weight = min(self.draft_weight + 1.0, BATCH_WEIGHT)
            self.draft_seconds += ((seconds - self.plain_seconds) / drafts - self.draft_seconds) / self.draft_weight

    def draft(self, prior: float) -> float:
        measured = (self.draft_weight * self.draft_seconds + PRIOR_STEPS * prior) / (self.draft_weight + PRIOR_STEPS)
        return max(measured, 1e-3 * prior)


@dataclass(slots=True)
class StepCosts:
    """Estimates the cost of a step by its rows and tokens: with one fit for all steps, and per number of rows where steps of
    that number were measured. A processor may take as long for 6 tokens as for 8, which a linear fit cannot show."""

    fit: CostMeter = field(default_factory=CostMeter)
    _batches: dict[int, BatchCost] = field(default_factory=dict)

    @property
    def cost(self) -> RowCost:
        return self.fit.cost

    def observe(self, *, tokens: int, rows: int, seconds: float) -> None:
        if tokens < rows or rows <= 0 or not 0.0 < seconds < float("inf"):
            return
        self.fit.observe(tokens=tokens, rows=rows, seconds=seconds)
        batch = self._batches.get(rows)
        if batch is None:
            batch = self._batches[rows] = BatchCost()
        batch.observe(drafts=tokens - rows, seconds=seconds, prior=self.fit.cost.token_seconds)

    def needs_plain_step(self, rows: int) -> bool:
        """Whether the next step with this number of rows should have no drafts, to measure what drafts add to it. Until that is
        known, every other step has none."""
        batch = self._batches.get(rows)
        return batch is not None and not batch.known and batch.drafted > batch.plain_weight

    def of(self, rows: int) -> RowCost:
        """Return the cost of steps with exactly this number of rows. If it was measured, the base cost is 0: the cost without
        drafts is divided among the rows. A row's cost is its share minus the cost of one token, so it may be negative."""
        fitted, batch = self.fit.cost, self._batches.get(rows)
        if batch is None or not batch.known:
            return fitted
        draft = batch.draft(fitted.token_seconds)
        return RowCost(0.0, draft, batch.plain_seconds / rows - draft)
