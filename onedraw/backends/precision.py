"""Which dtype the residual stream and the buffers between devices have. A pure table.

In: devices, and an override. Out: f32, f16 or bf16, one for the whole set: a boundary between devices adds no rounding.
The dtype of weights and products is another setting, and takes this table's answer where nobody chose one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, assert_never

from onedraw.backends.devices import Device, compute_capability
from onedraw.errors import BadSetting

Precision = Literal["f32", "f16", "bf16"]
PRECISIONS: tuple[Precision, ...] = ("f32", "f16", "bf16")  # the weakest first: one member decides for the set
# Weights as they are stored, and the dtype of everything else: on a CPU with activations as codes of 8 bits or as they are, and
# on a GPU.
PACKED: dict[str, Precision] = {"packed": "f32", "packed-f32": "f32", "packed-bf16": "bf16", "packed-f16": "f16"}
KV_QUANT_DTYPES = ("fp8", "int8")  # keys and values as codes of 8 bits with scales
FP8_CAPABILITY = (8, 9)  # the oldest NVIDIA GPU that converts fp8
NATIVE_BF16 = ("gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
NATIVE_F16 = ("gfx9", "gfx10")


def cuda_precision(capability: tuple[int, int] | None) -> Precision:
    if capability is None:
        return "f32"
    if capability >= (8, 0):
        return "bf16"
    return "f16" if capability >= (7, 0) or capability == (6, 0) else "f32"


def hip_precision(name: str) -> Precision:
    """`name` as the runtime gives it, perhaps with features behind: gfx90a:sramecc+:xnack-."""
    if name.startswith(NATIVE_BF16):
        return "bf16"
    return "f16" if name.startswith(NATIVE_F16) else "f32"


def device_precision(device: Device) -> Precision:
    match device.kind:
        case "cuda":
            return cuda_precision(compute_capability(device.arch))
        case "hip":
            return hip_precision(device.arch)
        case "cpu":
            return "f32"
        case _:
            assert_never(device.kind)


def float_dtype(products: str) -> str:
    """The dtype of keys, values and norms beside such products."""
    return PACKED.get(products, products)


def weakest(found: Iterable[Precision]) -> Precision:
    """Of no device at all: f32."""
    return min(found, key=PRECISIONS.index, default="f32")


def product_precision(devices: Iterable[Device], *, asked: str = "auto") -> str:
    """Dtype of weights and products: what was asked for, else the table's answer for the set."""
    return asked if asked != "auto" else weakest(map(device_precision, devices))


def kv_precision(asked: str, *, products: str, devices: Iterable[Device] = ()) -> str:
    """Dtype of keys and values: what was asked for, else that of the products. What a device cannot read is refused."""
    own = float_dtype(products)
    if asked in ("auto", own) or (own == "f32" and asked in PRECISIONS):
        return own if asked == "auto" else asked
    if asked not in KV_QUANT_DTYPES:
        raise BadSetting(f"--kv-dtype: keys and values are computed in {own} here, not for {asked}; say auto, fp8 or int8")
    for device in devices if asked == "fp8" else ():
        if device.kind == "hip" or (device.kind == "cuda" and (compute_capability(device.arch) or (0, 0)) < FP8_CAPABILITY):
            raise BadSetting(
                f"--kv-dtype fp8: {device.name} ({device.arch or 'unknown'}) does not convert fp8, NVIDIA GPUs do from sm89 on; "
                "int8 has the same size and works there"
            )
    return asked


def activation_precision(devices: Iterable[Device], *, asked: str = "auto", products: str = "auto") -> Precision:
    """`asked` wins. Else the table's answer for the set, but float32 where float32 products were asked for: what they
    compute would be rounded away between every two layers."""
    if asked != "auto":
        for precision in PRECISIONS:
            if asked == precision:
                return precision
        raise BadSetting(f"--activation-dtype: {asked!r} is not one of auto, {', '.join(PRECISIONS)}")
    return "f32" if products == "f32" else weakest(map(device_precision, devices))
