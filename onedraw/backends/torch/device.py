"""Which device and dtype to run with, where the caller leaves it open.

In: what was asked for. Out: names that the backend takes as they are, or an error that says what is there.
"""

from __future__ import annotations

import torch

from onedraw.errors import BadSetting


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
