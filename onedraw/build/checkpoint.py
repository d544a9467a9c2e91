"""Open the checkpoint of a model by its name or path, and read its description, tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from onedraw.checkpoints.base import Checkpoint
from onedraw.checkpoints.catalogue import find_in_catalogue
from onedraw.checkpoints.download import resolve_model
from onedraw.checkpoints.open import open_checkpoint
from onedraw.checkpoints.random_weights import is_random, open_random, open_random_drafter
from onedraw.errors import ModelError
from onedraw.models.registry import ModelInfo, read_model_info
from onedraw.settings import Settings
from onedraw.text.chat_template import ChatTemplate
from onedraw.text.fake_tokenizer import fake_chat_template, synthetic_tokenizer
from onedraw.text.tokenizer import Tokenizer

Progress = Callable[[str], None]  # receives one line of text whenever a stage of loading begins


def find_checkpoint(settings: Settings, progress: Progress | None = None) -> Checkpoint:
    """Open the model's checkpoint, downloaded first if needed; `random:SHAPE` has random weights."""
    if is_random(settings.model):
        return open_random(settings.model)
    return open_checkpoint(resolve_model(settings.model, settings.cache_folder, progress))


def describe(settings: Settings, checkpoint: Checkpoint) -> ModelInfo:
    """Return the description of the model in a checkpoint that these settings opened. Sampling values that the checkpoint does
    not recommend come from the catalogue."""
    info, known = read_model_info(checkpoint), find_in_catalogue(settings.model, checkpoint.path)
    return info if known is None else replace(info, defaults={**known.sampling, **info.defaults})


def open_drafter(path: Path) -> Checkpoint:
    """Open a drafter or draft model by its path; `random:SHAPE` has random weights."""
    return open_random_drafter(str(path)) if is_random(str(path)) else open_checkpoint(path)


def read_text(checkpoint: Checkpoint) -> tuple[Tokenizer, ChatTemplate | None]:
    """Return the tokenizer and chat template, from the files of a folder or the metadata of a GGUF file. Random weights have
    neither and get a synthetic tokenizer."""
    if checkpoint.format == "plain":
        return synthetic_tokenizer(read_model_info(checkpoint).spec.vocab), fake_chat_template()
    if checkpoint.format == "gguf":
        try:
            return Tokenizer.from_gguf(checkpoint.config), ChatTemplate.from_gguf(checkpoint.config)
        except ModelError as error:
            raise type(error)(f"{checkpoint.path}: {error}") from None
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    return Tokenizer.from_folder(folder), ChatTemplate.from_folder(folder)
