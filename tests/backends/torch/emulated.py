"""The CUDA source of packed products on a CPU, for tests: the same code but for its single instructions, block by block.

In: `few_rows.cu` and its siblings. Out: `install`, after which `packed_rows.py` launches kernels that a C++ compiler made of
them, on tensors of the CPU. `emulated.h` says what stands for a GPU's threads and for its matrix unit.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from onedraw.backends.torch.ops.cuda.nvrtc import read_source
from onedraw.backends.torch.ops.cuda.packed import few_rows as packed_rows

_PROBE = "#include <ucontext.h>\nint main() { ucontext_t u; return getcontext(&u) + (int)(_Float16)0; }\n"


def _compiler() -> str | None:
    """One that knows half numbers and fibers."""
    for name in ("g++", "clang++"):
        found = shutil.which(name)
        if found is not None:
            with tempfile.TemporaryDirectory() as folder:
                probe = Path(folder) / "probe.cpp"
                probe.write_text(_PROBE)
                given = [found, "-std=c++17", str(probe), "-o", f"{folder}/probe"]
                if not subprocess.run(given, capture_output=True, check=False).returncode:
                    return found
    return None


COMPILER = _compiler()
MULTIPROCESSORS = 3
HEADER = Path(__file__).with_name("emulated.h")
_LINE = "// ------------------------------------------------------------------ "
_CALLED = {"rows_product": "Product", "grouped_product": "Grouped", "opened": "Opened", "looked_up": "Looked"}
_LAUNCH = """
extern "C" int launch_{name}(const void *given, int across, int down, int threads) {{
    const {kind} own = *(const {kind} *)given;
    body = [own] {{ {name}(own); }};
    gridDim = {{(unsigned)across, (unsigned)down}}, blockDim = {{(unsigned)threads, 1}};
    for (unsigned y = 0; y < gridDim.y; y++)
        for (unsigned x = 0; x < gridDim.x; x++) {{
            memset(rows, 0xFF, sizeof rows);  // what nobody wrote is no number
            blockIdx = {{x, y}};
            run_block(threads);
        }}
    return 0;
}}
"""


def source(name: str, names: tuple[str, ...]) -> str:
    """A CUDA source as C++."""
    text = read_source(name)
    (before, rest), unit = text.split(_LINE + "single instructions"), _LINE + "one unit in the registers of a warp"
    after = unit + rest.split(unit)[1]
    after = re.sub(r"asm volatile\(.*?\);", ";", after).replace("extern __shared__", "extern")
    launches = "".join(_LAUNCH.format(name=name, kind=_CALLED[name]) for name in names)
    return f'{before}#include "{HEADER}"\n{after}\n{launches}'


@cache
def compiled(name: str, defines: tuple[tuple[str, int], ...], names: tuple[str, ...]) -> ctypes.CDLL:
    assert COMPILER is not None
    folder = Path(tempfile.mkdtemp(prefix="emulated-"))
    (folder / "source.cpp").write_text(source(name, names))
    options = [
        "-std=c++17",
        "-O1",
        "-ffp-contract=off",
        "-U_FORTIFY_SOURCE",  # fibers jump between stacks, which it takes for an error
        "-fPIC",
        "-shared",
        "-w",
        *(f"-D{key}={value}" for key, value in defines),
    ]
    made = subprocess.run(
        [COMPILER, *options, "source.cpp", "-o", "made.so"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr[:2000]
    library = ctypes.CDLL(str(folder / "made.so"))
    shutil.rmtree(folder)
    return library


@dataclass(frozen=True, slots=True)
class EmulatedKernel:
    """Stands for `nvrtc.Kernel`."""

    library: ctypes.CDLL
    name: str

    def launch(self, given: ctypes.Structure, *, grid: tuple[int, int], threads: int, shared: int = 0, pdl: bool = False) -> None:
        assert shared <= 232448, "more shared memory than any block has"
        getattr(self.library, f"launch_{self.name}")(ctypes.byref(given), *grid, threads)


def _kernel(file: str, defines: dict[str, int], names: tuple[str, ...], name: str) -> EmulatedKernel:
    return EmulatedKernel(compiled(file, tuple(sorted(defines.items())), names), name)


def install(patch: pytest.MonkeyPatch) -> None:
    """Products of packed weights run here from now on."""

    def product(kind: str, device: Any, tiles: int, inside: bool) -> EmulatedKernel:
        return _kernel(packed_rows.PRODUCT, packed_rows._defines(kind, tiles, inside), ("rows_product",), "rows_product")

    def group(kind: str, device: Any, tiles: int) -> EmulatedKernel:
        return _kernel(packed_rows.EXPERTS, packed_rows._group_defines(kind, tiles), ("grouped_product",), "grouped_product")

    def rest(kind: str, device: Any, name: str) -> EmulatedKernel:
        return _kernel(packed_rows.OPENED, {"KIND": packed_rows._number(kind)}, ("opened", "looked_up"), name)

    patch.setattr(packed_rows, "_product", product)
    patch.setattr(packed_rows, "_group", group)
    patch.setattr(packed_rows, "_kernel", rest)
    patch.setattr(packed_rows, "_multiprocessors", lambda device: MULTIPROCESSORS)
