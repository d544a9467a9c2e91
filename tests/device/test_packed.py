"""Products of packed weights, on an accelerator or under Triton's interpreter: the weights of the file, bits of the row alone."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import Tensor

from onedraw.backends.packing import SPAN, SPANS
from onedraw.checkpoints.quants import KINDS
from onedraw.models.views import Columns
from onedraw.types import History, Plan, Row, SamplingParams
from tests.packed import packed_weights, stored, tiny_spec

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs a CUDA device"),
]

if torch.cuda.is_available() or INTERPRETED:
    from onedraw.backends.torch.backend import TorchBackend
    from onedraw.backends.torch.kernels.blocks import Blocks, numbers
    from onedraw.backends.torch.kernels.packed_linear import (
        Courier,
        PackedTile,
        load_bank,
        load_blocks,
        packed_linear,
        packed_product,
        unpacked_rows,
    )
    from onedraw.backends.torch.kernels.packed_ops import PackedOps
    from onedraw.backends.torch.kernels.triton_moe import experts, route

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() and not INTERPRETED else "cpu")
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter cuts numbers to bf16, and does not round
ROUNDING = 6e-4 if INTERPRETED else 4e-3
ROWS = (1, 17) if INTERPRETED else (1, 2, 5, 16, 17, 40, 64, 100, 200, 300)
MOST = 20 if INTERPRETED else 400
RNG = np.random.default_rng(0)


def normal(*shape: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * spread).to(DEVICE, DTYPE)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def weight(kind: str, rows: int, width: int) -> tuple[Blocks, Tensor]:
    """In blocks, and as the file's numbers in float32."""
    tensor = stored("w", (rows, width), kind, RNG, width**-0.5)
    made = load_blocks([tensor], pad=1, courier=Courier(DEVICE), device=DEVICE)
    return made, torch.from_numpy(tensor.float32()).to(DEVICE)


def product(x: Tensor, blocks: Blocks, tile: PackedTile | None = None) -> Tensor:
    out = torch.full((len(x), blocks.rows), torch.nan, dtype=x.dtype, device=x.device)
    return packed_product(x, blocks, out=out, tile=tile)


@pytest.mark.parametrize("kind", list(SPANS))
def test_weights_are_those_of_the_file_bit_by_bit(kind: str) -> None:
    width = 768 if KINDS[kind].values == SPAN else 576
    blocks, expected = weight(kind, 40, width)
    assert torch.equal(numbers(blocks), expected)
    assert torch.equal(unpacked_rows(blocks, None, out=torch.full((40, width), torch.nan, device=DEVICE)), expected)
    wanted = torch.tensor([3, 39, 0, 3], device=DEVICE)
    assert torch.equal(unpacked_rows(blocks, wanted, out=torch.empty(4, width, device=DEVICE)), expected[wanted])


@pytest.mark.parametrize("kind", list(SPANS))
def test_a_packed_product_is_right_and_has_the_bits_of_its_row(kind: str) -> None:
    width = (256 if INTERPRETED else 1536) if KINDS[kind].values == SPAN else 320
    blocks, expected = weight(kind, 24 if INTERPRETED else 1000, width)
    x = normal(MOST, width, seed=1)
    full = product(x, blocks)
    assert error(full, x.double() @ expected.double().t()) < ROUNDING
    for rows in ROWS:
        assert torch.equal(product(x[:rows], blocks), full[:rows]), rows
        assert torch.equal(product(x[3 : 3 + rows], blocks), full[3 : 3 + rows]), rows
    if not INTERPRETED:
        for tile in (PackedTile(16, 64, 4, 3), PackedTile(64, 32, 2, 2), PackedTile(8, 16, 1, 3), PackedTile(64, 128, 8, 2, 8)):
            assert torch.equal(product(x, blocks, tile), full), tile


@pytest.mark.parametrize(("kind", "width"), [("Q4_K", 1280), ("Q8_0", 2112), ("Q5_0", 1184)])
def test_segments_give_the_same_bits_whoever_computes_them(kind: str, width: int) -> None:
    blocks, expected = weight(kind, 16 if INTERPRETED else 1000, width)
    x, bias, residual = normal(3, width, seed=8), normal(blocks.rows, seed=9), normal(3, blocks.rows, seed=10)
    found = [
        packed_product(x, blocks, out=torch.empty_like(residual), bias=bias, residual=residual, tile=tile)
        for tile in (PackedTile(8, 16, 1, 3, split=True), PackedTile(16, 16, 1, 3), PackedTile(16, 32, 2, 2, 8, split=True))
    ]
    assert error(found[0], x.double() @ expected.double().t() + bias.double() + residual.double()) < ROUNDING
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_weights_of_several_kinds_stand_side_by_side_with_bias_and_residual() -> None:
    tensors = [
        stored(kind, (rows, 256), kind, RNG, 1 / 16) for kind, rows in (("Q4_K", 24), ("Q4_K", 9), ("Q6_K", 8), ("F32", 7))
    ]
    heights = [24, 16, 8, 8]  # padded to eight rows
    bias, x, residual = normal(56, seed=2), normal(9, 256, seed=3), normal(9, 56, seed=4)
    made = packed_linear(tensors, dtype=DTYPE, device=DEVICE, courier=Courier(DEVICE), bias=bias, pad=8)
    assert made is not None
    assert [type(part).__name__ for part in made.parts] == ["Blocks", "Blocks", "Tensor"]
    dense = [torch.nn.functional.pad(torch.from_numpy(t.float32()), (0, 0, 0, -len(t.float32()) % 8)) for t in tensors]
    assert [len(matrix) for matrix in dense] == heights
    expected = x.double() @ torch.cat(dense).double().to(DEVICE).t() + bias.double()
    assert error(made(x), expected) < ROUNDING
    assert error(made(x, residual), expected + residual.double()) < ROUNDING
    assert packed_linear(tensors[3:], dtype=DTYPE, device=DEVICE, courier=Courier(DEVICE)) is None


def test_columns_stay_as_stored_and_rows_come_in_their_order() -> None:
    tensor = stored("w", (16, 512), "Q4_K", RNG, 512**-0.5)
    order = np.arange(512).reshape(4, 128)[[2, 0, 3, 1]].reshape(-1)
    ours = Columns(tensor, order)
    made = packed_linear([ours], dtype=DTYPE, device=DEVICE, courier=Courier(DEVICE))
    assert made is not None
    x = normal(5, 512, seed=5)
    assert error(made(x), x.double() @ torch.from_numpy(ours.float32()).to(DEVICE).double().t()) < ROUNDING


@pytest.mark.parametrize("kinds", [("Q4_K", "Q4_K", "Q6_K"), ("Q4_K", "Q5_K", "Q8_0")])
def test_experts_in_blocks_answer_like_experts_in_numbers(kinds: tuple[str, str, str]) -> None:
    count, width, hidden, used, rows = 2, 256, 256, 1, 4
    gate, up = (stored("w", (count, width, hidden), kind, RNG, 1 / 16) for kind in kinds[:2])
    down = stored("w", (count, hidden, width), kinds[2], RNG, 1 / 16)
    bank = load_bank([gate, up], down, "silu", pad=8, courier=Courier(DEVICE), device=DEVICE)
    generator = torch.Generator().manual_seed(6)
    ids = torch.stack([torch.randperm(count, generator=generator)[:used] for _ in range(rows)]).to(DEVICE)
    shares = torch.rand(rows, used, generator=generator).to(DEVICE)
    x = normal(rows, hidden, seed=7)
    stacks = [torch.from_numpy(t.float32()).to(DEVICE, DTYPE) for t in (gate, up, down)]
    expected = experts(
        x, route(ids, shares, count=count), gate_up=torch.cat(stacks[:2], 1), down=stacks[2], activation="silu", scale=2.0
    )
    found = bank(x, ids, shares, 2.0)
    assert error(found, expected) < 3 * ROUNDING
    assert torch.equal(bank(x[:1], ids[:1], shares[:1], 2.0), found[:1])


@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_model_answers_a_row_the_same_alone_and_in_a_batch(tied: bool) -> None:
    """Embedding, products and head all read blocks; a tied table is there once."""
    spec = tiny_spec(tied=tied)
    dtype = "packed-f16" if INTERPRETED else "packed-bf16"
    backend = TorchBackend(
        spec,
        packed_weights(spec, ("Q6_K", "Q4_K", "Q5_K")),
        dtype=dtype,
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
        assert alone.chosen == expected.chosen
        assert alone.chosen[0].checksum is not None
    assert (backend._stack.head.rows == backend._stack._embedding) == tied
