"""Staging buffers between stages have the size of one step, not of one context."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onedraw.backends.placement import MAX_BOUNDARY_BYTES, MIN_STAGING_ROWS, row_bytes, staging_plan
from onedraw.errors import OutOfMemory
from onedraw.models.spec import DTYPE_BYTES, ModelSpec
from tests.support.tiny_modern import spec

MIB = 2**20
CONTEXT = 262144


def shaped(hidden: int, *, inputs: int = 0) -> ModelSpec:
    plain = spec("qwen3_5")
    return replace(plain, hidden=hidden, layers=tuple(replace(layer, inputs=inputs) for layer in plain.layers))


@pytest.mark.parametrize(
    ("hidden", "buffers", "wide", "narrow"), [(5120, 2, 10240, 5120), (2048, 2, 4096, 2048), (5376, 3, 16128, 8064)]
)
def test_buffers_of_a_whole_context_would_be_much_larger(hidden: int, buffers: int, wide: int, narrow: int) -> None:
    known = [buffers * hidden * CONTEXT * DTYPE_BYTES[dtype] for dtype in ("f32", "bf16")]
    assert known == [wide * MIB, narrow * MIB]
    ours = [staging_plan(shaped(hidden), (2,), tokens=CONTEXT, dtype=dtype).total_bytes for dtype in ("f32", "bf16")]
    assert max(ours) <= 64 * MIB
    assert known[1] >= 32 * max(ours)


def test_a_step_of_2048_rows_in_bf16_takes_40_mebibytes() -> None:
    assert staging_plan(shaped(5120), (2,), tokens=2048, dtype="bf16").total_bytes == 40 * MIB


def test_per_layer_inputs_cross_as_a_third_buffer() -> None:
    model = shaped(64, inputs=16)
    plan = staging_plan(model, (1, 3), tokens=512, dtype="f32")
    assert plan.boundaries == (512 * 4 * (2 * 64 + 3 * 16), 512 * 4 * (2 * 64 + 1 * 16))  # only those of the layers after the cut


@given(
    st.integers(1, 20000),
    st.integers(0, 300),
    st.integers(1, CONTEXT),
    st.sampled_from(["f32", "bf16", "f16"]),
    st.integers(1, 3),
)
def test_a_boundary_takes_at_most_64_mebibytes(hidden: int, inputs: int, tokens: int, dtype: str, boundaries: int) -> None:
    plan = staging_plan(shaped(hidden, inputs=inputs), tuple(range(1, boundaries + 1)), tokens=tokens, dtype=dtype)
    assert max(plan.boundaries) <= MAX_BOUNDARY_BYTES
    assert plan.rows % 64 == 0
    assert MIN_STAGING_ROWS <= plan.rows < max(tokens, MIN_STAGING_ROWS) + 64


def test_rows_too_wide_for_the_staging_buffers_are_rejected() -> None:
    assert row_bytes(2**20, "f32") * MIN_STAGING_ROWS > MAX_BOUNDARY_BYTES
    with pytest.raises(OutOfMemory, match="use one device"):
        staging_plan(shaped(2**20), (1,), tokens=64, dtype="f32")


def test_one_device_has_no_boundary() -> None:
    assert staging_plan(shaped(5120), (), tokens=512, dtype="f32").total_bytes == 0
