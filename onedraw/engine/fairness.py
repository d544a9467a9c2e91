"""Whose turn it is: numbers in, an order out. The scheduler acts on it; nothing here touches a sequence, a lane or a page.

Callers (an API key, else a client address) share the lanes evenly, and so do the requests of one caller; the choices of one
request share its turn. The rank of a running row is the number of rows that its caller holds before it, counted round robin over
the caller's requests. A waiting request displaces a row of higher rank than its own row would get, and a row of equal rank after
that row's turn. So rows are displaced only in favour of a caller or request that holds less, never back and forth, and every row
samples a whole turn before another of equal rank takes its place.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

TURN_TOKENS = 64  # a row samples at least so many in a turn
RESUME_SHARE = 8  # a turn samples at least a token per so many that have to be computed again after it
PATIENCE = 8  # how often smaller requests may pass one that waits for pages
TRIES = 4  # waiting requests that are tried in one step


class TurnKey(NamedTuple):
    """Who a row belongs to: the lanes are shared among callers, a caller's lanes among its requests."""

    caller: str
    request: str


class RunningRow(NamedTuple):
    key: TurnKey
    overtime: int  # tokens sampled since its turn ended; negative: its turn lasts


class Rank(NamedTuple):
    in_caller: int
    in_request: int


def turn_length(known: int, least: int) -> int:
    """Return how many tokens a row samples before its turn ends. `known`: what it computes again if it is preempted."""
    return max(least, known // RESUME_SHARE)


def ranks(keys: Sequence[TurnKey]) -> list[Rank]:
    """The rank of every row among its caller's rows, and among its request's. `keys`: oldest row first."""
    held: Counter[TurnKey] = Counter()
    in_request, by_caller = [], defaultdict(list)
    for index, key in enumerate(keys):
        in_request.append(held[key])
        by_caller[key.caller].append(index)
        held[key] += 1
    in_caller = [0] * len(keys)
    for rows in by_caller.values():
        for rank, index in enumerate(sorted(rows, key=in_request.__getitem__)):  # stable: of equal ones the older is first
            in_caller[index] = rank
    return [Rank(*pair) for pair in zip(in_caller, in_request, strict=True)]


def displaced(key: TurnKey, rows: Sequence[RunningRow]) -> list[int]:
    """The rows that may be preempted for one more row of `key`, in the order in which they are. `rows`: oldest first."""
    callers, requests = Counter(row.key.caller for row in rows), Counter(row.key for row in rows)
    found: list[tuple[bool, int, int, int]] = []
    for index, (row, rank) in enumerate(zip(rows, ranks([row.key for row in rows]), strict=True)):
        if row.key == key:
            continue
        same_caller = row.key.caller == key.caller
        theirs, ours = (rank.in_request, requests[key]) if same_caller else (rank.in_caller, callers[key.caller])
        if theirs > ours or (theirs == ours and row.overtime >= 0):
            found.append((same_caller, -theirs, -row.overtime if theirs == ours else 0, -index))
    return [-index for *_, index in sorted(found)]


def newest_of_most(keys: Sequence[TurnKey], candidates: Sequence[int]) -> int:
    """Which of the candidates (indices of `keys`) is preempted first when pages are short: the newest row of the caller that
    holds most. The oldest row of all is preempted last, so it always advances."""
    found = ranks(keys)
    return max(candidates, key=lambda index: (found[index].in_caller, index))


class PromptTurns:
    """In which order prompts get tokens of a step: first those of the caller that has received fewest tokens, then of its request
    that has, then the oldest row. Owner: the scheduler.

    A caller or request without a prompt in progress is forgotten. When it returns it counts as much as the one that has received
    fewest: neither ahead for the time it was away, nor behind those that come after it.
    """

    def __init__(self) -> None:
        self._received: dict[str | TurnKey, int] = {}  # by caller and by request

    def order(self, keys: Sequence[TurnKey]) -> list[int]:
        """Indices of the rows with these keys, oldest first."""
        levels: tuple[Sequence[str | TurnKey], ...] = ([key.caller for key in keys], keys)
        known = self._received
        self._received = {}
        for level in levels:
            least = min((known[entry] for entry in level if entry in known), default=0)
            self._received.update((entry, known.get(entry, least)) for entry in level)
        return sorted(range(len(keys)), key=lambda i: (self._received[keys[i].caller], self._received[keys[i]], i))

    def record(self, key: TurnKey, tokens: int) -> None:
        if key in self._received:
            self._received[key.caller] += tokens
            self._received[key] += tokens
