"""The operations of a GPU whose weights stay in their quantized blocks.

In: a device and the dtype of activations. Out: `PackedOps`: `TritonOps` whose products, experts and embedding tables read weights
in their quantized blocks. A weight of a quantization type without kernels becomes a float tensor. Norms and gated activations
also store their rows as packed activations, for the packed product that follows them. Expert products follow the arithmetic of
all packed products (activations.py): the result for a row and an expert is bitwise that of a product with the expert's matrix
alone. Rows are grouped by expert on the device, and one launch computes all experts. A pair is a row and one of its experts; a
segment is 1,024 inputs. Axes: E hidden width, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from onedraw.backends.packing import FEW_ROWS, why_not_gpu_packed
from onedraw.backends.torch.model.weight_loader import LANE
from onedraw.backends.torch.ops.cuda.experts import Routes, combine, route, route_borders
from onedraw.backends.torch.ops.cuda.linear import shared_memory
from onedraw.backends.torch.ops.cuda.norm import gated_activation, rms_norm
from onedraw.backends.torch.ops.cuda.ops import TritonOps
from onedraw.backends.torch.ops.cuda.packed.activations import (
    PackedActivations,
    PendingActivations,
    empty_packed_activations,
    pack_activations,
    pack_border,
)
from onedraw.backends.torch.ops.cuda.packed.few_rows import compile_expert_kernels, experts_product, tile_height
from onedraw.backends.torch.ops.cuda.packed.linear import (
    HostToDeviceCopy,
    PackedLinear,
    Workspace,
    packed_linear,
    read_packed_weight,
)
from onedraw.backends.torch.ops.cuda.packed.tensor_core_layout import PackedWeight
from onedraw.backends.torch.ops.cuda.packed.work_split import expert_borders
from onedraw.backends.torch.ops.plain.linear import Linear
from onedraw.models.source import LazyTensor
from onedraw.models.spec import Activation, AttentionSpec, DeltaSpec


class PackedExpertBank:
    """The quantized matrices of all experts; gate and up are concatenated if they have the same type. `pending`: activations that
    the preceding norm or gated activation has already packed."""

    def __init__(
        self,
        gate_up: Sequence[PackedWeight],
        down: PackedWeight,
        activation: Activation,
        *,
        pending: PendingActivations | None = None,
        pdl: bool = False,
    ) -> None:
        self._gate_up, self._down, self._activation = tuple(gate_up), down, activation
        self._pending, self._pdl = pending or PendingActivations(), pdl

    @property
    def kind(self) -> str:
        return "+".join(part.kind for part in (*self._gate_up, self._down))

    @property
    def linears(self) -> list[Linear]:
        """Empty: the self-check looks for the row counts that products need (`Linear.rule`), and expert products accept any."""
        return []

    def borders(self, used: int) -> tuple[int, ...]:
        """Row counts from which pairs are grouped by sorting, row tiles are larger, or a program packs two segments."""
        device, count = self._down.units.device, self._down.count
        if device.type != "cuda":  # tests emulate the kernels on a CPU, which takes seconds for so many rows
            return ()
        found = {route_borders(count, used)[0], pack_border(self._gate_up[0].width)}
        found.update(pairs // used + 1 for pairs in expert_borders(count, shared=shared_memory(device)))
        return tuple(sorted(found - {1}))

    def __call__(self, h: Tensor, ids: Tensor, weights: Tensor, scale: float) -> Tensor:
        count, pdl = self._down.count, self._pdl
        activations = self._pending.peek(h)  # a shared expert may read the same rows afterwards
        if activations is None:
            activations = pack_activations(h if h.stride(1) == 1 else h.contiguous(), pdl=pdl)
        routes = route(ids, weights, count=count, height=tile_height(ids.numel(), count, h.device), pdl=pdl)
        gate_up = self._products(activations, self._gate_up, routes, divide=routes.used, dtype=h.dtype)  # [pairs, 2F]
        hidden = empty_packed_activations(len(gate_up), gate_up.shape[1] // 2, h.device)
        gated_activation(gate_up, self._activation, packed=hidden, pdl=pdl)
        outputs = self._products(hidden, [self._down], routes, divide=1, dtype=h.dtype)  # [pairs, E]
        return combine(outputs, routes, width=h.shape[1], scale=scale, pdl=pdl)

    def _products(
        self, activations: PackedActivations, parts: Sequence[PackedWeight], routes: Routes, *, divide: int, dtype: torch.dtype
    ) -> Tensor:
        out = torch.empty(len(routes.order), sum(part.rows for part in parts), dtype=dtype, device=activations.x.device)
        start = 0
        for part in parts:
            here = out[:, start : start + part.rows]
            experts_product(activations, part, routes, divide=divide, out=here, pdl=self._pdl)
            start += part.rows
        return out


def load_expert_bank(
    gate_up: Sequence[LazyTensor],
    down: LazyTensor,
    activation: Activation,
    *,
    pad: int,
    copier: HostToDeviceCopy,
    device: torch.device,
    pending: PendingActivations | None = None,
    pdl: bool = False,
) -> PackedExpertBank:
    """Load stacks of stored matrices as experts; F is padded to a multiple of `pad` by zero rows of gate and up."""
    together = len({tensor.kind for tensor in gate_up}) == 1
    groups = [list(gate_up)] if together else [[tensor] for tensor in gate_up]
    first = [read_packed_weight(group, pad=pad, copier=copier, device=device) for group in groups]
    last = read_packed_weight([down], pad=1, copier=copier, device=device)
    if device.type == "cuda":  # kernels are compiled when weights are loaded, never during a step
        for kind in {part.kind for part in (*first, last)}:
            compile_expert_kernels(kind, device)
    return PackedExpertBank(first, last, activation, pending=pending, pdl=pdl)


class PackedOps(TritonOps):
    def __init__(self, device: torch.device, dtype: torch.dtype, *, pdl: bool = False) -> None:
        super().__init__(device, pdl=pdl)
        self.name = f"{device.type}-triton-packed"
        self._dtype, self._copier = dtype, HostToDeviceCopy(device)
        self._pending, self._workspace = PendingActivations(), Workspace(device)

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        if x.dim() != 2 or x.dtype != self._dtype:
            return super().rms_norm(x, weight, eps)
        activations = empty_packed_activations(len(x), x.shape[1], x.device)
        y = rms_norm(x, weight, eps, packed=activations, pdl=self._pdl)
        self._pending.put(y, activations)
        return y

    def kernel_borders(self, mixers: Collection[AttentionSpec | DeltaSpec]) -> tuple[int, ...]:
        """Row counts from which other kernels run: those of the Triton kernels, and FEW_ROWS + 1, because up to FEW_ROWS rows
        several programs share a row of a norm."""
        known = super().kernel_borders(mixers)
        return tuple(sorted({*known, FEW_ROWS + 1})) if known else ()

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        activations = empty_packed_activations(len(gate_up), gate_up.shape[1] // 2, gate_up.device)
        y = gated_activation(gate_up, activation, packed=activations, pdl=self._pdl)
        self._pending.put(y, activations)
        return y

    def packed_linear(
        self, tensors: Sequence[LazyTensor], *, bias: Tensor | None, pad: int, pad_columns: int
    ) -> PackedLinear | None:
        return packed_linear(
            tensors,
            dtype=self._dtype,
            device=self._device,
            copier=self._copier,
            workspace=self._workspace,
            bias=bias,
            pad=pad,
            pad_columns=pad_columns,
            pending=self._pending,
            pdl=self._pdl,
        )

    def packed_expert_bank(
        self, gate_up: Sequence[LazyTensor], down: LazyTensor, activation: Activation
    ) -> PackedExpertBank | None:
        if any(map(why_not_gpu_packed, [*gate_up, down])):
            return None
        return load_expert_bank(
            gate_up,
            down,
            activation,
            pad=LANE,
            copier=self._copier,
            device=self._device,
            pending=self._pending,
            pdl=self._pdl,
        )

    def packed_table(self, tensor: LazyTensor) -> PackedLinear | None:
        return self.packed_linear([tensor], bias=None, pad=LANE, pad_columns=1)
