"""Page arithmetic: which positions a window attends to, and how many pages they take."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from onedraw.backends.base import PageGroup
from onedraw.memory.pages import first_visible, longest_context, longest_row, most_pages, pages_for


def attended_by(position: int, window: int | None) -> set[int]:
    return {j for j in range(position + 1) if window is None or position - window < j}


windows = st.none() | st.integers(1, 20)


@given(length=st.integers(0, 60), window=windows)
def test_no_later_position_attends_to_one_before_first_visible(length: int, window: int | None) -> None:
    first = first_visible(length, window)
    later = set.union(*(attended_by(position, window) for position in range(length, length + 5)))
    assert all(position >= first for position in later)
    assert first == length or first in later


@given(length=st.integers(1, 60), window=windows, step=st.integers(1, 20), size=st.integers(1, 9))
def test_rows_never_hold_more_than_most_pages(length: int, window: int | None, step: int, size: int) -> None:
    most = most_pages(length, window=window, step=step, page_size=size)
    for start in range(length):
        stop = min(start + step, length)
        assert pages_for(stop, size) - first_visible(start, window) // size <= most


@given(pages=st.integers(1, 30), window=windows, size=st.integers(1, 9), chunk=st.integers(1, 8), context=st.integers(1, 120))
def test_a_sequence_running_alone_always_gets_pages_for_the_longest_context(
    pages: int, window: int | None, size: int, chunk: int, context: int
) -> None:
    groups = [PageGroup(pages, window)]
    length = longest_context(groups, page_size=size, max_context=context, chunk=chunk)
    step = longest_row(groups, page_size=size, max_context=context, chunk=chunk)
    assert step >= chunk
    for start in range(0, length, 1):
        stop = min(start + step, length)
        assert pages_for(stop, size) - first_visible(start, window) // size <= pages


def test_a_small_window_makes_the_context_independent_of_the_page_count() -> None:
    assert longest_context([PageGroup(8, None)], page_size=4, max_context=100, chunk=1) == 32
    assert longest_context([PageGroup(8, 12)], page_size=4, max_context=100, chunk=1) == 100
    assert longest_context([PageGroup(8, 32)], page_size=4, max_context=100, chunk=1) == 32
    assert longest_row([PageGroup(8, 12)], page_size=4, max_context=100, chunk=1) == 18
