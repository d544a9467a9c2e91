"""The minimum bytes of a decode step: every matrix once, the selected experts, the keys and values within the window."""

from __future__ import annotations

import math
from dataclasses import replace

from onedraw.lab.references import step_bytes
from onedraw.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, RopeSpec
from onedraw.models.weight_names import weight_shapes

MIXER = AttentionSpec(heads=4, kv_heads=2, head_dim=8, rope=RopeSpec(theta=1e4, dims=8), scale=1.0)


def spec_of(layer: LayerSpec) -> ModelSpec:
    return ModelSpec(family="llama", layers=(layer,), hidden=32, vocab=100, eps=1e-5, tied=False, max_context=256)


def minimum(spec: ModelSpec, *, rows: int, context: int) -> int:
    """With two bytes per value."""
    sizes = {key: 2 * math.prod(shape) for key, shape in weight_shapes(spec).items()}
    return step_bytes(spec, sizes, dtype="bf16", rows=rows, context=context)


def test_matrices_are_read_once_and_keys_by_every_row() -> None:
    spec = spec_of(LayerSpec(MIXER, MlpSpec(64)))
    matrices = 32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 64 + 100 * 32
    assert minimum(spec, rows=1, context=0) == 2 * matrices
    assert minimum(spec, rows=3, context=10) == 2 * matrices + 3 * 2 * 10 * 2 * 8 * 2


def test_a_window_bounds_the_keys_that_are_read() -> None:
    spec = spec_of(LayerSpec(replace(MIXER, window=4), MlpSpec(64)))
    assert minimum(spec, rows=1, context=100) == minimum(spec, rows=1, context=4)


def test_only_experts_that_the_rows_can_select_are_read() -> None:
    spec = spec_of(LayerSpec(MIXER, MoeSpec(experts=8, used=2, width=16)))
    one, four, many = (minimum(spec, rows=rows, context=0) for rows in (1, 4, 64))
    assert four - one == 2 * 6 * 3 * 16 * 32  # six more experts
    assert many == four  # all of them
