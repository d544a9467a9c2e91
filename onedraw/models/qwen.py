"""Qwen3 with experts: Qwen3's attention, and a mixture of experts in place of most feed-forwards."""

from __future__ import annotations

from onedraw.models.family import Traits, dense_family
from onedraw.models.weight_names import GGUF_NAMES, PLAIN_NAMES, SAFETENSORS_NAMES, WeightNames, name_table
from onedraw.models.weight_transforms import PLAIN_EXPERT_NAMES, experts, gguf_experts

# -------------------- Qwen2 and Qwen2.5: Llama's form with biases on q, k and v, and a window that is mostly swi


QWEN2 = dense_family(
    Traits(family="qwen2", qkv_bias="always", out_bias="never", window="gated"),
    model_types=("qwen2",),
    architectures=("Qwen2ForCausalLM",),
    gguf=("qwen2",),
)


# -------------------- Qwen3, dense: a norm on every q and k head, and a head size of its own.


QWEN3 = dense_family(
    Traits(family="qwen3", qk_norm=True, window="gated", head_dim=128),
    model_types=("qwen3",),
    architectures=("Qwen3ForCausalLM",),
    gguf=("qwen3",),
)


# -------------------- Qwen3 with experts: Qwen3's attention, and a mixture of experts in place of most feed-forw


MLP = "model.layers.{layer}.mlp."
FROM_FOLDER = WeightNames(
    outer=SAFETENSORS_NAMES.outer,
    layer={**SAFETENSORS_NAMES.layer} | name_table(MLP, "router=gate.weight"),
    transforms=experts(MLP + "experts."),
    aliases=(PLAIN_EXPERT_NAMES,),
    ignored=SAFETENSORS_NAMES.ignored,
)
FROM_GGUF = WeightNames(
    outer=GGUF_NAMES.outer,
    layer={**GGUF_NAMES.layer} | name_table("blk.{layer}.", "router=ffn_gate_inp.weight"),
    transforms=gguf_experts(),
    ignored=GGUF_NAMES.ignored,
)

QWEN3_MOE = dense_family(
    Traits(family="qwen3_moe", qk_norm=True, window="switched", experts=True),
    model_types=("qwen3_moe",),
    architectures=("Qwen3MoeForCausalLM",),
    gguf=("qwen3moe",),
    weight_names={"safetensors": FROM_FOLDER, "gguf": FROM_GGUF, "plain": PLAIN_NAMES},
)
