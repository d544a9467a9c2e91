"""Products of packed weights with few rows on a GPU, next to what the memory allows. Blocks are random.

    python -m bench.gpu_rows check | time [--kinds …] [--rows …] [--all-forms] [--limit SECONDS]

check: every kind against float64 and against itself: one row alone, and among others, shared out either way. time:
medians of graph replays with cold weights, as launched alone and (pdl) with the start of each beside the end of the one before.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.gpu_decode import captured, timed_ms
from onedraw.backends.packing import SPAN_BYTES, gpu_packed_bytes
from onedraw.backends.torch.ops.cuda.nvrtc import cache_in
from onedraw.backends.torch.ops.cuda.packed.activations import PackedActivations, pack_activations
from onedraw.backends.torch.ops.cuda.packed.few_rows import compile_kernels, dequantize, dequantize_rows, few_rows_product
from onedraw.backends.torch.ops.cuda.packed.linear import Workspace
from onedraw.backends.torch.ops.cuda.packed.tensor_core_layout import PackedWeight, empty_packed_weight, fill_packed_weight
from onedraw.checkpoints.dequantize import QUANT_TYPES, dequantize_into
from onedraw.checkpoints.random_weights import random_blocks
from tests.reference.packed_blocks import reference_product

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
FORMS: tuple[bool | None, ...] = (None, True, False)  # blocks that have all segments of their outputs, or not; None chooses


NAMES = {None: "chosen", True: "whole_k", False: "apart"}


def made(kind: str, n: int, k: int, seed: int = 0) -> tuple[PackedWeight, np.ndarray]:
    """A weight whose codes repeat every 64 rows, and the stored bytes of those."""
    few = n if n % 64 else 64
    raw = random_blocks(kind, few, k, np.random.default_rng(seed), k**-0.5)
    small = empty_packed_weight(kind, rows=few, width=k, device=DEVICE)
    fill_packed_weight(small, torch.from_numpy(raw).to(DEVICE), first=0)
    if few == n:
        return small, raw
    units = small.units.repeat(n // few, 1, 1)
    return PackedWeight(kind, n, k, units, torch.zeros(len(units) + 1, dtype=torch.int32, device=DEVICE)), raw


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def product(x: Tensor, weight: PackedWeight, form: bool | None = None, **more: Tensor) -> Tensor:
    out = torch.full((len(x), weight.rows), torch.nan, dtype=x.dtype, device=x.device)
    return few_rows_product(pack_activations(x), weight, out=out, whole_k=form, **more)  # type: ignore[arg-type]


# ------------------------------------------------------------------ is it right?


def numbers(raw: np.ndarray, kind: str, k: int) -> Tensor:
    out = np.empty((len(raw), k), np.float32)
    dequantize_into(raw.reshape(-1), kind, out)
    return torch.from_numpy(out).to(DEVICE)


def product_of_opened(x: Tensor, weight: PackedWeight) -> Tensor:
    """The rule in float64 over the dequantized weight."""
    return reference_product(pack_activations(x), dequantize(weight, 0, weight.rows))


def check(kinds: Iterable[str]) -> None:
    for kind in kinds:
        compile_kernels(kind, DEVICE)
        for n, k in ((1000, 1536), (512, 6144), (2600, 2560), *(((200, 576),) if QUANT_TYPES[kind].block_values == 32 else ())):
            weight, raw = made(kind, n, k)
            twin = numbers(raw, kind, k).repeat(-(-n // len(raw)), 1)[:n]
            same = torch.equal(dequantize_rows(weight, None, out=torch.empty(n, k, device=DEVICE)), twin)
            wanted = torch.tensor([3, n - 1, 17, 8], device=DEVICE)
            half = dequantize_rows(weight, wanted, out=torch.empty(4, k, device=DEVICE, dtype=torch.bfloat16))
            same &= torch.equal(half, twin[wanted].bfloat16())
            for dtype in (torch.bfloat16, torch.float16) if kind == "Q4_K" else (torch.bfloat16,):
                x = normal(64, k, dtype=dtype, seed=1)
                full = product(x, weight)
                judge = x.double() @ twin.double().t()
                error = float((full.double() - judge).norm() / judge.norm())
                half_way = float((product_of_opened(x[:5], weight) - judge[:5]).norm() / judge[:5].norm())
                unequal = [
                    (rows, NAMES[form])
                    for rows in ROWS
                    for form in FORMS
                    if not torch.equal(product(x[:rows], weight, form), full[:rows])
                ]
                middle = torch.equal(product(x[30:41], weight), full[30:41])
                bias, residual = normal(n, dtype=dtype, seed=2), normal(64, n, dtype=dtype, seed=3)
                more = product(x, weight, bias=bias, residual=residual)
                follows = torch.equal(more, (full + bias) + residual)
                early = torch.full_like(full, torch.nan)
                few_rows_product(pack_activations(x, pdl=True), weight, out=early, pdl=True)
                follows &= torch.equal(early, full)
                idle = not weight.counters.any()
                print(
                    f"{kind} {n}x{k} {str(dtype)[6:]}: numbers {'equal' if same else 'UNEQUAL'}, error {error:.1e}, dequantized "
                    f"{half_way:.1e}, rows {unequal or 'equal'} {'' if middle else 'UNEQUAL'}, "
                    f"bias and residual {'equal' if follows else 'UNEQUAL'}{'' if idle else ' COUNTERS'}",
                    flush=True,
                )


# ------------------------------------------------------------------ how fast is it?


def copies_of(weight: PackedWeight, size: int) -> list[PackedWeight]:
    others = (
        PackedWeight(weight.kind, weight.rows, weight.width, weight.units.clone(), weight.counters.clone())
        for _ in range(COLD // size)
    )
    return [weight, *others]


def cold_us(ready: PackedActivations, copies: list[PackedWeight], form: bool | None, *, pdl: bool, repeats: int = 7) -> float:
    out = torch.empty(len(ready), copies[0].rows, dtype=torch.bfloat16, device=DEVICE)
    workspace = Workspace(DEVICE)  # as the operations have it
    room = {"partial_sums": workspace.partial_sums(copies[0]), "carry": workspace.carry(0)}
    graph = captured(lambda: [few_rows_product(ready, one, out=out, whole_k=form, pdl=pdl, **room) for one in copies])
    return timed_ms(graph.replay, repeats) / len(copies) * 1e3


def timed(rows: Iterable[int], kinds: Iterable[str], limit: float, forms: Iterable[bool | None]) -> None:
    began = time.monotonic()
    for kind, n, k in SHAPES:
        if kind not in kinds or time.monotonic() - began > limit:
            continue
        size = gpu_packed_bytes((n, k), kind)
        copies = copies_of(made(kind, n, k)[0], size)
        floor = size / COPY_BYTES * 1e6
        for form, pdl in [*((one, True) for one in forms), (None, False)]:
            found = {count: cold_us(pack_activations(normal(count, k)), copies, form, pdl=pdl) for count in rows}
            shown = ", ".join(f"{count}: {us:.1f}" for count, us in found.items())
            how = f"{NAMES[form]}{', pdl' if pdl else ''}"
            print(f"{kind} {n}x{k}: floor {floor:.1f} us, {floor / min(found.values()):.0%} | {how} | {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("section", choices=("check", "time"))
    parser.add_argument("--kinds", nargs="*", default=list(SPAN_BYTES))
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8, 16, 24, 64])
    parser.add_argument("--all-forms", action="store_true")
    parser.add_argument("--limit", type=float, default=60)
    parser.add_argument("--cache", type=Path, default=Path("build"))
    chosen = parser.parse_args()
    cache_in(chosen.cache)
    with torch.inference_mode():
        if chosen.section == "check":
            check(chosen.kinds)
        else:
            timed(chosen.rows, chosen.kinds, chosen.limit, FORMS if chosen.all_forms else (None,))


if __name__ == "__main__":
    main()
