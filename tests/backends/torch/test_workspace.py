"""The workspace of packed products: its size, the positions of partial sums in it, and its owner."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from onedraw.backends.memory_plan import DEQUANT_BYTES, PARTIAL_SUM_BYTES
from onedraw.backends.packing import SPAN_BYTES, partial_sum_bytes
from onedraw.backends.torch.ops.cuda.packed import few_rows as packed_rows
from onedraw.backends.torch.ops.cuda.packed.activations import DequantizedWeight, PendingActivations, empty_packed_activations
from onedraw.backends.torch.ops.cuda.packed.few_rows import OVERLAPS_NEXT, OVERLAPS_PREVIOUS, PDL
from onedraw.backends.torch.ops.cuda.packed.linear import PackedLinear, Workspace
from onedraw.backends.torch.ops.cuda.packed.many_rows_hopper import TILE
from onedraw.backends.torch.ops.cuda.packed.ops import PackedOps
from onedraw.backends.torch.ops.cuda.packed.tensor_core_layout import PackedWeight, empty_packed_weight
from onedraw.backends.torch.ops.cuda.packed.work_split import tiles_of
from tests.support.quantized_weights import random_tensor

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", list(SPAN_BYTES))
@pytest.mark.parametrize("most", [300 << 10, 1 << 20])
def test_slices_cover_all_outputs_once_and_fit_the_dequantization_buffer(kind: str, most: int) -> None:
    weight = empty_packed_weight(kind, rows=600, width=512, device=CPU)
    room = Workspace(CPU, most)
    slices = list(room.slices(weight))
    assert [output for columns, _ in slices for output in range(columns.start, columns.stop)] == list(range(600))
    assert len(slices) == (3 if most < 1 << 20 else 1)
    for columns, dequantized in slices:
        assert columns.start % TILE == 0
        assert len(dequantized.weights) == columns.stop - columns.start
        parts = [part for name in DequantizedWeight.__slots__ if (part := getattr(dequantized, name)) is not None]
        ends = sorted((part.data_ptr(), part.data_ptr() + part.nbytes) for part in parts)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(ends))  # slices do not overlap
        assert ends[-1][1] - ends[0][0] <= most
        assert all((place - ends[0][0]) % 256 == 0 for place, _ in ends)


def test_a_workspace_has_the_size_its_weights_need_within_the_plan() -> None:
    room = Workspace(CPU, 1 << 20)
    small, large = (empty_packed_weight("Q4_K", rows=rows, width=256, device=CPU) for rows in (16, 64))
    room.reserve(small)
    room.reserve(large)
    (_, dequantized), *_ = room.slices(small)
    assert dequantized.weights.untyped_storage().nbytes() <= 128 * 600
    (_, again), *_ = room.slices(large)
    assert again.weights.data_ptr() == dequantized.weights.data_ptr()  # already allocated
    assert DEQUANT_BYTES == 256 << 20


def test_partial_sums_take_the_planned_bytes() -> None:
    """Regression: the head of a large model took 303 MiB more than planned at 64 rows."""
    room, most = Workspace(CPU), 0
    for rows, width in ((600, 512), (4096, 2304), (600, 512)):
        weight = empty_packed_weight("Q4_K", rows=rows, width=width, device=CPU)
        most = max(most, partial_sum_bytes(rows, width))
        assert room.partial_sums(weight).nbytes == most
    assert partial_sum_bytes(248_320, 5120) == PARTIAL_SUM_BYTES
    assert partial_sum_bytes(128_256, 4096) == 4 * 128_256 * 64 * 4 < PARTIAL_SUM_BYTES


def test_partial_sums_of_captured_steps_keep_their_addresses() -> None:
    room = Workspace(CPU)
    first = room.partial_sums(empty_packed_weight("Q4_K", rows=16, width=256, device=CPU))
    where = first.data_ptr()
    del first
    second = room.partial_sums(empty_packed_weight("Q4_K", rows=64, width=2048, device=CPU))
    others = [torch.empty(16 * 64) for _ in range(8)]  # an allocator would reuse freed memory for this
    assert where not in {second.data_ptr(), *(other.data_ptr() for other in others)}


def test_two_engines_on_one_device_share_no_workspace(kernel: _RecordingKernel) -> None:
    """One may be in the middle of a product when the other begins one."""
    tensors = [random_tensor("w", (128, 512), "Q4_K", np.random.default_rng(0))]
    engines = [PackedOps(CPU, torch.float16).packed_linear(tensors, bias=None, pad=1, pad_columns=1) for _ in range(2)]
    rooms = []
    for made in engines:
        assert made is not None
        (weight,) = made.parts
        assert isinstance(weight, PackedWeight)
        dequantized = [part for _, part in made.workspace.slices(weight)]
        carry = (made.workspace.carry(number).data_ptr() for number in range(2))
        rooms.append({made.workspace.partial_sums(weight).data_ptr(), *carry, *(part.weights.data_ptr() for part in dequantized)})
        assert len(rooms[-1]) == 4
    assert rooms[0].isdisjoint(rooms[1])


class _RecordingKernel:
    """Takes the place of the kernel and records the arguments of its launches."""

    def __init__(self) -> None:
        self.given: list[dict[str, int]] = []

    def launch(self, given: Any, **how: Any) -> None:
        self.given.append({name: getattr(given, name) or 0 for name, _ in given._fields_})


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> _RecordingKernel:
    """Run all products with the few-rows kernel, as on a large GPU."""
    found = _RecordingKernel()
    monkeypatch.setattr(packed_rows, "_few_rows_kernel", lambda *which: found)
    monkeypatch.setattr(packed_rows, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(packed_rows, "shared_memory", lambda device: 227 << 10)
    return found


@pytest.mark.parametrize(("rows", "units"), [(64, 7), (20, 7), (64, 38), (3, 7)])
def test_outputs_are_computed_in_slabs_if_their_partial_sums_do_not_fit_at_once(
    rows: int, units: int, kernel: _RecordingKernel
) -> None:
    """Every output is computed once, with its weights, counters, bias, residual and address, and the partial sums always fit."""
    tiles = tiles_of(rows)
    weight = empty_packed_weight("Q4_K", rows=600, width=2304, device=CPU)  # 38 units, three segments
    parts = torch.empty(units * 3 * 16 * tiles * 8)
    out, bias, residual = torch.empty(rows, 700).half()[:, 50:650], torch.empty(600).half(), torch.empty(rows, 600).half()
    packed_rows.few_rows_product(
        empty_packed_activations(rows, 2304, CPU),
        weight,
        out=out,
        partial_sums=parts,
        bias=bias,
        residual=residual,
        whole_k=False,
    )
    first = 0
    for given in kernel.given:
        assert given["units"] == weight.units.data_ptr() + first * weight.units.stride(0)
        assert given["counters"] == weight.counters.data_ptr() + 4 * first
        assert [given["out"], given["residual"]] == [t.data_ptr() + 32 * first for t in (out, residual)]
        assert given["bias"] == bias.data_ptr() + 32 * first
        assert (given["out_stride"], given["residual_stride"]) == (700, 600)
        assert given["partial_sums"] == parts.data_ptr()
        assert given["unit_count"] * 3 * 16 * tiles * 8 <= parts.numel()
        assert given["outputs"] == min(600 - 16 * first, 16 * given["unit_count"])
        first += given["unit_count"]
    assert first == 38
    assert len(kernel.given) == -(-38 // units)


# ------------------------------------------------------------------ products that read the same rows


def launched(linear: PackedLinear, ready: PendingActivations, rows: int, kernel: _RecordingKernel) -> list[dict[str, int]]:
    x = torch.zeros(rows, 2304, dtype=torch.float16)
    ready.put(x, empty_packed_activations(rows, 2304, CPU))
    kernel.given.clear()
    linear(x)
    return kernel.given


@pytest.fixture
def side_by_side(kernel: _RecordingKernel) -> tuple[PackedLinear, PendingActivations, _RecordingKernel]:
    ready, room = PendingActivations(), Workspace(CPU)
    weights = [
        empty_packed_weight(kind, rows=n, width=2304, device=CPU) for kind, n in (("Q5_K", 4096), ("Q4_K", 1024), ("Q6_K", 320))
    ]
    for weight in weights:
        room.reserve(weight)
    made = PackedLinear(weights, dtype=torch.float16, device=CPU, workspace=room, pending=ready, pdl=True)
    return made, ready, kernel


@pytest.mark.parametrize("rows", [5, 16])
def test_concurrent_products_of_the_same_rows_have_separate_partial_sums(
    side_by_side: tuple[PackedLinear, PendingActivations, _RecordingKernel], rows: int
) -> None:
    """The first product waits for its inputs before the next one may start; the others wait at their ends."""
    given = launched(*side_by_side[:2], rows, side_by_side[2])
    assert [one["pdl"] for one in given] == [
        PDL | OVERLAPS_NEXT,
        PDL | OVERLAPS_PREVIOUS | OVERLAPS_NEXT,
        PDL | OVERLAPS_PREVIOUS,
    ]
    sizes = [4 * one["unit_count"] * 3 * 16 * tiles_of(rows) * 8 for one in given]
    places = sorted((one["partial_sums"], one["partial_sums"] + size) for one, size in zip(given, sizes, strict=True))
    assert all(start for start, _ in places)
    assert all(end <= start for (_, end), (start, _) in pairwise(places))
    room = side_by_side[0].workspace.partial_sums(side_by_side[0].parts[0])
    assert room.data_ptr() <= places[0][0]
    assert places[-1][1] <= room.data_ptr() + room.nbytes


def test_concurrent_products_carry_sums_in_separate_memory(
    side_by_side: tuple[PackedLinear, PendingActivations, _RecordingKernel],
) -> None:
    given = launched(*side_by_side[:2], 1, side_by_side[2])
    places = sorted(one["carry"] for one in given)
    assert all(places)
    size = packed_rows.empty_carry(CPU).nbytes
    assert all(place + size <= behind for place, behind in pairwise(places))
    assert all(size >= 4 * 132 * 16 * 8 * 2 for _ in given)  # the largest number of blocks, of two tiles each


@pytest.mark.parametrize("rows", [64, 65, 200])
def test_products_run_one_after_the_other_if_partial_sums_or_rows_do_not_fit(
    side_by_side: tuple[PackedLinear, PendingActivations, _RecordingKernel], rows: int
) -> None:
    assert {one["pdl"] for one in launched(*side_by_side[:2], rows, side_by_side[2])} == {PDL}


def test_a_product_in_slabs_overlaps_with_the_previous_and_the_next_product(kernel: _RecordingKernel) -> None:
    weight = empty_packed_weight("Q4_K", rows=600, width=2304, device=CPU)
    parts, out = torch.empty(13 * 3 * 16 * 16), torch.empty(9, 600).half()
    packed_rows.few_rows_product(
        empty_packed_activations(9, 2304, CPU),
        weight,
        out=out,
        partial_sums=parts,
        pdl=True,
        overlaps_previous=True,
        overlaps_next=True,
        whole_k=False,
    )
    assert [one["pdl"] for one in kernel.given] == [PDL | OVERLAPS_PREVIOUS, PDL, PDL | OVERLAPS_NEXT]
