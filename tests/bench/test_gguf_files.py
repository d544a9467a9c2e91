"""GGUF files written for benchmarks: gguf-py and our reader open them, and the loader finds every weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from bench.gguf_files import TensorToWrite, cut_gguf, vocabulary, write_gguf, write_random
from onedraw.backends.packing import plan_weight_storage
from onedraw.checkpoints.gguf import read_file
from onedraw.checkpoints.open import open_checkpoint
from onedraw.checkpoints.random_weights import SHAPES
from onedraw.models.registry import read_model_info
from onedraw.text.tokenizer import Tokenizer
from tests.support import tiny

SMALL: dict[str, dict[str, Any]] = {
    "llama3-8b": {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3.6-27b": {
        **{"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    },
}


@pytest.mark.parametrize("name", SMALL)
def test_a_random_file_is_read_as_the_model_of_its_shape(name: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**SHAPES[name], **SMALL[name], "vocab_size": 512, "num_hidden_layers": 8}))
    path = tmp_path / "random.gguf"
    size = write_random(path, f"random:{config}-q4_k_m")
    assert size == path.stat().st_size
    info = read_model_info(open_checkpoint(path))
    assert len(info.spec.layers) == 8
    kinds = {tensor.kind for tensor in open_checkpoint(path).tensors.values()}
    assert {"F32", "Q4_K", "Q6_K"} <= kinds
    for index in (0, 3):
        for weight, values in info.weights.layer(index).items():
            assert np.isfinite(values).all(), weight
            assert 0 < np.abs(values).max() < 10, weight


def test_the_gguf_package_reads_the_same_tensors_and_metadata(tmp_path: Path) -> None:
    numbers = np.arange(24, dtype=np.float32).reshape(4, 6)
    metadata = {
        "general.architecture": "x",
        "x.flag": True,
        "x.count": 7,
        "x.size": 0.5,
        "x.names": ["a", "bc"],
        "x.sizes": [1, 2],
    }
    write_gguf(
        tmp_path / "one.gguf", metadata, [TensorToWrite("numbers", (4, 6), "F32", lambda: numbers.reshape(-1).view(np.uint8))]
    )
    reader = gguf.GGUFReader(tmp_path / "one.gguf")
    (tensor,) = reader.tensors
    np.testing.assert_array_equal(tensor.data, numbers)
    assert {key: reader.fields[key].contents() for key in metadata} == metadata


def test_a_cut_file_holds_the_first_layers_of_the_model(tmp_path: Path) -> None:
    whole = tiny.write_gguf("llama", tmp_path / "whole.gguf")
    cut_gguf(whole, tmp_path / "cut.gguf", layers=1)
    full, cut = read_model_info(open_checkpoint(whole)), read_model_info(open_checkpoint(tmp_path / "cut.gguf"))
    assert len(full.spec.layers) > 1 == len(cut.spec.layers)
    for name, values in cut.weights.layer(0).items():
        np.testing.assert_array_equal(values, full.weights.layer(0)[name])
    np.testing.assert_array_equal(cut.weights.outer()["embed"], full.weights.outer()["embed"])
    assert open_checkpoint(tmp_path / "cut.gguf").config["tokenizer.ggml.tokens"]


def test_an_nvfp4_weight_is_multiplied_by_its_stored_scale(tmp_path: Path) -> None:
    """Codes and block scales are in one tensor, the scale of the whole weight in another, which is not a weight itself."""
    file = read_file(tiny.write_gguf("llama", tmp_path / "plain.gguf"))
    up, rng = "blk.1.ffn_up.weight", np.random.default_rng(4)
    rows, width = file.tensors[up].shape
    raw = rng.integers(0, 127, rows * width // 64 * 36, dtype=np.uint8)
    parts = [TensorToWrite(t.name, t.shape, t.kind, lambda t=t: t.data) for t in file.tensors.values() if t.name != up]  # type: ignore[misc]
    parts.append(TensorToWrite(up, (rows, width), "NVFP4", lambda: raw))
    parts.append(TensorToWrite("blk.1.ffn_up.scale", (1,), "F32", lambda: np.array([0.25], np.float32).view(np.uint8)))
    parts.append(TensorToWrite("blk.1.ffn_up.input_scale", (1,), "F32", lambda: np.array([9], np.float32).view(np.uint8)))
    write_gguf(tmp_path / "nvfp4.gguf", file.metadata, parts)
    info = read_model_info(open_checkpoint(tmp_path / "nvfp4.gguf"))
    expected = gguf.quants.dequantize(raw.reshape(rows, -1), gguf.GGMLQuantizationType.NVFP4) * np.float32(0.25)
    np.testing.assert_array_equal(info.weights.layer(1)["up"], expected)
    storage = plan_weight_storage(info.weights, "packed-bf16")
    assert dict(storage.kept)["NVFP4"] == 1
    assert not any(kind == "NVFP4" for kind, *_ in storage.converted)


def test_a_written_vocabulary_is_read_as_a_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "one.gguf"
    write_gguf(path, {"general.architecture": "x", **vocabulary(2000)}, [])
    tokenizer = Tokenizer.from_gguf(read_file(path).metadata)
    assert tokenizer.vocab_size == 2000
    assert tokenizer.eos_id == 1999
    metadata = read_file(path).metadata
    first, second = metadata["tokenizer.ggml.merges"][1500].split(" ")
    text = b"".join(map(tokenizer.token_bytes, map(metadata["tokenizer.ggml.tokens"].index, (first, second))))
    assert tokenizer.token_bytes(1500 + 256) == text
