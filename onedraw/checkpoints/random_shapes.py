"""Random models by name: `random:NAME` has the shape of a well-known model and random weights, for benchmarks.

`random:NAME-q4_k_m` has random quantized blocks, `random:NAME-dflash` is a drafter for the model, and `random:PATH/config.json`
takes the shape from a file. The tables below contain the text part of each model's published config.json.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onedraw.checkpoints.random_weights import MIXTURES, RandomCheckpoint, RandomQuantTensor, mixture_kind, random_tensor
from onedraw.errors import CorruptFile, ModelNotFound
from onedraw.models.dflash import DRAFTER_WEIGHT_NAMES, detect_layout, outer_shapes, read_drafter_spec
from onedraw.models.registry import find_family
from onedraw.models.source import CheckpointFormat, LazyTensor
from onedraw.models.weight_names import TensorShape, WeightKey

PREFIX = "random:"
QWEN_ROPE = {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25}
QWEN3_6: dict[str, Any] = {
    "vocab_size": 248_320,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "full_attention_interval": 4,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": QWEN_ROPE,
}
SLIDING, FULL = "sliding_attention", "full_attention"
SHAPES: dict[str, dict[str, Any]] = {
    "llama3-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
    },
    "qwen3.6-27b": {
        **QWEN3_6,
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
    },
    "qwen3.6-35b-a3b": {
        **QWEN3_6,
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "gemma4-31b": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "vocab_size": 262_144,
        "hidden_size": 5376,
        "intermediate_size": 21_504,
        "num_hidden_layers": 60,
        "layer_types": ([SLIDING] * 5 + [FULL]) * 10,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 262_144,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
        },
    },
}

DRAFTER_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.6-27b-dflash": {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": 248_320,
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "layer_types": [SLIDING] * 4 + [FULL],
        "sliding_window": 2048,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000_000.0,
        "num_target_layers": 64,
        "dflash_config": {"block_size": 16, "mask_token_id": 248_070, "target_layer_ids": [1, 16, 31, 46, 61]},
    }
}


# ------------------------------------------------------------------ models


def is_random(model: str) -> bool:
    return model.startswith(PREFIX)


def named_mixture(model: str) -> tuple[str, str]:
    """The name of the shape and the quantization mixture of `random:NAME-q4_k_m`; the mixture is "" for plain weights."""
    name = model.removeprefix(PREFIX)
    mixture = next((mixture for mixture in MIXTURES if name.endswith(f"-{mixture}")), "")
    return (name.removesuffix(f"-{mixture}"), mixture) if mixture else (name, "")


def shape_config(model: str) -> dict[str, Any]:
    """The config of `random:NAME` or `random:PATH/config.json`, with or without a quantization suffix."""
    return _config(model, SHAPES)


def _config(model: str, known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    name, _ = named_mixture(model)
    if name in known:
        return dict(known[name])
    path = Path(name)
    if not path.is_file():
        raise ModelNotFound(
            f"{model}: neither a known shape nor the path of a config.json; known shapes: {', '.join(known)}; "
            f"append a quantization for quantized weights: {', '.join(f'-{mixture}' for mixture in MIXTURES)}"
        )
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise CorruptFile(f"{path}: the file is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise CorruptFile(f"{path}: config.json must contain one JSON object")
    return found


@dataclass(frozen=True, slots=True)
class _ConfigOnly:
    """A source with a configuration and no tensors, to find its family."""

    config: Mapping[str, Any]
    path: Path
    format: CheckpointFormat = "plain"
    tensors: Mapping[str, LazyTensor] = field(default_factory=dict)
    generation_config: Mapping[str, Any] = field(default_factory=dict)


def open_random(model: str, seed: int = 0) -> RandomCheckpoint:
    config = shape_config(model)
    family = find_family(_ConfigOnly(config, Path(model)))
    mixture = named_mixture(model)[1]
    spec = family.from_config(config, model)
    return RandomCheckpoint(spec, seed, config=config, name=model, on_device=True, mixture=mixture)


# ------------------------------------------------------------------ drafters


@dataclass(frozen=True, slots=True)
class RandomDrafter:
    """A DFlash drafter with random weights."""

    config: Mapping[str, Any]
    path: Path
    mixture: str = ""
    tensors: Mapping[str, LazyTensor] = field(default_factory=dict)
    format: CheckpointFormat = "safetensors"
    generation_config: Mapping[str, Any] = field(default_factory=dict)

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.config} {self.mixture}".encode()).hexdigest()[:16]

    def stamp(self) -> str:
        """Empty: there are no files."""
        return ""

    def close(self) -> None:
        """No-op: there are no files."""


def make_random_drafter(config: Mapping[str, Any], name: str, *, mixture: str = "", seed: int = 0) -> RandomDrafter:
    bare = RandomDrafter(config, Path(name), mixture)
    layout = detect_layout(bare)
    spec = read_drafter_spec(bare, layout)
    shapes: dict[WeightKey, TensorShape] = {(None, weight): shape for weight, shape in outer_shapes(spec).items()}
    for index, layer in enumerate(spec.layers):
        shapes |= {(index, weight): shape for weight, shape in layer.shapes(spec.hidden).items()}
    tensors: dict[str, LazyTensor] = {}
    for key, shape in shapes.items():
        plain = random_tensor(DRAFTER_WEIGHT_NAMES[layout].stored_name(key), key[1], shape, tied=False, seed=seed)
        kind = mixture_kind(mixture, *key, shape, layers=len(spec.layers), tied=False) if mixture else "F32"
        quantized = RandomQuantTensor(plain.name, shape, kind, seed, plain.std)
        tensors[plain.name] = replace(plain, on_device=True) if kind == "F32" else quantized
    return replace(bare, tensors=tensors)


def open_random_drafter(model: str) -> RandomDrafter:
    """The drafter `random:qwen3.6-27b-dflash` or `random:PATH/config.json`, with or without a quantization suffix."""
    return make_random_drafter(_config(model, DRAFTER_SHAPES), model, mixture=named_mixture(model)[1])
