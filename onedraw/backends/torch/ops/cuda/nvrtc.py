"""Compiles the CUDA sources of this package at run time with NVRTC, which every torch for CUDA installs.

In: a source file, its macros, a device. Out: a `Kernel`, which launches on torch's current stream, so CUDA graphs capture it.
Machine code is cached in the folder given to `cache_in`, in files named by a hash of source, options and compiler version. A
cached file with a wrong checksum, or that the driver does not load, is compiled again. NVRTC must have the major CUDA version
that torch was built for, because the driver may not load the code of another one; the exact version is preferred.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from onedraw.errors import BadSetting

log = logging.getLogger("onedraw")
FOLDER = Path(__file__).parent / "packed"
MIN_CAPABILITY = (8, 0)  # compute capability: the sources use mma.m16n8k16 and cp.async
SYSTEM_LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")  # file names that the system's loader looks for
_OPTIONS = ("--std=c++17", "--fmad=false")  # products and sums are fused only where the sources call fma
_SERIALIZATION = 6  # the driver's constant CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_MAX_DYNAMIC_SHARED = 8  # the driver's constant CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_DEFAULT_SHARED = 48 << 10  # bytes of dynamic shared memory that a block may have without _MAX_DYNAMIC_SHARED
_CHECKSUM = 32  # bytes of SHA-256 at the end of a cached file
_INCLUDE = re.compile(r'#include "([a-z_]+\.cuh)"')
_cache_folders: list[Path] = []
_compiled: dict[str, bytes] = {}  # machine code that this process compiled, by hash


def cache_in(cache: Path) -> None:
    """Cache compiled kernels in this folder."""
    _cache_folders[:] = [cache / "kernels"]


# ------------------------------------------------------------------ compiling


@dataclass(frozen=True, slots=True)
class Compiler:
    library: ctypes.CDLL
    version: str  # its CUDA version, such as "13.0"


@lru_cache(maxsize=1)
def compiler() -> Compiler | None:
    """The NVRTC library for this torch, from a Python package, torch or the system; None if none has a fitting version."""
    return _matching(_installed(), torch.version.cuda)


def _matching(installed: Iterator[Compiler], cuda: str | None) -> Compiler | None:
    """The first compiler of exactly this CUDA version, or else the first of the same major version; any if torch is built without
    CUDA."""
    same_major = None
    for candidate in installed:
        if cuda is None or candidate.version == cuda:
            return candidate
        if candidate.version.partition(".")[0] == cuda.partition(".")[0]:
            same_major = same_major or candidate
    return same_major


def _installed() -> Iterator[Compiler]:
    names = [str(file) for folder in _folders() for file in sorted(folder.glob("libnvrtc.so*"), reverse=True)]
    for name in (*names, *SYSTEM_LIBRARIES):
        try:
            # NVRTC 13.0 does not look for its builtins beside itself; once they are loaded, it finds them by name.
            for builtins in Path(name).parent.glob("libnvrtc-builtins.so*") if os.path.isabs(name) else ():
                ctypes.CDLL(str(builtins))
            library = ctypes.CDLL(name)
            major, minor = ctypes.c_int(), ctypes.c_int()
            library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        except (OSError, AttributeError):  # The file does not exist, or is not NVRTC.
            continue
        yield Compiler(library, f"{major.value}.{minor.value}")


def _folders() -> list[Path]:
    paths = [Path(path) for path in sys.path if path]
    packages = [folder for path in paths for folder in sorted((path / "nvidia").glob("*/lib"))]
    return [*packages, Path(torch.__file__).parent / "lib", Path("/usr/local/cuda/lib64")]


def version() -> str:
    nvrtc = compiler()
    return "" if nvrtc is None else nvrtc.version


def why_not() -> str:
    """Why the CUDA sources cannot be compiled, and what to install; empty if they can be."""
    if compiler() is not None:
        return ""
    others = ", ".join(dict.fromkeys(installed.version for installed in _installed()))
    reason = f"torch is built for CUDA {torch.version.cuda}, the installed NVRTC is {others}" if others else "libnvrtc not found"
    major = (torch.version.cuda or "").partition(".")[0]
    package = {"": "nvidia-cuda-nvrtc", "12": "nvidia-cuda-nvrtc-cu12"}.get(major, f"nvidia-cuda-nvrtc=={major}.*")
    return f"{reason}; pip install {package}"


def read_source(name: str) -> str:
    """The text of a source file, with its includes expanded."""
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines(keepends=True)
    included = (_INCLUDE.fullmatch(line.strip()) for line in lines)
    return "".join(line if found is None else read_source(found[1]) for line, found in zip(lines, included))


def compile_source(name: str, architecture: str, defines: Mapping[str, int], *, again: bool = False) -> bytes:
    """The machine code of a source for an architecture (such as sm_90). `again`: compile anew, even if this process or
    the cache folder has it."""
    nvrtc = compiler()
    if nvrtc is None:
        raise BadSetting(f"kernels for packed weights cannot be compiled: {why_not()}, or use --dtype bf16")
    source = read_source(name).encode()
    options = [f"--gpu-architecture={architecture}", *_OPTIONS, *(f"-D{key}={value}" for key, value in sorted(defines.items()))]
    digest = hashlib.sha256(source + "\0".join(["checksummed", nvrtc.version, *options]).encode()).hexdigest()[:20]
    if digest in _compiled and not again:
        return _compiled[digest]
    files = [folder / f"{Path(name).stem}-{digest}.cubin" for folder in _cache_folders]
    for file in files if not again else ():
        code = _read(file)
        if code is not None:
            return code
    code = _compiled[digest] = _compile(nvrtc.library, source, name, options)
    for file in files:
        _write(file, code)
    return code


def _read(file: Path) -> bytes | None:
    """The cached code; None if the file is missing, or damaged, in which case a warning is logged."""
    try:
        cached = file.read_bytes()
    except OSError:
        return None
    code, checksum = cached[:-_CHECKSUM], cached[-_CHECKSUM:]
    if hashlib.sha256(code).digest() == checksum:
        return code
    log.warning("%s is damaged; compiling it again", file)
    return None


def _compile(library: ctypes.CDLL, source: bytes, name: str, options: Sequence[str]) -> bytes:
    program = ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), source, name.encode(), 0, None, None)
    encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    try:
        failed = library.nvrtcCompileProgram(program, len(options), encoded)
        if failed:
            lines = _bytes_of(library, "ProgramLog", program).decode(errors="replace").strip().splitlines()
            raise BadSetting(
                f"NVRTC {version()} does not compile {name} with {' '.join(options)}: {' '.join(lines[:3])}; "
                "install a newer NVRTC, or use --dtype bf16"
            )
        return _bytes_of(library, "CUBIN", program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _bytes_of(library: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw[: size.value]


def _write(file: Path, code: bytes) -> None:
    """Write code and checksum to a temporary file and rename it. Failure is ignored, because the next start can compile again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent)
    except OSError:
        return
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(code + hashlib.sha256(code).digest())
        os.replace(temporary, file)
    except OSError:
        Path(temporary).unlink(missing_ok=True)


# ------------------------------------------------------------------ launching


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@lru_cache(maxsize=1)
def driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BadSetting(f"the NVIDIA driver cannot be loaded: {error}; use --device cpu") from None


def checked(code: int, what: str) -> None:
    if code:
        message = ctypes.c_char_p()
        driver().cuGetErrorString(code, ctypes.byref(message))
        raise RuntimeError(f"{what}: {(message.value or b'error').decode()} ({code})")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel on one device; all its arguments are the members of one structure."""

    name: str
    handle: ctypes.c_void_p

    def launch(
        self, arguments: ctypes.Structure, *, grid: tuple[int, int], threads: int, shared: int = 0, pdl: bool = False
    ) -> None:
        """Launch on torch's current stream. `pdl`: use programmatic dependent launch; then the kernel may start before its
        predecessor has finished, and must itself wait for it."""
        stream = torch.cuda.current_stream().cuda_stream
        attribute = _Attribute(id=_SERIALIZATION, value=1)
        config = _Config(*grid, 1, threads, 1, 1, shared, stream, ctypes.pointer(attribute), int(pdl))
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        checked(driver().cuLaunchKernelEx(ctypes.byref(config), self.handle, parameters, None), f"launching {self.name}")


def compile_for(
    source: str, device: torch.device, defines: Mapping[str, int], *, arch_specific: bool = False, again: bool = False
) -> bytes:
    """The machine code of a source for a device; thread-safe."""
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        name = f"{torch.cuda.get_device_name(device)} (sm_{capability[0]}{capability[1]})"
        raise BadSetting(f"{name}: kernels for packed weights need sm_80 or newer; use --dtype f16")
    return compile_source(source, architecture_for(*capability, arch_specific=arch_specific), defines, again=again)


def architecture_for(major: int, minor: int, *, arch_specific: bool = False) -> str:
    """The architecture to compile for: the GPU's own, or the newest of the same major version that this NVRTC supports, whose
    code also runs on the GPU. `arch_specific`: the GPU's own, with architecture-specific instructions (such as sm_90a)."""
    exact = 10 * major + minor
    known = [number for number in _architectures() if number // 10 == major and number <= exact]
    return f"sm_{exact if arch_specific or not known else max(known)}{'a' if arch_specific else ''}"


def _architectures() -> list[int]:
    nvrtc = compiler()
    count = ctypes.c_int()
    if nvrtc is None or nvrtc.library.nvrtcGetNumSupportedArchs(ctypes.byref(count)):
        return []
    numbers = (ctypes.c_int * count.value)()
    return [] if nvrtc.library.nvrtcGetSupportedArchs(numbers) else list(numbers)


class Module:
    """A compiled source, loaded on one device."""

    def __init__(self, source: str, device: torch.device, defines: Mapping[str, int], *, arch_specific: bool = False) -> None:
        """Compile and load a source. `arch_specific`: see `architecture_for`."""
        self._source, self._device = source, device
        code = compile_for(source, device, defines, arch_specific=arch_specific)
        self._handle = ctypes.c_void_p()
        with torch.cuda.device(device):
            # Torch creates its CUDA context lazily; synchronizing makes sure that it exists and is current for the driver calls.
            torch.cuda.current_stream().synchronize()
            if not driver().cuModuleLoadData(ctypes.byref(self._handle), code):
                return
            log.warning("the cached code of %s does not load on %s; compiling it again", source, device)
            code = compile_for(source, device, defines, arch_specific=arch_specific, again=True)
            checked(driver().cuModuleLoadData(ctypes.byref(self._handle), code), f"loading {source}")

    def kernel(self, name: str, shared: int = 0) -> Kernel:
        """The kernel of this name. `shared`: maximum bytes of dynamic shared memory of a launch."""
        handle = ctypes.c_void_p()
        checked(driver().cuModuleGetFunction(ctypes.byref(handle), self._handle, name.encode()), f"{self._source}: {name}")
        if shared > _DEFAULT_SHARED:
            checked(
                driver().cuFuncSetAttribute(handle, _MAX_DYNAMIC_SHARED, shared), f"{shared} bytes of shared memory for {name}"
            )
        return Kernel(name, handle)
