"""Packed weights: which quantized tensors stay quantized in memory, their bytes, and why the others are dequantized.

In: a model's weights, whose data is not read. Out: WeightStorage, which `inspect` prints and the memory plan counts. Kernels read
packed weights in their stored width. The layout of a CPU has panels, each with all inputs of 16 or 32 outputs
(`torch/ops/cpu/gguf_blocks.h`). That of a GPU has units of 16 outputs by one span of 256 inputs
(`torch/ops/cuda/packed/tensor_core_layout.py`). A kind is the storage type of a tensor, such as Q4_K.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from onedraw.backends.devices import (
    PACKED,
    Device,
    device_precision,
    float_dtype,
    packed_kernels,
    product_precision,
    weakest,
)
from onedraw.backends.memory_plan import PARTIAL_SUM_BYTES, PackedWeightBytes
from onedraw.errors import BadSetting
from onedraw.models.source import ColumnSelection, LazyTensor
from onedraw.models.spec import DTYPE_BYTES
from onedraw.models.weight_names import ModelWeights, WeightKey, weight_shapes

# Tensor kinds that CPU kernels read as stored, with their GGUF numbers, which the kernels use too.
CPU_PACKED_KINDS = {
    **{"F32": 0, "F16": 1, "BF16": 30},
    **{"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14},
}
PANEL_ROWS = 32  # outputs that a CPU thread computes together; the outputs of a matrix are padded to a multiple of it
# Bytes of 32 values in a panel. The 6-bit scales of Q4_K and Q5_K are expanded to a byte each.
_BYTES_OF_32 = {
    **{"F32": 128.0, "F16": 64.0, "BF16": 64.0, "Q4_0": 18.0, "Q4_1": 20.0, "Q5_0": 22.0, "Q5_1": 24.0, "Q8_0": 34.0},
    **{"Q4_K": 18.5, "Q5_K": 22.5, "Q6_K": 26.25},
}
PACKED_DTYPES = tuple(PACKED)


SPAN = 256  # inputs of one span; a matrix is padded with zeros to a whole number of spans
SEGMENT = 4  # spans that are summed separately before the sums are added, so the order of additions does not depend on the kernel
FEW_ROWS = 64  # maximum rows of a product that reads packed weights directly; more rows run in slices of this many
UNIT_ROWS = 16  # outputs of one unit on a GPU; the outputs of a matrix are padded to a multiple of it
# Tensor kinds that GPU kernels read as stored → bytes of one span of one output. NVFP4 includes the scale of its matrix.
SPAN_BYTES = {
    **{"Q4_0": 144, "Q4_1": 160, "Q5_0": 176, "Q5_1": 192, "Q8_0": 272, "MXFP4": 136},
    **{"Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "NVFP4": 148},
}


@dataclass(frozen=True, slots=True)
class WeightStorage:
    """How a model's weights are stored. Counts are of weights, not of tensors in the file. Field names are keys of `inspect
    --json`."""

    weights: PackedWeightBytes
    kept: tuple[tuple[str, int], ...]  # weights that stay as stored: (kind, count)
    converted: tuple[tuple[str, str, int], ...]  # weights that are dequantized: (kind, reason, count)


def saves_memory(kinds: Iterable[str]) -> bool:
    """Whether packed weights save memory on a CPU: some kind is narrower than float32."""
    return any(kind in CPU_PACKED_KINDS and kind != "F32" for kind in kinds)


def product_dtypes(
    devices: Sequence[Device],
    *,
    requested: str,
    activations: str,
    stream: str,
    kinds: Iterable[str],
    no_kernels: Mapping[str, str],
) -> tuple[str, ...]:
    """The dtype of weights and products on each device: `product_precision`, or a packed dtype where kernels read packed weights,
    if --dtype is packed, or if it is auto and packed weights save memory there. If weights stay packed nowhere, one dtype serves
    all devices. Raises BadSetting if --dtype is packed and a device has no kernels.

    `activations`: "f32" keeps them in float32 on a CPU; else they are quantized to 8 bits. `stream`: dtype of the residual
    stream. `kinds`: the tensor kinds of the model's matrices. `no_kernels`: for each result of `packed_kernels` whose kernels
    cannot run here, the reason."""
    if requested not in ("auto", "packed"):
        return (requested,) * len(devices)
    kinds, gpus = set(kinds), [device for device in devices if device.kind != "cpu"]
    quantized = not SPAN_BYTES.keys().isdisjoint(kinds)
    # All GPUs have the same dtype, except GPUs that compute well in float32 only, which have float32.
    narrow = weakest(found for found in map(device_precision, gpus) if found != "f32")
    narrow = "f16" if stream == "f16" else narrow
    found: list[str] = []
    for device in devices:
        kernels, precision = packed_kernels(device), device_precision(device)
        reason = "no kernels" if kernels is None else no_kernels.get(kernels, "")
        if requested == "packed" and reason:
            raise BadSetting(f"--dtype packed: {_cannot_pack(device, reason)}")
        saves = saves_memory(kinds) if kernels == "cpu" else quantized
        if reason or not (requested == "packed" or saves):
            found.append("f32" if precision == "f32" else narrow)
        elif kernels == "cpu":
            found.append("packed-f32" if activations == "f32" else "packed")
        else:
            found.append("packed-gpu-f32" if precision == "f32" else f"packed-{narrow}")
    if PACKED.keys().isdisjoint(found):
        return (product_precision(devices, requested=requested),) * len(devices)
    return tuple(found)


def _cannot_pack(device: Device, reason: str) -> str:
    """Why weights cannot stay packed on a device, and what to use instead."""
    if device.kind == "cpu":
        return f"no CPU kernels: {reason}; use --dtype f32"
    if packed_kernels(device) is not None:
        return f"no GPU kernels: {reason}, or use --dtype {device_precision(device)}"
    return f"no kernels read packed weights on {device.name} ({device.arch or 'unknown'}); use --dtype bf16 or f16"


def plan_weight_storage(weights: ModelWeights, dtype: str) -> WeightStorage:
    """Decide for every weight of a model. Only matrices may stay packed; norms, biases and convolutions are float32."""
    spec, on_gpu = weights.spec, is_gpu_packed(dtype)
    layers, ends, tied_embed = [0] * len(spec.layers), {"first": 0, "last": 0}, 0
    kept: Counter[str] = Counter()
    converted: Counter[tuple[str, str]] = Counter()
    together: Counter[tuple[object, int]] = Counter()  # (layer or weight name, inputs) → outputs that may be one product
    for (layer, weight), shape in weight_shapes(spec).items():
        tensor = weights.tensor(layer, weight)
        embeds = layer is None and weight == "embed" and not spec.tied
        if layer is None and (weight == "inputs_embed" or (embeds and not on_gpu)):
            kept[tensor.kind] += 1  # rows of this table are read from the mapped file, so it takes no memory here
            continue
        size = 4 * math.prod(shape)
        if len(shape) > 1 and weight != "conv":
            why = why_not_gpu_packed(tensor) if on_gpu else why_not_cpu_packed(tensor)
            size = _matrix_bytes(shape, tensor.kind, dtype, kept=not why)
            if not why:
                kept[tensor.kind] += 1
                if on_gpu and len(shape) == 2:
                    together[weight if layer is None else layer, shape[1]] += _padded(shape[0])
            elif why != NOT_QUANTIZED:
                converted[tensor.kind, why] += 1
        if layer is not None:
            layers[layer] += size
        else:
            ends["first" if embeds or weight.startswith("inputs") else "last"] += size
            if weight == "embed" and spec.tied and on_gpu:  # on a CPU its rows are read from the mapped file instead
                tied_embed = size
    parts = max((partial_sum_bytes(outputs, width) for (_, width), outputs in together.items()), default=0)
    found = PackedWeightBytes(ends["first"], tuple(layers), ends["last"], parts, tied_embed)
    return WeightStorage(found, tuple(sorted(kept.items())), tuple((*key, count) for key, count in sorted(converted.items())))


def _matrix_bytes(shape: tuple[int, ...], kind: str, dtype: str, *, kept: bool) -> int:
    if not is_gpu_packed(dtype):
        return cpu_packed_bytes(shape, kind if kept else "F32")
    return gpu_packed_bytes(shape, kind) if kept else math.prod(shape) * DTYPE_BYTES[float_dtype(dtype)]


def why_not_cpu_packed(tensor: LazyTensor) -> str:
    """Why a CPU dequantizes a matrix to float32; empty if it stays packed."""
    if tensor.kind == "F32":
        return ""
    if tensor.kind not in CPU_PACKED_KINDS:
        return "no kernel reads this kind"
    if not tensor.stays_packed:
        return "its columns or values change on loading"
    return ""


NOT_QUANTIZED = "not quantized"


def why_not_gpu_packed(tensor: LazyTensor) -> str:
    """Why a GPU dequantizes a matrix; empty if it stays packed. A matrix with permuted columns stays as stored: its inputs are
    permuted instead."""
    if tensor.kind not in SPAN_BYTES:
        return NOT_QUANTIZED if tensor.kind in ("F32", "F16", "BF16") else "no kernel reads this kind"
    stored = tensor.stored if isinstance(tensor, ColumnSelection) else tensor
    return "" if stored.stays_packed else "its values change on loading"


def gpu_packed_bytes(shape: tuple[int, ...], kind: str) -> int:
    """Bytes of a packed matrix, or of a stack of matrices, on a GPU."""
    *stack, rows, width = shape
    return math.prod(stack) * -(-rows // UNIT_ROWS) * -(-width // SPAN) * gpu_unit_bytes(kind)


def partial_sum_bytes(outputs: int, width: int) -> int:
    """Bytes of partial sums of a product with few rows: one float32 per output, row and segment. The memory plan reserves them,
    and the kernels get no more."""
    segments = -(-width // (SPAN * SEGMENT))
    return min(PARTIAL_SUM_BYTES, segments * -(-outputs // UNIT_ROWS) * UNIT_ROWS * FEW_ROWS * 4)


def _padded(outputs: int) -> int:
    """Upper bound of a product's outputs: widths are padded to a multiple of 64."""
    return -(-outputs // 64) * 64


def gpu_unit_bytes(kind: str) -> int:
    """Bytes of one unit on a GPU: 16 outputs by 256 inputs."""
    return UNIT_ROWS * SPAN_BYTES[kind]


def gpu_packed_savings(tensors: Iterable[LazyTensor]) -> int:
    """Bytes that packed matrices save on a GPU compared with 2 bytes per value."""
    kept = [tensor for tensor in tensors if len(tensor.shape) > 1 and not why_not_gpu_packed(tensor)]
    return sum(2 * math.prod(tensor.shape) - gpu_packed_bytes(tensor.shape, tensor.kind) for tensor in kept)


def cpu_packed_bytes(shape: tuple[int, ...], kind: str) -> int:
    """Bytes of a packed matrix, or of a stack of matrices, on a CPU."""
    *stack, rows, width = shape
    height = -(-rows // PANEL_ROWS) * PANEL_ROWS
    return math.prod(stack) * round(height * width / 32 * _BYTES_OF_32[kind])


def matrix_sizes(weights: ModelWeights, dtype: str) -> dict[WeightKey, int]:
    """Bytes of every matrix with this dtype of products."""
    sizes: dict[WeightKey, int] = {}
    for where, shape in weight_shapes(weights.spec).items():
        if len(shape) < 2:
            continue
        tensor = weights.tensor(*where)
        why = why_not_gpu_packed(tensor) if is_gpu_packed(dtype) else why_not_cpu_packed(tensor)
        packed = dtype in PACKED_DTYPES
        sizes[where] = _matrix_bytes(shape, tensor.kind, dtype, kept=not why) if packed else math.prod(shape) * DTYPE_BYTES[dtype]
    return sizes


def is_gpu_packed(dtype: str) -> bool:
    """Whether this dtype stores packed weights in the form of a GPU."""
    return dtype in ("packed-bf16", "packed-f16", "packed-gpu-f32")


def matrix_kinds(weights: ModelWeights) -> set[str]:
    """The tensor kinds of a model's matrices."""
    found = (weights.tensor(*where) for where in weight_shapes(weights.spec))
    return {tensor.kind for tensor in found if len(tensor.shape) > 1}
