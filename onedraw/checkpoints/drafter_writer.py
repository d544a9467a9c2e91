"""Write DFlash drafters: a folder in the z-lab layout, or one GGUF file of architecture `dflash` in the layout of llama.cpp's
converter.

In: the spec of a drafter and its float32 weights. Out: files that this and other engines read. Neither has a tokenizer, since the
drafter uses that of the target. GGUF needs the `gguf` package.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onedraw.checkpoints.open import open_checkpoint
from onedraw.errors import UnsupportedModel
from onedraw.models.dflash import DRAFTER_WEIGHT_NAMES, DrafterInfo, read_drafter_info
from onedraw.models.spec import DrafterSpec
from onedraw.models.weight_names import WeightKey

GGUF_KINDS = ("Q8_0", "F16", "F32")


# ------------------------------------------------------------------ the z-lab layout


def write_zlab(folder: Path, spec: DrafterSpec, weights: Mapping[WeightKey, np.ndarray]) -> None:
    """Write config.json and model.safetensors in bfloat16. Each file is replaced as a whole."""
    names = DRAFTER_WEIGHT_NAMES["z-lab"]
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "model.safetensors", _safetensors({names.stored_name(key): array for key, array in weights.items()}))
    replace_file(folder / "config.json", (json.dumps(zlab_config(spec), indent=1) + "\n").encode())


def zlab_config(spec: DrafterSpec) -> dict[str, Any]:
    mixers = [layer.attention for layer in spec.layers]
    windows = [mixer.window for mixer in mixers]
    if any(mixer.rope.kind != "default" for mixer in mixers) or len({w for w in windows if w}) > 1:
        raise UnsupportedModel("cannot write this drafter: only plain rotary positions and one window size are supported")
    if spec.causal_in_block not in {tuple(bool(w) for w in windows), (False,) * len(windows)}:
        raise UnsupportedModel("cannot write this drafter: either its layers with a window are causal in a block, or none is")
    window = next((w for w in windows if w), None)
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.layers[0].feed_forward.width,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": mixers[0].heads,
        "num_key_value_heads": mixers[0].kv_heads,
        "head_dim": mixers[0].head_dim,
        "rms_norm_eps": spec.eps,
        "rope_theta": mixers[0].rope.theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_context,
        "vocab_size": spec.vocab,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "initializer_range": 0.02,
        "block_size": spec.block,
        "dtype": "bfloat16",
        **({} if spec.target_depth is None else {"num_target_layers": spec.target_depth}),
        "dflash_config": {
            "mask_token_id": spec.mask_token,
            "target_layer_ids": list(spec.target_layers),
            **({"causal": False} if window is not None and not any(spec.causal_in_block) else {}),
        },
    }


def _safetensors(tensors: Mapping[str, np.ndarray]) -> bytes:
    """A safetensors file: the length of the header, the header, the data. The package's own writer for numpy has no bfloat16."""
    data = {name: _bfloat16(array) for name, array in sorted(tensors.items())}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    stop = 0
    for name, stored in data.items():
        start, stop = stop, stop + len(stored)
        header[name] = {"dtype": "BF16", "shape": list(tensors[name].shape), "data_offsets": [start, stop]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded + b"".join(data.values())


def _bfloat16(array: np.ndarray) -> bytes:
    """The numbers rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that after a crash it is either the old one or the new one, both whole."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


# ------------------------------------------------------------------ GGUF


def convert_drafter(folder: Path, out: Path, *, kind: str = "Q8_0", name: str = "", license_name: str = "") -> DrafterSpec:
    """Write the drafter of a folder as GGUF. Matrices are quantized as `kind` (as F16 if the row length is not a multiple of the
    block size), norms are F32."""
    import gguf

    kinds = {"Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0, "F16": gguf.LlamaFileType.MOSTLY_F16, "F32": gguf.LlamaFileType.ALL_F32}
    checkpoint = open_checkpoint(folder)
    try:
        drafter = read_drafter_info(checkpoint)
        _refuse_unwritable(drafter.spec)
        part = out.with_name(out.name + ".part")
        writer = gguf.GGUFWriter(str(part), "dflash")
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(name or folder.name)
        if license_name:
            writer.add_license(license_name)
        writer.add_file_type(kinds[kind])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _write_keys(writer, drafter.spec)
        _write_tensors(writer, drafter, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        part.replace(out)
        return drafter.spec
    finally:
        checkpoint.close()


def _refuse_unwritable(spec: DrafterSpec) -> None:
    """Refuse a drafter with properties that the GGUF layout cannot express, or that this module does not write."""
    if spec.convolution is not None or spec.selector is not None or spec.feature_norms or spec.normed_context:
        raise UnsupportedModel("cannot convert this drafter: only plain DFlash drafters are written, not DFlash2 or Laguna")
    if any(layer.attention.rope.kind != "default" for layer in spec.layers):
        raise UnsupportedModel("cannot convert this drafter: the GGUF layout of DFlash has no key for scaled rotary positions")
    if spec.causal_in_block != tuple(layer.attention.window is not None for layer in spec.layers):
        raise UnsupportedModel(
            "cannot convert this drafter: in GGUF exactly the layers with a sliding window are causal within the block"
        )


def _write_keys(writer: Any, spec: DrafterSpec) -> None:
    mixers = [layer.attention for layer in spec.layers]
    writer.add_block_count(len(spec.layers))
    writer.add_context_length(spec.max_context)
    writer.add_embedding_length(spec.hidden)
    writer.add_feed_forward_length(spec.layers[0].feed_forward.width)
    writer.add_head_count(mixers[0].heads)
    writer.add_head_count_kv(mixers[0].kv_heads)
    writer.add_key_length(mixers[0].head_dim)
    writer.add_value_length(mixers[0].head_dim)
    writer.add_rope_freq_base(mixers[0].rope.theta)
    writer.add_layer_norm_rms_eps(spec.eps)
    writer.add_vocab_size(spec.vocab)
    writer.add_uint32("dflash.block_size", spec.block)
    writer.add_array("dflash.target_layers", [index + 1 for index in spec.target_layers])
    writer.add_uint32("tokenizer.ggml.mask_token_id", spec.mask_token)
    windows = [mixer.window for mixer in mixers]
    if any(windows):
        writer.add_sliding_window(max(window for window in windows if window))
        writer.add_array("dflash.attention.sliding_window_pattern", [window is not None for window in windows])


def _write_tensors(writer: Any, drafter: DrafterInfo, kind: str) -> None:
    rules = DRAFTER_WEIGHT_NAMES["gguf"]
    for weight, values in drafter.weights.outer().items():
        _write_tensor(writer, rules.stored_name((None, weight)), values, kind)
    for index in range(len(drafter.spec.layers)):
        for weight, values in drafter.weights.layer(index).items():
            _write_tensor(writer, rules.stored_name((index, weight)), values, kind)
    target_ids = drafter.weights.target_ids()
    if target_ids is not None:
        writer.add_tensor(rules.outer["d2t"], target_ids)


def _write_tensor(writer: Any, name: str, values: np.ndarray, kind: str) -> None:
    import gguf

    if values.ndim == 1:
        kind = "F32"
    elif values.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]:
        kind = "F16"
    packing = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quants.quantize(values, packing), raw_dtype=packing)
