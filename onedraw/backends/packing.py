"""Which stored weights a CPU keeps as they are, what that costs in memory, and why the others are converted. Pure arithmetic.

In: a model's weights, not read. Out: a Holding, which `inspect` prints and the memory plan counts with. Products read kept
weights in their stored width; the layout in memory is that of `torch/kernels/packed.h`, with the same bytes in another order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onedraw.backends.devices import Device
from onedraw.backends.plan import WeightBytes
from onedraw.backends.precision import product_precision
from onedraw.errors import BadSetting
from onedraw.models.source import Tensor
from onedraw.models.weights import Weights, all_shapes

# Kinds that products read as they are, by their numbers in GGUF, which the kernels use too.
KEPT_KINDS = {
    **{"F32": 0, "F16": 1, "BF16": 30},
    **{"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14},
}
PANEL_ROWS = 32  # outputs are padded to a multiple of it
# Bytes of 32 values in a panel: as stored, but for the six-bit scales of Q4_K and Q5_K, which take a byte each.
_BYTES_OF_32 = {
    **{"F32": 128.0, "F16": 64.0, "BF16": 64.0, "Q4_0": 18.0, "Q4_1": 20.0, "Q5_0": 22.0, "Q5_1": 24.0, "Q8_0": 34.0},
    **{"Q4_K": 18.5, "Q5_K": 22.5, "Q6_K": 26.25},
}
PACKED_DTYPES = ("packed", "packed-f32")  # weights as stored; activations as codes of 8 bits, or as they are


@dataclass(frozen=True, slots=True)
class Holding:
    """What a stack with packed weights keeps. Counts are of weights, not of tensors in the file."""

    weights: WeightBytes
    kept: tuple[tuple[str, int], ...]  # (kind, how many)
    converted: tuple[tuple[str, str, int], ...]  # (kind, why, how many)


def is_narrow(kinds: Iterable[str]) -> bool:
    """Whether keeping weights as stored saves anything: some kept kind is narrower than float32."""
    return any(kind in KEPT_KINDS and kind != "F32" for kind in kinds)


def product_dtype(devices: Sequence[Device], *, asked: str, activations: str, stream: str, narrow: bool, no_kernels: str) -> str:
    """What products are made of: `product_precision`, but where only CPUs compute in float32, weights as they are stored, if
    that is asked for, or if nobody asked and it saves something. `no_kernels`: why it cannot be done here."""
    on_cpu = all(device.kind == "cpu" for device in devices)
    if asked == "packed":
        if not on_cpu:
            raise BadSetting("--dtype packed: kernels for packed weights exist for the CPU alone; use bf16 or f16")
        if stream not in ("auto", "f32"):
            raise BadSetting(f"--dtype packed computes in float32; --activation-dtype {stream} needs another --dtype")
        if no_kernels:
            raise BadSetting(f"--dtype packed: no CPU kernels: {no_kernels}; use --dtype f32")
    elif asked != "auto" or not (on_cpu and narrow and stream in ("auto", "f32") and not no_kernels):
        return product_precision(devices, asked=asked)
    return "packed-f32" if activations == "f32" else "packed"


def hold(weights: Weights) -> Holding:
    """Decide for every weight of a model. Matrices may be kept; a norm or a bias is a few float32."""
    spec = weights.spec
    layers, ends = [0] * len(spec.layers), {"first": 0, "last": 0}
    kept: Counter[str] = Counter()
    converted: Counter[tuple[str, str]] = Counter()
    for (layer, weight), shape in all_shapes(spec).items():
        tensor = weights.tensor(layer, weight)
        size, why = 4 * math.prod(shape), why_converted(tensor)
        if layer is None and (weight == "inputs_embed" or (weight == "embed" and not spec.tied)):
            kept[tensor.kind] += 1  # looked up where the file is mapped; in memory as far as it is read
            continue
        if len(shape) > 1 and weight != "conv":
            size = panel_bytes(shape, "F32" if why else tensor.kind)
            if why:
                converted[tensor.kind, why] += 1
            else:
                kept[tensor.kind] += 1
        if layer is not None:
            layers[layer] += size
        else:
            ends["first" if weight.startswith("inputs") else "last"] += size
    found = WeightBytes(ends["first"], tuple(layers), ends["last"])
    return Holding(found, tuple(sorted(kept.items())), tuple((*key, count) for key, count in sorted(converted.items())))


def why_converted(tensor: Tensor) -> str:
    """Why a matrix becomes float32; nothing where it is kept."""
    if tensor.kind == "F32":
        return ""
    if tensor.kind not in KEPT_KINDS:
        return "no kernel reads this kind"
    if not tensor.stays_packed:
        return "its columns or values change on the way"
    return ""


def panel_bytes(shape: tuple[int, ...], kind: str) -> int:
    """Bytes of a matrix, or of a stack of them, in panels."""
    *stack, rows, width = shape
    height = -(-rows // PANEL_ROWS) * PANEL_ROWS
    return math.prod(stack) * round(height * width / 32 * _BYTES_OF_32[kind])


def matrix_kinds(weights: Weights) -> set[str]:
    """The kinds that a model's matrices are stored as."""
    found = (weights.tensor(*where) for where in all_shapes(weights.spec))
    return {tensor.kind for tensor in found if len(tensor.shape) > 1}
