"""Products of quantized weights in Triton, against the same products with dequantized weights."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from onedraw.backends.packing import SPAN_BYTES
from onedraw.backends.torch.ops.cuda.packed.portable import PortableLinear, PortableOps
from onedraw.checkpoints.base import StoredTensor
from onedraw.models.source import ColumnSelection
from tests.support.quantized_weights import random_tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [] if INTERPRETED else [pytest.mark.device]
# The interpreter multiplies bf16 numbers as if they were integers.
DTYPES = (torch.float16, torch.float32) if INTERPRETED else (torch.float16, torch.bfloat16, torch.float32)


def weight(kind: str, *, rows: int = 40, width: int = 256, seed: int = 0) -> StoredTensor:
    return random_tensor("w", (rows, width), kind, np.random.default_rng(seed), width**-0.5)


def linear(*tensors: object, dtype: torch.dtype = torch.float16, pad: int = 1) -> PortableLinear:
    made = PortableOps(DEVICE, dtype).packed_linear(tensors, bias=None, pad=pad, pad_columns=1)  # type: ignore[arg-type]
    assert made is not None
    return made


def rows_of(count: int, width: int = 256, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1)).to(dtype).to(DEVICE)


def exact(x: torch.Tensor, tensor: object) -> torch.Tensor:
    return x.double() @ torch.from_numpy(tensor.float32()).double().t().to(DEVICE)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", SPAN_BYTES)
def test_products_have_the_exact_weights(kind: str) -> None:
    for dtype in DTYPES:
        tensor, x = weight(kind), rows_of(3, dtype=dtype)
        expected = exact(x, tensor)
        error = (linear(tensor, dtype=dtype)(x).double() - expected).abs().max() / expected.abs().max()
        assert error < {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-6}[dtype]


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0"])
def test_a_row_does_not_depend_on_the_number_of_rows(kind: str) -> None:
    product, x = linear(weight(kind)), rows_of(40)
    whole = product(x)
    for count in (1, 16, 17):
        assert torch.equal(product(x[:count]), whole[:count])
    assert torch.equal(product(x[7:9]), whole[7:9])


@pytest.mark.parametrize("kind", SPAN_BYTES)
def test_rows_are_those_of_the_file(kind: str) -> None:
    tensor, wanted = weight(kind), torch.tensor([3, 0, 39], device=DEVICE)
    found = linear(tensor, dtype=torch.float32).rows(wanted)
    expected = torch.from_numpy(tensor.float32())[wanted.cpu()]
    assert torch.allclose(found.cpu(), expected, rtol=1e-6, atol=1e-7)


def test_weights_of_several_types_are_one_product() -> None:
    tensors = [weight("Q4_K", rows=40), weight("F16", rows=24, seed=1), weight("Q6_K", rows=33, seed=2)]
    x = rows_of(64)
    made = linear(*tensors, pad=64)
    expected = [torch.nn.functional.pad(exact(x, t), (0, -t.shape[0] % 64)) for t in tensors]
    assert (made(x).double() - torch.cat(expected, 1)).abs().max() < 4e-3


def test_permuted_columns_stay_packed() -> None:
    order = np.random.default_rng(0).permutation(256)
    tensor, x = ColumnSelection(weight("Q4_K"), order), rows_of(2)
    assert (linear(tensor)(x).double() - exact(x, tensor)).abs().max() < 4e-3
