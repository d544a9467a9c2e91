"""Products of 65 rows and more: every tile and cuBLAS, where it serves, give the bits of one row.

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
ROWS = (65, 130) if INTERPRETED else (65, 96, 100, 128, 129, 192, 200, 256, 300, 512, 1024, 2048, 2144)
SMALL_SHAPES = [(192, 160)]
SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (5120, 17408), (1000, 576)]


def normal(*shape: int, seed: int, spread: float = 1.0) -> Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=DEVICE) * spread).to(DTYPE)


def assert_same(found: Tensor, expected: Tensor, case: object) -> None:
    if INTERPRETED:
        assert (found.double() - expected.double()).norm() < 2e-3 * expected.double().norm(), case
    else:
        assert torch.equal(found, expected), case


@pytest.mark.parametrize(("n", "k"), SMALL_SHAPES if INTERPRETED else SHAPES)
def test_a_row_has_the_same_bits_alone_and_in_a_large_batch(n: int, k: int) -> None:
    from onedraw.backends.torch.ops.cuda.linear import Tile, choose_tile, linear, shared_memory

    rows = [count for count in ROWS if count * n <= 2**28]
    x, weight = normal(rows[-1], k, seed=1), normal(n, k, seed=2, spread=k**-0.5)
    expected = linear(x, weight, tile=Tile(16, 64, 64, 4, 3))
    for count in rows:
        chosen = {choose_tile(count, width, k, DTYPE, shared_memory(DEVICE)) for width in (4096, 6144, 28672)}
        for tile in chosen if INTERPRETED else (None,):
            assert_same(linear(x[:count], weight, tile=tile), expected[:count], (count, tile))
            if not INTERPRETED and n != 28672:  # compiling takes most of the time
                continue
            gated = linear(x[:count], weight, gate=1, tile=tile)
            close = gated.double() - torch.nn.functional.silu(expected[:count, ::2].double()) * expected[:count, 1::2].double()
            assert close.norm() < 5e-3 * gated.double().norm(), (count, tile)


@pytest.mark.parametrize(("n", "k"), SMALL_SHAPES if INTERPRETED else SHAPES[:4])
def test_products_by_cublas_have_the_bits_of_the_kernel(n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from onedraw.backends.torch.ops.cuda import ops
    from onedraw.backends.torch.ops.cuda.linear import linear

    weight, bias = normal(n, k, seed=2, spread=k**-0.5), normal(n, seed=3)
    products = [ops.TritonLinear(weight, bias=None, pdl=False), ops.TritonLinear(weight, bias=bias, pdl=False)]
    gated = ops.TritonGated(products[0], "silu")
    if INTERPRETED:  # there is no cuBLAS, so only the parts are tested
        monkeypatch.setattr(ops, "WHOLE_ROWS", 96)
        for product in (*products, gated):
            product.library_rows = (34, 65, 96)
    monkeypatch.setattr(ops, "is_faster", lambda rows, weight: True)
    rows = [count for count in ROWS if INTERPRETED or count in (96, 128, 256, 1024, 2144)]
    x, residual = normal(rows[-1], k, seed=5), normal(rows[-1], n, seed=6)
    for count in rows:
        given, added = x[:count], residual[:count]
        for product in products:
            for more in (None, added):
                assert_same(product(given, more), linear(given, weight, bias=product.bias, residual=more), (count, product.bias))
        kernel = linear(given, gated._weight, gate=1)
        close = gated.gated(given).double() - kernel.double()
        assert close.norm() < 2e-3 * kernel.double().norm(), count
    wide = torch.cat([x, x], 1)[:, :k]  # rows that do not follow each other in memory
    assert_same(products[0](wide), linear(x, weight), "wide")


def test_cublas_is_compared_in_a_captured_graph_too() -> None:
    if INTERPRETED:
        pytest.skip("needs a CUDA device")
    from onedraw.backends.torch.ops.cuda import ops
    from onedraw.backends.torch.ops.cuda.linear import linear

    ops.TritonOps(DEVICE)
    for n, k in SHAPES[:5]:
        weight = normal(n, k, seed=2, spread=k**-0.5)
        product = ops.TritonLinear(weight, bias=None, pdl=False)
        for count in (96, 128, 192, 256):
            x = normal(count, k, seed=count)
            product(x)
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            with torch.cuda.graph(graph, stream=stream):
                y = product(x)
            x.copy_(normal(count, k, seed=count + 1))
            graph.replay()
            assert torch.equal(y, linear(x, weight)), (n, k, count)
