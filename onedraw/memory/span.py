"""Which pages a length of positions needs, group by group. Pure arithmetic.

In: lengths, windows, page sizes. Out: positions and numbers of pages. A window of None sees everything; with a window w
position i sees positions j with i - w < j <= i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


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
