"""KV cache pages: how many of them a sequence needs, and a pool that counts the holders of each page.

Only page numbers are handled here; the backend owns their content. Each layer group (layers with the same attention window) has a
pool of its own. A page is in exactly one of three states: free, held (by one or more leases), or idle (without a holder, but the
prefix cache still refers to its content).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias

NO_PAGE = -1  # stands for a page that a sliding window has moved beyond, or that the prefix cache does not have
Pages: TypeAlias = "array[int]"  # An array rather than a list, because page tables copy thousands of numbers in each step.


def page_array(numbers: Iterable[int]) -> Pages:
    return array("q", numbers)


class GroupSizes(Protocol):
    """The number of pages of one layer group, and its attention window in positions (None: full attention)."""

    @property
    def pages(self) -> int: ...

    @property
    def window(self) -> int | None: ...


def pages_for(length: int, page_size: int) -> int:
    return -(-length // page_size)


def first_visible(length: int, window: int | None) -> int:
    """Return the first position to which position `length` or any later one attends."""
    return 0 if window is None or length < window else length - window + 1


def most_pages(length: int, *, window: int | None, step: int, page_size: int) -> int:
    """Return the most pages held at once while computing up to `length` in rows of at most `step` positions."""
    whole = pages_for(length, page_size)
    return whole if window is None else min(whole, pages_for(window + step - 2, page_size) + 1)


def longest_row(groups: Sequence[GroupSizes], *, page_size: int, max_context: int, chunk: int) -> int:
    """Return the most tokens that a row may have, so that a sequence that runs alone always gets the pages of that row and of its
    sliding windows."""
    longest = max_context
    for group in groups:
        if group.window is not None and group.pages * page_size < max_context:
            longest = min(longest, (group.pages - 1) * page_size - group.window + 2)
    return max(longest, chunk)


def longest_context(groups: Sequence[GroupSizes], *, page_size: int, max_context: int, chunk: int) -> int:
    """Return the longest context for which a sequence that runs alone gets pages."""
    longest = max_context
    for group in groups:
        if most_pages(max_context, window=group.window, step=chunk, page_size=page_size) > group.pages:
            longest = min(longest, group.pages * page_size)
    return longest


class PagePool:
    """The pages of one layer group. The allocator owns it."""

    def __init__(self, count: int, *, window: int | None = None, on_evict: Callable[[int], None]) -> None:
        self.count = count
        self.window = window
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count
        self._idle: OrderedDict[int, None] = OrderedDict()  # the page that has been idle for longest comes first
        self._on_evict = on_evict  # called with an idle page that is taken for new content

    @property
    def available(self) -> int:
        """The number of pages that can be taken now: free ones and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        return self.count - self.available

    def holders(self, page: int) -> int:
        return self._holders[page]

    def idle(self, page: int) -> bool:
        """Whether the page is idle, so that retaining it leaves one page fewer available."""
        return page in self._idle

    def take(self) -> int:
        """Return a page for new content. One must be available. If none is free, the page that has been idle for longest is
        evicted from the prefix cache."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            self._on_evict(page)
        self._holders[page] = 1
        return page

    def retain(self, page: int) -> None:
        """Add a holder to a page. Only pages with final content may have several."""
        if self._holders[page] == 0:
            del self._idle[page]
        self._holders[page] += 1

    def release(self, page: int, *, cached: bool) -> None:
        """Remove a holder of a page. A page without holders becomes idle if the prefix cache refers to it, else free."""
        self._holders[page] -= 1
        if self._holders[page] < 0:
            raise AssertionError(f"page {page} released more often than held")
        if self._holders[page] == 0:
            if cached:
                self._idle[page] = None
            else:
                self._free.append(page)

    def uncache(self, page: int) -> None:
        """Note that the prefix cache no longer refers to the page, which becomes free if it has no holder."""
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def audit(self, held: Mapping[int, int], cached: Collection[int]) -> None:
        """Raise if the counts disagree with the pages that leases hold or to which the prefix cache refers."""
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
