"""CUDA sources of this package → kernels on a device: compiled at run time by NVRTC, which comes with every torch for CUDA.

In: a source file, its definitions, a device. Out: a `Kernel`, which launches on torch's current stream, so graphs record it. What
was compiled is kept in the cache folder, under a hash of the source, the options and the compiler; `keep_in` says where. What is
damaged there, by its checksum or because the driver does not load it, is compiled anew. The library is one of the CUDA that
torch is made for: what another makes, the driver beside this torch may not load.
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
OLDEST = (8, 0)  # the first that has what the sources use
SYSTEMS = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")  # what the system's loader may know
_OPTIONS = ("--std=c++17", "--fmad=false")  # a product and a sum are one rounding where the sources say so
_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_MOST_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_ALWAYS_SHARED = 48 << 10  # bytes that a block may have without asking
_CHECKSUM = 32  # bytes behind what is kept
_INCLUDE = re.compile(r'#include "([a-z_]+\.cuh)"')
_kept: list[Path] = []
_compiled: dict[str, bytes] = {}  # by hash: what this process compiled


def keep_in(cache: Path) -> None:
    """Compiled kernels lie in this cache folder from now on."""
    _kept[:] = [cache / "kernels"]


# ------------------------------------------------------------------ compiling


@dataclass(frozen=True, slots=True)
class Compiler:
    library: ctypes.CDLL
    version: str  # like 13.0


@lru_cache(maxsize=1)
def compiler() -> Compiler | None:
    """NVRTC, where there is one that fits this torch: torch's own, a package's, or the system's."""
    return _fitting(_found(), torch.version.cuda)


def _fitting(found: Iterator[Compiler], cuda: str | None) -> Compiler | None:
    """The first of this very version, or else the first of its major version; any where torch is made for no CUDA."""
    second = None
    for one in found:
        if cuda is None or one.version == cuda:
            return one
        if one.version.partition(".")[0] == cuda.partition(".")[0]:
            second = second or one
    return second


def _found() -> Iterator[Compiler]:
    names = [str(file) for folder in _folders() for file in sorted(folder.glob("libnvrtc.so*"), reverse=True)]
    for name in (*names, *SYSTEMS):
        try:
            library = ctypes.CDLL(name)
            major, minor = ctypes.c_int(), ctypes.c_int()
            library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        except (OSError, AttributeError):  # not there, or something else by this name
            continue
        yield Compiler(library, f"{major.value}.{minor.value}")


def _folders() -> list[Path]:
    places = [Path(place) for place in sys.path if place]
    packages = [folder for place in places for folder in sorted((place / "nvidia").glob("*/lib"))]
    return [*packages, Path(torch.__file__).parent / "lib", Path("/usr/local/cuda/lib64")]


def version() -> str:
    found = compiler()
    return "" if found is None else found.version


def why_not() -> str:
    """Why nothing can be compiled here; nothing where it can."""
    if compiler() is not None:
        return ""
    others = ", ".join(dict.fromkeys(one.version for one in _found()))
    there = f"torch is made for CUDA {torch.version.cuda} and NVRTC here is {others}" if others else "no libnvrtc was found"
    major = (torch.version.cuda or "").partition(".")[0]
    package = {"": "nvidia-cuda-nvrtc", "12": "nvidia-cuda-nvrtc-cu12"}.get(major, f"nvidia-cuda-nvrtc=={major}.*")
    return f"{there}; pip install {package}"


def read_source(name: str) -> str:
    """A source with what it includes in its place."""
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines(keepends=True)
    included = (_INCLUDE.fullmatch(line.strip()) for line in lines)
    return "".join(line if found is None else read_source(found[1]) for line, found in zip(lines, included))


def compile_source(name: str, architecture: str, defines: Mapping[str, int], *, anew: bool = False) -> bytes:
    """The machine code of a source for an architecture (like sm_90), from the cache folder where it lies there already and is
    not to be made `anew`."""
    found = compiler()
    if found is None:
        raise BadSetting(f"products of packed weights cannot be compiled: {why_not()}, or use --dtype bf16")
    source = read_source(name).encode()
    options = [f"--gpu-architecture={architecture}", *_OPTIONS, *(f"-D{key}={value}" for key, value in sorted(defines.items()))]
    digest = hashlib.sha256(source + "\0".join(["checksummed", found.version, *options]).encode()).hexdigest()[:20]
    if digest in _compiled and not anew:
        return _compiled[digest]
    files = [folder / f"{Path(name).stem}-{digest}.cubin" for folder in _kept]
    for file in files if not anew else ():
        code = _read(file)
        if code is not None:
            return code
    code = _compiled[digest] = _compile(found.library, source, name, options)
    for file in files:
        _keep(file, code)
    return code


def _read(file: Path) -> bytes | None:
    """What is kept there; nothing where it is not there or damaged, which is said."""
    try:
        kept = file.read_bytes()
    except OSError:
        return None
    code, checksum = kept[:-_CHECKSUM], kept[-_CHECKSUM:]
    if hashlib.sha256(code).digest() == checksum:
        return code
    log.warning("%s is damaged, and is compiled anew", file)
    return None


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
                "a newer NVRTC is needed, or --dtype bf16"
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
    """With its checksum, beside the target, then moved into place. A folder that cannot be written costs time at the next start,
    no more."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=file.parent)
    except OSError:
        return
    try:
        with os.fdopen(handle, "wb") as opened:
            opened.write(code + hashlib.sha256(code).digest())
        os.replace(beside, file)
    except OSError:
        Path(beside).unlink(missing_ok=True)


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


def compile_for(source: str, device: torch.device, defines: Mapping[str, int], *, own: bool = False, anew: bool = False) -> bytes:
    """The machine code of a source for a device; several may be compiled at once."""
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        name = f"{torch.cuda.get_device_name(device)} (sm_{capability[0]}{capability[1]})"
        raise BadSetting(f"{name}: products of packed weights need sm_80 or newer; use --dtype f16")
    return compile_source(source, architecture_for(*capability, own=own), defines, anew=anew)


def architecture_for(major: int, minor: int, *, own: bool = False) -> str:
    """What to compile for: the card's own architecture, or the newest of its generation that this NVRTC knows, whose machine code
    the card runs as well."""
    exact = 10 * major + minor
    known = [number for number in _architectures() if number // 10 == major and number <= exact]
    return f"sm_{exact if own or not known else max(known)}{'a' if own else ''}"


def _architectures() -> list[int]:
    found = compiler()
    count = ctypes.c_int()
    if found is None or found.library.nvrtcGetNumSupportedArchs(ctypes.byref(count)):
        return []
    numbers = (ctypes.c_int * count.value)()
    return [] if found.library.nvrtcGetSupportedArchs(numbers) else list(numbers)


class Module:
    """A compiled source on one device."""

    def __init__(self, source: str, device: torch.device, defines: Mapping[str, int], *, own: bool = False) -> None:
        """`own`: with instructions that this very architecture has and later ones may not."""
        self._source, self._device = source, device
        code = compile_for(source, device, defines, own=own)
        self._handle = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # torch's context is the current one from here on
            if not driver().cuModuleLoadData(ctypes.byref(self._handle), code):
                return
            log.warning("%s as it was compiled before does not load on %s, and is compiled anew", source, device)
            code = compile_for(source, device, defines, own=own, anew=True)
            checked(driver().cuModuleLoadData(ctypes.byref(self._handle), code), f"loading {source}")

    def kernel(self, name: str, shared: int = 0) -> Kernel:
        """`shared`: bytes of shared memory that a launch will ask for, at most."""
        handle = ctypes.c_void_p()
        checked(driver().cuModuleGetFunction(ctypes.byref(handle), self._handle, name.encode()), f"{self._source}: {name}")
        if shared > _ALWAYS_SHARED:
            checked(driver().cuFuncSetAttribute(handle, _MOST_SHARED, shared), f"{shared} bytes of shared memory for {name}")
        return Kernel(name, handle)
