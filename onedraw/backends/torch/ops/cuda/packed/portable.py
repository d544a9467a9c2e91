"""Linear layers whose weights stay quantized on GPUs without the tensor-core kernels, in Triton.

In: tensors of a checkpoint, in the bytes of the file. Out: a `PortableLinear`, which reads these bytes with plain loads, so it
runs wherever Triton compiles (`OLDEST_TRITON`, `TRITON_HIP` in devices.py). Weights keep their exact values. A block is 32
inputs, or 16 where a type has a scale for sixteen (Q6_K, NVFP4). The arithmetic of a block: the product of activations and
integer codes, which every dtype of activations holds exactly, is added up in float32 and multiplied by the block's scale; a
minimum is multiplied by the sum of the block's activations. Blocks are added in order. A program always computes a tile of the
same height, so no row depends on the number of rows. Axes: T rows, N outputs, K inputs.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-redef, untyped-decorator, misc"
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from onedraw.backends.packing import why_not_gpu_packed
from onedraw.backends.torch.model.weight_loader import LANE, padded
from onedraw.backends.torch.ops.cuda.packed.linear import HostToDeviceCopy, in_stored_order
from onedraw.backends.torch.ops.plain.experts import ExpertBank, PlainExpertBank
from onedraw.backends.torch.ops.plain.linear import Linear, RowRule
from onedraw.backends.torch.ops.plain.ops import TorchOps
from onedraw.checkpoints.dequantize import QUANT_TYPES
from onedraw.models.source import LazyTensor, StackItem
from onedraw.models.spec import Activation

TILE_ROWS, TILE_OUTPUTS = 16, 64
# The index of a type is its number in the kernels (KIND). Types with a scale for sixteen inputs come last.
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "MXFP4", "Q6_K", "NVFP4")
SIXTEEN = ("Q6_K", "NVFP4")


@triton.jit
def _half(at):
    """The float16 at these byte addresses, which need not be even, as float32."""
    bits = tl.load(at).to(tl.int32) | (tl.load(at + 1).to(tl.int32) << 8)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _bytes(at, place):
    """The bytes [K, N] at `place` [K] behind the addresses `at` [N]."""
    return tl.load(at[None, :] + place[:, None]).to(tl.int32)


@triton.jit
def _four_bits(codes):
    """The signed values of MXFP4 and NVFP4 codes, doubled to be integers: 0, 1, 2, 3, 4, 6, 8, 12 and their negatives."""
    size = codes & 7
    value = tl.where(size < 2, size, (2 | (size & 1)) << tl.maximum((size >> 1) - 1, 0))
    return tl.where(codes >= 8, -value, value)


@triton.jit
def _block(row, factor, b, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Block b of the rows at `row` [N]: codes [BLOCK, N], scale [N] and minimum [N]. `factor` [N]: that of an
    NVFP4 matrix, 1 for other types."""
    k = tl.arange(0, BLOCK)
    nibble, shift = k % (BLOCK // 2), (4 * (k // (BLOCK // 2)))[:, None]
    low = tl.zeros_like(factor)
    if KIND == 0:  # Q4_0
        at = row + b * 18
        return ((_bytes(at + 2, nibble) >> shift) & 15) - 8, _half(at), low
    elif KIND == 1:  # Q4_1
        at = row + b * 20
        return (_bytes(at + 4, nibble) >> shift) & 15, _half(at), _half(at + 2)
    elif KIND == 2:  # Q5_0
        at = row + b * 22
        top = (_bytes(at + 2, k // 8) >> (k % 8)[:, None]) & 1
        return (((_bytes(at + 6, nibble) >> shift) & 15) | (top << 4)) - 16, _half(at), low
    elif KIND == 3:  # Q5_1
        at = row + b * 24
        top = (_bytes(at + 4, k // 8) >> (k % 8)[:, None]) & 1
        return ((_bytes(at + 8, nibble) >> shift) & 15) | (top << 4), _half(at), _half(at + 2)
    elif KIND == 4:  # Q8_0
        at = row + b * 34
        codes = _bytes(at + 2, k)
        return tl.where(codes >= 128, codes - 256, codes), _half(at), low
    elif KIND == 7:  # MXFP4
        at = row + b * 17
        exponent = tl.load(at).to(tl.int32)
        # Half of 2^(exponent - 127), because `_four_bits` doubles the codes; the two smallest scales are subnormal.
        bits = tl.where(exponent >= 2, (exponent - 1) << 23, 0x200000 << exponent)
        return _four_bits((_bytes(at + 1, nibble) >> shift) & 15), bits.to(tl.float32, bitcast=True), low
    elif KIND == 8:  # Q6_K
        part = b % 16
        at = row + b // 16 * 210
        half, quarter, inner = part // 8, (part % 8) // 2, (part % 2) * 16
        lower = (_bytes(at + half * 64 + (quarter % 2) * 32 + inner, k) >> (4 * (quarter // 2))) & 15
        upper = (_bytes(at + 128 + half * 32 + inner, k) >> (2 * quarter)) & 3
        scale = tl.load(at + 192 + part).to(tl.int32)
        scale = tl.where(scale >= 128, scale - 256, scale)
        return (lower | (upper << 4)) - 32, _half(at + 208) * scale.to(tl.float32), low
    elif KIND == 9:  # NVFP4
        part = b % 4
        at = row + b // 4 * 36
        scale = tl.load(at + part).to(tl.int32)
        exponent, mantissa = (scale >> 3) & 15, scale & 7
        units = tl.where(exponent == 0, mantissa, (8 | mantissa) << tl.maximum(exponent - 1, 0))
        units = tl.where(scale == 0x7F, 0, units)  # NaN stands for zero
        return _four_bits((_bytes(at + 4 + part * 8, nibble) >> shift) & 15), units.to(tl.float32) * 0.0009765625 * factor, low
    else:  # Q4_K, Q5_K
        part = b % 8
        SPAN_BYTES: tl.constexpr = 144 if KIND == 5 else 176
        at = row + b // 8 * SPAN_BYTES
        first = tl.load(at + 4 + part % 4).to(tl.int32)
        second = tl.load(at + 8 + part % 4).to(tl.int32)
        third = tl.load(at + 12 + part % 4).to(tl.int32)
        scale = tl.where(part < 4, first & 63, (third & 15) | ((first >> 6) << 4))
        minimum = tl.where(part < 4, second & 63, (third >> 4) | ((second >> 6) << 4))
        codes = (_bytes(at + SPAN_BYTES - 128 + part // 2 * 32, k) >> (4 * (part % 2))) & 15
        if KIND == 6:
            codes = codes | (((_bytes(at + 16, k) >> part) & 1) << 4)
        return codes, _half(at) * scale.to(tl.float32), -_half(at + 2) * minimum.to(tl.float32)


@triton.jit(do_not_specialize=["rows", "n"])
def portable_product(
    x,
    stored,
    factors,
    y,
    rows,
    n,
    width,
    row_bytes,
    x_stride,
    y_stride,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    MINIMA: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Compute one tile of x · weightᵀ."""
    m = (tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    column = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    live, inside = m < rows, column < n
    safe = tl.where(inside, column, 0).to(tl.int64)
    factor = tl.load(factors + safe)
    x_at = x + tl.where(live, m, 0)[:, None] * x_stride + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for b in range(0, width // BLOCK):
        left = tl.load(x_at + b * BLOCK)
        codes, scale, low = _block(stored + safe * row_bytes, factor, b, KIND, BLOCK)
        part = tl.dot(left, codes.to(tl.float32).to(left.dtype), input_precision="ieee")
        total = tl.fma(part, tl.broadcast_to(scale[None, :], (TILE_M, TILE_N)), total)
        if MINIMA:
            whole = tl.sum(left.to(tl.float32), 1)
            spread = tl.broadcast_to(whole[:, None], (TILE_M, TILE_N))
            total = tl.fma(spread, tl.broadcast_to(low[None, :], (TILE_M, TILE_N)), total)
    keep = live[:, None] & inside[None, :]
    tl.store(y + m[:, None] * y_stride + column[None, :], total.to(y.dtype.element_ty), mask=keep)


@triton.jit
def portable_rows(wanted, stored, factors, y, width, row_bytes, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Dequantize one block of one row."""
    number = tl.load(wanted + tl.program_id(0) + tl.arange(0, 1))
    b = tl.program_id(1)
    codes, scale, low = _block(stored + number * row_bytes, tl.load(factors + number), b, KIND, BLOCK)
    values = codes.to(tl.float32) * scale[None, :] + low[None, :]
    place = tl.program_id(0).to(tl.int64) * width + b * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + place[:, None] + tl.zeros((BLOCK, 1), tl.int64), values.to(y.dtype.element_ty))


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Weights [N, K] of one type, concatenated along their outputs."""

    kind: str
    width: int  # K
    data: Tensor  # [N, bytes of a row] uint8, as in the file
    factors: Tensor  # [N] float32: the factors of NVFP4 matrices, 1 for other types

    @property
    def block(self) -> int:
        return 16 if self.kind in SIXTEEN else 32

    def product(self, x: Tensor, out: Tensor) -> None:
        """x [T, ≥ K] · weightᵀ → out [T, N], which may be columns of a wider tensor."""
        rows, n = out.shape
        if not rows:
            return
        portable_product[(triton.cdiv(rows, TILE_ROWS), triton.cdiv(n, TILE_OUTPUTS))](
            x,
            self.data,
            self.factors,
            out,
            rows,
            n,
            self.width,
            self.data.shape[1],
            x.stride(0),
            out.stride(0),
            KIND=KINDS.index(self.kind),
            BLOCK=self.block,
            MINIMA=self.kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"),
            TILE_M=TILE_ROWS,
            TILE_N=TILE_OUTPUTS,
            num_warps=4,
            enable_fp_fusion=False,
        )

    def rows(self, wanted: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows by number, [T] → [T, K]."""
        out = torch.empty(len(wanted), self.width, dtype=dtype, device=self.data.device)
        if len(wanted):
            options = {"KIND": KINDS.index(self.kind), "BLOCK": self.block, "enable_fp_fusion": False}
            grid = (len(wanted), self.width // self.block)
            portable_rows[grid](wanted, self.data, self.factors, out, self.width, self.data.shape[1], **options)
        return out


class PortableLinear(Linear):
    """Weights concatenated along their outputs; those of a type without kernels are a matrix of the model's dtype."""

    def __init__(
        self,
        parts: Sequence[StoredBlocks | Linear],
        *,
        dtype: torch.dtype,
        device: torch.device,
        bias: Tensor | None,
        in_features: int,
        order: Tensor | None,
    ) -> None:
        self.parts, self._order = tuple(parts), order
        self._heights = [part.out_features if isinstance(part, Linear) else len(part.data) for part in parts]
        self.out_features, self.in_features = sum(self._heights), in_features
        self.dtype, self.device, self.bias = dtype, device, bias
        self.rule = next((part.rule for part in parts if isinstance(part, Linear)), RowRule(floor=1))

    @property
    def kind(self) -> str:
        return "+".join(part.kind if isinstance(part, StoredBlocks) else str(part.dtype) for part in self.parts)

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous() if self._order is None else x.index_select(1, self._order)
        y = torch.empty(len(x), self.out_features, dtype=self.dtype, device=self.device)
        for part, here in zip(self.parts, torch.split(y, self._heights, 1), strict=True):
            if isinstance(part, StoredBlocks):
                part.product(x, here)
            else:
                part.rule = self.rule
                here.copy_(part(x[:, : part.in_features]))
        return y if self.bias is None else y + self.bias

    def rows(self, wanted: Tensor, thread_pool: int | None = None) -> Tensor:
        """Rows of a single weight, dequantized: [T] → [T, K]."""
        (part,) = self.parts
        assert isinstance(part, StoredBlocks)
        return part.rows(wanted, self.dtype)


class PortableOps(TorchOps):
    """Plain torch, with products and embedding tables that read quantized weights."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device)
        self.name = f"{device.type}-torch-packed"
        self._device, self._dtype, self._copier = device, dtype, HostToDeviceCopy(device)

    def packed_linear(
        self, tensors: Sequence[LazyTensor], *, bias: Tensor | None, pad: int, pad_columns: int
    ) -> PortableLinear | None:
        if all(map(why_not_gpu_packed, tensors)):
            return None
        width = padded(tensors[0].shape[1], pad_columns)
        tensors, order = in_stored_order(tensors, self._device)
        parts = [self._stored(tensor, pad) if not why_not_gpu_packed(tensor) else self._float(tensor, pad) for tensor in tensors]
        return PortableLinear(parts, dtype=self._dtype, device=self._device, bias=bias, in_features=width, order=order)

    def packed_table(self, tensor: LazyTensor) -> PortableLinear | None:
        return self.packed_linear([tensor], bias=None, pad=LANE, pad_columns=1)

    def packed_expert_bank(self, gate_up: Sequence[LazyTensor], down: LazyTensor, activation: Activation) -> ExpertBank | None:
        if any(map(why_not_gpu_packed, [*gate_up, down])):
            return None
        first, second = [], []
        for number in range(down.shape[0]):
            first.append(self._required([StackItem(tensor, number) for tensor in gate_up], pad=LANE))
            second.append(self._required([StackItem(down, number)], pad_columns=LANE))
        return PlainExpertBank(tuple(first), tuple(second), activation, self.gated)

    def _required(self, tensors: Sequence[LazyTensor], *, pad: int = 1, pad_columns: int = 1) -> PortableLinear:
        made = self.packed_linear(tensors, bias=None, pad=pad, pad_columns=pad_columns)
        assert made is not None, "every matrix of the stack stays packed"
        return made

    def _stored(self, tensor: LazyTensor, pad: int) -> StoredBlocks:
        raw, (rows, width) = tensor.packed(), tensor.shape
        assert raw is not None
        kind = QUANT_TYPES[tensor.kind]
        data = torch.zeros(
            padded(rows, pad), width // kind.block_values * kind.block_bytes, dtype=torch.uint8, device=self._device
        )
        data[:rows] = self._copier.copy(raw.reshape(rows, -1))
        factors = torch.ones(len(data), device=self._device)
        if (stored := tensor.factors()) is not None:
            factors[:rows] = torch.from_numpy(stored).to(self._device)
        return StoredBlocks(tensor.kind, width, data, factors)

    def _float(self, tensor: LazyTensor, pad: int) -> Linear:
        matrix = torch.from_numpy(tensor.float32())
        matrix = torch.nn.functional.pad(matrix, (0, 0, 0, -len(matrix) % pad))
        return self.linear(matrix.to(device=self._device, dtype=self._dtype))
