"""The loaded library as functions of one path and one team of threads.

In: the library that `build.py` loaded, a number of threads. Out: `Kernels`: functions by name, the team they run on, and
memory that they may write to while they run. A kernel never keeps a pointer past its call.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from typing import Any

import torch

from onedraw.backends.torch.ops.cpu.build import paths

ARENA_BYTES = 32 * 2**20
POINTER, LONG, FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "packed_bytes": (LONG, [LONG, LONG, LONG]),
    "pack": (None, [POINTER, POINTER, LONG, LONG, LONG, LONG, POINTER]),
    "rows": (None, [POINTER, LONG, LONG, POINTER, LONG, POINTER, POINTER]),
    "linear": (None, [POINTER, POINTER, LONG, POINTER, LONG, POINTER, POINTER]),
    "rms_norm": (None, [POINTER, POINTER, POINTER, LONG, LONG, FLOAT, POINTER]),
    "silu_gated": (None, [POINTER, POINTER, LONG, LONG, POINTER]),
    "attention": (None, [POINTER, POINTER, POINTER, LONG, POINTER]),
    "layers_bytes": (LONG, [POINTER, LONG, LONG]),
    "layers": (None, [POINTER, POINTER, POINTER, LONG, LONG, POINTER, POINTER]),
    "choose": (None, [POINTER, LONG, POINTER]),
    "delta": (None, [POINTER, POINTER, POINTER, POINTER, LONG, POINTER, POINTER]),
    "delta_commit": (None, [POINTER, LONG, POINTER, LONG, POINTER, POINTER]),
}


def _large(size: int) -> torch.Tensor:
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    place = mmap.mmap(-1, size, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without large pages
            place.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(place, dtype=torch.uint8)


def supported_instruction_sets(library: ctypes.CDLL) -> list[str]:
    """The paths that this processor can run, best first."""
    library.onedraw_runs.argtypes, library.onedraw_runs.restype = [ctypes.c_char_p], ctypes.c_int
    return [path for path in paths() if library.onedraw_runs(path.encode())]


class Kernels:
    """Owner: the operations that use them. The team ends with this object."""

    def __init__(self, library: ctypes.CDLL, *, threads: int, path: str | None = None) -> None:
        self.path = path or supported_instruction_sets(library)[0]
        self.threads = threads
        self._functions: dict[str, Any] = {}
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, f"onedraw_{name}_{self.path}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        library.onedraw_team_new.restype, library.onedraw_team_new.argtypes = POINTER, [ctypes.c_int]
        library.onedraw_team_free.restype, library.onedraw_team_free.argtypes = None, [POINTER]
        self.team = library.onedraw_team_new(threads)
        if not self.team:
            raise MemoryError("no memory for a team of threads")
        # Not at exit: a thread that computes while the program ends must not lose its team.
        weakref.finalize(self, library.onedraw_team_free, self.team).atexit = False
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._arena, self._taken = torch.empty(0, dtype=torch.uint8), 0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the kernels have no {name}")

    def keep(self, size: int) -> torch.Tensor:
        """Bytes for weights, 64 bytes aligned, cut from large pieces of memory: their pages are large too where the system
        has such pages, and then reading all weights for every token takes fewer steps through page tables."""
        size = -(-size // 64) * 64
        if self._taken + size > self._arena.numel():
            self._arena, self._taken = _large(max(size, ARENA_BYTES)), 0
        self._taken += size
        return self._arena[self._taken - size : self._taken]

    def memory(self, size: int) -> int:
        """The address of `size` bytes, 64 bytes aligned, good until the next call."""
        if self._memory.numel() < size + 64:
            self._memory = torch.empty(size + size // 4 + 64, dtype=torch.uint8, device="cpu")
        return -(-self._memory.data_ptr() // 64) * 64
