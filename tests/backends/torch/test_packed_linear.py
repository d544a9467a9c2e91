"""Where packed weights are written out for products with many rows: what fits, and where it lies."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from onedraw.backends.packing import SPANS
from onedraw.backends.plan import OPENED_BYTES
from onedraw.backends.torch.kernels.fragments import empty_fragments
from onedraw.backends.torch.kernels.packed_linear import Workspace
from onedraw.backends.torch.kernels.spans import Opened
from onedraw.backends.torch.kernels.wide import TILE

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", list(SPANS))
@pytest.mark.parametrize("most", [300 << 10, 1 << 20])
def test_slices_are_all_outputs_once_and_fit_where_they_are_opened(kind: str, most: int) -> None:
    weight = empty_fragments(kind, rows=600, width=512, device=CPU)
    room = Workspace(CPU, most)
    slices = list(room.slices(weight))
    assert [output for columns, _ in slices for output in range(columns.start, columns.stop)] == list(range(600))
    assert len(slices) == (3 if most < 1 << 20 else 1)
    for columns, opened in slices:
        assert columns.start % TILE == 0
        assert len(opened.weights) == columns.stop - columns.start
        parts = [part for name in Opened.__slots__ if (part := getattr(opened, name)) is not None]
        ends = sorted((part.data_ptr(), part.data_ptr() + part.nbytes) for part in parts)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(ends))  # nothing lies on another
        assert ends[-1][1] - ends[0][0] <= most
        assert all((place - ends[0][0]) % 256 == 0 for place, _ in ends)


def test_a_workspace_is_as_large_as_its_weights_ask_for_within_the_plan() -> None:
    room = Workspace(CPU, 1 << 20)
    small, large = (empty_fragments("Q4_K", rows=rows, width=256, device=CPU) for rows in (16, 64))
    room.reserve(small)
    room.reserve(large)
    (_, opened), *_ = room.slices(small)
    assert opened.weights.untyped_storage().nbytes() < 64 * 600
    (_, again), *_ = room.slices(large)
    assert again.weights.data_ptr() == opened.weights.data_ptr()  # it was there before
    assert OPENED_BYTES == 256 << 20
