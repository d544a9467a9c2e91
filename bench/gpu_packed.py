"""Products of packed weights on a GPU, next to what the memory allows. Blocks are random.

    python -m bench.gpu_packed check | compile | tune [--part I --parts N] [--json out.json]

check: bits and errors of every kind. tune: every tile of every kind and shape. compile: fills the compiler's cache with the
tiles of `tune`, for several processes at once. Times are medians of graph replays with cold weights.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.gpu_decode import captured, timed_ms
from onedraw.backends.packing import SPANS, span_bytes
from onedraw.backends.torch.kernels.blocks import Blocks, empty_blocks, fill_blocks, numbers
from onedraw.backends.torch.kernels.packed_linear import PackedTile, packed_product, unpacked_rows
from onedraw.backends.torch.kernels.triton_linear import linear, shared_memory
from onedraw.checkpoints.quants import KINDS
from onedraw.checkpoints.random_blocks import random_blocks

DEVICE = torch.device("cuda:0")
COPY_BYTES = 4.21e12  # per second: a copy on an H200, bytes read and written
COLD = 256 << 20  # bytes of weights that are read between two readings of one
FOUND: list[dict[str, Any]] = []

# (kind, outputs, inputs) of Qwen3.6-27B and Llama-8B as Q4_K_M
SHAPES = (
    ("Q4_K", 34816, 5120),
    ("Q4_K", 5120, 17408),
    ("Q4_K", 5120, 6144),
    ("Q4_K", 4096, 4096),
    ("Q4_K", 28672, 4096),
    ("Q5_K", 10240, 5120),
    ("Q6_K", 5120, 17408),
    ("Q6_K", 1024, 5120),
    ("Q6_K", 248320, 5120),
    ("Q8_0", 4096, 4096),
    ("Q8_0", 28672, 4096),
)
LOW = ((16, 1), (32, 1), (32, 2), (64, 4))  # columns, warps
MIDDLE = ((64, 64, 4), (32, 64, 4), (32, 32, 2))  # rows, columns, warps
WIDE = ((64, 64, 4), (64, 128, 8), (128, 64, 8))


def made(kind: str, n: int, k: int, seed: int = 0) -> Blocks:
    """A weight whose codes repeat every 64 rows."""
    few = n if n % 64 else 64
    raw = random_blocks(kind, few, k, np.random.default_rng(seed), k**-0.5)
    small = empty_blocks(kind, rows=few, width=k, device=DEVICE)
    fill_blocks(small, torch.from_numpy(raw).to(DEVICE), first=0)
    if few == n:
        return small
    times = n // few
    return Blocks(
        kind=kind,
        rows=n,
        width=k,
        codes=small.codes.repeat(1, 1, times, 1),
        high=small.high.repeat(1, 1, times, 1),
        scales=small.scales.repeat(1, 1, 1, times),
    )


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def product(x: Tensor, blocks: Blocks, tile: PackedTile | None = None) -> Tensor:
    out = torch.full((len(x), blocks.rows), torch.nan, dtype=x.dtype, device=x.device)
    return packed_product(x, blocks, out=out, tile=tile)


# ------------------------------------------------------------------ is it right?


def check(kinds: Iterable[str]) -> None:
    for kind in kinds:
        for n, k in ((1000, 1536), (4096, 4096), *(((576, 576),) if KINDS[kind].values == 32 else ())):
            blocks = made(kind, n, k)
            twin = numbers(blocks)
            same = torch.equal(unpacked_rows(blocks, None, out=torch.empty(n, k, device=DEVICE)), twin)
            for dtype in (torch.bfloat16, torch.float16) if kind == "Q4_K" else (torch.bfloat16,):
                x, weight = normal(2100, k, dtype=dtype, seed=1), twin.to(dtype)
                full = product(x, blocks)
                error = float((full.double() - x.double() @ twin.double().t()).norm() / full.double().norm())
                unequal = [
                    r for r in (1, 2, 5, 16, 17, 40, 64, 100, 200, 300, 2048) if not torch.equal(product(x[:r], blocks), full[:r])
                ]
                tiles = [PackedTile(16, 64, 4, 3), PackedTile(64, 32, 2, 2, split=True), PackedTile(8, 16, 1, 3)]
                unequal_tiles = [t for t in tiles if not torch.equal(product(x[:300], blocks, t), full[:300])]
                dense = float((linear(x, weight).double() - full.double()).norm() / full.double().norm())
                print(
                    f"{kind} {n}x{k} {str(dtype)[6:]}: weights {'equal' if same else 'UNEQUAL'}, error {error:.1e}, "
                    f"rows {unequal or 'equal'}, tiles {unequal_tiles or 'equal'}, dequantized {dense:.1e} off",
                    flush=True,
                )


# ------------------------------------------------------------------ how fast is it?


def tiles(rows: int, n: int = 0) -> list[PackedTile]:
    if rows <= 16:
        splits = (True, False) if n in (0, 10240, 5120, 34816, 28672) else (n <= 16384,)
        height = 8 if rows <= 8 else 16
        return [PackedTile(height, c, w, s, split=p) for (c, w), s, p in itertools.product(LOW, (2, 3, 4), splits)]
    if rows <= 64:
        return [PackedTile(r, c, w, s, split=n <= 16384) for (r, c, w), s in itertools.product(MIDDLE, (2, 3))]
    return [PackedTile(r, c, w, s, 8) for (r, c, w), s in itertools.product(WIDE, (2, 3))]


def fits(tile: PackedTile, kind: str) -> bool:
    return tile.shared(kind) <= 1.15 * shared_memory(DEVICE)  # the bound is loose; what does not launch is told


def compile_all(part: int, parts: int) -> None:
    kinds = dict.fromkeys(kind for kind, _, _ in SHAPES)
    work = [(kind, tile) for kind in kinds for rows in (1, 16, 64, 2048) for tile in tiles(rows) if fits(tile, kind)]
    x = normal(16, 2048)
    weights = {kind: made(kind, 1024, 2048) for kind in kinds}
    for kind, tile in work[part::parts]:
        attempt(x, weights[kind], tile)


def attempt(x: Tensor, blocks: Blocks, tile: PackedTile) -> Tensor | None:
    try:
        return product(x, blocks, tile)
    except Exception as error:  # a tile that does not launch is a finding
        print(f"{blocks.kind} {tile}: {type(error).__name__} {str(error)[:80]}", flush=True)
        return None


def cold_ms(x: Tensor, copies: list[Blocks], tile: PackedTile | None) -> float:
    out = torch.empty(len(x), copies[0].rows, dtype=x.dtype, device=DEVICE)
    graph = captured(lambda: [packed_product(x, blocks, out=out, tile=tile) for blocks in copies])
    return timed_ms(graph.replay, 9) / len(copies)


def tune(limit: float) -> None:
    began = time.monotonic()
    for rows, (kind, n, k) in itertools.product((1, 16, 2048, 64), SHAPES):
        if rows > 64 and (n > 100000 or kind in ("Q8_0", "Q4_0")):
            continue
        if time.monotonic() - began > limit:
            print("out of time", rows, kind, n, k)
            return
        size = span_bytes((n, k), kind)
        copies = [made(kind, n, k)] * 1
        copies += [
            Blocks(kind, n, k, b.codes.clone(), b.high.clone(), b.scales.clone())
            for b in copies * (COLD // size if rows <= 64 else 0)
        ]
        x, found = normal(rows, k), []
        for tile in tiles(rows, n):
            if fits(tile, kind) and attempt(x, copies[0], tile) is not None:
                found.append((cold_ms(x, copies, tile), tile))
        found.sort(key=lambda pair: pair[0])
        best, tile = found[0]
        floor = size / COPY_BYTES * 1e3
        rate = 2 * rows * n * k / best / 1e9
        FOUND.append({"kind": kind, "n": n, "k": k, "rows": rows, "found": [(ms, str(tile)) for ms, tile in found]})
        shown = " ".join(
            f"{t.rows}/{t.columns}/{t.warps}/{t.stages}{'s' if t.split else ''}:{ms * 1e3:.1f}" for ms, t in found[:4]
        )
        speed = f"{best * 1e3:.1f} us, {floor / best:.0%} of floor, {rate:.0f} TFLOP/s"
        print(f"{rows:5d} {kind} {n}x{k}: {speed} | {shown} | {found[-1][0] * 1e3:.0f}", flush=True)
        if rows >= 512:
            dense(kind, n, k, x, copies[0])


def dense(kind: str, n: int, k: int, x: Tensor, blocks: Blocks) -> None:
    """The other way for many rows: numbers first, then the library."""
    weight = torch.empty(n, k, dtype=x.dtype, device=DEVICE)
    first = timed_ms(lambda: unpacked_rows(blocks, None, out=weight), 9)
    then = timed_ms(lambda: x @ weight.t(), 9)
    own = timed_ms(lambda: linear(x, weight), 9)
    print(f"      unpack {first * 1e3:.0f} us, library {then * 1e3:.0f} us, Triton {own * 1e3:.0f} us", flush=True)
    FOUND.append({"kind": kind, "n": n, "k": k, "rows": len(x), "unpack": first, "library": then, "triton": own})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("section", choices=("check", "compile", "tune", "once"))
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", default=list(SPANS))
    parser.add_argument("--limit", type=float, default=120)
    parser.add_argument("--json")
    chosen = parser.parse_args()
    with torch.inference_mode():
        if chosen.section == "once":
            for rows, (kind, n, k) in itertools.product((1, 16, 2048), SHAPES[:2]):
                product(normal(rows, k), made(kind, n, k))
            return
        if chosen.section == "check":
            check(chosen.kinds)
        elif chosen.section == "compile":
            compile_all(chosen.part, chosen.parts)
        else:
            tune(chosen.limit)
    if chosen.json:
        with open(chosen.json, "w") as file:
            json.dump(FOUND, file)


if __name__ == "__main__":
    main()
