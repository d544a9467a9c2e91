"""Qwen2, Qwen2.5 and Qwen3, dense and with experts. Qwen3.5 and later are in `qwen3_5.py`.

Qwen2 is the Llama form with biases on q, k and v. Qwen3 has an RMSNorm on every q and k head instead, and its mixture-of-experts
models replace most feed-forwards with experts. A sliding window is described by all configs and enabled by few.
"""

from __future__ import annotations

from onedraw.models.family import Traits, dense_family
from onedraw.models.weight_names import GGUF_NAMES, PLAIN_NAMES, SAFETENSORS_NAMES, WeightNames, name_table
from onedraw.models.weight_transforms import EXPERT_WEIGHT_ALIAS, experts, gguf_experts

QWEN2 = dense_family(
    Traits(family="qwen2", qkv_bias="always", out_bias="never", window="gated"),
    model_types=("qwen2",),
    architectures=("Qwen2ForCausalLM",),
    gguf=("qwen2",),
)

QWEN3 = dense_family(
    Traits(family="qwen3", qk_norm=True, window="gated", head_dim=128),
    model_types=("qwen3",),
    architectures=("Qwen3ForCausalLM",),
    gguf=("qwen3",),
)

MLP = "model.layers.{layer}.mlp."
QWEN3_MOE = dense_family(
    Traits(family="qwen3_moe", qk_norm=True, window="switched", experts=True),
    model_types=("qwen3_moe",),
    architectures=("Qwen3MoeForCausalLM",),
    gguf=("qwen3moe",),
    weight_names={
        "safetensors": WeightNames(
            outer=SAFETENSORS_NAMES.outer,
            layer={**SAFETENSORS_NAMES.layer} | name_table(MLP, "router=gate.weight"),
            transforms=experts(MLP + "experts."),
            aliases=(EXPERT_WEIGHT_ALIAS,),
            ignored=SAFETENSORS_NAMES.ignored,
        ),
        "gguf": WeightNames(
            outer=GGUF_NAMES.outer,
            layer={**GGUF_NAMES.layer} | name_table("blk.{layer}.", "router=ffn_gate_inp.weight"),
            transforms=gguf_experts(),
            ignored=GGUF_NAMES.ignored,
        ),
        "plain": PLAIN_NAMES,
    },
)
