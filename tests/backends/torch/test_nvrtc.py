"""CUDA sources compile without a GPU for every architecture they support, and errors name what does not compile."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton

from onedraw.backends.packing import SPAN_BYTES
from onedraw.backends.torch.ops.cuda import nvrtc
from onedraw.backends.torch.ops.cuda.packed.few_rows import DEQUANTIZE_SOURCE, EXPERTS_SOURCE, FEW_ROWS_SOURCE, experts_defines
from onedraw.backends.torch.ops.cuda.packed.work_split import split_work
from onedraw.checkpoints.dequantize import QUANT_TYPES
from onedraw.errors import BadSetting

needs_compiler = pytest.mark.skipif(nvrtc.compiler() is None, reason="NVRTC is not installed")
ARCHITECTURES = ("sm_80", "sm_86", "sm_90")
SMALL_SHARED = 99 << 10  # of an sm_86


@needs_compiler
@pytest.mark.parametrize("kind", list(SPAN_BYTES))
def test_dequantization_compiles_for_every_architecture(kind: str) -> None:
    for architecture in ARCHITECTURES:
        assert nvrtc.compile_source(DEQUANTIZE_SOURCE, architecture, {"KIND": QUANT_TYPES[kind].ggml_type or 0})[:4] == b"\x7fELF"


@needs_compiler
@pytest.mark.parametrize(("kind", "architecture"), [("Q4_K", "sm_86"), ("Q4_1", "sm_90")])
def test_products_compile(kind: str, architecture: str) -> None:
    for rows, whole_k in ((1, True), (17, False)):
        share = split_work(rows, 64, 1, multiprocessors=128, shared=SMALL_SHARED, whole_k=whole_k)
        assert share.whole_k == whole_k
        code = nvrtc.compile_source(FEW_ROWS_SOURCE, architecture, {"KIND": QUANT_TYPES[kind].ggml_type or 0, **share.defines})
        assert b"few_rows_product" in code


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "tiles", "architecture"), [("Q4_K", 1, "sm_86"), ("Q6_K", 4, "sm_86"), ("Q5_1", 8, "sm_90"), ("NVFP4", 2, "sm_90")]
)
def test_products_of_experts_compile(kind: str, tiles: int, architecture: str) -> None:
    code = nvrtc.compile_source(EXPERTS_SOURCE, architecture, experts_defines(kind, tiles))
    assert b"experts_product" in code
    assert b"few_rows_product" not in code


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """An empty cache folder. A call returns the only file in it and clears the cache of the process."""
    monkeypatch.setattr(nvrtc, "_cache_folders", [])
    monkeypatch.setattr(nvrtc, "_compiled", {})
    nvrtc.cache_in(tmp_path)

    def found() -> Path:
        monkeypatch.setattr(nvrtc, "_compiled", {})
        (file,) = (tmp_path / "kernels").iterdir()
        return file

    return found


@needs_compiler
def test_compiled_code_is_cached_on_disk(kept: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    made = nvrtc.compile_source(DEQUANTIZE_SOURCE, "sm_90", {"KIND": 12})
    assert kept().read_bytes().startswith(made)
    compiled: list[str] = []
    monkeypatch.setattr(nvrtc, "_compile", lambda library, source, name, options: compiled.append(options[0]) or b"made")
    assert nvrtc.compile_source(DEQUANTIZE_SOURCE, "sm_90", {"KIND": 12}) == made
    assert compiled == []
    assert nvrtc.compile_source(DEQUANTIZE_SOURCE, "sm_86", {"KIND": 12}) == b"made"
    assert compiled == ["--gpu-architecture=sm_86"]


@needs_compiler
@pytest.mark.parametrize("damage", ["cut short", "torn", "empty", "gone in the middle"])
def test_a_damaged_cache_file_is_compiled_again(kept: Callable[[], Path], damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: a killed process or a full disk left a file that no later process could load."""
    caplog.set_level(logging.WARNING, logger="onedraw")  # a server of another test may have silenced the logger
    made = nvrtc.compile_source(DEQUANTIZE_SOURCE, "sm_90", {"KIND": 12})
    whole = kept().read_bytes()
    middle = len(whole) // 2
    kept().write_bytes(
        {
            "cut short": whole[:-1],
            "torn": whole[:middle] + bytes(len(whole) - middle),
            "empty": b"",
            "gone in the middle": whole[:middle] + whole[middle + 8 :],
        }[damage]
    )
    assert nvrtc.compile_source(DEQUANTIZE_SOURCE, "sm_90", {"KIND": 12}) == made
    assert "is damaged; compiling it again" in caplog.text
    assert kept().read_bytes() == whole


class _Driver:
    """A CUDA driver that loads only some code."""

    def __init__(self, loads: Callable[[bytes], bool]) -> None:
        self._loads, self.offered = loads, []

    def cuModuleLoadData(self, handle: object, code: bytes) -> int:
        self.offered.append(code)
        return 0 if self._loads(code) else 200

    def cuGetErrorString(self, code: int, message: object) -> int:
        return 0


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)


@needs_compiler
def test_code_that_the_driver_does_not_load_is_compiled_again_once(
    kept: Callable[[], Path], hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = nvrtc.compile_source(DEQUANTIZE_SOURCE, "sm_90", {"KIND": 12})
    bad = b"sound by its checksum, and still no kernel"
    kept().write_bytes(bad + hashlib.sha256(bad).digest())
    driver = _Driver(lambda code: code != bad)
    monkeypatch.setattr(nvrtc, "driver", lambda: driver)
    nvrtc.Module(DEQUANTIZE_SOURCE, torch.device("cuda:0"), {"KIND": 12})
    assert driver.offered == [bad, made]
    assert kept().read_bytes().startswith(made)
    driver = _Driver(lambda code: False)
    with pytest.raises(RuntimeError, match=r"loading dequantize.cu: .* \(200\)"):
        nvrtc.Module(DEQUANTIZE_SOURCE, torch.device("cuda:0"), {"KIND": 12})
    assert len(driver.offered) == 2


# ------------------------------------------------------------------ choice of the compiler


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None, list[str]], str]:
    """Return the library that is chosen for a torch of this CUDA version if these versions are installed, in this order."""
    cc = shutil.which("cc") or shutil.which("gcc")
    if cc is None:
        pytest.skip("needs a C compiler")

    def found(cuda: str | None, versions: list[str]) -> str:
        folders = []
        for version in versions:
            major, minor = version.split(".")
            folder = tmp_path / f"nvidia-{version}"
            if not folder.exists():
                folder.mkdir()
                body = f"int nvrtcVersion(int *a, int *b) {{ *a = {major}; *b = {minor}; return 0; }}"
                subprocess.run(
                    [cc, "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / f"libnvrtc.so.{major}")],
                    input=body.encode(),
                    check=True,
                )
            folders.append(folder)
        monkeypatch.setattr(nvrtc, "_folders", lambda: folders)
        monkeypatch.setattr(nvrtc, "SYSTEM_LIBRARIES", ())
        monkeypatch.setattr(torch.version, "cuda", cuda)
        nvrtc.compiler.cache_clear()
        return nvrtc.version()

    monkeypatch.setattr(nvrtc, "compiler", lru_cache(nvrtc.compiler.__wrapped__))
    return found


def test_the_compiler_has_the_cuda_version_of_torch(libraries: Callable[[str | None, list[str]], str]) -> None:
    """Regression: an older package was found before the one of CUDA 13, and its kernels did not load."""
    assert libraries("13.0", ["12.8", "13.0"]) == "13.0"
    assert libraries("12.6", ["13.4", "12.8"]) == "12.8"
    assert (
        libraries("13.0", ["12.8", "13.4", "13.0"]) == "13.0"
    )  # the exact version is preferred to another one of the same major version
    assert libraries(None, ["12.8", "13.0"]) == "12.8"


def test_if_no_compiler_fits_the_error_lists_those_that_exist(libraries: Callable[[str | None, list[str]], str]) -> None:
    assert libraries("13.0", ["12.8", "11.2"]) == ""
    assert (
        nvrtc.why_not() == "torch is built for CUDA 13.0, the installed NVRTC is 12.8, 11.2; pip install nvidia-cuda-nvrtc==13.*"
    )
    assert libraries("12.8", []) == ""
    assert nvrtc.why_not() == "libnvrtc not found; pip install nvidia-cuda-nvrtc-cu12"


@needs_compiler
def test_the_last_block_to_count_sees_the_partial_sums_of_the_others() -> None:
    """The block that increments the counter of an output last adds up its segments. The compiled code must increment it with
    release and acquire order; full barriers around a relaxed increment are slower."""
    dump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not dump.exists():
        pytest.skip("no disassembler here")
    defines = {"KIND": 12, "TILES": 1, "WARPS": 16, "WHOLE_K": 0}
    for architecture in ("sm_86", "sm_90a"):
        code = nvrtc.compile_source(FEW_ROWS_SOURCE, architecture, defines)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(code)
            file.flush()
            output = subprocess.run([dump, "-sass", file.name], capture_output=True, text=True, check=True).stdout
        lines = [line for line in output.splitlines() if re.search(r"MEMBAR|ATOMG|CCTL.IVALL", line)]
        order = [re.search(r"MEMBAR\.\w+\.\w+|ATOMG|CCTL\.IVALL", line)[0] for line in lines]
        assert order == ["MEMBAR.ALL.GPU", "ATOMG", "CCTL.IVALL"], architecture


@needs_compiler
def test_the_error_for_a_source_that_does_not_compile_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_cache_folders", [])
    with pytest.raises(BadSetting, match=r"does not compile few_rows.cu .*-DKIND=12 .*--dtype bf16"):
        nvrtc.compile_source(FEW_ROWS_SOURCE, "sm_90", {"KIND": 12, "TILES": 1})  # the other constants are missing


def test_without_a_compiler_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "compiler", lambda: None)
    with pytest.raises(BadSetting, match="pip install nvidia-cuda-nvrtc, or use --dtype bf16"):
        nvrtc.compile_source(DEQUANTIZE_SOURCE, "sm_90", {"KIND": 12})


def test_a_gpu_that_is_too_old_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(BadSetting, match=r"Tesla T4 \(sm_75\): kernels for packed weights need sm_80 or newer; use --dtype f16"):
        nvrtc.Module(DEQUANTIZE_SOURCE, torch.device("cuda:0"), {"KIND": 12})


def test_a_gpu_newer_than_the_compiler_gets_machine_code_of_its_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_architectures", lambda: [80, 86, 89, 90, 100, 120])
    assert nvrtc.architecture_for(8, 6) == "sm_86"
    assert nvrtc.architecture_for(12, 1) == "sm_120"
    assert nvrtc.architecture_for(10, 3) == "sm_100"
    assert nvrtc.architecture_for(9, 0, arch_specific=True) == "sm_90a"
    assert nvrtc.architecture_for(13, 0) == "sm_130"  # which the compiler will refuse by name


def test_sources_are_read_as_utf_8_in_any_locale() -> None:
    """Their comments have characters outside ASCII, and some sources include others."""
    names = ("many_rows_hopper.cu", FEW_ROWS_SOURCE)
    program = "from onedraw.backends.torch.ops.cuda.nvrtc import read_source as read; print(sum(len(read(n)) for n in NAMES))"
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    found = subprocess.run(
        [sys.executable, "-c", f"NAMES = {names}; {program}"], env=env, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr[-500:]
    assert int(found.stdout) == sum(len(nvrtc.read_source(name)) for name in names)
    assert "#include" not in nvrtc.read_source(FEW_ROWS_SOURCE)
