"""The C sources → a library in memory: compiled once per machine with the C compiler that is there, kept in the cache folder.

In: a cache folder. Out: a loaded library, or None and the reason where there is no compiler. The sources are compiled once
per path (`cpu_features.h`) into one library, which is asked at run time what the processor can do. The file's name holds a hash
of the sources, the flags and the compiler, so neither an update nor a shared home folder ever loads a wrong one; a checksum
beside it says that it is whole, and what is not is compiled anew.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ONCE = tuple(FOLDER / name for name in ("thread_pool.c", "cpu_features.c"))  # compiled for any processor
SOURCES = tuple(
    FOLDER / name for name in ("gguf_blocks.c", "packed_linear.c", "attention.c", "fused_layers.c", "delta.c", "sampling.c")
)  # once per path
HEADERS = tuple(sorted(FOLDER.glob("*.h")))
FLAGS = ("-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
PATHS: dict[str, tuple[str, ...]] = {
    "avx512": ("-mavx2", "-mfma", "-mf16c", *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni"))),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "portable": (),
}
SECONDS = 300  # for one file; a busy machine compiles slowly


@dataclass(frozen=True, slots=True)
class Built:
    library: ctypes.CDLL | None
    reason: str = ""  # why there is none


def build(cache: Path) -> Built:
    """Load the kernels, compiling them first where this machine has not done so yet."""
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


def paths() -> dict[str, tuple[str, ...]]:
    """The paths there are on this kind of machine, best first, and their flags."""
    here = platform.machine().lower() in ("x86_64", "amd64")
    return PATHS if here else {"portable": ()}


def commands(compiler: str, folder: Path, flags: tuple[str, ...] = FLAGS) -> Iterator[list[str]]:
    """What compiles every source for every path, each into an object in `folder`."""
    for source in ONCE:
        yield [compiler, *flags, "-c", str(source), "-o", str(folder / f"{source.stem}.o")]
    for path, machine in paths().items():
        for source in SOURCES:
            # A product and a sum are one rounding where the sources say so; the delta kernels leave it to the compiler.
            contract = "fast" if source.stem == "delta" else "off"
            own = (*machine, f"-ffp-contract={contract}", f"-DONEDRAW_PATH={path}")
            yield [compiler, *flags, *own, "-c", str(source), "-o", str(folder / f"{source.stem}-{path}.o")]


def _key(compiler: str) -> str:
    digest = hashlib.sha256()
    sources = (file.read_bytes() for file in (*ONCE, *SOURCES, *HEADERS))
    for part in (*sources, " ".join(FLAGS).encode(), repr(paths()).encode(), compiler.encode(), platform.platform().encode()):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:20]


def _compile(compiler: str, file: Path) -> str:
    """Compile beside the target and move it into place; returns why it failed, or nothing."""
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
            told = place / "sha256"
            told.write_text(hashlib.sha256(made.read_bytes()).hexdigest())
            os.replace(made, file)
            os.replace(told, _checksum(file))
        return reason


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} failed: {error}"
    return f"{command[0]} failed: {done.stderr.strip().splitlines()[-1:]}" if done.returncode else ""
