"""Writes one DFlash drafter as the files that others publish: GGUF of llama.cpp and of Lucebox, safetensors in two layouts.

In: a folder in the z-lab layout, plain, Laguna or DFlash2. Out: a file or folder with the same weights. The names and keys of
each layout are written out here, and nothing is taken from the reader.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file

Tensors = dict[str, np.ndarray]

LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.g_proj": "attn_gate",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
LLAMA_CPP = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
LUCEBOX = {
    "fc.weight": "dflash.fc.weight",
    "hidden_norm.weight": "dflash.hidden_norm.weight",
    "norm.weight": "output_norm.weight",
    "candidate_selector.predecessor_codebook": "dflash.selector.pred_cb",
    "candidate_selector.successor_codebook": "dflash.selector.succ_cb",
    "candidate_selector.hidden_projection.weight": "dflash.selector.hproj.weight",
    "attention_conv.base_kernel": "attn_conv.base",
    "attention_conv.kernel_projection.weight": "attn_conv.proj.weight",
    "mlp_conv.base_kernel": "ffn_conv.base",
    "mlp_conv.kernel_projection.weight": "ffn_conv.proj.weight",
}
ALIASES = {
    r"^dflash\.(fc|hidden_norm)\.weight$": r"dflash_\1.weight",
    r"^(blk\.\d+)\.ffn_norm\.weight$": r"\1.post_attention_norm.weight",
}


def read(folder: Path) -> tuple[dict[str, Any], Tensors]:
    """The configuration, and tensors with q, k and v apart."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    rows = [config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")]
    for name in [name for name in tensors if name.endswith("qkv_proj.weight")]:
        parts = np.split(tensors.pop(name), [rows[0], rows[0] + rows[1]])
        tensors |= {name.replace("qkv", part): values for part, values in zip("qkv", parts, strict=True)}
    return config, tensors


def write_folder(folder: Path, out: Path) -> Path:
    """The same folder with q, k and v apart."""
    config, tensors = read(folder)
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(values) for name, values in tensors.items()}, str(out / "model.safetensors"))
    return out


def write_speculators(folder: Path, out: Path) -> Path:
    """A plain drafter in the layout of speculators."""
    config, tensors = read(folder)
    own = config["dflash_config"]
    stack = {key: value for key, value in config.items() if key not in ("architectures", "block_size", "dflash_config")}
    stack.pop("num_target_layers")
    out.mkdir(parents=True)
    described = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": stack,
        "draft_vocab_size": config["vocab_size"],
        "block_size": config["block_size"],
        "aux_hidden_state_layer_ids": [index + 1 for index in own["target_layer_ids"]],
        "mask_token_id": own["mask_token_id"],
    }
    (out / "config.json").write_text(json.dumps(described))
    save_file(tensors, str(out / "model.safetensors"))
    return out


def write_llama_cpp(folder: Path, out: Path, kind: str = "F32") -> Path:
    config, tensors = read(folder)
    own, laguna = config["dflash_config"], "aux_hidden_norms.0.weight" in tensors
    writer = gguf.GGUFWriter(str(out), "dflash")
    shape_keys(writer, config)
    writer.add_uint32("dflash.block_size", block_size(config))
    writer.add_array("dflash.target_layers", [index + 1 for index in own["target_layer_ids"]])
    writer.add_uint32("tokenizer.ggml.mask_token_id", own["mask_token_id"])
    if laguna:
        writer.add_string("dflash.decoder_arch", "laguna")
        norms = [tensors.pop(f"aux_hidden_norms.{index}.weight") for index in range(len(own["target_layer_ids"]))]
        add(writer, "enc.aux_norm.weight", np.stack(norms), "F32")
    if "conv_kernel_size" in own:
        writer.add_bool("dflash.attention.causal", config["is_causal"])
        for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            writer.add_uint32(f"dflash.{name}", own[name])
    for name, values in tensors.items():
        add(writer, gguf_name(name, LLAMA_CPP), values, kind)
    return close(writer, out)


def write_lucebox(
    folder: Path, out: Path, kind: str = "F32", *, arch: str = "qwen35-dflash-draft", aliases: bool = False
) -> Path:
    config, tensors = read(folder)
    own = config["dflash_config"]
    writer = gguf.GGUFWriter(str(out), arch)
    shape_keys(writer, config)
    writer.add_uint32(f"{arch}.dflash.block_size", block_size(config))
    writer.add_uint32(f"{arch}.dflash.mask_token_id", own["mask_token_id"])
    writer.add_uint32(f"{arch}.dflash.n_target_layers", len(own["target_layer_ids"]))
    writer.add_array(f"{arch}.dflash.target_layer_ids", own["target_layer_ids"])
    if arch.startswith("gemma4"):
        writer.add_uint32(f"{arch}.dflash.sliding_window", config["sliding_window"] or 2048)
        writer.add_float32(f"{arch}.dflash.logit_softcap", 30.0)
        writer.add_uint32(f"{arch}.dflash.target_hidden", config["hidden_size"])
    if "aux_hidden_norms.0.weight" in tensors:
        writer.add_uint32(f"{arch}.dflash.context_kv_layer_norm", 1)
    if "conv_kernel_size" in own:
        writer.add_bool(f"{arch}.attention.causal", config["is_causal"])
        for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            writer.add_uint32(f"{arch}.dflash.dflash2.{name}", own[name])
    for name, values in tensors.items():
        stored = gguf_name(re.sub(r"^aux_hidden_norms", "dflash.aux_hidden_norm", name), LUCEBOX)
        if aliases:
            for pattern, other in ALIASES.items():
                stored = re.sub(pattern, other, stored)
        add(writer, stored, values, kind)
    return close(writer, out)


def shape_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    if any(slides):
        writer.add_sliding_window(config["sliding_window"])
        writer.add_array(f"{writer.arch}.attention.sliding_window_pattern", slides)


def block_size(config: dict[str, Any]) -> int:
    return int(config.get("block_size") or config["dflash_config"]["block_size"])


def gguf_name(name: str, table: dict[str, str]) -> str:
    found = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    if found is None:
        return table.get(name, name)
    inner = found[2]
    stored = table[inner] if inner in table else f"{LAYER[inner.removesuffix('.weight')]}.weight"
    return f"blk.{found[1]}.{stored}"


def add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    """Add a tensor: vectors and kernels in F32, rows that are no whole number of blocks in F16."""
    if values.ndim != 2 or kind == "F32":
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    elif kind == "Q4_K" and values.shape[1] % 256 == 0:
        writer.add_tensor(name, q4_k(values), raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    else:
        kind = "Q8_0" if kind == "Q4_K" else kind
        packing = gguf.GGMLQuantizationType[kind if kind != "Q8_0" or values.shape[1] % 32 == 0 else "F16"]
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), packing), raw_dtype=packing)


def close(writer: gguf.GGUFWriter, out: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def q4_k(values: np.ndarray) -> np.ndarray:
    """Rows of a multiple of 256 numbers as Q4_K blocks [rows, bytes], each span of 32 rounded between its extremes."""
    spans = values.astype(np.float32).reshape(-1, 8, 32)
    low = np.minimum(spans.min(-1), 0)
    step = (spans.max(-1) - low) / 15
    d, dmin = (np.maximum(part.max(-1), 1e-8).astype(np.float32) / 63 for part in (step, -low))
    d, dmin = d.astype(np.float16), dmin.astype(np.float16)
    scales = np.clip(np.round(step / d[:, None].astype(np.float32)), 1, 63).astype(np.uint8)
    mins = np.clip(np.round(-low / dmin[:, None].astype(np.float32)), 0, 63).astype(np.uint8)
    width = (d[:, None] * scales.astype(np.float32))[..., None]
    codes = np.round((spans + (dmin[:, None] * mins.astype(np.float32))[..., None]) / width)
    codes = np.clip(codes, 0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    packed = np.empty((len(spans), 12), np.uint8)
    packed[:, :4] = scales[:, :4] | (scales[:, 4:] >> 4 << 6)
    packed[:, 4:8] = mins[:, :4] | (mins[:, 4:] >> 4 << 6)
    packed[:, 8:] = (scales[:, 4:] & 15) | (mins[:, 4:] & 15) << 4
    nibbles = (codes[:, :, 0] | codes[:, :, 1] << 4).reshape(-1, 128)
    heads = np.stack([d, dmin], 1).view(np.uint8)
    return np.concatenate([heads, packed, nibbles], 1).reshape(len(values), -1)


def widened(folder: Path, out: Path, width: int = 256) -> Path:
    """The same drafter with a wider feed-forward, whose new rows and columns are zeros, so that rows can be Q4_K blocks."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    more = width - config["intermediate_size"]
    for name, values in tensors.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            tensors[name] = np.pad(values, ((0, more), (0, 0)))
        elif name.endswith("down_proj.weight"):
            tensors[name] = np.pad(values, ((0, 0), (0, more)))
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps({**config, "intermediate_size": width}))
    save_file(tensors, str(out / "model.safetensors"))
    return out
