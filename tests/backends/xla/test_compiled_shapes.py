"""The two compiled shapes of the xla backend: sizes, and equal row counts where they are required."""

from __future__ import annotations

import pytest

from onedraw.backends.xla.inputs import CHUNK, KEYS, MAX_PRODUCT_ROWS, MIN_PRODUCT_ROWS, CompiledShapes, compiled_shapes


def shape_of(lanes: int, *, rows: int | None = None, drafts: int = 64, step_tokens: int = 512) -> CompiledShapes:
    sizes = {"page_size": 16, "pages": (100,), "windows": (None,), "max_context": 1000, "checkpoints": 4}
    return compiled_shapes(lanes=lanes, drafts=drafts, rows=rows, step_tokens=step_tokens, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("lanes", [1, 4, 5, 8, 17, 32, 33, 100])
def test_shapes_have_room_for_every_lane_and_product_rows_within_the_limits(lanes: int) -> None:
    shape = shape_of(lanes)
    assert shape.decode.tokens >= lanes
    assert MIN_PRODUCT_ROWS <= shape.decode.rows <= MAX_PRODUCT_ROWS == shape.mixed.rows
    for bucket in (shape.decode, shape.mixed):
        assert bucket.tokens % bucket.rows == 0
        assert bucket.tiles % bucket.step == 0
    assert shape.mixed.tiles * shape.mixed.tile >= shape.mixed.tokens  # even if every lane has a partial tile
    assert shape.picks >= lanes + shape.drafts
    assert shape.table * shape.page_size % KEYS == 0


def test_fixed_rows_give_both_shapes_equal_products_and_tiles() -> None:
    shape = shape_of(8, rows=64)
    assert (shape.decode.rows, shape.decode.tile, shape.decode.step) == (shape.mixed.rows, shape.mixed.tile, shape.mixed.step)
    assert shape == shape.uniform
    assert shape_of(8).uniform.decode.rows == MAX_PRODUCT_ROWS


@pytest.mark.parametrize("rows", [None, 64])
@pytest.mark.parametrize("step_tokens", [1, 16, 64, 128, 512])
def test_a_small_token_budget_still_has_room_for_three_chunks(step_tokens: int, rows: int | None) -> None:
    assert shape_of(4, rows=rows, step_tokens=step_tokens).mixed.tokens >= max(step_tokens, 2 * CHUNK) + CHUNK
