"""CUDA sources that compile for every card they are for, without one, and what is said where they do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onedraw.backends.packing import SPANS
from onedraw.backends.torch.kernels import nvrtc
from onedraw.backends.torch.kernels.packed_rows import FORMS, SOURCE, shared_bytes
from onedraw.checkpoints.quants import KINDS
from onedraw.errors import BadSetting

needs_compiler = pytest.mark.skipif(nvrtc.compiler() is None, reason="NVRTC is not installed")
ARCHITECTURES = ("sm_80", "sm_86", "sm_90")
SMALL_SHARED = 99 << 10  # of an sm_86


@needs_compiler
@pytest.mark.parametrize("kind", list(SPANS))
def test_weights_are_opened_on_every_card(kind: str) -> None:
    for architecture in ARCHITECTURES:
        assert nvrtc.compile_source(SOURCE, architecture, {"KIND": KINDS[kind].code or 0})[:4] == b"\x7fELF"


@needs_compiler
@pytest.mark.parametrize(("kind", "architecture"), [("Q4_K", "sm_86"), ("Q4_1", "sm_90")])
def test_products_compile(kind: str, architecture: str) -> None:
    code = nvrtc.compile_source(SOURCE, architecture, {"KIND": KINDS[kind].code or 0, **FORMS[0].defines})
    assert all(f"product{tiles}".encode() in code for tiles in (1, 2, 3, 4))


def test_stages_of_rows_fit_a_small_card() -> None:
    assert max(map(shared_bytes, (1, 2, 3, 4))) <= SMALL_SHARED


@needs_compiler
def test_what_was_compiled_is_kept_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_kept", [])
    nvrtc.keep_in(tmp_path)
    made = nvrtc.compile_source(SOURCE, "sm_90", {"KIND": 12})
    (file,) = (tmp_path / "kernels").iterdir()
    assert file.read_bytes() == made
    file.write_bytes(b"found")
    assert nvrtc.compile_source(SOURCE, "sm_90", {"KIND": 12}) == b"found"
    assert nvrtc.compile_source(SOURCE, "sm_86", {"KIND": 12}) != b"found"


@needs_compiler
def test_a_source_that_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_kept", [])
    with pytest.raises(BadSetting, match=r"does not compile packed_rows.cu .*-DKIND=12 .*--dtype bf16"):
        nvrtc.compile_source(SOURCE, "sm_90", {"KIND": 12, "WARPS": 4})  # the other numbers are missing


def test_without_a_compiler_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "compiler", lambda: None)
    with pytest.raises(BadSetting, match="pip install nvidia-cuda-nvrtc, or use --dtype bf16"):
        nvrtc.compile_source(SOURCE, "sm_90", {"KIND": 12})


def test_an_old_card_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(BadSetting, match=r"Tesla T4 \(sm_75\): products of packed weights need sm_80 or newer; use --dtype f16"):
        nvrtc.Module(SOURCE, torch.device("cuda:0"), {"KIND": 12})
