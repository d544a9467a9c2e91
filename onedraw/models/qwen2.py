"""Qwen2 and Qwen2.5: Llama's form with biases on q, k and v, and a window that is mostly switched off."""

from __future__ import annotations

from onedraw.models.family import Traits, dense_family

QWEN2 = dense_family(
    Traits(family="qwen2", qkv_bias="always", out_bias="never", window="gated"),
    model_types=("qwen2",),
    architectures=("Qwen2ForCausalLM",),
    gguf=("qwen2",),
)
