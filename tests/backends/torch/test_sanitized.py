"""The kernels under AddressSanitizer, UBSan and ThreadSanitizer: sanitized.c calls each on memory of exactly its size."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from onedraw.backends.torch.ops.cpu import library as builder
from onedraw.backends.torch.ops.cpu.library import supported_instruction_sets
from onedraw.settings import default_cache_dir

LIBRARY = builder.build(default_cache_dir()).library
if LIBRARY is None:
    pytest.skip("no C compiler", allow_module_level=True)
BEST, *OTHERS = supported_instruction_sets(LIBRARY)
PROGRAM = Path(__file__).with_name("sanitized.c")
MEMORY = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
THREADS = ("-fsanitize=thread",)


def program(folder: Path, path: str, sanitizers: tuple[str, ...]) -> Path:
    """Build the test program and the kernels of one instruction set with these sanitizers; skip if the compiler has none."""
    compiler = builder.find_compiler()
    assert compiler is not None
    common = [
        compiler,
        "-g",
        "-O1",
        "-pthread",
        "-Wno-psabi",
        *sanitizers,
        *builder.INSTRUCTION_SETS[path],
        f"-DONEDRAW_ISA={path}",
    ]
    probe = subprocess.run([*common, "-x", "c", "-", "-o", str(folder / "probe")], input="int main(void){return 0;}", text=True)
    if probe.returncode or subprocess.run([folder / "probe"]).returncode:
        pytest.skip(f"{compiler} has no {sanitizers[0]} here")
    sources = [PROGRAM, *builder.ONCE, *builder.SOURCES]
    commands = [[*common, f"-I{builder.FOLDER}", "-c", str(file), "-o", str(folder / f"{file.stem}.o")] for file in sources]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(lambda command: subprocess.run(command, check=True, timeout=300), commands))
    made = folder / "sanitized"
    objects = [str(folder / f"{file.stem}.o") for file in sources]
    subprocess.run([*common, *objects, "-lm", "-o", str(made)], check=True)
    return made


def check(made: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([made, *arguments], capture_output=True, text=True, timeout=300)


def test_no_kernel_has_an_out_of_bounds_access_or_undefined_behaviour(tmp_path: Path) -> None:
    made = program(tmp_path, BEST, MEMORY)
    done = check(made)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]
    fault = check(made, "fault")  # one value past the end of a row
    assert fault.returncode != 0
    assert "heap-buffer-overflow" in fault.stderr


@pytest.mark.long
@pytest.mark.parametrize("path", OTHERS)
def test_no_kernel_of_other_instruction_sets_has_one_either(path: str, tmp_path: Path) -> None:
    done = check(program(tmp_path, path, MEMORY))
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]


@pytest.mark.long
def test_the_kernels_have_no_data_race(tmp_path: Path) -> None:
    done = check(program(tmp_path, "portable", THREADS))
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]
