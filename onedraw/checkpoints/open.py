"""A path → an open checkpoint: what every format offers, and which reader a path needs.

In: a folder or a file. Out: a Checkpoint, mapped and not yet read. Nothing here runs or unpickles what it opens.
"""

from __future__ import annotations

from pathlib import Path

from onedraw.checkpoints.base import Checkpoint
from onedraw.checkpoints.gguf import GgufCheckpoint, split_name
from onedraw.checkpoints.safetensors import SafetensorsCheckpoint
from onedraw.errors import CorruptFile, ModelNotFound


def open_checkpoint(path: Path | str) -> Checkpoint:
    """The checkpoint at `path`: a folder with safetensors, a folder with one GGUF, or a .gguf file."""
    place = Path(path)
    if place.is_file():
        if place.suffix == ".gguf":
            return GgufCheckpoint(place)
        if place.suffix == ".safetensors":
            raise ModelNotFound(f"{place}: pass the folder that holds this file and its config.json, not the file")
        raise ModelNotFound(f"{place}: not a checkpoint; pass a .gguf file or a folder with *.safetensors and config.json")
    if not place.is_dir():
        raise ModelNotFound(f"{place}: no such file or folder")
    if any(place.glob("*.safetensors")) or (place / "model.safetensors.index.json").exists():
        return SafetensorsCheckpoint(place)
    files = sorted(place.glob("*.gguf"))
    models = [file for file in files if (name := split_name(file)) is None or name.number == 1]
    if len(models) == 1:
        return GgufCheckpoint(models[0])
    if models:
        raise ModelNotFound(f"{place}: holds several models, pass one of them: {', '.join(file.name for file in models)}")
    if files:
        raise CorruptFile(f"{place}: {files[0].name} is part of a split model whose first part is missing")
    raise ModelNotFound(f"{place}: {_what_is_there(place)}")


def _what_is_there(folder: Path) -> str:
    looked = "looked for *.safetensors, model.safetensors.index.json and *.gguf"
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    if pickled:
        return f"only {pickled[0]}, a pickle that could run code and is never opened; convert it to safetensors ({looked})"
    return f"no weights found ({looked})"
