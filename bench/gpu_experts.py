"""Check and time the packed products of expert layers on a GPU. Weights are random.

    python -m bench.gpu_experts check | time | heights [--kinds GATE UP DOWN] [--rows …] [--limit SECONDS]

The shape is that of Qwen3.6-35B-A3B: 256 experts of width 512, hidden size 2,048, eight random experts for each row.
    check    expert products give the same bits as ordinary products with the same matrices
    time     median times of graph replays over several layers, so that no weight is cached: each product, the whole expert
             layer, and the bandwidth for the bytes of the selected experts, relative to a copy
    heights  the products with every tile height, as a basis for EXPERT_PAIRS in work_split.py
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

from bench.measuring import capture, device_ms
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
COPY_BYTES = 4.21e12  # bytes per second that a copy on an H200 reads and writes
HIDDEN, WIDTH, COUNT, USED = 2048, 512, 256, 8
LAYERS = 4  # layers per graph replay, whose weights exceed the GPU cache
ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096)


@dataclass(frozen=True, slots=True)
class Layer:
    gate_up: tuple[PackedWeight, ...]
    down: PackedWeight

    def bank(self, *, pdl: bool) -> PackedExpertBank:
        return PackedExpertBank(self.gate_up, self.down, "silu", pdl=pdl)


def stack(kind: str, rows: int, width: int, seed: int) -> PackedWeight:
    """Return the matrices of all experts. Every eighth is equal, but stored separately, so memory traffic is realistic."""
    found = empty_packed_weight(kind, rows=rows, width=width, device=DEVICE, count=COUNT)
    raw = torch.from_numpy(random_blocks(kind, 8 * rows, width, np.random.default_rng(seed), width**-0.5)).to(DEVICE)
    for number in range(0, COUNT, 8):
        fill_packed_weight(found, raw.view(8, rows, -1), first=0, number=number)
    compile_expert_kernels(kind, DEVICE)
    return found


def layer(kinds: tuple[str, str, str], seed: int = 0) -> Layer:
    gate, up, down = kinds
    if gate == up:
        first: tuple[PackedWeight, ...] = (stack(gate, 2 * WIDTH, HIDDEN, seed),)
    else:
        first = (stack(gate, WIDTH, HIDDEN, seed), stack(up, WIDTH, HIDDEN, seed + 1))
    return Layer(first, stack(down, HIDDEN, WIDTH, seed + 2))


def normal(rows: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randn(rows, width, generator=generator, device=DEVICE).bfloat16()


def random_routing(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return the expert ids and the routing weights of each row."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    ids = torch.rand(rows, COUNT, generator=generator, device=DEVICE).argsort(1)[:, :USED].contiguous()
    return ids, torch.rand(rows, USED, generator=generator, device=DEVICE)


def product(x: Tensor, part: PackedWeight, routes: Routes, *, divide: int, pdl: bool = False) -> Tensor:
    out = torch.full((len(routes.order), part.rows), torch.nan, dtype=x.dtype, device=DEVICE)
    return experts_product(pack_activations(x), part, routes, divide=divide, out=out, pdl=pdl)


def fitting_heights() -> list[int]:
    return [TILE_ROWS * tiles for tiles in EXPERT_BLOCKS if expert_tiles_fit(tiles, shared_memory(DEVICE))]


# ------------------------------------------------------------------ exactness


def check(kinds: tuple[str, str, str]) -> None:
    checked, workspace = layer(kinds), Workspace(DEVICE)
    for part, divide in ((checked.gate_up[0], USED), (checked.down, 1)):
        compile_kernels(part.kind, DEVICE)
        for rows in (1, 5, 64, 700):
            ids, weights = random_routing(rows, seed=rows)
            x = normal(rows * USED // divide, part.width, seed=1)
            experts = ids.sort(1).values.reshape(-1)  # expert of each (row, expert) pair; a row's experts are sorted
            pairs = torch.arange(rows * USED, device=DEVICE)
            expected = torch.empty(rows * USED, part.rows, dtype=x.dtype, device=DEVICE)
            for number in torch.unique(experts).tolist():
                selected = pairs[experts == number]
                alone = pack_activations(x[selected // divide])
                out = torch.empty(len(selected), part.rows, dtype=x.dtype, device=DEVICE)
                expected[selected] = packed_product(alone, part.matrix(number), out=out, workspace=workspace)
            for height in fitting_heights():
                found = product(x, part, route(ids, weights, count=COUNT, height=height), divide=divide)
                same = torch.equal(found, expected)
                print(
                    f"{part.kind} {part.rows}x{part.width}, {rows} rows, tiles of {height}: {'equal' if same else 'UNEQUAL'}",
                    flush=True,
                )


# ------------------------------------------------------------------ speed


def used_bytes(parts: Iterable[PackedWeight], ids: Tensor) -> int:
    """Return the bytes of the weights of all experts that at least one row uses."""
    return sum(gpu_packed_bytes((part.rows, part.width), part.kind) for part in parts) * len(torch.unique(ids))


def describe(name: str, us: float, size: int, flops: float) -> str:
    return f"{name} {us:7.1f} us, {size / COPY_BYTES * 1e6 / us:4.0%} of copy speed, {flops / us * 1e-6:6.1f} TFLOP/s"


def products_us(x: Tensor, layers: Sequence[Sequence[PackedWeight]], routes: Routes, *, divide: int, pdl: bool) -> float:
    """Return the microseconds of the products of one layer; packing the activations is not timed."""
    ready = pack_activations(x)
    outs = [torch.empty(len(routes.order), part.rows, dtype=x.dtype, device=DEVICE) for part in layers[0]]

    def work() -> None:
        for parts in layers:
            for part, out in zip(parts, outs, strict=True):
                experts_product(ready, part, routes, divide=divide, out=out, pdl=pdl)

    return device_ms(capture(work).replay, repeats=7) / len(layers) * 1e3


def timed(kinds: tuple[str, str, str], rows: Iterable[int], limit: float) -> None:
    start, layers = time.monotonic(), [layer(kinds, seed) for seed in range(LAYERS)]
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    banks = [one.bank(pdl=pdl) for one in layers]
    for count in rows:
        if time.monotonic() - start > limit:
            break
        ids, weights = random_routing(count)
        x, inner = normal(count, HIDDEN, seed=1), normal(count * USED, WIDTH, seed=2)
        routes = route(ids, weights, count=COUNT, height=tile_height(count * USED, COUNT, DEVICE))
        figures = []
        for name, activations, divide in (("gate and up", x, USED), ("down", inner, 1)):
            parts = [one.gate_up if divide == USED else (one.down,) for one in layers]
            us = products_us(activations, parts, routes, divide=divide, pdl=pdl)
            flops = 2.0 * count * USED * sum(part.rows * part.width for part in parts[0])
            figures.append(describe(name, us, used_bytes(parts[0], ids), flops))
        whole = device_ms(capture(partial(run_all, banks, x, ids, weights)).replay, repeats=7) / LAYERS * 1e3
        size = used_bytes((*layers[0].gate_up, layers[0].down), ids)
        figures.append(describe("whole layer", whole, size, 6.0 * count * USED * HIDDEN * WIDTH))
        print(f"{'/'.join(kinds)} {count:5d} rows, tiles of {routes.height:2d} | " + " | ".join(figures), flush=True)


def run_all(banks: list[PackedExpertBank], x: Tensor, ids: Tensor, weights: Tensor) -> None:
    for bank in banks:
        bank(x, ids, weights, 1.0)


def heights(kinds: tuple[str, str, str], rows: Iterable[int], limit: float) -> None:
    start, layers = time.monotonic(), [layer(kinds, seed) for seed in range(LAYERS)]
    for count in rows:
        if time.monotonic() - start > limit:
            break
        ids, weights = random_routing(count)
        x, parts = normal(count, HIDDEN, seed=1), [one.gate_up for one in layers]
        found = {
            height: products_us(x, parts, route(ids, weights, count=COUNT, height=height), divide=USED, pdl=False)
            for height in fitting_heights()
        }
        print(f"{kinds[0]} {count:5d} rows | " + ", ".join(f"{height}: {us:.1f} us" for height, us in found.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=("check", "time", "heights"))
    parser.add_argument(
        "--kinds", nargs=3, default=["Q4_K", "Q4_K", "Q6_K"], choices=list(SPAN_BYTES), metavar=("GATE", "UP", "DOWN")
    )
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    parser.add_argument("--limit", type=float, default=60, help="start no new measurement after this many seconds")
    parser.add_argument("--cache", type=Path, default=Path("build"), help="folder of compiled kernels")
    options = parser.parse_args()
    cache_in(options.cache)
    with torch.inference_mode():
        if options.section == "check":
            check(tuple(options.kinds))
        elif options.section == "time":
            timed(tuple(options.kinds), options.rows, options.limit)
        else:
            heights(tuple(options.kinds), options.rows, options.limit)


if __name__ == "__main__":
    main()
