"""Dequantization equals the gguf package's bit for bit, on arbitrary bytes."""

from __future__ import annotations

import builtins
from typing import Any

import gguf
import numpy as np
import pytest

from onedraw.checkpoints.dequantize import (
    BUILT_IN_TYPES,
    QUANT_TYPE_BY_GGML_TYPE,
    QUANT_TYPES,
    RUN_VALUES,
    copy_rows,
    dequantize_into,
)
from onedraw.errors import UnsupportedModel

READABLE = [name for name, kind in QUANT_TYPES.items() if kind.unpack is not None or kind.in_gguf_package]


def gguf_dequantize(raw: np.ndarray, kind: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw.reshape(-1, QUANT_TYPES[kind].block_bytes), gguf.GGMLQuantizationType[kind]).reshape(-1)


def assert_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal bits; NaN equals any NaN."""
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), ~number)
    np.testing.assert_array_equal(found.view(np.uint32)[number], expected.astype(np.float32).view(np.uint32)[number])


@pytest.mark.parametrize("kind", READABLE)
def test_every_type_dequantizes_to_the_bits_of_the_gguf_package(kind: str) -> None:
    packing = QUANT_TYPES[kind]
    blocks = 3 * 4099 if packing.block_values == 1 else 517
    raw = np.random.default_rng(7).integers(0, 256, blocks * packing.block_bytes, dtype=np.uint8)
    out = np.full(blocks * packing.block_values, 5, np.float32)
    dequantize_into(raw, kind, out)
    assert_same_bits(out, gguf_dequantize(raw, kind))
    assert (~np.isnan(out)).mean() > 0.8


@pytest.mark.parametrize("kind", BUILT_IN_TYPES)
def test_chunks_and_threads_do_not_change_the_values(kind: str) -> None:
    """More values than a chunk and than the minimum of a thread, and not a multiple of either."""
    packing = QUANT_TYPES[kind]
    blocks = (5 * RUN_VALUES + 999) // packing.block_values
    raw = np.random.default_rng(8).integers(0, 256, blocks * packing.block_bytes, dtype=np.uint8)
    out = np.full(blocks * packing.block_values, 5, np.float32)
    dequantize_into(raw, kind, out)
    assert_same_bits(out, gguf_dequantize(raw, kind))


def test_unaligned_bytes_are_read() -> None:
    """A safetensors header has any length, so tensors need not be aligned."""
    raw = np.random.default_rng(9).normal(size=1000).astype(np.float32)
    shifted = np.zeros(4001, np.uint8)
    shifted[1:] = raw.view(np.uint8)
    out = np.empty(1000, np.float32)
    dequantize_into(shifted[1:], "F32", out)
    np.testing.assert_array_equal(out, raw)


def test_block_sizes_and_type_numbers_equal_the_gguf_packages() -> None:
    assert len(QUANT_TYPE_BY_GGML_TYPE) > 25
    for code, kind in QUANT_TYPE_BY_GGML_TYPE.items():
        packing = gguf.GGMLQuantizationType(code)
        assert packing.name == kind.name
        assert gguf.GGML_QUANT_SIZES[packing] == (kind.block_values, kind.block_bytes)


def test_an_output_of_another_size_or_type_is_refused() -> None:
    raw = np.zeros(68, np.uint8)
    for out in (np.empty(63, np.float32), np.empty(64, np.float64), np.empty((64, 2), np.float32)[:, 0]):
        with pytest.raises(ValueError, match="64 float32 values"):
            dequantize_into(raw, "Q8_0", out)  # type: ignore[arg-type]


def test_a_rare_type_without_the_gguf_package_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_gguf(name: str, *rest: Any) -> Any:
        if name.startswith("gguf"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_gguf)
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.ffn_up\.weight.*IQ4_XS.*onedraw\[models\]"):
        dequantize_into(np.zeros(136, np.uint8), "IQ4_XS", np.empty(256, np.float32), tensor="blk.0.ffn_up.weight")
    dequantize_into(np.zeros(144, np.uint8), "Q4_K", np.empty(256, np.float32))


def test_a_type_that_is_not_for_weights_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"tensor x: type F8_E4M3 .* supported: F32"):
        dequantize_into(np.zeros(4, np.uint8), "F8_E4M3", np.empty(4, np.float32), tensor="x")


def test_rows_copied_by_several_threads_are_equal() -> None:
    """A strided view of rows, as in a mapped file, with more bytes than the minimum of one thread."""
    raw = np.random.default_rng(10).integers(0, 256, (3001, 777), dtype=np.uint8)[:, 5:]
    out = np.zeros(raw.shape, np.uint8)
    copy_rows(raw, out)
    np.testing.assert_array_equal(out, raw)
    copy_rows(raw[:0], out[:0])
