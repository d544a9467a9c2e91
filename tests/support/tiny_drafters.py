"""Tiny random DFlash drafters in every safetensors layout, and folders of unsupported variants.

In: what should differ from the plain one. Out: a config and tensors, or a folder. Random norms and matrices that keep
the size of what they multiply, so that a swapped tensor or a missing norm changes the drafts.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

HIDDEN, VOCAB, DRAFT_VOCAB, BLOCK, MASK = 64, 512, 96, 6, 5
HEADS, KV_HEADS, HEAD_DIM, WIDTH = 4, 2, 16, 96
Tensors = dict[str, np.ndarray]


def stack_config(layers: int = 2) -> dict[str, Any]:
    """The keys that both layouts share, as in transformers."""
    return {
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": layers,
        "initializer_range": 0.02,
    }


def zlab_config(layers: int = 2, ids: tuple[int, ...] = (0, 2), **changes: Any) -> dict[str, Any]:
    described = {"mask_token_id": MASK, "target_layer_ids": list(ids)}
    config = {"architectures": ["DFlashDraftModel"], **stack_config(layers), "block_size": BLOCK, "num_target_layers": 3}
    return config | {"dtype": "float32", "dflash_config": described} | changes


def speculators_config(
    layers: int = 2,
    ids: tuple[int, ...] = (0, 2),
    *,
    draft_vocab: int = VOCAB,
    stack: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.5.0",
        "transformer_layer_config": stack_config(layers) | (stack or {}),
        "draft_vocab_size": draft_vocab,
        "block_size": BLOCK,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [index + 1 for index in ids],
        "mask_token_id": MASK,
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": BLOCK - 1}],
            "verifier": {"name_or_path": "some/target", "architectures": []},
        },
    }
    return config | changes


def tensors(layers: int = 2, features: int = 2, seed: int = 0) -> Tensors:
    """The tensors that both layouts share."""
    random = np.random.default_rng(seed)

    def matrix(outputs: int, inputs: int) -> np.ndarray:
        return (random.normal(size=(outputs, inputs)) / math.sqrt(inputs)).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return (1 + 0.2 * random.normal(size=size)).astype(np.float32)

    made = {"fc.weight": matrix(HIDDEN, features * HIDDEN), "hidden_norm.weight": norm(HIDDEN), "norm.weight": norm(HIDDEN)}
    for index in range(layers):
        at = f"layers.{index}."
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            made[f"{at}self_attn.{name}_proj.weight"] = matrix(heads * HEAD_DIM, HIDDEN)
        made[f"{at}self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_DIM)
        for name in ("q", "k"):
            made[f"{at}self_attn.{name}_norm.weight"] = norm(HEAD_DIM)
        for name in ("gate", "up"):
            made[f"{at}mlp.{name}_proj.weight"] = matrix(WIDTH, HIDDEN)
        made[f"{at}mlp.down_proj.weight"] = matrix(HIDDEN, WIDTH)
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"{at}{name}.weight"] = norm(HIDDEN)
    return made


def own_tensors(draft_vocab: int = VOCAB, seed: int = 1) -> Tensors:
    """Further tensors of the speculators layout: embedding, head, and the id map of a reduced vocabulary."""
    random = np.random.default_rng(seed)
    made = {
        "embed_tokens.weight": random.normal(size=(VOCAB, HIDDEN)).astype(np.float32),
        "lm_head.weight": random.normal(size=(draft_vocab, HIDDEN)).astype(np.float32),
    }
    if draft_vocab != VOCAB:
        ids = np.sort(random.choice(VOCAB, size=draft_vocab, replace=False))
        made["d2t"] = (ids - np.arange(draft_vocab)).astype(np.int64)
        made["t2d"] = np.isin(np.arange(VOCAB), ids)
    return made


def write(folder: Path, config: dict[str, Any], stored: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, str(folder / "model.safetensors"))
    return folder


def write_zlab(folder: Path, *, layers: int = 2, **changes: Any) -> Path:
    return write(folder, zlab_config(layers, **changes), tensors(layers))


def write_speculators(folder: Path, *, draft_vocab: int = VOCAB, **changes: Any) -> Path:
    stored = tensors() | own_tensors(draft_vocab)
    return write(folder, speculators_config(draft_vocab=draft_vocab, **changes), stored)
