"""Products of packed weights with many rows on a GPU: their bits, and how fast they are. Blocks are random.

    python -m bench.gpu_wide probe | check | time | variants

check: every kind against float64, equal bits across numbers of rows, tiles and kernels. time: the shapes of Qwen3.6-27B at 2,048
and 8,192 rows, medians between events, and the library's product of the same shape beside them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from onedraw.backends.packing import SPANS
from onedraw.backends.torch.kernels import triton_wide, wide
from onedraw.backends.torch.kernels.blocks import empty_blocks, fill_blocks, numbers, opened_slowly
from onedraw.backends.torch.kernels.spans import Opened, prepare_rows, prepared_slowly, product_slowly
from onedraw.backends.torch.kernels.triton_wide import WideTile
from onedraw.checkpoints.random_blocks import random_blocks

DEVICE = torch.device("cuda:0")
SHAPES = ((34816, 5120), (5120, 17408), (16384, 5120), (5120, 6144))


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def made(kind: str, n: int, k: int, seed: int = 0) -> tuple[Opened, Tensor]:
    raw = random_blocks(kind, n, k, np.random.default_rng(seed), k**-0.5)
    blocks = empty_blocks(kind, rows=n, width=k, device=DEVICE)
    fill_blocks(blocks, torch.from_numpy(raw).to(DEVICE), first=0)
    return opened_slowly(blocks), numbers(blocks)


def check() -> None:
    for kind in SPANS:
        for n, k in ((200, 1536), (1000, 5120)):
            opened, weight = made(kind, n, k)
            for dtype in (torch.bfloat16, torch.float16):
                x, bias, residual = normal(2100, k, dtype=dtype, seed=1), normal(n, dtype=dtype), normal(2100, n, dtype=dtype)
                prepared = prepare_rows(x)
                same = [bool((a == b).all()) for a, b in zip(fields(prepared), fields(prepared_slowly(x)), strict=True)]
                full = wide.wide_product(prepared, opened, out=torch.full((2100, n), torch.nan, dtype=dtype, device=DEVICE))
                torch.cuda.synchronize()
                expected = x.double() @ weight.double().t()
                error = float((full.double() - expected).norm() / expected.norm())
                unequal = []
                for rows in (1, 65, 100, 300, 2048):
                    out = torch.full((rows, n), torch.nan, dtype=dtype, device=DEVICE)
                    if not torch.equal(wide.wide_product(prepare_rows(x[:rows]), opened, out=out), full[:rows]):
                        unequal.append(rows)
                tiles = []
                for tile in (WideTile(), WideTile(16, 32, 64, 1, 2), WideTile(64, 128, 32, 4, 2)):
                    out = torch.full((300, n), torch.nan, dtype=dtype, device=DEVICE)
                    if not torch.equal(
                        triton_wide.wide_product(prepared.rows(slice(0, 300)), opened, out=out, tile=tile), full[:300]
                    ):
                        tiles.append((tile, int((out != full[:300]).sum())))
                both = [
                    call(prepared, opened, out=torch.empty_like(full), bias=bias, residual=residual)
                    for call in (wide.wide_product, triton_wide.wide_product)
                ]
                after = torch.equal(both[0], (full + bias) + residual)
                print(
                    f"{kind} {n}x{k} {str(dtype)[6:]}: prepared {same}, error {error:.1e}, rows {unequal or 'equal'}, tiles "
                    f"{tiles or 'equal'}, bias and residual {after} {torch.equal(*both)}",
                    flush=True,
                )


def probe() -> None:
    """One span and one tile, the weights and the minima by themselves: where an error comes from."""
    for per in (1, 8):
        weights = torch.randint(-900, 900, (128, 256), device=DEVICE).half()
        minima = torch.randint(0, 63, (128, 1, 8), device=DEVICE).half() if per == 1 else None
        scales = torch.rand(128, per, device=DEVICE)
        prepared = prepare_rows(normal(128, 256))
        for name, opened in (
            ("weights", Opened(weights, scales)),
            ("minima", Opened(torch.zeros_like(weights), scales, minima, scales)),
            ("both", Opened(weights, scales, minima, scales)),
        ):
            found = wide.wide_product(prepared, opened, out=torch.full((128, 128), torch.nan, dtype=torch.float16, device=DEVICE))
            expected = product_slowly(prepared, opened)
            wrong = (found.double() - expected).abs() > 1e-2 * expected.abs().max()
            print(f"probe {per} {name}: {int(wrong.sum())} wrong, first {wrong.nonzero()[:3].tolist()}", flush=True)


def fields(prepared: object) -> list[Tensor]:
    return [prepared.x, prepared.factors, prepared.sums]  # type: ignore[attr-defined]


def timed(call: Callable[[], object], repeats: int = 7) -> float:
    """Milliseconds, median."""
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:])


def fast_opened(kind: str, n: int, k: int) -> Opened:
    """Random whole numbers: what comes out means nothing."""
    spans, per = k // 256, 1 if kind.endswith("_K") else 8
    weights = torch.randint(-900, 900, (n, k), device=DEVICE).half()
    scales = torch.rand(n, spans * per, device=DEVICE) * 1e-4
    minima = torch.randint(0, 63, (n, spans, 8), device=DEVICE).half() if kind in ("Q4_K", "Q5_K") else None
    return Opened(weights, scales, minima, scales.clone() if kind in ("Q4_K", "Q5_K", "Q4_1", "Q5_1") else None)


def time() -> None:
    for width in (5120, 17408):
        for rows in (1, 16, 2048, 8192):
            x = normal(rows, width)
            room = prepare_rows(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(20):
                    prepare_rows(x, out=room)
            print(f"prepare_rows {rows} x {width}: {timed(graph.replay) * 50:.2f} us", flush=True)
    for rows in (2048, 8192):
        for n, k in SHAPES:
            x, flops = normal(rows, k), 2 * rows * n * k
            out = torch.empty(rows, n, dtype=torch.bfloat16, device=DEVICE)
            line = f"{rows} rows {n}x{k}:"
            for kind in ("Q4_K", "Q6_K", "Q4_1", "Q8_0"):
                opened = fast_opened(kind, n, k)
                prepared = prepare_rows(x)
                ms = timed(partial(wide.wide_product, prepared, opened, out=out))
                line += f" {kind} {ms:.3f} ms {flops / ms / 1e9:.0f} TFLOP/s;"
            weight = opened.weights.to(torch.bfloat16)
            ms = timed(partial(torch.mm, x, weight.t(), out=out))
            line += f" library {flops / ms / 1e9:.0f};"
            print(line, flush=True)


def variants() -> None:
    """The kernel's own numbers, and the Triton kernel beside it, at 2,048 rows."""
    for n, k in ((34816, 5120), (5120, 17408)):
        x, flops = normal(2048, k), 2 * 2048 * n * k
        prepared, opened = prepare_rows(x), fast_opened("Q4_K", n, k)
        out = torch.empty(2048, n, dtype=torch.bfloat16, device=DEVICE)
        for stages, group in ((6, 16), (4, 16), (6, 8), (6, 4), (6, 32)):
            wide.STAGES[1], wide.GROUP = stages, group
            wide._kernel.cache_clear()
            ms = timed(partial(wide.wide_product, prepared, opened, out=out))
            print(f"{n}x{k} stages {stages} group {group}: {flops / ms / 1e9:.0f} TFLOP/s", flush=True)
        wide.STAGES[1], wide.GROUP = 6, 16
        wide._kernel.cache_clear()
        for tile in (WideTile(), WideTile(64, 128, 64, 8, 3), WideTile(128, 128, 64, 8, 3)):
            ms = timed(partial(triton_wide.wide_product, prepared, opened, out=out, tile=tile), 3)
            print(f"{n}x{k} triton {tile}: {flops / ms / 1e9:.0f} TFLOP/s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("probe", "check", "time", "variants"))
    {"probe": probe, "check": check, "time": time, "variants": variants}[parser.parse_args().part]()
