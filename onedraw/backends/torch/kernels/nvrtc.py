"""CUDA sources of this package → kernels on a device: compiled at run time by NVRTC, which comes with every torch for CUDA.

In: a source file, its definitions, a device. Out: a `Kernel`, which launches on torch's current stream, so graphs record it. What
was compiled is kept in the cache folder, under a hash of the source, the options and the compiler; `keep_in` says where.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from onedraw.errors import BadSetting

FOLDER = Path(__file__).parent
OLDEST = (8, 0)  # the first that has what the sources use
_OPTIONS = ("--std=c++17", "--fmad=false")  # a product and a sum are one rounding where the sources say so
_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_MOST_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_ALWAYS_SHARED = 48 << 10  # bytes that a block may have without asking
_kept: list[Path] = []


def keep_in(cache: Path) -> None:
    """Compiled kernels lie in this cache folder from now on."""
    _kept[:] = [cache / "kernels"]


# ------------------------------------------------------------------ compiling


@lru_cache(maxsize=1)
def compiler() -> ctypes.CDLL | None:
    """NVRTC's library, where there is one: torch's own, a package's, or the system's."""
    names = [str(file) for folder in _folders() for file in sorted(folder.glob("libnvrtc.so*"), reverse=True)]
    for name in (*names, "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _folders() -> list[Path]:
    places = [Path(place) for place in sys.path if place]
    packages = [folder for place in places for folder in sorted((place / "nvidia").glob("*/lib"))]
    return [*packages, Path(torch.__file__).parent / "lib", Path("/usr/local/cuda/lib64")]


def version() -> str:
    library = compiler()
    if library is None:
        return ""
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def compile_source(name: str, architecture: str, defines: Mapping[str, int]) -> bytes:
    """The machine code of a source for an architecture (like sm_90), from the cache folder where it lies there already."""
    library = compiler()
    if library is None:
        raise BadSetting(
            "products of packed weights on a GPU need NVRTC, which comes with torch for CUDA, and no libnvrtc was found; "
            "pip install nvidia-cuda-nvrtc, or use --dtype bf16"
        )
    source = (FOLDER / name).read_bytes()
    options = [f"--gpu-architecture={architecture}", *_OPTIONS, *(f"-D{key}={value}" for key, value in sorted(defines.items()))]
    digest = hashlib.sha256(source + "\0".join([version(), *options]).encode()).hexdigest()[:20]
    files = [folder / f"{Path(name).stem}-{digest}.cubin" for folder in _kept]
    for file in files:
        if file.exists():
            return file.read_bytes()
    code = _compile(library, source, name, options)
    for file in files:
        _keep(file, code)
    return code


def _compile(library: ctypes.CDLL, source: bytes, name: str, options: Sequence[str]) -> bytes:
    program = ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), source, name.encode(), 0, None, None)
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    try:
        failed = library.nvrtcCompileProgram(program, len(options), given)
        if failed:
            lines = _bytes_of(library, "ProgramLog", program).decode(errors="replace").strip().splitlines()
            raise BadSetting(
                f"NVRTC {version()} does not compile {name} with {' '.join(options)}: {' '.join(lines[:3])}; "
                "an NVRTC of CUDA 12 or newer is needed, or --dtype bf16"
            )
        return _bytes_of(library, "CUBIN", program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _bytes_of(library: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    room = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{what}")(program, room)
    return room.raw[: size.value]


def _keep(file: Path, code: bytes) -> None:
    """Beside the target, then moved into place. A folder that cannot be written costs time at the next start, no more."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(handle, "wb") as opened:
            opened.write(code)
        os.replace(beside, file)
    except OSError:
        return


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
        raise BadSetting(f"the NVIDIA driver does not load: {error}; use --device cpu") from None


def checked(code: int, what: str) -> None:
    if code:
        said = ctypes.c_char_p()
        driver().cuGetErrorString(code, ctypes.byref(said))
        raise RuntimeError(f"{what}: {(said.value or b'error').decode()} ({code})")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function on a device. What it is given comes as one structure."""

    name: str
    handle: ctypes.c_void_p

    def launch(self, given: ctypes.Structure, *, grid: tuple[int, int], threads: int, shared: int = 0, pdl: bool = False) -> None:
        """On torch's current stream. `pdl`: the kernel may start before the one ahead of it is done, and waits by itself."""
        stream = torch.cuda.current_stream().cuda_stream
        attribute = _Attribute(id=_SERIALIZATION, value=1)
        config = _Config(*grid, 1, threads, 1, 1, shared, stream, ctypes.pointer(attribute), int(pdl))
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(given))
        checked(driver().cuLaunchKernelEx(ctypes.byref(config), self.handle, parameters, None), f"launching {self.name}")


class Module:
    """A compiled source on one device."""

    def __init__(self, source: str, device: torch.device, defines: Mapping[str, int], *, own: bool = False) -> None:
        """`own`: with instructions that this very architecture has and later ones may not."""
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST:
            name = f"{torch.cuda.get_device_name(device)} (sm_{capability[0]}{capability[1]})"
            raise BadSetting(f"{name}: products of packed weights need sm_80 or newer; use --dtype f16")
        self._source, self._device = source, device
        code = compile_source(source, f"sm_{capability[0]}{capability[1]}{'a' if own else ''}", defines)
        self._handle = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # torch's context is the current one from here on
            checked(driver().cuModuleLoadData(ctypes.byref(self._handle), code), f"loading {source}")

    def kernel(self, name: str, shared: int = 0) -> Kernel:
        """`shared`: bytes of shared memory that a launch will ask for, at most."""
        handle = ctypes.c_void_p()
        checked(driver().cuModuleGetFunction(ctypes.byref(handle), self._handle, name.encode()), f"{self._source}: {name}")
        if shared > _ALWAYS_SHARED:
            checked(driver().cuFuncSetAttribute(handle, _MOST_SHARED, shared), f"{shared} bytes of shared memory for {name}")
        return Kernel(name, handle)
