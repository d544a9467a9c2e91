"""What a window still sees, and how many pages that takes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from onedraw.backends.base import PageGroup
from onedraw.memory.pages import first_needed, longest_context, longest_row, most_pages, pages_for


def seen_by(position: int, window: int | None) -> set[int]:
    return {j for j in range(position + 1) if window is None or position - window < j}


windows = st.none() | st.integers(1, 20)


@given(length=st.integers(0, 60), window=windows)
def test_nothing_before_it_is_seen_by_any_later_position(length: int, window: int | None) -> None:
    first = first_needed(length, window)
    later = set.union(*(seen_by(position, window) for position in range(length, length + 5)))
    assert all(position >= first for position in later)
    assert first == length or first in later


@given(length=st.integers(1, 60), window=windows, step=st.integers(1, 20), size=st.integers(1, 9))
def test_rows_of_a_step_never_hold_more_pages_than_that(length: int, window: int | None, step: int, size: int) -> None:
    most = most_pages(length, window=window, step=step, page_size=size)
    for start in range(length):
        stop = min(start + step, length)
        assert pages_for(stop, size) - first_needed(start, window) // size <= most


@given(pages=st.integers(1, 30), window=windows, size=st.integers(1, 9), chunk=st.integers(1, 8), context=st.integers(1, 120))
def test_a_lone_sequence_of_the_longest_context_can_always_be_covered(
    pages: int, window: int | None, size: int, chunk: int, context: int
) -> None:
    groups = [PageGroup(pages, window)]
    length = longest_context(groups, page_size=size, max_context=context, chunk=chunk)
    step = longest_row(groups, page_size=size, max_context=context, chunk=chunk)
    assert step >= chunk
    for start in range(0, length, 1):
        stop = min(start + step, length)
        assert pages_for(stop, size) - first_needed(start, window) // size <= pages


def test_a_window_makes_the_context_independent_of_the_pages() -> None:
    assert longest_context([PageGroup(8, None)], page_size=4, max_context=100, chunk=1) == 32
    assert longest_context([PageGroup(8, 12)], page_size=4, max_context=100, chunk=1) == 100
    assert longest_context([PageGroup(8, 32)], page_size=4, max_context=100, chunk=1) == 32
    assert longest_row([PageGroup(8, 12)], page_size=4, max_context=100, chunk=1) == 18
