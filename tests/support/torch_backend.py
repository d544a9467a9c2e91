"""Makes torch backends from a checkpoint, and rows for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from onedraw.backends.torch.backend import TorchBackend
from onedraw.backends.torch.device import pick_ops
from onedraw.backends.torch.ops.base import Ops
from onedraw.backends.torch.ops.plain.ops import TorchOps
from onedraw.backends.torch.runner.pipeline import Pipeline, StageDevice
from onedraw.checkpoints.open import open_checkpoint
from onedraw.models.registry import read_model_info
from onedraw.settings import default_cache_dir
from onedraw.types import History, Row, SamplingParams


def slice_row(tokens: Sequence[int], start: int, stop: int, *, prompt: int, groups: int) -> Row:
    """Positions [start, stop) of a text whose first `prompt` tokens are the prompt; no token is sampled."""
    return Row(
        request_id="x",
        lane=0,
        pages=(tuple(range(20)),) * groups,
        start=start,
        tokens=tuple(tokens[start:stop]),
        drafts=(),
        prompt_stop=prompt,
        samples=False,
        params=SamplingParams(),
        history=History(tuple(tokens)),
    )


def make_backend(
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
    cuts: tuple[int, ...] = (),
    dtype: str = "f32",
    activation: str | None = None,
    kv_dtype: str | None = None,
    overlap: bool = False,
    ahead: bool | None = None,
) -> TorchBackend:
    """A CPU backend: with the C kernels or plain torch; in one stage or split before the layers `cuts`, overlapped or not."""
    info = read_model_info(open_checkpoint(path))
    cpu = torch.device("cpu")

    def ops() -> Ops:
        return pick_ops("cpu", "f32", cache=default_cache_dir()) if kernels else TorchOps(cpu)

    return TorchBackend(
        info.spec,
        info.weights,
        dtype=dtype,
        activation=activation,
        kv_dtype=kv_dtype,
        stage_devices=[StageDevice(cpu, ops(), stop) for stop in (*cuts, None)],
        rows=8192,
        lanes=lanes,
        pages=pages,
        page_size=page_size,
        max_context=max_context,
        drafts=drafts,
        checkpoints=checkpoints,
        check=check,
        make_drafter=make_drafter,
        ahead=ahead,
        pipeline=Pipeline([lambda: None for _ in range(len(cuts) + 1)]) if overlap else None,
        max_in_flight=len(cuts) + 1 if overlap else 1,
    )
