"""MTP heads are read from folders and GGUF files alike; a missing or broken head is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from onedraw.checkpoints.open import open_checkpoint
from onedraw.errors import CorruptFile, UnsupportedModel
from onedraw.models.mtp import MtpInfo, has_mtp, read_mtp_info
from onedraw.models.registry import read_model_info
from onedraw.models.spec import AttentionSpec, MoeSpec
from tests.support import tiny

FIXTURES = Path(__file__).parent.parent / "fixtures" / "gguf"


def read(path: Path) -> MtpInfo:
    checkpoint = open_checkpoint(path)
    return read_mtp_info(checkpoint, read_model_info(checkpoint))


@pytest.mark.parametrize("name", ["qwen3_5_mtp", "qwen3_5_moe_mtp"])
def test_an_mtp_head_is_one_attention_layer_with_norms_and_fc(name: str, tmp_path: Path) -> None:
    folder = tiny.write_safetensors(name, tmp_path)
    target, mtp = read_model_info(open_checkpoint(folder)).spec, read(folder)
    assert mtp.spec.layer == target.layers[3]
    assert isinstance(mtp.spec.layer.mixer, AttentionSpec)
    assert isinstance(mtp.spec.layer.feed_forward, MoeSpec) == ("moe" in name)
    assert (mtp.spec.hidden, mtp.spec.vocab, mtp.spec.norm, mtp.spec.eps) == (target.hidden, target.vocab, "wide", 1e-6)
    values = {**mtp.weights.outer(), **{f"layer {name}": value for name, value in mtp.weights.layer(0).items()}}
    assert sum(value.size for value in values.values()) == mtp.spec.parameters
    stored = load_file(folder / "model.safetensors")
    np.testing.assert_array_equal(values["fc"], stored["mtp.fc.weight"])
    for ours, theirs in (("norm", "norm"), ("embed_norm", "pre_fc_norm_embedding"), ("hidden_norm", "pre_fc_norm_hidden")):
        np.testing.assert_array_equal(values[ours], stored[f"mtp.{theirs}.weight"] + 1)
    np.testing.assert_array_equal(values["layer attn_norm"], stored["mtp.layers.0.input_layernorm.weight"] + 1)
    heads, width = mtp.spec.layer.attention.heads, mtp.spec.layer.attention.head_dim
    interleaved = stored["mtp.layers.0.self_attn.q_proj.weight"].reshape(heads, 2, width, -1)
    np.testing.assert_array_equal(values["layer q"].reshape(heads, width, -1), interleaved[:, 0])


@pytest.mark.parametrize("name", ["qwen3_5_mtp", "qwen3_5_moe_mtp"])
def test_a_gguf_file_has_the_same_head(name: str, tmp_path: Path) -> None:
    folder = read(tiny.write_safetensors(name, tmp_path / "folder")).weights
    converted = read(tiny.write_gguf(name, tmp_path / "m.gguf")).weights
    for found, expected in ((converted.outer(), folder.outer()), (converted.layer(0), folder.layer(0))):
        assert found.keys() == expected.keys()
        for weight, value in expected.items():
            np.testing.assert_array_equal(found[weight], value)


def test_the_target_does_not_count_the_head_among_its_layers(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny.write_gguf("qwen3_5_mtp", tmp_path / "m.gguf"))
    info = read_model_info(checkpoint)
    assert checkpoint.config["qwen35.block_count"] == 5
    assert len(info.spec.layers) == 4
    assert has_mtp(checkpoint, info)
    assert "--draft mtp" in info.spec.notes[0]


def test_an_extra_block_that_is_not_an_mtp_head_is_refused(tmp_path: Path) -> None:
    from tests.support.memory_source import MemorySource

    checkpoint = open_checkpoint(tiny.write_gguf("qwen3_5_mtp", tmp_path / "m.gguf"))
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if "nextn" not in name}
    with pytest.raises(UnsupportedModel, match=r"blk\.4\.\S+ is unexpected"):
        read_model_info(MemorySource(checkpoint.config, "gguf", tensors))


def test_a_checkpoint_without_a_head_is_refused_by_name(tmp_path: Path) -> None:
    folder = tiny.write_safetensors("qwen3_5", tmp_path / "without")
    for path in (folder, FIXTURES / "qwen3_5.gguf"):
        checkpoint = open_checkpoint(path)
        assert not has_mtp(checkpoint, read_model_info(checkpoint))
        with pytest.raises(UnsupportedModel, match=r"has no MTP head \(mtp\.\* or nextn tensors\); pass another --draft"):
            read_mtp_info(checkpoint, read_model_info(checkpoint))
    with pytest.raises(UnsupportedModel, match="a llama model has no MTP head; supported: qwen3_5, qwen3_5_moe"):
        read(FIXTURES / "llama.gguf")


def test_heads_with_missing_or_extra_tensors_are_refused_by_name(tmp_path: Path) -> None:
    folder = tiny.write_safetensors("qwen3_5_mtp", tmp_path)
    stored, file = load_file(folder / "model.safetensors"), folder / "model.safetensors"
    save_file({**stored, "mtp.embed_tokens.weight": np.zeros((2, 2), np.float32)}, file)
    with pytest.raises(UnsupportedModel, match=r"mtp\.embed_tokens\.weight is unexpected: .* MTP head"):
        read(folder)
    for missing in ("mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight", "mtp.layers.0.post_attention_layernorm.weight"):
        save_file({name: value for name, value in stored.items() if name != missing}, file)
        with pytest.raises(CorruptFile, match=rf"tensor {re.escape(missing)} is missing"):
            read(folder)


def test_a_head_under_the_model_prefix_is_the_same_head(tmp_path: Path) -> None:
    folder = tiny.write_safetensors("qwen3_5_mtp", tmp_path)
    plain, file = read(folder).weights.layer(0), folder / "model.safetensors"
    save_file({f"model.{name}" if name.startswith("mtp.") else name: value for name, value in load_file(file).items()}, file)
    assert json.loads((folder / "config.json").read_text())["mtp_num_hidden_layers"] == 1
    np.testing.assert_array_equal(read(folder).weights.layer(0)["q"], plain["q"])
