"""Activations of packed products: the bits of the slow reference, for each row alone.

On a GPU, or under Triton's interpreter.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs a CUDA device"),
]

if torch.cuda.is_available() or INTERPRETED:
    from onedraw.backends.torch.ops.cuda import norm as triton_norm
    from onedraw.backends.torch.ops.cuda.norm import gated_activation, rms_norm
    from onedraw.backends.torch.ops.cuda.packed import activations as spans
    from onedraw.backends.torch.ops.cuda.packed.activations import (
        PackedActivations,
        PendingActivations,
        empty_packed_activations,
        pack_activations,
    )
    from tests.reference.packed_blocks import reference_activations

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() and not INTERPRETED else "cpu")
DTYPES = (torch.float16,) if INTERPRETED else (torch.bfloat16, torch.float16)


def normal(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(torch.randn(shape[0], 1, generator=generator))
    return (torch.randn(shape, generator=generator) * sizes).to(DEVICE, dtype)


def equal(one: PackedActivations, other: PackedActivations) -> bool:
    """Compare bit for bit; NaN equals any NaN."""
    pairs = ((one.x, other.x), (one.factors, other.factors), (one.sums, other.sums))
    return all(bool(((a == b) | (a.isnan() & b.isnan())).all()) and a.shape == b.shape for a, b in pairs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [256, 300, 1024 + 32])
def test_rows_are_packed_as_by_the_reference(dtype: torch.dtype, width: int) -> None:
    x = normal(5, width + 7, dtype=dtype)
    found = pack_activations(x, width=width)
    assert equal(found, reference_activations(x, width=width))
    back = found.x.double() * found.factors.double().repeat_interleave(256, 1)
    assert float((back[:, :width] - x[:, :width].double()).abs().max()) <= float(x.double().abs().max()) * 2**-11
    assert not back[:, width:].any()


def test_a_row_is_packed_alike_alone_and_among_thousands(monkeypatch: pytest.MonkeyPatch) -> None:
    """For any number of spans per program."""
    rows = 3 if INTERPRETED else 3000
    x = normal(rows, 700, seed=1)
    monkeypatch.setattr(spans, "ONE_SEGMENT_SPANS", 0)
    many = pack_activations(x)
    monkeypatch.undo()
    assert equal(many, reference_activations(x))
    for row in (0, 1, rows - 1):
        assert equal(pack_activations(x[row : row + 1]), many.rows(slice(row, row + 1)))


def test_columns_can_be_permuted() -> None:
    x = normal(2, 512, seed=2)
    order = torch.randperm(512, generator=torch.Generator().manual_seed(3)).to(DEVICE, torch.int32)
    assert equal(pack_activations(x, order=order), pack_activations(x[:, order.long()].contiguous()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_extremes_are_packed(dtype: torch.dtype) -> None:
    """A segment of zeros has the factor 1; the largest and smallest values neither overflow nor vanish."""
    x = torch.zeros(4, 512, dtype=dtype, device=DEVICE)
    x[1] = torch.finfo(dtype).max
    x[2, ::2] = torch.finfo(dtype).smallest_normal
    x[3, 5], x[3, 300] = -torch.finfo(dtype).max, torch.finfo(dtype).tiny
    found = pack_activations(x)
    assert equal(found, reference_activations(x))
    assert found.factors[0].tolist() == [1.0, 1.0]
    assert bool(found.x.isfinite().all())
    assert bool(found.sums.isfinite().all())
    largest = found.x.view(4, 2, 256).abs().amax(2)
    assert float(largest[1].min()) >= 512
    assert float(largest.max()) < 1024
    if dtype == torch.float16:
        assert torch.equal(found.x[2].double() * float(found.factors[2, 0]), x[2].double())


def test_block_sums_are_exact_for_values_of_any_magnitude() -> None:
    """Values of every magnitude down to float16's last bit, of both signs."""
    sizes = torch.randint(-34, 1, (6, 512), generator=torch.Generator().manual_seed(9)).to(DEVICE)
    x = normal(6, 512, dtype=torch.float32, seed=8).clamp(-1, 1) * 1000 * torch.exp2(sizes.float())
    x[3], x[4, ::2] = -x[3].abs(), 0
    x[5], x[:5, ::256] = 1023.9, 1000  # the largest of each span: with it the factor is 1
    for dtype in DTYPES:
        assert equal(pack_activations(x.to(dtype)), reference_activations(x.to(dtype)))


@pytest.mark.filterwarnings("ignore:invalid value")  # the interpreter computes with numpy
def test_values_that_are_not_finite_stay_so_and_stay_in_their_row() -> None:
    x = normal(4, 256, seed=4)
    x[1, 7], x[2, 200] = float("inf"), float("nan")
    found = pack_activations(x)
    assert equal(found, reference_activations(x))
    assert found.x.isfinite().all(1).tolist() == [True, False, False, True]
    assert found.sums.isfinite().flatten(1).all(1).tolist() == [True, False, False, True]
    assert bool(found.factors.isfinite().all())


@pytest.mark.parametrize("width", [64, 512, 1300])
def test_norms_and_gated_activations_pack_their_output(width: int) -> None:
    rows = 3 if INTERPRETED else 200
    x, weight = normal(rows, width, dtype=DTYPES[0], seed=5), normal(1, width, dtype=DTYPES[0], seed=6)[0]
    ready = empty_packed_activations(rows, width, DEVICE)
    normed = rms_norm(x, weight, 1e-6, packed=ready)
    assert equal(ready, reference_activations(normed))
    both = normal(rows, 2 * width, dtype=DTYPES[0], seed=7)
    activated = gated_activation(both, "silu", packed=ready)
    assert equal(ready, reference_activations(activated))
    assert torch.equal(activated, gated_activation(both, "silu"))


@pytest.mark.parametrize("width", [1296, 1300] if INTERPRETED else [1296, 1300, 2048, 4096, 5120])
def test_a_norm_split_over_programs_has_the_bits_of_one_program(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float16 and with many seeds: bf16 would hide the last bit that another order of the sum changes."""
    rows = 2 if INTERPRETED else 64
    for seed in range(1 if INTERPRETED else 20):
        with monkeypatch.context() as patch:
            x, weight = (normal(n, width, dtype=torch.float16, seed=seed + n) for n in (rows, 1))
            shared, alone = (empty_packed_activations(rows, width, DEVICE) for _ in range(2))
            few = rms_norm(x, weight[0], 1e-6, packed=shared)
            patch.setattr(triton_norm, "FEW_ROWS", 0)
            assert torch.equal(rms_norm(x, weight[0], 1e-6, packed=alone), few)
            assert equal(shared, alone)
            assert torch.equal(rms_norm(x, weight[0], 1e-6), few)


def test_packed_rows_are_taken_once_and_only_for_the_same_tensor() -> None:
    x, ready = normal(2, 256), PendingActivations()
    activations = pack_activations(x)
    ready.put(x, activations)
    assert ready.take(x.clone()) is None
    assert ready.take(x) is activations
    assert ready.take(x) is None
