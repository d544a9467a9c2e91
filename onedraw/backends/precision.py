"""Precision tables: dtypes of the residual stream, of weights and products, and of keys and values, by device.

In: devices and the settings. Out: f32, f16 or bf16, one for all devices together, so a boundary between devices adds no rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, assert_never

from onedraw.backends.devices import Device, compute_capability
from onedraw.errors import BadSetting

Precision = Literal["f32", "f16", "bf16"]
PRECISIONS: tuple[Precision, ...] = ("f32", "f16", "bf16")  # least capable devices first
# Dtypes with packed (quantized) weights, and the dtype of everything else. On a CPU activations are quantized to 8 bits
# ("packed") or float32 ("packed-f32"); the other two are for GPUs.
PACKED: dict[str, Precision] = {"packed": "f32", "packed-f32": "f32", "packed-bf16": "bf16", "packed-f16": "f16"}
KV_QUANT_DTYPES = ("fp8", "int8")  # 8-bit keys and values with scales
FP8_CAPABILITY = (8, 9)  # first NVIDIA compute capability with fp8 conversion
NATIVE_BF16 = ("gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
NATIVE_F16 = ("gfx9", "gfx10")


def cuda_precision(capability: tuple[int, int] | None) -> Precision:
    if capability is None:
        return "f32"
    if capability >= (8, 0):
        return "bf16"
    return "f16" if capability >= (7, 0) or capability == (6, 0) else "f32"


def hip_precision(name: str) -> Precision:
    """`name` as the runtime reports it, perhaps followed by features: gfx90a:sramecc+:xnack-."""
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
    """The dtype of keys, values and norms for this dtype of products."""
    return PACKED.get(products, products)


def weakest(found: Iterable[Precision]) -> Precision:
    """The dtype that all of these support; f32 for none."""
    return min(found, key=PRECISIONS.index, default="f32")


def product_precision(devices: Iterable[Device], *, requested: str = "auto") -> str:
    """Dtype of weights and products: the requested one, else the best that all devices support."""
    return requested if requested != "auto" else weakest(map(device_precision, devices))


def kv_precision(requested: str, *, products: str, devices: Iterable[Device] = ()) -> str:
    """Dtype of keys and values: the requested one, else that of the products. BadSetting if a device does not support it."""
    own = float_dtype(products)
    if requested in ("auto", own) or (own == "f32" and requested in PRECISIONS):
        return own if requested == "auto" else requested
    if requested not in KV_QUANT_DTYPES:
        raise BadSetting(f"--kv-dtype: {requested} does not fit {own} products; use auto, fp8 or int8")
    for device in devices if requested == "fp8" else ():
        if device.kind == "hip" or (device.kind == "cuda" and (compute_capability(device.arch) or (0, 0)) < FP8_CAPABILITY):
            raise BadSetting(
                f"--kv-dtype fp8: {device.name} ({device.arch or 'unknown'}) has no fp8 conversion, which NVIDIA GPUs have "
                "from sm89 on; use int8, which has the same size"
            )
    return requested


def activation_precision(devices: Iterable[Device], *, requested: str = "auto", products: str = "auto") -> Precision:
    """Dtype of the residual stream: the requested one, else the best that all devices support. With float32 products it is
    float32: a narrower stream would round their results away between layers."""
    if requested != "auto":
        for precision in PRECISIONS:
            if requested == precision:
                return precision
        raise BadSetting(f"--activation-dtype: {requested!r} is not one of auto, {', '.join(PRECISIONS)}")
    return "f32" if products == "f32" else weakest(map(device_precision, devices))
