"""Compiles and loads the C kernels, and gives access to them with one instruction set and one thread pool.

In: the sources of this folder, a cache folder, a number of threads. Out: `build` returns the loaded library; `Kernels` has its
functions by name, a thread pool, and scratch memory. A kernel keeps no pointer after its call.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
ONCE = tuple(FOLDER / name for name in ("thread_pool.c", "cpu_features.c"))  # these are compiled once, and run on any processor
SOURCES = tuple(
    FOLDER / name for name in ("gguf_blocks.c", "packed_linear.c", "attention.c", "fused_layers.c", "delta.c", "sampling.c")
)  # these are compiled once per instruction set
HEADERS = tuple(sorted(FOLDER.glob("*.h")))
FLAGS = ("-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
INSTRUCTION_SETS: dict[str, tuple[str, ...]] = {
    "avx512": ("-mavx2", "-mfma", "-mf16c", *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni"))),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "portable": (),
}
SECONDS = 300  # time limit for compiling one file, generous because a busy machine compiles slowly


@dataclass(frozen=True, slots=True)
class Built:
    library: ctypes.CDLL | None  # the loaded kernels; None if they could not be compiled or loaded
    reason: str = ""  # why there is no library; empty if there is one


def build(cache: Path) -> Built:
    """Load the kernels; compile them first if the cache folder does not have them for these sources and this machine."""
    compiler = find_compiler()
    if compiler is None:
        return Built(None, "no C compiler (cc, gcc or clang) is installed")
    file = cache / "kernels" / f"cpu-{_key(compiler)}.so"
    if not _is_whole(file):
        reason = _compile(compiler, file)
        if reason:
            return Built(None, reason)
    try:
        return Built(ctypes.CDLL(str(file)))
    except OSError as error:
        return Built(None, f"{file.name} does not load: {error}")


def _is_whole(file: Path) -> bool:
    try:
        return _checksum(file).read_text() == hashlib.sha256(file.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return False


def _checksum(file: Path) -> Path:
    return file.with_suffix(".sha256")


def find_compiler() -> str | None:
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def instruction_sets() -> dict[str, tuple[str, ...]]:
    """Compiler flags by instruction set for this machine, best first."""
    here = platform.machine().lower() in ("x86_64", "amd64")
    return INSTRUCTION_SETS if here else {"portable": ()}


def commands(compiler: str, folder: Path) -> Iterator[list[str]]:
    """The commands that compile every source for every instruction set, each into its own object file in `folder`."""
    for source in ONCE:
        yield [compiler, *FLAGS, "-c", str(source), "-o", str(folder / f"{source.stem}.o")]
    for isa, machine in instruction_sets().items():
        for source in SOURCES:
            # Multiplications and additions are fused only where the sources call `fused`; in delta.c the compiler may fuse them.
            contract = "fast" if source.stem == "delta" else "off"
            own = (*machine, f"-ffp-contract={contract}", f"-DONEDRAW_ISA={isa}")
            yield [compiler, *FLAGS, *own, "-c", str(source), "-o", str(folder / f"{source.stem}-{isa}.o")]


def _key(compiler: str) -> str:
    digest = hashlib.sha256()
    sources = (file.read_bytes() for file in (*ONCE, *SOURCES, *HEADERS))
    for part in (
        *sources,
        " ".join(FLAGS).encode(),
        repr(instruction_sets()).encode(),
        compiler.encode(),
        platform.platform().encode(),
    ):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:20]


def _compile(compiler: str, file: Path) -> str:
    """Compile in a temporary folder beside the target and move the result into place; return why it failed, or an empty
    string."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=file.parent)
    except OSError as error:
        return f"the cache folder cannot be written: {error}"
    with folder as name:
        place = Path(name)
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            reasons = [reason for reason in pool.map(_run, commands(compiler, place)) if reason]
        if reasons:
            return reasons[0]
        made = place / "kernels.so"
        reason = _run([compiler, "-shared", "-pthread", "-o", str(made), *map(str, sorted(place.glob("*.o"))), "-lm"])
        if not reason:
            checksum = place / "sha256"
            checksum.write_text(hashlib.sha256(made.read_bytes()).hexdigest())
            os.replace(made, file)
            os.replace(checksum, _checksum(file))
        return reason


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} failed: {error}"
    return f"{command[0]} failed: {done.stderr.strip().splitlines()[-1:]}" if done.returncode else ""


# ------------------------------------------------------------------ the loaded library


ARENA_BYTES = 32 * 2**20  # least size of the allocations that `Kernels.allocate` cuts up
WAITING = 2**20  # floats of scratch memory in which threads that share a long context leave partial results of attention
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
    "sample": (None, [POINTER, LONG, POINTER]),
    "delta": (None, [POINTER, POINTER, POINTER, POINTER, LONG, POINTER, POINTER]),
    "delta_commit": (None, [POINTER, LONG, POINTER, LONG, POINTER, POINTER]),
}


def _large(size: int) -> torch.Tensor:
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    place = mmap.mmap(-1, size, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the system has no huge pages
            place.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(place, dtype=torch.uint8)


def supported_instruction_sets(library: ctypes.CDLL) -> list[str]:
    """The compiled instruction sets that this processor supports, best first."""
    library.onedraw_supports.argtypes, library.onedraw_supports.restype = [ctypes.c_char_p], ctypes.c_int
    return [name for name in instruction_sets() if library.onedraw_supports(name.encode())]


class Kernels:
    """The functions of the library for one instruction set, and a thread pool that ends with this object. Owner: the operations
    that call them."""

    def __init__(self, library: ctypes.CDLL, *, threads: int, instruction_set: str | None = None) -> None:
        self.instruction_set = instruction_set or supported_instruction_sets(library)[0]
        self.threads = threads
        self._functions: dict[str, Any] = {}
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, f"onedraw_{name}_{self.instruction_set}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        library.onedraw_pool_new.restype, library.onedraw_pool_new.argtypes = POINTER, [ctypes.c_int]
        library.onedraw_pool_free.restype, library.onedraw_pool_free.argtypes = None, [POINTER]
        self.thread_pool = library.onedraw_pool_new(threads)
        if not self.thread_pool:
            raise MemoryError("no memory for the thread pool")
        # The pool is not freed at interpreter exit, because another thread may still be running a kernel then.
        weakref.finalize(self, library.onedraw_pool_free, self.thread_pool).atexit = False
        self.waiting = torch.empty(WAITING, dtype=torch.float32, device="cpu")  # results of attention that are not merged yet
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._arena, self._taken = torch.empty(0, dtype=torch.uint8), 0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the kernels have no {name}")

    def allocate(self, size: int) -> torch.Tensor:
        """Memory for weights, aligned to 64 bytes. It is cut from large allocations, in huge pages if the system has them, to
        reduce TLB misses."""
        size = -(-size // 64) * 64
        if self._taken + size > self._arena.numel():
            self._arena, self._taken = _large(max(size, ARENA_BYTES)), 0
        self._taken += size
        return self._arena[self._taken - size : self._taken]

    def scratch(self, size: int) -> int:
        """The address of `size` bytes of scratch memory, aligned to 64 bytes, valid until the next call."""
        if self._scratch.numel() < size + 64:
            self._scratch = torch.empty(size + size // 4 + 64, dtype=torch.uint8, device="cpu")
        return -(-self._scratch.data_ptr() // 64) * 64
