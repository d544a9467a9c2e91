"""Devices by name: those of this machine, and those that are only described. Pure.

In: `cuda:0`, `cpu`, or a description such as `cuda/sm86/24GiB`. Out: Device. A description plans; it cannot run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from onedraw.errors import BadSetting

Kind = Literal["cpu", "cuda", "hip"]
KINDS: tuple[Kind, ...] = ("cpu", "cuda", "hip")
UNITS = {"MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
EXAMPLES = "cpu, cuda:0, or a description such as cuda/sm86/24GiB, hip/gfx90a/64GiB or cpu/64GiB"


@dataclass(frozen=True, slots=True)
class Device:
    """`arch`: sm86, gfx90a …, empty where nobody knows. `memory`: bytes that may be taken, None where nobody knows."""

    name: str  # as it was written
    kind: Kind
    arch: str = ""
    memory: int | None = None

    @property
    def described(self) -> bool:
        return "/" in self.name


def parse_device(text: str) -> Device:
    first, *parts = text.strip().split("/")
    base, _, index = first.partition(":")
    if base not in KINDS or (index and not index.isdigit()) or (parts and index):
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
    return Device(text.strip(), kind, arch, memory)


def compute_capability(arch: str) -> tuple[int, int] | None:
    """sm86 → (8, 6), sm120 → (12, 0); None where the name says nothing."""
    found = re.fullmatch(r"sm(\d+)(\d)[a-z]?", arch)
    return None if found is None else (int(found[1]), int(found[2]))
