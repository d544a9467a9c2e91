"""Which device and dtype to run with, where the caller leaves it open.

In: what was asked for. Out: names that the backend takes as they are, or an error that says what is there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from onedraw.backends.torch.kernels.build import build
from onedraw.backends.torch.kernels.cpu import CpuOps
from onedraw.backends.torch.ops import Ops, TorchOps
from onedraw.errors import BadSetting

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def pick_device(device: str, dtype: str) -> tuple[str, str]:
    """(device, dtype): auto is the first CUDA device or else the CPU; f32 on a CPU and bf16 elsewhere."""
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
    return device, dtype if dtype != "auto" else ("f32" if kind == "cpu" else "bf16")


def set_threads(count: int | None) -> None:
    """CPU threads of every product from now on; None leaves torch's own choice."""
    if count is not None:
        torch.set_num_threads(count)


def pick_ops(device: str, dtype: str, *, cache: Path, warn: Callable[[str], object] = lambda line: None) -> Ops:
    """Our kernels where they exist for this device and dtype and can be built, else plain torch."""
    if torch.device(device).type == "cpu" and dtype == "f32":
        built = build(cache)
        if built.library is not None:
            return CpuOps(built.library, threads=torch.get_num_threads())
        warn(f"no CPU kernels: {built.reason}; computing with plain torch, slower and with other low bits")
    if torch.device(device).type == "cuda":
        return _cuda_ops(torch.device(device), DTYPES[dtype], warn)
    return TorchOps(torch.device(device))


def _cuda_ops(device: torch.device, dtype: torch.dtype, warn: Callable[[str], object]) -> Ops:
    from onedraw.backends.torch.kernels.cuda import TritonOps, serves

    if serves(device, dtype):
        return TritonOps(device, pdl=torch.cuda.get_device_capability(device) >= (9, 0))
    if dtype != torch.float32:
        warn(f"no kernels for {torch.cuda.get_device_name(device)}: computing with plain torch, slower and with other low bits")
    return TorchOps(device)
