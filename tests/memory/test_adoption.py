"""A prefix from elsewhere finds its place in the index, or leaves no trace."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onedraw.memory.allocator import Ledger
from onedraw.memory.prefix_import import abandon, adopt, make_room, pages_of, reach
from onedraw.types import History

PAGE = 4


def ledger_of(*, pages: int = 12, windows: tuple[int | None, ...] = (None,), slots: int = 2, recurrent: bool = True) -> Ledger:
    groups = [SimpleNamespace(pages=pages, window=window) for window in windows]
    sizes = SimpleNamespace(lanes=2, groups=groups, page_size=PAGE, checkpoints=slots, chunk=4, recurrent=recurrent)
    return Ledger(sizes, reuse=True)


def take_in(ledger: Ledger, tokens: tuple[int, ...], *, slot: bool = True) -> bool:
    adoption = make_room(ledger, tokens, slot=slot)
    if adoption is not None:
        adopt(ledger, adoption, logits=slot)
    ledger.audit_all()
    return adoption is not None


TEXT = tuple(range(50))


def test_what_was_adopted_is_found_at_admission() -> None:
    ledger = ledger_of()
    assert take_in(ledger, TEXT[:18])
    assert reach(ledger, History(TEXT[:18])) == 18
    lease = ledger.lend(History(TEXT[:18]), reuse=True)
    assert lease is not None
    assert lease.cached == 18
    assert lease.opening is not None
    lease.release()
    ledger.audit_all()


def test_what_is_there_already_is_kept_and_only_the_rest_asked_for() -> None:
    ledger = ledger_of()
    take_in(ledger, TEXT[:8])
    adoption = make_room(ledger, TEXT[:18], slot=True)
    assert adoption is not None
    assert [sorted(new) for new in adoption.pages] == [[2, 3, 4]]
    assert adoption.places([1]) == [{1: adoption.pages[0][2], 2: adoption.pages[0][3], 3: adoption.pages[0][4]}]
    abandon(ledger, adoption)
    ledger.audit_all()
    assert reach(ledger, History(TEXT[:18])) == 8


def test_no_room_takes_nothing() -> None:
    ledger = ledger_of(pages=6)
    lease = ledger.lend(History(TEXT[:12]), reuse=True)
    assert lease is not None
    lease.cover(13)
    before = ledger.pools[0].available
    assert not take_in(ledger, tuple(range(100, 120)))
    assert ledger.pools[0].available == before
    assert ledger_of(slots=0).slots.count == 0
    assert not take_in(ledger_of(slots=0), TEXT[:8])


def test_a_window_asks_for_the_pages_it_sees() -> None:
    ledger = ledger_of(windows=(None, 6))
    adoption = make_room(ledger, TEXT[:18], slot=True)
    assert adoption is not None
    assert [sorted(new) for new in adoption.pages] == [[0, 1, 2, 3, 4], [3, 4]]
    adopt(ledger, adoption, logits=True)
    ledger.audit_all()
    [checkpoint] = ledger.index.checkpoints()
    assert [first for first, _ in pages_of(ledger, checkpoint) or ()] == [0, 3]
    ledger.dissolve(checkpoint)
    assert pages_of(ledger, checkpoint) is None
    ledger.audit_all()


@pytest.mark.parametrize("recurrent", [True, False])
@given(st.data())
def test_no_order_of_adoptions_and_leases_loses_a_page(recurrent: bool, data: st.DataObject) -> None:
    windows = data.draw(st.sampled_from([(None,), (None, 6), (5,)]))
    ledger = ledger_of(pages=data.draw(st.integers(4, 14)), windows=windows, slots=2, recurrent=recurrent)
    leases = []
    for _ in range(data.draw(st.integers(1, 12))):
        start = data.draw(st.sampled_from([0, 0, 3]))
        tokens = TEXT[start : start + data.draw(st.integers(1, 24))]
        match data.draw(st.sampled_from(["adopt", "abandon", "lend", "release"])):
            case "adopt":
                take_in(ledger, tokens, slot=recurrent or data.draw(st.booleans()))
            case "abandon":
                if (adoption := make_room(ledger, tokens, slot=True)) is not None:
                    abandon(ledger, adoption)
            case "lend":
                if (lease := ledger.lend(History(tokens), reuse=True)) is not None:
                    leases.append(lease)
            case _ if leases:
                leases.pop().release()
        ledger.audit_all()
    while leases:
        leases.pop().release()
    ledger.audit_all()
    assert ledger.pages_held == 0
