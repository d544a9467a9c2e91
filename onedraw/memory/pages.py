"""Pages of keys and values, counted: who holds one, which are free, which only the prefix index remembers.

In: take, share, drop. Out: page numbers. Integers only; what lies in a page is the backend's business. Each layer group
has a pool of its own. A page is in exactly one of three states: free, held (by one or more leases), idle (no holder, but
indexed).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias

# -------------------- Which pages a length of positions needs, group by group. Pure arithmetic.


class GroupSizes(Protocol):
    """Pages of one layer group, and how far back its layers look."""

    @property
    def pages(self) -> int: ...

    @property
    def window(self) -> int | None: ...


def pages_for(length: int, page_size: int) -> int:
    return -(-length // page_size)


def first_needed(length: int, window: int | None) -> int:
    """The first position that position `length`, or any behind it, still sees."""
    return 0 if window is None or length < window else length - window + 1


def most_pages(length: int, *, window: int | None, step: int, page_size: int) -> int:
    """Pages held at most on the way to `length` by rows of up to `step` positions, wherever they begin in a page."""
    whole = pages_for(length, page_size)
    return whole if window is None else min(whole, pages_for(window + step - 2, page_size) + 1)


def longest_row(groups: Sequence[GroupSizes], *, page_size: int, max_context: int, chunk: int) -> int:
    """Positions of a row that can always be covered when a sequence is alone: what a group's window leaves of its pages."""
    longest = max_context
    for group in groups:
        if group.window is not None and group.pages * page_size < max_context:
            longest = min(longest, (group.pages - 1) * page_size - group.window + 2)
    return max(longest, chunk)


def longest_context(groups: Sequence[GroupSizes], *, page_size: int, max_context: int, chunk: int) -> int:
    """Positions one sequence can reach when it is alone; a longer one would wait for pages in vain."""
    longest = max_context
    for group in groups:
        if most_pages(max_context, window=group.window, step=chunk, page_size=page_size) > group.pages:
            longest = min(longest, group.pages * page_size)
    return longest


# -------------------- Pages of keys and values, counted: who holds one, which are free, which only the prefix in


NO_PAGE = -1  # where a window let go of a page, or the index has none
Pages: TypeAlias = "array[int]"  # page after page: a turn's table takes in thousands of them at once


def pages_of(numbers: Iterable[int]) -> Pages:
    return array("q", numbers)


class PagePool:
    """Owner: the allocator."""

    def __init__(self, count: int, *, window: int | None = None, forget: Callable[[int], None]) -> None:
        self.count = count
        self.window = window
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._forget = forget  # told when an idle page is taken for new content

    @property
    def available(self) -> int:
        """Pages that can be taken now: free ones, and idle ones whose content may go."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        return self.count - self.available

    def idle(self, page: int) -> bool:
        """Sharing this page makes one less available."""
        return page in self._idle

    def take(self) -> int:
        """A page for new content; the caller has made sure that one is available. The longest idle page goes first
        when no page is free."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
        self._holders[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more holder of a page whose content is final."""
        if self._holders[page] == 0:
            del self._idle[page]
        self._holders[page] += 1

    def drop(self, page: int, *, indexed: bool) -> None:
        """One holder less. The last one leaves the page idle if the index knows it, else free."""
        self._holders[page] -= 1
        if self._holders[page] < 0:
            raise AssertionError(f"page {page} dropped more often than held")
        if self._holders[page] == 0:
            if indexed:
                self._idle[page] = None
            else:
                self._free.append(page)

    def unindexed(self, page: int) -> None:
        """The index knows the page no more; if nobody holds it, it is free."""
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def audit(self, held: Mapping[int, int], indexed: Collection[int]) -> None:
        """Raise if the books disagree with what the leases say they hold and what the index says it knows."""
        for page in range(self.count):
            if self._holders[page] != held.get(page, 0):
                raise AssertionError(f"page {page}: {self._holders[page]} holders on the books, {held.get(page, 0)} leases")
        resting = set(self._free) | set(self._idle)
        if len(resting) != len(self._free) + len(self._idle) or any(self._holders[p] for p in resting):
            raise AssertionError("a page is both resting and held, or rests twice")
        if len(resting) + sum(1 for n in self._holders if n) != self.count:
            raise AssertionError("a page is lost")
        if any(page not in indexed for page in self._idle) or any(page in indexed for page in self._free):
            raise AssertionError("a page is idle and not indexed, or indexed and free")
