"""Drafted turns on a GPU next to turns of one row: milliseconds on the device, by kernels, and with other tiles of products.

    python -m bench.gpu_trees SECTION ... [--model random:llama3-8b] [--small] [--part 0/3] [--json out.json]

Sections: turns (recorded turns of one model through the backend, and what they are to a turn of one row), parts (where the time
of such a turn goes), tiles (turns with one product's tile exchanged, for products of 17 to 32 rows). With --small a few layers,
few repeats, and with --part a share of the tiles: so several processes fill the compiler's cache.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu_backend import CHAIN, SAMPLED, Bench
from bench.gpu_backend import TREE as TREE_DRAFTS
from onedraw.backends.torch.ops.cuda import linear
from onedraw.backends.torch.ops.cuda.linear import Tile
from onedraw.types import Draft

SMALL = False
PART, PARTS = 0, 1
FOUND: dict[str, Any] = {}
REPLAYS = 8  # of a turn whose kernels are told
CASES: dict[str, tuple[int, tuple[Draft, ...]]] = {
    "1 at 1K": (1000, ()),
    "16 at 1K": (1000, CHAIN),
    "tree at 1K": (1000, TREE_DRAFTS),
    "1 at 24K": (24_000, ()),
    "16 at 24K": (24_000, CHAIN),
    "tree at 24K": (24_000, TREE_DRAFTS),
}
ASKED = {"16": 1.10, "tree": 1.15}  # times a turn of one row
# By model, outputs and inputs: tiles of products of 17 to 32 rows.
TILES: dict[str, dict[tuple[int, int], list[Tile]]] = {
    "random:llama3-8b": {
        (4096, 14336): [
            Tile(32, 64, 256, 4, 4, swapped=True), Tile(32, 64, 256, 8, 4, swapped=True), Tile(32, 64, 128, 8, 7, swapped=True),
            Tile(32, 32, 256, 4, 4), Tile(32, 32, 512, 4, 3), Tile(32, 32, 256, 4, 5),
        ],
        (28672, 4096): [
            Tile(32, 64, 128, 4, 3, swapped=True), Tile(32, 128, 64, 4, 3, swapped=True), Tile(32, 128, 128, 8, 3, swapped=True),
            Tile(32, 64, 256, 4, 2, swapped=True), Tile(32, 128, 64, 4, 4, swapped=True),
        ],
        (6144, 4096): [Tile(32, 64, 256, 4, 4, swapped=True), Tile(32, 32, 256, 4, 4), Tile(32, 64, 128, 4, 4, swapped=True)],
    },
    "random:qwen3.6-27b": {
        (5120, 17408): [
            Tile(32, 64, 256, 4, 4, swapped=True), Tile(32, 64, 256, 8, 4, swapped=True), Tile(32, 64, 128, 8, 7, swapped=True),
            Tile(32, 32, 256, 4, 4), Tile(32, 32, 512, 4, 3), Tile(32, 32, 256, 4, 5),
        ],
        (34816, 5120): [
            Tile(32, 128, 128, 8, 3, swapped=True), Tile(32, 64, 128, 4, 4, swapped=True), Tile(32, 64, 128, 4, 3, swapped=True),
            Tile(32, 128, 64, 4, 4, swapped=True), Tile(32, 128, 128, 4, 4, swapped=True),
        ],
        (5120, 6144): [Tile(32, 64, 256, 4, 4, swapped=True), Tile(32, 32, 256, 4, 4), Tile(32, 32, 512, 4, 3)],
        (16480, 5120): [Tile(32, 64, 128, 4, 4, swapped=True), Tile(32, 64, 128, 4, 3, swapped=True)],
    },
}  # fmt: skip


def say(name: str, value: Any) -> None:
    FOUND[name] = value
    print(f"{name:74s} {f'{value:.4g}' if isinstance(value, float) else value}", flush=True)


def _bench(model: str) -> tuple[Bench, Any]:
    bench = Bench(model, "cuda:0", context=26_000, lanes=2, pages=3400, layers=4 if SMALL else None)
    assert bench.backend.graph_runner is not None
    return bench, bench.backend.graph_runner.graphs


def _again(recorder: Any) -> None:
    """Turns are recorded anew from here on. Those of before look the same, and are kept: they share their memory."""
    for signature in list(recorder._graphs):
        recorder._graphs["before", signature] = recorder._graphs.pop(signature)


def turns(model: str) -> None:
    _turns(_bench(model)[0])


def _turns(bench: Bench) -> None:
    times = {}
    for case, row in CASES.items():
        bench.turn_ms(bench.plan([row], SAMPLED), repeats=6)
        ms = times[case] = bench.replay_ms(repeats=5 if SMALL else 30)
        drafts, _, place = case.partition(" at ")
        if drafts == "1":
            say(f"{bench.name}: {case}, ms", ms)
            continue
        ratio, asked = ms / times[f"1 at {place}"], ASKED[drafts]
        verdict = "met" if ratio <= asked else "missed"
        say(f"{bench.name}: {case}, ms, x one row, {asked} asked", [round(ms, 3), round(ratio, 3), verdict])


def tiles(model: str) -> None:
    """A tree's turn with one product's tile exchanged; today's before and behind them says how much to believe. Then all turns
    with the fastest of all of them."""
    if model not in TILES:
        raise SystemExit(f"tiles are known for {', '.join(TILES)}")
    bench, recorder = _bench(model)
    for shape, candidates in TILES[model].items():
        found, kept = [], linear.SKINNY_TILES[shape]
        for tile in [kept[1], *candidates[PART::PARTS], kept[1]]:
            linear.SKINNY_TILES[shape] = (kept[0], tile, kept[2])
            linear.choose_tile.cache_clear()
            _again(recorder)
            bench.turn_ms(bench.plan([CASES["tree at 1K"]], SAMPLED), repeats=6)
            found.append((bench.replay_ms(repeats=5 if SMALL else 20), tile))
        told = [(round(ms, 3), _named(tile)) for ms, tile in found]
        say(f"{bench.name}: {shape}, tree at 1K, ms, now and others", told)
        now = max(found[0][0], found[-1][0])
        ms, best = min(found[1:-1], key=lambda one: one[0])
        linear.SKINNY_TILES[shape] = (kept[0], best if ms < 0.999 * now else kept[1], kept[2])
    linear.choose_tile.cache_clear()
    _again(recorder)
    _turns(bench)


def _named(tile: Tile) -> str:
    return f"{'T' if tile.swapped else ''}{tile.rows},{tile.columns},{tile.depth},{tile.warps},{tile.stages}"


def parts(model: str) -> None:
    """Microseconds of a turn by kernels: where a drafted turn's time goes that a turn of one row does not take. Kernels start
    before those in front of them end, so what a kernel took is by how much it moved the end of the turn."""
    from torch.profiler import ProfilerActivity, profile

    bench, _ = _bench(model)
    for case, row in CASES.items():
        bench.turn_ms(bench.plan([row], SAMPLED), repeats=7)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            bench.replay_ms(repeats=REPLAYS)
        kernels = sorted((e.time_range.start, e.time_range.end, e.name) for e in seen.events() if "CUDA" in str(e.device_type))
        say(f"{bench.name}: {case}", "kernel behind a kernel, us a turn, launches, us each")
        for key, took in sorted(_moved(kernels).items(), key=lambda item: -sum(item[1]))[:26]:
            share = sum(took) / REPLAYS
            print(f"    {key:64s} {share:9.1f} {len(took) / REPLAYS:6.1f} {sum(took) / len(took):8.2f}", flush=True)


def _moved(kernels: list[tuple[float, float, str]]) -> dict[str, list[float]]:
    """By how much each moved the end, by its name and the two before it."""
    found: dict[str, list[float]] = {}
    names, reached = ["", ""], kernels[0][0]
    for _, end, name in kernels:
        found.setdefault(f"{name[:20]} < {names[-1][:20]} < {names[-2][:16]}", []).append(max(0.0, end - reached))
        names, reached = [names[-1], name], max(reached, end)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="+", choices=("turns", "parts", "tiles"))
    parser.add_argument("--model", default="random:llama3-8b")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--part", default="0/1", help="of the tiles")
    parser.add_argument("--json")
    wishes = parser.parse_args()
    part, parts_ = (int(x) for x in wishes.part.split("/"))
    globals().update(SMALL=wishes.small, PART=part, PARTS=parts_)
    torch.manual_seed(0)
    sections: dict[str, Callable[[], None]] = {
        "turns": partial(turns, wishes.model),
        "parts": partial(parts, wishes.model),
        "tiles": partial(tiles, wishes.model),
    }
    for section in wishes.sections:
        begin = time.perf_counter()
        sections[section]()
        print(f"-- {section}: {time.perf_counter() - begin:.1f} s", flush=True)
    if wishes.json:
        Path(wishes.json).write_text(json.dumps(FOUND, indent=1, default=str))


if __name__ == "__main__":
    main()
