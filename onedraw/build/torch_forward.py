"""Open a model as a differentiable torch module, for trainers. Only `build` names concrete backends.

In: a model, by its name or path, as for `onedraw serve`. Out: a TorchForward with float32 parameters on the CPU.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from onedraw.build.checkpoint import Progress, cache_folder, describe, find_checkpoint
from onedraw.settings import Settings

if TYPE_CHECKING:
    from onedraw.backends.torch.training.torch_forward import TorchForward


def build_torch_forward(model: Path | str, progress: Progress | None = None) -> TorchForward:
    from onedraw.backends.torch.training.torch_forward import TorchForward

    settings = Settings.of(model=str(model))
    with closing(find_checkpoint(settings, progress)) as checkpoint:
        return TorchForward(describe(settings, checkpoint), cache=cache_folder(settings))
