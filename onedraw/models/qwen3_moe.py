"""Qwen3 with experts: Qwen3's attention, and a mixture of experts in place of most feed-forwards."""

from __future__ import annotations

from onedraw.models.family import Traits, dense_family
from onedraw.models.recipes import PLAIN_EXPERT_NAMES, experts, gguf_experts
from onedraw.models.weights import GGUF, PLAIN, SAFETENSORS, Rules, pairs

MLP = "model.layers.{layer}.mlp."
FROM_FOLDER = Rules(
    outer=SAFETENSORS.outer,
    layer={**SAFETENSORS.layer} | pairs(MLP, "router=gate.weight"),
    made=experts(MLP + "experts."),
    renamed=(PLAIN_EXPERT_NAMES,),
    ignored=SAFETENSORS.ignored,
)
FROM_GGUF = Rules(
    outer=GGUF.outer,
    layer={**GGUF.layer} | pairs("blk.{layer}.", "router=ffn_gate_inp.weight"),
    made=gguf_experts(),
    ignored=GGUF.ignored,
)

QWEN3_MOE = dense_family(
    Traits(family="qwen3_moe", qk_norm=True, window="switched", experts=True),
    model_types=("qwen3_moe",),
    architectures=("Qwen3MoeForCausalLM",),
    gguf=("qwen3moe",),
    rules={"safetensors": FROM_FOLDER, "gguf": FROM_GGUF, "plain": PLAIN},
)
