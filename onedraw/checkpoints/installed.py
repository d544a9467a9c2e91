"""Models on disk: those that were downloaded into the cache folder, and those in the hub's own cache; their sizes; removal."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onedraw.checkpoints.catalogue import BUILT_IN_MODELS, CATALOGUE
from onedraw.errors import ModelNotFound


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A model on disk. Field names are keys of `onedraw list --json`."""

    name: str  # short name, or hub id if the catalogue has no short name
    source: str  # hub id; empty for a built-in model
    path: str
    size: int  # bytes on disk


def installed_models(cache_dir: Path) -> list[InstalledModel]:
    """All models on disk, by name."""
    found = [
        InstalledModel(name, "", str(file), file.stat().st_size)
        for name, model in BUILT_IN_MODELS.items()
        if (file := cache_dir / name / model.file_name).is_file()
    ]
    short = {model.hub: name for name, model in CATALOGUE.items() if model.wheel is None}
    for repository in _hub_repositories():
        found.append(
            InstalledModel(
                short.get(repository.repo_id, repository.repo_id),
                repository.repo_id,
                str(repository.repo_path),
                repository.size_on_disk,
            )
        )
    return sorted(found, key=lambda model: model.name)


def remove_model(name: str, cache_dir: Path) -> InstalledModel:
    """Remove a model from disk by its short name or hub id. `name` is never taken as a path, so only downloads are removed."""
    for model in installed_models(cache_dir):
        if name in (model.name, model.source):
            shutil.rmtree(Path(model.path) if model.source else Path(model.path).parent)
            return model
    raise ModelNotFound(f"no model {name!r} was downloaded; `onedraw list` shows those that were")


def _hub_repositories() -> list[Any]:
    """The model repositories (CachedRepoInfo) in the cache of huggingface_hub; none without the library or the cache."""
    try:
        from huggingface_hub import scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
    except ImportError:
        return []
    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return []
    return [repository for repository in cache.repos if repository.repo_type == "model"]
