"""Reference implementation of the packed products: activations, weights and product step by step, in plain torch.

In: rows of activations, or the stored bytes of a matrix, on any device. Out: `PackedActivations`, `DequantizedWeight`, or the
product in float64. No kernel and no layout of the package is used: agreement with the kernels follows from the file format alone.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from onedraw.backends.packing import SEGMENT, SPAN
from onedraw.backends.torch.ops.cuda.packed.activations import (
    BLOCK,
    MAX_EXPONENT,
    MIN_EXPONENT,
    SUBNORMAL_FACTORS,
    DequantizedWeight,
    PackedActivations,
    padded_outputs,
)
from onedraw.checkpoints.dequantize import QUANT_TYPES

TWICE = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the magnitudes of E2M1 codes


def reference_activations(x: Tensor, *, width: int | None = None, order: Tensor | None = None) -> PackedActivations:
    """Rows scaled to float16 by rule 1 of `activations.py`."""
    rows, width = len(x), x.shape[1] if width is None else width
    values = x[:, :width].float() if order is None else x.float().index_select(1, order.long())
    values = torch.nn.functional.pad(values, (0, -width % SPAN)).view(rows, -1, SPAN)
    largest = values.view(torch.int32).bitwise_and(0x7FFFFFFF).amax(2)
    largest = torch.cat([part.amax(1, keepdim=True).expand_as(part) for part in torch.split(largest, SEGMENT, 1)], 1)
    exponents = torch.where(largest == 0, 0, ((largest >> 23) - 136).clamp(MIN_EXPONENT, MAX_EXPONENT))
    scaled = torch.ldexp(values, -exponents[..., None]).half()
    whole = scaled.double().view(rows, -1, SPAN // BLOCK, BLOCK).sum(3).float()
    hi = whole.half()
    lo = (whole - hi.float()).half()
    factors = torch.ldexp(torch.ones_like(largest, dtype=torch.float32), exponents)
    return PackedActivations(scaled.view(rows, -1), factors, torch.cat([hi, lo], 2))


def reference_weights(raw: Tensor, kind: str, factors: Tensor | None = None) -> DequantizedWeight:
    """Stored rows [n, bytes] as float16 weights and scales. `factors` [n]: of NVFP4, if they are not all 1."""
    blocks = _spans(raw, kind)  # [n, spans, blocks, bytes]
    rows = len(raw)
    match kind:
        case "Q4_K" | "Q5_K":
            whole = blocks[:, :, 0]
            scale, min_scales = _six_bits(whole)
            tiny = _tiny(rows, raw.device)
            weights = (_codes(blocks, kind) * scale[..., None] * tiny[:, :, None, None]).half().view(rows, -1)
            minima = (min_scales * tiny[:, :, None]).half()
            return DequantizedWeight(
                weights, _side_by_side(_half(whole, 0) / tiny), minima, _side_by_side(_half(whole, 2) / tiny)
            )
        case "Q6_K":
            whole = blocks[:, :, 0]
            scale = whole[..., 192:208].contiguous().view(torch.int8).int()
            tiny = _tiny(rows, raw.device)
            weights = _split(_codes(blocks, kind) - 32, -1, 2, 16) * _split(scale, -1, 8, 2)[..., None]
            weights = (weights * tiny[:, :, None, None, None]).half().view(rows, -1)
            return DequantizedWeight(weights, _side_by_side(_half(whole, 208) / tiny))
        case "Q4_1" | "Q5_1":
            scale, min_scales = (_side_by_side(_half(blocks, at).reshape(rows, -1)) for at in (0, 2))
            return DequantizedWeight(_codes(blocks, kind).half().view(rows, -1), scale, None, min_scales)
        case "NVFP4":
            bytes_ = blocks[..., :4].flatten(2)  # [n, spans, 16]
            exponents, mantissas = bytes_.int() >> 3 & 15, (bytes_ & 7).double()
            sizes = torch.where(exponents == 0, mantissas * 2.0**-9, torch.ldexp(1 + mantissas / 8, exponents - 7))
            sizes = torch.where(bytes_ == 0x7F, 0.0, sizes)
            signed = torch.tensor([*TWICE, *(-value for value in TWICE)], dtype=torch.float64, device=raw.device)
            weights = _split(signed[_codes(blocks, kind)].flatten(2), -1, 16, 16) * sizes[..., None] / 2
            scale = torch.ones(rows, device=raw.device) if factors is None else factors
            return DequantizedWeight(weights.half().view(rows, -1), _side_by_side(scale[:, None].expand(-1, blocks.shape[1])))
        case "MXFP4":
            table = torch.tensor([*TWICE, *(-value for value in TWICE)], dtype=torch.float16, device=raw.device)
            powers = np.ldexp(np.float32(1), blocks[..., 0].cpu().numpy().astype(np.int32) - 128)
            scale = torch.from_numpy(powers).to(raw.device).reshape(rows, -1)
            return DequantizedWeight(table[_codes(blocks, kind)].view(rows, -1), _side_by_side(scale))
        case _:
            centre = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 0}[kind]
            weights = (_codes(blocks, kind) - centre).half().view(rows, -1)
            return DequantizedWeight(weights, _side_by_side(_half(blocks, 0).reshape(rows, -1)))


def reference_product(activations: PackedActivations, dequantized: DequantizedWeight) -> Tensor:
    """The product in float64, [T, N]; the kernels must agree with it up to float32 rounding."""
    rows, n = len(activations), len(dequantized.weights)
    x = activations.x.double().view(rows, -1, SPAN // BLOCK, BLOCK)  # [T, S, 8, 32]
    weights = dequantized.weights.double().view(n, -1, SPAN // BLOCK, BLOCK)
    factors = activations.factors.double()
    sums = activations.sums[..., :8].double() + activations.sums[..., 8:].double()  # [T, S, 8]
    if dequantized.by_block:
        scales = dequantized.scales[:, :n].double().view(-1, 8, n)
        found = torch.einsum("tsbk,nsbk,ts,sbn->tn", x, weights, factors, scales)
        if dequantized.min_scales is not None:
            found += torch.einsum("tsb,sbn,ts->tn", sums, dequantized.min_scales[:, :n].double().view(-1, 8, n), factors)
        return found
    found = torch.einsum("tsbk,nsbk,ts,sn->tn", x, weights, factors, dequantized.scales[:, :n].double())
    if dequantized.minima is not None and dequantized.min_scales is not None:
        found -= torch.einsum(
            "tsb,nsb,ts,sn->tn", sums, dequantized.minima.double(), factors, dequantized.min_scales[:, :n].double()
        )
    return found


def _tiny(rows: int, device: torch.device) -> Tensor:
    """The power of two that each output is multiplied with: [n, 1]"""
    return torch.tensor(SUBNORMAL_FACTORS, device=device).repeat_interleave(8).repeat(-(-rows // 16))[:rows, None]


def _spans(raw: Tensor, kind: str) -> Tensor:
    """[n, bytes] → [n, spans, blocks, bytes]; the last span is padded with zero blocks."""
    per_span = SPAN // QUANT_TYPES[kind].block_values
    blocks = raw.view(len(raw), -1, QUANT_TYPES[kind].block_bytes)
    blocks = torch.nn.functional.pad(blocks, (0, 0, 0, -blocks.shape[1] % per_span))
    return _split(blocks, 1, -1, per_span)


def _codes(blocks: Tensor, kind: str) -> Tensor:
    """The stored integer codes: [n, spans, 8, 32] int32."""
    whole = blocks[:, :, 0]
    match kind:
        case "Q4_K":
            return _halves(_split(whole[..., 16:], -1, 4, 32))
        case "Q5_K":
            shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
            return _halves(_split(whole[..., 48:], -1, 4, 32)) | (whole[..., None, 16:48] >> shifts & 1).int() << 4
        case "Q6_K":
            low = _halves(_split(whole[..., :128], -1, 2, 64))
            shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
            return low | (_split(whole[..., 128:192], -1, 2, 1, 32) >> shifts & 3).flatten(2, 3).int() << 4
        case "NVFP4":
            return _halves(_split(blocks[..., 4:], -1, 4, 8).flatten(2, 3))
        case "Q8_0":
            return blocks[..., 2:].contiguous().view(torch.int8).int()
        case "Q5_0" | "Q5_1":
            shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
            fifths = (blocks[..., -20:-16, None] >> shifts & 1).flatten(-2)  # a bit per input, eight in a byte
            return _halves(blocks[..., -16:]) | fifths.int() << 4
        case _:
            return _halves(blocks[..., -16:])


def _halves(stored: Tensor) -> Tensor:
    """Bytes [n, spans, groups, m] → codes [n, spans, 8, 32]: the low nibbles of a group come first, then the high ones."""
    return _split(torch.cat([stored & 15, stored >> 4], -1).flatten(2).int(), -1, 8, 32)


def _six_bits(whole: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of Q4_K and Q5_K: [n, spans, 8] int32 each."""
    one, two, three = (whole[..., start : start + 4].int() for start in (4, 8, 12))
    return torch.cat([one & 63, three & 15 | one >> 6 << 4], -1), torch.cat([two & 63, three >> 4 | two >> 6 << 4], -1)


def _half(stored: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of every block, as float32."""
    return stored[..., at : at + 2].contiguous().view(torch.float16)[..., 0].float()


def _split(tensor: Tensor, dim: int, *sizes: int) -> Tensor:
    """Split one axis into several."""
    return torch.unflatten(tensor, dim, sizes)


def _side_by_side(numbers: Tensor) -> Tensor:
    """[rows, n] → [n, rows padded]"""
    return torch.nn.functional.pad(numbers.t(), (0, padded_outputs(len(numbers)) - len(numbers))).contiguous()
