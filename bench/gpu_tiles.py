"""Which tiles are fastest on a GPU: products of a few rows, and one layer's attention. Weights and keys are random and cold.

    python -m bench.gpu_tiles SECTION ... [--check] [--part 0/4]

Sections: products (the matrices of the shapes, by rows), attention (one layer by keys per block and split, height, warps and
stages), profile (kernels of a tree's turn through the backend). With --check every tile is compiled and its bits compared, and
nothing is timed; --part takes one share of the work, so that several processes fill the compiler's cache.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu_decode import DEVICE, PAGE, TREE, TUNED, normal, replay_ms, say
from onedraw.backends.torch.ops.cuda import attention as attention_kernels
from onedraw.backends.torch.ops.cuda import attention_inputs
from onedraw.backends.torch.ops.cuda.attention import FIRST_SPLIT, attend
from onedraw.backends.torch.ops.cuda.attention_inputs import AttentionShape, stage_attention_inputs
from onedraw.backends.torch.ops.cuda.linear import Tile, choose_tile, linear, shared_memory
from onedraw.backends.torch.ops.plain.linear import RowRule
from onedraw.backends.torch.runner.inputs import InputLayout, Span, lay_out
from onedraw.types import Draft

CHECK = False
PART, PARTS = 0, 1
ROWS = (1, 16, 24, 32, 64)
GATED = {(28672, 4096), (34816, 5120)}

# ------------------------------------------------------------------ products


def candidates(rows: int, n: int) -> Iterator[Tile]:
    """Those that were among the fastest for some shape."""
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
    """Time with cold weights by rows: one row as it is chosen, then the fastest tiles."""
    shared, firsts = shared_memory(DEVICE), set()
    for n, k in TUNED[PART::PARTS]:
        copies = 1 if CHECK else max(2, int(400e6 // (2 * n * k)) + 1)
        weights = [normal(n, k, spread=k**-0.5) for _ in range(copies)]
        x, gate = normal(64, k), int((n, k) in GATED)
        expected = linear(x, weights[0], tile=Tile(16, 64, 64, 4, 3), gate=gate, pdl=True)
        for rows in ROWS:
            results = []
            chosen = choose_tile(rows, n, k, x.dtype, shared)
            for tile in dict.fromkeys([chosen, *candidates(rows, n)] if rows > 1 else [chosen]):
                if not _fits(tile):
                    continue
                if CHECK:
                    if (k, tile, gate) not in firsts or rows in (24,):
                        firsts.add((k, tile, gate))
                        same = torch.equal(linear(x[:rows], weights[0], tile=tile, gate=gate, pdl=True), expected[:rows])
                        say(f"{n} x {k}, {rows} rows, {tile}: equal", same) if not same else None
                    continue
                ms = replay_ms(partial(_products, x[:rows], weights, tile, gate), repeats=4)
                results.append((1000 * ms / copies, tile))
            if results:
                floor, now = 2 * n * k / 4.2e6, results[0][0]
                results.sort(key=lambda r: r[0])
                best = [(round(t, 1), _named(c)) for t, c in results[:5]]
                say(f"{n} x {k}, {rows} rows (floor {floor:.1f}), now, best", (round(now, 1), best))
        if CHECK:
            print(f"{n} x {k}: checked", flush=True)


def _named(tile: Tile) -> str:
    return f"{'T' if tile.swapped else ''}{tile.rows},{tile.columns},{tile.depth},{tile.warps},{tile.stages}"


def _products(x: Tensor, weights: list[Tensor], tile: Tile, gate: int) -> None:
    for weight in weights:
        linear(x, weight, tile=tile, gate=gate, pdl=True)


# ------------------------------------------------------------------ attention


@dataclass(frozen=True)
class Variant:
    keys: int
    split: int  # keys of the first splits
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
    """One layer: the tiles alone, with their merge; all heights of one (keys, split) have one and the same bits."""
    for heads, kv, dim in ((32, 8, 128), (24, 4, 256)):
        found: dict[tuple[str, int, int], Tensor] = {}
        stores = [[normal(1600 * kv, PAGE * dim) for _ in range(2)] for _ in range(1 if CHECK else 3)]
        for case, (start, count, drafts) in CASES.items():
            q = normal(count, heads * dim)
            listed = list(variants(dim, case))
            lines = []
            for variant in listed[PART::PARTS]:
                try:
                    launch, partly = _launch(heads, kv, dim, start, count, drafts, variant, q)
                    out = launch(*stores[0])
                    same = torch.equal(found.setdefault((case, variant.keys, variant.split), out), out)
                    if not same or not bool(out.isfinite().all()):
                        say(f"{heads}/{kv} x {dim}, {case}, {variant}: equal", same)
                    if CHECK:
                        continue
                    us = [
                        round(1000 * replay_ms(partial(_through, f, stores), repeats=5) / len(stores), 1)
                        for f in (launch, partly)
                    ]
                    lines.append((us[0], us[1], variant))
                except Exception as problem:  # a tile that does not fit
                    say(f"{heads}/{kv} x {dim}, {case}, {variant}", repr(problem)[:80])
            for us_all, part, v in sorted(lines, key=lambda line: line[0])[:14]:
                told = f"keys {v.keys} split {v.split} height {v.height} warps {v.warps} stages {v.stages}"
                print(f"{heads}/{kv}x{dim} {case}: {us_all} us, unmerged {part}: {told}", flush=True)


def _launch(
    heads: int, kv: int, dim: int, start: int, count: int, drafts: tuple[Draft, ...], v: Variant, q: Tensor
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    for module in (attention_kernels, attention_inputs):
        module.FIRST_SPLIT, module.block_keys = v.split, lambda _: v.keys  # type: ignore[attr-defined]
    AttentionShape.tile_heights = property(lambda self: (16, 32, 64, 128))  # type: ignore[method-assign, assignment]
    real, attention_inputs._tile_height = (
        attention_inputs._tile_height,
        lambda h, c, kind, splits: v.height if kind != attention_kernels.TREE_PATH else 16,
    )  # type: ignore[assignment]
    table = torch.randperm(1600, generator=torch.Generator().manual_seed(1)).tolist()
    layout = InputLayout(PAGE, (1600,), RowRule(floor=1))
    inputs = lay_out([0] * count, [Span(0, count, start, drafts)], [(table,)], layout=layout, device=DEVICE)
    device = stage_attention_inputs(inputs, AttentionShape(heads, kv, dim, None, 264))
    attention_inputs._tile_height = real
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv, "dim": dim, "scale": dim**-0.5, "pdl": True}
    plan = {16: (4, 3 if dim == 128 else 2)} | {v.height: (v.warps, v.stages)}
    work = partial(_attended, q, device.metadata, list(device.tile_sets), v, plan, sizes)
    return work, partial(work, merges=False)


class _Nothing:
    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *given, **named: None


def _attended(
    q: Tensor,
    metadata: Any,
    tile_sets: Any,
    v: Variant,
    plan: dict[int, tuple[int, int]],
    sizes: Any,
    *stores: Tensor,
    merges: bool = True,
) -> Tensor:
    attention_kernels._warps = lambda height, *_: plan.get(height, (4, 4))[0]  # type: ignore[assignment]
    attention_kernels._stages = lambda height, *_: plan.get(height, (4, 4))[1]  # type: ignore[assignment]
    attention_kernels.FIRST_SPLIT, attention_kernels.block_keys = v.split, lambda _: v.keys  # type: ignore[assignment]
    real = attention_kernels.merge_splits
    attention_kernels.merge_splits = real if merges else _Nothing()
    out = attend(q, *stores, metadata=metadata, tile_sets=tile_sets, **sizes)
    attention_kernels.merge_splits = real
    return out


def _through(launch: Callable[[Tensor, Tensor], Any], stores: list[list[Tensor]]) -> None:
    for keys, values in stores:
        launch(keys, values)


# ------------------------------------------------------------------ a whole turn


def profile() -> None:
    """Kernels of turns through the backend, by name: microseconds per turn."""
    from torch.profiler import ProfilerActivity

    from bench.gpu_backend import CHAIN, SAMPLED, Bench
    from bench.gpu_backend import TREE as DRAFTED

    for model in ("random:llama3-8b",):
        bench = Bench(model, "cuda:0", context=26_000, lanes=32, pages=4600)
        for name, rows in {
            "1 at 1K": [(1000, ())], "16 at 1K": [(1000, CHAIN)], "tree at 1K": [(1000, DRAFTED)],
            "32 at 1K": [(1000 + 3 * i, ()) for i in range(32)], "tree at 24K": [(24_000, DRAFTED)],
        }.items():  # fmt: skip
            plan = bench.plan(rows, SAMPLED)  # type: ignore[arg-type]
            bench.turn_ms(plan, repeats=8)
            with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as seen:
                bench.turn_ms(plan, repeats=10)
            spent: dict[str, list[float]] = defaultdict(list)
            for event in seen.events():
                if "CUDA" in str(event.device_type):
                    spent[event.name[:28]].append(event.device_time)
            for kernel, times in sorted(spent.items(), key=lambda item: -sum(item[1]))[:16]:
                print(f"{name}: {kernel:28s} {sum(times) / 10:8.1f} us, {len(times) // 10} launches", flush=True)


SECTIONS: dict[str, Callable[[], None]] = {"products": products, "attention": attention, "profile": profile}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", default=list(SECTIONS))
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--part", default="0/1")
    wishes = parser.parse_args()
    part, parts = (int(x) for x in wishes.part.split("/"))
    globals().update(CHECK=wishes.check, PART=part, PARTS=parts)
    torch.manual_seed(0)
    with torch.inference_mode():
        for section in wishes.sections:
            begin = time.perf_counter()
            SECTIONS[section]()
            print(f"-- {section}: {time.perf_counter() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
