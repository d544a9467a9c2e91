"""Pages and lanes: lent, shared, given back, never lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onedraw.backends.base import Capacity, PageGroup
from onedraw.memory.allocator import Allocator, Lease
from onedraw.memory.pages import NO_PAGE
from onedraw.types import CheckpointSave, History


def history(*tokens: int) -> History:
    return History(tuple(tokens))


def make(
    pages: int | tuple[int, ...] = 8,
    lanes: int = 3,
    *,
    windows: tuple[int | None, ...] = (None,),
    checkpoints: int = 0,
    chunk: int = 1,
    recurrent: bool = False,
) -> Allocator:
    counts = (pages,) * len(windows) if isinstance(pages, int) else pages
    capacity = Capacity(
        vocab=100,
        max_context=100,
        lanes=lanes,
        groups=tuple(PageGroup(count, window) for count, window in zip(counts, windows, strict=True)),
        page_size=2,
        checkpoints=checkpoints,
        chunk=chunk,
        recurrent=recurrent,
    )
    return Allocator(capacity, reuse=True)


def lend(allocator: Allocator, known: History, *, settle: int = 0) -> Lease:
    lease = allocator.lend(known, reuse=True)
    assert lease is not None
    if settle:
        assert lease.cover(settle)
        lease.settle(settle, known)
    return lease


def test_a_second_request_shares_the_full_pages_of_the_first() -> None:
    allocator = make()
    known = history(1, 2, 3, 4, 5)
    first = lend(allocator, known, settle=5)
    second = lend(allocator, known)
    assert second.cached == 4
    assert second.pages[0] == first.pages[0][:2]
    first.release()
    second.release()
    allocator.audit_all()


def test_at_least_one_known_token_is_left_to_compute() -> None:
    allocator = make()
    known = history(1, 2, 3, 4)
    lend(allocator, known, settle=4).release()
    assert lend(allocator, known).cached == 2


def test_a_prefix_outlives_its_sequence_until_the_pages_are_needed() -> None:
    allocator = make(pages=4)
    lend(allocator, history(1, 2, 3, 4, 5), settle=5).release()
    assert lend(allocator, history(1, 2, 3, 4, 9)).cached == 4
    allocator.leases[next(iter(allocator.leases))].release()
    other = lend(allocator, history(9, 9, 9, 9, 9, 9, 9), settle=7)
    other.release()
    again = lend(allocator, history(1, 2, 3, 4, 9))
    assert again.cached == 0
    again.release()
    allocator.audit_all()


def test_the_end_of_a_chain_is_forgotten_before_its_beginning() -> None:
    allocator = make(pages=4)
    lend(allocator, history(1, 2, 3, 4, 5, 6, 7), settle=7).release()  # three full pages idle, one free
    taken = lend(allocator, history(8, 8, 8), settle=3)  # takes the free page and the oldest idle one
    taken.release()
    assert lend(allocator, history(1, 2, 3, 4, 5, 6, 7)).cached == 4


def test_no_lease_without_pages_for_the_known_tokens_and_the_next() -> None:
    allocator = make(pages=2)
    assert allocator.lend(history(1, 2, 3, 4), reuse=True) is None
    assert allocator.lend(history(1, 2, 3, 4, 5), reuse=True, more=0) is None
    scored = allocator.lend(history(1, 2, 3, 4), reuse=True, more=0)  # nothing follows it
    assert scored is not None
    scored.release()
    assert allocator.lend(history(1, 2, 3), reuse=True) is not None
    allocator.audit_all()


def test_no_lease_without_a_lane() -> None:
    allocator = make(lanes=1)
    assert allocator.lend(history(1), reuse=True) is not None
    assert allocator.lend(history(2), reuse=True) is None
    allocator.audit_all()


def test_settling_gives_back_the_pages_of_rejected_drafts() -> None:
    allocator = make()
    known = history(1, 2, 3)
    lease = lend(allocator, known)
    assert lease.cover(9)
    assert len(lease.pages[0]) == 5
    lease.settle(3, known)
    assert len(lease.pages[0]) == 2
    allocator.audit_all()


def test_covering_takes_nothing_where_it_cannot_take_all() -> None:
    allocator = make(pages=4)
    lease = lend(allocator, history(1))
    assert not lease.cover(9)
    assert [len(pages) for pages in lease.pages] == [0]


def test_a_page_dropped_twice_is_noticed() -> None:
    allocator = make()
    lease = lend(allocator, history(1), settle=1)
    page = lease.pages[0][0]
    allocator.pools[0].drop(page, indexed=False)
    with pytest.raises(AssertionError):
        allocator.audit()


def test_a_slot_that_nobody_gives_back_is_noticed() -> None:
    allocator = make(checkpoints=2)
    assert allocator.slots.take() is not None
    with pytest.raises(AssertionError, match="slot is lost"):
        allocator.audit_all()


def test_a_checkpoint_that_stays_pinned_is_noticed() -> None:
    allocator = make(checkpoints=2)
    known = history(1, 2, 3)
    run(lend(allocator, known), known)
    allocator.slots.pin(0)
    with pytest.raises(AssertionError, match="to be restored"):
        allocator.audit_all()


def test_a_node_that_nobody_needs_is_noticed() -> None:
    allocator = make()
    allocator.index.below(allocator.index.root, (1, 2))
    with pytest.raises(AssertionError, match="a node nobody needs"):
        allocator.audit_all()


def run(lease: Lease, known: History, *, start: int = 0) -> tuple[CheckpointSave, ...]:
    """One row to the end of the known tokens."""
    assert lease.cover(len(known))
    saves = lease.saves(start=start, stop=len(known), samples=True)
    lease.settle(len(known), known)
    return saves


def test_a_window_lets_go_of_a_page_as_soon_as_nobody_sees_it_and_no_sooner() -> None:
    allocator = make(windows=(None, 3))
    known = history(*range(9))
    lease = lend(allocator, known)
    for length in range(1, 10):
        assert lease.cover(length)
        lease.settle(length, known)
        for number, page in enumerate(lease.pages[1]):
            seen = (number + 1) * 2 > length - 3 + 1  # the next position sees length - 2 and length - 1, and itself
            assert (page != NO_PAGE) == seen
        assert NO_PAGE not in lease.pages[0]
        allocator.audit_all()
    assert allocator.let_go == 3


def go(allocator: Allocator, *tokens: int) -> int:
    """A sequence that runs token by token and ends; returns how much of it was there already."""
    known = History(tokens)
    lease = allocator.lend(known, reuse=True, step=1)
    assert lease is not None
    for length in range(lease.cached + 1, len(tokens) + 1):
        assert lease.cover(length)
        lease.settle(length, known)
    lease.release()
    allocator.audit_all()
    return lease.cached


def test_a_hit_needs_the_last_window_of_a_sliding_group() -> None:
    allocator = make(pages=(12, 5), windows=(None, 4))
    go(allocator, *range(9))
    warm = allocator.lend(history(*range(8), 99), reuse=True, step=1)
    assert warm is not None
    assert warm.cached == 8
    assert list(warm.pages[1][:2]) == [NO_PAGE, NO_PAGE]  # positions 0 to 3 are out of sight
    assert NO_PAGE not in warm.pages[1][2:]
    warm.release()
    go(allocator, *range(50, 61))  # the sliding group's pages get other content
    assert go(allocator, *range(8), 99) == 0


def test_a_page_that_is_back_makes_the_prefix_whole_again() -> None:
    """Content that was lost in the middle is computed again by somebody; what lay behind it is of use again."""
    allocator = make(pages=(3, 12), windows=(None, 2))
    go(allocator, *range(5))  # two pages are known
    go(allocator, 60, 61, 62)  # takes the end of them, then their beginning goes too
    go(allocator, 70, 71, 72, 73, 74)
    assert go(allocator, *range(4), 99) == 0
    assert go(allocator, *range(4), 98) == 4


def test_exactly_this_prompt_again_has_nothing_to_compute_and_a_page_of_its_own() -> None:
    allocator = make(checkpoints=2)
    known = history(1, 2, 3)
    first = lend(allocator, known)
    (save,) = run(first, known)
    assert save.position == 3
    second = lend(allocator, known)
    assert second.cached == 3
    assert second.opening is not None
    assert second.opening.slot == save.slot
    (copy,) = second.opening.copies
    assert (copy.group, copy.source) == (0, first.pages[0][1])
    assert copy.target == second.pages[0][1] != first.pages[0][1]
    first.release()
    allocator.audit_all()  # the source is held for the second
    second.settle(3, known)
    assert second.opening is None
    second.release()
    allocator.audit_all()
    assert allocator.pages_held == 0


def test_a_prompt_that_ends_with_a_page_needs_no_copy() -> None:
    allocator = make(checkpoints=2)
    known = history(1, 2, 3, 4)
    first = lend(allocator, known)
    run(first, known)
    second = lend(allocator, known)
    assert (second.cached, second.opening and second.opening.copies) == (4, ())
    assert second.pages[0] == first.pages[0]


def test_a_copy_that_is_one_page_too_many_is_done_without() -> None:
    """Else a request that just fits would wait for ever for the page its own checkpoint holds."""
    allocator = make(pages=2, checkpoints=1)
    known = history(1, 2, 3)
    first = lend(allocator, known)
    run(first, known)
    first.release()
    again = lend(allocator, known)
    assert (again.cached, again.opening) == (2, None)
    assert again.cover(4)
    allocator.audit_all()
    assert allocator.slots.kept == 0  # its page was the one to take
    again.release()
    allocator.audit_all()


def test_a_checkpoint_goes_with_its_page_and_a_page_with_its_checkpoint() -> None:
    allocator = make(pages=4, checkpoints=1)
    known = history(1, 2, 3)
    lease = lend(allocator, known)
    run(lease, known)
    lease.release()
    assert (len(allocator.index), allocator.slots.kept, allocator.pools[0].available) == (1, 1, 4)
    other = history(7)
    lease = lend(allocator, other)
    run(lease, other)  # takes the only slot
    assert (allocator.slots.evictions, allocator.slots.kept) == (1, 1)
    lease.release()
    allocator.audit_all()
    assert lend(allocator, known).cached == 2


def test_several_who_come_with_one_prompt_fill_one_slot() -> None:
    allocator = make(pages=20, checkpoints=4)
    known = history(1, 2, 3)
    leases = [lend(allocator, known) for _ in range(3)]
    planned = [lease.saves(start=0, stop=3, samples=True) for lease in leases if lease.cover(3)]
    assert [len(saves) for saves in planned] == [1, 0, 0]
    leases[0].release()  # its turn failed
    allocator.audit_all()
    assert allocator.slots.kept == 0
    leases[1].settle(3, known)
    allocator.audit_all()


def test_a_recurrent_prefix_is_resumed_on_a_chunk_boundary_that_was_saved() -> None:
    allocator = make(pages=40, lanes=4, checkpoints=8, chunk=4, recurrent=True)
    prompt = tuple(range(10))
    known = History(prompt)
    first = lend(allocator, known)
    assert [s.position for s in run(first, known)] == [8, 10]
    known.output += [11, 12, 13, 14]
    assert first.cover(14)
    first.settle(14, known)
    assert len(allocator.index) == 5  # pages of the answer are nobody's prefix
    turn = lend(allocator, History((*prompt, 11, 12, 13, 14, 20)))
    assert turn.cached == 8
    again = lend(allocator, History(prompt))
    assert again.cached == 10
    preempted = lend(allocator, known)
    assert preempted.cached == 10
    allocator.audit_all()


def test_who_leaves_a_known_prefix_saves_the_boundary_before() -> None:
    allocator = make(pages=60, checkpoints=8, chunk=4, recurrent=True)
    stem = tuple(range(9))
    for last, expected in ((30, 0), (31, 0), (32, 8)):
        known = History((*stem, last, last, last, last, last))
        lease = lend(allocator, known)
        assert lease.cached == expected
        run(lease, known, start=lease.cached)
        lease.release()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**30)), max_size=40))
def test_no_order_of_events_loses_a_page(events: list[tuple[int, int]]) -> None:
    allocator = make(pages=7, lanes=3)
    held: list[tuple[Lease, History]] = []
    for kind, number in events:
        tokens = tuple((number >> (2 * i)) & 1 for i in range(1 + number % 9))
        match kind:
            case 0:
                known = History(tokens)
                lease = allocator.lend(known, reuse=bool(number & 1))
                if lease is not None:
                    held.append((lease, known))
            case 1 if held:
                lease, known = held[number % len(held)]
                length = len(known)
                if lease.cover(length + number % 4):
                    lease.settle(length, known)
            case 2 if held:
                held.pop(number % len(held))[0].release()
            case 3 if held:
                lease, known = held[number % len(held)]
                known.output.append(number % 2)
        allocator.audit_all()
    for lease, _ in held:
        lease.release()
    allocator.audit_all()
    assert allocator.pages_held == 0
