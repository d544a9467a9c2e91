"""One way to make a torch backend from a folder or file, for every test that needs one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from onedraw.backends.torch.backend import TorchBackend
from onedraw.backends.torch.device import pick_ops
from onedraw.backends.torch.ops import TorchOps
from onedraw.checkpoints.base import open_checkpoint
from onedraw.models.loading import describe
from onedraw.settings import default_cache_dir


def backend_of(
    path: Path,
    *,
    kernels: bool = True,
    lanes: int = 4,
    pages: int | tuple[int, ...] = 200,
    page_size: int = 8,
    max_context: int = 400,
    drafts: int = 64,
    checkpoints: int = 12,
    check: bool = True,
    make_drafter: Callable[..., Any] | None = None,
) -> TorchBackend:
    """Float32 on the CPU, with our kernels or with plain torch."""
    described = describe(open_checkpoint(path))
    return TorchBackend(
        described.spec,
        described.weights,
        dtype="f32",
        device="cpu",
        lanes=lanes,
        pages=pages,
        page_size=page_size,
        max_context=max_context,
        drafts=drafts,
        checkpoints=checkpoints,
        ops=pick_ops("cpu", "f32", cache=default_cache_dir()) if kernels else TorchOps(torch.device("cpu")),
        check=check,
        make_drafter=make_drafter,
    )
