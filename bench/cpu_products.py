"""Measure products with quantized weights on a CPU against its read bandwidth: one row, and eight rows relative to one.

    python -m bench.cpu_products [--kinds Q4_K,Q5_K,Q6_K,Q8_0] [--threads 2] [--path avx2] [--shapes 1536x8960,8960x1536]

The weights are random blocks, so many of them that no cache holds them. The bandwidth is that of a C loop in the same number of
threads that adds up a gigabyte in huge pages. The best of the repeats counts, because other load can only add time.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch

from bench.cpu_against_llamacpp import best
from bench.measuring import report
from onedraw.backends.packing import CPU_PACKED_KINDS
from onedraw.backends.torch.ops.cpu.library import Kernels, build, find_compiler
from onedraw.backends.torch.ops.cpu.packed_linear import CpuLinear, pack_rows
from onedraw.checkpoints.random_weights import random_blocks
from onedraw.settings import default_cache_dir

TOTAL_BYTES = 512 << 20  # of the weights of one measurement: far more than a cache holds
READ_BANDWIDTH = Path(__file__).with_name("read_bandwidth.c")


def read_bandwidth(threads: int) -> float:
    """Return the bytes per second that this many threads read."""
    compiler = find_compiler()
    assert compiler is not None, "no C compiler is installed"
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "read_bandwidth.so"
        flags = ["-O2", "-march=native", "-shared", "-fPIC", "-pthread"]
        subprocess.run([compiler, *flags, "-o", str(made), str(READ_BANDWIDTH)], check=True)
        library = ctypes.CDLL(str(made))
        library.read_bandwidth.restype = ctypes.c_double
        return float(library.read_bandwidth(ctypes.c_int(threads)))


def measure(kernels: Kernels, kind: str, *, inputs: int, outputs: int, repeats: int, floor: float) -> None:
    raw = random_blocks(kind, outputs, inputs, np.random.default_rng(7), inputs**-0.5)
    count = max(1, TOTAL_BYTES // raw.nbytes)
    panels = [pack_rows(kernels, raw, kind, rows=outputs, width=inputs, height=outputs) for _ in range(count)]
    products = [CpuLinear(kernels, [one], bias=None, coded=True) for one in panels]
    size = sum(one.data.nbytes for one in panels)
    seconds = {}
    for rows in (1, 8):
        x = torch.randn(rows, inputs)

        def all_products(x: torch.Tensor = x) -> None:
            for product in products:
                product(x)

        seconds[rows] = best(all_products, repeats)
    one = size / seconds[1]
    name = f"{kind} {inputs} x {outputs}"
    report(f"{name}: GB/s of one row, share of the bandwidth", f"{one / 1e9:.1f}, {one / floor:.2f}")
    report(f"{name}: eight rows relative to one", seconds[8] / seconds[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="Q4_K,Q5_K,Q6_K,Q8_0")
    parser.add_argument("--shapes", default="1536x8960,8960x1536", help="inputs x outputs")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--path", help="instruction set: avx512, avx2 or portable")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    built = build(default_cache_dir())
    assert built.library is not None, built.reason
    kernels = Kernels(built.library, threads=options.threads, instruction_set=options.path)
    floor = read_bandwidth(options.threads)
    report(f"read bandwidth of {options.threads} threads, GB/s; kernels", f"{floor / 1e9:.1f}; {kernels.instruction_set}")
    for kind in options.kinds.split(","):
        assert kind in CPU_PACKED_KINDS, f"unknown kind {kind}: {', '.join(CPU_PACKED_KINDS)}"
        for shape in options.shapes.split(","):
            inputs, outputs = map(int, shape.split("x"))
            measure(kernels, kind, inputs=inputs, outputs=outputs, repeats=options.repeats, floor=floor)


if __name__ == "__main__":
    main()
