"""Which replica gets a request: the one that was sent the longest beginning of its prompt, unless it has too much to do.

In: hashes of the prompt's pages, a bounded table of the pages that each replica was sent, and how many requests each has. Out: a
replica. Routing decides where a prompt is already in a prefix cache, and never which tokens are sampled.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

OVERLOAD = 1.25  # A replica is overloaded if it has more requests than this times the mean, and more than FREE_REQUESTS.
FREE_REQUESTS = 4  # So few requests hardly slow each other down, and a mean of so few says little.
MAX_PAGES_HASHED = 2048  # most pages of a prompt that are hashed; a longer prompt is compared by these first ones
MAX_PAGES_SENT = 262_144  # entries of the table of all replicas together, which takes about 80 MB when it is full
MAX_PAGE_HOLDERS = 8  # most replicas that the table stores for one page, the latest ones; more would not make a better choice

ReplicaT = TypeVar("ReplicaT", bound=Hashable)


def page_hashes(prompt: Sequence[int], page_size: int) -> tuple[bytes, ...]:
    """Return a hash for each full page of a prompt, which covers all tokens up to the page's end. The last token is never part
    of a cached page that helps, since it must be computed for its logits."""
    full = min((len(prompt) - 1) // page_size, MAX_PAGES_HASHED)
    hashes = []
    before = b""
    for page in range(full):
        tokens = array("I", prompt[page * page_size : (page + 1) * page_size])
        before = hashlib.blake2b(before + tokens.tobytes(), digest_size=8).digest()
        hashes.append(before)
    return tuple(hashes)


class SentPages(Generic[ReplicaT]):
    """The pages that each replica was sent, as far as the table's size allows: the least recently sent are forgotten first. The
    replica set owns it."""

    def __init__(self, most: int = MAX_PAGES_SENT) -> None:
        self._most = most
        self._pages: OrderedDict[bytes, tuple[ReplicaT, ...]] = OrderedDict()  # page → its replicas, the latest last

    def __len__(self) -> int:
        return len(self._pages)

    def matches(self, pages: Sequence[bytes]) -> dict[ReplicaT, int]:
        """Return how many leading pages of a prompt each replica was sent. A replica that has none is missing."""
        found: dict[ReplicaT, int] = {}
        holding: tuple[ReplicaT, ...] | None = None
        for count, page in enumerate(pages, start=1):
            holders = self._pages.get(page, ())
            holding = holders if holding is None else tuple(replica for replica in holding if replica in holders)
            if not holding:
                break
            for replica in holding:
                found[replica] = count
        return found

    def add(self, pages: Sequence[bytes], replica: ReplicaT) -> None:
        """Note that a replica was sent a prompt. The first pages of a prompt are forgotten last."""
        for page in reversed(pages):
            others = tuple(other for other in self._pages.get(page, ()) if other != replica)
            self._pages[page] = (*others, replica)[-MAX_PAGE_HOLDERS:]
            self._pages.move_to_end(page)
        while len(self._pages) > self._most:
            self._pages.popitem(last=False)

    def forget(self, replica: ReplicaT) -> None:
        """Forget a replica that died, since its cache died with it."""
        for page, holders in list(self._pages.items()):
            if replica in holders:
                left = tuple(other for other in holders if other != replica)
                if left:
                    self._pages[page] = left
                else:
                    del self._pages[page]


def choose_replica(
    matches: Mapping[ReplicaT, int],
    loads: Mapping[ReplicaT, int],
    *,
    overload: float = OVERLOAD,
    free_requests: int = FREE_REQUESTS,
) -> ReplicaT:
    """Return the replica for a request. `matches`: leading pages of its prompt that a replica was sent; `loads`: requests that
    each replica has, in the order in which ties are broken.

    The longest match wins, unless its replica would have more than `free_requests` and more than `overload` times the mean.
    Without a match the least loaded replica wins.
    """
    if not loads:
        raise ValueError("there is no replica to choose from")
    most = max(overload * (sum(loads.values()) + 1) / len(loads), free_requests)
    able = [replica for replica, pages in matches.items() if pages and loads.get(replica, most) + 1 <= most]
    if able:
        return min(able, key=lambda replica: (-matches[replica], loads[replica]))
    return min(loads, key=lambda replica: loads[replica])
