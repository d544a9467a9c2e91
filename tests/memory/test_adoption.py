"""A prefix from elsewhere finds its place in the index, or leaves no trace."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onedraw.memory.allocator import Allocator
from onedraw.memory.prefix_import import abandon, adopt, make_room, pages_of, reach
from onedraw.types import History

PAGE = 4


def allocator_of(
    *, pages: int = 12, windows: tuple[int | None, ...] = (None,), slots: int = 2, recurrent: bool = True
) -> Allocator:
    groups = [SimpleNamespace(pages=pages, window=window) for window in windows]
    sizes = SimpleNamespace(lanes=2, groups=groups, page_size=PAGE, checkpoints=slots, chunk=4, recurrent=recurrent)
    return Allocator(sizes, reuse=True)


def take_in(allocator: Allocator, tokens: tuple[int, ...], *, slot: bool = True) -> bool:
    adoption = make_room(allocator, tokens, slot=slot)
    if adoption is not None:
        adopt(allocator, adoption, logits=slot)
    allocator.audit_all()
    return adoption is not None


TEXT = tuple(range(50))


def test_what_was_adopted_is_found_at_admission() -> None:
    allocator = allocator_of()
    assert take_in(allocator, TEXT[:18])
    assert reach(allocator, History(TEXT[:18])) == 18
    lease = allocator.lend(History(TEXT[:18]), reuse=True)
    assert lease is not None
    assert lease.cached == 18
    assert lease.opening is not None
    lease.release()
    allocator.audit_all()


def test_what_is_there_already_is_kept_and_only_the_rest_asked_for() -> None:
    allocator = allocator_of()
    take_in(allocator, TEXT[:8])
    adoption = make_room(allocator, TEXT[:18], slot=True)
    assert adoption is not None
    assert [sorted(new) for new in adoption.pages] == [[2, 3, 4]]
    assert adoption.places([1]) == [{1: adoption.pages[0][2], 2: adoption.pages[0][3], 3: adoption.pages[0][4]}]
    abandon(allocator, adoption)
    allocator.audit_all()
    assert reach(allocator, History(TEXT[:18])) == 8


def test_no_room_takes_nothing() -> None:
    allocator = allocator_of(pages=6)
    lease = allocator.lend(History(TEXT[:12]), reuse=True)
    assert lease is not None
    lease.cover(13)
    before = allocator.pools[0].available
    assert not take_in(allocator, tuple(range(100, 120)))
    assert allocator.pools[0].available == before
    assert allocator_of(slots=0).slots.count == 0
    assert not take_in(allocator_of(slots=0), TEXT[:8])


def test_a_window_asks_for_the_pages_it_sees() -> None:
    allocator = allocator_of(windows=(None, 6))
    adoption = make_room(allocator, TEXT[:18], slot=True)
    assert adoption is not None
    assert [sorted(new) for new in adoption.pages] == [[0, 1, 2, 3, 4], [3, 4]]
    adopt(allocator, adoption, logits=True)
    allocator.audit_all()
    [checkpoint] = allocator.index.checkpoints()
    assert [first for first, _ in pages_of(allocator, checkpoint) or ()] == [0, 3]
    allocator.dissolve(checkpoint)
    assert pages_of(allocator, checkpoint) is None
    allocator.audit_all()


@pytest.mark.parametrize("recurrent", [True, False])
@given(st.data())
def test_no_order_of_adoptions_and_leases_loses_a_page(recurrent: bool, data: st.DataObject) -> None:
    windows = data.draw(st.sampled_from([(None,), (None, 6), (5,)]))
    allocator = allocator_of(pages=data.draw(st.integers(4, 14)), windows=windows, slots=2, recurrent=recurrent)
    leases = []
    for _ in range(data.draw(st.integers(1, 12))):
        start = data.draw(st.sampled_from([0, 0, 3]))
        tokens = TEXT[start : start + data.draw(st.integers(1, 24))]
        match data.draw(st.sampled_from(["adopt", "abandon", "lend", "release"])):
            case "adopt":
                take_in(allocator, tokens, slot=recurrent or data.draw(st.booleans()))
            case "abandon":
                if (adoption := make_room(allocator, tokens, slot=True)) is not None:
                    abandon(allocator, adoption)
            case "lend":
                if (lease := allocator.lend(History(tokens), reuse=True)) is not None:
                    leases.append(lease)
            case _ if leases:
                leases.pop().release()
        allocator.audit_all()
    while leases:
        leases.pop().release()
    allocator.audit_all()
    assert allocator.pages_held == 0
