"""Devices by name: those of this machine, and those that are only described. Pure.

In: `cuda:0`, `cpu`, some processors of it (`cpu:0-3`), or a description such as `cuda/sm86/24GiB`. Out: Device. A description
plans; it cannot run.
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

# -------------------- The processor of this machine by name: equal names compute equal bits. Pure but for one fi


CPUINFO = Path("/proc/cpuinfo")
VECTOR = ("sse", "ssse", "avx", "fma", "f16c", "amx", "asimd", "sve", "sme", "bf16", "i8mm", "fphp")


def cpu_model() -> str:
    """As the system names it; where it does not say, the architecture."""
    return _said("model name") or platform.machine()


def cpu_features_digest() -> str:
    """Eight digits that differ where the vector instructions do."""
    offered = (_said("flags") or _said("Features")).split()
    return sha256(" ".join(sorted(word for word in offered if word.startswith(VECTOR))).encode()).hexdigest()[:8]


def _said(name: str) -> str:
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), "")


# -------------------- Devices by name: those of this machine, and those that are only described. Pure.


Kind = Literal["cpu", "cuda", "hip"]
KINDS: tuple[Kind, ...] = ("cpu", "cuda", "hip")
UNITS = {"MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
EXAMPLES = "cpu, cpu:0-3, cuda:0, or a description such as cuda/sm86/24GiB, hip/gfx90a/64GiB or cpu/64GiB"


@dataclass(frozen=True, slots=True)
class Device:
    """`arch`: sm86, gfx90a …, empty where nobody knows. `memory`: bytes that may be taken, None where nobody knows.
    `cores`: the processors of a CPU that may be used; none named: all of them."""

    name: str  # as it was written
    kind: Kind
    arch: str = ""
    memory: int | None = None
    cores: tuple[int, ...] = ()

    @property
    def hypothetical(self) -> bool:
        return "/" in self.name

    @property
    def memory_pool(self) -> str:
        """Whose memory it takes: processors of one machine share theirs."""
        return self.kind if self.kind == "cpu" and not self.hypothetical else self.name


def can_overlap(devices: Sequence[Device]) -> bool:
    """Several devices of one kind, none of which another takes computing time from: each can be kept busy by itself.

    A CPU beside an accelerator is left out: the slower one decides, and two small turns cost it more than one large one.
    """
    names, cores = [device.name for device in devices], [core for device in devices for core in device.cores]
    alone = len(set(names)) == len(names) and len(set(cores)) == len(cores)
    return len(devices) > 1 and alone and len({d.kind for d in devices}) == 1 and all(d.cores or d.kind != "cpu" for d in devices)


def parse_device(text: str) -> Device:
    first, *parts = text.strip().split("/")
    base, _, index = first.partition(":")
    cores = _cores(index) if base == "cpu" else ()
    if base not in KINDS or (index and not (index.isascii() and index.isdecimal()) and not cores) or (parts and index):
        raise BadSetting(f"--devices: {text!r} is no device; write {EXAMPLES}")
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
    """3 → (3,), 4-7 → (4, 5, 6, 7); nothing where it says neither."""
    found = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", text)
    return () if found is None else tuple(range(int(found[1]), int(found[2] or found[1]) + 1))


def compute_capability(arch: str) -> tuple[int, int] | None:
    """sm86 → (8, 6), sm120 → (12, 0); None where the name says nothing."""
    found = re.fullmatch(r"sm(\d+)(\d)[a-z]?", arch)
    return None if found is None else (int(found[1]), int(found[2]))
