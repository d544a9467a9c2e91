"""Products of packed weights with few rows on a GPU, next to what the memory allows. Blocks are random.

    python -m bench.gpu_rows check | compile | time | tune [--part I --parts N] [--kinds …] [--rows …] [--limit SECONDS]

check: every kind against float64 and against itself: one row alone, and among others, in several forms. time: the forms that are
chosen. tune: several forms of every kind and shape. Times are medians of graph replays with cold weights.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.gpu_decode import captured, timed_ms
from onedraw.backends.packing import SPANS, span_bytes
from onedraw.backends.torch.kernels.fragments import Fragments, empty_fragments, fill_fragments
from onedraw.backends.torch.kernels.nvrtc import keep_in
from onedraw.backends.torch.kernels.packed_rows import Form, opened, skinny_product, unpacked_rows
from onedraw.backends.torch.kernels.spans import Prepared, prepare_rows
from onedraw.checkpoints.quants import KINDS, dequantize_into
from onedraw.checkpoints.random_blocks import random_blocks

DEVICE = torch.device("cuda:0")
COPY_BYTES = 4.21e12  # per second: a copy on an H200, bytes read and written
COLD = 256 << 20  # bytes of weights that are read between two readings of one
ROWS = (1, 2, 5, 8, 16, 17, 22, 24, 33, 64)
# (kind, outputs, inputs) of Qwen3.6-27B as Q4_K_M
SHAPES = (
    ("Q4_K", 34816, 5120),
    ("Q4_K", 5120, 17408),
    ("Q4_K", 5120, 6144),
    ("Q4_K", 6144, 5120),
    ("Q5_K", 10240, 5120),
    ("Q6_K", 5120, 17408),
    ("Q6_K", 6144, 5120),
    ("Q6_K", 248320, 5120),
)
FORMS = (
    Form(4, 1, 1, 4),
    Form(4, 1, 2, 4),
    Form(4, 1, 1, 5),
    Form(8, 1, 1, 2),
    Form(4, 2, 1, 2),
    Form(4, 2, 1, 3),
    Form(2, 2, 1, 4),
)


def made(kind: str, n: int, k: int, seed: int = 0) -> tuple[Fragments, np.ndarray]:
    """A weight whose codes repeat every 64 rows, and the stored bytes of those."""
    few = n if n % 64 else 64
    raw = random_blocks(kind, few, k, np.random.default_rng(seed), k**-0.5)
    small = empty_fragments(kind, rows=few, width=k, device=DEVICE)
    fill_fragments(small, torch.from_numpy(raw).to(DEVICE), first=0)
    if few == n:
        return small, raw
    units = small.units.repeat(n // few, 1, 1)
    return Fragments(kind, n, k, units, torch.zeros(len(units) + 1, dtype=torch.int32, device=DEVICE)), raw


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def product(x: Tensor, weight: Fragments, form: Form | None = None, share: int | None = None, **more: Tensor) -> Tensor:
    out = torch.full((len(x), weight.rows), torch.nan, dtype=x.dtype, device=x.device)
    return skinny_product(prepare_rows(x), weight, out=out, form=form, share=share, **more)  # type: ignore[arg-type]


# ------------------------------------------------------------------ is it right?


def numbers(raw: np.ndarray, kind: str, k: int) -> Tensor:
    out = np.empty((len(raw), k), np.float32)
    dequantize_into(raw.reshape(-1), kind, out)
    return torch.from_numpy(out).to(DEVICE)


def product_of_opened(x: Tensor, weight: Fragments) -> Tensor:
    """The rule in float64 over the opened weight: W · X and the sums of X, scaled."""
    ready, wide, spans = prepare_rows(x), opened(weight, 0, weight.rows), weight.spans
    own = wide.weights.double().view(weight.rows, spans, 8, 32)
    rows = ready.x.double().view(len(x), spans, 8, 32)
    sums = ready.sums.double()
    sums = sums[..., :8] + sums[..., 8:]
    factor = ready.factors.double()
    blocks = torch.einsum("nsbk,tsbk->tnsb", own, rows)
    per = 8 // (wide.scales.shape[1] // spans)
    total = (blocks * wide.scales.double().view(weight.rows, spans, -1).repeat_interleave(per, 2)).sum(3)
    if wide.least is not None:
        least = wide.least.double().view(weight.rows, spans, -1)
        if wide.minima is not None:
            total = total - torch.einsum("tsb,nsb->tns", sums, wide.minima.double() * least)
        else:
            total = total + torch.einsum("tsb,nsb->tns", sums, least)
    return (total * factor[:, None]).sum(2)


def check(kinds: Iterable[str]) -> None:
    for kind in kinds:
        for n, k in ((1000, 1536), (512, 6144), *(((200, 576),) if KINDS[kind].values == 32 else ())):
            weight, raw = made(kind, n, k)
            twin = numbers(raw, kind, k).repeat(-(-n // len(raw)), 1)[:n]
            same = torch.equal(unpacked_rows(weight, None, out=torch.empty(n, k, device=DEVICE)), twin)
            wanted = torch.tensor([3, n - 1, 17, 8], device=DEVICE)
            half = unpacked_rows(weight, wanted, out=torch.empty(4, k, device=DEVICE, dtype=torch.bfloat16))
            same &= torch.equal(half, twin[wanted].bfloat16())
            for dtype in (torch.bfloat16, torch.float16) if kind == "Q4_K" else (torch.bfloat16,):
                x = normal(64, k, dtype=dtype, seed=1)
                full = product(x, weight)
                judge = x.double() @ twin.double().t()
                error = float((full.double() - judge).norm() / judge.norm())
                half_way = float((product_of_opened(x[:5], weight) - judge[:5]).norm() / judge[:5].norm())
                unequal = [rows for rows in ROWS if not torch.equal(product(x[:rows], weight), full[:rows])]
                middle = torch.equal(product(x[30:41], weight), full[30:41])
                shares = [s for s in (1, 2, 3, 99) for r in (1, 64) if not torch.equal(product(x[:r], weight, None, s), full[:r])]
                bias, residual = normal(n, dtype=dtype, seed=2), normal(64, n, dtype=dtype, seed=3)
                more = product(x, weight, bias=bias, residual=residual)
                follows = torch.equal(more, (full + bias) + residual)
                early = torch.full_like(full, torch.nan)
                skinny_product(prepare_rows(x, pdl=True), weight, out=early, pdl=True)
                follows &= torch.equal(early, full)
                idle = not weight.counters.any()
                print(
                    f"{kind} {n}x{k} {str(dtype)[6:]}: numbers {'equal' if same else 'UNEQUAL'}, error {error:.1e}, opened "
                    f"{half_way:.1e}, rows {unequal or 'equal'} {'' if middle else 'UNEQUAL'}, shares {shares or 'equal'}, "
                    f"bias and residual {'equal' if follows else 'UNEQUAL'}{'' if idle else ' COUNTERS'}",
                    flush=True,
                )


def check_forms(kinds: Iterable[str]) -> None:
    for kind in kinds:
        weight, _ = made(kind, 1040, 2560)
        x = normal(64, 2560, seed=1)
        full = product(x, weight)
        for form in FORMS:
            unequal = [rows for rows in (1, 16, 24, 64) if not torch.equal(product(x[:rows], weight, form), full[:rows])]
            print(f"{kind} {form}: {unequal or 'equal'}", flush=True)


# ------------------------------------------------------------------ how fast is it?


def copies_of(weight: Fragments, size: int) -> list[Fragments]:
    others = (
        Fragments(weight.kind, weight.rows, weight.width, weight.units.clone(), weight.counters.clone())
        for _ in range(COLD // size)
    )
    return [weight, *others]


def cold_us(ready: Prepared, copies: list[Fragments], form: Form | None, share: int | None, repeats: int = 7) -> float:
    out = torch.empty(len(ready), copies[0].rows, dtype=torch.bfloat16, device=DEVICE)
    graph = captured(lambda: [skinny_product(ready, one, out=out, form=form, share=share) for one in copies])
    return timed_ms(graph.replay, repeats) / len(copies) * 1e3


def timed(rows: Iterable[int], kinds: Iterable[str], limit: float) -> None:
    began, once = time.monotonic(), {}
    for kind, n, k in SHAPES:
        if kind not in kinds:
            continue
        size, found = span_bytes((n, k), kind), []
        copies = copies_of(made(kind, n, k)[0], size)
        for count in rows:
            once[count] = cold_us(prepare_rows(normal(count, k)), copies, None, None)
            found.append(f"{count}: {once[count]:.1f}")
        floor = size / COPY_BYTES * 1e6
        print(f"{kind} {n}x{k}: floor {floor:.1f} us, {floor / once[min(rows)]:.0%} | {', '.join(found)}", flush=True)
        if time.monotonic() - began > limit:
            return


def tune(rows: Iterable[int], kinds: Iterable[str], limit: float) -> None:
    began = time.monotonic()
    for (kind, n, k), count in itertools.product(SHAPES, rows):
        if kind not in kinds:
            continue
        if time.monotonic() - began > limit:
            print("out of time", kind, n, k, count)
            return
        size, found = span_bytes((n, k), kind), []
        copies, ready = copies_of(made(kind, n, k)[0], size), prepare_rows(normal(count, k))
        segments = -(-k // 1024)
        for form, share in itertools.product(FORMS, sorted({None, 1, 2, segments} - {0}, key=str)):
            if share is not None and n > 100000 and share != segments:
                continue
            found.append((cold_us(ready, copies, form, share, 5), form, share))
        found.sort(key=lambda one: one[0])
        floor = size / COPY_BYTES * 1e6
        shown = " ".join(f"{f.warps}/{f.tall}/{f.depth}/{f.together}/{s or '-'}:{us:.1f}" for us, f, s in found[:9])
        print(
            f"{count:3d} {kind} {n}x{k}: floor {floor:.1f}, {floor / found[0][0]:.0%} | {shown} | {found[-1][0]:.0f}", flush=True
        )


def compile_all(kinds: Iterable[str], part: int, parts: int) -> None:
    work = [(kind, form) for form in FORMS for kind in kinds]
    for kind, form in work[part::parts]:
        began = time.monotonic()
        product(normal(1, 512), made(kind, 64, 512)[0], form)
        print(f"{kind} {form}: {time.monotonic() - began:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("section", choices=("check", "forms", "compile", "time", "tune"))
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", default=list(SPANS))
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8, 16, 24, 64])
    parser.add_argument("--limit", type=float, default=60)
    parser.add_argument("--cache", type=Path, default=Path("build/cache"))
    chosen = parser.parse_args()
    keep_in(chosen.cache)
    with torch.inference_mode():
        if chosen.section == "check":
            check(chosen.kinds)
        elif chosen.section == "forms":
            check_forms(chosen.kinds)
        elif chosen.section == "compile":
            compile_all(chosen.kinds, chosen.part, chosen.parts)
        elif chosen.section == "time":
            timed(chosen.rows, chosen.kinds, chosen.limit)
        else:
            tune(chosen.rows, chosen.kinds, chosen.limit)


if __name__ == "__main__":
    main()
