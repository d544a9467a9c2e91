"""One layer: its weights on a device, and the tokens of a step through it.

In: weights by name; then the residual stream x [T, E] and the layer's store. Out: x [T, E], with the keys and values or the
recurrent state of the tokens in the store. A layer is a mixer and a feed-forward, each after a norm. Parts that only some
families have (norms after mixer and feed-forward, parallel experts, an input of the layer's own, a factor) are fields that may be
None. Axes: T tokens of a step, E hidden width, H query heads and K key heads of size D. q, k, v are the projections of attention;
qkv, z, a, b those of Gated DeltaNet (formulas: `ops/plain/delta.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onedraw.backends.torch.model.block_convolution import LayerConvolutions
from onedraw.backends.torch.model.weight_loader import LANE, WeightLoader
from onedraw.backends.torch.ops.base import DenseLayer, FusedLayers, GatedProduct, Ops, PreparedInputs
from onedraw.backends.torch.ops.plain.delta import DeltaWeights
from onedraw.backends.torch.ops.plain.elementwise import activated, rope_table
from onedraw.backends.torch.ops.plain.experts import ExpertBank
from onedraw.backends.torch.ops.plain.linear import Linear
from onedraw.backends.torch.state.kv_pages import PageStore
from onedraw.backends.torch.state.model_state import LayerStore, ModelState
from onedraw.backends.torch.state.recurrent_state import LaneStore
from onedraw.models.spec import Activation, AttentionSpec, DeltaSpec, LayerSpec, MlpSpec, MoeSpec, RopeSpec

if TYPE_CHECKING:
    from onedraw.backends.torch.runner.pipeline import LayerProbe, Stage


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer with its weights on a device."""

    spec: LayerSpec
    attn_norm: Tensor
    mixer: Mixer
    post_attn_norm: Tensor | None
    mlp_norm: Tensor
    feed_forward: FeedForward
    post_mlp_norm: Tensor | None
    parallel_experts: ParallelExperts | None
    own_input: LayerInput | None
    scale: Tensor | None  # [1], by which the layer's output is multiplied; None stands for 1
    dtype: torch.dtype  # dtype of products; the residual stream may have another dtype
    fused: FusedLayers | None = None  # the whole layer as one operation, if `ops` has one for it
    convolutions: LayerConvolutions | None = None  # around mixer and feed-forward, in layers of DFlash2 drafters

    def norm_dtype(self, x: Tensor) -> torch.dtype:
        """The dtype in which norms read the residual stream x: that of the products, where the stream is narrower, so that their
        input is not rounded to the stream's dtype."""
        return torch.promote_types(x.dtype, self.dtype)

    @property
    def linears(self) -> list[Linear]:
        """All matrix products of the layer, which the self-check compares."""
        experts = [] if self.parallel_experts is None else self.parallel_experts.experts.linears
        inputs = [] if self.own_input is None else [self.own_input.gate, self.own_input.out]
        return [*self.mixer.linears, *self.feed_forward.linears, *experts, *inputs]


def load_layer(index: int, spec: LayerSpec, loader: WeightLoader, ops: Ops, eps: float) -> Layer:
    parallel_experts = own_input = None
    if spec.parallel_experts is not None:
        norms = [loader.norm(index, name) for name in ("dense_norm", "experts_norm", "post_experts_norm")]
        parallel_experts = ParallelExperts(MixtureOfExperts.load(index, spec.parallel_experts, loader, eps), *norms)
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
        parallel_experts=parallel_experts,
        own_input=own_input,
        scale=loader.kept(index, "layer_scale") if spec.scaled else None,
        dtype=loader.dtype,
    )
    dense = dense_layer(layer, eps)
    return layer if dense is None else replace(layer, fused=ops.fuse([dense]))


def run_layer(
    x: Tensor,
    layer: Layer,
    *,
    ops: Ops,
    store: LayerStore,
    prepared: PreparedInputs,
    eps: float,
    own_input: Tensor | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """Run the tokens of a step through one layer: residual stream x [T, E] → [T, E]. `own_input`: [T, width], for layers that
    have an input of their own. `slots`: [T], the place of each token in its block, for layers with convolutions."""
    if layer.fused is not None:
        assert isinstance(store, PageStore)
        return layer.fused(x, [prepared.attention(layer.spec.attention)], [store])[0]
    wide = layer.norm_dtype(x)
    h = ops.rms_norm(x.to(wide), layer.attn_norm, eps).to(layer.dtype)
    if (around := layer.convolutions) is not None:
        assert slots is not None
        x = x + around.mixer(h, slots, lambda h: layer.mixer(h, prepared, store, ops)).to(x.dtype)
    elif layer.post_attn_norm is None:
        x = layer.mixer(h, prepared, store, ops, x)
    else:
        x = x + ops.rms_norm(layer.mixer(h, prepared, store, ops).to(wide), layer.post_attn_norm, eps).to(x.dtype)
    h = ops.rms_norm(x.to(wide), layer.mlp_norm, eps).to(layer.dtype)
    if around is not None and slots is not None:
        x = x + around.feed_forward(h, slots, lambda h: layer.feed_forward(h, x, ops)).to(x.dtype)
    elif layer.parallel_experts is None and layer.post_mlp_norm is None:
        x = layer.feed_forward(h, x, ops, add=True)
    else:
        fed = layer.feed_forward(h, x, ops).to(wide)
        if (parallel := layer.parallel_experts) is not None:
            answers = parallel.experts(ops.rms_norm(x.to(wide), parallel.norm, eps).to(layer.dtype), x, ops).to(wide)
            fed = ops.rms_norm(fed, parallel.dense_norm, eps) + ops.rms_norm(answers, parallel.post_norm, eps)
        x = x + (fed if layer.post_mlp_norm is None else ops.rms_norm(fed, layer.post_mlp_norm, eps)).to(x.dtype)
    if layer.own_input is not None:
        assert own_input is not None
        x = x + layer.own_input(x, own_input, ops, eps)
    return x if layer.scale is None else x * layer.scale.to(x.dtype)


def rope_tables(
    layers: tuple[LayerSpec, ...], positions: int, *, dtype: torch.dtype, device: torch.device
) -> dict[RopeSpec, Tensor]:
    ropes = {layer.mixer.rope for layer in layers if isinstance(layer.mixer, AttentionSpec)}
    return {rope: rope_table(rope, positions, dtype=dtype, device=device) for rope in ropes}


# ---------------------------------------------------------------------- parts that only some families have


@dataclass(frozen=True, slots=True)
class LayerInput:
    """The term that a layer's own input adds to the residual stream x: norm(out(act(gate(x)) * input))."""

    gate: Linear
    out: Linear
    norm: Tensor
    activation: Activation
    width: int

    def __call__(self, x: Tensor, own: Tensor, ops: Ops, eps: float) -> Tensor:
        gate = activated(self.gate(x.to(self.gate.dtype)), self.activation)
        gate[:, : self.width] *= own  # the columns of padding after `width` meet zero columns of `out`
        return ops.rms_norm(self.out(gate).to(x.dtype), self.norm, eps)


@dataclass(frozen=True, slots=True)
class ParallelExperts:
    """A mixture of experts that reads the same residual stream as the feed-forward; both outputs are normed, then added."""

    experts: MixtureOfExperts
    dense_norm: Tensor  # [E], weight of the norm after the feed-forward
    norm: Tensor  # [E], weight of the norm before the experts
    post_norm: Tensor  # [E], weight of the norm after the experts


# ---------------------------------------------------------------------- mixers


@dataclass(frozen=True, slots=True)
class AttentionMixer:
    """Attention with its projections. A layer that reuses the keys and values of another layer projects queries only."""

    spec: AttentionSpec
    qkv: Linear  # q, k, v and the gate as one product; layers differ in which of them they have
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
            bias = torch.cat([bias, bias.new_zeros(spec.gate_width)])  # a gate has no bias
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
        qkv = self.qkv(h)  # [T, (H + 2K) * D + columns of the gate]
        gate = qkv[:, qkv.shape[1] - spec.gate_width :]
        mixed = prepared.attention(spec).attend(
            qkv, spec=spec, store=store, q_norm=self.q_norm, k_norm=self.k_norm, eps=self.eps
        )  # [T, H * D]
        mixed = mixed if spec.gate is None else ops.apply_gate(mixed, gate, spec.gate)
        return self.out(mixed) if residual is None else self.out.added(mixed, residual)


@dataclass(frozen=True, slots=True)
class DeltaMixer:
    """Gated DeltaNet with its projections."""

    spec: DeltaSpec
    projections: Linear  # the projections qkv, z, a and b in one product
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


# ---------------------------------------------------------------------- feed-forwards


@dataclass(frozen=True, slots=True)
class Mlp:
    """A dense gated feed-forward: down(act(gate(h)) * up(h)). Padding adds zero rows and columns, whose products are exact
    zeros."""

    gate_up: Linear
    gated_product: GatedProduct | None  # the same product with the activation fused, if `ops` has such an operation
    down: Linear
    activation: Activation

    @staticmethod
    def load(index: int, spec: MlpSpec, loader: WeightLoader, names: tuple[str, str, str] = ("gate", "up", "down")) -> Mlp:
        gate, up, down = names
        gate_up = loader.linear(
            index,
            gate,
            up,
            bias=loader.kept(index, f"{gate}_bias", f"{up}_bias", pad=LANE) if spec.bias else None,
            pad=LANE,
        )
        gated_product = loader.ops.gated_product(gate_up, spec.activation)
        return Mlp(
            gate_up=gated_product if isinstance(gated_product, Linear) else gate_up,
            gated_product=gated_product,
            down=loader.linear(index, down, bias=loader.kept(index, f"{down}_bias") if spec.bias else None, pad_columns=LANE),
            activation=spec.activation,
        )

    @property
    def linears(self) -> list[Linear]:
        return [self.gate_up, self.down]

    def __call__(self, h: Tensor, residual: Tensor, ops: Ops, *, add: bool = False) -> Tensor:
        """The output for the normed input h, added to the residual if `add`."""
        gated = ops.gated(self.gate_up(h), self.activation) if self.gated_product is None else self.gated_product.gated(h)
        return self.down.added(gated, residual) if add else self.down(gated)


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """Routed experts, and perhaps a shared expert that every token passes."""

    spec: MoeSpec
    router: Linear  # gives the logits of the experts
    select_bias: Tensor | None  # [experts], added to the scores by which experts are selected, but not to their weights
    expert_scale: Tensor | None  # [experts], by which the experts' weights are multiplied; None: not at all
    router_scale: Tensor | None  # [E], weight of the router's own norm; None: the router reads the layer's normed input
    bank: ExpertBank
    shared: Mlp | None  # an expert that every token passes, if there is one
    shared_route: Linear | None  # gives the gate of the shared expert, if it has one
    eps: float

    @staticmethod
    def load(index: int, spec: MoeSpec, loader: WeightLoader, eps: float) -> MixtureOfExperts:
        shared = MlpSpec(spec.shared, spec.activation)
        return MixtureOfExperts(
            spec=spec,
            router=loader.linear(index, "router", pad=LANE),
            select_bias=loader.wide(index, "select_bias") if spec.select_bias else None,
            expert_scale=loader.wide(index, "expert_scale") if spec.expert_scale else None,
            router_scale=loader.wide(index, "router_scale") if spec.own_router_norm else None,
            bank=loader.bank(index, spec.activation),
            shared=Mlp.load(index, shared, loader, ("shared_gate", "shared_up", "shared_down")) if spec.shared else None,
            shared_route=loader.linear(index, "shared_route", pad=LANE) if spec.shared_gate else None,
            eps=eps,
        )

    @property
    def linears(self) -> list[Linear]:
        shared = [] if self.shared is None else self.shared.linears
        return [self.router, *self.bank.linears, *shared, *([self.shared_route] if self.shared_route else [])]

    def __call__(self, h: Tensor, residual: Tensor, ops: Ops, *, add: bool = False) -> Tensor:
        """The output for the normed input h, added to the residual if `add`."""
        out = self._experts(h, residual, ops)
        if self.shared is None:
            return residual + out.to(residual.dtype) if add else out
        gate = None if self.shared_route is None else self.shared_route(h)
        return ops.join_shared(out, self.shared(h, residual, ops), gate, residual if add else None)

    def _experts(self, h: Tensor, residual: Tensor, ops: Ops) -> Tensor:
        routed = h
        if self.router_scale is not None:
            normed = ops.rms_norm(residual.to(torch.promote_types(residual.dtype, h.dtype)), None, self.eps)
            routed = (normed.float() * self.router_scale * h.shape[1] ** -0.5).to(h.dtype)
        ids, weights = ops.choose_experts(self.router(routed), self.spec, bias=self.select_bias, factors=self.expert_scale)
        return self.bank(h, ids, weights, self.spec.scale)


FeedForward = Mlp | MixtureOfExperts


def load_feed_forward(index: int, spec: MlpSpec | MoeSpec, loader: WeightLoader, eps: float) -> FeedForward:
    if isinstance(spec, MoeSpec):
        return MixtureOfExperts.load(index, spec, loader, eps)
    return Mlp.load(index, spec, loader)


# ---------------------------------------------------------------------- fused layers


def dense_layer(layer: Layer, eps: float) -> DenseLayer | None:
    """The weights of a layer in the form that `Ops.fuse` takes; None if it has anything besides attention, a dense
    feed-forward, and one norm before each."""
    spec, mixer, feed_forward = layer.spec, layer.mixer, layer.feed_forward
    if spec.sandwich or spec.parallel_experts is not None or spec.inputs or spec.scaled:
        return None
    if not isinstance(mixer, AttentionMixer) or not isinstance(feed_forward, Mlp):
        return None
    return DenseLayer(
        spec=mixer.spec,
        attn_norm=layer.attn_norm,
        qkv=mixer.qkv,
        q_norm=mixer.q_norm,
        k_norm=mixer.k_norm,
        out=mixer.out,
        mlp_norm=layer.mlp_norm,
        gate_up=feed_forward.gate_up,
        down=feed_forward.down,
        activation=feed_forward.activation,
        eps=eps,
    )


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Neighbouring layers [start, stop). `fused` is one operation for all of them, or None if they run one by one."""

    start: int
    stop: int
    fused: FusedLayers | None


def runs_of_layers(layers: Sequence[Layer], ops: Ops, eps: float) -> list[LayerRun]:
    """The layers as runs of neighbours that can be fused, and of neighbours that cannot."""
    runs: list[LayerRun] = []
    for fuses, group in itertools.groupby(enumerate(layers), lambda pair: pair[1].fused is not None):
        members = list(group)
        dense = [found for _, layer in members if fuses and (found := dense_layer(layer, eps)) is not None]
        runs.append(LayerRun(members[0][0], members[-1][0] + 1, ops.fuse(dense) if dense else None))
    return runs


def run_fused(
    fused: FusedLayers, span: range, x: Tensor, stage: Stage, state: ModelState, prepared: PreparedInputs, probe: LayerProbe
) -> Tensor:
    """Run some layers of a stage as one operation. `span`: their numbers, counted from the first layer of the stage."""
    inputs = [prepared.attention(stage.layers[index].spec.attention) for index in span]
    stores = [store for store in state.stores[span.start : span.stop] if isinstance(store, PageStore)]
    kept = [index - stage.start - span.start for index in probe.layers if index - stage.start in span]
    outputs = fused(x, inputs, stores, kept)
    probe.features.extend(outputs[index] for index in sorted(kept))
    return outputs[len(span) - 1]
