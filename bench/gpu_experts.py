"""Packed experts on a GPU: their bits, and how fast they are next to what the memory allows. Blocks are random.

    python -m bench.gpu_experts check | time | heights [--kinds GATE UP DOWN] [--rows …] [--limit SECONDS]

The shape is that of Qwen3.6-35B-A3B: 256 experts of 512 between 2,048, eight for each row, which are drawn at random. check:
products of experts against the same matrices alone, bit by bit. time: medians of graph replays over several layers, so that
weights are cold: both products, the whole bank, and what share of a copy's speed the bytes of the chosen experts come at.
heights: the products with tiles of rows of every height, so that `EXPERT_PAIRS` in work_split.py can be chosen.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.gpu_decode import captured, timed_ms
from onedraw.backends.packing import SPAN_BYTES, gpu_packed_bytes
from onedraw.backends.torch.ops.cuda.experts import Routes, route
from onedraw.backends.torch.ops.cuda.linear import shared_memory
from onedraw.backends.torch.ops.cuda.nvrtc import cache_in
from onedraw.backends.torch.ops.cuda.packed.activations import pack_activations
from onedraw.backends.torch.ops.cuda.packed.few_rows import compile_expert_kernels, compile_kernels, experts_product, tile_height
from onedraw.backends.torch.ops.cuda.packed.linear import Workspace, packed_product
from onedraw.backends.torch.ops.cuda.packed.ops import PackedExpertBank
from onedraw.backends.torch.ops.cuda.packed.tensor_core_layout import PackedWeight, empty_packed_weight, fill_packed_weight
from onedraw.backends.torch.ops.cuda.packed.work_split import EXPERT_BLOCKS, TILE_ROWS, expert_tiles_fit
from onedraw.checkpoints.random_weights import random_blocks

DEVICE = torch.device("cuda:0")
COPY_BYTES = 4.21e12  # per second: a copy on an H200, bytes read and written
HIDDEN, WIDTH, COUNT, USED = 2048, 512, 256, 8
LAYERS = 4  # that one replay goes through: more bytes than any cache holds
ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096)


@dataclass(frozen=True, slots=True)
class Layer:
    gate_up: tuple[PackedWeight, ...]
    down: PackedWeight

    def bank(self, *, pdl: bool) -> PackedExpertBank:
        return PackedExpertBank(self.gate_up, self.down, "silu", pdl=pdl)


def stack(kind: str, rows: int, width: int, seed: int) -> PackedWeight:
    """Matrices of which every eighth is the same: their bytes are apart, so that changes nothing."""
    found = empty_packed_weight(kind, rows=rows, width=width, device=DEVICE, count=COUNT)
    raw = torch.from_numpy(random_blocks(kind, 8 * rows, width, np.random.default_rng(seed), width**-0.5)).to(DEVICE)
    for number in range(0, COUNT, 8):
        fill_packed_weight(found, raw.view(8, rows, -1), first=0, number=number)
    compile_expert_kernels(kind, DEVICE)
    return found


def layer(kinds: tuple[str, str, str], seed: int = 0) -> Layer:
    gate, up, down = kinds
    if gate == up:
        first = (stack(gate, 2 * WIDTH, HIDDEN, seed),)
    else:
        first = (stack(gate, WIDTH, HIDDEN, seed), stack(up, WIDTH, HIDDEN, seed + 1))
    return Layer(first, stack(down, HIDDEN, WIDTH, seed + 2))


def normal(rows: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randn(rows, width, generator=generator, device=DEVICE).bfloat16()


def chosen(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    ids = torch.rand(rows, COUNT, generator=generator, device=DEVICE).argsort(1)[:, :USED].contiguous()
    return ids, torch.rand(rows, USED, generator=generator, device=DEVICE)


def product(x: Tensor, part: PackedWeight, routes: Routes, *, divide: int, pdl: bool = False) -> Tensor:
    out = torch.full((len(routes.order), part.rows), torch.nan, dtype=x.dtype, device=DEVICE)
    return experts_product(pack_activations(x), part, routes, divide=divide, out=out, pdl=pdl)


def fitting_heights() -> list[int]:
    return [TILE_ROWS * tiles for tiles in EXPERT_BLOCKS if expert_tiles_fit(tiles, shared_memory(DEVICE))]


# ------------------------------------------------------------------ is it right?


def check(kinds: tuple[str, str, str]) -> None:
    made, workspace = layer(kinds), Workspace(DEVICE)
    for part, divide in ((made.gate_up[0], USED), (made.down, 1)):
        compile_kernels(part.kind, DEVICE)
        for rows in (1, 5, 64, 700):
            ids, weights = chosen(rows, seed=rows)
            x = normal(rows * USED // divide, part.width, seed=1)
            lowest = ids.sort(1).values.reshape(-1)  # of each pair
            asked = torch.arange(rows * USED, device=DEVICE)
            expected = torch.empty(rows * USED, part.rows, dtype=x.dtype, device=DEVICE)
            for number in lowest.unique().tolist():
                mine = asked[lowest == number]
                alone = pack_activations(x[mine // divide])
                room = torch.empty(len(mine), part.rows, dtype=x.dtype, device=DEVICE)
                expected[mine] = packed_product(alone, part.matrix(number), out=room, workspace=workspace)
            for height in fitting_heights():
                found = product(x, part, route(ids, weights, count=COUNT, height=height), divide=divide)
                same = torch.equal(found, expected)
                print(
                    f"{part.kind} {part.rows}x{part.width}, {rows} rows, tiles of {height}: {'equal' if same else 'UNEQUAL'}",
                    flush=True,
                )


# ------------------------------------------------------------------ how fast is it?


def chosen_bytes(parts: Iterable[PackedWeight], ids: Tensor) -> int:
    """Of the experts that somebody chose."""
    return sum(gpu_packed_bytes((part.rows, part.width), part.kind) for part in parts) * len(ids.unique())


def said(name: str, us: float, size: int, flops: float) -> str:
    return f"{name} {us:7.1f} us, {size / COPY_BYTES * 1e6 / us:4.0%} of a copy, {flops / us * 1e-6:6.1f} TFLOP/s"


def products_us(x: Tensor, layers: Sequence[Sequence[PackedWeight]], routes: Routes, *, divide: int, pdl: bool) -> float:
    """One layer's, of rows that are ready."""
    ready = pack_activations(x)
    outs = [torch.empty(len(routes.order), part.rows, dtype=x.dtype, device=DEVICE) for part in layers[0]]

    def work() -> None:
        for parts in layers:
            for part, out in zip(parts, outs, strict=True):
                experts_product(ready, part, routes, divide=divide, out=out, pdl=pdl)

    return timed_ms(captured(work).replay, 7) / len(layers) * 1e3


def timed(kinds: tuple[str, str, str], rows: Iterable[int], limit: float) -> None:
    began, layers = time.monotonic(), [layer(kinds, seed) for seed in range(LAYERS)]
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    banks = [made.bank(pdl=pdl) for made in layers]
    for count in rows:
        if time.monotonic() - began > limit:
            break
        ids, weights = chosen(count)
        x, between = normal(count, HIDDEN, seed=1), normal(count * USED, WIDTH, seed=2)
        routes = route(ids, weights, count=COUNT, height=tile_height(count * USED, COUNT, DEVICE))
        figures = []
        for name, given, divide in (("gate and up", x, USED), ("down", between, 1)):
            parts = [made.gate_up if divide == USED else (made.down,) for made in layers]
            us = products_us(given, parts, routes, divide=divide, pdl=pdl)
            flops = 2.0 * count * USED * sum(part.rows * part.width for part in parts[0])
            figures.append(said(name, us, chosen_bytes(parts[0], ids), flops))
        whole = timed_ms(captured(partial(run_all, banks, x, ids, weights)).replay, 7) / LAYERS * 1e3
        size = chosen_bytes((*layers[0].gate_up, layers[0].down), ids)
        figures.append(said("all of it", whole, size, 6.0 * count * USED * HIDDEN * WIDTH))
        print(f"{'/'.join(kinds)} {count:5d} rows, tiles of {routes.height:2d} | " + " | ".join(figures), flush=True)


def run_all(banks: list[PackedExpertBank], x: Tensor, ids: Tensor, weights: Tensor) -> None:
    for bank in banks:
        bank(x, ids, weights, 1.0)


def heights(kinds: tuple[str, str, str], rows: Iterable[int], limit: float) -> None:
    began, layers = time.monotonic(), [layer(kinds, seed) for seed in range(LAYERS)]
    for count in rows:
        if time.monotonic() - began > limit:
            break
        ids, weights = chosen(count)
        x, parts = normal(count, HIDDEN, seed=1), [made.gate_up for made in layers]
        found = {
            height: products_us(x, parts, route(ids, weights, count=COUNT, height=height), divide=USED, pdl=False)
            for height in fitting_heights()
        }
        print(f"{kinds[0]} {count:5d} rows | " + ", ".join(f"{height}: {us:.1f} us" for height, us in found.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("section", choices=("check", "time", "heights"))
    parser.add_argument(
        "--kinds", nargs=3, default=["Q4_K", "Q4_K", "Q6_K"], choices=list(SPAN_BYTES), metavar=("GATE", "UP", "DOWN")
    )
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    parser.add_argument("--limit", type=float, default=60)
    parser.add_argument("--cache", type=Path, default=Path("build"))
    given = parser.parse_args()
    cache_in(given.cache)
    with torch.inference_mode():
        if given.section == "check":
            check(tuple(given.kinds))
        elif given.section == "time":
            timed(tuple(given.kinds), given.rows, given.limit)
        else:
            heights(tuple(given.kinds), given.rows, given.limit)


if __name__ == "__main__":
    main()
