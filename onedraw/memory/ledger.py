"""The ledger lends lanes and pages; a lease is what one sequence holds.

In: a sequence's tokens and lengths. Out: Lease, whose numbers go into rows. Everything a lease took it gives back in
`release`; `audit` proves it whenever the engine is idle.
"""

from __future__ import annotations

from dataclasses import dataclass

from onedraw.memory.pages import PagePool
from onedraw.memory.prefix import ROOT, PrefixIndex
from onedraw.memory.slots import Slots
from onedraw.types import History


class Ledger:
    """Owner: the scheduler, on the engine thread."""

    def __init__(self, *, pages: int, lanes: int, page_size: int, reuse: bool) -> None:
        self.page_size = page_size
        self.reuse = reuse  # prefixes may be shared
        self.index = PrefixIndex(page_size)
        self.pool = PagePool(pages, forget=self.index.forget)
        self.slots = Slots(lanes)
        self.leases: dict[int, Lease] = {}  # by lane
        self.queried = 0  # tokens looked up in the index
        self.hit = 0  # tokens found there

    def pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def lend(self, history: History, *, reuse: bool, more: int = 1) -> Lease | None:
        """A lease with the pages of the longest shared prefix, or None where lanes or pages do not suffice.

        At least one known token is left to compute, since its logits are needed. A lease is only lent if the known
        tokens and `more` fit now, so that admission does not drive out what runs. A prompt that is only scored has no
        next token, and must not wait for a page that may not be there.
        """
        known = len(history)
        tokens = tuple(history.slice(0, known - 1)) if reuse and self.reuse else ()
        shared = self.index.match(tokens)
        for node in shared:
            self.pool.share(node.page)
        pages = [node.page for node in shared]
        fits = self.slots.available and self.pages_for(known + more) - len(pages) <= self.pool.available
        lane = self.slots.take() if fits else None
        if lane is None:
            self._drop(pages)
            return None
        self.queried += len(tokens)
        self.hit += len(shared) * self.page_size
        chain = [ROOT, *(node.number for node in shared)]
        lease = Lease(ledger=self, lane=lane, pages=pages, chain=chain, cached=len(shared) * self.page_size)
        self.leases[lane] = lease
        return lease

    def give_back(self, lease: Lease) -> None:
        self._drop(lease.pages)
        self.slots.give_back(lease.lane)
        del self.leases[lease.lane]

    def _drop(self, pages: list[int]) -> None:
        for page in reversed(pages):  # from the end: see prefix.py
            self.pool.drop(page, indexed=self.index.knows(page))

    def audit(self) -> None:
        """Raise if a page or lane is lost, held twice over, or held by nobody."""
        held: dict[int, int] = {}
        for lease in self.leases.values():
            for page in lease.pages:
                held[page] = held.get(page, 0) + 1
        self.pool.audit(held)
        if self.slots.available + len(self.leases) != self.slots.count:
            raise AssertionError("a lane is lost")


@dataclass(slots=True, eq=False)
class Lease:
    """Lane and pages of one sequence. Owner: the sequence that was lent it."""

    ledger: Ledger
    lane: int
    pages: list[int]
    chain: list[int]  # numbers of the index nodes of the settled full pages, after the root
    cached: int  # positions that came from the index

    def cover(self, length: int) -> bool:
        """Hold pages for positions [0, length); False, with nothing taken, where the pool cannot."""
        missing = self.ledger.pages_for(length) - len(self.pages)
        if missing > self.ledger.pool.available:
            return False
        for _ in range(missing):
            page = self.ledger.pool.take()
            assert page is not None
            self.pages.append(page)
        return True

    def settle(self, length: int, history: History) -> None:
        """Positions [0, length) are final: give back the pages past them and let others share the full ones."""
        keep = self.ledger.pages_for(length)
        spare = self.pages[keep:]
        del self.pages[keep:]
        self.ledger._drop(spare)
        if not self.ledger.reuse:
            return
        size = self.ledger.page_size
        for number in range(len(self.chain) - 1, length // size):
            tokens = tuple(history.slice(number * size, (number + 1) * size))
            self.chain.append(self.ledger.index.add(before=self.chain[-1], tokens=tokens, page=self.pages[number]))

    def release(self) -> None:
        self.ledger.give_back(self)
