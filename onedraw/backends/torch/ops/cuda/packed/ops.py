"""The operations of a GPU whose weights stay in their quantized blocks.

In: a device and the dtype of activations. Out: `PackedOps`: `TritonOps` whose products, experts and embedding tables read weights
in their quantized blocks. A weight of a quantization type without kernels becomes a float tensor. Norms and gates also store
their rows as packed activations, for the packed product that follows them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from onedraw.backends.packing import FEW_ROWS, why_not_gpu_packed
from onedraw.backends.torch.model.weight_loader import LANE
from onedraw.backends.torch.ops.cuda.norm import gated_activation, rms_norm
from onedraw.backends.torch.ops.cuda.ops import TritonOps
from onedraw.backends.torch.ops.cuda.packed.activations import PendingActivations, empty_packed_activations
from onedraw.backends.torch.ops.cuda.packed.experts import PackedExpertBank, load_expert_bank
from onedraw.backends.torch.ops.cuda.packed.linear import HostToDeviceCopy, PackedLinear, packed_linear
from onedraw.backends.torch.ops.cuda.packed.workspace import Workspace
from onedraw.models.source import LazyTensor
from onedraw.models.spec import Activation, AttentionSpec, DeltaSpec


class PackedOps(TritonOps):
    def __init__(self, device: torch.device, dtype: torch.dtype, *, pdl: bool = False) -> None:
        super().__init__(device, pdl=pdl)
        self.name = f"{device.type}-triton-packed"
        self._dtype, self._copier, self._pending, self._workspace = (
            dtype,
            HostToDeviceCopy(device),
            PendingActivations(),
            Workspace(device),
        )

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        if x.dim() != 2 or x.dtype != self._dtype:
            return super().rms_norm(x, weight, eps)
        activations = empty_packed_activations(len(x), x.shape[1], x.device)
        y = rms_norm(x, weight, eps, packed=activations, pdl=self._pdl)
        self._pending.put(y, activations)
        return y

    def kernel_borders(self, mixers: Collection[AttentionSpec | DeltaSpec]) -> tuple[int, ...]:
        """Includes FEW_ROWS + 1: up to FEW_ROWS rows, several programs of the norm kernel share a row."""
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
