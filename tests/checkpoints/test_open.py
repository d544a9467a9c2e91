from __future__ import annotations

import re
from pathlib import Path

import pytest

from onedraw.checkpoints.gguf import GgufCheckpoint
from onedraw.checkpoints.open import open_checkpoint
from onedraw.checkpoints.safetensors import SafetensorsCheckpoint
from onedraw.errors import CorruptFile, ModelNotFound
from tests.support import tiny

FIXTURE = Path(__file__).parent.parent / "fixtures" / "gguf" / "llama.gguf"


def test_the_path_decides_the_reader(tmp_path: Path) -> None:
    folder = tiny.write_safetensors("llama", tmp_path / "folder")
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "model.gguf").write_bytes(FIXTURE.read_bytes())
    assert isinstance(open_checkpoint(folder), SafetensorsCheckpoint)
    assert isinstance(open_checkpoint(FIXTURE), GgufCheckpoint)
    assert isinstance(open_checkpoint(str(beside)), GgufCheckpoint)


def test_a_folder_with_several_models_lists_them(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelNotFound, match=r"several models.*a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)


def test_a_missing_first_part_is_reported(tmp_path: Path) -> None:
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(b"")
    with pytest.raises(CorruptFile, match="first part is missing"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_a_pickle_is_refused_by_name_and_never_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match=rf"{re.escape(name)}.*never opened; convert it to safetensors"):
        open_checkpoint(tmp_path)


def test_an_error_lists_the_files_that_were_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"looked for \*\.safetensors"):
        open_checkpoint(tmp_path)
    with pytest.raises(ModelNotFound, match="no such file or folder"):
        open_checkpoint(tmp_path / "nothing")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelNotFound, match=r"pass a \.gguf file or a folder"):
        open_checkpoint(tmp_path / "notes.txt")
    (tmp_path / "model.safetensors").write_text("hello")
    with pytest.raises(ModelNotFound, match="pass the folder"):
        open_checkpoint(tmp_path / "model.safetensors")


def test_a_closed_checkpoint_has_no_tensors_left() -> None:
    checkpoint = open_checkpoint(FIXTURE)
    assert checkpoint.tensors
    checkpoint.close()
    assert not checkpoint.tensors
