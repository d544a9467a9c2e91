"""CUDA sources that compile for every card they are for, without one, and what is said where they do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onedraw.backends.packing import SPANS
from onedraw.backends.torch.kernels import nvrtc
from onedraw.backends.torch.kernels.packed_rows import CHOSEN, MOST_ROWS, SOURCE, blocks_of, buffers_of, shared_bytes, tiles_of
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
    for tiles in (1, 3):
        assert b"rows_product" in nvrtc.compile_source(
            SOURCE, architecture, {"KIND": KINDS[kind].code or 0, **CHOSEN.defines(tiles, 2)}
        )


def test_rows_take_the_fewest_tiles_that_hold_them_and_as_many_as_a_small_card_has_room_for() -> None:
    large = 227 << 10
    assert [tiles_of(rows, large) for rows in (1, 8, 9, 17, 33, 49, MOST_ROWS)] == [1, 1, 2, 3, 6, 8, 8]
    assert [tiles_of(rows, SMALL_SHARED) for rows in (1, 32, 33, MOST_ROWS)] == [1, 4, 4, 4]
    assert shared_bytes(4) <= SMALL_SHARED < shared_bytes(6)


def test_shares_are_equal_and_of_one_segment_where_that_costs_next_to_nothing() -> None:
    assert blocks_of(2176, 5, 132) == 130  # 26 for every segment
    assert blocks_of(320, 6, 132) == 132
    assert blocks_of(320, 17, 132) == 132  # 119 would leave a tenth of the device idle
    assert blocks_of(1, 1, 132) == 1
    assert blocks_of(3, 200, 132) == 132
    assert [buffers_of(tiles, 227 << 10) for tiles in (1, 4, 6, 8)] == [2, 2, 2, 1]
    assert [buffers_of(tiles, SMALL_SHARED) for tiles in (1, 2, 4)] == [2, 2, 1]


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
