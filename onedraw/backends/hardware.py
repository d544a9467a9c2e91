"""The processor of this machine by name: equal names compute equal bits. Pure but for one file that is read.

In: nothing. Out: its model, and a short sum of the vector instructions it offers, which a virtual machine may have fewer of.
"""

from __future__ import annotations

import platform
from hashlib import sha256
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
VECTOR = ("sse", "ssse", "avx", "fma", "f16c", "amx", "asimd", "sve", "sme", "bf16", "i8mm", "fphp")


def cpu_model() -> str:
    """As the system names it; where it does not say, the architecture."""
    return _said("model name") or platform.machine()


def cpu_vectors() -> str:
    """Eight digits that differ where the vector instructions do."""
    offered = (_said("flags") or _said("Features")).split()
    return sha256(" ".join(sorted(word for word in offered if word.startswith(VECTOR))).encode()).hexdigest()[:8]


def _said(name: str) -> str:
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), "")
