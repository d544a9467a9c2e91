from __future__ import annotations

import gguf
import numpy as np
import pytest

from onedraw.checkpoints.base import StoredTensor, packed_bytes


def packed(values: np.ndarray, kind: str) -> StoredTensor:
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    return StoredTensor("x", values.shape, kind, np.frombuffer(raw.tobytes(), np.uint8))


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_1"])
def test_rows_are_selected_without_dequantizing(kind: str) -> None:
    tensor = packed(np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32), kind)
    order = np.array([3, 0, 5, 1, 4, 2])
    taken = tensor.take_rows(order)
    assert taken.nbytes == tensor.nbytes == packed_bytes((6, 64), kind)
    np.testing.assert_array_equal(taken.float32(), tensor.float32()[order])


def test_rows_of_a_vector_are_single_values() -> None:
    tensor = packed(np.arange(4, dtype=np.float32), "F32")
    np.testing.assert_array_equal(tensor.take_rows(np.array([3, 1, 2, 0])).float32(), [3, 1, 2, 0])


def test_values_are_written_into_a_given_array() -> None:
    tensor = packed(np.random.default_rng(1).normal(size=(4, 32)).astype(np.float32), "Q8_0")
    room = np.zeros((3, 4, 32), np.float32)
    tensor.into(room[1])
    np.testing.assert_array_equal(room[1], tensor.float32())
    assert not room[0].any()
    assert not room[2].any()
    with pytest.raises(ValueError, match="shape"):
        tensor.into(room[0, :2])


def test_rows_of_partial_blocks_have_no_size() -> None:
    assert packed_bytes((2, 33), "Q8_0") is None
    assert packed_bytes((), "Q8_0") is None
    assert packed_bytes((2, 33), "F16") == 132
