"""Views give the expected values: whole, by rows, and written into a given array."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from onedraw.checkpoints.base import StoredTensor
from onedraw.errors import UnsupportedModel
from onedraw.models.source import (
    ADD_ONE,
    NEGATIVE_EXPONENTIAL,
    ColumnSelection,
    ElementwiseTensor,
    LazyTensor,
    ReshapedRows,
    RowSelection,
    ScaledRows,
    StackedTensors,
    StackItem,
)

RANDOM = np.random.default_rng(0)


def stored(shape: tuple[int, ...], kind: str = "F32") -> StoredTensor:
    values = RANDOM.normal(size=shape).astype(np.float32)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    return StoredTensor("x", shape, kind, np.frombuffer(raw.tobytes(), np.uint8))


def check(view: LazyTensor, expected: np.ndarray) -> None:
    """Check every way of reading a tensor."""
    view.require_readable()
    assert view.shape == expected.shape
    np.testing.assert_array_equal(view.float32(), expected)
    room = np.full((2, *expected.shape), np.nan, np.float32)
    view.into(room[1])
    np.testing.assert_array_equal(room[1], expected)
    assert np.isnan(room[0]).all()
    order = np.array([len(expected) - 1, 0, 0])  # fewer rows, reversed, one of them twice
    np.testing.assert_array_equal(view.take_rows(order).float32(), expected[order])
    np.testing.assert_array_equal(view.take_rows(order).take_rows(np.array([1])).float32(), expected[order][[1]])


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
def test_a_row_selection_reads_the_selected_rows(kind: str) -> None:
    tensor = stored((6, 64), kind)
    order = np.array([5, 1, 1, 2])
    view = RowSelection(tensor, order)
    check(view, tensor.float32()[order])
    assert view.kind == kind


def test_rows_that_are_not_selected_are_not_read() -> None:
    """A table of billions of values is read row by row: only these rows of the mapped file are touched."""
    tensor = stored((1000, 64), "Q8_0")
    packed = np.frombuffer(tensor.data.tobytes(), np.uint8).reshape(1000, -1)
    seen: list[object] = []

    class Watched(np.ndarray):
        def __getitem__(self, key: object) -> object:
            seen.append(key)
            return super().__getitem__(key)

    watched = StoredTensor("x", tensor.shape, tensor.kind, packed.reshape(-1).view(Watched))
    found = watched.take_rows(np.array([7, 3])).float32()
    np.testing.assert_array_equal(found, tensor.float32()[[7, 3]])
    assert [list(key) for key in seen if isinstance(key, np.ndarray)] == [[7, 3]]


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_reshaped_rows_split_the_first_axis(kind: str) -> None:
    tensor = stored((6, 32), kind)
    check(ReshapedRows(tensor, (3, 2, 32)), tensor.float32().reshape(3, 2, 32))
    check(RowSelection(tensor, np.array([4, 5, 0, 1])).reshaped((2, 2, 32)), tensor.float32()[[4, 5, 0, 1]].reshape(2, 2, 32))
    room = np.zeros((3, 2, 64), np.float32)
    ReshapedRows(tensor, (3, 2, 32)).into(room[:, :, ::2])  # not contiguous, so it cannot be reshaped without a copy
    np.testing.assert_array_equal(room[:, :, ::2], tensor.float32().reshape(3, 2, 32))
    for shape in ((4, 3, 16), (5, 32), (12, 16)):
        with pytest.raises(ValueError, match="cannot be reshaped"):
            ReshapedRows(tensor, shape)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_column_selection_dequantizes_and_reorders(kind: str) -> None:
    tensor, order = stored((4, 64), kind), np.random.default_rng(1).permutation(64)
    check(ColumnSelection(tensor, order), tensor.float32()[:, order])


def test_stacked_tensors_have_a_new_first_axis() -> None:
    tensors = tuple(stored((2, 32), kind) for kind in ("F32", "Q8_0", "BF16"))
    check(StackedTensors(tensors), np.stack([tensor.float32() for tensor in tensors]))


def test_elementwise_functions_apply_to_every_value() -> None:
    tensor = stored((5,))
    check(ElementwiseTensor(tensor, ADD_ONE), tensor.float32() + 1)
    expected = (-np.exp(tensor.float32().astype(np.float64))).astype(np.float32)
    check(ElementwiseTensor(tensor, NEGATIVE_EXPONENTIAL), expected)
    assert (expected < 0).all()


def test_a_stored_tensor_can_be_reshaped_if_blocks_stay_whole() -> None:
    tensor = stored((6, 32), "Q8_0")
    check(tensor.reshaped((3, 2, 32)), tensor.float32().reshape(3, 2, 32))
    plain = stored((6, 1, 4))
    check(plain.reshaped((6, 4)), plain.float32().reshape(6, 4))
    for shape in ((6, 16, 2), (5, 32)):
        with pytest.raises(ValueError, match="cannot be reshaped"):
            tensor.reshaped(shape)


def test_an_unreadable_type_is_refused_through_every_view() -> None:
    bad = StoredTensor("x", (4, 2), "F8_E4M3", np.zeros(8, np.uint8))
    views: list[LazyTensor] = [
        RowSelection(bad, np.array([0])),
        ReshapedRows(bad, (2, 2, 2)),
        ColumnSelection(bad, np.array([1, 0])),
        StackedTensors((stored((4, 2)), bad)),
        ElementwiseTensor(bad, ADD_ONE),
    ]
    for view in views:
        with pytest.raises(UnsupportedModel, match="F8_E4M3"):
            view.require_readable()
        with pytest.raises(UnsupportedModel, match="integers"):
            view.int64()


def test_factors_follow_their_rows_through_every_view() -> None:
    """Through every view, blocks times factors give the values."""
    whole = StoredTensor("x", (4, 3, 64), "NVFP4", RANDOM.integers(0, 127, 4 * 3 * 36, dtype=np.uint8))
    one, two = (StoredTensor("y", (3, 64), "NVFP4", RANDOM.integers(0, 127, 3 * 36, dtype=np.uint8)) for _ in range(2))
    scaled = ScaledRows(whole, np.array([2, 3, 5, 7], np.float32))
    check(scaled, whole.float32() * np.array([2, 3, 5, 7], np.float32)[:, None, None])
    views = [
        scaled,
        RowSelection(scaled, np.array([3, 0, 0])),
        StackItem(scaled, 2),
        scaled.reshaped((12, 64)),
        ReshapedRows(scaled, (4, 3, 64)),
    ]
    views.append(StackedTensors((ScaledRows(one, np.full(3, 0.5, np.float32)), two)))
    for view in views:
        raw, factors = view.packed(), view.factors()
        assert view.stays_packed
        assert raw is not None
        assert factors is not None
        numbers = StoredTensor("z", (len(raw), 64), "NVFP4", np.ascontiguousarray(raw).reshape(-1)).float32()
        np.testing.assert_array_equal((numbers * factors[:, None]).reshape(view.shape), view.float32())
    assert StackedTensors((one, two)).factors() is None
    assert whole.factors() is None


def test_a_factor_on_another_type_changes_the_values() -> None:
    """Kernels apply factors only to NVFP4, so for other types the blocks must not be used without them."""
    view = ScaledRows(stored((6, 64), "Q8_0"), np.arange(6, dtype=np.float32))
    assert not view.stays_packed
    assert view.packed() is None
