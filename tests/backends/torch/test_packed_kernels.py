"""The CUDA kernels of packed products emulated on a CPU (emulated.py): dequantization, products, and expert products."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from onedraw.backends.packing import SPAN, SPAN_BYTES
from onedraw.backends.torch.ops.cuda.experts import Routes
from onedraw.backends.torch.ops.cuda.packed import few_rows as packed_rows
from onedraw.backends.torch.ops.cuda.packed import work_split as shares
from onedraw.backends.torch.ops.cuda.packed.activations import PackedActivations
from onedraw.backends.torch.ops.cuda.packed.few_rows import dequantize, dequantize_rows, experts_product, few_rows_product
from onedraw.backends.torch.ops.cuda.packed.linear import HostToDeviceCopy, read_packed_weight
from onedraw.backends.torch.ops.cuda.packed.tensor_core_layout import PackedWeight, empty_packed_weight, fill_packed_weight
from onedraw.backends.torch.ops.cuda.packed.work_split import (
    EXPERT_BLOCKS,
    RESERVED_SHARED,
    expert_tiles_fit,
    split_expert_work,
    tiles_of,
)
from onedraw.checkpoints.base import StoredTensor
from onedraw.checkpoints.dequantize import QUANT_TYPES, dequantize_into
from onedraw.checkpoints.random_weights import random_blocks
from onedraw.models.source import ScaledRows
from tests.backends.torch import emulated
from tests.reference.packed_blocks import reference_activations, reference_product, reference_weights

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler here")
CPU = torch.device("cpu")
LARGE_SHARED = 227 << 10


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.install(monkeypatch)


def width_of(kind: str) -> int:
    """Return a width of more than one segment that is not a multiple of a span if the block size of the kind allows that."""
    return 1280 if QUANT_TYPES[kind].block_values == SPAN else 1088


def made(kind: str, *, rows: int, width: int, count: int = 1, seed: int = 0) -> tuple[PackedWeight, Tensor]:
    """Return packed matrices and their stored bytes [count, rows, bytes]."""
    raw = torch.from_numpy(random_blocks(kind, count * rows, width, np.random.default_rng(seed), width**-0.5))
    found = empty_packed_weight(kind, rows=rows, width=width, device=CPU, count=count)
    fill_packed_weight(found, raw.view(count, rows, -1), first=0)
    return found, raw.view(count, rows, -1)


def normal(rows: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, width, generator=generator) * torch.exp(torch.randn(rows, 1, generator=generator))).bfloat16()


def uninitialized(rows: int, columns: int) -> Tensor:
    return torch.full((rows, columns), torch.nan, dtype=torch.bfloat16)


def dense(activations: PackedActivations, weight: PackedWeight) -> Tensor:
    """Compute the product with one matrix, eight rows at a time, since the batch does not change the bits of a row."""
    out = uninitialized(len(activations), weight.rows)
    for start in range(0, len(activations), 8):
        here = slice(start, start + 8)
        few_rows_product(activations.rows(here), weight, out=out[here], whole_k=True)
    return out


# ------------------------------------------------------------------ one weight


@pytest.mark.parametrize("kind", list(SPAN_BYTES))
def test_dequantized_outputs_and_rows_have_the_values_of_the_file(kind: str) -> None:
    width = width_of(kind)
    weight, raw = made(kind, rows=40, width=width)
    expected, found = reference_weights(raw[0], kind), dequantize(weight, 16, 24)
    assert torch.equal(found.weights, expected.weights[16:])
    assert torch.equal(found.scales[:, :24], expected.scales[:, 16:40])
    assert (found.minima is None) == (expected.minima is None)
    assert found.minima is None or torch.equal(found.minima, expected.minima[16:])
    assert (found.min_scales is None) == (expected.min_scales is None)
    assert found.min_scales is None or torch.equal(found.min_scales[:, :24], expected.min_scales[:, 16:40])
    values = np.empty((40, width), np.float32)
    dequantize_into(raw.numpy().reshape(-1), kind, values)
    wanted = torch.tensor([3, 39, 0, 3])
    looked_up = dequantize_rows(weight, wanted, out=torch.full((4, width), torch.nan))
    assert np.array_equal(looked_up.numpy(), values[wanted])


@pytest.mark.parametrize("kind", list(SPAN_BYTES))
def test_a_product_is_close_to_the_reference_in_float64(kind: str) -> None:
    weight, raw = made(kind, rows=40, width=width_of(kind))
    activations = reference_activations(normal(5, width_of(kind), seed=1))
    expected = reference_product(activations, reference_weights(raw[0], kind))
    found = dense(activations, weight)
    assert float((found.double() - expected).norm() / expected.norm()) < 4e-3
    assert torch.equal(few_rows_product(activations, weight, out=uninitialized(5, 40), whole_k=False), found)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("size", [2.0**113, 2.0**-100])
def test_products_of_very_large_and_very_small_rows_are_close_to_the_reference(kind: str, size: float) -> None:
    weight, raw = made(kind, rows=40, width=width_of(kind))
    activations = reference_activations(normal(3, width_of(kind), seed=1).float().clamp(-2, 2).mul(size).bfloat16())
    expected = reference_product(activations, reference_weights(raw[0], kind))
    found = dense(activations, weight).double()
    assert bool(found.isfinite().all())
    assert float((found - expected).norm() / expected.norm()) < 4e-3


@pytest.mark.parametrize("processors", [1, 2, 4, 5])
def test_a_block_that_works_on_two_segments_gives_the_bits_of_separate_blocks(
    processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks whose work items begin in one segment and end in another, or that must load rows again."""
    monkeypatch.setattr(packed_rows, "_multiprocessors", lambda device: processors)
    weight, _ = made("Q4_K", rows=5 * 16, width=2816)
    activations = reference_activations(normal(3, 2816, seed=1))
    found = few_rows_product(activations, weight, out=uninitialized(3, weight.rows), whole_k=False)
    assert torch.equal(found, dense(activations, weight))
    assert not weight.counters.any()


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q4_1"])
def test_a_warp_with_many_work_items_finishes_all_of_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two warps share nine work items: one finishes them in pairs, the other has one left at the end. Three blocks compute
    segments of the same outputs and start at different segments."""
    monkeypatch.setitem(shares.SPLIT_K_WARPS, 1, 2)
    monkeypatch.setattr(packed_rows, "split_work", shares.split_work.__wrapped__)
    weight, _ = made(kind, rows=9 * 16 - 3, width=2816)
    activations = reference_activations(normal(3, 2816, seed=1))
    found = few_rows_product(activations, weight, out=uninitialized(3, weight.rows), whole_k=False)
    assert torch.equal(found, dense(activations, weight))
    assert not weight.counters.any()


@pytest.mark.parametrize(("kind", "rows"), [("Q4_K", 1), ("Q4_K", 11), ("Q6_K", 3), ("Q4_1", 9), ("Q8_0", 8)])
@pytest.mark.parametrize("units", [4, 7, 9, 10])
@pytest.mark.parametrize(("processors", "balanced"), [(2, 0.0), (2, 2.0), (3, 2.0)])
def test_units_computed_by_one_warp_or_by_all_warps_have_the_same_bits(
    kind: str, rows: int, units: int, processors: int, balanced: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks of two warps: each warp has one or two units, and at most one more unit is shared by both. Or blocks
    share units: then a block passes its partial sums of a unit to the next block."""
    monkeypatch.setitem(shares.WHOLE_K_WARPS, tiles_of(rows), 2)
    monkeypatch.setattr(shares, "BALANCED", balanced)
    monkeypatch.setattr(packed_rows, "split_work", shares.split_work.__wrapped__)
    monkeypatch.setattr(packed_rows, "_multiprocessors", lambda device: processors)
    weight, _ = made(kind, rows=units * 16 - 3, width=2816)
    sizes = {"multiprocessors": processors, "shared": packed_rows.shared_memory(CPU)}
    share = shares.split_work.__wrapped__(rows, len(weight.units), 3, **sizes, whole_k=True)
    assert share.whole_k
    assert share.granule == (1 if balanced else 3)
    activations, bias, residual = (normal(rows, width, seed=width) for width in (2816, weight.rows, weight.rows))
    carry = packed_rows.empty_carry(CPU)
    given = {"bias": bias[0], "residual": residual, "carry": carry}
    found, expected = (
        few_rows_product(
            reference_activations(activations), weight, out=uninitialized(rows, weight.rows), whole_k=whole_k, **given
        )
        for whole_k in (True, False)
    )
    assert torch.equal(found, expected)
    assert bool((carry == -1).all())


@pytest.mark.parametrize("rows", [3, 20])
def test_outputs_computed_in_slabs_have_the_bits_of_one_pass(rows: int) -> None:
    """The workspace has space for the partial sums of two output units at a time, of seven in all."""
    weight, _ = made("Q4_K", rows=104, width=1280)
    activations, bias, residual = (
        reference_activations(normal(rows, 1280, seed=1)),
        normal(1, 104, seed=2)[0],
        normal(rows, 104, seed=3),
    )
    follows = {"bias": bias, "residual": residual, "whole_k": False}
    whole = few_rows_product(activations, weight, out=uninitialized(rows, 104), **follows)
    few = torch.full((2 * 16 * 8 * tiles_of(rows) * 2,), torch.nan)
    wide = uninitialized(rows, 300)
    few_rows_product(activations, weight, out=wide[:, 50:154], partial_sums=few, **follows)
    assert torch.equal(wide[:, 50:154], whole)
    assert bool(wide[:, :50].isnan().all())
    assert bool(wide[:, 154:].isnan().all())
    assert not weight.counters.any()


@pytest.mark.parametrize("factors", [None, (0.25, -3.0, 1e-3)])
def test_nvfp4_has_the_values_of_numpy_times_the_factor_of_its_matrix(factors: tuple[float, ...] | None) -> None:
    """Every byte occurs as a scale, also NaN; there are three experts, and rows that were not filled."""
    rng, width = np.random.default_rng(7), 320
    stored = StoredTensor("w", (3, 20, width), "NVFP4", rng.integers(0, 256, 3 * 20 * width // 64 * 36, dtype=np.uint8))
    tensor = stored if factors is None else ScaledRows(stored, np.array(factors, np.float32))
    made = read_packed_weight([tensor], pad=32, copier=HostToDeviceCopy(CPU), device=CPU)
    assert (made.count, made.rows) == (3, 32)
    known = torch.ones(60) if factors is None else torch.tensor(factors).repeat_interleave(20)
    values, raw = torch.from_numpy(tensor.float32()), torch.from_numpy(stored.packed()).view(3, 20, -1)
    for number in range(3):
        matrix = made.matrix(number)
        numbers = dequantize_rows(matrix, None, out=torch.full((32, width), torch.nan))
        assert torch.equal(numbers[:20], values[number])
        assert not numbers[20:].any()
        expected = reference_weights(raw[number], "NVFP4", known[20 * number : 20 * number + 20])
        found = dequantize(matrix, 0, 32)
        assert torch.equal(found.weights[:20], expected.weights)
        assert torch.equal(found.scales[:, :20], expected.scales[:, :20])
        activations = reference_activations(normal(3, width, seed=number))
        product, exact = dense(activations, matrix)[:, :20].double(), reference_product(activations, expected)
        assert float((product - exact).norm() / exact.norm()) < 4e-3


# ------------------------------------------------------------------ experts


def routes_to(counts: Sequence[int], height: int) -> Routes:
    """Route the first counts[e] rows to expert e; the last tile is unused."""
    used, order, tiles = len(counts), [], []
    for expert, count in enumerate(counts):
        for start in range(0, count, height):
            tiles.append((expert, len(order) + start, min(height, count - start)))
        order += [row * used + expert for row in range(count)]
    tiles.append((0, 0, 0))
    weights = torch.ones(max(counts), used)
    return Routes(torch.tensor(order, dtype=torch.int32), torch.tensor(tiles, dtype=torch.int32), weights, height)


def by_expert(activations: PackedActivations, experts: PackedWeight, counts: Sequence[int], height: int) -> Tensor:
    """Return [rows, experts, outputs]; pairs that are not routed are NaN."""
    out = uninitialized(len(activations) * len(counts), experts.rows)
    experts_product(activations, experts, routes_to(counts, height), divide=len(counts), out=out)
    return out.view(len(activations), len(counts), -1)


def agrees(activations: PackedActivations, experts: PackedWeight, counts: Sequence[int], height: int) -> bool:
    """Tell whether each expert product has the bits of a product with its matrix, and nothing else is written."""
    found = by_expert(activations, experts, counts, height)
    whole = [
        torch.equal(found[:count, e], dense(activations.rows(slice(count)), experts.matrix(e))) for e, count in enumerate(counts)
    ]
    return all(whole) and all(bool(found[count:, e].isnan().all()) for e, count in enumerate(counts))


@pytest.mark.parametrize(("kind", "height"), list(zip(SPAN_BYTES, (8, 16, 32, 64, 8, 16, 64, 32, 16, 8), strict=True)))
def test_an_expert_gives_the_bits_of_a_product_with_its_matrix_alone(
    kind: str, height: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For one row and for hundreds of rows."""
    monkeypatch.setattr(packed_rows, "shared_memory", lambda device: LARGE_SHARED)
    counts = (1, 2, 0, 300, 7, 8, 9, 65, 33) if kind == "Q4_K" else (1, 0, 9, 300)
    experts, _ = made(kind, rows=24, width=width_of(kind), count=len(counts))
    activations = reference_activations(normal(max(counts), width_of(kind), seed=2))
    assert agrees(activations, experts, counts, height)


@pytest.mark.parametrize("shared", [99 << 10, LARGE_SHARED])
def test_tiles_and_warps_that_share_outputs_do_not_change_bits(shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_rows, "shared_memory", lambda device: shared)
    counts, width = (1, 19), 9 * 256
    experts, _ = made("Q4_0", rows=40, width=width, count=2)
    activations = reference_activations(normal(19, width, seed=3))
    heights = [8 * tiles for tiles in (1, 2, 4) if expert_tiles_fit(tiles, shared)]
    splits = {split_expert_work(min(height, 19), height // 8, 3, 3, shared=shared).split_k for height in heights}
    assert splits == ({1, 2} if shared < LARGE_SHARED else {2, 4})
    assert all(agrees(activations, experts, counts, height) for height in heights)


def test_a_tile_may_have_more_rows_than_its_block_has_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_rows, "shared_memory", lambda device: LARGE_SHARED)
    experts, _ = made("Q4_K", rows=8, width=256, count=2)
    assert split_expert_work(64, 8, experts.unit_count, 1, shared=LARGE_SHARED).threads == 32
    assert agrees(reference_activations(normal(70, 256, seed=6)), experts, (70, 40), 64)


def test_every_pair_may_have_its_own_row() -> None:
    """The second product of an expert reads the output of the first one, which has one row per pair."""
    experts, _ = made("Q8_0", rows=24, width=288, count=3)
    routes, activations = routes_to((2, 4, 3), 8), reference_activations(normal(12, 288, seed=4))
    found = experts_product(activations, experts, routes, divide=1, out=uninitialized(12, 24))
    for pair in routes.order.tolist():
        alone = dense(activations.rows(slice(pair, pair + 1)), experts.matrix(pair % 3))
        assert torch.equal(found[pair : pair + 1], alone)


@pytest.mark.parametrize("fault", ["a tile of another expert", "a pair in the place of another pair", "a segment's power of two"])
def test_a_planted_fault_is_caught(fault: str) -> None:
    counts = (3, 5)
    experts, _ = made("Q4_0", rows=24, width=512, count=2)
    activations = reference_activations(normal(5, 512, seed=5))
    assert agrees(activations, experts, counts, 8)
    routes, faulty = routes_to(counts, 8), activations
    match fault:
        case "a tile of another expert":
            routes.tiles[1, 0] = 0
        case "a pair in the place of another pair":
            routes.order[[3, 4]] = routes.order[[4, 3]].clone()
            routes.order[0] = 2  # the pair of row 1 instead of row 0
        case _:
            factors = activations.factors.clone()
            factors[2, 0] *= 2
            faulty = PackedActivations(activations.x, factors, activations.sums)
    found = experts_product(faulty, experts, routes, divide=2, out=uninitialized(10, 24)).view(5, 2, -1)
    assert not all(
        torch.equal(found[:count, e], dense(activations.rows(slice(count)), experts.matrix(e))) for e, count in enumerate(counts)
    )


@pytest.mark.parametrize("shared", [99 << 10, LARGE_SHARED])
def test_the_work_split_of_experts_covers_all_outputs_and_fits_shared_memory(shared: int) -> None:
    for tiles in EXPERT_BLOCKS:
        if not expert_tiles_fit(tiles, shared):
            assert (tiles, shared) == (8, 99 << 10)
            continue
        for tall, segments in ((1, 1), (3, 2), (64, 2), (128, 1), (256, 14)):
            for rows in {1, tiles * 8}:
                share = split_expert_work(rows, tiles, tall, segments, shared=shared)
                units = share.threads // 32 // share.split_k
                assert share.shared <= shared - RESERVED_SHARED
                assert units >= 1
                assert share.threads <= 256
                assert (share.blocks_per_tile - 1) * units < tall <= share.blocks_per_tile * units
