"""Specs and weights are read correctly: a reference forward pass from them equals transformers."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers

from onedraw.checkpoints.open import open_checkpoint
from onedraw.models.registry import ModelInfo, read_model_info
from onedraw.models.weight_names import weight_shapes
from tests.reference.forward import logits
from tests.support import tiny
from tests.support.count_calls import count_calls

FIXTURES = Path(__file__).parent.parent / "fixtures" / "gguf"
TOKENS = [(7 * i * i + 3 * i + 5) % tiny.VOCAB for i in range(80)]  # longer than Mistral's window of 32


def transformers_logits(model: transformers.PreTrainedModel) -> np.ndarray:
    """Logits of transformers in double precision, including the norms, which it otherwise computes in float32."""
    with torch.no_grad(), mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        return model.double()(torch.tensor([TOKENS])).logits[0].numpy()


def assert_logits_equal(info: ModelInfo, expected: np.ndarray) -> None:
    found = logits(info.weights, TOKENS)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    np.testing.assert_array_equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", [*tiny.NAMES, *tiny.MODERN])
def test_a_transformers_folder_computes_what_transformers_computes(name: str, tmp_path: Path) -> None:
    assert_logits_equal(
        read_model_info(open_checkpoint(tiny.write_safetensors(name, tmp_path))), transformers_logits(tiny.build(name))
    )


@pytest.mark.parametrize("name", tiny.NAMES)
def test_the_gguf_version_computes_the_same(name: str, tmp_path: Path) -> None:
    assert_logits_equal(
        read_model_info(open_checkpoint(tiny.write_gguf(name, tmp_path / "m.gguf"))), transformers_logits(tiny.build(name))
    )


@pytest.mark.parametrize("name", [name for name in tiny.GGUF_MODELS if name in tiny.MODERN])
def test_the_gguf_version_has_the_same_bits(name: str, tmp_path: Path) -> None:
    """The folder equals transformers (test above), so the GGUF file does too."""
    folder = read_model_info(open_checkpoint(tiny.write_safetensors(name, tmp_path / "folder")))
    converted = read_model_info(open_checkpoint(tiny.write_gguf(name, tmp_path / "m.gguf")))
    assert replace(converted.spec, notes=(), eps=0.0) == replace(folder.spec, notes=(), eps=0.0)
    assert np.float32(converted.spec.eps) == np.float32(folder.spec.eps)
    assert digest(converted) == digest(folder)


VARIANTS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama biased": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama linear rope": (
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "llama wide heads": (transformers.LlamaConfig, {"head_dim": 32}),
    "qwen3 biased": (transformers.Qwen3Config, {"head_dim": 16, "attention_bias": True}),
    "qwen2 windows": (transformers.Qwen2Config, {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen2 yarn": (
        transformers.Qwen2Config,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 256,
            }
        },
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_optional_features_of_a_config_are_supported(variant: str, tmp_path: Path) -> None:
    kind, changed = VARIANTS[variant]
    model = transformers.AutoModelForCausalLM.from_config(kind(**{**tiny.COMMON, **changed}), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(tiny._spread(name, noise, tied=False))
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(tmp_path)
    assert_logits_equal(read_model_info(open_checkpoint(tmp_path)), transformers_logits(model))


def test_an_older_config_gives_the_same_spec(tmp_path: Path) -> None:
    newer = read_model_info(open_checkpoint(tiny.write_safetensors("llama31", tmp_path))).spec
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    for kind in ("rope_type", "type"):
        config["rope_scaling"] = {**{k: v for k, v in rope.items() if k != "rope_type"}, kind: "llama3"}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert read_model_info(open_checkpoint(tmp_path)).spec == newer


# ------------------------------------------------------------------ llama.cpp's own conversions

# SHA-256 over all weights as float32: those outside the layers, then layer by layer, each sorted by name. Computed from the
# safetensors that these files were converted from: the inverse mapping is exact.
DIGESTS = {
    "llama": "de92abf54907891488e7d9c38faa39025ad6520c919e9ce352fc57ad878ff857",
    "llama31": "3eeb71dcee78e5e8b3d7f70c22917fb38fa67b76d69e0a3d3e55ec4bf1a85fc3",
    "qwen3": "02668fcd4e7409ab103af9189bdbef754debb6a18df94c99c51caeac93be0056",
    "qwen3_5": "6fa39786421184b19e23847a1e4b507d60d0c46705333121acf2cd880a0f90d7",
    "qwen3_5_moe": "897d09657f87fc9b931088b65d2fe2ed3daea33662b62c4203b17c0ebadd4d01",
    "gemma4_31b": "b65a73ce08eb753b4feefec8af8d1710ce4aba28bca7f1df8866a305ecb78c7e",
    "gemma4_26b": "306470d0c13413ecc00693122c1a4004a9758a919cd409508a2ef8ff0089c621",
    "gemma4_e4b": "bb0f95959350709446bc3ee3e92e198530270afa3ec161c208e6819b59a4ded9",
    "laguna": "ad368b04a49ba3623b746fe78c756837518385ce91b7d02e1c97842c6e7a1598",
}


def digest(info: ModelInfo) -> str:
    total = hashlib.sha256()
    for layer, weight in sorted(weight_shapes(info.spec), key=lambda at: (-1 if at[0] is None else at[0], at[1])):
        total.update(f"{layer} {weight}".encode())
        total.update(info.weights.read(layer, weight).tobytes())
    return total.hexdigest()


@pytest.mark.parametrize("name", DIGESTS)
def test_a_conversion_by_llama_cpp_maps_back_to_the_bits_it_came_from(name: str) -> None:
    assert digest(read_model_info(open_checkpoint(FIXTURES / f"{name}.gguf"))) == DIGESTS[name]


def test_converted_files_have_the_right_spec() -> None:
    llama, scaled, qwen3 = (
        read_model_info(open_checkpoint(FIXTURES / f"{name}.gguf")).spec for name in ("llama", "llama31", "qwen3")
    )
    assert (llama.family, len(llama.layers), llama.hidden, llama.vocab, llama.tied) == ("llama", 4, 64, 1024, True)
    assert (llama.max_context, llama.layers[0].feed_forward.width) == (2048, 160)
    assert np.float32(llama.eps) == np.float32(1e-5)
    assert llama.layers[0].mixer.rope.inverse_frequencies() == [100000.0 ** (-i / 8) for i in range(8)]
    assert not scaled.tied
    mixer = qwen3.layers[0].mixer
    assert (mixer.heads, mixer.kv_heads, mixer.head_dim, mixer.qk_norm) == (4, 2, 32, True)


def test_rope_divisors_in_a_gguf_are_the_scaled_rope_of_its_config() -> None:
    rope = read_model_info(open_checkpoint(FIXTURES / "llama31.gguf")).spec.layers[0].mixer.rope
    assert rope.kind == "divisors"
    named = replace(rope, kind="llama3", divisors=(), factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=512)
    np.testing.assert_allclose(rope.inverse_frequencies(), named.inverse_frequencies(), rtol=1e-6)
    assert rope.inverse_frequencies() != replace(rope, kind="default").inverse_frequencies()


@pytest.mark.weights
def test_the_default_model_is_read_with_few_calls(smollm2_path: Path) -> None:
    def read() -> tuple[ModelInfo, int]:
        info = read_model_info(open_checkpoint(smollm2_path))
        count = sum(value.size for value in info.weights.outer().values())
        for index in range(len(info.spec.layers)):
            count += sum(value.size for value in info.weights.layer(index).values())
        return info, count

    (info, count), calls = count_calls(read)
    assert count == info.spec.parameters == 134_515_008
    assert info.eos_ids == (2,)
    assert calls < 20 * info.spec.vocab  # most calls parse the vocabulary; half a second in total
