"""Write GGUF files for benchmarks: a known shape with random weights, or the first layers of a real file.

    python -m bench.gguf_files 1.5b-q4_k_m FILE

In: a shape with a quantization mixture, or a file. Out: a file that every GGUF reader opens. Only the standard library and numpy
are needed. A file of 17 GB takes seconds, since each tensor repeats a few megabytes of random blocks and several threads write.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onedraw.checkpoints.base import packed_bytes
from onedraw.checkpoints.dequantize import QUANT_TYPES, Bytes
from onedraw.checkpoints.gguf import read_file
from onedraw.checkpoints.in_memory import InMemoryCheckpoint
from onedraw.checkpoints.random_weights import RandomQuantTensor, open_random, random_blocks, shape_config
from onedraw.models.registry import read_model_info
from onedraw.models.spec import DeltaSpec, ModelSpec
from onedraw.models.weight_names import PLAIN_NAMES, WeightKey, weight_shapes

ALIGNMENT = 32
REPEATED_BYTES = 8 << 20  # size of the random blocks that a tensor repeats
WRITERS = 8


@dataclass(frozen=True, slots=True)
class TensorToWrite:
    """A tensor of a file to write. The bytes of `content` are repeated until the tensor is full."""

    name: str
    shape: tuple[int, ...]  # row-major
    kind: str
    content: Callable[[], Bytes]

    @property
    def nbytes(self) -> int:
        size = packed_bytes(self.shape, self.kind)
        assert size is not None, (self.name, self.shape, self.kind)
        return size


# ------------------------------------------------------------------ writing a file


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Sequence[TensorToWrite]) -> int:
    """Write the file and return its size."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_text(key) + _value(value) for key, value in metadata.items())
    for tensor, offset in zip(tensors, offsets, strict=True):
        head += _text(tensor.name) + struct.pack("<I", len(tensor.shape))
        head += struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape)) + struct.pack(
            "<IQ", QUANT_TYPES[tensor.kind].ggml_type, offset
        )
    start = -(-len(head) // ALIGNMENT) * ALIGNMENT
    with path.open("wb") as file, ThreadPoolExecutor(WRITERS) as pool:
        file.truncate(start + end)
        os.pwrite(file.fileno(), head, 0)
        writes = [
            pool.submit(_fill, file.fileno(), tensor, start + offset) for tensor, offset in zip(tensors, offsets, strict=True)
        ]
        for write in writes:
            write.result()
    return start + end


def _fill(file: int, tensor: TensorToWrite, position: int) -> None:
    content, end = memoryview(tensor.content()), position + tensor.nbytes  # type: ignore[arg-type]
    while position < end:
        position += os.pwrite(file, content[: end - position], position)


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """Encode a metadata value: the number of its type, then the value. Signed numbers are given as an array of int32."""
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", 9, 5, len(value)) + value.astype("<i4").tobytes()
    if isinstance(value, list):
        code, _ = _scalar(value[0])
        return struct.pack("<IIQ", 9, code, len(value)) + b"".join(_scalar(one)[1] for one in value)
    code, data = _scalar(value)
    return struct.pack("<I", code) + data


def _scalar(value: Any) -> tuple[int, bytes]:
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int():
            return (4, struct.pack("<I", value)) if value >= 0 else (5, struct.pack("<i", value))
        case float():
            return 6, struct.pack("<f", value)
        case str():
            return 8, _text(value)
    raise TypeError(f"no GGUF value for {value!r}")


# ------------------------------------------------------------------ the first layers of a real file


def cut_gguf(source: Path, path: Path, *, layers: int) -> int:
    """Write the first layers of a model with its embedding, final norm, head and tokenizer. Return the size of the file."""
    file = read_file(source)
    metadata = dict(file.metadata)
    metadata[f"{metadata['general.architecture']}.block_count"] = layers

    def kept(name: str) -> bool:
        found = re.match(r"blk\.(\d+)\.", name)
        return found is None or int(found[1]) < layers

    tensors = [
        TensorToWrite(name, tensor.shape, tensor.kind, lambda tensor=tensor: tensor.data)  # type: ignore[misc]
        for name, tensor in file.tensors.items()
        if kept(name)
    ]
    return write_gguf(path, metadata, tensors)


# ------------------------------------------------------------------ a random model of the Qwen3.5 or the Llama family

# The widths of Qwen2.5 with 0.5, 1.5 and 3 billion parameters, as models of the Llama family.
SMALL = {"0.5b": (896, 4864, 24, 14), "1.5b": (1536, 8960, 28, 12), "3b": (2048, 11_008, 36, 16)}
QWEN35_LAYER = {
    **{"attn_norm": "attn_norm.weight", "mlp_norm": "post_attention_norm.weight"},
    **{"q": "attn_q.weight", "k": "attn_k.weight", "v": "attn_v.weight", "o": "attn_output.weight"},
    **{"q_norm": "attn_q_norm.weight", "k_norm": "attn_k_norm.weight"},
    **{"delta_qkv": "attn_qkv.weight", "delta_z": "attn_gate.weight", "delta_a": "ssm_alpha.weight"},
    **{"delta_b": "ssm_beta.weight", "conv": "ssm_conv1d.weight", "decay": "ssm_a", "delta_bias": "ssm_dt.bias"},
    **{"delta_norm": "ssm_norm.weight", "gate": "ffn_gate.weight", "up": "ffn_up.weight", "down": "ffn_down.weight"},
}
LLAMA_LAYER = QWEN35_LAYER | {"mlp_norm": "ffn_norm.weight"}
OUTER = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}


def write_random(path: Path, model: str, *, tokenizer: bool = False) -> int:
    """Write the model `random:SHAPE-MIXTURE` of the Llama 3 or Qwen3.5 family without experts, with a made-up tokenizer if
    asked. Return the size of the file."""
    checkpoint = open_random(model)
    spec, config = read_model_info(checkpoint).spec, shape_config(model)
    hybrid = spec.recurrent
    metadata = {"general.architecture": "qwen35" if hybrid else "llama", "general.name": model}
    metadata |= _metadata(spec, config, "qwen35" if hybrid else "llama")
    metadata |= vocabulary(spec.vocab) if tokenizer else {}
    return write_gguf(path, metadata, list(_tensors(spec, checkpoint, QWEN35_LAYER if hybrid else LLAMA_LAYER)))


def vocabulary(size: int) -> dict[str, Any]:
    """The metadata of a byte-level BPE with `size` tokens: the bytes, a token for each merge of two shorter ones, and one that
    ends a text."""
    tokens = [chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x144))]  # they stand for the bytes
    short, known, merges, rng = list(tokens), set(tokens), [], random.Random(7)
    while len(tokens) < size - 1:
        left, right = rng.choice(short), rng.choice(short)
        if left + right in known:
            continue
        known.add(left + right)
        tokens.append(left + right)
        merges.append(f"{left} {right}")
        if len(left + right) < 5:
            short.append(left + right)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*tokens, "<|end|>"],
        "tokenizer.ggml.token_type": np.array([1] * len(tokens) + [3], np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": len(tokens),
        "tokenizer.ggml.add_bos_token": False,
    }


def _metadata(spec: ModelSpec, config: Mapping[str, Any], arch: str) -> dict[str, Any]:
    rope = config.get("rope_parameters", {})
    head_dim = config.get("head_dim", spec.hidden // config["num_attention_heads"])
    found: dict[str, Any] = {
        **{"context_length": spec.max_context, "embedding_length": spec.hidden, "block_count": len(spec.layers)},
        **{"feed_forward_length": config["intermediate_size"], "attention.head_count": config["num_attention_heads"]},
        **{"attention.head_count_kv": config["num_key_value_heads"], "attention.key_length": head_dim},
        **{"attention.value_length": head_dim, "attention.layer_norm_rms_epsilon": float(spec.eps)},
        **{"rope.freq_base": float(rope.get("rope_theta", config.get("rope_theta"))), "vocab_size": spec.vocab},
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1)),
    }
    delta = next((layer.mixer for layer in spec.layers if isinstance(layer.mixer, DeltaSpec)), None)
    if delta is not None:
        found |= {
            **{"rope.dimension_sections": [11, 11, 10, 0], "full_attention_interval": config["full_attention_interval"]},
            **{"ssm.conv_kernel": delta.conv, "ssm.state_size": delta.key_dim, "ssm.group_count": delta.key_heads},
            **{"ssm.time_step_rank": delta.value_heads, "ssm.inner_size": delta.value_heads * delta.value_dim},
        }
    return {f"{arch}.{key}": value for key, value in found.items()}


def _tensors(spec: ModelSpec, checkpoint: InMemoryCheckpoint, names: Mapping[str, str]) -> Iterator[TensorToWrite]:
    for (layer, weight), shape in weight_shapes(spec).items():
        tensor = checkpoint.tensors[PLAIN_NAMES.stored_name((layer, weight))]
        if weight == "attn_gate":  # stored in the q tensor, interleaved by head
            continue
        if weight == "q" and spec.layers[layer or 0].attention.gate:
            shape = (2 * shape[0], shape[1])
        yield TensorToWrite(_name(spec, (layer, weight), names), shape, tensor.kind, _content(tensor, shape))


def _name(spec: ModelSpec, key: WeightKey, names: Mapping[str, str]) -> str:
    layer, weight = key
    if layer is None:
        return OUTER[weight]
    if weight == "o" and isinstance(spec.layers[layer].mixer, DeltaSpec):
        return f"blk.{layer}.ssm_out.weight"
    return f"blk.{layer}.{names[weight]}"


def _content(tensor: Any, shape: tuple[int, ...]) -> Callable[[], Bytes]:
    """Random blocks for up to REPEATED_BYTES of rows; unquantized tensors are small and written in full."""

    def content() -> Bytes:
        if not isinstance(tensor, RandomQuantTensor):
            return np.ascontiguousarray(tensor.float32()).reshape(-1).view(np.uint8)
        row = packed_bytes(shape[-1:], tensor.kind)
        assert row is not None
        rows = max(1, min(math.prod(shape[:-1]), REPEATED_BYTES // row))
        return random_blocks(tensor.kind, rows, shape[-1], np.random.default_rng(7), tensor.std).reshape(-1)

    return content


def small_config(name: str) -> dict[str, Any]:
    """The config.json of a shape of SMALL."""
    hidden, intermediate, layers, heads = SMALL[name]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"one of {', '.join(SMALL)}, and a mixture, as in 1.5b-q4_k_m; or random:SHAPE-MIXTURE")
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    shape, _, mixture = options.model.partition("-")
    if shape not in SMALL:
        write_random(options.file, options.model, tokenizer=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(small_config(shape)))
        write_random(options.file, f"random:{config}-{mixture}", tokenizer=True)


if __name__ == "__main__":
    main()
