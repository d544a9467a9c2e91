"""The work split among multiprocessors: every work item once, equal shares, within the shared memory of small GPUs."""

from __future__ import annotations

import pytest

from onedraw.backends.torch.ops.cuda.packed.work_split import WorkSplit, buffer_bytes, rows_at_once, split_work, tiles_of

LARGE, SMALL = 227 << 10, 99 << 10  # bytes of shared memory of an sm_90 and of an sm_86


def shares(share: WorkSplit, tall: int, segments: int) -> list[set[tuple[int, int]]]:
    """Return the work items (output unit, segment) of each block, enumerated as in the kernel."""
    if share.whole_k:
        even, odd = divmod(tall * segments // share.granule, share.blocks)
        edges = [(block * even + min(block, odd)) * share.granule for block in range(share.blocks + 1)]
        return [{divmod(item, segments) for item in range(*edges[block : block + 2])} for block in range(share.blocks)]
    items = tall * segments
    edges = [items * block // share.blocks for block in range(share.blocks + 1)]
    return [{(item % tall, item // tall) for item in range(*edges[block : block + 2])} for block in range(share.blocks)]


@pytest.mark.parametrize(("tall", "segments"), [(2176, 5), (320, 17), (320, 6), (384, 5), (640, 5), (1, 1), (3, 200), (64, 4)])
@pytest.mark.parametrize(("rows", "shared", "processors"), [(1, LARGE, 132), (16, LARGE, 132), (64, LARGE, 132), (32, SMALL, 82)])
def test_every_work_item_belongs_to_one_block(tall: int, segments: int, rows: int, shared: int, processors: int) -> None:
    for whole_k in (None, True, False):
        share = split_work(rows, tall, segments, multiprocessors=processors, shared=shared, whole_k=whole_k)
        found = shares(share, tall, segments)
        assert sum(map(len, found)) == tall * segments
        assert set().union(*found) == {(unit, s) for unit in range(tall) for s in range(segments)}
        assert all(found)
        assert share.blocks <= processors
        assert share.shared <= shared
        assert 32 <= share.threads <= 32 * share.warps
        assert max(map(len, found)) - min(map(len, found)) <= (share.granule if share.whole_k else 1)
        assert share.buffers >= 1
        if share.whole_k:  # a unit continues in the next block at most
            assert share.granule == segments or min(map(len, found)) >= segments


def test_blocks_load_rows_of_one_segment_if_that_costs_almost_nothing() -> None:
    share = split_work(24, 2176, 5, multiprocessors=132, shared=LARGE)
    assert not share.whole_k
    assert share.blocks == 130
    assert all(len({segment for _, segment in items}) == 1 for items in shares(share, 2176, 5))


def test_outputs_stay_within_one_block_where_that_was_measured_to_be_faster() -> None:
    def whole_k(rows: int, tall: int, segments: int) -> bool:
        return split_work(rows, tall, segments, multiprocessors=132, shared=LARGE).whole_k

    assert [whole_k(rows, 2176, 5) for rows in (1, 8, 16, 24)] == [True, True, False, False]
    assert [whole_k(rows, 384, 5) for rows in (1, 8, 16)] == [True, False, False]
    assert [whole_k(rows, 320, 17) for rows in (1, 5, 16)] == [True, False, False]
    assert [whole_k(rows, 15520, 5) for rows in (1, 16, 24)] == [True, True, False]


def test_blocks_share_units_if_some_would_otherwise_be_idle_for_a_fifth_of_the_time() -> None:
    def granule(tall: int, segments: int) -> int:
        return split_work(1, tall, segments, multiprocessors=132, shared=LARGE).granule

    assert granule(320, 17) == 1  # two units or three
    assert granule(384, 5) == 5  # three units for most blocks
    assert granule(64, 4) == 4  # fewer units than blocks


def test_as_many_rows_are_loaded_at_once_as_shared_memory_allows() -> None:
    assert [tiles_of(rows) for rows in (1, 8, 9, 17, 33, 49, 64)] == [1, 1, 2, 3, 6, 8, 8]
    assert [rows_at_once(rows, LARGE) for rows in (1, 33, 64)] == [1, 33, 64]
    assert [rows_at_once(rows, SMALL) for rows in (1, 32, 40, 64)] == [1, 32, 40, 32]
    assert buffer_bytes(64, 8) <= LARGE
