"""Which forms of the kernels make drafted turns fastest on a GPU: attention of one layer, delta steps, and whole turns.

    python -m bench.gpu_trees SECTION ... [--model random:llama3-8b] [--small] [--part 0/3] [--json out.json]

Sections: check (every form has the bits of today's: attention of both shapes, delta steps), kernels (microseconds of one layer's
attention, of what the nodes of a tree share in it, and of the delta steps), turns (recorded turns of one model through the
backend, milliseconds on the device, and what they are to a turn of one row), parts (kernels of such turns by name). With --small
a few layers, few repeats, and with --part a share of the forms: so several processes fill the compiler's cache. The last lines of
a section say which form wins where. Forms are those of `kernels/forms.py`.
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
from torch import Tensor

from bench.gpu_backend import CHAIN, SAMPLED, Bench
from bench.gpu_backend import TREE as TREE_DRAFTS
from bench.gpu_decode import DEVICE, PAGE, normal, replay_ms
from onedraw.backends.torch.feed import Direct
from onedraw.backends.torch.inputs import Shape, Span, lay_out
from onedraw.backends.torch.kernels import triton_delta as delta
from onedraw.backends.torch.kernels.forms import TODAY, Forms
from onedraw.backends.torch.kernels.recurrence import _Paths, _walk
from onedraw.backends.torch.kernels.triton_attention import SHARED, attend
from onedraw.backends.torch.kernels.triton_delta_steps import steps as step_by_step
from onedraw.backends.torch.kernels.triton_strands import strands as side_by_side
from onedraw.backends.torch.kernels.views import Heads, to_view
from onedraw.backends.torch.layers.linear import RowRule
from onedraw.backends.torch.runs import Run
from onedraw.types import Draft

SMALL = False
PART, PARTS = 0, 1
FOUND: dict[str, Any] = {}
PAGES = 1600
HEADS = {"32/8 x 128": (32, 8, 128), "24/4 x 256": (24, 4, 256)}
CASES: dict[str, tuple[int, tuple[Draft, ...]]] = {
    "1 at 1K": (1000, ()),
    "16 at 1K": (1000, CHAIN),
    "tree at 1K": (1000, TREE_DRAFTS),
    "1 at 24K": (24_000, ()),
    "16 at 24K": (24_000, CHAIN),
    "tree at 24K": (24_000, TREE_DRAFTS),
}
ATTENTION = {
    "32/8 x 128": [
        TODAY,
        Forms(group=8),
        Forms(group=8, height=64),
        Forms(group=8, stages=4),
        Forms(group=8, stages=5),
        Forms(group=8, stages=4, early=True),
    ],
    "24/4 x 256": [
        TODAY,
        Forms(group=8),
        Forms(group=8, height=64),
        Forms(group=8, apart=True),
        Forms(group=4, apart=True),
        Forms(group=8, stages=4, apart=True),
    ],
}
STRANDS = (1, 2, 4)
TURNS = {
    "random:llama3-8b": [
        TODAY,
        Forms(group=8),
        Forms(group=8, height=64),
        Forms(group=8, stages=4),
        Forms(group=8, stages=4, early=True),
    ],
    "random:qwen3.6-27b": [
        TODAY,
        Forms(group=8, strands=2),
        Forms(group=8, apart=True, strands=4),
        Forms(group=8, stages=4, apart=True, strands=2),
    ],
}
ASKED = {"16": 1.10, "tree": 1.15}  # times a turn of one row


def say(name: str, value: Any) -> None:
    FOUND[name] = value
    print(f"{name:74s} {f'{value:.4g}' if isinstance(value, float) else value}", flush=True)


def named(forms: Forms) -> str:
    told = [f"{key} {getattr(forms, key)}" for key in ("group", "stages", "apart", "strands")]
    return (
        ", ".join(one for one, field in zip(told, ("group", "stages", "apart", "strands")) if _differs(forms, field)) or "today"
    )


def _differs(forms: Forms, field: str) -> bool:
    return bool(getattr(forms, field) != getattr(TODAY, field))


# ------------------------------------------------------------------ attention of one layer


def _launch(shape: str, case: str, forms: Forms, q: Tensor, *, only: int | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    heads, kv, dim = HEADS[shape]
    start, drafts = CASES[case]
    count = 1 + len(drafts)
    table = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1)).tolist()
    rule = Shape(PAGE, (PAGES,), RowRule(floor=1))
    inputs = lay_out([0] * count, [Span(0, count, start, drafts)], [(table,)], shape=rule, device=DEVICE)
    busy = 2 * torch.cuda.get_device_properties(DEVICE).multi_processor_count
    device = to_view(inputs, Heads(heads, kv, dim, None, busy, forms=forms))
    sets = [group for group in device.sets if only is None or group.kind == only]
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv, "dim": dim, "scale": dim**-0.5, "pdl": True}
    return lambda keys, values: attend(q, keys, values, view=device.view, sets=sets, forms=forms, **sizes)


def _stores(shape: str, copies: int) -> list[list[Tensor]]:
    _, kv, dim = HEADS[shape]
    return [[normal((PAGES + 1) * kv, PAGE * dim) for _ in range(2)] for _ in range(copies)]


@torch.inference_mode()
def _attention(*, timed: bool) -> None:
    for shape, (heads, _, dim) in HEADS.items():
        stores = _stores(shape, 3 if timed else 1)
        for case, (_, drafts) in CASES.items():
            q = normal(1 + len(drafts), heads * dim)
            plain = _launch(shape, case, TODAY, q)(*stores[0])
            times = []
            for forms in ATTENTION[shape][PART::PARTS]:
                launch = _launch(shape, case, forms, q)
                if not timed:
                    same = torch.equal(launch(*stores[0]), plain) and bool(plain.isfinite().all())
                    say(f"{shape}, {case}, {named(forms)}: equal bits", same)
                    continue
                us = _us(launch, stores)
                part = ""
                if case.startswith("tree"):
                    part = f", of it what nodes share {_us(_launch(shape, case, forms, q, only=SHARED), stores):.1f}"
                print(f"{shape}, {case}, {named(forms)}: {us:.1f} us{part}", flush=True)
                times.append((round(us, 1), named(forms)))
            if timed:
                say(f"{shape}, {case}: us, fastest first", sorted(times))


def _us(launch: Callable[[Tensor, Tensor], Any], stores: list[list[Tensor]]) -> float:
    return 1000 * replay_ms(lambda: [launch(*pair) for pair in stores], repeats=9) / len(stores)


# ------------------------------------------------------------------ delta steps of one layer, 27B shape


def _steps(
    drafts: tuple[Draft, ...], strands: int, layers: int
) -> tuple[Callable[[], None], list[Tensor], delta.Drafted, Tensor]:
    key_heads, value_heads, dim = 16, 48, 128
    count = 1 + len(drafts)
    generator = torch.Generator(device=DEVICE).manual_seed(5)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE)

    q, k = (torch.nn.functional.normalize(made(count, key_heads, dim), dim=-1) for _ in range(2))
    decay = made(count, value_heads).sigmoid()
    gated = delta.Gated(
        q, k, made(count, value_heads, dim), torch.stack([decay.log(), decay, made(count, value_heads).sigmoid()])
    )
    states = [made(1, value_heads, dim, dim) for _ in range(layers)]
    places = torch.arange(-1, count - 1, dtype=torch.int32, device=DEVICE)
    held = [torch.zeros(count, *tail, device=DEVICE) for tail in ((value_heads,), (key_heads, dim), (value_heads, dim), (8,))]
    drafted = delta.Drafted(places, *held)
    paths = _Paths(strands)
    _walk(Run(first=0, lane=0, fresh=False, prompt=0, known=1, drafts=drafts, held=0, saves=()), paths)
    steps, out = paths.steps(Direct(DEVICE)), torch.zeros(count, value_heads, dim, device=DEVICE)

    def work() -> None:
        for state in states:
            given: dict[str, Any] = {"paths": steps.paths, "order": steps.order, "drafted": drafted, "pdl": True}
            if strands > 1:
                side_by_side(gated, state, out, count=strands, **given)
            else:
                step_by_step(gated, state, out, branches=steps.branches, **given)

    return work, states, drafted, out


@torch.inference_mode()
def _delta(*, timed: bool) -> None:
    layers = 24 if timed else 1
    expected: list[Tensor] = []
    for strands in STRANDS:
        work, states, drafted, out = _steps(TREE_DRAFTS, strands, layers)
        if timed:
            say(f"delta steps, tree of 22, {strands} strands, us", 1000 * replay_ms(work, repeats=9) / layers)
            continue
        work()
        found = [out, states[0], drafted.changes]
        expected = expected or found
        say(f"delta steps, tree of 22, {strands} strands: equal bits", all(map(torch.equal, found, expected)))
    if timed:
        work = _steps(CHAIN, 1, layers)[0]
        say("delta steps, chain of 16, us", 1000 * replay_ms(work, repeats=9) / layers)


# ------------------------------------------------------------------ whole turns


def _bench(model: str) -> tuple[Bench, Any]:
    bench = Bench(model, "cuda:0", context=26_000, lanes=2, pages=3400, layers=4 if SMALL else None)
    assert bench.backend._steady is not None
    return bench, bench.backend._steady._parts[-1]._recorder


def _take(bench: Bench, recorder: Any, forms: Forms) -> None:
    """From now on with these forms. Turns of others look the same, and are kept: they share their memory."""
    bench.backend._stack.ops._forms = forms  # type: ignore[attr-defined]
    for signature in list(recorder._graphs):
        recorder._graphs["before", signature] = recorder._graphs.pop(signature)


def turns(model: str) -> None:
    bench, recorder = _bench(model)
    table: dict[str, dict[str, float]] = {}
    for forms in TURNS[model][PART::PARTS]:
        _take(bench, recorder, forms)
        times = table.setdefault(named(forms), {})
        for case, row in CASES.items():
            bench.turn_ms(bench.plan([row], SAMPLED), repeats=6)
            times[case] = bench.replay_ms(repeats=5 if SMALL else 20)
    for forms_name, times in table.items():
        for case, ms in times.items():
            drafts, _, place = case.partition(" at ")
            if drafts == "1":
                say(f"{bench.name}, {forms_name}: {case}, ms", ms)
                continue
            ratio, asked = ms / times[f"1 at {place}"], ASKED[drafts]
            verdict = "met" if ratio <= asked else "missed"
            say(f"{bench.name}, {forms_name}: {case}, ms, x one row, {asked} asked", [round(ms, 3), round(ratio, 3), verdict])
    for case in CASES:
        ranked = sorted((round(times[case], 3), forms_name) for forms_name, times in table.items())
        say(f"{bench.name}: {case}: ms, fastest first", ranked)


def parts(model: str) -> None:
    """Microseconds of a turn by kernels: where a drafted turn's time goes that a turn of one row does not take."""
    from torch.profiler import ProfilerActivity, profile

    bench, recorder = _bench(model)
    for forms in (TURNS[model][0], TURNS[model][-1]):
        _take(bench, recorder, forms)
        for case, row in CASES.items():
            bench.turn_ms(bench.plan([row], SAMPLED), repeats=7)
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                bench.replay_ms(repeats=8)
            spent: dict[str, list[float]] = {}
            for event in seen.events():
                if "CUDA" in str(event.device_type):
                    spent.setdefault(event.name[:24], []).append(event.device_time)
            most = sorted(spent.items(), key=lambda item: -sum(item[1]))[:14]
            told = [(name, round(sum(times) / 8, 1), len(times) // 8) for name, times in most]
            say(f"{bench.name}, {named(forms)}: {case}, kernel, us a turn, launches", told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="+", choices=("check", "kernels", "turns", "parts"))
    parser.add_argument("--model", default="random:llama3-8b", choices=list(TURNS))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--part", default="0/1", help="of the forms")
    parser.add_argument("--json")
    wishes = parser.parse_args()
    part, parts_ = (int(x) for x in wishes.part.split("/"))
    globals().update(SMALL=wishes.small, PART=part, PARTS=parts_)
    torch.manual_seed(0)
    sections: dict[str, list[Callable[[], None]]] = {
        "check": [partial(_delta, timed=False), partial(_attention, timed=False)],
        "kernels": [partial(_delta, timed=True), partial(_attention, timed=True)],
        "turns": [partial(turns, wishes.model)],
        "parts": [partial(parts, wishes.model)],
    }
    for section in wishes.sections:
        begin = time.perf_counter()
        for work in sections[section]:
            work()
        print(f"-- {section}: {time.perf_counter() - begin:.1f} s", flush=True)
    if wishes.json:
        Path(wishes.json).write_text(json.dumps(FOUND, indent=1, default=str))


if __name__ == "__main__":
    main()
