"""Check and time products of packed weights with many rows on a GPU. Weights are random.

python -m bench.gpu_many_rows probe | check [--kinds …] | time | crossover | compile | variants

probe      compare one tile of the Hopper kernel with the reference, weights and minima separately, to locate an error
check      compare every kind with float64, and its bits across numbers of rows, tiles and kernels
time       the shapes of Qwen3.6-27B at 2,048 and 8,192 rows, beside the library product of the same shape
crossover  64 to 512 rows: packed blocks read directly against the weight dequantized first
compile    compile the kernels that `variants` needs into the cache folder
variants   time the Hopper kernel with other cluster and group sizes, and compare the bits
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.measuring import device_ms
from onedraw.backends.memory_plan import DEQUANT_BYTES
from onedraw.backends.packing import SPAN_BYTES
from onedraw.backends.torch.ops.cuda import nvrtc
from onedraw.backends.torch.ops.cuda.packed import few_rows, many_rows, many_rows_hopper
from onedraw.backends.torch.ops.cuda.packed import linear as packed_linear
from onedraw.backends.torch.ops.cuda.packed.activations import (
    SUBNORMAL_FACTORS,
    DequantizedWeight,
    PackedActivations,
    pack_activations,
)
from onedraw.backends.torch.ops.cuda.packed.linear import Workspace, packed_product
from onedraw.backends.torch.ops.cuda.packed.many_rows import ManyRowsTile
from onedraw.backends.torch.ops.cuda.packed.tensor_core_layout import PackedWeight, empty_packed_weight, fill_packed_weight
from onedraw.checkpoints.dequantize import dequantize_into
from onedraw.checkpoints.random_weights import random_blocks
from tests.reference.packed_blocks import reference_activations, reference_product, reference_weights

DEVICE = torch.device("cuda:0")
SHAPES = (("Q4_K", 34816, 5120), ("Q4_K", 5120, 17408), ("Q6_K", 5120, 17408), ("Q5_K", 10240, 5120), ("Q8_0", 5120, 6144))


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def random_weight(kind: str, n: int, k: int, seed: int = 0) -> tuple[PackedWeight, DequantizedWeight, Tensor]:
    """Return a packed weight, its dequantized form by the reference implementation, and its values in float32."""
    raw = torch.from_numpy(random_blocks(kind, n, k, np.random.default_rng(seed), k**-0.5)).to(DEVICE)
    packed = empty_packed_weight(kind, rows=n, width=k, device=DEVICE)
    fill_packed_weight(packed, raw, first=0)
    values = np.empty((n, k), np.float32)
    dequantize_into(raw.cpu().numpy().reshape(-1), kind, values)
    return packed, reference_weights(raw, kind), torch.from_numpy(values).to(DEVICE)


def uninitialized(rows: int, n: int, dtype: torch.dtype) -> Tensor:
    return torch.full((rows, n), torch.nan, dtype=dtype, device=DEVICE)


def check(kinds: Iterable[str]) -> None:
    for kind, (n, k), dtype in itertools.product(kinds, ((200, 1536), (1000, 5120)), (torch.bfloat16, torch.float16)):
        packed, dequantized, weight = random_weight(kind, n, k)
        x, bias, residual = normal(2100, k, dtype=dtype, seed=1), normal(n, dtype=dtype), normal(2100, n, dtype=dtype)
        activations = pack_activations(x)
        found = {
            "activations": equal_bits(activations, reference_activations(x)),
            "dequantized": equal_bits(few_rows.dequantize(packed, 0, n), dequantized),
        }
        full = many_rows_hopper.many_rows_product(activations, dequantized, out=uninitialized(2100, n, dtype))
        torch.cuda.synchronize()
        expected = x.double() @ weight.double().t()
        error = float((full.double() - expected).norm() / expected.norm())
        for rows in (1, 65, 100, 300, 2048):
            part = many_rows_hopper.many_rows_product(pack_activations(x[:rows]), dequantized, out=uninitialized(rows, n, dtype))
            found[f"{rows} rows"] = torch.equal(part, full[:rows])
        some = activations.rows(slice(0, 300))
        for tile in (ManyRowsTile(), ManyRowsTile(16, 32, 64, 1, 2), ManyRowsTile(64, 128, 32, 4, 2)):
            part = many_rows.many_rows_product(some, dequantized, out=uninitialized(300, n, dtype), tile=tile)
            found[str(tile)] = torch.equal(part, full[:300])
        for rows in (1, 5, 16, 33, 64):
            part = few_rows.few_rows_product(pack_activations(x[7 : 7 + rows]), packed, out=uninitialized(rows, n, dtype))
            found[f"few-rows kernel, {rows} rows"] = torch.equal(part, full[7 : 7 + rows])
        with_epilogue = [
            call(activations, dequantized, out=torch.empty_like(full), bias=bias, residual=residual)
            for call in (many_rows_hopper.many_rows_product, many_rows.many_rows_product)
        ]
        found["bias, residual"] = torch.equal(with_epilogue[0], (full + bias) + residual) and torch.equal(*with_epilogue)
        wrong = [name for name, right in found.items() if not right]
        print(f"{kind} {n}x{k} {str(dtype)[6:]}: error {error:.1e}, {len(found)} comparisons, {wrong or 'all equal'}", flush=True)


def equal_bits(one: PackedActivations | DequantizedWeight, other: PackedActivations | DequantizedWeight) -> bool:
    """Compare all tensors bit for bit, except the padding of the scales behind the last output."""
    outputs = len(one.weights) if isinstance(one, DequantizedWeight) else None
    for name in one.__slots__:
        a, b = getattr(one, name), getattr(other, name)
        if isinstance(one, DequantizedWeight) and name in ("scales", "min_scales") and a is not None:
            a, b = a[:, :outputs], b[:, :outputs]
        if (a is None) != (b is None) or (a is not None and not torch.equal(a, b)):
            return False
    return True


def probe() -> None:
    """Compare one span and one tile with the reference, for weights and minima separately, to locate an error."""
    for per in (1, 8):
        weights = torch.randint(-900, 900, (128, 256), device=DEVICE).half()
        minima = torch.randint(0, 63, (128, 1, 8), device=DEVICE).half() if per == 1 else None
        scales = torch.rand(per, 128, device=DEVICE)
        activations = pack_activations(normal(300, 256))
        for name, dequantized in (
            ("weights", DequantizedWeight(weights, scales)),
            ("minima", DequantizedWeight(torch.zeros_like(weights), scales, minima, scales)),
            ("both", DequantizedWeight(weights, scales, minima, scales)),
        ):
            found = many_rows_hopper.many_rows_product(activations, dequantized, out=uninitialized(300, 128, torch.float16))
            expected = reference_product(activations, dequantized)
            wrong = (found.double() - expected).abs() > 1e-2 * expected.abs().max()
            print(f"probe {per} {name}: {int(wrong.sum())} wrong, first {wrong.nonzero()[:3].tolist()}", flush=True)
            if bool(wrong.any()):
                raise SystemExit(1)


def timed(call: Callable[[], object], repeats: int = 7) -> float:
    return device_ms(call, repeats=repeats, warm_up=2)


def random_dequantized(kind: str, n: int, k: int) -> DequantizedWeight:
    """Return random values of the magnitude that dequantized weights have; only the time of the product is of interest."""
    spans, per = k // 256, 1 if kind.endswith("_K") else 8
    tiny = SUBNORMAL_FACTORS[1] if per == 1 else 1.0
    weights = (torch.randint(-900, 900, (n, k), device=DEVICE) * tiny).half()
    scales = torch.rand(spans * per, n, device=DEVICE) * 1e-4 / tiny
    minima = (torch.randint(0, 63, (n, spans, 8), device=DEVICE) * tiny).half() if kind in ("Q4_K", "Q5_K") else None
    return DequantizedWeight(weights, scales, minima, scales.clone() if kind in ("Q4_K", "Q5_K", "Q4_1", "Q5_1") else None)


def repeated_weight(kind: str, n: int, k: int) -> PackedWeight:
    """Return a packed weight whose rows repeat every 64 outputs, which is quick to create."""
    raw = torch.from_numpy(random_blocks(kind, 64, k, np.random.default_rng(0), k**-0.5)).to(DEVICE)
    few = empty_packed_weight(kind, rows=64, width=k, device=DEVICE)
    fill_packed_weight(few, raw, first=0)
    counters = torch.zeros(n // 16, dtype=torch.int32, device=DEVICE)
    return replace(few, rows=n, units=few.units.repeat(n // 64, 1, 1), counters=counters)


@lru_cache(maxsize=1)
def workspace() -> Workspace:
    return Workspace(DEVICE)


def prepared_product(x: Tensor, weight: PackedWeight, out: Tensor) -> Tensor:
    return packed_product(pack_activations(x), weight, out=out, workspace=workspace())


def time() -> None:
    """Time dequantization, the product, both together, and the library product."""
    for rows in (2048, 8192):
        for kind, n, k in SHAPES:
            x, flops, weight = normal(rows, k), 2 * rows * n * k, repeated_weight(kind, n, k)
            out = torch.empty(rows, n, dtype=torch.bfloat16, device=DEVICE)
            activations = pack_activations(x)
            count = min(n, (DEQUANT_BYTES // (2 * k)) // 128 * 128)
            some = few_rows.empty_dequantized(weight, count)
            dequantization = timed(partial(few_rows.dequantize, weight, 0, count, some)) * n / count
            product = timed(partial(many_rows_hopper.many_rows_product, activations, some, out=out[:, :count])) * n / count
            whole = timed(partial(prepared_product, x, weight, out))
            plain = torch.randn(n, k, device=DEVICE).to(torch.bfloat16)
            library = timed(partial(torch.mm, x, plain.t(), out=out))
            print(
                f"{kind} {n}x{k} {rows} rows: dequantization {dequantization:.3f} ms, product {product:.3f} ms, "
                f"{flops / product / 1e9:.0f} TFLOP/s, together {whole:.3f} ms, {flops / whole / 1e9:.0f} TFLOP/s, "
                f"library {flops / library / 1e9:.0f}",
                flush=True,
            )


def crossover() -> None:
    """Time packing of activations, and find the number of rows from which dequantizing the weight first is faster."""
    for width in (5120, 17408):
        for rows in (1, 16, 64, 2048, 8192):
            x = normal(rows, width)
            packed = pack_activations(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(20):
                    pack_activations(x, out=packed, pdl=True)
            print(f"pack_activations {rows} x {width}: {timed(graph.replay) * 50:.2f} us", flush=True)
    for kind, n, k in SHAPES[:3]:
        weight, lines = repeated_weight(kind, n, k), []
        for rows in (64, 128, 192, 256, 384, 512):
            activations, out = pack_activations(normal(rows, k)), torch.empty(rows, n, dtype=torch.bfloat16, device=DEVICE)
            times = []
            for bound in (10**9, 0):
                packed_linear.MANY_ROWS_FROM = bound
                times.append(1e3 * timed(partial(packed_product, activations, weight, out=out, workspace=workspace())))
            lines.append(f"{rows} rows {times[0]:.0f} or {times[1]:.0f} us")
        print(f"{kind} {n}x{k}, blocks read or weight dequantized: {'; '.join(lines)}", flush=True)


def set_sizes(cluster: int, group: int) -> None:
    """Set the cluster and group sizes of the Hopper kernel and discard the compiled one."""
    many_rows_hopper.CLUSTER, many_rows_hopper.GROUP = cluster, group
    many_rows_hopper._kernel.cache_clear()


def compile_all(sizes: Iterable[str]) -> None:
    """Compile the kernels that `variants` needs into the cache folder."""
    for pair in sizes:
        set_sizes(*map(int, pair.split(",")))
        for per, minima in ((1, True), (1, False), (8, False)):
            nvrtc.compile_source("many_rows_hopper.cu", "sm_90a", many_rows_hopper.many_rows_defines(per, minima, torch.bfloat16))


def variants(sizes: Iterable[str]) -> None:
    """Time the Hopper kernel with other cluster and group sizes and compare the bits."""
    first: dict[tuple[str, int, int, int], Tensor] = {}
    for cluster, group in (map(int, pair.split(",")) for pair in sizes):
        set_sizes(cluster, group)
        line = f"cluster {cluster} group {group}:"
        for kind, n, k, rows in (
            ("Q4_K", 16384, 5120, 2048),
            ("Q6_K", 5120, 17408, 2048),
            ("Q4_K", 16384, 5120, 8192),
            ("Q8_0", 16384, 5120, 2048),
        ):
            torch.manual_seed(0)
            activations, dequantized = pack_activations(normal(rows, k)), random_dequantized(kind, n, k)
            out = torch.empty(rows, n, dtype=torch.bfloat16, device=DEVICE)
            ms = timed(partial(many_rows_hopper.many_rows_product, activations, dequantized, out=out), 5)
            same_bits = torch.equal(first.setdefault((kind, n, k, rows), out), out)
            line += f" {2 * rows * n * k / ms / 1e9:.0f}{'' if same_bits else ' UNEQUAL'}"
        print(line, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=("probe", "check", "time", "crossover", "few", "compile", "variants"))
    parser.add_argument("--kinds", nargs="*", default=list(SPAN_BYTES))
    parser.add_argument(
        "--sizes", "--numbers", nargs="*", default=["2,4", "1,16"], help="CLUSTER,GROUP pairs; probe uses the first"
    )
    options = parser.parse_args()
    nvrtc.cache_in(Path("build"))
    if options.section == "probe":
        set_sizes(*map(int, options.sizes[0].split(",")))
    match options.section:
        case "check":
            check(options.kinds)
        case "compile":
            compile_all(options.sizes)
        case "variants":
            variants(options.sizes)
        case other:
            {"probe": probe, "time": time, "crossover": crossover, "few": crossover}[other]()
