"""CUDA sources that compile for every card they are for, without one, and what is said where they do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onedraw.backends.packing import SPANS
from onedraw.backends.torch.kernels import nvrtc
from onedraw.backends.torch.kernels.packed_rows import SOURCE, _group_defines
from onedraw.backends.torch.kernels.shares import share_out
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
    for rows, inside in ((1, True), (17, False)):
        share = share_out(rows, 64, 1, multiprocessors=128, shared=SMALL_SHARED, inside=inside)
        assert share.inside == inside
        code = nvrtc.compile_source(SOURCE, architecture, {"KIND": KINDS[kind].code or 0, **share.defines})
        assert b"rows_product" in code


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "tiles", "architecture"), [("Q4_K", 1, "sm_86"), ("Q6_K", 4, "sm_86"), ("Q5_1", 8, "sm_90"), ("NVFP4", 2, "sm_90")]
)
def test_products_of_experts_compile(kind: str, tiles: int, architecture: str) -> None:
    code = nvrtc.compile_source(SOURCE, architecture, _group_defines(kind, tiles))
    assert b"grouped_product" in code
    assert b"rows_product" not in code


@needs_compiler
def test_what_was_compiled_is_kept_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_kept", [])
    monkeypatch.setattr(nvrtc, "_compiled", {})
    nvrtc.keep_in(tmp_path)
    made = nvrtc.compile_source(SOURCE, "sm_90", {"KIND": 12})
    (file,) = (tmp_path / "kernels").iterdir()
    assert file.read_bytes() == made
    file.write_bytes(b"found")
    monkeypatch.setattr(nvrtc, "_compiled", {})
    assert nvrtc.compile_source(SOURCE, "sm_90", {"KIND": 12}) == b"found"
    assert nvrtc.compile_source(SOURCE, "sm_86", {"KIND": 12}) != b"found"


@needs_compiler
def test_a_source_that_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_kept", [])
    with pytest.raises(BadSetting, match=r"does not compile packed_rows.cu .*-DKIND=12 .*--dtype bf16"):
        nvrtc.compile_source(SOURCE, "sm_90", {"KIND": 12, "TILES": 1})  # the other numbers are missing


def test_without_a_compiler_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "compiler", lambda: None)
    with pytest.raises(BadSetting, match="pip install nvidia-cuda-nvrtc, or use --dtype bf16"):
        nvrtc.compile_source(SOURCE, "sm_90", {"KIND": 12})


def test_an_old_card_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(BadSetting, match=r"Tesla T4 \(sm_75\): products of packed weights need sm_80 or newer; use --dtype f16"):
        nvrtc.Module(SOURCE, torch.device("cuda:0"), {"KIND": 12})
