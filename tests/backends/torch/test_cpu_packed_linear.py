"""Products with packed weights on a CPU: every instruction set against numpy, and a row has the same bits in any batch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from onedraw.backends.torch.ops.cpu.library import build, supported_instruction_sets
from onedraw.backends.torch.ops.cpu.ops import CpuOps, Packing
from onedraw.backends.torch.ops.cpu.packed_linear import CpuLinear
from onedraw.checkpoints.base import StoredTensor
from onedraw.checkpoints.dequantize import QUANT_TYPES, dequantize_into
from onedraw.settings import default_cache_dir
from tests.support.quantized_weights import FLOAT_KINDS, QUANTIZED_KINDS, random_blocks, random_tensor

LIBRARY = build(default_cache_dir()).library
if LIBRARY is None:
    pytest.skip("no C compiler", allow_module_level=True)
PATHS = supported_instruction_sets(LIBRARY)
GROUP = 32


def ops(path: str | None = None, *, threads: int = 2, coded: bool = True) -> CpuOps:
    assert LIBRARY is not None
    return CpuOps(LIBRARY, threads=threads, packing=Packing(as_stored=True, coded=coded), path=path)


def linear_of(tensors: list[StoredTensor], bias: torch.Tensor | None = None, pad: int = 1, **named: object) -> CpuLinear:
    found = ops(**named).packed_linear(tensors, bias=bias, pad=pad, pad_columns=1)  # type: ignore[arg-type]
    assert found is not None
    return found


def widths(kind: str) -> list[int]:
    return (
        [256, 512, 768]
        if QUANT_TYPES[kind].block_values == 256
        else [32, 96, 160, 576]
        if QUANT_TYPES[kind].block_values == 32
        else [1, 7, 72, 130]
    )


# ---------------------------------------------------------------------- the reference in numpy


def codes_of(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantize activations in groups of 32: integer codes [rows, groups, 32] and scales [rows, groups]."""
    groups = x.reshape(len(x), -1, GROUP).astype(np.float32)
    largest = np.abs(groups).max(-1)
    with np.errstate(divide="ignore"):
        up = np.where(largest < 1e-35, np.float32(0), np.float32(127) / largest)
    return np.rint(groups * up[..., None]).astype(np.int64), np.where(largest < 1e-35, np.float32(0), largest / np.float32(127))


def reference_product(x: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the product with 8-bit activations in double precision, and the sum of the absolute values of its terms."""
    codes, scales = codes_of(x)
    values = (codes * scales[..., None].astype(np.float64)).reshape(len(x), -1)
    return values @ weight.astype(np.float64).T, np.abs(values) @ np.abs(weight.astype(np.float64)).T


def dequantized(tensor: StoredTensor) -> np.ndarray:
    out = np.empty(tensor.shape, np.float32)
    dequantize_into(tensor.data, tensor.kind, out)
    return out


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", QUANTIZED_KINDS)
def test_a_product_is_close_to_the_reference(kind: str, path: str) -> None:
    rng = np.random.default_rng(1)
    for width in widths(kind):
        for rows, height in ((1, 1), (3, 16), (9, 33), (17, 70)):
            tensor = random_tensor("w", (height, width), kind, rng)
            x = rng.standard_normal((rows, width), dtype=np.float32) * np.exp(rng.standard_normal((rows, width))).astype(
                np.float32
            )
            found = linear_of([tensor], path=path)(torch.from_numpy(x)).numpy()
            expected, size = reference_product(x, dequantized(tensor))
            # Minima cancel most of the sum of codes, so the error is relative to the sum of absolute values.
            slack = size + np.abs(x) @ np.full((width, height), np.abs(dequantized(tensor)).max())
            assert (np.abs(found - expected) <= 1e-6 * slack).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", QUANTIZED_KINDS)
def test_sums_of_integers_are_exact(kind: str, path: str) -> None:
    """With scales of 1 and integer activations up to 127 every sum is an integer that float32 represents. A third of the blocks
    have the largest codes, and two rows have the largest activations, so that a sum in too few bits overflows."""
    rng = np.random.default_rng(2)
    width, height = 256, 48
    raw = random_blocks(kind, height, width, rng)
    blocks = raw.reshape(-1, QUANT_TYPES[kind].block_bytes)
    one = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    at = 208 if kind == "Q6_K" else 0
    blocks[:, at : at + 2] = one
    if kind.endswith("_1"):
        blocks[:, 2:4] = np.frombuffer(np.float16(-7).tobytes(), np.uint8)
    if kind == "Q8_0":
        blocks[::3, 2:] = 128  # -128 here and 127 below: the extreme codes
        blocks[1::3, 2:] = 127
    if kind == "Q6_K":
        blocks[:, 192:208] = rng.integers(0, 3, (len(blocks), 16)).astype(np.uint8)
    if kind in ("Q4_K", "Q5_K"):  # scales and minima of 1, whose upper halves share bytes
        blocks[:, 2:4], blocks[:, 4:12], blocks[:, 12:16] = one, 1, 0x11
    codes = {"Q4_1": slice(4, None), "Q5_1": slice(4, None), "Q4_K": slice(16, None), "Q5_K": slice(16, None)}
    if kind != "Q8_0":
        blocks[2::3, codes.get(kind, slice(0, 192) if kind == "Q6_K" else slice(2, None))] = 255
    tensor = StoredTensor("w", (height, width), kind, blocks.reshape(-1))
    x = rng.integers(-127, 128, (13, width)).astype(np.float32)
    x[:, ::GROUP] = 127
    x[1] = 127
    x[2] = -127
    exact = x.astype(np.int64) @ dequantized(tensor).astype(np.int64).T
    for rows in (1, 2, 5, 13):
        found = linear_of([tensor], path=path)(torch.from_numpy(x[:rows].copy())).numpy()
        assert np.array_equal(found.astype(np.int64), exact[:rows])
        assert np.array_equal(found, found.astype(np.int64))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", [*QUANTIZED_KINDS, *FLOAT_KINDS])
def test_float_activations_give_the_bits_of_a_float32_weight(kind: str, path: str) -> None:
    rng = np.random.default_rng(3)
    for width in widths(kind):
        tensor = random_tensor("w", (75, width), kind, rng)
        x = torch.from_numpy(rng.standard_normal((21, width), dtype=np.float32))
        kept = linear_of([tensor], path=path, coded=False)(x)
        plain = ops(path).linear(torch.from_numpy(dequantized(tensor)))(x)
        assert torch.equal(kept, plain)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", [*QUANTIZED_KINDS, *FLOAT_KINDS])
def test_embedding_rows_are_the_values_of_the_checkpoint(kind: str, path: str) -> None:
    rng = np.random.default_rng(4)
    for width in widths(kind):
        tensor = random_tensor("w", (75, width), kind, rng)
        wanted = torch.tensor([0, 74, 3, 3, 31, 32, 16])
        found = linear_of([tensor], pad=64, path=path).rows(wanted)
        assert torch.equal(found, torch.from_numpy(dequantized(tensor))[wanted])


# ---------------------------------------------------------------------- batch invariance


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("coded", [True, False])
@pytest.mark.parametrize("kind", [*QUANTIZED_KINDS, *FLOAT_KINDS])
def test_a_row_has_the_same_bits_in_any_batch(kind: str, coded: bool, path: str) -> None:
    """More than a thousand random cases per kind: alone, in any slice of any batch, with any number of threads."""
    rng = np.random.default_rng(5)
    cases, wanted = 0, (1100 if path == PATHS[0] else 200) // (1 if coded else 4)
    teams = [ops(path, threads=threads, coded=coded) for threads in (1, 2, 3)]
    while cases < wanted:
        width, height = int(rng.choice(widths(kind))), int(rng.integers(1, 100))
        tensor = random_tensor("w", (height, width), kind, rng)
        linears = [team.packed_linear([tensor], bias=None, pad=1, pad_columns=1) for team in teams]
        x = torch.from_numpy(rng.standard_normal((64, width), dtype=np.float32))
        whole = linears[0](x)  # type: ignore[misc]
        for _ in range(55):
            count = int(rng.integers(1, 65))
            first = int(rng.integers(0, 65 - count))
            linear = linears[int(rng.integers(0, 3))]
            assert torch.equal(linear(x[first : first + count].contiguous()), whole[first : first + count])  # type: ignore[misc]
            cases += 1


def test_weights_of_different_kinds_are_joined_into_one_product() -> None:
    rng = np.random.default_rng(6)
    tensors = [
        random_tensor(kind, (height, 256), kind, rng) for kind, height in (("Q4_1", 33), ("Q6_K", 5), ("F16", 40), ("Q8_0", 64))
    ]
    bias, x = (torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)) for shape in ((142,), (11, 256)))
    together = linear_of(tensors, bias)(x)
    apart = torch.cat([linear_of([tensor])(x) for tensor in tensors], dim=1) + bias
    assert torch.equal(together, apart)


def test_padding_adds_zero_columns_and_reads_no_padded_inputs() -> None:
    rng = np.random.default_rng(7)
    tensors = [random_tensor("a", (40, 96), "Q4_0", rng), random_tensor("b", (70, 96), "Q5_1", rng)]
    x = torch.from_numpy(rng.standard_normal((5, 128), dtype=np.float32))
    found = ops().packed_linear(tensors, bias=None, pad=64, pad_columns=64)
    assert found is not None
    assert (found.in_features, found.out_features) == (128, 64 + 128)
    y = found(x)
    plain = linear_of(tensors)(x[:, :96].contiguous())
    assert torch.equal(torch.cat([y[:, :40], y[:, 64:134]], dim=1), plain)
    assert not y[:, 40:64].any()
    assert not y[:, 134:].any()


def test_rows_may_be_strided_and_there_may_be_none() -> None:
    rng = np.random.default_rng(8)
    memory = np.zeros(33 * 192 * 18 // 32 + 7, np.uint8)
    for shift in (0, 1, 3, 7):
        raw = random_blocks("Q4_0", 33, 192, np.random.default_rng(9)).reshape(-1)
        memory[shift : shift + len(raw)] = raw
        tensor = StoredTensor("w", (33, 192), "Q4_0", memory[shift : shift + len(raw)])
        linear = linear_of([tensor])
        space = torch.from_numpy(rng.standard_normal(4 * 192 + shift, dtype=np.float32))
        x = space[shift:].view(4, 192)
        assert torch.equal(linear(x), linear(x.clone()))
        assert linear(x[:0]).shape == (0, 33)
        assert linear.rows(torch.empty(0, dtype=torch.int64)).shape == (0, 192)


@pytest.mark.parametrize("path", PATHS)
def test_zeros_and_subnormal_values_give_zeros(path: str) -> None:
    tensor = random_tensor("w", (20, 64), "Q4_1", np.random.default_rng(10))
    x = torch.zeros(3, 64)
    x[1] = 1e-40
    x[2] = -1e-36
    assert not linear_of([tensor], path=path)(x).any()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("broken", [float("inf"), float("-inf"), float("nan")])
def test_a_non_finite_value_affects_only_its_row(broken: float, path: str) -> None:
    tensor = random_tensor("w", (20, 64), "Q8_0", np.random.default_rng(11))
    linear = linear_of([tensor], path=path)
    x = torch.from_numpy(np.random.default_rng(14).standard_normal((9, 64), dtype=np.float32))
    clean = linear(x)
    x[4, 40] = broken
    found = linear(x)
    assert found[4].isnan().all()
    assert torch.equal(found[[0, 1, 2, 3, 5, 6, 7, 8]], clean[[0, 1, 2, 3, 5, 6, 7, 8]])


def test_a_forked_process_computes_the_same_without_threads() -> None:
    """Threads do not survive a fork, so the child process computes alone."""
    code = """
import os
import numpy as np, torch
from tests.backends.torch.test_cpu_packed_linear import linear_of
from tests.support.quantized_weights import random_tensor
linear = linear_of([random_tensor("w", (300, 512), "Q4_1", np.random.default_rng(0))], threads=3)
x = torch.from_numpy(np.random.default_rng(1).standard_normal((9, 512), dtype=np.float32))
before = linear(x)
for _ in range(40):  # at some of them a thread is just going to sleep, with a lock in its hand
    assert torch.equal(linear(x), before)
    child = os.fork()
    if not child:
        os._exit(0 if all(torch.equal(linear(x), before) for _ in range(2)) else 1)
    assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=300)


def test_more_threads_than_cores_change_nothing() -> None:
    tensor = random_tensor("w", (500, 256), "Q6_K", np.random.default_rng(12))
    x = torch.from_numpy(np.random.default_rng(13).standard_normal((40, 256), dtype=np.float32))
    alone = linear_of([tensor], threads=1)(x)
    crowded = linear_of([tensor], threads=13)
    assert all(torch.equal(crowded(x), alone) for _ in range(50))


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q6_K", "F32"])
def test_the_first_outputs_have_the_bits_of_the_whole_product(kind: str) -> None:
    whole = linear_of([random_tensor("w", (160, 256), kind, np.random.default_rng(3), 0.1)])
    first = whole.first_outputs(96)
    x = torch.randn(5, 256)
    assert first.out_features == 96
    assert torch.equal(first(x), whole(x)[:, :96])
    for count in (0, 40, 160, 320):  # not a whole number of panels, or no fewer outputs
        assert whole.first_outputs(count) is whole
