"""The pages of a DFlash drafter: which of the target's pages have one, and what is copied, saved and restored with them."""

from __future__ import annotations

import dataclasses

import torch

from onedraw.backends.torch.drafters.context_pages import NO_PAGE, ContextPages
from onedraw.backends.torch.ops.plain.linear import RowRule
from onedraw.backends.torch.runner.inputs import InputLayout
from onedraw.backends.torch.state.kv_pages import PageStore
from onedraw.models.spec import AttentionSpec, LayerSpec, MlpSpec, RopeSpec
from onedraw.types import PageCopy
from tests.backends.torch.test_cpu_kernels import prompt_row

PAGE = 8
WINDOWS = (16, 32)


def layer_of(window: int) -> LayerSpec:
    mixer = AttentionSpec(heads=2, kv_heads=1, head_dim=8, rope=RopeSpec(1e4, 8), scale=1.0, window=window)
    return LayerSpec(mixer, MlpSpec(8))


def context_pages(*, lanes: int = 1, target_pages: int = 100) -> ContextPages:
    layers = [layer_of(window) for window in reversed(WINDOWS)]
    target = InputLayout(PAGE, (target_pages,), RowRule(1))
    return ContextPages(layers, target=target, lanes=lanes, block=4, dtype=torch.float32, device=torch.device("cpu"))


def stores_of(pages: ContextPages) -> list[PageStore]:
    return [store for store in pages.state.stores if isinstance(store, PageStore)]


def test_a_window_has_pages_for_every_lane_and_no_more_than_the_target() -> None:
    assert context_pages().sizes.pages == (4, 6)
    assert context_pages(lanes=3).sizes.pages == (12, 18)
    assert context_pages(lanes=3, target_pages=10).sizes.pages == (10, 10)


def test_pages_are_written_within_a_window_and_read_where_they_are() -> None:
    pages = context_pages()
    held = list(range(50, 60))
    first = pages.tables(held, start=0, stop=24)
    assert [[page != NO_PAGE for page in own] for own in first] == [[False, True, True] + [False] * 7, [True] * 3 + [False] * 7]
    block = pages.tables(held, start=64, stop=68, seen=64)  # positions 24 … 63 were not written
    assert [[index for index, page in enumerate(own) if page != NO_PAGE] for own in block] == [[8], [8]]
    again = pages.tables(held, start=24, stop=28, seen=24)
    assert [own[:3] for own in again] == [own[:3] for own in first]


def test_pages_that_the_target_has_released_take_no_own_pages() -> None:
    pages = context_pages()
    own = pages.tables([-1, -1, 5], start=8, stop=24)
    assert [[page != NO_PAGE for page in found] for found in own] == [[False, False, True]] * 2


def test_the_page_that_was_not_needed_for_longest_gives_its_own_away() -> None:
    pages = context_pages()
    pages.tables([1, 2, 3], start=0, stop=24)
    pages.tables([1], start=0, stop=8)  # page 1 is needed again
    before = pages.tables([3, 1], start=16, stop=16, seen=16)
    pages.tables([7, 8, 9, 10], start=0, stop=32)
    after = pages.tables([3, 1, 2], start=24, stop=24, seen=24)
    assert after[1][:2] == before[1]
    assert after[1][2] == NO_PAGE


def filled(pages: ContextPages, held: list[int]) -> tuple[list[int], ...]:
    """Write pages 0 … 3 of a row, and return their own pages. Every number of an own page says which page of the row it is."""
    own = pages.tables(held, start=0, stop=32)
    for store in stores_of(pages):
        for index, page in enumerate(own[pages.state.group(store_spec(pages, store))]):
            if page != NO_PAGE:
                store.keys[page], store.values[page] = float(index), float(-index)
    return own


def store_spec(pages: ContextPages, store: PageStore) -> AttentionSpec:
    return next(spec for spec, found in pages.state.attending if found is store)


def contents(pages: ContextPages, held: list[int]) -> list[list[tuple[float, float]]]:
    """For every window, keys and values of the pages of a row that are there."""
    found = []
    own = pages.tables(held, start=32, stop=32, seen=32)
    for spec, store in pages.state.attending:
        group = own[pages.state.group(spec)]
        found.append([(float(store.keys[page, 0]), float(store.values[page, 0])) for page in group if page != NO_PAGE])
    return found


def test_a_copied_page_of_the_target_is_copied() -> None:
    pages = context_pages(lanes=2)
    filled(pages, [1, 2, 3, 4])
    row = dataclasses.replace(prompt_row(0, 0, 8, range(1)), copies=(PageCopy(0, 4, 40), PageCopy(0, 70, 41), PageCopy(1, 3, 42)))
    pages.open([row])
    assert contents(pages, [90, 91, 92, 40]) == [[(3.0, -3.0)], [(3.0, -3.0)]]
    assert contents(pages, [90, 91, 41, 42]) == [[], []]


def test_a_snapshot_restores_the_pages_that_were_there() -> None:
    pages, other = context_pages(), context_pages()
    filled(pages, [1, 2, 3, 4])
    saved = pages.export_checkpoint(0, [[1, 2, 3, 4]])
    other.import_checkpoint(None, [{0: 20, 1: 21, 2: 22, 3: 23}], saved)
    whole = [(float(index), float(-index)) for index in range(4)]
    assert contents(other, [20, 21, 22, 23]) == [whole, whole[2:]]
    part = context_pages()
    part.import_checkpoint(None, [{2: 22}], saved)  # the target has the other pages already
    assert contents(part, [20, 21, 22, 23]) == [whole[2:3], whole[2:3]]
