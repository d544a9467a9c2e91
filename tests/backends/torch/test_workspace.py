"""Where packed products write on the way: what fits, where it lies, and whose it is."""

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
def test_slices_are_all_outputs_once_and_fit_where_they_are_opened(kind: str, most: int) -> None:
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
        assert all(stop <= start for (_, stop), (start, _) in pairwise(ends))  # nothing lies on another
        assert ends[-1][1] - ends[0][0] <= most
        assert all((place - ends[0][0]) % 256 == 0 for place, _ in ends)


def test_a_workspace_is_as_large_as_its_weights_ask_for_within_the_plan() -> None:
    room = Workspace(CPU, 1 << 20)
    small, large = (empty_packed_weight("Q4_K", rows=rows, width=256, device=CPU) for rows in (16, 64))
    room.reserve(small)
    room.reserve(large)
    (_, dequantized), *_ = room.slices(small)
    assert dequantized.weights.untyped_storage().nbytes() <= 128 * 600
    (_, again), *_ = room.slices(large)
    assert again.weights.data_ptr() == dequantized.weights.data_ptr()  # it was there before
    assert DEQUANT_BYTES == 256 << 20


def test_sums_have_the_room_that_the_plan_counts() -> None:
    """At 64 rows the head of a large model took 303 MiB beside the plan."""
    room, most = Workspace(CPU), 0
    for rows, width in ((600, 512), (4096, 2304), (600, 512)):
        weight = empty_packed_weight("Q4_K", rows=rows, width=width, device=CPU)
        most = max(most, partial_sum_bytes(rows, width))
        assert room.partial_sums(weight).nbytes == most
    assert partial_sum_bytes(248_320, 5120) == PARTIAL_SUM_BYTES
    assert partial_sum_bytes(128_256, 4096) == 4 * 128_256 * 64 * 4 < PARTIAL_SUM_BYTES


def test_sums_that_recorded_turns_hold_stay_where_they_are() -> None:
    room = Workspace(CPU)
    first = room.partial_sums(empty_packed_weight("Q4_K", rows=16, width=256, device=CPU))
    where = first.data_ptr()
    del first
    second = room.partial_sums(empty_packed_weight("Q4_K", rows=64, width=2048, device=CPU))
    others = [torch.empty(16 * 64) for _ in range(8)]  # what an allocator would put into memory that is free again
    assert where not in {second.data_ptr(), *(other.data_ptr() for other in others)}


def test_two_engines_on_one_device_share_no_workspace(kernel: _Recorded) -> None:
    """Each may be in the middle of a product when the other begins one."""
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


class _Recorded:
    """Stands for the kernel: writes down what it was given."""

    def __init__(self) -> None:
        self.given: list[dict[str, int]] = []

    def launch(self, given: Any, **how: Any) -> None:
        self.given.append({name: getattr(given, name) or 0 for name, _ in given._fields_})


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> _Recorded:
    """All products of few rows, as on a large card."""
    found = _Recorded()
    monkeypatch.setattr(packed_rows, "_few_rows_kernel", lambda *which: found)
    monkeypatch.setattr(packed_rows, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(packed_rows, "shared_memory", lambda device: 227 << 10)
    return found


@pytest.mark.parametrize(("rows", "units"), [(64, 7), (20, 7), (64, 38), (3, 7)])
def test_outputs_come_slab_by_slab_where_their_sums_do_not_fit_at_once(rows: int, units: int, kernel: _Recorded) -> None:
    """Every output once, with its own weights, counters, bias, residual and place, and never more sums than there is room for."""
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


def launched(linear: PackedLinear, ready: PendingActivations, rows: int, kernel: _Recorded) -> list[dict[str, int]]:
    x = torch.zeros(rows, 2304, dtype=torch.float16)
    ready.put(x, empty_packed_activations(rows, 2304, CPU))
    kernel.given.clear()
    linear(x)
    return kernel.given


@pytest.fixture
def side_by_side(kernel: _Recorded) -> tuple[PackedLinear, PendingActivations, _Recorded]:
    ready, room = PendingActivations(), Workspace(CPU)
    weights = [
        empty_packed_weight(kind, rows=n, width=2304, device=CPU) for kind, n in (("Q5_K", 4096), ("Q4_K", 1024), ("Q6_K", 320))
    ]
    for weight in weights:
        room.reserve(weight)
    made = PackedLinear(weights, dtype=torch.float16, device=CPU, workspace=room, pending=ready, pdl=True)
    return made, ready, kernel


@pytest.mark.parametrize("rows", [5, 16])
def test_products_of_the_same_rows_join_and_have_their_sums_apart(
    side_by_side: tuple[PackedLinear, PendingActivations, _Recorded], rows: int
) -> None:
    """The first waits before it lets the next come, the others in the end."""
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


def test_products_that_join_hand_sums_on_in_places_of_their_own(
    side_by_side: tuple[PackedLinear, PendingActivations, _Recorded],
) -> None:
    given = launched(*side_by_side[:2], 1, side_by_side[2])
    places = sorted(one["carry"] for one in given)
    assert all(places)
    size = packed_rows.empty_carry(CPU).nbytes
    assert all(place + size <= behind for place, behind in pairwise(places))
    assert all(size >= 4 * 132 * 16 * 8 * 2 for _ in given)  # as many blocks as there may be, of two tiles


@pytest.mark.parametrize("rows", [64, 65, 200])
def test_products_come_one_behind_the_other_where_sums_have_no_room_or_rows_do_not_come_at_once(
    side_by_side: tuple[PackedLinear, PendingActivations, _Recorded], rows: int
) -> None:
    assert {one["pdl"] for one in launched(*side_by_side[:2], rows, side_by_side[2])} == {PDL}


def test_a_product_in_pieces_joins_with_its_first_and_is_joined_at_its_last(kernel: _Recorded) -> None:
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
