"""The safetensors reader: compared with the library, and on broken files of every kind."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from onedraw.checkpoints.safetensors import SafetensorsCheckpoint
from onedraw.errors import CorruptFile, ModelNotFound
from tests.support import tiny


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_tensors_equal_those_of_the_library(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = tiny.write_safetensors("qwen2", tmp_path, dtype=dtype)
    ours, theirs = SafetensorsCheckpoint(folder), safetensors.torch.load_file(folder / "model.safetensors")
    assert set(ours.tensors) == set(theirs)
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours.tensors[name].float32(), tensor.float().numpy())
    assert ours.config["model_type"] == "qwen2"
    assert ours.generation_config["eos_token_id"] == [2, 0]


def test_shards_together_have_all_tensors(tmp_path: Path) -> None:
    whole = SafetensorsCheckpoint(tiny.write_safetensors("llama31", tmp_path / "whole"))
    parts = SafetensorsCheckpoint(tiny.write_safetensors("llama31", tmp_path / "parts", shard="200KB"))
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    assert set(whole.tensors) == set(parts.tensors)
    for name, tensor in whole.tensors.items():
        np.testing.assert_array_equal(parts.tensors[name].data, tensor.data)
    assert whole.fingerprint() == parts.fingerprint()


def test_the_error_about_a_missing_shard_names_file_and_tensor(tmp_path: Path) -> None:
    tiny.write_safetensors("llama", tmp_path, shard="200KB")
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(CorruptFile, match=rf"{lost.name}: the file is missing; tensor model\.\S+ should be in it"):
        SafetensorsCheckpoint(tmp_path)


def test_a_named_pipe_in_place_of_the_weights_is_refused_at_once(tmp_path: Path) -> None:
    """Opening one waits for a process that writes to it."""
    tiny.write_safetensors("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "model.safetensors")
    writes = os.open(tmp_path / "model.safetensors", os.O_RDWR)  # so that a reader that opens it fails instead of waiting
    try:
        with pytest.raises(CorruptFile, match="not a regular file"):
            SafetensorsCheckpoint(tmp_path)
    finally:
        os.close(writes)


def test_a_shard_whose_name_no_file_can_have_is_missing(tmp_path: Path) -> None:
    tiny.write_safetensors("llama", tmp_path, shard="200KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = "x" * 5000
    path.write_text(json.dumps(index))
    with pytest.raises(CorruptFile, match=r"the file is missing; tensor model\.norm\.weight should be in it"):
        SafetensorsCheckpoint(tmp_path)


def test_a_tensor_that_only_the_index_lists_is_reported(tmp_path: Path) -> None:
    tiny.write_safetensors("llama", tmp_path, shard="200KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra.weight"] = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index))
    with pytest.raises(CorruptFile, match=r"tensor model\.extra\.weight is missing"):
        SafetensorsCheckpoint(tmp_path)


def test_the_error_about_a_truncated_file_names_the_tensor(tmp_path: Path) -> None:
    tiny.write_safetensors("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(CorruptFile, match=r"model\.safetensors: tensor \S+ ends \d+ bytes beyond"):
        SafetensorsCheckpoint(tmp_path)


def write(folder: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    other = {**ENTRY, "data_offsets": [4, 12]}
    with pytest.raises(CorruptFile, match="the byte ranges of tensors a and b overlap"):
        SafetensorsCheckpoint(write(tmp_path, {"b": other, "a": ENTRY}, bytes(16)))


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"{not json", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        ([1], "not a JSON object"),
        ({"x": {**ENTRY, "shape": [3]}}, "tensor x: 8 bytes cannot hold F32 of shape"),
        ({"x": {**ENTRY, "data_offsets": [8, 0]}}, "tensor x"),
        ({"x": {**ENTRY, "data_offsets": [4, 12]}}, "tensor x ends 4 bytes beyond"),
        ({"x": {**ENTRY, "shape": [-2]}}, "tensor x"),
        ({"x": {**ENTRY, "dtype": "F99"}}, "tensor x: unknown dtype F99"),
        ({"x": {"dtype": "F32"}}, "tensor x: the header entry lacks"),
        ({"x": 5}, "tensor x: the header entry lacks"),
    ],
)
def test_a_broken_header_is_corrupt(tmp_path: Path, header: Any, words: str) -> None:
    with pytest.raises(CorruptFile, match=words):
        SafetensorsCheckpoint(write(tmp_path, header, bytes(8)))


@pytest.mark.parametrize("content", [b"", b"abc", struct.pack("<Q", 2**60) + b"{}", struct.pack("<Q", 0)])
def test_a_file_without_a_header_is_corrupt(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, {})
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CorruptFile, match=r"model\.safetensors"):
        SafetensorsCheckpoint(tmp_path)


def test_weights_without_a_config_are_refused(tmp_path: Path) -> None:
    write(tmp_path, {"x": ENTRY}, bytes(8))
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "\ud800"])
def test_the_error_about_a_broken_config_names_the_file(tmp_path: Path, text: str) -> None:
    write(tmp_path, {"x": ENTRY}, bytes(8))
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CorruptFile, match=r"config\.json"):
        SafetensorsCheckpoint(tmp_path)
