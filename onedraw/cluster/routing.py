"""Routing: choose for each request a replica that was sent a long prefix of its prompt before and is not much busier than the
others.

In: hashes of the prompt's pages, a bounded table of what each replica was sent, and how many requests each has. Out: a replica.
Routing decides where a prompt is already in a prefix cache, and never which tokens are sampled.

The hash of a page covers the whole prompt up to the page's end. So a few entries per prompt suffice to tell how much of it a
replica was sent, and the table covers the caches of many replicas. The work per request does not grow with the number of
replicas. docs/scale.md has measurements of memory and time."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

REQUEST_TOKENS = 256  # A request more than the mean of all replicas costs a replica as much as this many prompt tokens.
MAX_PAGES_HASHED = 2048  # most pages of a prompt that are hashed; a longer prompt is compared by these first ones
MAX_PAGES_SENT = 262_144  # entries of the table of all replicas together, which takes about 80 MB when it is full
MAX_PAGE_HOLDERS = 8  # most replicas that the table stores for one page, the latest ones

ReplicaT = TypeVar("ReplicaT", bound=Hashable)


def page_hashes(prompt: Sequence[int], page_size: int) -> tuple[bytes, ...]:
    """Return a hash for each full page of a prompt, which covers all tokens up to the page's end. A page that ends
    with the last token is left out: that token is computed in any case, for its logits, so such a page cannot be reused."""
    full = min((len(prompt) - 1) // page_size, MAX_PAGES_HASHED)
    hashes = []
    before = b""
    for page in range(full):
        tokens = array("I", prompt[page * page_size : (page + 1) * page_size])
        before = hashlib.blake2b(before + tokens.tobytes(), digest_size=8).digest()
        hashes.append(before)
    return tuple(hashes)


def is_noted(count: int) -> bool:
    """Whether the table has an entry for the first `count` pages of a prompt: for 1, 2, 3, 4, 6, 8, 12, 16, … pages. So the
    number of pages that two prompts share is known to within a third."""
    shift = max(count.bit_length() - 2, 0)
    return count >> shift << shift == count


class SentPages(Generic[ReplicaT]):
    """A table of the prompt pages that each replica was sent. When it is full, the pages that were sent longest ago are dropped.
    A replica that starts anew has an empty cache, so it must be added as another `ReplicaT`, or it would match pages that it no
    longer has. `ReplicaSet` (replica_set.py) owns the table."""

    def __init__(self, most: int = MAX_PAGES_SENT) -> None:
        self._most = most
        self._pages: OrderedDict[bytes, tuple[ReplicaT, ...]] = OrderedDict()  # page → its replicas, the latest last

    def __len__(self) -> int:
        return len(self._pages)

    def matches(self, pages: Sequence[bytes]) -> dict[ReplicaT, int]:
        """Return how many leading pages of a prompt each replica was sent, as far as that is noted: all pages of an earlier
        prompt that this one continues, else at least two thirds of those that they share. A replica without any is not in the
        result."""
        found: dict[ReplicaT, int] = {}
        for count in range(len(pages), 0, -1):
            for replica in self._pages.get(pages[count - 1], ()):
                found.setdefault(replica, count)
        return found

    def add(self, pages: Sequence[bytes], replica: ReplicaT) -> None:
        """Note that a replica was sent a prompt. The first pages of a prompt are forgotten last."""
        for count in range(len(pages), 0, -1):
            if count == len(pages) or is_noted(count):
                page = pages[count - 1]
                others = tuple(other for other in self._pages.get(page, ()) if other != replica)
                self._pages[page] = (*others, replica)[-MAX_PAGE_HOLDERS:]
                self._pages.move_to_end(page)
        while len(self._pages) > self._most:
            self._pages.popitem(last=False)


class Loads(Generic[ReplicaT]):
    """Counts the requests of each replica. Among replicas with equally many requests, the one whose number changed longest ago
    comes first, so that idle replicas get new prompts in turn, initially in the order in which they were added. The replica
    set owns it."""

    def __init__(self) -> None:
        self.total = 0
        self._loads: dict[ReplicaT, int] = {}
        self._by_load: dict[int, dict[ReplicaT, None]] = {}

    def __len__(self) -> int:
        return len(self._loads)

    def __iter__(self) -> Iterator[ReplicaT]:
        return iter(self._loads)

    def __contains__(self, replica: ReplicaT) -> bool:
        return replica in self._loads

    def __getitem__(self, replica: ReplicaT) -> int:
        return self._loads[replica]

    def add(self, replica: ReplicaT) -> None:
        self._loads[replica] = 0
        self._by_load.setdefault(0, {})[replica] = None

    def remove(self, replica: ReplicaT) -> None:
        load = self._loads.pop(replica)
        self.total -= load
        self._leave(replica, load)

    def change(self, replica: ReplicaT, by: int) -> None:
        before = self._loads[replica]
        self._leave(replica, before)
        self.total += by
        self._loads[replica] = before + by
        self._by_load.setdefault(before + by, {})[replica] = None

    def ascending(self) -> Iterator[ReplicaT]:
        """Iterate over the replicas, those with the fewest requests first."""
        for load in sorted(self._by_load):
            yield from self._by_load[load]

    def busiest(self) -> ReplicaT | None:
        """Return a replica with the most requests, or None if there is no replica."""
        return next(iter(self._by_load[max(self._by_load)])) if self._by_load else None

    def _leave(self, replica: ReplicaT, load: int) -> None:
        same = self._by_load[load]
        del same[replica]
        if not same:
            del self._by_load[load]


def choose_replica(
    matches: Mapping[ReplicaT, int],
    loads: Loads[ReplicaT],
    *,
    page_size: int,
    lanes: int,
    able: Callable[[ReplicaT], bool] = lambda replica: True,
) -> ReplicaT | None:
    """Return the replica that is to run a request. `matches`: leading pages of its prompt that a replica was sent; `lanes`:
    requests that run at once in a replica; `able`: whether a replica can take it now. None if no replica can.

    The cost of a replica is the prompt tokens that it would compute, and REQUEST_TOKENS for each request that it would have over
    the mean number per replica. The least cost wins; but where some replica has a free lane, a request does not wait for one
    elsewhere."""
    least = next(filter(able, loads.ascending()), None)
    if least is None:
        return None
    mean, all_wait = loads.total / len(loads), loads[least] >= lanes

    def cost(replica: ReplicaT) -> float:
        return REQUEST_TOKENS * max(loads[replica] + 1 - mean, 0.0) - matches.get(replica, 0) * page_size

    for replica in sorted((one for one in matches if one in loads and (all_wait or loads[one] < lanes)), key=cost):
        if cost(replica) <= cost(least) and able(replica):
            return replica
    return least
