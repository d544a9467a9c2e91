"""Linear layers whose weights stay quantized on a GPU.

In: tensors of a checkpoint, read from the mapped file. Out: a `PackedLinear`: several weights concatenated along the outputs,
each with its own quantization type; neighbours of one type form one weight. A weight whose type has no packed kernel is kept as a
matrix of the model's dtype.

Products of few rows read the quantized blocks directly (few_rows.py). For many rows the weight is dequantized to float16, a slice
of outputs at a time, in a buffer of the workspace, and multiplied there (many_rows_hopper.py, many_rows.py). Products of few and
of many rows follow the arithmetic of activations.py, so their results are bitwise equal. A segment is 1,024 inputs, whose partial
sums are added in order. Axes: T rows, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from onedraw.backends.memory_plan import DEQUANT_BYTES
from onedraw.backends.packing import FEW_ROWS, SPAN, partial_sum_bytes, why_not_gpu_packed
from onedraw.backends.torch.model.weight_loader import padded
from onedraw.backends.torch.ops.cuda.linear import linear, shared_memory, tile_borders
from onedraw.backends.torch.ops.cuda.packed import many_rows, many_rows_hopper
from onedraw.backends.torch.ops.cuda.packed.activations import (
    DequantizedWeight,
    PackedActivations,
    PendingActivations,
    pack_activations,
    pack_border,
    padded_outputs,
)
from onedraw.backends.torch.ops.cuda.packed.few_rows import (
    SPAN_SCALE_KINDS,
    compile_kernels,
    dequantize,
    dequantize_rows,
    empty_carry,
    few_rows_borders,
    few_rows_product,
    has_minima,
    partial_sum_count,
)
from onedraw.backends.torch.ops.cuda.packed.many_rows_hopper import TILE
from onedraw.backends.torch.ops.cuda.packed.tensor_core_layout import (
    PackedWeight,
    empty_packed_weight,
    fill_packed_weight,
    row_slices,
)
from onedraw.backends.torch.ops.plain.linear import Linear, RowRule
from onedraw.checkpoints.dequantize import copy_rows
from onedraw.models.source import ColumnSelection, LazyTensor

# From this many rows on weights are dequantized; products of fewer rows are faster in parts of 64 rows. Captured steps have fewer
# rows, so no CUDA graph uses the buffer for dequantized weights.
MANY_ROWS_FROM = 257
HOPPER = (9, 0)  # the compute capability of Hopper GPUs, which have a kernel of their own for many rows
_ALIGNED = 256  # tensors in the buffer for dequantized weights start at multiples of this many bytes


class Workspace:
    """Scratch memory: a buffer for dequantized slices of outputs, one for the partial sums of products of few rows, and carry
    buffers between thread blocks. The first two are counted by the memory plan (`DEQUANT_BYTES`, `packing.partial_sum_bytes`) and
    allocated at the first product. The carry buffers take about 100 KiB, which the memory plan does not count.

    Owner: the operations of one engine on one device, which launch products in order on one stream. Two engines may run
    products concurrently, each on its own thread and stream, so each has its own workspace."""

    def __init__(self, device: torch.device, most: int = DEQUANT_BYTES) -> None:
        self._device, self._most, self._needed, self._partial_sum_bytes = device, most, 0, 0
        self._dequantized = torch.empty(0, dtype=torch.uint8, device=device)
        # The last one is in use; earlier ones are kept for captured CUDA graphs.
        self._partial_sums = [torch.empty(0, dtype=torch.float32, device=device)]
        self._carries: list[Tensor] = []
        self._views: dict[tuple[str, int, int], DequantizedWeight] = {}  # views of `_dequantized` by type, spans and outputs

    def reserve(self, weight: PackedWeight) -> None:
        """Raise the planned sizes of the buffers so that they are large enough for this weight; nothing is allocated yet."""
        rows = padded_outputs(weight.rows)
        self._needed = max(self._needed, min(self._most, rows * _output_bytes(weight) + 4 * _ALIGNED))
        self._partial_sum_bytes = max(self._partial_sum_bytes, partial_sum_bytes(weight.rows, weight.width))

    def partial_sums(self, weight: PackedWeight) -> Tensor:
        """The float32 buffer for partial sums of products of few rows; it holds all outputs, or as many as the memory plan
        allows."""
        self.reserve(weight)
        if self._partial_sums[-1].nbytes < self._partial_sum_bytes:
            self._partial_sums.append(torch.empty(self._partial_sum_bytes // 4, dtype=torch.float32, device=self._device))
        return self._partial_sums[-1]

    def carry(self, number: int) -> Tensor:
        """The buffer through which the thread blocks of a product pass partial sums to their successors. `number`: index among
        the products that may run concurrently, which need separate buffers."""
        while len(self._carries) <= number:
            self._carries.append(empty_carry(self._device))
        return self._carries[number]

    def slices(self, weight: PackedWeight) -> Iterator[tuple[slice, DequantizedWeight]]:
        """Slices of the outputs, each small enough for the buffer, with a view of the buffer to dequantize it into."""
        self.reserve(weight)
        if self._dequantized.numel() < self._needed:
            self._views, self._dequantized = {}, self._dequantized[:0].clone()  # free the old buffer before allocating
            self._dequantized = torch.empty(self._needed, dtype=torch.uint8, device=self._device)
        most = (self._dequantized.numel() - 4 * _ALIGNED) // _output_bytes(weight) // TILE * TILE
        count = weight.rows
        if count > most:  # slices of about equal size, in whole tiles
            count = padded(-(-count // -(-count // most)), TILE)
        for start in range(0, weight.rows, count):
            columns = slice(start, min(start + count, weight.rows))
            key = (weight.kind, weight.spans, columns.stop - start)
            if key not in self._views:
                self._views[key] = self._view(weight, columns.stop - start)
            yield columns, self._views[key]

    def _view(self, weight: PackedWeight, count: int) -> DequantizedWeight:
        spans, per, start = weight.spans, 1 if weight.kind in SPAN_SCALE_KINDS else 8, 0

        def take(dtype: torch.dtype, *shape: int) -> Tensor:
            nonlocal start
            size = int(np.prod(shape)) * dtype.itemsize
            view = self._dequantized[start : start + size].view(dtype).view(shape)
            start += padded(size, _ALIGNED)
            return view

        weights, scales = take(torch.float16, count, spans * SPAN), take(torch.float32, spans * per, padded_outputs(count))
        if not has_minima(weight.kind):
            return DequantizedWeight(weights, scales)
        minima = take(torch.float16, count, spans, 8) if per == 1 else None
        return DequantizedWeight(weights, scales, minima, take(torch.float32, spans * per, padded_outputs(count)))


def _output_bytes(weight: PackedWeight) -> int:
    """Bytes of one dequantized output: its float16 weights, scales and minima."""
    per = 1 if weight.kind in SPAN_SCALE_KINDS else 8
    min_scales = (4 * per + (16 if per == 1 else 0)) if has_minima(weight.kind) else 0
    return weight.spans * (2 * SPAN + 4 * per + min_scales)


class HostToDeviceCopy:
    """Copies stored bytes to a device through two small pinned buffers, so the host holds no copy of a weight."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._current = 0

    def copy(self, raw: np.ndarray) -> Tensor:
        """Copy rows [n, bytes] to the device, asynchronously for CUDA."""
        current = self._current = 1 - self._current
        event = self._copied[current]
        if event is not None:
            event.synchronize()
        if self._buffers[current].numel() < raw.size:
            self._buffers[current] = torch.empty(raw.size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        staged = self._buffers[current][: raw.size].view(raw.shape)
        copy_rows(raw, staged.numpy())
        copied = staged.to(self._device, non_blocking=True, copy=True)
        if self._device.type == "cuda":
            event = self._copied[current] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return copied


def read_packed_weight(
    tensors: Sequence[LazyTensor], *, pad: int, copier: HostToDeviceCopy, device: torch.device
) -> PackedWeight:
    """Concatenate weights of one type along their rows, each padded with zero rows to a multiple of `pad`. Stacks of matrices are
    concatenated matrix by matrix."""
    heights, width = [padded(tensor.shape[-2], pad) for tensor in tensors], tensors[0].shape[-1]
    stack = tensors[0].shape[:-2]
    count = stack[0] if stack else 1
    weight = empty_packed_weight(tensors[0].kind, rows=sum(heights), width=width, device=device, count=count)
    first = 0
    for tensor, height in zip(tensors, heights, strict=True):
        raw, rows = tensor.packed(), tensor.shape[-2]
        assert raw is not None
        stacked, stored_factors = raw.reshape(count, rows, -1), tensor.factors()
        factors = None if stored_factors is None else torch.from_numpy(stored_factors).view(count, rows).to(device)
        for matrices, part in row_slices(count, rows, width):
            some = stacked[matrices, part]
            copied = copier.copy(some.reshape(-1, some.shape[-1])).view(some.shape)
            part_factors = None if factors is None else factors[matrices, part]
            fill_packed_weight(weight, copied, first=first + part.start, number=matrices.start, factors=part_factors)
        first += height
    return weight


def load_packed_weight(
    tensors: Sequence[LazyTensor], *, pad: int, copier: HostToDeviceCopy, device: torch.device, workspace: Workspace
) -> PackedWeight:
    """Read a weight by `read_packed_weight`, compile its kernels and reserve its workspace."""
    weight = read_packed_weight(tensors, pad=pad, copier=copier, device=device)
    if device.type == "cuda":  # kernels are compiled when weights are loaded, never during a step
        compile_kernels(weight.kind, device)
    workspace.reserve(weight)
    return weight


def packed_linear(
    tensors: Sequence[LazyTensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
    copier: HostToDeviceCopy,
    workspace: Workspace,
    bias: Tensor | None = None,
    pad: int = 1,
    pad_columns: int = 1,
    pending: PendingActivations | None = None,
    pdl: bool = False,
) -> PackedLinear | None:
    """A linear layer of weights that are concatenated along the outputs; None if none of them can stay quantized, because one
    dense matrix is faster then."""
    if all(map(why_not_gpu_packed, tensors)):
        return None
    tensors, order = in_stored_order(tensors, device)
    parts: list[PackedWeight | Tensor] = []
    for kind, same in groupby(tensors, key=lambda tensor: "" if why_not_gpu_packed(tensor) else tensor.kind):
        together = list(same)
        if kind:
            parts.append(load_packed_weight(together, pad=pad, copier=copier, device=device, workspace=workspace))
        else:
            matrices = [torch.from_numpy(tensor.float32()) for tensor in together]
            matrix = torch.cat([torch.nn.functional.pad(m, (0, 0, 0, -len(m) % pad)) for m in matrices])
            parts.append(matrix.to(device=device, dtype=dtype))
    width = padded(tensors[0].shape[1], pad_columns)
    if device.type == "cuda" and _is_hopper(device):
        for kind in {part.kind for part in parts if isinstance(part, PackedWeight)}:
            minima, by_block = has_minima(kind), kind not in SPAN_SCALE_KINDS
            many_rows_hopper.compile_kernels(by_block=by_block, minima=minima, dtype=dtype, device=device)
    return PackedLinear(
        parts,
        dtype=dtype,
        device=device,
        workspace=workspace,
        bias=bias,
        in_features=width,
        order=order,
        pending=pending,
        pdl=pdl,
    )


def in_stored_order(tensors: Sequence[LazyTensor], device: torch.device) -> tuple[Sequence[LazyTensor], Tensor | None]:
    """Weights with their columns in stored order, and the permutation of an input row into that order (None if it is the
    identity)."""
    (first, *others) = tensors
    if not isinstance(first, ColumnSelection):
        return tensors, None
    assert not others, "a weight with permuted columns is not concatenated with others"
    return [first.stored], torch.from_numpy(np.argsort(first.order)).to(device, torch.int32)


def packed_product(
    activations: PackedActivations,
    weight: PackedWeight,
    *,
    out: Tensor,
    workspace: Workspace,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    partial_sums: Tensor | None = None,
    pdl: bool = False,
    overlaps_previous: bool = False,
    overlaps_next: bool = False,
    number: int = 0,
) -> Tensor:
    """A product with a packed weight: activations · weightᵀ + bias + residual → out [T, N], which may be columns of a wider
    tensor. `partial_sums`, `overlaps_previous` and `overlaps_next`: see `few_rows_product`. `number`: index among the products
    that may run concurrently."""
    rows = len(activations)
    if rows < MANY_ROWS_FROM:
        partial_sums = workspace.partial_sums(weight) if partial_sums is None else partial_sums
        for start in range(0, rows, FEW_ROWS):
            part = slice(start, start + FEW_ROWS)
            few_rows_product(
                activations.rows(part),
                weight,
                out=out[part],
                partial_sums=partial_sums,
                bias=bias,
                residual=None if residual is None else residual[part],
                pdl=pdl,
                overlaps_previous=overlaps_previous,
                overlaps_next=overlaps_next,
                carry=workspace.carry(number),
            )
        return out
    product = many_rows_hopper.many_rows_product if _is_hopper(out.device) else many_rows.many_rows_product
    for columns, buffer in workspace.slices(weight):
        product(
            activations,
            dequantize(weight, columns.start, columns.stop - columns.start, buffer),
            out=out[:, columns],
            bias=None if bias is None else bias[columns],
            residual=None if residual is None else residual[:, columns],
        )
    return out


@lru_cache(maxsize=8)
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == HOPPER


class PackedLinear(Linear):
    """Weights concatenated along the outputs, quantized or as matrices of x's dtype. `order` (int32): the permutation of an input
    row into the stored order of columns, for a single weight with permuted columns. `pending`: activations that the preceding
    norm or gated activation has already packed."""

    def __init__(
        self,
        parts: Sequence[PackedWeight | Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        workspace: Workspace,
        bias: Tensor | None = None,
        in_features: int | None = None,
        order: Tensor | None = None,
        pending: PendingActivations | None = None,
        pdl: bool = False,
    ) -> None:
        self.parts, self._order, self.workspace = tuple(parts), order, workspace
        self._pending = pending or PendingActivations()
        self._heights = [part.rows if isinstance(part, PackedWeight) else len(part) for part in parts]
        first = parts[0]
        self._width = first.width if isinstance(first, PackedWeight) else first.shape[1]
        self.out_features, self.in_features = sum(self._heights), in_features or self._width
        self.dtype, self.device, self.rule, self.bias, self._pdl = dtype, device, RowRule(floor=1), bias, pdl

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The product x Wᵀ + b + residual of x [T, K], each sum rounded."""
        activations = self._pending.take(x) if self._order is None and x.shape[1] == self._width else None
        x = x if x.stride(1) == 1 else x.contiguous()
        if activations is None:
            activations = pack_activations(x, width=self._width, order=self._order, pdl=self._pdl)
        y = torch.empty(len(x), self.out_features, dtype=x.dtype, device=x.device)
        buffers, start = self._partial_sums(len(x)), 0
        self.workspace.carry(len(self.parts) - 1)  # allocated now: filling one must not come between overlapping products
        for i, (part, height) in enumerate(zip(self.parts, self._heights, strict=True)):
            here = slice(start, start + height)
            bias = None if self.bias is None else self.bias[here]
            added = None if residual is None else residual[:, here]
            if isinstance(part, PackedWeight):
                packed_product(
                    activations,
                    part,
                    out=y[:, here],
                    workspace=self.workspace,
                    bias=bias,
                    residual=added,
                    partial_sums=buffers[i] if buffers else None,
                    pdl=self._pdl,
                    overlaps_previous=bool(buffers) and i > 0,
                    overlaps_next=bool(buffers) and i + 1 < len(self.parts),
                    number=i,
                )
            else:
                linear(x[:, : part.shape[1]], part, out=y[:, here], bias=bias, residual=added, pdl=self._pdl)
            start += height
        return y

    def _partial_sums(self, rows: int) -> list[Tensor]:
        """One partial-sum buffer per part if the products of all parts may run concurrently, otherwise an empty list."""
        parts = [part for part in self.parts if isinstance(part, PackedWeight)]
        if not (self._pdl and 1 < len(parts) == len(self.parts) and 0 < rows <= FEW_ROWS):
            return []
        *_, buffer = map(self.workspace.partial_sums, parts)  # a call may grow the buffer; the last one fits all parts
        sizes = [partial_sum_count(rows, part) for part in parts]
        return list(torch.split(buffer[: sum(sizes)], sizes)) if sum(sizes) <= len(buffer) else []

    @property
    def kind(self) -> str:
        return "+".join(part.kind if isinstance(part, PackedWeight) else str(part.dtype) for part in self.parts)

    @property
    def borders(self) -> tuple[int, ...]:
        # On a CPU only tests run these kernels, in an emulator that would take seconds for so many rows.
        return self.all_borders() if self.device.type == "cuda" else ()

    def all_borders(self) -> tuple[int, ...]:
        """Row counts from which another kernel, work split or launch computes the product."""
        found = {pack_border(self._width), FEW_ROWS + 1, MANY_ROWS_FROM}
        for part, height in zip(self.parts, self._heights, strict=True):
            if isinstance(part, PackedWeight):
                found.update(few_rows_borders(part))
            else:
                found.update(tile_borders(height, self._width, part.dtype, shared_memory(self.device)))
        return tuple(sorted(found - {1}))

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        return self(x, residual) if residual.dtype == self.dtype else super().added(x, residual)

    def rows(self, wanted: Tensor, thread_pool: int | None = None) -> Tensor:
        """Dequantize rows of a single weight, by number: [T] → [T, K]."""
        (part,) = self.parts
        if not isinstance(part, PackedWeight):
            return part.index_select(0, wanted)
        return dequantize_rows(part, wanted, out=torch.empty(len(wanted), part.width, dtype=self.dtype, device=self.device))
