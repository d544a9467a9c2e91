"""Packed weights in the order a GPU reads them: stored blocks → words of codes, high bits, words of scales. And back, slowly.

In: the stored bytes of a matrix, on any device. Out: `Blocks`, with the same bits in another order, and nothing rounded.

Inputs lie in spans of 256 (`packing.py`); a row that is no whole number of them ends in blocks of zeros. Per span and output:
  codes   64 halfwords of four four-bit codes, 32 for the first 128 inputs and 32 for the others. Nibble p of halfword j belongs
          to input 32 p + j of them. Eight-bit codes: 128 halfwords, 32 for every 64 inputs, byte p of halfword j for 32 p + j.
          Five-bit codes: 96 halfwords, 32 for every 96 inputs, three codes in each.
  high    of Q6_K, 32 halfwords: bits 2 p and 2 p + 1 of halfword j go on top of input 32 p + j.
  scales  a few words. Kinds of 32: a float16 per plane, or two where there are minima, MXFP4 a byte. The K kinds: as stored.
Codes lie as [span][output][halfword] and scales as [span][word][output], so neighbours in a program are neighbours in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from onedraw.backends.packing import SPAN, SPANS
from onedraw.backends.torch.kernels.spans import Opened
from onedraw.checkpoints.quants import KINDS

VALUES_AT_ONCE = 1 << 24  # values that are put in order at once: what is needed besides the result stays small


@dataclass(frozen=True, slots=True)
class Blocks:
    """One weight [rows, width], or as many as there are experts, one behind the other."""

    kind: str
    rows: int
    width: int
    codes: Tensor  # [E, spans, rows, halfwords] int16
    high: Tensor  # [E, spans, rows, 32] int16; empty where a kind has none
    scales: Tensor  # [E, spans, words, rows] int32

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.high.nbytes + self.scales.nbytes

    @property
    def count(self) -> int:
        """How many matrices."""
        return len(self.codes)


def empty_blocks(kind: str, *, rows: int, width: int, device: torch.device, count: int = 1) -> Blocks:
    layout, spans = SPANS[kind], -(-width // SPAN)
    return Blocks(
        kind=kind,
        rows=rows,
        width=width,
        codes=torch.zeros(count, spans, rows, layout.codes, dtype=torch.int16, device=device),
        high=torch.zeros(count, spans, rows, layout.high, dtype=torch.int16, device=device),
        scales=torch.zeros(count, spans, layout.scales, rows, dtype=torch.int32, device=device),
    )


def fill_blocks(blocks: Blocks, raw: Tensor, *, first: int, number: int = 0) -> None:
    """Stored rows [n, bytes] → rows first … first + n of a matrix. Rows nobody fills are zero."""
    codes, high, scales = _ordered(raw, blocks.kind)
    rows = slice(first, first + len(raw))
    blocks.codes[number, :, rows] = codes.transpose(0, 1)
    if blocks.high.numel():
        blocks.high[number, :, rows] = high.transpose(0, 1)
    blocks.scales[number, :, :, rows] = scales.permute(1, 2, 0)


def row_slices(rows: int, width: int) -> Iterator[slice]:
    """All rows, as many at a time as are put in order at once."""
    step = max(1, VALUES_AT_ONCE // max(width, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


# ------------------------------------------------------------------ stored bytes → ours


def _ordered(raw: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """[n, bytes] → codes [n, spans, halfwords], high [n, spans, 32], scales [n, spans, words]."""
    size, per_span = KINDS[kind].size, SPAN // KINDS[kind].values
    blocks = raw.view(len(raw), -1, size)
    missing = -blocks.shape[1] % per_span
    if missing:
        blocks = torch.cat([blocks, blocks.new_zeros(len(raw), missing, size)], 1)
    none = raw.new_empty(len(raw), blocks.shape[1] * KINDS[kind].values // SPAN, 0)
    if kind == "Q4_K":
        return _halfwords(_split(blocks[..., 16:], -1, 4, 32)), none, _as_words(blocks[..., :16])
    if kind == "Q5_K":
        own = _split(blocks[..., 48:], -1, 4, 32)
        planes = torch.stack([own & 15, own >> 4], 3).flatten(2, 3)  # [n, spans, 8, 32]
        shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)[:, None]
        return _threes(planes | (blocks[..., None, 16:48] >> shifts & 1) << 4), none, _as_words(blocks[..., :16])
    if kind == "Q6_K":
        low = _split(blocks[..., :128], -1, 2, 64)  # halves of 128 inputs
        planes = _split(torch.cat([low & 15, low >> 4], -1), -1, 4, 32).flatten(2, 3)  # [n, spans, 8, 32]
        high = _split(blocks[..., 128:192], -1, 2, 32).transpose(-1, -2).contiguous().view(torch.int16)[..., 0]
        whole = torch.nn.functional.pad(blocks[..., 208:], (0, 2))
        return _halfwords(_paired(planes)), high, _as_words(torch.cat([blocks[..., 192:208], whole], -1))
    blocks = _split(blocks, 1, -1, 8)  # [n, spans, 8, size]
    if kind == "Q8_0":
        return _halfwords(blocks[..., 2:]), none, _as_words(blocks[..., :2])
    own = blocks[..., -16:]
    planes = torch.cat([own & 15, own >> 4], -1)  # [n, spans, 8, 32]
    if kind in ("Q5_0", "Q5_1"):
        shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)
        fifths = (blocks[..., -20:-16, None] >> shifts & 1).flatten(-2)  # a bit per input, eight in a byte
        return _threes(planes | fifths << 4), none, _as_words(blocks[..., :-20])
    return _halfwords(_paired(planes)), none, _as_words(blocks[..., :-16])


def _split(tensor: Tensor, dim: int, *sizes: int) -> Tensor:
    """One axis as several."""
    return torch.unflatten(tensor, dim, sizes)


def _paired(planes: Tensor) -> Tensor:
    """Nibbles [..., 8, 32] → bytes [..., 4, 32], a plane of even number below the next."""
    return planes[..., 0::2, :] | planes[..., 1::2, :] << 4


def _halfwords(planes: Tensor) -> Tensor:
    """Bytes [..., 2 n, 32] → n times 32 halfwords, two planes of bytes in each."""
    return _split(planes, -2, -1, 2).transpose(-1, -2).contiguous().view(torch.int16).flatten(-3)


def _as_words(stored: Tensor) -> Tensor:
    """Bytes [n, spans, …] → words [n, spans, …], as they are."""
    return stored.flatten(2).contiguous().view(torch.int32)


def _threes(planes: Tensor) -> Tensor:
    """Five-bit codes [..., 8, 32] → 96 halfwords of three each; the last have two."""
    wide = _split(torch.nn.functional.pad(planes, (0, 0, 0, 1)).to(torch.int16), -2, 3, 3)
    return (wide[..., 0, :] | wide[..., 1, :] << 5 | wide[..., 2, :] << 10).flatten(-2)


# ------------------------------------------------------------------ ours → numbers: the twin that judges the kernels


def numbers(blocks: Blocks, number: int = 0) -> Tensor:
    """The matrix as float32 [rows, width], step by step as the kind is described."""
    codes = _plain_codes(blocks, number)  # [rows, spans, 8, 32]
    words = blocks.scales[number].permute(2, 0, 1).contiguous()  # [rows, spans, words]
    octets = words.view(torch.uint8)
    halves = words.view(torch.float16).float()
    match blocks.kind:
        case "Q4_0" | "Q5_0" | "Q8_0":
            centre = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 0}[blocks.kind]
            values = (codes - centre).float() * halves[..., None]
        case "Q4_1" | "Q5_1":
            values = codes.float() * halves[..., 0::2, None] + halves[..., 1::2, None]
        case "Q4_K" | "Q5_K":
            one, two, three = (octets[..., start : start + 4].int() for start in (4, 8, 12))
            scale = torch.cat([one & 63, three & 15 | one >> 6 << 4], -1).float() * halves[..., :1]
            least = torch.cat([two & 63, three >> 4 | two >> 6 << 4], -1).float() * halves[..., 1:2]
            values = codes.float() * scale[..., None] - least[..., None]
        case "Q6_K":
            scale = words[..., :4].contiguous().view(torch.int8).float() * halves[..., 8:9]
            values = (_split((codes - 32).float(), -1, 2, 16) * _split(scale, -1, 8, 2)[..., None]).flatten(-2)
        case "MXFP4":
            fours = (0, 1, 2, 3, 4, 6, 8, 12)
            table = torch.tensor([*fours, *(-value for value in fours)], dtype=torch.float32, device=codes.device)
            values = table[codes] * _powers(octets)[..., None]
        case _:
            raise ValueError(f"no numbers for {blocks.kind}")
    return values.flatten(1)[:, : blocks.width]


def _powers(octets: Tensor) -> Tensor:
    """2^(byte - 128)"""
    exponents = octets.cpu().numpy().astype(np.int32) - 128
    return torch.from_numpy(np.ldexp(np.float32(1), exponents)).to(octets.device)


def _plain_codes(blocks: Blocks, number: int) -> Tensor:
    halves = blocks.codes[number].transpose(0, 1).contiguous()  # [rows, spans, halfwords]
    if blocks.kind in ("Q5_0", "Q5_1", "Q5_K"):
        tiles = _split(halves.int(), -1, 3, 32)
        return torch.stack([tiles >> 5 * place & 31 for place in range(3)], 3).flatten(2, 3)[:, :, :8]
    octets = _split(halves.view(torch.uint8), -1, -1, 32, 2).transpose(-1, -2).flatten(2, 3).int()  # [rows, spans, 2 n, 32]
    if blocks.kind == "Q8_0":
        return (octets ^ 128) - 128
    codes = torch.stack([octets & 15, octets >> 4], 3).flatten(2, 3)  # [rows, spans, 8, 32]
    if blocks.kind != "Q6_K":
        return codes
    high = blocks.high[number].transpose(0, 1).int() & 0xFFFF  # [rows, spans, 32]
    return codes | torch.stack([high >> 2 * plane & 3 for plane in range(8)], -2) << 4


def opened_slowly(blocks: Blocks, number: int = 0) -> Opened:
    """The weight as the rule of packed products has it (spans.py), step by step."""
    codes = _plain_codes(blocks, number)  # [rows, spans, 8, 32]
    words = blocks.scales[number].permute(2, 0, 1).contiguous()  # [rows, spans, words]
    octets, halves = words.view(torch.uint8), words.view(torch.float16).float()
    rows = blocks.rows
    match blocks.kind:
        case "Q4_K" | "Q5_K":
            one, two, three = (octets[..., start : start + 4].int() for start in (4, 8, 12))
            scale = torch.cat([one & 63, three & 15 | one >> 6 << 4], -1)
            least = torch.cat([two & 63, three >> 4 | two >> 6 << 4], -1)
            weights = (codes * scale[..., None]).half().view(rows, -1)
            return Opened(weights, halves[..., 0].contiguous(), least.half(), halves[..., 1].contiguous())
        case "Q6_K":
            scale = words[..., :4].contiguous().view(torch.int8).int()
            weights = (_split(codes - 32, -1, 2, 16) * _split(scale, -1, 8, 2)[..., None]).half()
            return Opened(weights.view(rows, -1), halves[..., 8].contiguous())
        case "Q4_1" | "Q5_1":
            weights = codes.half().view(rows, -1)
            scale, least = (halves[..., side::2].reshape(rows, -1).contiguous() for side in (0, 1))
            return Opened(weights, scale, None, least)
        case "MXFP4":
            fours = (0, 1, 2, 3, 4, 6, 8, 12)
            table = torch.tensor([*fours, *(-value for value in fours)], dtype=torch.float16, device=codes.device)
            return Opened(table[codes].view(rows, -1), _powers(octets).reshape(rows, -1))
        case _:
            centre = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 0}[blocks.kind]
            return Opened((codes - centre).half().view(rows, -1), halves.reshape(rows, -1))
