"""The mixers of a layer: attention and Gated DeltaNet, each with its weights on one device.

In: normed tokens h [T, E], the step's prepared inputs, and the layer's store. Out: [T, E], to be added to the residual, or the
sum with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onedraw.backends.torch.model.weight_loader import WeightLoader
from onedraw.backends.torch.ops.base import Ops, PreparedInputs
from onedraw.backends.torch.ops.plain.delta import DeltaWeights
from onedraw.backends.torch.ops.plain.linear import Linear
from onedraw.backends.torch.state.kv_pages import PageStore
from onedraw.backends.torch.state.model_state import LayerStore
from onedraw.backends.torch.state.recurrent_state import LaneStore
from onedraw.models.spec import AttentionSpec, DeltaSpec


@dataclass(frozen=True, slots=True)
class AttentionMixer:
    spec: AttentionSpec
    qkv: Linear  # q, k, v and the gate in one product, whichever there are
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    eps: float

    @staticmethod
    def load(index: int, spec: AttentionSpec, loader: WeightLoader, eps: float) -> AttentionMixer:
        own = spec.reuses is None
        parts = ["q", *(["k"] if own else []), *(["v"] if own and not spec.keys_as_values else [])]
        gate = ["attn_gate"] if spec.gate is not None else []
        bias = None
        if spec.qkv_bias:
            bias = loader.kept(index, *(f"{part}_bias" for part in parts))
            bias = torch.cat([bias, bias.new_zeros(spec.gate_width)])  # a gate has none
        return AttentionMixer(
            spec=spec,
            qkv=loader.linear(index, *parts, *gate, bias=bias),
            q_norm=loader.norm(index, "q_norm") if spec.qk_norm else None,
            k_norm=loader.norm(index, "k_norm") if spec.qk_norm and own else None,
            out=loader.linear(index, "o", bias=loader.kept(index, "o_bias") if spec.out_bias else None),
            eps=eps,
        )

    @property
    def linears(self) -> list[Linear]:
        return [self.qkv, self.out]

    def __call__(
        self, h: Tensor, prepared: PreparedInputs, store: LayerStore, ops: Ops, residual: Tensor | None = None
    ) -> Tensor:
        assert isinstance(store, PageStore)
        spec = self.spec
        qkv = self.qkv(h)  # [T, (H + 2K) * D + gate]
        gate = qkv[:, qkv.shape[1] - spec.gate_width :]
        mixed = prepared.attention(spec).attend(
            qkv, spec=spec, store=store, q_norm=self.q_norm, k_norm=self.k_norm, eps=self.eps
        )  # [T, H * D]
        mixed = mixed if spec.gate is None else ops.apply_gate(mixed, gate, spec.gate)
        return self.out(mixed) if residual is None else self.out.added(mixed, residual)


@dataclass(frozen=True, slots=True)
class DeltaMixer:
    spec: DeltaSpec
    projections: Linear  # qkv, z, a, b in one product
    weights: DeltaWeights
    out: Linear

    @staticmethod
    def load(index: int, spec: DeltaSpec, loader: WeightLoader, eps: float) -> DeltaMixer:
        loader.ops.check_supported(spec)
        return DeltaMixer(
            spec=spec,
            projections=loader.linear(index, "delta_qkv", "delta_z", "delta_a", "delta_b"),
            weights=DeltaWeights(
                conv=loader.wide(index, "conv").t().contiguous(),
                decay=loader.wide(index, "decay"),
                bias=loader.wide(index, "delta_bias"),
                norm=loader.wide(index, "delta_norm"),
                eps=eps,
            ),
            out=loader.linear(index, "o"),
        )

    @property
    def linears(self) -> list[Linear]:
        return [self.projections, self.out]

    def __call__(
        self, h: Tensor, prepared: PreparedInputs, store: LayerStore, ops: Ops, residual: Tensor | None = None
    ) -> Tensor:
        assert isinstance(store, LaneStore)
        mixed = prepared.delta(self.spec).run(self.projections(h), weights=self.weights, store=store).to(h.dtype)
        return self.out(mixed) if residual is None else self.out.added(mixed, residual)


Mixer = AttentionMixer | DeltaMixer


def load_mixer(index: int, spec: AttentionSpec | DeltaSpec, loader: WeightLoader, eps: float) -> Mixer:
    if isinstance(spec, DeltaSpec):
        return DeltaMixer.load(index, spec, loader, eps)
    return AttentionMixer.load(index, spec, loader, eps)
