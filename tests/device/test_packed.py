"""Products of packed weights: right results, and bits that depend on the row alone, with every kernel.

On a GPU all tests; under Triton's interpreter the Triton kernels, experts and a whole model, with the CUDA C++ kernels emulated
on the CPU (tests/backends/torch/emulated.py).
"""

from __future__ import annotations

import gc
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from onedraw.backends.packing import SPAN, SPAN_BYTES
from onedraw.checkpoints.base import StoredTensor
from onedraw.checkpoints.dequantize import QUANT_TYPES
from onedraw.models.source import ColumnSelection
from onedraw.models.spec import MoeSpec
from onedraw.types import History, Plan, Row, SamplingParams
from tests.support.quantized_weights import quantized_weights, random_tensor, tiny_spec

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs a CUDA device"),
]
on_device = pytest.mark.skipif(INTERPRETED, reason="kernels in CUDA C++ need a CUDA device")

if torch.cuda.is_available() or INTERPRETED:
    from onedraw.backends.torch.backend import TorchBackend
    from onedraw.backends.torch.ops.cuda.experts import route, run_experts
    from onedraw.backends.torch.ops.cuda.norm import gated_activation
    from onedraw.backends.torch.ops.cuda.packed import few_rows as packed_rows
    from onedraw.backends.torch.ops.cuda.packed import many_rows as many_rows
    from onedraw.backends.torch.ops.cuda.packed.activations import DequantizedWeight, PackedActivations, pack_activations
    from onedraw.backends.torch.ops.cuda.packed.linear import (
        HostToDeviceCopy,
        PackedLinear,
        Workspace,
        load_packed_weight,
        packed_linear,
        packed_product,
        read_packed_weight,
    )
    from onedraw.backends.torch.ops.cuda.packed.many_rows import ManyRowsTile
    from onedraw.backends.torch.ops.cuda.packed.ops import PackedExpertBank, PackedOps, load_expert_bank
    from onedraw.backends.torch.ops.cuda.packed.tensor_core_layout import PackedWeight
    from tests.backends.torch import emulated
    from tests.reference.packed_blocks import reference_product, reference_weights

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() and not INTERPRETED else "cpu")
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter truncates to bf16 instead of rounding
ROUNDING = 6e-4 if INTERPRETED else 4e-3
MOST = 20 if INTERPRETED else 700
RNG = np.random.default_rng(0)
ROOM = Workspace(DEVICE) if torch.cuda.is_available() or INTERPRETED else None


def normal(*shape: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * spread).to(DEVICE, DTYPE)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def nothing(rows: int, columns: int) -> Tensor:
    return torch.full((rows, columns), torch.nan, dtype=DTYPE, device=DEVICE)


def slow(kind: str, rows: int, width: int) -> tuple[DequantizedWeight, Tensor]:
    """The dequantized weight by the slow reference, and the file's values in float32."""
    tensor = random_tensor("w", (rows, width), kind, RNG, width**-0.5)
    found = reference_weights(torch.from_numpy(tensor.packed()).to(DEVICE), kind)
    return found, torch.from_numpy(tensor.float32()).to(DEVICE)


def weight(kind: str, rows: int, width: int) -> tuple[PackedWeight, DequantizedWeight, Tensor]:
    """The packed weight, the dequantized weight by the slow reference, and the file's values in float32."""
    tensor = random_tensor("w", (rows, width), kind, RNG, width**-0.5)
    made = load_packed_weight([tensor], pad=1, copier=HostToDeviceCopy(DEVICE), device=DEVICE, workspace=ROOM)
    dequantized = reference_weights(torch.from_numpy(tensor.packed()).to(DEVICE), kind)
    return made, dequantized, torch.from_numpy(tensor.float32()).to(DEVICE)


def short(kind: str) -> int:
    """A width that is not a multiple of a span, where the kind's block size allows it."""
    return 768 if QUANT_TYPES[kind].block_values == SPAN else 576


# ------------------------------------------------------------------ weights


@on_device
@pytest.mark.parametrize("kind", list(SPAN_BYTES))
def test_dequantized_rows_and_weights_are_those_of_the_file(kind: str) -> None:
    packed, expected, values = weight(kind, 40, short(kind))
    everything = packed_rows.dequantize_rows(packed, None, out=torch.full(values.shape, torch.nan, device=DEVICE))
    assert torch.equal(everything, values)
    wanted = torch.tensor([3, 39, 0, 3], device=DEVICE)
    assert torch.equal(packed_rows.dequantize_rows(packed, wanted, out=torch.empty_like(values[:4])), values[wanted])
    for first, count in ((0, 40), (16, 24)):
        found = packed_rows.dequantize(packed, first, count)
        here = slice(first, first + count)
        assert torch.equal(found.weights, expected.weights[here])
        assert torch.equal(found.scales[:, :count], expected.scales[:, here])
        assert (found.minima is None) == (expected.minima is None)
        assert found.minima is None or torch.equal(found.minima, expected.minima[here])
        assert (found.min_scales is None) == (expected.min_scales is None)
        assert found.min_scales is None or torch.equal(found.min_scales[:, :count], expected.min_scales[:, here])


# ------------------------------------------------------------------ products


@pytest.mark.parametrize("kind", list(SPAN_BYTES))
def test_a_product_of_many_rows_is_close_to_float64(kind: str) -> None:
    width = 1280 if kind in ("Q4_K", "Q4_1") else short(kind)  # more than a segment
    outputs = 24 if INTERPRETED else 200
    dequantized, values = slow(kind, outputs, width)
    x, bias, residual = normal(MOST, width, seed=1), normal(outputs, seed=9), normal(MOST, outputs, seed=10)
    activations = pack_activations(x)
    tile = ManyRowsTile(32, 32, 64, 4, 2) if INTERPRETED else ManyRowsTile()
    found = many_rows.many_rows_product(activations, dequantized, out=nothing(MOST, outputs), tile=tile)
    assert error(reference_product(activations, dequantized), x.double() @ values.double().t()) < 2e-4  # Q6_K rounds above 2,048
    assert error(found, reference_product(activations, dequantized)) < ROUNDING
    more = many_rows.many_rows_product(
        activations, dequantized, out=nothing(MOST, outputs), bias=bias, residual=residual, tile=tile
    )
    assert torch.equal(more, (found + bias) + residual)


def faulty(activations: PackedActivations, fault: str) -> PackedActivations:
    match fault:
        case "a power of two of one span":
            factors = activations.factors.clone()
            factors[3, -1] *= 2
            return replace(activations, factors=factors)
        case "sums of another row":
            return replace(activations, sums=activations.sums.roll(1, 0))
        case _:
            raise ValueError(fault)


@pytest.mark.parametrize("fault", ["a power of two of one span", "sums of another row"])
def test_a_planted_fault_is_caught(fault: str) -> None:
    """The comparison of the test above detects it."""
    dequantized, values = slow("Q4_K", 24, 512)
    x = normal(8, 512, seed=1)
    tile = ManyRowsTile(16, 32, 64, 4, 2)
    found = many_rows.many_rows_product(faulty(pack_activations(x), fault), dequantized, out=nothing(8, 24), tile=tile)
    assert error(found, x.double() @ values.double().t()) > 10 * ROUNDING


@on_device
@pytest.mark.parametrize("kind", list(SPAN_BYTES))
def test_a_row_has_the_same_bits_alone_and_in_a_batch_with_every_kernel(kind: str) -> None:
    """Few rows read the blocks, many an dequantized weight; neither the kernel nor its tile shows."""
    width = 1536 if QUANT_TYPES[kind].block_values == SPAN else 1088
    packed, dequantized, values = weight(kind, 200, width)
    x = normal(MOST, width, seed=1)
    activations = pack_activations(x)
    full = packed_product(activations, packed, out=nothing(MOST, 200), workspace=ROOM)
    assert error(full, x.double() @ values.double().t()) < ROUNDING
    for rows in (1, 2, 5, 16, 17, 40, 64, 65, 100, 256, 257, 300):
        for start in (0, 3):
            part = pack_activations(x[start : start + rows])
            found = packed_product(part, packed, out=nothing(rows, 200), workspace=ROOM)
            assert torch.equal(found, full[start : start + rows]), (rows, start)
    for tile in (ManyRowsTile(), ManyRowsTile(16, 32, 64, 1, 2), ManyRowsTile(64, 128, 32, 4, 2)):
        assert torch.equal(many_rows.many_rows_product(activations, dequantized, out=nothing(MOST, 200), tile=tile), full), tile


@on_device
def test_a_weight_dequantized_in_slices_gives_the_same_product() -> None:
    packed, _, _ = weight("Q4_K", 600, 512)
    activations, bias, residual = pack_activations(normal(300, 512, seed=2)), normal(600, seed=3), normal(300, 600, seed=4)
    follows = {"bias": bias, "residual": residual}
    whole = packed_product(activations, packed, out=nothing(300, 600), workspace=ROOM, **follows)
    small = Workspace(DEVICE, most=300 << 10)
    assert len(list(small.slices(packed))) == 3
    assert torch.equal(packed_product(activations, packed, out=nothing(300, 600), workspace=small, **follows), whole)


@on_device
@pytest.mark.parametrize("rows", [17, 64])
def test_outputs_computed_in_slabs_are_the_same(rows: int) -> None:
    packed, _, _ = weight("Q4_K", 600, 2304)
    activations, bias, residual = pack_activations(normal(rows, 2304, seed=2)), normal(600, seed=3), normal(rows, 600, seed=4)
    follows = {"bias": bias, "residual": residual}
    whole = packed_rows.few_rows_product(activations, packed, out=nothing(rows, 600), **follows)
    few = torch.full((3 * 16 * 64 * 7,), torch.nan, dtype=torch.float32, device=DEVICE)  # space for seven output units at a time
    assert torch.equal(
        packed_rows.few_rows_product(activations, packed, out=nothing(rows, 600), partial_sums=few, **follows), whole
    )
    assert not packed.counters.any()


@on_device
@pytest.mark.parametrize("rows", [9, 300])
def test_weights_of_several_kinds_are_concatenated_with_bias_and_residual(rows: int) -> None:
    tensors = [
        random_tensor(kind, (height, 256), kind, RNG, 1 / 16)
        for kind, height in (("Q4_K", 24), ("Q4_K", 9), ("Q6_K", 8), ("F32", 7))
    ]
    heights = [24, 16, 8, 8]  # padded to eight rows
    bias, x, residual = normal(56, seed=2), normal(rows, 256, seed=3), normal(rows, 56, seed=4)
    made = packed_linear(tensors, dtype=DTYPE, device=DEVICE, copier=HostToDeviceCopy(DEVICE), workspace=ROOM, bias=bias, pad=8)
    assert made is not None
    assert [type(part).__name__ for part in made.parts] == ["PackedWeight", "PackedWeight", "Tensor"]
    dense = [torch.nn.functional.pad(torch.from_numpy(t.float32()), (0, 0, 0, -len(t.float32()) % 8)) for t in tensors]
    assert [len(matrix) for matrix in dense] == heights
    expected = x.double() @ torch.cat(dense).double().to(DEVICE).t() + bias.double()
    assert error(made(x), expected) < ROUNDING
    assert error(made(x, residual), expected + residual.double()) < ROUNDING
    assert packed_linear(tensors[3:], dtype=DTYPE, device=DEVICE, copier=HostToDeviceCopy(DEVICE), workspace=ROOM) is None


@on_device
@pytest.mark.parametrize("rows", [1, 8, 16, 22])
@pytest.mark.parametrize(
    "heights",
    [
        {"Q5_K": 4096, "Q4_K": 1024, "Q6_K": 512},
        {"Q6_K": 320, "Q5_K": 4096, "Q4_K": 1024},
        {"Q4_K": 2656, "Q6_K": 2656, "Q5_K": 3200},  # blocks share units
    ],
)
def test_concurrent_products_of_the_same_rows_give_the_results_of_sequential_ones(rows: int, heights: dict[str, int]) -> None:
    """A captured chain of four products, replayed many times: each reads the output of the one before it."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs programmatic dependent launch (Hopper)")
    tensors = [random_tensor(kind, (height, 2048), kind, RNG, 2048**-0.5) for kind, height in heights.items()]

    def made(pdl: bool) -> PackedLinear:
        found = packed_linear(
            tensors, dtype=DTYPE, device=DEVICE, copier=HostToDeviceCopy(DEVICE), workspace=Workspace(DEVICE), pad=1, pdl=pdl
        )
        assert found is not None
        return found

    overlapping, alone, x, residual = made(True), made(False), normal(rows, 2048), normal(rows, sum(heights.values()))

    def turn(linear: PackedLinear) -> list[Tensor]:
        found, h = [], x
        for start in range(0, 4000, 1000):
            found.append(linear(h, residual))
            h = found[-1][:, start : start + 2048]
        return found

    turn(overlapping)
    assert len(overlapping._partial_sums(rows)) == 3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        played = turn(overlapping)
    for seed in range(40):
        x.copy_(normal(rows, 2048, seed=seed))
        residual.copy_(normal(*residual.shape, seed=seed + 1000))
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(played, turn(alone), strict=True))


@on_device
def test_a_column_selection_is_applied_to_the_activations() -> None:
    tensor = random_tensor("w", (16, 512), "Q4_K", RNG, 512**-0.5)
    order = np.arange(512).reshape(4, 128)[[2, 0, 3, 1]].reshape(-1)
    ours = ColumnSelection(tensor, order)
    made = packed_linear([ours], dtype=DTYPE, device=DEVICE, copier=HostToDeviceCopy(DEVICE), workspace=ROOM)
    assert made is not None
    x = normal(5, 512, seed=5)
    assert error(made(x), x.double() @ torch.from_numpy(ours.float32()).to(DEVICE).double().t()) < ROUNDING


@on_device
def test_activations_packed_by_a_norm_or_a_gate_give_the_same_product() -> None:
    ops = PackedOps(DEVICE, DTYPE)
    made = ops.packed_linear([random_tensor("w", (64, 512), "Q4_K", RNG, 512**-0.5)], bias=None, pad=1, pad_columns=1)
    assert made is not None
    for rows in (3, 300):
        h = ops.rms_norm(normal(rows, 512, seed=11), None, 1e-6)
        assert torch.equal(made(h), made(h.clone()))
        h = ops.gated(normal(rows, 1024, seed=12), "silu")
        assert torch.equal(made(h), made(h.clone()))


# ------------------------------------------------------------------ experts, and a whole model


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate the CUDA C++ kernels where there is no GPU."""
    if INTERPRETED:
        emulated.install(monkeypatch)


KINDS_OF_EXPERTS = [("Q4_K", "Q4_K", "Q6_K"), ("Q4_K", "Q5_K", "Q8_0")]  # gate, up, down


def stacks(kinds: tuple[str, str, str], *, count: int, width: int, hidden: int) -> list[StoredTensor]:
    """Gate, up and down of all experts."""
    shapes = ((count, width, hidden), (count, width, hidden), (count, hidden, width))
    return [random_tensor("w", shape, kind, RNG, shape[2] ** -0.5) for shape, kind in zip(shapes, kinds, strict=True)]


def bank_of(tensors: list[StoredTensor], *, pdl: bool = False) -> PackedExpertBank:
    gate, up, down = tensors
    return load_expert_bank([gate, up], down, "silu", pad=64, copier=HostToDeviceCopy(DEVICE), device=DEVICE, pdl=pdl)


def chosen(rows: int, *, count: int, used: int, seed: int = 6) -> tuple[Tensor, Tensor]:
    """Experts of each row, best first, and their weights."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(count, generator=generator)[:used] for _ in range(rows)])
    return ids.to(DEVICE), torch.rand(rows, used, generator=generator).to(DEVICE)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kinds", KINDS_OF_EXPERTS)
def test_packed_experts_match_float_experts(kinds: tuple[str, str, str]) -> None:
    tensors = stacks(kinds, count=2, width=256, hidden=256)
    bank = bank_of(tensors)
    ids, shares = chosen(4, count=2, used=1)
    x = normal(4, 256, seed=7)
    numbers = [torch.from_numpy(t.float32()).to(DEVICE, DTYPE) for t in tensors]
    gate_up, down = torch.cat(numbers[:2], 1), numbers[2]
    expected = run_experts(x, route(ids, shares, count=2), gate_up=gate_up, down=down, activation="silu", scale=2.0)
    found = bank(x, ids, shares, 2.0)
    assert error(found, expected) < 3 * ROUNDING
    assert torch.equal(bank(x[:1], ids[:1], shares[:1], 2.0), found[:1])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kinds", KINDS_OF_EXPERTS)
def test_experts_have_the_bits_of_separate_products_with_their_matrices(kinds: tuple[str, str, str]) -> None:
    """The lowest expert first, whatever the order they were chosen in."""
    count, used, rows, hidden = (3, 2, 3, 512) if INTERPRETED else (6, 3, 300, 1536)
    width = 256 if kinds[2] == "Q6_K" else 96  # which is filled up
    tensors = stacks(kinds, count=count, width=width, hidden=hidden)
    ids, shares = chosen(rows, count=count, used=used)
    x = normal(rows, hidden, seed=8)
    alone = [read_packed_weight([tensor], pad=64, copier=HostToDeviceCopy(DEVICE), device=DEVICE) for tensor in tensors]
    expected = torch.zeros(rows, hidden, device=DEVICE)
    for number in range(count):
        gate, up, down = (stack.matrix(number) for stack in alone)
        one, two = (
            packed_product(pack_activations(x), part, out=nothing(rows, part.rows), workspace=ROOM) for part in (gate, up)
        )
        dequantized = pack_activations(gated_activation(torch.cat([one, two], 1), "silu"))
        answer = packed_product(dequantized, down, out=nothing(rows, down.rows), workspace=ROOM)[:, :hidden].float()
        for row, place in (ids == number).nonzero().tolist():
            expected[row] += answer[row] * shares[row, place]
    assert torch.equal(bank_of(tensors)(x, ids, shares, 1.0), expected.to(DTYPE))


@on_device
@pytest.mark.parametrize("kind", list(SPAN_BYTES))
def test_an_expert_has_the_bits_of_a_product_with_its_matrix(kind: str) -> None:
    """For 1 to 300 rows of an expert, in tiles of any height; tests/backends/torch/test_packed_kernels.py does so on a CPU."""
    width = 1536 if QUANT_TYPES[kind].block_values == SPAN else 1088
    count, outputs = 9, 200
    made = read_packed_weight(
        [random_tensor("w", (count, outputs, width), kind, RNG, width**-0.5)],
        pad=1,
        copier=HostToDeviceCopy(DEVICE),
        device=DEVICE,
    )
    activations = pack_activations(normal(300, width, seed=1))
    members = (300, 257, 65, 33, 9, 8, 7, 2, 1)  # rows of each expert; expert i is at place i of a row
    full = [
        packed_product(activations, made.matrix(number), out=nothing(300, outputs), workspace=ROOM) for number in range(count)
    ]
    for height in (8, 16, 32, 64):
        ids = torch.arange(count, device=DEVICE).expand(300, count).clone()
        for number, rows in enumerate(members):
            ids[rows:, number] = count  # no expert
        routes = route(ids, torch.ones(300, count, device=DEVICE), count=count + 1, height=height)
        routes.tiles[routes.tiles[:, 0] == count, 2] = 0
        found = packed_rows.experts_product(activations, made, routes, divide=count, out=nothing(300 * count, outputs))
        for number, rows in enumerate(members):
            assert torch.equal(found.view(300, count, -1)[:rows, number], full[number][:rows]), (height, rows)


@on_device
@pytest.mark.parametrize("pdl", [False, True])
def test_captured_experts_follow_other_routes_when_replayed(pdl: bool) -> None:
    """Routing never synchronizes with the host, so a captured graph handles routes that it has not seen."""
    tensors = stacks(("Q4_K", "Q4_K", "Q6_K"), count=16, width=256, hidden=512)
    bank = bank_of(tensors, pdl=pdl and torch.cuda.get_device_capability() >= (9, 0))
    x, (ids, shares) = normal(5, 512, seed=3), chosen(5, count=16, used=4)
    bank(x, ids, shares, 1.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = bank(x, ids, shares, 1.0)
    for seed in range(3):
        others, weights = chosen(5, count=16, used=4, seed=20 + seed)
        ids.copy_(others)
        shares.copy_(weights)
        graph.replay()
        assert torch.equal(recorded, bank(x, others, weights, 1.0))


MIXTURE = MoeSpec(experts=8, used=2, width=256, shared=256, shared_gate=True)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("tied", "mixture"), [(True, None), (False, None), (True, MIXTURE)])
def test_a_packed_model_gives_the_same_bits_alone_and_in_a_batch(tied: bool, mixture: MoeSpec | None) -> None:
    """Embedding, products, experts and head all read packed weights; a tied embedding is loaded once."""
    spec = tiny_spec(tied=tied)
    if mixture is not None:
        spec = replace(spec, layers=tuple(replace(layer, feed_forward=mixture) for layer in spec.layers))
    gc.collect()  # weights of earlier backends
    backend = TorchBackend(
        spec,
        quantized_weights(spec, ("Q6_K", "Q4_K", "Q5_K")),
        dtype="packed-f16" if INTERPRETED else "packed-bf16",
        device=str(DEVICE),
        lanes=2,
        pages=4,
        page_size=16,
        max_context=32,
        ops=PackedOps(DEVICE, DTYPE),
        check=False,
    )

    def row(lane: int, prompt: tuple[int, ...]) -> Row:
        params = SamplingParams(temperature=0.7, checksums=True, max_tokens=4)
        return Row(f"r{lane}", lane, ((lane,),), 0, prompt, (), len(prompt), True, params, History(prompt))

    rows = [row(0, (1, 5, 9, 200)), row(1, (7, 8))]
    both = backend.collect(backend.submit(Plan(tuple(rows)))).rows
    for one, expected in zip(rows, both, strict=True):
        (alone,) = backend.collect(backend.submit(Plan((one,)))).rows
        assert alone.sampled == expected.sampled
        assert alone.sampled[0].checksum is not None
    tables = [found for found in gc.get_objects() if type(found) is PackedWeight and found.rows == 320]  # 300 tokens, padded
    assert len(tables) == (1 if tied else 2)
