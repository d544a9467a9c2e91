"""Products of up to 64 rows: every tile, with plain or swapped operands, gives right results and, on a GPU, equal bits.

On a GPU, or under Triton's interpreter, where the rounding of `tl.dot` depends on the tile and only closeness is tested.
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
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() and not INTERPRETED else "cpu")
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
ROWS = (1, 17, 24) if INTERPRETED else (1, 2, 15, 16, 17, 22, 24, 31, 32, 33, 48, 64)


def normal(*shape: int, seed: int, spread: float = 1.0) -> Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=DEVICE) * spread).to(DTYPE)


def shapes() -> list[tuple[int, int]]:
    from onedraw.backends.torch.ops.cuda.linear import SKINNY_TILES

    return [(192, 160)] if INTERPRETED else [(1000, 576), (14000, 1000), *SKINNY_TILES]


def test_a_row_has_the_same_bits_alone_and_in_a_batch_for_every_shape() -> None:
    from onedraw.backends.torch.ops.cuda.linear import Tile, linear

    tiles = {"swapped": {"tile": Tile(32, 64, 64, 4, 3, swapped=True)}, "chosen": {}} if INTERPRETED else {"chosen": {}}
    for n, k in shapes():
        x, weight = normal(64, k, seed=1), normal(n, k, seed=2, spread=k**-0.5)
        bias, residual = normal(n, seed=3), normal(64, n, seed=4)
        expected = linear(x, weight, tile=Tile(16, 64, 64, 4, 3))
        exact = x[:3].double() @ weight.double().t()
        assert (expected[:3].double() - exact).norm() < 4e-3 * exact.norm()
        for rows in ROWS:
            for name, tile in tiles.items():
                found = linear(x[:rows], weight, **tile)
                joined = linear(x[:rows], weight, bias=bias, residual=residual[:rows], **tile)
                activated = linear(x[:rows], weight, gate=1, **tile)
                assert torch.equal(joined, found + bias + residual[:rows]), (n, k, rows, name)
                gates, others = found[:, ::2], found[:, 1::2]
                close = activated.double() - torch.nn.functional.silu(gates.double()) * others.double()
                assert close.norm() < 4e-3 * activated.double().norm(), (n, k, rows, name)
                if INTERPRETED:
                    assert (found.double() - expected[:rows].double()).norm() < 1e-3 * expected[:rows].double().norm()
                else:
                    assert torch.equal(found, expected[:rows]), (n, k, rows)
