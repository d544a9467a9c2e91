"""How much to guess: pure functions of recent acceptance, measured cost and batch size, and the estimates they read.

In: what turns cost, how many drafts were kept. Out: the number of drafts that brings the most tokens per second.

    drafts are kept one after the other with probability a    expected(k) = a + a² + … + a^k
    a turn of R rows with k drafts each                       base + R · (row + token · (1 + k)) seconds
    speed of a row                                            (1 + expected(k)) / (base / R + row + token · (1 + k))

The speed has one peak, since each further draft brings less than the one before at the same cost. With many rows the
base is shared already and with hopeless drafts there is nothing to gain: the peak is at 0 drafts, and a probe is all
that goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PRIOR_ACCEPTANCE = 0.6  # of a source nobody has tried yet
PRIOR_WEIGHT = 3.0  # how many drafts the prior counts for
PRIOR_TOKEN_SHARE = 0.05  # what a further token costs before it is measured, as a share of the base
CHAIN_SHARE = 0.7  # of a tree's acceptance that its first chain has by itself
PROBE_TOKENS = 2
FIRST_PROBE_GAP, LAST_PROBE_GAP = 4, 64


# ---------------------------------------------------------------------- the decision


@dataclass(frozen=True, slots=True)
class RowCost:
    """What a turn costs: base + rows * row + tokens * token. Only the proportions matter to the decision."""

    base_seconds: float = 1.0
    token_seconds: float = PRIOR_TOKEN_SHARE
    row_seconds: float = 0.0


def expected(acceptance: float, depth: int) -> float:
    """How many of `depth` drafts in a chain are kept on average."""
    if acceptance >= 1.0:
        return float(depth)
    return acceptance * (1.0 - acceptance**depth) / (1.0 - acceptance)


def speed(kept: float, drafts: int, *, cost: RowCost, running: int) -> float:
    """Tokens per second of a row that carries `drafts` and keeps `kept` on average, among `running` rows like it."""
    return (1.0 + kept) / (cost.base_seconds / running + cost.row_seconds + cost.token_seconds * (1 + drafts))


def how_many(acceptance: float, *, cost: RowCost, running: int, limit: int) -> int:
    """The length of a chain, at most `limit`, that gives a row its highest speed."""
    running = max(running, 1)
    seconds = cost.base_seconds / running + cost.row_seconds + cost.token_seconds
    tokens, gain = 1.0, acceptance
    for count in range(limit):
        # One more draft pays off while what it adds per second is more than the speed so far.
        if gain * seconds <= cost.token_seconds * tokens:
            return count
        tokens += gain
        seconds += cost.token_seconds
        gain *= acceptance
    return max(limit, 0)


def how_much_of_a_tree(
    acceptance: float, *, chain: int, depth: int, nodes: int, cost: RowCost, running: int
) -> tuple[int, float]:
    """How many drafts of a tree whose first `chain` are a chain, and how many are kept on average: all, or of the chain.

    `acceptance` is the tree's. Its siblings are there for what the chain alone would miss.
    """
    alone = acceptance * CHAIN_SHARE
    count = how_many(alone, cost=cost, running=running, limit=chain)
    whole = expected(acceptance, depth)
    running = max(running, 1)
    if speed(whole, nodes, cost=cost, running=running) > speed(expected(alone, count), count, cost=cost, running=running):
        return nodes, whole
    return count, expected(alone, count)


# ---------------------------------------------------------------------- what was kept


@dataclass(slots=True)
class Acceptance:
    """The chance that a draft is kept once those before it are, from recent rows. Owner: the speculator.

    A row with k of d drafts kept shows k successes, and a failure if k < d. Rows fade by `memory` one after the other,
    and all together weigh at most `weight`, so that one long copied passage is not believed for ever.
    """

    kept: float = PRIOR_ACCEPTANCE * PRIOR_WEIGHT
    lost: float = (1.0 - PRIOR_ACCEPTANCE) * PRIOR_WEIGHT
    memory: float = 0.85
    weight: float = 16.0

    @property
    def rate(self) -> float:
        return self.kept / (self.kept + self.lost)

    def learn(self, *, depth: int, kept: int) -> None:
        if depth <= 0:
            return
        self.kept = self.kept * self.memory + kept
        self.lost = self.lost * self.memory + (kept < depth)
        excess = (self.kept + self.lost) / self.weight
        if excess > 1.0:
            self.kept, self.lost = self.kept / excess, self.lost / excess

    def successor(self) -> Acceptance:
        """The estimate a new request begins with: halfway to this rate, since requests differ in what they repeat."""
        rate = (self.rate + PRIOR_ACCEPTANCE) / 2.0
        return Acceptance(rate * PRIOR_WEIGHT, (1.0 - rate) * PRIOR_WEIGHT)


@dataclass(slots=True)
class Probe:
    """When a source that does not pay off is tried again: after 4 turns, then 8, … 64. Owner: the speculator."""

    gap: int = FIRST_PROBE_GAP
    waited: int = 0

    def due(self) -> bool:
        """One more turn has come in which the source does not pay off; is it time to try it?"""
        self.waited += 1
        return self.waited >= self.gap

    def spend(self) -> None:
        self.gap, self.waited = min(self.gap * 2, LAST_PROBE_GAP), 0

    def rest(self) -> None:
        """The source pays off by itself."""
        self.gap, self.waited = FIRST_PROBE_GAP, 0


# ---------------------------------------------------------------------- what turns cost


@dataclass(slots=True)
class CostMeter:
    """Seconds of a turn over its tokens and rows: least squares that forget. Owner: the speculator.

    Where the turns seen do not tell tokens from rows, or say nothing at all, the fit leans on the prior proportion
    of a token's cost to the base; the prior weighs as much as `ridge` turns that differ by one token.
    """

    memory: float = 0.99
    ridge: float = 4.0
    cost: RowCost = field(default_factory=RowCost)
    _weight: float = 0.0
    _means: tuple[float, float, float] = (0.0, 0.0, 0.0)  # of tokens, rows, seconds
    _tokens_tokens: float = 0.0  # the sums of products of deviations from the means
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
                self._weight = 0.0  # what was seen so far was a warm-up: a turn cannot be faster than the machine
            elif self._weight > 4.0:
                seconds = min(seconds, 2.0 * usual)  # one hiccup does not set the pace
        self._add(float(tokens), float(rows), seconds)
        self.cost = self._fit()

    def _add(self, tokens: float, rows: float, seconds: float) -> None:
        fade = self.memory if self._weight > 0.0 else 0.0
        self._weight = self._weight * fade + 1.0
        was = self._means
        by_tokens, by_rows, by_seconds = tokens - was[0], rows - was[1], seconds - was[2]
        share = 1.0 / self._weight
        self._means = (was[0] + share * by_tokens, was[1] + share * by_rows, was[2] + share * by_seconds)
        rest = 1.0 - share  # a deviation from the mean before, times this, is the one from the mean after
        self._tokens_tokens = fade * self._tokens_tokens + rest * by_tokens * by_tokens
        self._tokens_rows = fade * self._tokens_rows + rest * by_tokens * by_rows
        self._rows_rows = fade * self._rows_rows + rest * by_rows * by_rows
        self._tokens_seconds = fade * self._tokens_seconds + rest * by_tokens * by_seconds
        self._rows_seconds = fade * self._rows_seconds + rest * by_rows * by_seconds

    def _fit(self) -> RowCost:
        """Ridge regression of what the prior leaves unexplained, kept within costs that can be."""
        mean_tokens, mean_rows, mean_seconds = self._means
        prior = mean_seconds / (1.0 / PRIOR_TOKEN_SHARE + mean_tokens)
        tt, rr, tr = self._tokens_tokens + self.ridge, self._rows_rows + self.ridge, self._tokens_rows
        ts = self._tokens_seconds - prior * self._tokens_tokens
        rs = self._rows_seconds - prior * tr
        determinant = tt * rr - tr * tr  # positive: the ridge is
        token = prior + (ts * rr - rs * tr) / determinant
        row = (rs * tt - ts * tr) / determinant
        if row < 0.0:
            token, row = prior + ts / tt, 0.0
        least = 1e-3 * prior
        if token < least:
            token, row = least, max((self._rows_seconds - least * tr) / rr, 0.0)
        scale = min(1.0, mean_seconds / (token * mean_tokens + row * mean_rows))  # the base cannot be negative
        token, row = token * scale, row * scale
        return RowCost(max(mean_seconds - token * mean_tokens - row * mean_rows, 0.0), token, row)
