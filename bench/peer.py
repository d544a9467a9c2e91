"""Build a `transformers` model with the weights of a checkpoint, for comparisons.

In: a Llama-family checkpoint that onedraw can read. Out: a transformers model with exactly these (dequantized) weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from onedraw.checkpoints.open import open_checkpoint
from onedraw.models.registry import read_model_info

NAMES = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}


def llama_in_transformers(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return a LlamaForCausalLM with the weights of the checkpoint. The loaders of transformers do not read the file."""
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = open_checkpoint(path)
    info = read_model_info(checkpoint)
    spec, mixer = info.spec, info.spec.layers[0].attention
    config = LlamaConfig(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        intermediate_size=spec.layers[0].feed_forward.width,
        num_hidden_layers=len(spec.layers),
        num_attention_heads=mixer.heads,
        num_key_value_heads=mixer.kv_heads,
        head_dim=mixer.head_dim,
        rms_norm_eps=spec.eps,
        max_position_embeddings=spec.max_context,
        tie_word_embeddings=spec.tied,
        rope_parameters={"rope_type": "default", "rope_theta": mixer.rope.theta},
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=None,
    )
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call, unused-ignore]
    outer = info.weights.outer()
    state = {"model.embed_tokens.weight": outer["embed"], "model.norm.weight": outer["norm"]}
    state["lm_head.weight"] = outer["embed"] if spec.tied else outer["head"]
    for index in range(len(spec.layers)):
        for name, array in info.weights.layer(index).items():
            state[f"model.layers.{index}.{NAMES[name]}"] = array
    model.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
    checkpoint.close()
    return model.to(dtype).eval()
