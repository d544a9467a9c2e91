"""An imported prefix is found in the prefix cache; a cancelled import leaves no trace."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onedraw.engine.checkpoint_offload import begin_import, cancel_import, checkpoint_pages, finish_import, reusable_length
from onedraw.memory.allocator import Allocator
from onedraw.types import History

PAGE = 4


def allocator_of(
    *, pages: int = 12, windows: tuple[int | None, ...] = (None,), slots: int = 2, recurrent: bool = True
) -> Allocator:
    groups = [SimpleNamespace(pages=pages, window=window) for window in windows]
    sizes = SimpleNamespace(lanes=2, groups=groups, page_size=PAGE, checkpoints=slots, chunk=4, recurrent=recurrent)
    return Allocator(sizes, reuse=True)


def import_prefix(allocator: Allocator, tokens: tuple[int, ...], *, slot: bool = True) -> bool:
    imported = begin_import(allocator, tokens, slot=slot)
    if imported is not None:
        finish_import(allocator, imported, logits=slot)
    allocator.audit_all()
    return imported is not None


TEXT = tuple(range(50))


def test_an_imported_prefix_is_found_at_admission() -> None:
    allocator = allocator_of()
    assert import_prefix(allocator, TEXT[:18])
    assert reusable_length(allocator, History(TEXT[:18])) == 18
    lease = allocator.allocate(History(TEXT[:18]), reuse=True)
    assert lease is not None
    assert lease.cached == 18
    assert lease.restore is not None
    lease.release()
    allocator.audit_all()


def test_an_import_reserves_only_the_pages_that_the_cache_lacks() -> None:
    allocator = allocator_of()
    import_prefix(allocator, TEXT[:8])
    imported = begin_import(allocator, TEXT[:18], slot=True)
    assert imported is not None
    assert [sorted(new) for new in imported.new_pages] == [[2, 3, 4]]
    assert imported.page_map([1]) == [{1: imported.new_pages[0][2], 2: imported.new_pages[0][3], 3: imported.new_pages[0][4]}]
    cancel_import(allocator, imported)
    allocator.audit_all()
    assert reusable_length(allocator, History(TEXT[:18])) == 8


def test_an_import_without_room_takes_nothing() -> None:
    allocator = allocator_of(pages=6)
    lease = allocator.allocate(History(TEXT[:12]), reuse=True)
    assert lease is not None
    lease.reserve(13)
    before = allocator.pools[0].available
    assert not import_prefix(allocator, tuple(range(100, 120)))
    assert allocator.pools[0].available == before
    assert allocator_of(slots=0).checkpoint_slots.count == 0
    assert not import_prefix(allocator_of(slots=0), TEXT[:8])


def test_a_sliding_group_imports_only_the_pages_in_its_window() -> None:
    allocator = allocator_of(windows=(None, 6))
    imported = begin_import(allocator, TEXT[:18], slot=True)
    assert imported is not None
    assert [sorted(new) for new in imported.new_pages] == [[0, 1, 2, 3, 4], [3, 4]]
    finish_import(allocator, imported, logits=True)
    allocator.audit_all()
    [checkpoint] = allocator.prefix_cache.checkpoints()
    assert [first for first, _ in checkpoint_pages(allocator, checkpoint) or ()] == [0, 3]
    allocator.remove_checkpoint(checkpoint)
    assert checkpoint_pages(allocator, checkpoint) is None
    allocator.audit_all()


@pytest.mark.parametrize("recurrent", [True, False])
@given(st.data())
def test_no_order_of_imports_and_leases_loses_a_page(recurrent: bool, data: st.DataObject) -> None:
    windows = data.draw(st.sampled_from([(None,), (None, 6), (5,)]))
    allocator = allocator_of(pages=data.draw(st.integers(4, 14)), windows=windows, slots=2, recurrent=recurrent)
    leases = []
    for _ in range(data.draw(st.integers(1, 12))):
        start = data.draw(st.sampled_from([0, 0, 3]))
        tokens = TEXT[start : start + data.draw(st.integers(1, 24))]
        match data.draw(st.sampled_from(["import", "cancel", "allocate", "release"])):
            case "import":
                import_prefix(allocator, tokens, slot=recurrent or data.draw(st.booleans()))
            case "cancel":
                if (imported := begin_import(allocator, tokens, slot=True)) is not None:
                    cancel_import(allocator, imported)
            case "allocate":
                if (lease := allocator.allocate(History(tokens), reuse=True)) is not None:
                    leases.append(lease)
            case _ if leases:
                leases.pop().release()
        allocator.audit_all()
    while leases:
        leases.pop().release()
    allocator.audit_all()
    assert allocator.pages_held == 0
