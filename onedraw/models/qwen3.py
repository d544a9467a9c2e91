"""Qwen3, dense: a norm on every q and k head, and a head size of its own."""

from __future__ import annotations

from onedraw.models.family import Traits, dense_family

QWEN3 = dense_family(
    Traits(family="qwen3", qk_norm=True, window="gated", head_dim=128),
    model_types=("qwen3",),
    architectures=("Qwen3ForCausalLM",),
    gguf=("qwen3",),
)
