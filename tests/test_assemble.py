"""Settings become a running model, under the name its caller gave it, or say what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from onedraw.assemble import open_door
from onedraw.errors import NoRoom
from onedraw.settings import Settings


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-0.5B-Instruct", "smollm2"])
def test_a_model_is_served_under_the_name_it_was_asked_for(name: str) -> None:
    with open_door(Settings(model=name, backend="fake")) as door:
        assert door.card.name == name


@pytest.mark.parametrize(("path", "name"), [("tiny-v1.5.gguf", "tiny-v1.5"), ("folder-0.6B", "folder-0.6B")])
def test_a_path_is_served_under_its_last_part(tmp_path: Path, path: str, name: str) -> None:
    (tmp_path / path).touch()
    with open_door(Settings(model=str(tmp_path / path), backend="fake")) as door:
        assert door.card.name == name


def test_pages_for_less_than_one_sequence_are_refused_at_the_start() -> None:
    with pytest.raises(NoRoom, match="needs 4 pages"):
        open_door(Settings(backend="fake", max_context=64, kv_memory=3))
