"""Fair shares: in which order waiting requests are admitted, and which running sequences are preempted for them.

These are pure functions from numbers to an order, on which the scheduler acts.

    lane     the place of a running sequence; at most `--max-batch` sequences run at once
    row      here: a running sequence, which holds a lane and computes one row in each step
    caller   who sends requests: an API key, else a client address
    request  one call with all its choices (the n replies that it asks for), which may be several rows
    turn     the number of tokens that a row samples before another of equal rank may take its lane

Requests in the background, such as the lines of a batch, come after all others, the interactive ones: they get the lanes and
prompt tokens that are left, and their rows are preempted first. The rules below hold within each kind (background, interactive).

Callers share the lanes evenly, and so do the requests of one caller. The rank of a row is the number of rows that its caller
holds before it, counted round robin over the caller's requests. A waiting request displaces (preempts) a row of higher rank than
its own row would get, and a row of equal rank after that row's turn. So rows are displaced only in favour of a caller or request
that holds less, never back and forth, and every row samples a whole turn before another of equal rank takes its place.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

TURN_TOKENS = 64  # the shortest turn, in sampled tokens
RESUME_SHARE = 8  # A preempted row computes all its tokens again, so its turn samples at least 1 token for every 8 of them.
PATIENCE = 8  # Smaller requests pass a request that waits for KV pages at most this many times; then all others wait for it.
TRIES = 4  # In one step the scheduler tries to admit at most this many of the waiting requests.


class TurnKey(NamedTuple):
    """The caller and the request that a row belongs to."""

    caller: str
    request: str
    background: bool = False

    @property
    def share(self) -> tuple[bool, str]:
        """The caller to whose share of lanes and prompt tokens the row counts. A caller's background requests have a separate
        share."""
        return self.background, self.caller


class RunningRow(NamedTuple):
    key: TurnKey
    overtime: int  # tokens sampled since its turn ended; negative while the turn lasts


class Rank(NamedTuple):
    in_caller: int
    in_request: int


def turn_length(known: int, least: int) -> int:
    """Return how many tokens a row samples in a turn, at least `least`. `known` is the number of tokens that it has to compute
    again if it is preempted."""
    return max(least, known // RESUME_SHARE)


def ranks(keys: Sequence[TurnKey]) -> list[Rank]:
    """Return the rank of every row among the rows of its caller and among those of its request. `keys` has the oldest row
    first."""
    held: Counter[TurnKey] = Counter()
    in_request, by_caller = [], defaultdict(list)
    for index, key in enumerate(keys):
        in_request.append(held[key])
        by_caller[key.share].append(index)
        held[key] += 1
    in_caller = [0] * len(keys)
    for rows in by_caller.values():
        # `sorted` is stable, so among rows with equal keys the older comes first.
        for rank, index in enumerate(sorted(rows, key=in_request.__getitem__)):
            in_caller[index] = rank
    return [Rank(*pair) for pair in zip(in_caller, in_request, strict=True)]


def displaced(key: TurnKey, rows: Sequence[RunningRow]) -> list[int]:
    """Return the indices of the rows that may be preempted so that `key` gets one more row, in the order in which to preempt
    them: background rows before interactive ones. `rows` has the oldest first."""
    callers, requests = Counter(row.key.share for row in rows), Counter(row.key for row in rows)
    found: list[tuple[bool, bool, int, int, int]] = []
    for index, (row, rank) in enumerate(zip(rows, ranks([row.key for row in rows]), strict=True)):
        if row.key.background != key.background:
            if row.key.background:
                found.append((False, False, -rank.in_caller, 0, -index))
            continue
        if row.key == key:
            continue
        same_caller = row.key.caller == key.caller
        theirs, ours = (rank.in_request, requests[key]) if same_caller else (rank.in_caller, callers[key.share])
        if theirs > ours or (theirs == ours and row.overtime >= 0):
            found.append((True, same_caller, -theirs, -row.overtime if theirs == ours else 0, -index))
    return [-index for *_, index in sorted(found)]


def newest_of_most(keys: Sequence[TurnKey], candidates: Sequence[int]) -> int:
    """Return which of the candidates (indices of `keys`) to preempt first when KV pages are short: a background row before any
    other, then the newest row of the caller that holds most. The oldest interactive row is preempted last (the oldest of all if
    every row is a background row), so it always advances."""
    found = ranks(keys)
    return max(candidates, key=lambda index: (keys[index].background, found[index].in_caller, index))


class PromptTurns:
    """Decides which prompts are computed first when a step has too few tokens for all of them.

    Interactive prompts go before background ones. Of each kind, the caller goes first whose prompts have received the fewest
    tokens so far; of its requests, the one that has received the fewest; then the oldest row. A caller or request without a
    prompt in progress is forgotten. When it returns, it starts with the smallest count of those present, so it neither gains nor
    loses by the time in which it had no prompt. The scheduler owns this object.
    """

    def __init__(self) -> None:
        # Prompt tokens received by each caller, and by each of its requests.
        self._received: dict[tuple[bool, str] | TurnKey, int] = {}

    def order(self, keys: Sequence[TurnKey]) -> list[int]:
        """Return the indices of `keys` in the order in which their rows get tokens. `keys` has the oldest row first."""
        levels: tuple[Sequence[tuple[bool, str] | TurnKey], ...] = ([key.share for key in keys], keys)
        known = self._received
        self._received = {}
        for level in levels:
            least = min((known[entry] for entry in level if entry in known), default=0)
            self._received.update((entry, known.get(entry, least)) for entry in level)
        return sorted(
            range(len(keys)), key=lambda i: (keys[i].background, self._received[keys[i].share], self._received[keys[i]], i)
        )

    def record(self, key: TurnKey, tokens: int) -> None:
        if key in self._received:
            self._received[key.share] += tokens
            self._received[key] += tokens
