"""The tensor core layout: a slow walk over the lanes and registers of a warp finds the values of the file bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onedraw.backends.packing import SPAN_BYTES, UNIT_ROWS, gpu_packed_bytes, gpu_unit_bytes
from onedraw.backends.torch.ops.cuda.packed import tensor_core_layout as fragments_module
from onedraw.backends.torch.ops.cuda.packed.tensor_core_layout import (
    PackedWeight,
    empty_packed_weight,
    fill_packed_weight,
    row_slices,
)
from onedraw.checkpoints.dequantize import QUANT_TYPES, dequantize_into
from onedraw.checkpoints.random_weights import random_blocks

CPU = torch.device("cpu")
KINDS_HERE = tuple(SPAN_BYTES)
FIVES, WHOLES = ("Q5_0", "Q5_1", "Q5_K"), ("Q4_K", "Q5_K")
CENTRES = {"Q4_0": 8, "Q5_0": 16, "Q6_K": 32}
TWICE = (0, 1, 2, 3, 4, 6, 8, 12)


class Warp:
    """One unit in the registers of a warp, where each of 32 lanes loads 16 bytes at a time."""

    def __init__(self, unit: np.ndarray, kind: str) -> None:
        self.kind = kind
        loads, high = (8 if kind == "Q8_0" else 4), 1 if kind in FIVES else 2 if kind == "Q6_K" else 0
        self.codes = unit[: loads * 512].view("<u4").reshape(loads, 32, 4)  # load, lane, word
        self.high = unit[loads * 512 : (loads + high) * 512].view("<u4").reshape(high, 32, 4)
        self.scales = unit[(loads + high) * 512 :]

    def code(self, lane: int, i: int, register: int, e: int) -> int:
        """Return the code in half e of a register of the left operand in step i."""
        u, h = register >> 1, register & 1
        if self.kind == "Q8_0":
            word = int(self.codes[i // 2, lane, 2 * (i % 2) + u])
            return (word >> 8 * (e + 2 * h) & 255 ^ 128) - 128
        half = int(self.codes[i // 4, lane, i % 4]) >> 16 * e
        if self.kind in ("MXFP4", "NVFP4"):
            size = TWICE[half >> 3 * register & 7]
            return -size if half >> (13, 14, 12, 15)[register] & 1 else size
        code = half >> 4 * register & 15
        if self.kind in FIVES:
            place = 8 * (i % 4 // 2) + 2 * (i % 2) + u + 4 * h + 16 * e
            code |= (int(self.high[0, lane, i // 4]) >> place & 1) << 4
        if self.kind == "Q6_K":
            place = 8 * (i % 2) + 2 * u + 4 * h + 16 * e
            code |= (int(self.high[i // 8, lane, i // 2 % 4]) >> place & 3) << 4
        return code - CENTRES.get(self.kind, 0)

    def scale(self, lane: int, i: int, h: int) -> tuple[np.float32, np.float32]:
        """Return the scale and the minimum of output g + 8 h in step i, as float32."""
        g, block, zero = lane // 4, i // 2, np.float32(0)
        if self.kind in WHOLES:
            own = self.scales[16 * g : 16 * g + 16]
            low = int(own[4 * h + block % 4])
            small = low & 63 if block < 4 else low >> 6 << 4 | int(own[8 + block % 4]) >> 4 * h & 15
            words = self.scales[128:].view("<u4").reshape(8, 4)[g].tolist()  # of the four lanes of a group
            factor = bytes((word >> 12 & 15) | (word >> 28) << 4 for word in words)
            minimum = words[block // 2] >> (6 * h + 16 * (block % 2)) & 63
            whole = own[12:].view("<f2").astype(np.float32)[h]
            return whole * np.float32(small), np.frombuffer(factor, "<f2").astype(np.float32)[h] * np.float32(minimum)
        if self.kind == "Q6_K":
            whole = self.scales[256:].view("<f2").astype(np.float32)[2 * g + h]
            return whole * np.float32(self.scales[32 * g + 16 * h + i].view(np.int8)), zero
        if self.kind == "NVFP4":
            byte, factor = int(self.scales[32 * g + 16 * h + i]), self.scales[256:].view("<f4")[2 * g + h]
            size = np.ldexp(byte & 7, -9) if byte < 8 else np.ldexp(8 + (byte & 7), (byte >> 3) - 10)
            return np.float32(size / 2) * factor, zero
        if self.kind == "MXFP4":
            return np.ldexp(np.float32(1), int(self.scales[16 * g + 8 * h + block]) - 128), zero
        pair = self.scales.view("<f2").astype(np.float32).reshape(8, 2, 8, -1)[g, h, block]
        return pair[0], pair[1] if len(pair) > 1 else zero

    def dequantized(self) -> np.ndarray:
        out = np.empty((16, 256), np.float32)
        for lane in range(32):
            for i in range(16):
                for register in range(4):
                    h = register & 1
                    scale, min_scales = self.scale(lane, i, h)
                    for e in range(2):
                        value = np.float32(self.code(lane, i, register, e)) * scale
                        value = (
                            value - min_scales
                            if self.kind in WHOLES
                            else value + min_scales
                            if self.kind in ("Q4_1", "Q5_1")
                            else value
                        )
                        out[lane // 4 + 8 * h, 16 * i + 8 * (register >> 1) + 2 * (lane % 4) + e] = value
        return out


def dequantized(made: PackedWeight, *, tall: int, span: int) -> np.ndarray:
    return Warp(made.units[tall, span].numpy(), made.kind).dequantized()


def stored_values(raw: np.ndarray, kind: str, width: int) -> np.ndarray:
    out = np.empty((len(raw), width), np.float32)
    dequantize_into(raw.reshape(-1), kind, out)
    return out


@pytest.mark.parametrize("kind", KINDS_HERE)
def test_the_registers_of_a_warp_hold_the_values_of_the_file(kind: str) -> None:
    raw = random_blocks(kind, 16, 512, np.random.default_rng(1))
    made = empty_packed_weight(kind, rows=16, width=512, device=CPU)
    fill_packed_weight(made, torch.from_numpy(raw), first=0)
    expected = stored_values(raw, kind, 512)
    for span in range(2):
        assert np.array_equal(dequantized(made, tall=0, span=span), expected[:, 256 * span :][:, :256])


@pytest.mark.parametrize("kind", KINDS_HERE)
def test_rows_may_be_filled_in_any_slices_and_padding_is_zero(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    width = 256 if QUANT_TYPES[kind].block_values == 256 else 192
    monkeypatch.setattr(fragments_module, "VALUES_AT_ONCE", 16 * width)
    raw = random_blocks(kind, 21, width, np.random.default_rng(2))
    made = empty_packed_weight(kind, rows=40, width=width, device=CPU)
    slices = [part for _, part in row_slices(1, 21, width)]
    assert [part.stop - part.start for part in slices] == [16, 5]
    for part in slices:
        fill_packed_weight(made, torch.from_numpy(raw)[part], first=5 + part.start)
    expected = np.zeros((48, 256), np.float32)
    expected[5:26, :width] = stored_values(raw, kind, width)
    found = np.concatenate([dequantized(made, tall=tall, span=0) for tall in range(3)])
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("kind", KINDS_HERE)
def test_units_have_the_stored_bytes_and_the_planned_size(kind: str) -> None:
    factors = 4 * UNIT_ROWS if kind == "NVFP4" else 0  # factors, which a file stores once per matrix
    assert gpu_unit_bytes(kind) == UNIT_ROWS * 256 // QUANT_TYPES[kind].block_values * QUANT_TYPES[kind].block_bytes + factors
    assert gpu_unit_bytes(kind) % 16 == 0  # loads of 16 bytes
    for rows, width in ((32, 512), (7, 768), (33, 256)):
        assert empty_packed_weight(kind, rows=rows, width=width, device=CPU).nbytes == gpu_packed_bytes((rows, width), kind)
        assert empty_packed_weight(kind, rows=rows, width=width, device=CPU, count=3).nbytes == gpu_packed_bytes(
            (3, rows, width), kind
        )


def test_each_matrix_of_a_stack_is_stored_like_a_single_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several matrices are filled at once, or in parts, also with the rows of another stack below them."""
    width, count = 256, 5
    above, below = (random_blocks("Q5_K", count * rows, width, np.random.default_rng(rows)) for rows in (21, 8))
    for at_once in (16 * width, 48 * width, 1 << 24):
        monkeypatch.setattr(fragments_module, "VALUES_AT_ONCE", at_once)
        made = empty_packed_weight("Q5_K", rows=40, width=width, device=CPU, count=count)
        for stack, rows, first in ((above, 21, 0), (below, 8, 32)):
            raw = torch.from_numpy(stack).view(count, rows, -1)
            for matrices, part in row_slices(count, rows, width):
                fill_packed_weight(made, raw[matrices, part], first=first + part.start, number=matrices.start)
        for number in range(count):
            alone = empty_packed_weight("Q5_K", rows=40, width=width, device=CPU)
            fill_packed_weight(alone, torch.from_numpy(above[number * 21 : (number + 1) * 21]), first=0)
            fill_packed_weight(alone, torch.from_numpy(below[number * 8 : (number + 1) * 8]), first=32)
            assert torch.equal(made.matrix(number).units, alone.units)
            assert made.matrix(number).count == 1
