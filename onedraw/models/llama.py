"""Llama 2, 3 and 3.x, SmolLM2 and other models with the Llama architecture; and Mistral, which adds a sliding window."""

from __future__ import annotations

from onedraw.models.family import Traits, dense_family

LLAMA = dense_family(
    Traits(family="llama", mlp_bias=True, kv_heads_named=False, permuted=True),
    model_types=("llama",),
    architectures=("LlamaForCausalLM", "LLaMAForCausalLM"),
    gguf=("llama",),  # GGUF converters write Mistral models as llama too
)

MISTRAL = dense_family(
    Traits(family="mistral", qkv_bias="never", out_bias="never", window="all"),
    model_types=("mistral",),
    architectures=("MistralForCausalLM",),
    gguf=(),
)
