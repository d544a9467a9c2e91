"""Compare verify and tree steps with decode steps on a GPU: device time, time by kernel, and other tiles of products.

    python -m bench.gpu_trees SECTION ... [--model random:llama3-8b] [--small] [--part 0/3] [--json out.json]

Sections:
    steps    captured steps of a model through the backend, and their ratio to a decode step with one row
    kernels  time of the kernels in these steps
    tiles    tree steps with other tiles for products of 17 to 32 rows

--small uses few layers and repeats, and --part runs a share of the tiles, so that several processes can fill the compile cache.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.gpu_backend import CHAIN, SAMPLED, Bench
from bench.gpu_backend import TREE as TREE_DRAFTS
from bench.gpu_tiles import tile_name
from bench.measuring import report, write_figures
from onedraw.backends.torch.ops.cuda import linear
from onedraw.backends.torch.ops.cuda.linear import Tile
from onedraw.types import Draft

SMALL = False
PART, PARTS = 0, 1
REPLAYS = 8  # profiled replays of a step
CASES: dict[str, tuple[int, tuple[Draft, ...]]] = {
    "1 at 1K": (1000, ()),
    "16 at 1K": (1000, CHAIN),
    "tree at 1K": (1000, TREE_DRAFTS),
    "1 at 24K": (24_000, ()),
    "16 at 24K": (24_000, CHAIN),
    "tree at 24K": (24_000, TREE_DRAFTS),
}
TARGETS = {"16": 1.10, "tree": 1.15}  # largest ratio to a decode step with one row
# Tiles to try for products of 17 to 32 rows, by model and (outputs, inputs) of the matrix.
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


def _open(model: str) -> tuple[Bench, Any]:
    bench = Bench(model, "cuda:0", context=26_000, lanes=2, pages=3400, layers=4 if SMALL else None)
    assert bench.backend.graph_runner is not None
    return bench, bench.backend.graph_runner.graphs


def _forget_graphs(graphs: Any) -> None:
    """Capture every step again from now on. The earlier graphs are kept, since the new ones share their memory."""
    for signature in list(graphs._graphs):
        graphs._graphs["earlier", signature] = graphs._graphs.pop(signature)


def steps(model: str) -> None:
    _time_steps(_open(model)[0])


def _time_steps(bench: Bench) -> None:
    times = {}
    for case, row in CASES.items():
        bench.step_ms(bench.plan([row], SAMPLED), repeats=6)
        ms = times[case] = bench.replay_ms(repeats=5 if SMALL else 30)
        drafts, _, position = case.partition(" at ")
        if drafts == "1":
            report(f"{bench.name}: {case}, ms", ms)
            continue
        ratio, target = ms / times[f"1 at {position}"], TARGETS[drafts]
        verdict = "within target" if ratio <= target else "over target"
        report(f"{bench.name}: {case}, ms, ratio to one row (target {target})", [round(ms, 3), round(ratio, 3), verdict])


def tiles(model: str) -> None:
    """Time tree steps with another tile for one matrix at a time. The current tile is measured first and last, to show the
    noise. At the end all steps are timed with the fastest tiles."""
    if model not in TILES:
        raise SystemExit(f"no tiles to try for {model}; choose one of {', '.join(TILES)}")
    bench, graphs = _open(model)
    for shape, candidates in TILES[model].items():
        found, current = [], linear.SKINNY_TILES[shape]
        for tile in [current[1], *candidates[PART::PARTS], current[1]]:
            linear.SKINNY_TILES[shape] = (current[0], tile, current[2])
            linear.choose_tile.cache_clear()
            _forget_graphs(graphs)
            bench.step_ms(bench.plan([CASES["tree at 1K"]], SAMPLED), repeats=6)
            found.append((bench.replay_ms(repeats=5 if SMALL else 20), tile))
        times = [(round(ms, 3), tile_name(tile)) for ms, tile in found]
        report(f"{bench.name}: {shape}, tree at 1K, ms, current and other tiles", times)
        current_ms = max(found[0][0], found[-1][0])
        ms, best = min(found[1:-1], key=lambda one: one[0])
        linear.SKINNY_TILES[shape] = (current[0], best if ms < 0.999 * current_ms else current[1], current[2])
    linear.choose_tile.cache_clear()
    _forget_graphs(graphs)
    _time_steps(bench)


def kernels(model: str) -> None:
    """Report the microseconds of a step by kernel. A kernel may start before the previous one ends (programmatic dependent
    launch), so a kernel counts for the time by which it delays the end of the step."""
    from torch.profiler import ProfilerActivity, profile

    bench, _ = _open(model)
    for case, row in CASES.items():
        bench.step_ms(bench.plan([row], SAMPLED), repeats=7)
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            bench.replay_ms(repeats=REPLAYS)
        launches = sorted(
            (e.time_range.start, e.time_range.end, e.name) for e in profiled.events() if "CUDA" in str(e.device_type)
        )
        report(f"{bench.name}: {case}", "kernel < previous kernels, us per step, launches per step, us per launch")
        for key, took in sorted(_added_time(launches).items(), key=lambda item: -sum(item[1]))[:26]:
            share = sum(took) / REPLAYS
            print(f"    {key:64s} {share:9.1f} {len(took) / REPLAYS:6.1f} {sum(took) / len(took):8.2f}", flush=True)


def _added_time(kernels: list[tuple[float, float, str]]) -> dict[str, list[float]]:
    """Return by how much each launch delays the end, by its name and the names of the two previous kernels."""
    found: dict[str, list[float]] = {}
    names, reached = ["", ""], kernels[0][0]
    for _, end, name in kernels:
        found.setdefault(f"{name[:20]} < {names[-1][:20]} < {names[-2][:16]}", []).append(max(0.0, end - reached))
        names, reached = [names[-1], name], max(reached, end)
    return found


SECTIONS: dict[str, Callable[[str], None]] = {"steps": steps, "kernels": kernels, "tiles": tiles}
ALIASES = {"turns": "steps", "parts": "kernels"}  # earlier names of sections


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="+", choices=[*SECTIONS, *ALIASES], metavar="SECTION")
    parser.add_argument("--model", default="random:llama3-8b")
    parser.add_argument("--small", action="store_true", help="use few layers and repeats, to fill the compile cache")
    parser.add_argument("--part", default="0/1", help="share of the tiles to try, as INDEX/COUNT")
    parser.add_argument("--json")
    options = parser.parse_args()
    part, parts_ = (int(x) for x in options.part.split("/"))
    globals().update(SMALL=options.small, PART=part, PARTS=parts_)
    torch.manual_seed(0)
    for section in options.sections:
        begin = time.perf_counter()
        SECTIONS[ALIASES.get(section, section)](options.model)
        print(f"-- {section}: {time.perf_counter() - begin:.1f} s", flush=True)
    if options.json:
        write_figures(options.json)


if __name__ == "__main__":
    main()
