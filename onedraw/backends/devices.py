"""Devices by name, and the CPU of this machine.

In: `cuda:0`, `cpu`, some of its cores (`cpu:0-3`), or a hypothetical device such as `cuda/sm86/24GiB`. Out: Device. A
hypothetical device can be planned for, but not run on.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal

from onedraw.errors import BadSetting

Kind = Literal["cpu", "cuda", "hip"]
KINDS: tuple[Kind, ...] = ("cpu", "cuda", "hip")
UNITS = {"MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
EXAMPLES = "cpu, cpu:0-3, cuda:0, or a description such as cuda/sm86/24GiB, hip/gfx90a/64GiB or cpu/64GiB"


@dataclass(frozen=True, slots=True)
class Device:
    name: str  # as written by the user
    kind: Kind
    arch: str = ""  # sm86, gfx90a …; empty if unknown
    memory: int | None = None  # free bytes; None if unknown
    cores: tuple[int, ...] = ()  # CPU cores to use; empty: all

    @property
    def hypothetical(self) -> bool:
        return "/" in self.name

    @property
    def memory_pool(self) -> str:
        """Devices with the same value share one memory: all cores of this machine do."""
        return self.kind if self.kind == "cpu" and not self.hypothetical else self.name


def can_overlap(devices: Sequence[Device]) -> bool:
    """Whether pipeline stages on these devices can run in parallel: several devices of one kind that share no cores.

    Not a CPU beside an accelerator: the CPU is the bottleneck, and two small steps take it longer than one large step.
    """
    names, cores = [device.name for device in devices], [core for device in devices for core in device.cores]
    alone = len(set(names)) == len(names) and len(set(cores)) == len(cores)
    return len(devices) > 1 and alone and len({d.kind for d in devices}) == 1 and all(d.cores or d.kind != "cpu" for d in devices)


def parse_device(text: str) -> Device:
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


def _cores(text: str) -> tuple[int, ...]:
    """3 → (3,), 4-7 → (4, 5, 6, 7); empty if it is neither."""
    found = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", text)
    return () if found is None else tuple(range(int(found[1]), int(found[2] or found[1]) + 1))


def compute_capability(arch: str) -> tuple[int, int] | None:
    """sm86 → (8, 6), sm120 → (12, 0); None for another name."""
    found = re.fullmatch(r"sm(\d+)(\d)[a-z]?", arch)
    return None if found is None else (int(found[1]), int(found[2]))


# ---------------------------------------------------------------------- the CPU of this machine; its name is part of fingerprints

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
