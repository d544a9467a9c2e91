"""The CUDA sources of packed products compiled as C++ for the CPU, for tests: the same code except for PTX instructions.

In: `few_rows.cu`, `experts.cu` and `dequantize.cu`. Out: `install`, after which few_rows.py launches the emulated kernels on CPU
tensors. `emulated.h` implements the threads of a GPU, its barriers and its tensor cores.
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
from onedraw.backends.torch.ops.cuda.packed import few_rows

_PROBE = "#include <ucontext.h>\nint main() { ucontext_t u; return getcontext(&u) + (int)(_Float16)0; }\n"


def _compiler() -> str | None:
    """A C++ compiler with _Float16 and ucontext."""
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
_KERNELS = {  # by source: kernels and their argument structures
    few_rows.FEW_ROWS_SOURCE: {"few_rows_product": "ProductArguments"},
    few_rows.EXPERTS_SOURCE: {"experts_product": "ExpertsArguments"},
    few_rows.DEQUANTIZE_SOURCE: {"dequantize": "DequantizeArguments", "dequantize_rows": "DequantizeRowsArguments"},
}
_LAUNCH = """
extern "C" int launch_{name}(const void *arguments, int grid_x, int grid_y, int threads) {{
    const {arguments} copy = *(const {arguments} *)arguments;
    body = [copy] {{ {name}(copy); }};
    gridDim = {{(unsigned)grid_x, (unsigned)grid_y}}, blockDim = {{(unsigned)threads, 1}};
    for (unsigned y = 0; y < gridDim.y; y++)
        for (unsigned x = 0; x < gridDim.x; x++) {{
            memset(rows, 0xFF, sizeof rows);  // uninitialized shared memory is NaN
            blockIdx = {{x, y}};
            run_block(threads);
        }}
    return 0;
}}
"""


def source(name: str) -> str:
    """A CUDA source as C++: `emulated.h` replaces the section of PTX instructions."""
    text = read_source(name)
    (before, rest), unit = text.split(_LINE + "PTX instructions"), _LINE + "a unit in the registers of a warp"
    after = unit + rest.split(unit)[1]
    after = re.sub(r"asm volatile\(.*?\);", ";", after).replace("extern __shared__", "extern")
    launches = "".join(_LAUNCH.format(name=kernel, arguments=arguments) for kernel, arguments in _KERNELS[name].items())
    return f'{before}#include "{HEADER}"\n{after}\n{launches}'


@cache
def compiled(name: str, defines: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    assert COMPILER is not None
    folder = Path(tempfile.mkdtemp(prefix="emulated-"))
    (folder / "source.cpp").write_text(source(name))
    options = [
        "-std=c++17",
        "-O1",
        "-ffp-contract=off",
        "-U_FORTIFY_SOURCE",  # it rejects longjmp between the stacks of fibers
        "-fPIC",
        "-shared",
        "-w",
        *(f"-D{key}={value}" for key, value in defines),
    ]
    result = subprocess.run(
        [COMPILER, *options, "source.cpp", "-o", "made.so"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[:2000]
    library = ctypes.CDLL(str(folder / "made.so"))
    shutil.rmtree(folder)
    return library


@dataclass(frozen=True, slots=True)
class EmulatedKernel:
    """A replacement for `nvrtc.Kernel`."""

    library: ctypes.CDLL
    name: str

    def launch(
        self, arguments: ctypes.Structure, *, grid: tuple[int, int], threads: int, shared: int = 0, pdl: bool = False
    ) -> None:
        assert shared <= 232448, "more shared memory than a GPU has"
        getattr(self.library, f"launch_{self.name}")(ctypes.byref(arguments), *grid, threads)


def _kernel(file: str, defines: dict[str, int], name: str) -> EmulatedKernel:
    return EmulatedKernel(compiled(file, tuple(sorted(defines.items()))), name)


def install(patch: pytest.MonkeyPatch) -> None:
    """Run the kernels of packed weights on the CPU."""

    def few_rows_kernel(kind: str, device: Any, tiles: int, whole_k: bool) -> EmulatedKernel:
        return _kernel(few_rows.FEW_ROWS_SOURCE, few_rows.few_rows_defines(kind, tiles, whole_k), "few_rows_product")

    def experts_kernel(kind: str, device: Any, tiles: int) -> EmulatedKernel:
        return _kernel(few_rows.EXPERTS_SOURCE, few_rows.experts_defines(kind, tiles), "experts_product")

    def dequantize_kernel(kind: str, device: Any, name: str) -> EmulatedKernel:
        return _kernel(few_rows.DEQUANTIZE_SOURCE, {"KIND": few_rows.kind_number(kind)}, name)

    patch.setattr(few_rows, "_few_rows_kernel", few_rows_kernel)
    patch.setattr(few_rows, "_experts_kernel", experts_kernel)
    patch.setattr(few_rows, "_dequantize_kernel", dequantize_kernel)
    patch.setattr(few_rows, "_multiprocessors", lambda device: MULTIPROCESSORS)
