"""cpu.c and delta.c → a library in memory: compiled once per machine with the C compiler that is there, kept in the cache folder.

In: a cache folder. Out: a loaded library, or None and the reason where there is no compiler. The file's name holds a hash
of the source, the flags and the processor, so neither an update nor a shared home folder ever loads a wrong one.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = (FOLDER / "cpu.c", FOLDER / "delta.c")
HEADERS = (FOLDER / "vectors.h",)
FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")


@dataclass(frozen=True, slots=True)
class Built:
    library: ctypes.CDLL | None
    reason: str = ""  # why there is none


def build(cache: Path) -> Built:
    """Load the kernels, compiling them first where this machine has not done so yet."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        return Built(None, "no C compiler (cc, gcc or clang) is installed")
    file = cache / "kernels" / f"cpu-{_key(compiler)}.so"
    if not file.exists():
        reason = _compile(compiler, file)
        if reason:
            return Built(None, reason)
    try:
        return Built(ctypes.CDLL(str(file)))
    except OSError as error:
        return Built(None, f"{file.name} does not load: {error}")


def _key(compiler: str) -> str:
    digest = hashlib.sha256()
    for part in (
        *(file.read_bytes() for file in (*SOURCES, *HEADERS)),
        " ".join(FLAGS).encode(),
        compiler.encode(),
        _processor().encode(),
    ):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:20]


def _processor() -> str:
    """What -march=native follows: model and feature flags."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.platform() + platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}))


def _compile(compiler: str, file: Path) -> str:
    """Compile beside the target and move it into place; returns why it failed, or nothing."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(suffix=".so", dir=file.parent)
        os.close(handle)
    except OSError as error:
        return f"the cache folder cannot be written: {error}"
    try:
        done = subprocess.run(
            [compiler, *FLAGS, "-o", name, *map(str, SOURCES), "-lm"], capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode:
            return f"{compiler} failed: {done.stderr.strip().splitlines()[-1:]}"
        os.replace(name, file)
        return ""
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler} failed: {error}"
    finally:
        Path(name).unlink(missing_ok=True)
