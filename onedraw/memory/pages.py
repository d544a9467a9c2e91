"""KV cache pages: how many a sequence needs, and a pool that counts the holders of each page.

In: retain and release calls. Out: page numbers. Only integers: page content belongs to the backend. Each layer group has
its own pool. A page is in exactly one of three states: free, held (by one or more leases), or idle (no holder, but the
prefix cache still refers to its content).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias

NO_PAGE = -1  # a page that the sliding window has passed, or that the prefix cache does not have
Pages: TypeAlias = "array[int]"  # an array, because a step's page table takes thousands of numbers at once


def page_array(numbers: Iterable[int]) -> Pages:
    return array("q", numbers)


class GroupSizes(Protocol):
    """Pages of one layer group, and its attention window."""

    @property
    def pages(self) -> int: ...

    @property
    def window(self) -> int | None: ...


def pages_for(length: int, page_size: int) -> int:
    return -(-length // page_size)


def first_visible(length: int, window: int | None) -> int:
    """The first position that position `length` or any later one attends to."""
    return 0 if window is None or length < window else length - window + 1


def most_pages(length: int, *, window: int | None, step: int, page_size: int) -> int:
    """The most pages held at once while computing up to `length` in rows of at most `step` positions, for any page offset."""
    whole = pages_for(length, page_size)
    return whole if window is None else min(whole, pages_for(window + step - 2, page_size) + 1)


def longest_row(groups: Sequence[GroupSizes], *, page_size: int, max_context: int, chunk: int) -> int:
    """The longest row that a sequence running alone can always get pages for, beside the pages of its sliding windows."""
    longest = max_context
    for group in groups:
        if group.window is not None and group.pages * page_size < max_context:
            longest = min(longest, (group.pages - 1) * page_size - group.window + 2)
    return max(longest, chunk)


def longest_context(groups: Sequence[GroupSizes], *, page_size: int, max_context: int, chunk: int) -> int:
    """The longest context that a sequence running alone can get pages for."""
    longest = max_context
    for group in groups:
        if most_pages(max_context, window=group.window, step=chunk, page_size=page_size) > group.pages:
            longest = min(longest, group.pages * page_size)
    return longest


class PagePool:
    """The pages of one layer group. Owner: the allocator."""

    def __init__(self, count: int, *, window: int | None = None, on_evict: Callable[[int], None]) -> None:
        self.count = count
        self.window = window
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count
        self._idle: OrderedDict[int, None] = OrderedDict()  # longest idle first
        self._on_evict = on_evict  # called when an idle page is taken for new content

    @property
    def available(self) -> int:
        """Pages that can be taken now: free ones and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        return self.count - self.available

    def idle(self, page: int) -> bool:
        """Whether retaining this page makes one page fewer available."""
        return page in self._idle

    def take(self) -> int:
        """A page for new content. The caller has checked that one is available. With no free page, evict the longest idle one."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            self._on_evict(page)
        self._holders[page] = 1
        return page

    def retain(self, page: int) -> None:
        """Add a holder to a page whose content is final."""
        if self._holders[page] == 0:
            del self._idle[page]
        self._holders[page] += 1

    def release(self, page: int, *, cached: bool) -> None:
        """Remove a holder. Without holders the page becomes idle if the prefix cache refers to it, else free."""
        self._holders[page] -= 1
        if self._holders[page] < 0:
            raise AssertionError(f"page {page} released more often than held")
        if self._holders[page] == 0:
            if cached:
                self._idle[page] = None
            else:
                self._free.append(page)

    def uncache(self, page: int) -> None:
        """The prefix cache no longer refers to the page: free it if it has no holder."""
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def audit(self, held: Mapping[int, int], cached: Collection[int]) -> None:
        """Raise if the counts disagree with the pages that leases hold or that the prefix cache refers to."""
        for page in range(self.count):
            if self._holders[page] != held.get(page, 0):
                raise AssertionError(f"page {page}: {self._holders[page]} holders counted, {held.get(page, 0)} leases hold it")
        unheld = set(self._free) | set(self._idle)
        if len(unheld) != len(self._free) + len(self._idle) or any(self._holders[p] for p in unheld):
            raise AssertionError("a page is both held and available, or available twice")
        if len(unheld) + sum(1 for n in self._holders if n) != self.count:
            raise AssertionError("a page is lost")
        if any(page not in cached for page in self._idle) or any(page in cached for page in self._free):
            raise AssertionError("a page is idle and not cached, or cached and free")
