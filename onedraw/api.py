"""The Python API: `onedraw.load(model, …)` returns a running LLM, `onedraw.torch_forward(model)` a torch module to
train, and `onedraw.send_weights(url, tensors, …)` sends trained weights to a server."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from onedraw.llm.llm import LLM
from onedraw.settings import Settings


def load(model: str = "smollm2", *, progress: Callable[[str], None] | None = None, **settings: Any) -> LLM:
    """Load a model and start its engine. Settings are named as the flags of `onedraw serve`: max_context=4096, dtype="f32" …"""
    from onedraw.build.llm import build_llm

    return build_llm(Settings.of(model=model, **settings), progress)


def torch_forward(model: Path | str, *, progress: Callable[[str], None] | None = None) -> Any:
    """Return a torch module with the parameters of a dense model, in float32 on the CPU. It is differentiable, and its logprobs
    are bitwise those of a server with `--dtype f32` on a CPU: see `TorchForward` in
    `backends/torch/training/torch_forward.py`."""
    from onedraw.build.training import build_torch_forward

    return build_torch_forward(model, progress)


def send_weights(url: str, tensors: Iterable[tuple[str, Any]], *, token: str) -> str:
    """Replace the weights of a server on this machine. `tensors`: all tensors of a checkpoint of the model, each with its name in
    the checkpoint, on any device; they are sent over loopback. `token`: the server's --update-token. Returns the fingerprint of
    the model with these weights."""
    from onedraw.build.weight_updates import send_weights

    return send_weights(url, tensors, token=token)
