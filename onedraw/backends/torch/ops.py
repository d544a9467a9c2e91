"""What a stack asks of a device: products, norms, activations, attention. `TorchOps` answers with plain torch.

In: tensors. Out: tensors whose rows do not depend on each other. Kernels answer the same questions faster
(`kernels/cpu.py`); their bits are their own, so a fingerprint names which of them computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from onedraw.backends.torch.inputs import Inputs
from onedraw.backends.torch.layers.attention import TileGroup, attend, store_rows
from onedraw.backends.torch.layers.elementwise import gated
from onedraw.backends.torch.layers.linear import Linear, RowRule, default_rule
from onedraw.backends.torch.layers.norm import rms_norm
from onedraw.backends.torch.layers.rope import rotate
from onedraw.backends.torch.state import PageStore, write_places
from onedraw.backends.torch.tiles import tile_groups
from onedraw.models.spec import Activation, AttentionSpec, RopeSpec


class Ops(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def rule(self) -> RowRule:
        """How rows must be offered to the products."""
        ...

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor: ...

    def prepare(self, inputs: Inputs, mixer: AttentionSpec, turns: Tensor) -> Any:
        """What layers of one kind read alike in one turn, for `attention`. turns: the rope table [positions, 2, d/2]."""
        ...

    def attention(
        self,
        qkv: Tensor,
        prepared: Any,
        *,
        spec: AttentionSpec,
        store: PageStore,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """qkv [T, (H + 2K) * D] → [T, H * D]; the turn's keys and values are written before any is read."""
        ...

    def remember(
        self, kv: Tensor, prepared: Any, *, spec: AttentionSpec, store: PageStore, k_norm: Tensor | None, eps: float
    ) -> None:
        """Norm, turn and write keys and values [T, 2K * D] without attending."""
        ...


class Preparation:
    """`Ops.prepare` once per kind of attention in one turn. Owner: the pass over the layers that made it."""

    def __init__(self, ops: Ops, inputs: Inputs, ropes: Mapping[RopeSpec, Tensor]) -> None:
        self._ops, self._inputs, self._ropes = ops, inputs, ropes
        self._found: dict[AttentionSpec, Any] = {}

    def of(self, mixer: AttentionSpec) -> Any:
        if mixer not in self._found:
            self._found[mixer] = self._ops.prepare(self._inputs, mixer, self._ropes[mixer.rope])
        return self._found[mixer]


@dataclass(frozen=True, slots=True)
class Prepared:
    turn: Tensor  # [T, 2, d/2] cos and sin
    places: Tensor  # [T * K]
    groups: list[TileGroup]
    rows: list[Tensor]


class TorchOps:
    """Plain torch operations on a CPU or a CUDA device. `obey` and `tile_heights` are set by the self-check."""

    def __init__(self, device: torch.device) -> None:
        self.name = f"{device.type}-torch"
        self.rule = default_rule(device)
        self.tile_heights: tuple[int, ...] = (4, 16) if device.type == "cpu" else (16,)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return Linear(weight, bias=bias, rule=self.rule)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return gated(gate_up, activation)

    def prepare(self, inputs: Inputs, mixer: AttentionSpec, turns: Tensor) -> Prepared:
        groups = tile_groups(inputs, window=mixer.window, heights=self.tile_heights)
        pages = inputs.table[inputs.rows, inputs.slots // inputs.page_size]
        slots = inputs.slots % inputs.page_size
        return Prepared(
            turn=turns.index_select(0, inputs.positions),
            places=write_places(pages, slots, kv_heads=mixer.kv_heads, page_size=inputs.page_size),
            groups=groups,
            rows=[store_rows(group, kv_heads=mixer.kv_heads, page_size=inputs.page_size) for group in groups],
        )

    def attention(
        self,
        qkv: Tensor,
        prepared: Prepared,
        *,
        spec: AttentionSpec,
        store: PageStore,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        heads, kv = spec.heads, spec.kv_heads
        split = qkv.view(len(qkv), heads + 2 * kv, spec.head_dim)
        both, values = split[:, : heads + kv], split[:, heads + kv :]
        if q_norm is not None and k_norm is not None:
            q = rms_norm(both[:, :heads].contiguous(), q_norm, eps)
            k = rms_norm(both[:, heads:].contiguous(), k_norm, eps)
            both = torch.cat([q, k], dim=1)
        turned = rotate(both, prepared.turn)
        store.write(turned[:, heads:], values, prepared.places)
        return attend(turned[:, :heads], store.keys, store.values, groups=prepared.groups, rows=prepared.rows, spec=spec)

    def remember(
        self, kv: Tensor, prepared: Prepared, *, spec: AttentionSpec, store: PageStore, k_norm: Tensor | None, eps: float
    ) -> None:
        split = kv.view(len(kv), 2 * spec.kv_heads, spec.head_dim)
        keys, values = split[:, : spec.kv_heads].contiguous(), split[:, spec.kv_heads :]
        keys = keys if k_norm is None else rms_norm(keys, k_norm, eps)
        store.write(rotate(keys, prepared.turn), values, prepared.places)
