"""Tiny random checkpoints of every family, as transformers folders and as GGUF files with the same weights.

In: a family's name and a seed. Out: files. Norms and biases are large enough to matter and matrices preserve the magnitude of
their input, so that a missing bias, a swapped head or a wrong rope changes the argmax. GGUF files have the form that converters
write (other names, permuted q and k of Llama, rope divisors).
"""

from __future__ import annotations

import inspect
import json
import math
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support import tiny_gguf, tiny_modern

NAMES = ("llama", "llama31", "mistral", "qwen2", "qwen3")
MODERN = tiny_modern.NAMES  # hybrids, experts, shared keys and values
GGUF_MODELS = tuple(n for n in (*NAMES, *MODERN) if not n.endswith("_vl") and n != "laguna_odd")  # have a GGUF form
VOCAB = 512
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END_OF_TEXT, IM_END = 0, 2
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": IM_END,
    "pad_token_id": END_OF_TEXT,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def config(name: str) -> transformers.PretrainedConfig:
    plain = {"rope_type": "default"}
    match name:
        case "llama":  # tied, grouped queries
            rope = {**plain, "rope_theta": 100000.0}
            return transformers.LlamaConfig(**COMMON, rms_norm_eps=1e-5, tie_word_embeddings=True, rope_parameters=rope)
        case "llama31":  # untied, scaled rope
            return transformers.LlamaConfig(**COMMON, rms_norm_eps=1e-5, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE)
        case "mistral":  # a window shorter than the test texts
            rope = {**plain, "rope_theta": 10000.0}
            return transformers.MistralConfig(**COMMON, tie_word_embeddings=False, sliding_window=32, rope_parameters=rope)
        case "qwen2":  # biases on q, k, v
            rope = {**plain, "rope_theta": 1000000.0}
            return transformers.Qwen2Config(**COMMON, tie_word_embeddings=True, rope_parameters=rope)
        case "qwen3":  # norms on q and k, heads wider than hidden / heads
            rope = {**plain, "rope_theta": 1000000.0}
            return transformers.Qwen3Config(**COMMON, tie_word_embeddings=True, head_dim=32, rope_parameters=rope)
        case _:
            raise ValueError(name)


def build(name: str, seed: int = 0) -> transformers.PreTrainedModel:
    """The family's transformers model with random float32 weights, in eval mode."""
    if name in MODERN:
        model = tiny_modern.empty(name)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config(name), dtype=torch.float32).eval()
    fill(model, seed)
    model.generation_config = transformers.GenerationConfig(eos_token_id=[IM_END, END_OF_TEXT], pad_token_id=END_OF_TEXT)
    return model


def fill(model: transformers.PreTrainedModel, seed: int) -> None:
    """Random values large enough to affect the output."""
    generator = torch.Generator().manual_seed(seed)
    model_config = model.config
    scalars = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("layer_scalar")]
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *scalars]:  # a tied head is listed once
            noise = torch.randn(parameter.shape, generator=generator)
            special = tiny_modern.spread(name, noise, config=model_config)
            parameter.copy_(_spread(name, noise, tied=bool(model_config.tie_word_embeddings)) if special is None else special)


def _spread(name: str, noise: torch.Tensor, *, tied: bool) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return 1 + 0.2 * noise
    if name.endswith("bias"):
        return 0.3 * noise
    if "embed_tokens" in name:
        return noise * (0.1 if tied else 0.5)
    if "lm_head" in name:
        return noise * 2 / math.sqrt(noise.shape[-1])
    return noise / math.sqrt(noise.shape[-1])


def tokenizer() -> Tokenizer:
    """Byte-level BPE of VOCAB entries, learned from a module of the standard library."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=SPECIAL, show_progress=False, initial_alphabet=alphabet)
    made.train_from_iterator([inspect.getsource(textwrap)], trainer)
    return made


# ------------------------------------------------------------------ transformers folders


def write_safetensors(name: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, shard: str = "1GB") -> Path:
    """A folder as `save_pretrained` writes it, with tokenizer and chat template. A small `shard` makes several files."""
    transformers.utils.logging.disable_progress_bar()
    model = build(name, seed).to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    if name.endswith(tiny_modern.MTP):
        _add_mtp(folder, {name: value.to(dtype) for name, value in tiny_modern.mtp_tensors(model.config, seed).items()})
    tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


def _add_mtp(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
    model_config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**model_config, "mtp_num_hidden_layers": 1}))


# ------------------------------------------------------------------ GGUF files

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(name: str, file: Path, *, seed: int = 0, kind: str = "F32") -> Path:
    """The GGUF version of `write_safetensors(name, seed=seed)`: matrices as `kind`, the rest as F32."""
    model = build(name, seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    arch = tiny_gguf.arch_of(model) if name in MODERN else {"llama31": "llama", "mistral": "llama"}.get(name, name)
    writer = gguf.GGUFWriter(str(file), arch)
    if name in MODERN:
        mtp = tiny_modern.mtp_tensors(model.config, seed) if name.endswith(tiny_modern.MTP) else {}
        tiny_gguf.metadata(writer, model, mtp=bool(mtp))
        tensors = tiny_gguf.tensors(model, {name: value.numpy() for name, value in mtp.items()})
    else:
        _write_metadata(writer, model.config, arch)
        tensors = _tensors(name, model, arch)
    _write_vocabulary(writer)
    for tensor_name, values in tensors:
        # Converters never quantize vectors, routers, convolutions and the gate of a shared expert.
        plain = values.ndim < 2 or "ffn_gate_inp" in tensor_name or "ssm_conv1d" in tensor_name
        _write_tensor(writer, tensor_name, values, "F32" if plain else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _tensors(name: str, model: transformers.PreTrainedModel, arch: str) -> Iterator[tuple[str, np.ndarray]]:
    if name == "llama31":
        divisors = rope_divisors(head_dim=16, **{key: LLAMA3_ROPE[key] for key in LLAMA3_ROPE if key != "rope_type"})
        yield "rope_freqs.weight", np.asarray(divisors, np.float32)
    for tensor_name, tensor in model.state_dict().items():
        if tensor_name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values = tensor.numpy().astype(np.float32)
        if arch == "llama" and (".q_proj" in tensor_name or ".k_proj" in tensor_name):
            heads = model.config.num_attention_heads if ".q_proj" in tensor_name else model.config.num_key_value_heads
            values = _interleave(values, heads)
        yield gguf_name(tensor_name), values


def gguf_name(name: str) -> str:
    """model.layers.2.mlp.up_proj.weight → blk.2.ffn_up.weight"""
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, inner = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[inner]}.{suffix}"
    return f"{GGUF_NAMES[stem]}.{suffix}"


def rope_divisors(
    *,
    head_dim: int,
    rope_theta: float,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> list[float]:
    """The divisor of each frequency in llama3 scaling."""
    divisors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * rope_theta ** (2 * pair / head_dim)
        turns = original_max_position_embeddings / wavelength
        if turns > high_freq_factor:
            divisors.append(1.0)
        elif turns < low_freq_factor:
            divisors.append(factor)
        else:
            smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


def _interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """Interleave rows (i, i + d/2) of every head."""
    size = values.shape[0] // heads
    rows = [head * size + half * (size // 2) + i for head in range(heads) for i in range(size // 2) for half in range(2)]
    return values[rows]


def _write_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    packing = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quants.quantize(values, packing), raw_dtype=packing)


def _write_metadata(writer: gguf.GGUFWriter, model_config: transformers.PretrainedConfig, arch: str) -> None:
    head_dim = getattr(model_config, "head_dim", None) or model_config.hidden_size // model_config.num_attention_heads
    writer.add_context_length(model_config.max_position_embeddings)
    writer.add_embedding_length(model_config.hidden_size)
    writer.add_block_count(model_config.num_hidden_layers)
    writer.add_feed_forward_length(model_config.intermediate_size)
    writer.add_head_count(model_config.num_attention_heads)
    writer.add_head_count_kv(model_config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(model_config.rms_norm_eps)
    writer.add_rope_freq_base(model_config.rope_parameters["rope_theta"])
    if arch == "llama":
        writer.add_vocab_size(model_config.vocab_size)
        writer.add_rope_dimension_count(head_dim)
    if model_config.model_type == "mistral":
        writer.add_sliding_window(model_config.sliding_window)


def _write_vocabulary(writer: gguf.GGUFWriter) -> None:
    model = json.loads(tokenizer().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(END_OF_TEXT)
    writer.add_eos_token_id(IM_END)
    writer.add_pad_token_id(END_OF_TEXT)
    writer.add_chat_template(TEMPLATE)
