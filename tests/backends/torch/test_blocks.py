"""Stored blocks in the order a GPU reads them: the same numbers, the same bytes, in any slices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onedraw.backends.packing import SPAN, SPANS, span_bytes
from onedraw.backends.torch.kernels import blocks as blocks_module
from onedraw.backends.torch.kernels.blocks import Blocks, empty_blocks, fill_blocks, numbers, row_slices
from onedraw.checkpoints.quants import KINDS, dequantize_into
from tests.packed import random_blocks

CPU = torch.device("cpu")
WIDTHS = [(kind, width) for kind in SPANS for width in ((256, 768) if KINDS[kind].values == SPAN else (32, 576, 768))]


@pytest.mark.parametrize(("kind", "width"), WIDTHS)
def test_blocks_hold_the_numbers_of_the_file_bit_by_bit(kind: str, width: int) -> None:
    raw = random_blocks(kind, 5, width, np.random.default_rng(1))
    made = empty_blocks(kind, rows=8, width=width, device=CPU)
    fill_blocks(made, torch.from_numpy(raw), first=2)
    expected = np.empty((5, width), np.float32)
    dequantize_into(raw.reshape(-1), kind, expected)
    found = numbers(made).numpy()
    assert np.array_equal(found[2:7].view(np.int32), expected.view(np.int32))
    assert not found[:2].any()
    assert not found[7:].any()


@pytest.mark.parametrize(("kind", "width"), WIDTHS)
def test_blocks_take_what_the_plan_says(kind: str, width: int) -> None:
    assert empty_blocks(kind, rows=7, width=width, device=CPU, count=3).nbytes == span_bytes((3, 7, width), kind)
    if width % (2 * SPAN) == 0:
        stored = 7 * width // KINDS[kind].values * KINDS[kind].size
        assert stored <= span_bytes((1, 7, width), kind) <= stored * (1.19 if kind.startswith("Q5") else 1.01)


def test_rows_brought_in_slices_are_the_rows_brought_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "VALUES_AT_ONCE", 3 * 512)
    raw = torch.from_numpy(random_blocks("Q5_K", 10, 512, np.random.default_rng(2)))
    at_once, in_slices = (empty_blocks("Q5_K", rows=10, width=512, device=CPU) for _ in range(2))
    fill_blocks(at_once, raw, first=0)
    slices = list(row_slices(10, 512))
    assert [part.stop - part.start for part in slices] == [3, 3, 3, 1]
    for part in slices:
        fill_blocks(in_slices, raw[part], first=part.start)
    assert all(torch.equal(getattr(at_once, name), getattr(in_slices, name)) for name in ("codes", "high", "scales"))


def test_a_kind_without_numbers_is_an_error() -> None:
    made = empty_blocks("Q4_0", rows=1, width=32, device=CPU)
    with pytest.raises(ValueError, match="no numbers"):
        numbers(Blocks("Q3_K", 1, 32, made.codes, made.high, made.scales))
