"""Check and time products of packed weights with up to 64 rows on a GPU. Weights are random.

python -m bench.gpu_few_rows check | time [--kinds …] [--rows …] [--all-splits] [--limit SECONDS]

check  compare every kind with float64, and its bits across numbers of rows and work splits
time   median times of graph replays with uncached weights, with and without programmatic dependent launch (pdl)
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.measuring import capture, device_ms
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
COPY_BYTES = 4.21e12  # bytes per second that a copy on an H200 reads and writes
UNCACHED_BYTES = 256 << 20  # bytes of other weights that are read before the same weight is read again
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
SPLITS: dict[bool | None, str] = {
    None: "automatic split",
    True: "no split of the inputs",
    False: "split of the inputs",
}  # whole_k


def random_weight(kind: str, n: int, k: int, seed: int = 0) -> tuple[PackedWeight, np.ndarray]:
    """Return a packed weight whose rows repeat every 64, and the stored bytes of the distinct rows."""
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


def product(
    x: Tensor, weight: PackedWeight, whole_k: bool | None = None, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    out = torch.full((len(x), weight.rows), torch.nan, dtype=x.dtype, device=x.device)
    return few_rows_product(pack_activations(x), weight, out=out, whole_k=whole_k, bias=bias, residual=residual)


# ------------------------------------------------------------------ exactness


def stored_values(raw: np.ndarray, kind: str, k: int) -> Tensor:
    out = np.empty((len(raw), k), np.float32)
    dequantize_into(raw.reshape(-1), kind, out)
    return torch.from_numpy(out).to(DEVICE)


def float64_product(x: Tensor, weight: PackedWeight) -> Tensor:
    """The definition of the product, computed in float64 with the dequantized weight."""
    return reference_product(pack_activations(x), dequantize(weight, 0, weight.rows))


def check(kinds: Iterable[str]) -> None:
    for kind in kinds:
        compile_kernels(kind, DEVICE)
        for n, k in ((1000, 1536), (512, 6144), (2600, 2560), *(((200, 576),) if QUANT_TYPES[kind].block_values == 32 else ())):
            weight, raw = random_weight(kind, n, k)
            values = stored_values(raw, kind, k).repeat(-(-n // len(raw)), 1)[:n]
            same = torch.equal(dequantize_rows(weight, None, out=torch.empty(n, k, device=DEVICE)), values)
            wanted = torch.tensor([3, n - 1, 17, 8], device=DEVICE)
            half = dequantize_rows(weight, wanted, out=torch.empty(4, k, device=DEVICE, dtype=torch.bfloat16))
            same &= torch.equal(half, values[wanted].bfloat16())
            for dtype in (torch.bfloat16, torch.float16) if kind == "Q4_K" else (torch.bfloat16,):
                x = normal(64, k, dtype=dtype, seed=1)
                full = product(x, weight)
                exact = x.double() @ values.double().t()
                error = float((full.double() - exact).norm() / exact.norm())
                dequantized_error = float((float64_product(x[:5], weight) - exact[:5]).norm() / exact[:5].norm())
                unequal = [
                    (rows, SPLITS[whole_k])
                    for rows in ROWS
                    for whole_k in SPLITS
                    if not torch.equal(product(x[:rows], weight, whole_k), full[:rows])
                ]
                middle = torch.equal(product(x[30:41], weight), full[30:41])
                bias, residual = normal(n, dtype=dtype, seed=2), normal(64, n, dtype=dtype, seed=3)
                with_epilogue = product(x, weight, bias=bias, residual=residual)
                epilogue = torch.equal(with_epilogue, (full + bias) + residual)
                with_pdl = torch.full_like(full, torch.nan)
                few_rows_product(pack_activations(x, pdl=True), weight, out=with_pdl, pdl=True)
                epilogue &= torch.equal(with_pdl, full)
                counters_reset = not weight.counters.any()
                print(
                    f"{kind} {n}x{k} {str(dtype)[6:]}: values {'equal' if same else 'UNEQUAL'}, error {error:.1e}, dequantized "
                    f"{dequantized_error:.1e}, rows {unequal or 'equal'} {'' if middle else 'UNEQUAL'}, "
                    f"bias and residual {'equal' if epilogue else 'UNEQUAL'}{'' if counters_reset else ', COUNTERS NOT RESET'}",
                    flush=True,
                )


# ------------------------------------------------------------------ speed


def copies_of(weight: PackedWeight, size: int) -> list[PackedWeight]:
    """Return the weight and so many copies that none stays in the GPU cache until it is read again."""
    others = (
        PackedWeight(weight.kind, weight.rows, weight.width, weight.units.clone(), weight.counters.clone())
        for _ in range(UNCACHED_BYTES // size)
    )
    return [weight, *others]


def uncached_us(
    ready: PackedActivations, copies: list[PackedWeight], whole_k: bool | None, *, pdl: bool, repeats: int = 7
) -> float:
    out = torch.empty(len(ready), copies[0].rows, dtype=torch.bfloat16, device=DEVICE)
    workspace = Workspace(DEVICE)
    buffers: dict[str, Any] = {"partial_sums": workspace.partial_sums(copies[0]), "carry": workspace.carry(0)}
    graph = capture(lambda: [few_rows_product(ready, one, out=out, whole_k=whole_k, pdl=pdl, **buffers) for one in copies])
    return device_ms(graph.replay, repeats=repeats) / len(copies) * 1e3


def timed(rows: Iterable[int], kinds: Iterable[str], limit: float, splits: Iterable[bool | None]) -> None:
    start = time.monotonic()
    for kind, n, k in SHAPES:
        if kind not in kinds or time.monotonic() - start > limit:
            continue
        size = gpu_packed_bytes((n, k), kind)
        copies = copies_of(random_weight(kind, n, k)[0], size)
        floor = size / COPY_BYTES * 1e6
        for whole_k, pdl in [*((split, True) for split in splits), (None, False)]:
            found = {count: uncached_us(pack_activations(normal(count, k)), copies, whole_k, pdl=pdl) for count in rows}
            shown = ", ".join(f"{count}: {us:.1f}" for count, us in found.items())
            how = f"{SPLITS[whole_k]}{', pdl' if pdl else ''}"
            print(f"{kind} {n}x{k}: floor {floor:.1f} us, {floor / min(found.values()):.0%} | {how} | {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=("check", "time"))
    parser.add_argument("--kinds", nargs="*", default=list(SPAN_BYTES))
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8, 16, 24, 64])
    parser.add_argument("--all-splits", "--all-forms", action="store_true", help="for time: also force each work split")
    parser.add_argument("--limit", type=float, default=60, help="start no new measurement after this many seconds")
    parser.add_argument("--cache", type=Path, default=Path("build"), help="folder of compiled kernels")
    options = parser.parse_args()
    cache_in(options.cache)
    with torch.inference_mode():
        if options.section == "check":
            check(options.kinds)
        else:
            timed(options.rows, options.kinds, options.limit, SPLITS if options.all_splits else (None,))


if __name__ == "__main__":
    main()
