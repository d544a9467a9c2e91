"""Opens the checkpoint at a path with the reader of its format.

The files are memory-mapped; weights are read later. Pickles are never opened, and code of a checkpoint is never run.
"""

from __future__ import annotations

from pathlib import Path

from onedraw.checkpoints.base import Checkpoint
from onedraw.checkpoints.gguf import GgufCheckpoint, split_name
from onedraw.checkpoints.safetensors import SafetensorsCheckpoint
from onedraw.errors import CorruptFile, ModelNotFound


def open_checkpoint(path: Path | str) -> Checkpoint:
    """The checkpoint at `path`: a folder with safetensors, a folder with one GGUF model, or a .gguf file."""
    path = Path(path)
    if path.is_file():
        if path.suffix == ".gguf":
            return GgufCheckpoint(path)
        if path.suffix == ".safetensors":
            raise ModelNotFound(f"{path}: pass the folder that contains this file and its config.json, not the file")
        raise ModelNotFound(f"{path}: this is not a checkpoint; pass a .gguf file or a folder with *.safetensors and config.json")
    if not path.is_dir():
        raise ModelNotFound(f"{path}: no such file or folder")
    if any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").exists():
        return SafetensorsCheckpoint(path)
    files = sorted(path.glob("*.gguf"))
    models = [file for file in files if (name := split_name(file)) is None or name.number == 1]
    if len(models) == 1:
        return GgufCheckpoint(models[0])
    if models:
        raise ModelNotFound(f"{path}: the folder has several models; pass one of them: {', '.join(file.name for file in models)}")
    if files:
        raise CorruptFile(f"{path}: {files[0].name} is part of a split model whose first part is missing")
    raise ModelNotFound(f"{path}: {_why_no_weights(path)}")


def _why_no_weights(folder: Path) -> str:
    looked = "looked for *.safetensors, model.safetensors.index.json and *.gguf"
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    if pickled:
        return f"found only {pickled[0]}, a pickle, which can run code and is never opened; convert it to safetensors ({looked})"
    return f"no weights found ({looked})"
