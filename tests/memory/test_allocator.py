"""The allocator hands out, shares and takes back pages, lanes and checkpoint slots, and loses none of them."""

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


def leased(allocator: Allocator, known: History, *, commit: int = 0) -> Lease:
    lease = allocator.allocate(known, reuse=True)
    assert lease is not None
    if commit:
        assert lease.reserve(commit)
        lease.commit(commit, known)
    return lease


def test_a_second_request_shares_the_full_pages_of_the_first() -> None:
    allocator = make()
    known = history(1, 2, 3, 4, 5)
    first = leased(allocator, known, commit=5)
    second = leased(allocator, known)
    assert second.cached == 4
    assert second.pages[0] == first.pages[0][:2]
    first.release()
    second.release()
    allocator.audit_all()


def test_at_least_one_known_token_is_left_to_compute() -> None:
    allocator = make()
    known = history(1, 2, 3, 4)
    leased(allocator, known, commit=4).release()
    assert leased(allocator, known).cached == 2


def test_a_cached_prefix_outlives_its_sequence_until_its_pages_are_taken() -> None:
    allocator = make(pages=4)
    leased(allocator, history(1, 2, 3, 4, 5), commit=5).release()
    assert leased(allocator, history(1, 2, 3, 4, 9)).cached == 4
    allocator.leases[next(iter(allocator.leases))].release()
    other = leased(allocator, history(9, 9, 9, 9, 9, 9, 9), commit=7)
    other.release()
    again = leased(allocator, history(1, 2, 3, 4, 9))
    assert again.cached == 0
    again.release()
    allocator.audit_all()


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    allocator = make(pages=4)
    leased(allocator, history(1, 2, 3, 4, 5, 6, 7), commit=7).release()  # three full pages idle, one free
    taken = leased(allocator, history(8, 8, 8), commit=3)  # takes the free page and the oldest idle one
    taken.release()
    assert leased(allocator, history(1, 2, 3, 4, 5, 6, 7)).cached == 4


def test_no_lease_without_pages_for_the_known_tokens_and_the_next() -> None:
    allocator = make(pages=2)
    assert allocator.allocate(history(1, 2, 3, 4), reuse=True) is None
    assert allocator.allocate(history(1, 2, 3, 4, 5), reuse=True, more=0) is None
    scored = allocator.allocate(history(1, 2, 3, 4), reuse=True, more=0)  # nothing follows it
    assert scored is not None
    scored.release()
    assert allocator.allocate(history(1, 2, 3), reuse=True) is not None
    allocator.audit_all()


def test_no_lease_without_a_lane() -> None:
    allocator = make(lanes=1)
    assert allocator.allocate(history(1), reuse=True) is not None
    assert allocator.allocate(history(2), reuse=True) is None
    allocator.audit_all()


def test_commit_releases_the_pages_of_rejected_drafts() -> None:
    allocator = make()
    known = history(1, 2, 3)
    lease = leased(allocator, known)
    assert lease.reserve(9)
    assert len(lease.pages[0]) == 5
    lease.commit(3, known)
    assert len(lease.pages[0]) == 2
    allocator.audit_all()


def test_reserve_takes_no_page_if_it_cannot_take_all() -> None:
    allocator = make(pages=4)
    lease = leased(allocator, history(1))
    assert not lease.reserve(9)
    assert [len(pages) for pages in lease.pages] == [0]


def test_audit_finds_a_page_released_twice() -> None:
    allocator = make()
    lease = leased(allocator, history(1), commit=1)
    page = lease.pages[0][0]
    allocator.pools[0].release(page, cached=False)
    with pytest.raises(AssertionError):
        allocator.audit()


def test_audit_finds_a_slot_that_is_never_released() -> None:
    allocator = make(checkpoints=2)
    assert allocator.checkpoint_slots.take() is not None
    with pytest.raises(AssertionError, match="slot is lost"):
        allocator.audit_all()


def test_audit_finds_a_checkpoint_that_stays_pinned() -> None:
    allocator = make(checkpoints=2)
    known = history(1, 2, 3)
    run(leased(allocator, known), known)
    allocator.checkpoint_slots.pin(0)
    with pytest.raises(AssertionError, match="pinned checkpoints"):
        allocator.audit_all()


def test_audit_finds_an_unused_node() -> None:
    allocator = make()
    allocator.prefix_cache.child(allocator.prefix_cache.root, (1, 2))
    with pytest.raises(AssertionError, match="unused node"):
        allocator.audit_all()


def run(lease: Lease, known: History, *, start: int = 0) -> tuple[CheckpointSave, ...]:
    """One row to the end of the known tokens."""
    assert lease.reserve(len(known))
    saves = lease.plan_saves(start=start, stop=len(known), samples=True)
    lease.commit(len(known), known)
    return saves


def test_a_window_frees_a_page_exactly_when_no_later_position_attends_to_it() -> None:
    allocator = make(windows=(None, 3))
    known = history(*range(9))
    lease = leased(allocator, known)
    for length in range(1, 10):
        assert lease.reserve(length)
        lease.commit(length, known)
        for number, page in enumerate(lease.pages[1]):
            visible = (number + 1) * 2 > length - 3 + 1  # the next position attends to length - 2, length - 1 and itself
            assert (page != NO_PAGE) == visible
        assert NO_PAGE not in lease.pages[0]
        allocator.audit_all()
    assert allocator.window_pages_freed == 3


def run_to_end(allocator: Allocator, *tokens: int) -> int:
    """Run a sequence token by token and release it; returns how much of it was cached."""
    known = History(tokens)
    lease = allocator.allocate(known, reuse=True, step=1)
    assert lease is not None
    for length in range(lease.cached + 1, len(tokens) + 1):
        assert lease.reserve(length)
        lease.commit(length, known)
    lease.release()
    allocator.audit_all()
    return lease.cached


def test_a_hit_needs_the_last_window_of_a_sliding_group() -> None:
    allocator = make(pages=(12, 5), windows=(None, 4))
    run_to_end(allocator, *range(9))
    warm = allocator.allocate(history(*range(8), 99), reuse=True, step=1)
    assert warm is not None
    assert warm.cached == 8
    assert list(warm.pages[1][:2]) == [NO_PAGE, NO_PAGE]  # the window has passed positions 0 to 3
    assert NO_PAGE not in warm.pages[1][2:]
    warm.release()
    run_to_end(allocator, *range(50, 61))  # the sliding group's pages get other content
    assert run_to_end(allocator, *range(8), 99) == 0


def test_a_recomputed_page_makes_the_prefix_behind_it_usable_again() -> None:
    """A page in the middle of a cached prefix is evicted; once another request recomputes it, the pages behind it are used."""
    allocator = make(pages=(3, 12), windows=(None, 2))
    run_to_end(allocator, *range(5))  # two pages are cached
    run_to_end(allocator, 60, 61, 62)  # evicts the second of them, then the first
    run_to_end(allocator, 70, 71, 72, 73, 74)
    assert run_to_end(allocator, *range(4), 99) == 0
    assert run_to_end(allocator, *range(4), 98) == 4


def test_the_same_prompt_again_computes_nothing_and_copies_the_partly_filled_page() -> None:
    allocator = make(checkpoints=2)
    known = history(1, 2, 3)
    first = leased(allocator, known)
    (save,) = run(first, known)
    assert save.position == 3
    second = leased(allocator, known)
    assert second.cached == 3
    assert second.restore is not None
    assert second.restore.slot == save.slot
    (copy,) = second.restore.copies
    assert (copy.group, copy.source) == (0, first.pages[0][1])
    assert copy.target == second.pages[0][1] != first.pages[0][1]
    first.release()
    allocator.audit_all()  # the source page is held for the second lease
    second.commit(3, known)
    assert second.restore is None
    second.release()
    allocator.audit_all()
    assert allocator.pages_held == 0


def test_a_prompt_that_ends_with_a_page_needs_no_copy() -> None:
    allocator = make(checkpoints=2)
    known = history(1, 2, 3, 4)
    first = leased(allocator, known)
    run(first, known)
    second = leased(allocator, known)
    assert (second.cached, second.restore and second.restore.copies) == (4, ())
    assert second.pages[0] == first.pages[0]


def test_a_copy_that_needs_one_page_too_many_is_skipped() -> None:
    """Otherwise a request that just fits would wait forever for the page that its own checkpoint uses."""
    allocator = make(pages=2, checkpoints=1)
    known = history(1, 2, 3)
    first = leased(allocator, known)
    run(first, known)
    first.release()
    again = leased(allocator, known)
    assert (again.cached, again.restore) == (2, None)
    assert again.reserve(4)
    allocator.audit_all()
    assert allocator.checkpoint_slots.used == 0  # its page was evicted
    again.release()
    allocator.audit_all()


def test_evicting_a_page_removes_its_checkpoint_and_evicting_a_checkpoint_frees_its_page() -> None:
    allocator = make(pages=4, checkpoints=1)
    known = history(1, 2, 3)
    lease = leased(allocator, known)
    run(lease, known)
    lease.release()
    assert (len(allocator.prefix_cache), allocator.checkpoint_slots.used, allocator.pools[0].available) == (1, 1, 4)
    other = history(7)
    lease = leased(allocator, other)
    run(lease, other)  # takes the only slot
    assert (allocator.checkpoint_slots.evictions, allocator.checkpoint_slots.used) == (1, 1)
    lease.release()
    allocator.audit_all()
    assert leased(allocator, known).cached == 2


def test_concurrent_requests_with_the_same_prompt_fill_one_slot() -> None:
    allocator = make(pages=20, checkpoints=4)
    known = history(1, 2, 3)
    leases = [leased(allocator, known) for _ in range(3)]
    planned = [lease.plan_saves(start=0, stop=3, samples=True) for lease in leases if lease.reserve(3)]
    assert [len(saves) for saves in planned] == [1, 0, 0]
    leases[0].release()  # its step failed
    allocator.audit_all()
    assert allocator.checkpoint_slots.used == 0
    leases[1].commit(3, known)
    allocator.audit_all()


def test_a_recurrent_prefix_is_resumed_on_a_chunk_boundary_that_was_saved() -> None:
    allocator = make(pages=40, lanes=4, checkpoints=8, chunk=4, recurrent=True)
    prompt = tuple(range(10))
    known = History(prompt)
    first = leased(allocator, known)
    assert [s.position for s in run(first, known)] == [8, 10]
    known.output += [11, 12, 13, 14]
    assert first.reserve(14)
    first.commit(14, known)
    assert len(allocator.prefix_cache) == 5  # pages of generated tokens are not cached
    follow_up = leased(allocator, History((*prompt, 11, 12, 13, 14, 20)))
    assert follow_up.cached == 8
    again = leased(allocator, History(prompt))
    assert again.cached == 10
    preempted = leased(allocator, known)
    assert preempted.cached == 10
    allocator.audit_all()


def test_a_prompt_that_leaves_a_cached_prefix_saves_the_chunk_boundary_before() -> None:
    allocator = make(pages=60, checkpoints=8, chunk=4, recurrent=True)
    stem = tuple(range(9))
    for last, expected in ((30, 0), (31, 0), (32, 8)):
        known = History((*stem, last, last, last, last, last))
        lease = leased(allocator, known)
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
                lease = allocator.allocate(known, reuse=bool(number & 1))
                if lease is not None:
                    held.append((lease, known))
            case 1 if held:
                lease, known = held[number % len(held)]
                length = len(known)
                if lease.reserve(length + number % 4):
                    lease.commit(length, known)
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
