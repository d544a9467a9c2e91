"""Pages and lanes: lent, shared, given back, never lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onedraw.backends.base import Capacity, PageGroup
from onedraw.memory.ledger import Lease, Ledger
from onedraw.types import History


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
) -> Ledger:
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
    return Ledger(capacity, reuse=True)


def lend(ledger: Ledger, known: History, *, settle: int = 0) -> Lease:
    lease = ledger.lend(known, reuse=True)
    assert lease is not None
    if settle:
        assert lease.cover(settle)
        lease.settle(settle, known)
    return lease


def test_a_second_request_shares_the_full_pages_of_the_first() -> None:
    ledger = make()
    known = history(1, 2, 3, 4, 5)
    first = lend(ledger, known, settle=5)
    second = lend(ledger, known)
    assert second.cached == 4
    assert second.pages[0] == first.pages[0][:2]
    first.release()
    second.release()
    ledger.audit()


def test_at_least_one_known_token_is_left_to_compute() -> None:
    ledger = make()
    known = history(1, 2, 3, 4)
    lend(ledger, known, settle=4).release()
    assert lend(ledger, known).cached == 2


def test_a_prefix_outlives_its_sequence_until_the_pages_are_needed() -> None:
    ledger = make(pages=4)
    lend(ledger, history(1, 2, 3, 4, 5), settle=5).release()
    assert lend(ledger, history(1, 2, 3, 4, 9)).cached == 4
    ledger.leases[next(iter(ledger.leases))].release()
    other = lend(ledger, history(9, 9, 9, 9, 9, 9, 9), settle=7)
    other.release()
    again = lend(ledger, history(1, 2, 3, 4, 9))
    assert again.cached == 0
    again.release()
    ledger.audit()


def test_the_end_of_a_chain_is_forgotten_before_its_beginning() -> None:
    ledger = make(pages=4)
    lend(ledger, history(1, 2, 3, 4, 5, 6, 7), settle=7).release()  # three full pages idle, one free
    taken = lend(ledger, history(8, 8, 8), settle=3)  # takes the free page and the oldest idle one
    taken.release()
    assert lend(ledger, history(1, 2, 3, 4, 5, 6, 7)).cached == 4


def test_no_lease_without_pages_for_the_known_tokens_and_the_next() -> None:
    ledger = make(pages=2)
    assert ledger.lend(history(1, 2, 3, 4), reuse=True) is None
    assert ledger.lend(history(1, 2, 3, 4, 5), reuse=True, more=0) is None
    scored = ledger.lend(history(1, 2, 3, 4), reuse=True, more=0)  # nothing follows it
    assert scored is not None
    scored.release()
    assert ledger.lend(history(1, 2, 3), reuse=True) is not None
    ledger.audit()


def test_no_lease_without_a_lane() -> None:
    ledger = make(lanes=1)
    assert ledger.lend(history(1), reuse=True) is not None
    assert ledger.lend(history(2), reuse=True) is None
    ledger.audit()


def test_settling_gives_back_the_pages_of_rejected_drafts() -> None:
    ledger = make()
    known = history(1, 2, 3)
    lease = lend(ledger, known)
    assert lease.cover(9)
    assert len(lease.pages[0]) == 5
    lease.settle(3, known)
    assert len(lease.pages[0]) == 2
    ledger.audit()


def test_covering_takes_nothing_where_it_cannot_take_all() -> None:
    ledger = make(pages=4)
    lease = lend(ledger, history(1))
    assert not lease.cover(9)
    assert lease.pages == ([],)


def test_a_page_dropped_twice_is_noticed() -> None:
    ledger = make()
    lease = lend(ledger, history(1), settle=1)
    page = lease.pages[0][0]
    ledger.pools[0].drop(page, indexed=False)
    with pytest.raises(AssertionError):
        ledger.audit()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**30)), max_size=40))
def test_no_order_of_events_loses_a_page(events: list[tuple[int, int]]) -> None:
    ledger = make(pages=7, lanes=3)
    held: list[tuple[Lease, History]] = []
    for kind, number in events:
        tokens = tuple((number >> (2 * i)) & 1 for i in range(1 + number % 9))
        match kind:
            case 0:
                known = History(tokens)
                lease = ledger.lend(known, reuse=bool(number & 1))
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
        ledger.audit()
    for lease, _ in held:
        lease.release()
    ledger.audit()
    assert ledger.pages_held == 0
