"""Find the fastest kernel tiles on a GPU for products of few rows and for attention. Weights and keys are random and uncached.

    python -m bench.gpu_tiles SECTION ... [--check] [--part 0/4]

Sections:
    products   the matrices of the two model shapes, by number of rows
    many_rows  the same for 65 rows and more, with cuBLAS beside the tiles
    attention  one layer, by keys per block, split size, tile height, warps and stages
    profile    times of the kernels in steps through the backend

With --check every tile is compiled and its bits compared, and nothing is timed. --part runs one share of the work, so that
several processes can fill the compile cache.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.measuring import replay_ms, report
from onedraw.backends.torch.ops.cuda import attention as attention_kernels
from onedraw.backends.torch.ops.cuda import attention_inputs
from onedraw.backends.torch.ops.cuda import ops as cuda_ops
from onedraw.backends.torch.ops.cuda.attention import FIRST_SPLIT, attend
from onedraw.backends.torch.ops.cuda.attention_inputs import AttentionShape, stage_attention_inputs
from onedraw.backends.torch.ops.cuda.cublas import multiply
from onedraw.backends.torch.ops.cuda.linear import Tile, choose_tile, linear, shared_memory
from onedraw.backends.torch.ops.cuda.ops import TritonGated, TritonLinear, TritonOps
from onedraw.backends.torch.ops.plain.linear import RowRule
from onedraw.backends.torch.runner.inputs import InputLayout, Span, lay_out
from onedraw.types import Draft

DEVICE = torch.device("cuda:0")
PAGE = 16
# (outputs, inputs) of the matrices of Llama-8B and Qwen3.6-27B
MATRICES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]
MATRICES += [(16480, 5120), (14336, 5120), (5120, 6144), (34816, 5120), (5120, 17408), (248320, 5120)]
TREE = tuple(Draft(1, -1 if i < 4 else (i - 4) // 2) for i in range(21))
CHECK = False
PART, PARTS = 0, 1
ROWS = (1, 16, 24, 32, 64)
GATED = {(28672, 4096), (34816, 5120)}


def normal(*shape: int, spread: float = 1.0) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) * spread


# ------------------------------------------------------------------ products


def candidates(rows: int, n: int) -> Iterator[Tile]:
    """Yield the tiles that were among the fastest for some shape."""
    if rows <= 16:
        for columns, depth, stages in ((64, 128, 5), (64, 128, 8), (64, 256, 5), (128, 128, 4)):
            yield Tile(16, columns, depth, 4, stages, swapped=True)
        yield Tile(16, 32, 512, 4, 4)
        yield Tile(16, 64, 256, 4, 4)
        return
    height = 32 if rows <= 32 else 64
    for columns, depth, warps, stages in (
        (64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 6), (64, 128, 4, 7), (64, 128, 4, 8), (64, 256, 4, 4),
        (128, 64, 4, 3), (128, 128, 4, 4), (128, 128, 8, 4),
    ):  # fmt: skip
        yield Tile(height, columns, depth, warps, stages, swapped=True)
    if rows > 32 and n <= 6144:
        yield Tile(64, 32, 256, 4, 4)
        yield Tile(64, 64, 128, 4, 5)


def _fits(tile: Tile) -> bool:
    buffers = tile.stages if (tile.columns if tile.swapped else tile.rows) >= 64 else tile.stages - 1
    return (tile.rows + tile.columns) * tile.depth * 2 * buffers <= 226 * 1024


def products() -> None:
    """Report the time of the tile that is in use and of the five fastest tiles, by matrix and number of rows."""
    shared, checked = shared_memory(DEVICE), set()
    for n, k in MATRICES[PART::PARTS]:
        copies = 1 if CHECK else max(2, int(400e6 // (2 * n * k)) + 1)
        weights = [normal(n, k, spread=k**-0.5) for _ in range(copies)]
        x, gate = normal(64, k), int((n, k) in GATED)
        expected = linear(x, weights[0], tile=Tile(16, 64, 64, 4, 3), gate=gate, pdl=True)
        for rows in ROWS:
            results = []
            in_use = choose_tile(rows, n, k, x.dtype, shared)
            for tile in dict.fromkeys([in_use, *candidates(rows, n)] if rows > 1 else [in_use]):
                if not _fits(tile):
                    continue
                if CHECK:
                    if (k, tile, gate) not in checked or rows in (24,):
                        checked.add((k, tile, gate))
                        same = torch.equal(linear(x[:rows], weights[0], tile=tile, gate=gate, pdl=True), expected[:rows])
                        report(f"{n} x {k}, {rows} rows, {tile}: equal", same) if not same else None
                    continue
                ms = replay_ms(partial(_multiply_all, x[:rows], weights, tile, gate), repeats=4)
                results.append((1000 * ms / copies, tile))
            if results:
                floor, current = 2 * n * k / 4.2e6, results[0][0]
                results.sort(key=lambda r: r[0])
                best = [(round(t, 1), tile_name(c)) for t, c in results[:5]]
                report(f"{n} x {k}, {rows} rows (floor {floor:.1f}), current, best, us", (round(current, 1), best))
        if CHECK:
            print(f"{n} x {k}: checked", flush=True)


def tile_name(tile: Tile) -> str:
    return f"{'T' if tile.swapped else ''}{tile.rows},{tile.columns},{tile.depth},{tile.warps},{tile.stages}"


def _multiply_all(x: Tensor, weights: list[Tensor], tile: Tile, gate: int) -> None:
    for weight in weights:
        linear(x, weight, tile=tile, gate=gate, pdl=True)


# ------------------------------------------------------------------ products of many rows


FUSED = {(4096, 4096): "residual", (28672, 4096): "gate", (4096, 14336): "residual", (2048, 4096): "residual"}
MANY = [*MATRICES[:5], (12352, 2048), (2048, 4096), (37888, 3584), (5120, 17408)]
CHECKED_ROWS = (65, 96, 128, 192, 256, 512)


def _wide(rows: int, columns: int, depth: int, warps: int, stages: int, group: int = 1, *, swapped: bool = False) -> Tile:
    return Tile(rows, columns, depth, warps, stages, group=group, swapped=swapped)


_turned = partial(_wide, swapped=True)
MANY_TILES = {
    128: [
        _wide(64, 64, 64, 4, 4, 8),  # for comparison: one tile for every shape
        _turned(64, 64, 128, 4, 6), _turned(64, 64, 128, 4, 3), _turned(128, 64, 128, 8, 4), _turned(128, 64, 128, 4, 4),
        _turned(128, 128, 128, 8, 3), _turned(128, 128, 64, 4, 4), _wide(128, 64, 64, 4, 6), _turned(128, 128, 64, 8, 5),
    ],
    256: [
        _wide(128, 64, 64, 4, 4, 8), _wide(128, 64, 128, 8, 4, 2), _turned(128, 64, 128, 4, 4, 2), _turned(64, 64, 128, 4, 3, 4),
        _wide(128, 128, 64, 8, 4, 8), _wide(128, 128, 64, 4, 4, 8), _turned(128, 128, 128, 8, 3, 2), _turned(256, 64, 64, 4, 4),
        _turned(256, 128, 64, 8, 3), _wide(128, 256, 64, 8, 3, 8), _wide(128, 64, 128, 4, 4, 2),
    ],
    512: [
        _wide(128, 128, 64, 8, 4, 8), _wide(128, 256, 64, 8, 3, 8), _wide(128, 256, 64, 8, 4, 8), _turned(256, 128, 64, 8, 3, 2),
    ],
}  # fmt: skip


def many_rows() -> None:
    """With --check, compare every tile and cuBLAS with one row alone; else report times with residual or activation, in us."""
    TritonOps(DEVICE)  # cuBLAS adds partial sums in float32 only
    shapes = [shape for shape in MANY if not CHECK or shape in MATRICES]
    jobs = [(shape, tiles) for shape in shapes for tiles in MANY_TILES.items()]
    if CHECK:
        jobs = [(shape, (rows, [tile])) for shape, (rows, tiles) in jobs for tile in tiles]
    compared = different = 0
    for (n, k), (rows, tiles) in jobs[PART::PARTS]:
        for case, wrong in _check_many(n, k, tiles) if CHECK else ():
            compared, different = compared + 1, different + wrong
            report(f"{n} x {k}, {case}: differs", wrong) if wrong else None
        if not CHECK:
            _time_many(n, k, rows, tiles)
    if CHECK:
        print(f"many rows: {compared} compared, {different} differ", flush=True)


def _check_many(n: int, k: int, tiles: list[Tile]) -> Iterator[tuple[str, bool]]:
    """Every comparison and whether it found a difference."""
    gate, weight = FUSED.get((n, k)) == "gate", normal(n, k, spread=k**-0.5)
    x = normal(max(CHECKED_ROWS), k)
    one = choose_tile(1, n, k, x.dtype, shared_memory(DEVICE))
    alone = linear(x, weight, tile=one)
    for row in (0, 64, 300, 511):
        yield f"row {row} alone", not torch.equal(linear(x[row : row + 1], weight), alone[row : row + 1])
    product = TritonLinear(weight, bias=None, pdl=True)
    activated = linear(x, weight, tile=one, gate=1)
    for rows in CHECKED_ROWS:
        for tile in list(tiles):
            try:
                linear(x[:rows], weight, tile=tile)
            except Exception as problem:  # the tile needs more shared memory or registers than the GPU has
                report(f"{n} x {k}, {tile_name(tile)}", repr(problem)[:80])
                tiles.remove(tile)
                continue
            yield f"{rows} rows, {tile_name(tile)}", not torch.equal(linear(x[:rows], weight, tile=tile), alone[:rows])
            if gate:
                found = linear(x[:rows], weight, tile=tile, gate=1)
                yield f"{rows} rows, {tile_name(tile)}, activated", not torch.equal(found, activated[:rows])
        yield f"{rows} rows, in use", not torch.equal(product(x[:rows]), alone[:rows])
        if rows in product.library_rows:
            yield f"{rows} rows, cuBLAS", not torch.equal(multiply(x[:rows], weight), alone[:rows])


def _time_many(n: int, k: int, rows: int, tiles: list[Tile]) -> None:
    fused, copies = FUSED.get((n, k)), max(2, int(400e6 // (2 * n * k)) + 1)
    weights = [normal(n, k, spread=k**-0.5) for _ in range(copies)]
    x, residual = normal(rows, k), normal(rows, n) if fused == "residual" else None
    gate, agrees = int(fused == "gate"), TritonLinear(weights[0], bias=None, pdl=True)

    def us(work: Callable[[Tensor], Any]) -> float:
        return round(1000 * replay_ms(lambda: [work(weight) for weight in weights], repeats=4) / copies, 1)

    def by_products(**patches: Any) -> float:
        """With the products of a model, whose activations and residuals may be kernels of their own."""
        products = [TritonLinear(weight, bias=None, pdl=True) for weight in weights]
        if gate:
            products = [TritonGated(product, "silu") for product in products]
        calls = [one.gated if isinstance(one, TritonGated) else partial(one, residual=residual) for one in products]
        with mock.patch.multiple(cuda_ops, **patches) if patches else nullcontext():
            return round(1000 * replay_ms(lambda: [call(x) for call in calls], repeats=4) / copies, 1)

    times = {
        "in use": by_products(),
        "cuBLAS alone": us(lambda weight: multiply(x, weight)),
        f"cuBLAS where equal ({rows in agrees.library_rows})": by_products(is_faster=lambda *_, **__: True),
    }
    found = [(us(partial(linear, x, tile=tile, residual=residual, gate=gate, pdl=True)), tile_name(tile)) for tile in tiles]
    report(f"{n} x {k}, {rows} rows (floor {2 * n * k / 4.2e6:.1f}), {fused or 'plain'}", times)
    print(f"    first tile {found[0]}, sorted {sorted(found)}", flush=True)


# ------------------------------------------------------------------ attention


@dataclass(frozen=True)
class Variant:
    keys: int
    split: int  # keys per split
    height: int
    warps: int
    stages: int


CASES: dict[str, tuple[int, int, tuple[Draft, ...]]] = {
    "1 at 1K": (1000, 1, ()),
    "1 at 24K": (24_000, 1, ()),
    "16 at 1K": (1000, 16, ()),
    "16 at 24K": (24_000, 16, ()),
    "tree at 1K": (1000, 22, TREE),
    "tree at 24K": (24_000, 22, TREE),
}


def variants(dim: int, case: str) -> Iterator[Variant]:
    if dim == 128:
        low = [(64, 16, 4, 3), (64, 16, 4, 4)]
        middle = [(64, 64, 4, 2), (64, 64, 4, 3)]
        high = [(64, 128, 8, 3), (64, 128, 8, 4), (64, 64, 4, 3)]
    else:
        low = [(32, 16, 4, 3), (32, 16, 4, 4)]
        middle = [(32, 128, 8, 3), (32, 128, 8, 4), (32, 64, 4, 2)]
        high = middle
    shapes = low if case.startswith("1 ") else middle if case.startswith("16") else high
    for keys, height, warps, stages in shapes:
        for split in (FIRST_SPLIT, 64, 256):
            yield Variant(keys, split, height, warps, stages)


def attention() -> None:
    """Time the attention of one layer with and without the merge of splits. Keys and split decide the bits, the tile does not."""
    for heads, kv, dim in ((32, 8, 128), (24, 4, 256)):
        found: dict[tuple[str, int, int], Tensor] = {}
        stores = [[normal(1600 * kv, PAGE * dim) for _ in range(2)] for _ in range(1 if CHECK else 3)]
        for case, (start, count, drafts) in CASES.items():
            q = normal(count, heads * dim)
            lines = []
            for variant in list(variants(dim, case))[PART::PARTS]:
                try:
                    launch, launch_unmerged = _launch(heads, kv, dim, start, count, drafts, variant, q)
                    out = launch(*stores[0])
                    same = torch.equal(found.setdefault((case, variant.keys, variant.split), out), out)
                    if not same or not bool(out.isfinite().all()):
                        report(f"{heads}/{kv} x {dim}, {case}, {variant}: equal", same)
                    if CHECK:
                        continue
                    us = [
                        round(1000 * replay_ms(partial(_run_on_all, f, stores), repeats=5) / len(stores), 1)
                        for f in (launch, launch_unmerged)
                    ]
                    lines.append((us[0], us[1], variant))
                except Exception as problem:  # the tile needs more shared memory or registers than the GPU has
                    report(f"{heads}/{kv} x {dim}, {case}, {variant}", repr(problem)[:80])
            for merged, unmerged, v in sorted(lines, key=lambda line: line[0])[:14]:
                settings = f"keys {v.keys} split {v.split} height {v.height} warps {v.warps} stages {v.stages}"
                print(f"{heads}/{kv}x{dim} {case}: {merged} us, unmerged {unmerged}: {settings}", flush=True)


def _launch(
    heads: int, kv: int, dim: int, start: int, count: int, drafts: tuple[Draft, ...], v: Variant, q: Tensor
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return calls of one layer's attention with the kernel settings of a variant: with and without the merge of splits."""
    for module in (attention_kernels, attention_inputs):
        module.FIRST_SPLIT, module.block_keys = v.split, lambda _: v.keys  # type: ignore[attr-defined]
    AttentionShape.tile_heights = property(lambda self: (16, 32, 64, 128))  # type: ignore[method-assign, assignment]
    real, attention_inputs._tile_height = (
        attention_inputs._tile_height,
        lambda shape, count, kind, splits: v.height if kind != attention_kernels.TREE_PATH else 16,
    )
    table = torch.randperm(1600, generator=torch.Generator().manual_seed(1)).tolist()
    layout = InputLayout(PAGE, (1600,), RowRule(floor=1))
    inputs = lay_out([0] * count, [Span(0, count, start, drafts)], [(table,)], layout=layout, device=DEVICE)
    device = stage_attention_inputs(inputs, AttentionShape(heads, kv, dim, None, 264))
    attention_inputs._tile_height = real
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv, "dim": dim, "scale": dim**-0.5, "pdl": True}
    plan = {16: (4, 3 if dim == 128 else 2)} | {v.height: (v.warps, v.stages)}
    work = partial(_attend, q, device.metadata, list(device.tile_sets), v, plan, sizes)
    return work, partial(work, merges=False)


class _NoLaunch:
    """Takes the place of a Triton kernel and launches nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def _attend(
    q: Tensor,
    metadata: Any,
    tile_sets: Any,
    v: Variant,
    plan: dict[int, tuple[int, int]],
    sizes: Any,
    *stores: Tensor,
    merges: bool = True,
) -> Tensor:
    attention_kernels._warps = lambda height, *_: plan.get(height, (4, 4))[0]
    attention_kernels._stages = lambda height, *_: plan.get(height, (4, 4))[1]
    attention_kernels.FIRST_SPLIT, attention_kernels.block_keys = v.split, lambda _: v.keys  # type: ignore[assignment]
    with nullcontext() if merges else mock.patch.object(attention_kernels, "merge_splits", _NoLaunch()):
        return attend(q, *stores, metadata=metadata, tile_sets=tile_sets, **sizes)


def _run_on_all(launch: Callable[[Tensor, Tensor], Any], stores: list[list[Tensor]]) -> None:
    for keys, values in stores:
        launch(keys, values)


# ------------------------------------------------------------------ a whole step


def profile() -> None:
    """Profile steps through the backend: microseconds per step of each kernel."""
    from torch.profiler import ProfilerActivity

    from bench.gpu_backend import CHAIN, SAMPLED, Bench
    from bench.gpu_backend import TREE as TREE_DRAFTS

    for model in ("random:llama3-8b",):
        bench = Bench(model, "cuda:0", context=26_000, lanes=32, pages=4600)
        for name, rows in {
            "1 at 1K": [(1000, ())], "16 at 1K": [(1000, CHAIN)], "tree at 1K": [(1000, TREE_DRAFTS)],
            "32 at 1K": [(1000 + 3 * i, ()) for i in range(32)], "tree at 24K": [(24_000, TREE_DRAFTS)],
        }.items():  # fmt: skip
            plan = bench.plan(rows, SAMPLED)  # type: ignore[arg-type]
            bench.step_ms(plan, repeats=8)
            with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiled:
                bench.step_ms(plan, repeats=10)
            spent: dict[str, list[float]] = defaultdict(list)
            for event in profiled.events():
                if "CUDA" in str(event.device_type):
                    spent[event.name[:28]].append(event.device_time)
            for kernel, times in sorted(spent.items(), key=lambda item: -sum(item[1]))[:16]:
                print(f"{name}: {kernel:28s} {sum(times) / 10:8.1f} us, {len(times) // 10} launches", flush=True)


SECTIONS: dict[str, Callable[[], None]] = {
    "products": products,
    "many_rows": many_rows,
    "attention": attention,
    "profile": profile,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), choices=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--check", action="store_true", help="compile every tile and compare its bits, but time nothing")
    parser.add_argument("--part", default="0/1", help="share of the work, as INDEX/COUNT")
    options = parser.parse_args()
    part, parts = (int(x) for x in options.part.split("/"))
    globals().update(CHECK=options.check, PART=part, PARTS=parts)
    torch.manual_seed(0)
    with torch.inference_mode():
        for section in options.sections:
            begin = time.perf_counter()
            SECTIONS[section]()
            print(f"-- {section}: {time.perf_counter() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
