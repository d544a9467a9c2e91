"""Devices by name, the dtypes that they compute in, and the CPU of this machine.

In: `cuda:0`, `cpu`, some of its cores (`cpu:0-3`), one of these on another node of a Ray cluster (`ray:NODE/cuda:0`), or a
hypothetical device such as `cuda/sm86/24GiB`, which can be planned for but not run on. Out: Device; and the dtypes of the
residual stream, of products, and of keys and values: one for all devices together, so a boundary between devices adds no
rounding.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Literal, assert_never

from onedraw.errors import BadSetting

Kind = Literal["cpu", "cuda", "hip"]
KINDS: tuple[Kind, ...] = ("cpu", "cuda", "hip")
UNITS = {"MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
RAY = "ray:"  # begins the name of a device of a Ray cluster: ray:NODE/DEVICE
EXAMPLES = "cpu, cpu:0-3, cuda:0, ray:NODE/cuda:0, or a description such as cuda/sm86/24GiB, hip/gfx90a/64GiB or cpu/64GiB"

Precision = Literal["f32", "f16", "bf16"]
PRECISIONS: tuple[Precision, ...] = ("f32", "f16", "bf16")  # from the least to the most preferred; every device supports f32
# Dtype names that stand for packed (quantized) weights → the dtype of everything else. "packed" and "packed-f32" are for CPUs,
# with activations quantized to 8 bits or in float32; the others are for GPUs.
PACKED: dict[str, Precision] = {
    **{"packed": "f32", "packed-f32": "f32"},
    **{"packed-bf16": "bf16", "packed-f16": "f16", "packed-gpu-f32": "f32"},
}
KV_QUANT_DTYPES = ("fp8", "int8", "int4")  # keys and values as codes with scales
FP8_CAPABILITY = (8, 9)  # first NVIDIA compute capability with fp8 conversion
# How the names of AMD architectures begin that compute in bf16, and of the others that compute in f16.
NATIVE_BF16 = ("gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
NATIVE_F16 = ("gfx9", "gfx10")
TENSOR_CORES = (8, 0)  # the compute capability from which the kernels for NVIDIA's tensor cores run
OLDEST_TRITON = (6, 0)  # the oldest compute capability that Triton compiles for
TRITON_HIP = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx103", "gfx11", "gfx12")  # AMD architectures that Triton compiles for

# Kernels that read packed weights: those in C for CPUs, those for tensor cores, and those in Triton for other GPUs.
PackedKernels = Literal["cpu", "tensor cores", "triton"]


@dataclass(frozen=True, slots=True)
class Device:
    name: str  # the name as the user wrote it
    kind: Kind
    arch: str = ""  # the architecture, such as sm86 or gfx90a; empty if unknown
    memory: int | None = None  # bytes of free memory; None if unknown
    cores: tuple[int, ...] = ()  # CPU cores to use; empty stands for all
    node: str = ""  # the node of a Ray cluster that has the device, as the user named it; empty for this process's machine

    @property
    def local_name(self) -> str:
        """The name that the device has on its node."""
        return self.name.removeprefix(f"{RAY}{self.node}/") if self.node else self.name

    @property
    def hypothetical(self) -> bool:
        return "/" in self.local_name

    @property
    def memory_pool(self) -> str:
        """Devices with the same value share one memory: all cores of a machine do."""
        if self.kind == "cpu" and not self.hypothetical:
            return f"{RAY}{self.node}/{self.kind}" if self.node else self.kind
        return self.name


def can_overlap(devices: Sequence[Device]) -> bool:
    """Whether pipeline stages on these devices can run in parallel: several devices of one kind that share no cores. CPUs of
    different nodes are different devices.

    Not a CPU beside an accelerator: the CPU is the bottleneck, and two small steps take it longer than one large step.
    """
    names, cores = [device.name for device in devices], [(device.node, core) for device in devices for core in device.cores]
    alone = len(set(names)) == len(names) and len(set(cores)) == len(cores)
    nodes = [device.node for device in devices]
    apart = all(d.cores or d.kind != "cpu" or nodes.count(d.node) == 1 for d in devices)
    return len(devices) > 1 and alone and len({d.kind for d in devices}) == 1 and apart


def parse_device(text: str) -> Device:
    if text.strip().startswith(RAY):
        return _parse_node_device(text.strip())
    first, *parts = text.strip().split("/")
    base, _, index = first.partition(":")
    cores = _cores(index) if base == "cpu" else ()
    if base not in KINDS or (index and not (index.isascii() and index.isdecimal()) and not cores) or (parts and index):
        raise BadSetting(f"--devices: {text!r} is not a device; write {EXAMPLES}")
    kind: Kind = next(k for k in KINDS if k == base)
    arch, memory = "", None
    for part in parts:
        if (size := re.fullmatch(r"(\d+(?:\.\d+)?)(MiB|GiB|TiB)", part)) is not None and memory is None:
            memory = int(float(size[1]) * UNITS[size[2]])
        elif re.fullmatch(r"sm\d{2,3}[a-z]?" if kind == "cuda" else r"gfx\w+", part) and kind != "cpu" and not arch:
            arch = part
        else:
            raise BadSetting(f"--devices: {part!r} in {text!r} is neither an architecture nor a size; write {EXAMPLES}")
    return Device(text.strip(), kind, arch, memory, cores)


def _parse_node_device(text: str) -> Device:
    node, _, name = text.removeprefix(RAY).partition("/")
    if not node or not name or name.startswith(RAY) or "/" in name:
        raise BadSetting(
            f"--devices: {text!r} does not name a device of a Ray cluster; write ray:NODE/DEVICE, where NODE is the name, the "
            "address or the number of a node and DEVICE is cpu, cpu:0-3 or cuda:0"
        )
    return replace(parse_device(name), name=text, node=node)


def _cores(text: str) -> tuple[int, ...]:
    """The cores that a number or a range names: 3 gives (3,), 4-7 gives (4, 5, 6, 7); other text gives none."""
    found = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", text)
    return () if found is None else tuple(range(int(found[1]), int(found[2] or found[1]) + 1))


def compute_capability(arch: str) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA architecture: sm86 gives (8, 6), sm120 gives (12, 0); None for another name."""
    found = re.fullmatch(r"sm(\d+)(\d)[a-z]?", arch)
    return None if found is None else (int(found[1]), int(found[2]))


def cuda_precision(capability: tuple[int, int] | None) -> Precision:
    if capability is None:
        return "f32"
    if capability >= (8, 0):
        return "bf16"
    return "f16" if capability >= (7, 0) or capability == (6, 0) else "f32"


def hip_precision(name: str) -> Precision:
    """The best dtype of an AMD architecture, by the name that the runtime reports, such as gfx90a:sramecc+:xnack-."""
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


def packed_kernels(device: Device) -> PackedKernels | None:
    """The kernels that read packed weights on this device; None if there are none."""
    match device.kind:
        case "cpu":
            return "cpu"
        case "cuda":
            capability = compute_capability(device.arch) or (0, 0)
            return "tensor cores" if capability >= TENSOR_CORES else "triton" if capability >= OLDEST_TRITON else None
        case "hip":
            return "triton" if device.arch.startswith(TRITON_HIP) else None
        case _:
            assert_never(device.kind)


def float_dtype(products: str) -> str:
    """The dtype of keys, values and norms for this dtype of products."""
    return PACKED.get(products, products)


def weakest(found: Iterable[Precision]) -> Precision:
    """Return the best dtype that devices support together, given the best dtype of each; f32 without devices."""
    return min(found, key=PRECISIONS.index, default="f32")


def product_precision(devices: Iterable[Device], *, requested: str) -> str:
    """Dtype of weights and products: the requested one, else the best that all devices support."""
    return requested if requested != "auto" else weakest(map(device_precision, devices))


def kv_precision(requested: str, *, products: str, devices: Iterable[Device] = ()) -> str:
    """Dtype of keys and values: the requested one; for auto that of the products, or f16 for `packed` products, whose activations
    a CPU rounds to 8 bits. Raises BadSetting if the requested one does not fit that of the products, or if it is fp8 and a device
    cannot convert to it."""
    own = float_dtype(products)
    if requested == "auto":
        return "f16" if products == "packed" else own
    if requested == own or (own == "f32" and requested in PRECISIONS):
        return requested
    if requested not in KV_QUANT_DTYPES:
        raise BadSetting(f"--kv-dtype: {requested} does not fit {own} products; use auto, fp8, int8 or int4")
    for device in devices if requested == "fp8" else ():
        if device.kind == "hip" or (device.kind == "cuda" and (compute_capability(device.arch) or (0, 0)) < FP8_CAPABILITY):
            raise BadSetting(
                f"--kv-dtype fp8: {device.name} ({device.arch or 'unknown'}) has no fp8 conversion, which NVIDIA GPUs have "
                "from sm89 on; use int8, which has the same size"
            )
    return requested


def activation_precision(devices: Iterable[Device], *, requested: str = "auto", products: str = "auto") -> Precision:
    """Dtype of the residual stream: the requested one; for auto the best that all devices support, but float32 if the products
    are float32, whose results a narrower stream would round between layers. Raises BadSetting for another name."""
    if requested != "auto":
        for precision in PRECISIONS:
            if requested == precision:
                return precision
        raise BadSetting(f"--activation-dtype: {requested!r} is not one of auto, {', '.join(PRECISIONS)}")
    return "f32" if products == "f32" else weakest(map(device_precision, devices))


# The CPU's name and vector instructions are part of fingerprints. VECTOR: how the names of such instructions begin.
CPUINFO = Path("/proc/cpuinfo")
VECTOR = ("sse", "ssse", "avx", "fma", "f16c", "amx", "asimd", "sve", "sme", "bf16", "i8mm", "fphp")


def cpu_model() -> str:
    """The CPU's name according to the system; the architecture if the system has none."""
    return _cpuinfo("model name") or platform.machine()


def cpu_features_digest() -> str:
    """Eight hex digits that identify the set of vector instructions."""
    features = (_cpuinfo("flags") or _cpuinfo("Features")).split()
    return sha256(" ".join(sorted(word for word in features if word.startswith(VECTOR))).encode()).hexdigest()[:8]


def _cpuinfo(name: str) -> str:
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), "")
