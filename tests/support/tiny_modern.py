"""Tiny random models of the hybrid and other recent families, with their variants. `tiny.py` writes them.

Sizes: three value heads per key head, widths that are not a multiple of 16, windows shorter than the test texts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import torch
import transformers

from onedraw.models.registry import FAMILIES
from onedraw.models.spec import ModelSpec

VOCAB = 512  # of tiny.py
MTP = "_mtp"  # suffix of models with an MTP head

BASE: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
MODEST = {**BASE, "hidden_size": 64, "max_position_embeddings": 1024}
ODD = {**BASE, "hidden_size": 56, "max_position_embeddings": 1024}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 48}

QWEN3_5: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
QWEN3_5_ODD = {
    **QWEN3_5,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_num_value_heads": 2,
    "linear_conv_kernel_dim": 3,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}

SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA4: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "tie_word_embeddings": True,
    "sliding_window": 24,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    },
}
LARGE = {"num_hidden_layers": 6, "layer_types": [SLIDING] * 5 + [FULL], "attention_k_eq_v": True, "num_global_key_value_heads": 1}
SMALL = {
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, SLIDING, FULL] * 2,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 16,
}
GEMMA4_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "position_embedding_size": 16,
}

LAGUNA: dict[str, Any] = {
    "intermediate_size": 104,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 24,
    "layer_types": [FULL, SLIDING, SLIDING, SLIDING, FULL],
    "num_attention_heads_per_layer": [4, 6, 6, 6, 4],
    "mlp_layer_types": ["dense", *["sparse"] * 4],
    "moe_routed_scaling_factor": 2.5,
    **SHARED,
    "rope_parameters": {
        FULL: {
            "rope_type": "yarn",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 128,
            "beta_slow": 1.0,
            "beta_fast": 64.0,
            "attention_factor": 1.0,
            "partial_rotary_factor": 0.5,
        },
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    },
}
LAGUNA_ODD = {
    **LAGUNA,
    "head_dim": 12,
    "gating": "per-element",
    "moe_router_logit_softcapping": 2.0,
    "tie_word_embeddings": True,
    "attention_bias": True,
    "rope_parameters": {
        FULL: {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 128},
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    },
}
QWEN3_MOE = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 104,
    **EXPERTS,
}

t = transformers
CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "qwen3_5": lambda: t.Qwen3_5TextConfig(**MODEST, **QWEN3_5, intermediate_size=160),
    "qwen3_5_odd": lambda: t.Qwen3_5TextConfig(**ODD, **QWEN3_5_ODD, intermediate_size=104),
    "qwen3_5_vl": lambda: t.Qwen3_5Config(
        text_config={**MODEST, **QWEN3_5, "intermediate_size": 160}, vision_config=VISION, tie_word_embeddings=False
    ),
    "qwen3_5_mtp": lambda: t.Qwen3_5TextConfig(**MODEST, **QWEN3_5, intermediate_size=160),
    "qwen3_5_moe": lambda: t.Qwen3_5MoeTextConfig(**MODEST, **QWEN3_5, **SHARED),
    "qwen3_5_moe_vl": lambda: t.Qwen3_5MoeConfig(
        text_config={**MODEST, **QWEN3_5, **SHARED}, vision_config=VISION, tie_word_embeddings=False
    ),
    "qwen3_5_moe_mtp": lambda: t.Qwen3_5MoeTextConfig(**ODD, **QWEN3_5_ODD, **SHARED),
    "qwen3_moe": lambda: t.Qwen3MoeConfig(**MODEST, **QWEN3_MOE, norm_topk_prob=True, mlp_only_layers=[1]),
    "qwen3_moe_odd": lambda: t.Qwen3MoeConfig(**ODD, **QWEN3_MOE, decoder_sparse_step=2, tie_word_embeddings=True),
    "gemma4_31b": lambda: t.Gemma4TextConfig(**{**MODEST, **GEMMA4, **LARGE}, intermediate_size=160),
    "gemma4_26b": lambda: t.Gemma4TextConfig(
        **{**MODEST, **GEMMA4, **LARGE},
        intermediate_size=104,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=2,
        moe_intermediate_size=24,
    ),
    "gemma4_e4b": lambda: t.Gemma4TextConfig(  # can be split into three stages
        **{**MODEST, **GEMMA4, **SMALL, "num_kv_shared_layers": 2}, intermediate_size=104
    ),
    "gemma4_e2b": lambda: t.Gemma4TextConfig(
        **{**ODD, **GEMMA4, **SMALL, "num_key_value_heads": 1}, intermediate_size=104, use_double_wide_mlp=True
    ),
    "gemma4_vl": lambda: t.Gemma4Config(
        text_config={**MODEST, **GEMMA4, **SMALL, "intermediate_size": 104}, vision_config=GEMMA4_VISION, audio_config=None
    ),
    "laguna": lambda: t.LagunaConfig(**MODEST, **LAGUNA),
    "laguna_odd": lambda: t.LagunaConfig(**ODD, **LAGUNA_ODD),
}
NAMES = tuple(CONFIGS)


def empty(name: str) -> transformers.PreTrainedModel:
    """The model as transformers builds it, with expert code that works in every dtype."""
    config = CONFIGS[name]()
    maker = t.AutoModelForImageTextToText if name.endswith("_vl") else t.AutoModelForCausalLM
    return maker.from_config(config, dtype=torch.float32, experts_implementation="eager").eval()


def spec(name: str) -> ModelSpec:
    """The spec of the model's config."""
    config = json.loads(CONFIGS[name]().to_json_string())
    family = next(family for family in FAMILIES if config["model_type"] in family.model_types)
    return family.from_config(config, "config.json")


def text_config(config: transformers.PretrainedConfig) -> transformers.PretrainedConfig:
    return getattr(config, "text_config", config)


def spread(name: str, noise: torch.Tensor, *, config: transformers.PretrainedConfig) -> torch.Tensor | None:
    """Values of suitable magnitude for weights that only these families have; None for other weights."""
    family = text_config(config).model_type
    last = name.rpartition(".")[2]
    match last:
        case "A_log":
            return noise
        case "dt_bias":
            return noise * 0.5 - 1
        case "layer_scalar":
            return 0.8 + 0.1 * noise
        case "e_score_correction_bias":
            return 0.3 * noise
        case "per_expert_scale" | "scale":
            return 1 + 0.2 * noise
    if "conv1d" in name:
        return 0.5 * noise
    if "embed_tokens_per_layer" in name:
        return 0.1 * noise
    if "norm" in name and noise.dim() == 1:
        centred = family.startswith("qwen3_5") and not name.endswith("linear_attn.norm.weight") and "visual" not in name
        return 0.2 * noise + (0.0 if centred else 1.0)
    return None


def mtp_tensors(config: transformers.PretrainedConfig, seed: int) -> dict[str, torch.Tensor]:
    """The mtp.* tensors of Qwen3.5 checkpoints, which transformers neither reads nor writes."""
    generator = torch.Generator().manual_seed(seed + 1)
    hidden = config.hidden_size
    single = type(config)(**{**config.to_dict(), "num_hidden_layers": 1, "layer_types": [FULL]})
    model = t.AutoModelForCausalLM.from_config(single, dtype=torch.float32)
    shapes = {name: value.shape for name, value in model.state_dict().items() if name.startswith("model.layers.0.")}
    named = {name.replace("model.layers.0.", "mtp.layers.0."): shape for name, shape in shapes.items()}
    named |= {"mtp.fc.weight": torch.Size([hidden, 2 * hidden])}
    named |= {f"mtp.{norm}.weight": torch.Size([hidden]) for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    return {name: _mtp_value(name, torch.randn(shape, generator=generator)) for name, shape in named.items()}


def _mtp_value(name: str, noise: torch.Tensor) -> torch.Tensor:
    return 0.2 * noise if "norm" in name else noise / math.sqrt(noise.shape[-1])
