"""One layer: its weights on a device, and a step's tokens through it.

In: weights by name, then x [T, E] and the layer's store. Out: x [T, E], and the tokens' keys, values or state in the store. A
layer is a mixer and a feed-forward, each behind a norm; what some families add (norms behind, experts beside, an input of the
layer's own, a factor) is a field that may be None.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from onedraw.backends.torch.model.feed_forward import FeedForward, MixtureOfExperts, load_feed_forward
from onedraw.backends.torch.model.fused_layers import dense_layer
from onedraw.backends.torch.model.mixers import Mixer, load_mixer
from onedraw.backends.torch.model.weight_loader import LANE, WeightLoader
from onedraw.backends.torch.ops.base import FusedLayers, Ops, PreparedInputs
from onedraw.backends.torch.ops.plain.elementwise import activated
from onedraw.backends.torch.ops.plain.linear import Linear
from onedraw.backends.torch.ops.plain.norm_and_rope import rope_table
from onedraw.backends.torch.state.kv_pages import PageStore
from onedraw.backends.torch.state.model_state import LayerStore
from onedraw.models.spec import Activation, AttentionSpec, LayerSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class LayerInput:
    """A layer's own input: x += norm(out(act(gate(x)) * input))."""

    gate: Linear
    out: Linear
    norm: Tensor
    activation: Activation
    width: int

    def __call__(self, x: Tensor, own: Tensor, ops: Ops, eps: float) -> Tensor:
        opened = activated(self.gate(x.to(self.gate.dtype)), self.activation)
        opened[:, : self.width] *= own  # padding is multiplied by zero columns of `out`
        return ops.rms_norm(self.out(opened).to(x.dtype), self.norm, eps)


@dataclass(frozen=True, slots=True)
class ParallelExperts:
    """Experts next to a feed-forward: both outputs are normed, then added."""

    experts: MixtureOfExperts
    dense_norm: Tensor
    norm: Tensor
    post_norm: Tensor


@dataclass(frozen=True, slots=True)
class Layer:
    spec: LayerSpec
    attn_norm: Tensor
    mixer: Mixer
    post_attn_norm: Tensor | None
    mlp_norm: Tensor
    feed_forward: FeedForward
    post_mlp_norm: Tensor | None
    beside: ParallelExperts | None
    own_input: LayerInput | None
    scale: Tensor | None  # [1]
    dtype: torch.dtype  # of its products; the residual stream may have another
    fused: FusedLayers | None = None  # the whole layer in one operation

    @property
    def linears(self) -> list[Linear]:
        beside = [] if self.beside is None else self.beside.experts.linears
        inputs = [] if self.own_input is None else [self.own_input.gate, self.own_input.out]
        return [*self.mixer.linears, *self.feed_forward.linears, *beside, *inputs]


def load_layer(index: int, spec: LayerSpec, loader: WeightLoader, ops: Ops, eps: float) -> Layer:
    beside = own_input = None
    if spec.parallel_experts is not None:
        norms = [loader.norm(index, name) for name in ("dense_norm", "experts_norm", "post_experts_norm")]
        beside = ParallelExperts(MixtureOfExperts.load(index, spec.parallel_experts, loader, eps), *norms)
    if spec.inputs:
        own_input = LayerInput(
            gate=loader.linear(index, "inputs_gate", pad=LANE),
            out=loader.linear(index, "inputs_out", pad_columns=LANE),
            norm=loader.norm(index, "inputs_norm"),
            activation=spec.feed_forward.activation,
            width=spec.inputs,
        )
    layer = Layer(
        spec=spec,
        attn_norm=loader.norm(index, "attn_norm"),
        mixer=load_mixer(index, spec.mixer, loader, eps),
        post_attn_norm=loader.norm(index, "post_attn_norm") if spec.sandwich else None,
        mlp_norm=loader.norm(index, "mlp_norm"),
        feed_forward=load_feed_forward(index, spec.feed_forward, loader, eps),
        post_mlp_norm=loader.norm(index, "post_mlp_norm") if spec.sandwich else None,
        beside=beside,
        own_input=own_input,
        scale=loader.kept(index, "layer_scale") if spec.scaled else None,
        dtype=loader.dtype,
    )
    dense = dense_layer(layer, eps)
    return layer if dense is None else replace(layer, fused=ops.fuse([dense]))


def run_layer(
    x: Tensor, layer: Layer, *, ops: Ops, store: LayerStore, prepared: PreparedInputs, eps: float, own_input: Tensor | None = None
) -> Tensor:
    """One layer over a step's tokens: x [T, E] → [T, E]. own_input [T, width] where the layer has one."""
    if layer.fused is not None:
        assert isinstance(store, PageStore)
        return layer.fused(x, [prepared.attention(layer.spec.attention)], [store])[0]
    h = ops.rms_norm(x, layer.attn_norm, eps).to(layer.dtype)
    if layer.post_attn_norm is None:
        x = layer.mixer(h, prepared, store, ops, x)
    else:
        x = x + ops.rms_norm(layer.mixer(h, prepared, store, ops).to(x.dtype), layer.post_attn_norm, eps)
    h = ops.rms_norm(x, layer.mlp_norm, eps).to(layer.dtype)
    if layer.beside is None and layer.post_mlp_norm is None:
        x = layer.feed_forward.added(h, x, ops)
    else:
        fed = layer.feed_forward(h, x, ops).to(x.dtype)
        if layer.beside is not None:
            both = layer.beside
            answers = both.experts(ops.rms_norm(x, both.norm, eps).to(layer.dtype), x, ops).to(x.dtype)
            fed = ops.rms_norm(fed, both.dense_norm, eps) + ops.rms_norm(answers, both.post_norm, eps)
        x = x + (fed if layer.post_mlp_norm is None else ops.rms_norm(fed, layer.post_mlp_norm, eps))
    if layer.own_input is not None:
        assert own_input is not None
        x = x + layer.own_input(x, own_input, ops, eps)
    return x if layer.scale is None else x * layer.scale.to(x.dtype)


def rope_tables(
    layers: tuple[LayerSpec, ...], positions: int, *, dtype: torch.dtype, device: torch.device
) -> dict[RopeSpec, Tensor]:
    ropes = {layer.mixer.rope for layer in layers if isinstance(layer.mixer, AttentionSpec)}
    return {rope: rope_table(rope, positions, dtype=dtype, device=device) for rope in ropes}
