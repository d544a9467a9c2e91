"""Quantized weights in the tensor-core fragment layout: stored blocks → units of 16 outputs by 256 inputs, reordered per lane.

In: the stored bytes of a matrix, on any device. Out: a `PackedWeight` with the same bits in another order and of the same size,
except for the factors of NVFP4, which a file stores once per matrix and a unit stores per output.

A unit is read by one warp. Lane 4 g + t holds outputs g and g + 8 (h = 0, 1) at inputs 16 i + 8 u + 2 t + e (u, e = 0, 1) of
every step i of sixteen inputs: its fragment of operand A of `mma.m16n8k16`. Axes: U units along the outputs, S spans of 256
inputs. A code is the stored integer of a weight, and high bits are those that a type stores apart from the others. A unit
consists of, in this order:
  codes   four bits: 4 loads of 16 bytes per lane, a word per step, the code at bits 8 u + 4 h + 16 e. Eight bits: 8 loads, two
          words per step, u by u, byte e + 2 h. MXFP4, NVFP4: three bits of magnitude at 3 (2 u + h) + 16 e, and the four signs,
          for 2 u + h = 0 … 3, at 13, 14, 12, 15.
  high    the fifth bit: one load, a word per four steps i, at bits 8 (i // 2) + 2 (i % 2) + u + 4 h + 16 e. Two bits of Q6_K:
          2 loads, a word per two steps, at bits 8 i + 2 u + 4 h + 16 e.
  scales  Q4_K, Q5_K: 16 bytes per g: the stored bytes 4 … 8 of both outputs, the low nibbles of bytes 12 … 16 (h = 1 in the high
          nibble), both span scales; then a word per lane: minima 2 t + e at bits 6 h + 16 e, and byte t of both outputs' scales
          of minima, its nibbles at bits 12 and 28. Q6_K, NVFP4: per g the sixteen scale bytes of either output, then both span
          scales; for NVFP4 these are float32, the factor of the matrix, so that concatenated matrices keep their own factors.
          Other types: per g the eight scales of either output as stored, each followed by its minimum if the type has minima.
`weight_units.cuh` reads this layout. Padding bits are zero and represent zero weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from onedraw.backends.packing import SPAN, UNIT_ROWS, gpu_unit_bytes
from onedraw.checkpoints.dequantize import QUANT_TYPES

VALUES_AT_ONCE = 1 << 24  # weights reordered at a time, which bounds the temporary memory
SIGN_BITS = (13, 14, 12, 15)  # MXFP4, NVFP4: position of the sign in a halfword, by 2 u + h


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A quantized weight [rows, width], or a stack of `count` such weights for experts."""

    kind: str
    rows: int  # rows of one matrix of the stack
    width: int  # inputs, before padding to whole spans
    units: Tensor  # [count * U, S, bytes of a unit] uint8, for U = rows / 16 units and S spans
    counters: Tensor  # int32 [rows / 16 + 1]: finished segments per unit during a product; zero between products
    count: int = 1

    @property
    def nbytes(self) -> int:
        return self.units.nbytes

    @property
    def spans(self) -> int:
        return self.units.shape[1]

    @property
    def unit_count(self) -> int:
        """U, the number of units along the outputs of one matrix."""
        return len(self.units) // self.count

    def units_slice(self, units: slice) -> PackedWeight:
        """A view of a range of units of a single matrix."""
        rows = min(self.rows, units.stop * UNIT_ROWS) - units.start * UNIT_ROWS
        return PackedWeight(self.kind, rows, self.width, self.units[units], self.counters[units])

    def matrix(self, number: int) -> PackedWeight:
        """A view of matrix `number` of the stack."""
        own = self.units[number * self.unit_count : (number + 1) * self.unit_count]
        return PackedWeight(self.kind, self.rows, self.width, own, self.counters)


def empty_packed_weight(kind: str, *, rows: int, width: int, device: torch.device, count: int = 1) -> PackedWeight:
    unit_count, spans = -(-rows // UNIT_ROWS), -(-width // SPAN)
    units = torch.zeros(count * unit_count, spans, gpu_unit_bytes(kind), dtype=torch.uint8, device=device)
    return PackedWeight(kind, rows, width, units, torch.zeros(unit_count + 1, dtype=torch.int32, device=device), count)


def fill_packed_weight(weight: PackedWeight, raw: Tensor, *, first: int, number: int = 0, factors: Tensor | None = None) -> None:
    """Write stored rows [n, bytes] to rows first … first + n of matrix `number`, or stored rows [m, n, bytes] to those of
    matrices number … number + m. Each row may be filled only once, because rows are combined with the zeros of an empty weight by
    OR. `factors` [m, n]: the float32 factors of NVFP4 matrices, 1 if None."""
    raw = raw.view(-1, *raw.shape[-2:])
    many, rows, _ = raw.shape
    begin, end = first // UNIT_ROWS, -(-(first + rows) // UNIT_ROWS)
    above, below = first - begin * UNIT_ROWS, end * UNIT_ROWS - first - rows
    size, per_span = QUANT_TYPES[weight.kind].block_bytes, SPAN // QUANT_TYPES[weight.kind].block_values
    blocks = raw.view(many, rows, -1, size)
    missing = weight.spans * per_span - blocks.shape[2]
    if missing or above or below:
        blocks = torch.nn.functional.pad(blocks, (0, 0, 0, missing, above, below))
    blocks = _split(blocks.flatten(0, 1), 1, weight.spans, per_span)
    parts = _parts(blocks, weight.kind)
    if weight.kind == "NVFP4":
        known = raw.new_ones(many, rows, dtype=torch.float32) if factors is None else factors.view(many, rows)
        known = torch.nn.functional.pad(known, (above, below)).reshape(-1, 1, 1)
        parts.append(_by_pair(known.expand(-1, weight.spans, 1).contiguous().view(torch.uint8)))
    made = torch.cat([part.flatten(2) for part in parts], 2)
    target = _split(weight.units, 0, weight.count, weight.unit_count)
    target[number : number + many, begin:end] |= _split(made, 0, many, end - begin)


def row_slices(count: int, rows: int, width: int) -> Iterator[tuple[slice, slice]]:
    """All rows of `count` matrices in pairs of slices (matrices, rows) of about VALUES_AT_ONCE values: whole matrices, or some
    rows of one."""
    step = max(UNIT_ROWS, VALUES_AT_ONCE // max(width, 1) // UNIT_ROWS * UNIT_ROWS)
    together = max(1, step // max(rows, 1))
    for number in range(0, count, together):
        for start in range(0, rows, step):
            yield slice(number, min(number + together, count)), slice(start, min(start + step, rows))


# ------------------------------------------------------------------ stored bytes → sections of a unit; U = rows / 16


def _parts(blocks: Tensor, kind: str) -> list[Tensor]:
    """Stored blocks [rows, spans, blocks, bytes] → the sections of their units, [U, spans, …] bytes each, in the order of a
    unit."""
    if kind == "Q4_K":
        whole = blocks[:, :, 0]
        return [_nibbles(_halves(_split(whole[..., 16:], -1, 4, 32))), *_six_bit_scales(whole)]
    if kind == "Q5_K":
        whole = blocks[:, :, 0]
        low = _halves(_split(whole[..., 48:], -1, 4, 32))  # [rows, spans, 256]
        shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
        top = (whole[..., None, 16:48] >> shifts & 1).flatten(-2)
        return [_nibbles(low), _fifth_bits(top), *_six_bit_scales(whole)]
    if kind == "Q6_K":
        whole = blocks[:, :, 0]
        low = _halves(_split(whole[..., :128], -1, 2, 64))
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
        top = (_split(whole[..., 128:192], -1, 2, 1, 32) >> shifts & 3).flatten(-3)
        return [_nibbles(low), _two_bits(top), _by_pair(whole[..., 192:208]), _by_pair(whole[..., 208:210])]
    if kind == "NVFP4":
        return [
            _signed_codes(_halves(_split(blocks[..., 4:], -1, 4, 8).flatten(2, 3))),
            _by_pair(_nvfp4_scales(blocks[..., :4].flatten(-2))),
        ]
    if kind == "Q8_0":
        return [_bytes(blocks[..., 2:].flatten(-2)), _by_pair(blocks[..., :2].flatten(-2))]
    codes = _halves(blocks[..., -16:])
    if kind == "MXFP4":
        return [_signed_codes(codes), _by_pair(blocks[..., :1].flatten(-2))]
    if kind in ("Q5_0", "Q5_1"):
        shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
        # [rows, spans, 256]: one bit per input, unpacked from eight per byte
        top = (blocks[..., -20:-16, None] >> shifts & 1).flatten(-3)
        return [_nibbles(codes), _fifth_bits(top), _by_pair(blocks[..., :-20].flatten(-2))]
    return [_nibbles(codes), _by_pair(blocks[..., :-16].flatten(-2))]


def _halves(stored: Tensor) -> Tensor:
    """Split bytes into codes of four bits: [rows, spans, groups, n] → [rows, spans, 256], of each group the low nibbles, then the
    high nibbles."""
    return torch.cat([stored & 15, stored >> 4], -1).flatten(-2)


def _split(tensor: Tensor, dim: int, *sizes: int) -> Tensor:
    """The tensor with axis `dim` divided into axes of these sizes."""
    return torch.unflatten(tensor, dim, sizes)


def _axes(codes: Tensor, steps: int) -> Tensor:
    """Divide codes [rows, spans, 256] into the axes of the fragment layout, [U, h, g, spans, q, i, u, t, e]. The step of
    a unit, i of the module's docstring, is two axes here: it is q * steps + i."""
    return _split(_split(codes, 0, -1, 2, 8), -1, 16 // steps, steps, 2, 4, 2)


def _nibbles(codes: Tensor) -> Tensor:
    wide = _axes(codes, 4)
    pairs = wide[:, 0] | wide[:, 1] << 4  # [U, g, spans, q, i, u, t, e]
    return pairs.permute(0, 2, 3, 1, 6, 4, 7, 5)


def _bytes(codes: Tensor) -> Tensor:
    return _axes(codes, 2).permute(0, 3, 4, 2, 7, 5, 6, 1, 8)


def _fifth_bits(bits: Tensor) -> Tensor:
    wide = _axes(bits, 4)
    wide = wide[:, 0] | wide[:, 1] << 4  # [U, g, spans, q, i, u, t, e]
    wide = wide[..., 0, :, :] | wide[..., 1, :, :] << 1  # [U, g, spans, q, i, t, e]
    wide = wide[..., 0::2, :, :] | wide[..., 1::2, :, :] << 2  # [U, g, spans, q, i // 2, t, e]
    return wide.permute(0, 2, 1, 5, 3, 6, 4)


def _two_bits(bits: Tensor) -> Tensor:
    wide = _axes(bits, 2)
    wide = wide[:, 0] | wide[:, 1] << 4  # [U, g, spans, q, i, u, t, e]
    wide = _split(wide[..., 0, :, :] | wide[..., 1, :, :] << 2, 3, 2, 4)  # [U, g, spans, v, w, i, t, e], where q = 4 v + w
    return wide.permute(0, 2, 3, 1, 6, 4, 7, 5)


def _signed_codes(codes: Tensor) -> Tensor:
    wide = _axes(codes, 4).permute(0, 3, 4, 2, 7, 5, 8, 6, 1).flatten(-2).int()  # [U, spans, q, g, t, i, e, 2 u + h]
    places = torch.arange(0, 12, 3, dtype=torch.int32, device=codes.device)
    signs = torch.tensor(SIGN_BITS, dtype=torch.int32, device=codes.device)
    halves = ((wide & 7) << places | wide >> 3 << signs).sum(-1, dtype=torch.int32)
    return halves.to(torch.int16).view(torch.uint8)


def _nvfp4_scales(scales: Tensor) -> Tensor:
    """Scales of NVFP4 with NaN replaced by zero and without the sign bit, which the format ignores."""
    return torch.where(scales == 0x7F, 0, scales & 0x7F)


def _by_pair(stored: Tensor) -> Tensor:
    """Group bytes that are stored per output by the two outputs of a lane: [rows, spans, n] → [U, spans, g, h, n]."""
    return _split(stored, 0, -1, 2, 8).permute(0, 3, 2, 1, 4)


def _six_bit_scales(whole: Tensor) -> list[Tensor]:
    """Scales and minima of Q4_K and Q5_K, repacked as the module's docstring describes."""
    head = _by_pair(whole[..., :16])  # [U, spans, g, h, 16]
    low = head[..., 12:] & 15
    per_pair = [head[..., 4:8].flatten(-2), low[..., 0, :] | low[..., 1, :] << 4, head[..., :2].flatten(-2)]
    second, third = head[..., 8:12].int(), head[..., 12:].int()
    minima = _split(torch.cat([second & 63, third >> 4 | second >> 6 << 4], -1), -1, 4, 2)  # [U, spans, g, h, t, e]
    factor = head[..., 2:4].flatten(-2).int()  # byte t of both outputs' scales of minima
    halves = minima[..., 0, :, :] | minima[..., 1, :, :] << 6  # [U, spans, g, t, e]
    halves = halves | torch.stack([factor & 15, factor >> 4], -1) << 12
    return [torch.cat(per_pair, -1), halves.to(torch.int16).view(torch.uint8)]
