"""Which device and dtype to run with, where the caller leaves it open.

In: what was asked for. Out: names that the backend takes as they are, or an error that says what is there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from onedraw.backends.packing import PACKED_DTYPES
from onedraw.backends.torch.kernels.build import build
from onedraw.backends.torch.kernels.cpu import CpuOps, Packing
from onedraw.backends.torch.ops import Ops, TorchOps
from onedraw.errors import BadSetting

DEFAULT_THREADS = torch.get_num_threads()  # what torch found, or OMP_NUM_THREADS said


def pick_device(device: str) -> str:
    """auto is the first CUDA device or else the CPU."""
    if device == "auto":
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise BadSetting(f"--device: {device!r} is no device; write cpu, cuda or cuda:0") from None
    if kind not in ("cpu", "cuda"):
        raise BadSetting(f"--device: {kind!r} is not supported; cpu and cuda are")
    if kind == "cuda" and not torch.cuda.is_available():
        raise BadSetting(f"--device {device}: this torch finds no CUDA device; use --device cpu")
    return device


def pick_dtype(dtype: str, *, device: str, activations: str, narrow: bool, cache: Path) -> str:
    """What products are made of. auto: on a CPU the weights as stored where that is narrower than float32 and our kernels
    can be built, else float32; bf16 elsewhere. `packed-f32` are weights as stored with float32 activations."""
    on_cpu = torch.device(device).type == "cpu"
    if dtype == "packed" and not on_cpu:
        raise BadSetting(f"--dtype packed: kernels for packed weights exist for the CPU, not for {device}; use bf16 or f16")
    if dtype == "packed" and (reason := build(cache).reason):
        raise BadSetting(f"--dtype packed: no CPU kernels: {reason}; use --dtype f32")
    if dtype == "auto":
        packed = on_cpu and narrow and build(cache).library is not None
        dtype = "packed" if packed else "f32" if on_cpu else "bf16"
    return "packed-f32" if dtype == "packed" and activations == "f32" else dtype


def set_threads(count: int | None, ops: Ops) -> None:
    """Torch's threads on the calling thread from now on; None leaves its own choice.

    Beside kernels with a team of their own torch has little left to do, and gets one thread: the idle threads of its pool
    would spin for a while after every operation, on the processors that the team needs.
    """
    if isinstance(ops, CpuOps):
        torch.set_num_threads(1)
    elif count is not None:
        torch.set_num_threads(count)


def pick_ops(
    device: str, dtype: str, *, cache: Path, threads: int | None = None, warn: Callable[[str], object] = lambda line: None
) -> Ops:
    """Our kernels where they exist for this device and dtype and can be built, else plain torch."""
    if torch.device(device).type == "cpu" and dtype in ("f32", *PACKED_DTYPES):
        built = build(cache)
        if built.library is not None:
            packing = Packing(as_stored=dtype in PACKED_DTYPES, coded=dtype == "packed")
            return CpuOps(built.library, threads=threads or DEFAULT_THREADS, packing=packing)
        warn(f"no CPU kernels: {built.reason}; computing with plain torch, slower and with other low bits")
    return TorchOps(torch.device(device))
