"""Configs of released models as published on the hub, by name; those that `random:` knows are imported from there."""

from __future__ import annotations

from typing import Any

from onedraw.checkpoints.random_weights import FULL, SHAPES, SLIDING

QWEN3_5: dict[str, Any] = {
    "vocab_size": 248320,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "max_position_embeddings": 262144,
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
GEMMA4 = {
    "model_type": "gemma4_text",
    "vocab_size": 262144,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 262144,
    "final_logit_softcapping": 30.0,
}
LAGUNA_TYPES = [FULL, SLIDING, SLIDING, SLIDING] * 10

CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3.5-0.8B": {
        **QWEN3_5,
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3.6-27B": {**SHAPES["qwen3.6-27b"], **QWEN3_5},
    "Qwen3.6-35B-A3B": {**SHAPES["qwen3.6-35b-a3b"], **QWEN3_5},
    "Gemma 4 31B": {**SHAPES["gemma4-31b"], **GEMMA4},
    "Gemma 4 26B-A4B": {
        **GEMMA4,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
    "Gemma 4 E4B": {
        **GEMMA4,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 42,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 18,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
    },
    "Gemma 4 E2B": {
        **GEMMA4,
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "use_double_wide_mlp": True,
        "layer_types": ([SLIDING] * 4 + [FULL]) * 7,
    },
    "Laguna-XS.2": {
        "model_type": "laguna",
        "vocab_size": 100352,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 40,
        "num_attention_heads": 48,
        "num_attention_heads_per_layer": [48 if kind == FULL else 64 for kind in LAGUNA_TYPES],
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": 512,
        "layer_types": LAGUNA_TYPES,
        "max_position_embeddings": 131072,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "moe_routed_scaling_factor": 2.5,
        "gating": "per-head",
    },
}
