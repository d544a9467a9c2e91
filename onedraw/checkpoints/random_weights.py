"""Models with random weights, plain or quantized, without files: for benchmarks and tests.

`random:NAME` has the shape of a well-known model, `random:NAME-q4_k_m` has random quantized blocks, `random:NAME-dflash` is a
drafter for the model, and `random:PATH/config.json` takes the shape from a file. The result is read like any other checkpoint.
The values of a tensor depend only on the seed and the tensor's name, so layers can be read in any order and repeatedly. Large
tensors repeat a pool of numbers, so that a model of many billion parameters is made at the speed of copying. Weight magnitudes
keep activations of order one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onedraw.checkpoints.base import StoredTensor
from onedraw.checkpoints.dequantize import QUANT_TYPES, Bytes, Floats
from onedraw.checkpoints.in_memory import InMemoryCheckpoint
from onedraw.errors import CorruptFile, ModelNotFound
from onedraw.models.config_reader import FULL, SLIDING
from onedraw.models.dflash import DRAFTER_WEIGHT_NAMES, detect_layout, drafter_shapes, read_drafter_spec
from onedraw.models.registry import find_family
from onedraw.models.source import LazyTensor, ReshapedRows, TensorBase
from onedraw.models.spec import ModelSpec
from onedraw.models.weight_names import PLAIN_NAMES, ModelWeights, weight_shapes

PREFIX = "random:"
END_TOKEN = 256  # the id that ends a reply, in the tokenizer that random weights get (`text/fake_tokenizer.py`)
QWEN_ROPE = {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25}
QWEN3_6: dict[str, Any] = {
    "vocab_size": 248_320,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "full_attention_interval": 4,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": QWEN_ROPE,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama3-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
    },
    "qwen3.6-27b": {
        **QWEN3_6,
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
    },
    "qwen3.6-35b-a3b": {
        **QWEN3_6,
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "gemma4-31b": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "vocab_size": 262_144,
        "hidden_size": 5376,
        "intermediate_size": 21_504,
        "num_hidden_layers": 60,
        "layer_types": ([SLIDING] * 5 + [FULL]) * 10,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 262_144,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
        },
    },
}

DRAFTER_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.6-27b-dflash": {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": 248_320,
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "layer_types": [SLIDING] * 4 + [FULL],
        "sliding_window": 2048,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000_000.0,
        "num_target_layers": 64,
        "dflash_config": {"block_size": 16, "mask_token_id": 248_070, "target_layer_ids": [1, 16, 31, 46, 61]},
    }
}


def is_random(model: str) -> bool:
    return model.startswith(PREFIX)


def named_mixture(model: str) -> tuple[str, str]:
    """The name of the shape and the quantization mixture of `random:NAME-q4_k_m`; the mixture is "" for plain weights."""
    name = model.removeprefix(PREFIX)
    mixture = next((mixture for mixture in MIXTURES if name.endswith(f"-{mixture}")), "")
    return (name.removesuffix(f"-{mixture}"), mixture) if mixture else (name, "")


def shape_config(model: str) -> dict[str, Any]:
    """The config of `random:NAME` or `random:PATH/config.json`, with or without a quantization suffix."""
    return _config(model, SHAPES)


def _config(model: str, known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    name, _ = named_mixture(model)
    if name in known:
        return dict(known[name])
    path = Path(name)
    if not path.is_file():
        raise ModelNotFound(
            f"{model}: neither a known shape nor the path of a config.json; known shapes: {', '.join(known)}; "
            f"append a quantization for quantized weights: {', '.join(f'-{mixture}' for mixture in MIXTURES)}"
        )
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise CorruptFile(f"{path}: the file is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise CorruptFile(f"{path}: config.json must contain one JSON object")
    return found


def open_random(model: str) -> InMemoryCheckpoint:
    config = {"eos_token_id": END_TOKEN, **shape_config(model)}
    family = find_family(InMemoryCheckpoint(Path(model), "plain", config=config))
    spec = family.from_config(config, model)
    return random_checkpoint(spec, config=config, name=model, on_device=True, mixture=named_mixture(model)[1])


def make_random_drafter(config: Mapping[str, Any], name: str, *, mixture: str = "") -> InMemoryCheckpoint:
    """A DFlash drafter with random weights, for benchmarks of speculative decoding."""
    bare = InMemoryCheckpoint(Path(name), "safetensors", config=config, identity=_hash(f"{config} {mixture}"))
    layout = detect_layout(bare)
    spec = read_drafter_spec(bare, layout)
    tensors: dict[str, LazyTensor] = {}
    for key, shape in drafter_shapes(spec).items():
        plain = random_tensor(DRAFTER_WEIGHT_NAMES[layout].stored_name(key), key[1], shape, tied=False, seed=0)
        kind = mixture_kind(mixture, *key, shape, layers=len(spec.layers), tied=False) if mixture else "F32"
        quantized = RandomQuantTensor(plain.name, shape, kind, plain.seed, plain.std)
        tensors[plain.name] = replace(plain, on_device=True) if kind == "F32" else quantized
    return replace(bare, tensors=tensors)


def open_random_drafter(model: str) -> InMemoryCheckpoint:
    """The drafter `random:qwen3.6-27b-dflash` or `random:PATH/config.json`, with or without a quantization suffix."""
    return make_random_drafter(_config(model, DRAFTER_SHAPES), model, mixture=named_mixture(model)[1])


def random_weights(spec: ModelSpec, seed: int = 0) -> ModelWeights:
    return ModelWeights(random_checkpoint(spec, seed), spec, PLAIN_NAMES)


# Fields of the spec that were renamed, from the new name to the old one: the fingerprint is made from the old names, so that it
# stays the same across versions.
RENAMED_FIELDS = {"parallel_experts": "beside", "rotated_pairs": "turning"}


def random_checkpoint(
    spec: ModelSpec,
    seed: int = 0,
    *,
    config: dict[str, Any] | None = None,
    name: str = "",
    on_device: bool = False,
    mixture: str = "",
) -> InMemoryCheckpoint:
    """A checkpoint whose tensors are generated when read: float32, or blocks of a quantization mixture."""
    described = str(spec)
    for new, old in RENAMED_FIELDS.items():
        described = described.replace(f"{new}=", f"{old}=")
    tensors: dict[str, LazyTensor] = {}
    for key, shape in weight_shapes(spec).items():
        tensor = replace(
            random_tensor(PLAIN_NAMES.stored_name(key), key[1], shape, tied=spec.tied, seed=seed), on_device=on_device
        )
        kind = mixture_kind(mixture, *key, shape, layers=len(spec.layers), tied=spec.tied) if mixture else "F32"
        packed = RandomQuantTensor(tensor.name, shape, kind, seed, tensor.std)
        tensors[tensor.name] = tensor if kind == "F32" else packed
    path, identity = Path(name or f"random-{spec.family}"), _hash(f"{seed} {described} {mixture}")
    return InMemoryCheckpoint(path, "plain", tensors, config or {}, identity=identity)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


POOL = 4_194_301  # random numbers drawn for one large tensor; a prime, so that repeats do not align with rows


@dataclass(frozen=True, slots=True, eq=False)
class RandomTensor(TensorBase):
    name: str
    shape: tuple[int, ...]
    seed: int
    std: float
    mean: float = 0.0
    negative: bool = False  # whether values are mean - |random number| instead of mean + random number
    order: NDArray[np.intp] | None = None  # the rows that this tensor selects; None: all rows
    total_rows: int = 0  # number of rows of the tensor that `order` selects from
    on_device: bool = False  # whether the device may generate its own random numbers, which saves the copy
    kind: str = "F32"

    def int64(self) -> NDArray[np.int64]:
        return self.float32().astype(np.int64)

    def into(self, out: Floats) -> None:
        if not out.flags.c_contiguous:  # reshaping such an `out` would copy it, and what is written to the copy would be lost
            out[...] = self.float32()
            return
        rows, width = self.total_rows or self.shape[0], math.prod(self.shape[1:])
        if rows * width <= POOL:
            values = _draw(self.seed, self.name, rows * width).reshape(rows, *self.shape[1:])
            out[...] = values if self.order is None else values[self.order]
            self._rescale(out)
        elif self.order is None:
            pool = _pool(self.seed, self.name).copy()
            self._rescale(pool)  # the pool is rescaled once, instead of every repeat of it
            _repeat(pool, out.reshape(self.shape[0], -1), None)
        else:
            _repeat(_pool(self.seed, self.name), out.reshape(self.shape[0], -1), self.order)
            self._rescale(out)

    def _rescale(self, values: Floats) -> None:
        """Give standard normal numbers this tensor's mean and standard deviation, in place."""
        if self.negative:
            np.negative(np.abs(values, out=values), out=values)
        values *= np.float32(self.std)
        values += np.float32(self.mean)

    def take_rows(self, order: NDArray[np.intp]) -> RandomTensor:
        taken = np.asarray(order) if self.order is None else self.order[order]
        return replace(self, shape=(len(taken), *self.shape[1:]), order=taken, total_rows=self.total_rows or self.shape[0])

    def reshaped(self, shape: tuple[int, ...]) -> LazyTensor:
        if self.order is not None:
            return ReshapedRows(self, shape)
        return replace(self, shape=shape)


def _draw(seed: int, name: str, count: int) -> Floats:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
    return generator.standard_normal(count, dtype=np.float32)


@lru_cache(maxsize=2)
def _pool(seed: int, name: str) -> Floats:
    """The numbers of a large tensor, cached for further reads of its rows."""
    return _draw(seed, name, POOL)


def _repeat(pool: Floats, out: Floats, order: NDArray[np.intp] | None) -> None:
    """Write the rows of a tensor whose flat values are the pool repeated; `order` selects rows."""
    width = out.shape[1]
    if order is None:
        flat = out.reshape(-1)
        for start in range(0, flat.size, POOL):
            flat[start : start + POOL] = pool[: flat.size - start]
        return
    for row, index in zip(out, order.tolist(), strict=True):
        for start in range(0, width, POOL):
            first = (index * width + start) % POOL
            part = row[start : start + POOL]
            head = min(part.size, POOL - first)
            part[:head], part[head:] = pool[first : first + head], pool[: part.size - head]


# Weights with a special distribution: (mean, standard deviation).
MEAN_AND_STD = {
    "delta_bias": (-1.0, 0.5),
    "layer_scale": (0.8, 0.1),
    "expert_scale": (1.0, 0.15),
    "router_scale": (1.0, 0.15),
    "conv": (0.0, 0.5),
    "inputs_embed": (0.0, 0.1),
}


def random_tensor(name: str, weight: str, shape: tuple[int, ...], *, tied: bool, seed: int) -> RandomTensor:
    """Norms are around one, biases around zero; a matrix preserves the magnitude of its input."""
    if weight in MEAN_AND_STD:
        mean, std = MEAN_AND_STD[weight]
        return RandomTensor(name, shape, seed, std=std, mean=mean)
    if weight == "decay":
        return RandomTensor(name, shape, seed, std=1.5, mean=-0.05, negative=True)
    if weight.endswith("norm"):
        return RandomTensor(name, shape, seed, std=0.2, mean=1.0)
    if weight.endswith("bias"):
        return RandomTensor(name, shape, seed, std=0.1)
    if weight == "embed":
        return RandomTensor(name, shape, seed, std=0.1 if tied else 0.5)
    if weight == "head":
        return RandomTensor(name, shape, seed, std=2 / math.sqrt(shape[-1]))
    return RandomTensor(name, shape, seed, std=1 / math.sqrt(shape[-1]))


# Mixtures of a single type, which are named like the type.
PURE = {f"{kind.lower()}": kind for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")}
MIXTURES = ("q4_k_m", *PURE)
# The type that replaces a K type where the length of a row is not a multiple of 256.
NARROWER = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
UNQUANTIZED = ("conv", "router", "shared_route")  # small weights that stay float32


def mixture_kind(mixture: str, layer: int | None, weight: str, shape: tuple[int, ...], *, layers: int, tied: bool) -> str:
    """The type that a quantization mixture gives a weight of a model with `layers` layers."""
    if len(shape) < 2 or weight in UNQUANTIZED or shape[-1] % 32:
        return "F32"
    kind = PURE.get(mixture) or _q4_k_m(layer, weight, layers=layers, tied=tied)
    return NARROWER.get(kind, kind) if shape[-1] % QUANT_TYPES[kind].block_values else kind


def _q4_k_m(layer: int | None, weight: str, *, layers: int, tied: bool) -> str:
    """The type that llama.cpp's mixture Q4_K_M gives a weight: four bits, and more for sensitive weights: the head, v and down
    projections of every third layer and of the first and last eighth, and fused projections."""
    if weight == "head" or (weight == "embed" and tied):
        return "Q6_K"
    if weight == "delta_qkv":
        return "Q5_K"
    eighth = layers // 8
    better = layer is not None and (layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2)
    return "Q6_K" if better and weight in ("v", "down", "expert_down", "shared_down") else "Q4_K"


@dataclass(frozen=True, slots=True, eq=False)
class RandomQuantTensor(TensorBase):
    name: str
    shape: tuple[int, ...]
    kind: str
    seed: int
    std: float

    @property
    def stays_packed(self) -> bool:
        return True

    def packed(self) -> Bytes:
        """Rows as overlapping windows into a pool of random blocks, [rows, bytes], without copying."""
        quant = QUANT_TYPES[self.kind]
        rows, blocks = math.prod(self.shape[:-1]), self.shape[-1] // quant.block_values
        first = int.from_bytes(hashlib.sha256(f"{self.seed} {self.name}".encode()).digest()[:2], "little")
        pool = _block_pool(self.kind, self.std, 1 << (first + rows + blocks).bit_length())
        return np.lib.stride_tricks.as_strided(
            pool[first:], (rows, blocks * quant.block_bytes), (quant.block_bytes, 1), writeable=False
        )

    def into(self, out: Floats) -> None:
        blocks = np.ascontiguousarray(self.packed()).reshape(-1)
        StoredTensor(self.name, self.shape, self.kind, blocks).into(out)

    def take_rows(self, order: NDArray[np.intp]) -> LazyTensor:
        rows = self.packed().reshape(self.shape[0], -1) if len(self.shape) > 2 else self.packed()
        return StoredTensor(self.name, (len(order), *self.shape[1:]), self.kind, rows[order].reshape(-1))

    def reshaped(self, shape: tuple[int, ...]) -> LazyTensor:
        return RandomQuantTensor(self.name, shape, self.kind, self.seed, self.std)


@lru_cache(maxsize=32)  # large enough for Qwen3.6-27B, whose weights need thirty pools
def _block_pool(kind: str, std: float, count: int) -> Bytes:
    """A pool of `count` random blocks of a quantization type, [count, bytes]."""
    return random_blocks(kind, count, QUANT_TYPES[kind].block_values, np.random.default_rng(7), std)


def random_blocks(kind: str, rows: int, width: int, rng: np.random.Generator, size: float = 1.0) -> Bytes:
    """Rows of random blocks whose values have about the magnitude `size`: [rows, bytes]."""
    quant = QUANT_TYPES[kind]
    if quant.block_values == 1:
        values = (rng.standard_normal((rows, width)) * size).astype(np.float32)
        made = {"F32": values, "F16": values.astype(np.float16), "BF16": (values.view(np.uint32) >> 16).astype(np.uint16)}[kind]
        return np.ascontiguousarray(made).view(np.uint8)
    blocks = rng.integers(0, 256, (rows * width // quant.block_values, quant.block_bytes), dtype=np.uint8)
    count = len(blocks)

    def put(at: int, typical: float) -> None:
        drawn = typical * rng.uniform(0.5, 1.5, (count, 1))
        blocks[:, at : at + 2] = np.ascontiguousarray(drawn.astype(np.float16)).view(np.uint8)

    match kind:
        case "Q4_0" | "Q5_0" | "Q8_0":
            put(0, size / {"Q4_0": 4.6, "Q5_0": 9.2, "Q8_0": 74}[kind])
        case "Q4_1" | "Q5_1":
            step = size / (4.6 if kind == "Q4_1" else 9.2)
            put(0, step)
            put(2, -step * (7.5 if kind == "Q4_1" else 15.5))
        case "Q4_K" | "Q5_K":  # random six-bit scales and mins are 31 on average
            step = size / (4.6 if kind == "Q4_K" else 9.2) / 31
            put(0, step)
            put(2, step * (7.5 if kind == "Q4_K" else 15.5))
        case "Q3_K":
            put(108, size / 100)
        case "Q6_K":  # its scales are signed 8-bit integers
            put(208, size / 18.5 / 74)
        case "NVFP4":  # its scales are E4M3 floats, so the nearest at or above the wanted value is taken
            sizes = np.array(
                [np.ldexp(code & 7, -9) if code < 8 else np.ldexp(8 + (code & 7), (code >> 3) - 10) for code in range(127)]
            )
            blocks[:, :4] = np.minimum(np.searchsorted(sizes, size / 3 * rng.uniform(0.5, 1.5, (count, 4))), 126)
        case "MXFP4":  # its scale is an exponent with bias 127; magnitudes of random codes reach 6 and are 3 on average
            blocks[:, 0] = 127 + round(np.log2(size / 3)) + rng.integers(-1, 2, count)
    return blocks.reshape(rows, -1)
