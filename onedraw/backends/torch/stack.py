"""The model as a list of layers: Inputs → hidden states → logits.

In: weights read layer by layer, and the turn's Inputs. Out: hidden states [T, E], and logits of the positions asked for.
Each layer is a function of its arguments; what several layers read alike (rope turns, page rows) is made once per turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onedraw.backends.torch.feed_forward import Experts, FeedForward, load_feed_forward
from onedraw.backends.torch.inputs import Inputs
from onedraw.backends.torch.layers.elementwise import activated, softcapped
from onedraw.backends.torch.layers.linear import Linear, RowRule
from onedraw.backends.torch.layers.rope import rope_table
from onedraw.backends.torch.loader import LANE, Loader, WeightSource
from onedraw.backends.torch.mixers import Mixer, load_mixer
from onedraw.backends.torch.ops import Ops, Preparation
from onedraw.backends.torch.state import State, Store
from onedraw.models.spec import Activation, AttentionSpec, LayerSpec, ModelSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class LayerInput:
    """What a layer makes of its own input: x += norm(out(act(gate(x)) * input))."""

    gate: Linear
    out: Linear
    norm: Tensor
    activation: Activation
    width: int

    def __call__(self, x: Tensor, own: Tensor, ops: Ops, eps: float) -> Tensor:
        opened = activated(self.gate(x), self.activation)
        opened[:, : self.width] *= own  # what is padded meets zero columns of `out`
        return ops.rms_norm(self.out(opened), self.norm, eps)


@dataclass(frozen=True, slots=True)
class Beside:
    """Experts next to a feed-forward: both answers are normed, then added."""

    experts: Experts
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
    beside: Beside | None
    own_input: LayerInput | None
    scale: Tensor | None  # [1]

    @property
    def linears(self) -> list[Linear]:
        beside = [] if self.beside is None else self.beside.experts.linears
        inputs = [] if self.own_input is None else [self.own_input.gate, self.own_input.out]
        return [*self.mixer.linears, *self.feed_forward.linears, *beside, *inputs]


def load_layer(index: int, spec: LayerSpec, loader: Loader, ops: Ops, eps: float) -> Layer:
    beside = own_input = None
    if spec.beside is not None:
        norms = [loader.norm(index, name) for name in ("dense_norm", "experts_norm", "post_experts_norm")]
        beside = Beside(Experts.load(index, spec.beside, loader, ops, eps), *norms)
    if spec.inputs:
        own_input = LayerInput(
            gate=ops.linear(loader.passing(index, "inputs_gate", pad=LANE)),
            out=ops.linear(loader.passing(index, "inputs_out", pad_columns=LANE)),
            norm=loader.norm(index, "inputs_norm"),
            activation=spec.feed_forward.activation,
            width=spec.inputs,
        )
    return Layer(
        spec=spec,
        attn_norm=loader.norm(index, "attn_norm"),
        mixer=load_mixer(index, spec.mixer, loader, ops, eps),
        post_attn_norm=loader.norm(index, "post_attn_norm") if spec.sandwich else None,
        mlp_norm=loader.norm(index, "mlp_norm"),
        feed_forward=load_feed_forward(index, spec.feed_forward, loader, ops, eps),
        post_mlp_norm=loader.norm(index, "post_mlp_norm") if spec.sandwich else None,
        beside=beside,
        own_input=own_input,
        scale=loader.kept(index, "layer_scale") if spec.scaled else None,
    )


def run_layer(
    x: Tensor, layer: Layer, *, ops: Ops, store: Store, prepared: Any, eps: float, own_input: Tensor | None = None
) -> Tensor:
    """One layer over the turn's tokens: x [T, E] → [T, E]. own_input [T, width] where the layer has one."""
    mixed = layer.mixer(ops.rms_norm(x, layer.attn_norm, eps), prepared, store, ops)
    x = x + _normed(mixed, layer.post_attn_norm, ops, eps)
    fed = layer.feed_forward(ops.rms_norm(x, layer.mlp_norm, eps), x, ops)
    if layer.beside is not None:
        both = layer.beside
        answers = both.experts(ops.rms_norm(x, both.norm, eps), x, ops)
        fed = ops.rms_norm(fed, both.dense_norm, eps) + ops.rms_norm(answers, both.post_norm, eps)
    x = x + _normed(fed, layer.post_mlp_norm, ops, eps)
    if layer.own_input is not None:
        assert own_input is not None
        x = x + layer.own_input(x, own_input, ops, eps)
    return x if layer.scale is None else x * layer.scale


def _normed(x: Tensor, weight: Tensor | None, ops: Ops, eps: float) -> Tensor:
    return x if weight is None else ops.rms_norm(x, weight, eps)


def rope_tables(
    layers: tuple[LayerSpec, ...], positions: int, *, dtype: torch.dtype, device: torch.device
) -> dict[RopeSpec, Tensor]:
    ropes = {layer.mixer.rope for layer in layers if isinstance(layer.mixer, AttentionSpec)}
    return {rope: rope_table(rope, positions, dtype=dtype, device=device) for rope in ropes}


class InputTable:
    """The layers' own inputs: ((project(x₀) / sqrt(E), normed per layer) + embedding · sqrt(width)) / sqrt(2).

    The embedding has a row of layers × width numbers per token, more than all layers together; it stays where the
    checkpoint lies and the turn's rows are gathered from there.
    """

    def __init__(self, spec: ModelSpec, source: WeightSource, loader: Loader, ops: Ops) -> None:
        self._spec, self._ops = spec, ops
        self._embedding = source.tensor(None, "inputs_embed")
        self.project = ops.linear(loader.passing(None, "inputs_project"))
        self._norm = loader.norm(None, "inputs_project_norm")

    def __call__(self, inputs: Inputs, x: Tensor) -> Tensor:
        """[T, layers, width] of embedded tokens x [T, E]."""
        spec = self._spec
        shape = (len(x), len(spec.layers), spec.inputs)
        rows = torch.from_numpy(self._embedding.take_rows(inputs.host_tokens).float32()).to(x)
        projected = (self.project(x) * spec.hidden**-0.5).view(shape)
        context = self._ops.rms_norm(projected, self._norm, spec.eps)
        both: Tensor = (context + rows.view(shape) * spec.inputs**0.5) * 2**-0.5
        return both


class Stack:
    """All layers on one device. Complete when constructed."""

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        *,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
        max_context: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.spec, self.dtype, self.device, self.ops = spec, dtype, device, ops
        self.max_context = max_context
        loader = Loader(source, dtype=dtype, device=device, norm=spec.norm)
        self.embedding = loader.kept(None, "embed", pad=LANE)  # [V', E]
        self.norm = loader.norm(None, "norm")
        self.head = ops.linear(self.embedding if spec.tied else loader.passing(None, "head", pad=LANE))
        self._input_table = InputTable(spec, source, loader, ops) if spec.inputs else None
        self._embed_scale = torch.tensor(spec.embed_scale, dtype=dtype, device=device)
        loader = Loader(source, dtype=dtype, device=device, norm=spec.norm)  # lets go of a buffer as large as the head
        self.layers: list[Layer] = []
        for index, layer in enumerate(spec.layers):
            self.layers.append(load_layer(index, layer, loader, ops, spec.eps))
            if progress is not None:
                progress(index + 1, len(spec.layers))
        positions = max(max_context, LANE)  # padding tokens stand anywhere on a page, also where the context is shorter
        self._ropes = rope_tables(spec.layers, positions, dtype=dtype, device=device)

    def linears(self) -> list[Linear]:
        inner = [linear for layer in self.layers for linear in layer.linears]
        return [*inner, *([] if self._input_table is None else [self._input_table.project]), self.head]

    def obey(self, rule: RowRule) -> None:
        """Offer rows by another rule from now on."""
        for linear in self.linears():
            linear.rule = rule

    # ------------------------------------------------------------------ one turn

    def embed(self, tokens: Tensor) -> Tensor:
        x = self.embedding.index_select(0, tokens)  # [T, E]
        return x if self.spec.embed_scale == 1 else x * self._embed_scale

    def hidden(
        self,
        inputs: Inputs,
        state: State,
        *,
        depth: int | None = None,
        captures: tuple[int, ...] = (),
        features: list[Tensor] | None = None,
    ) -> Tensor:
        """Hidden states after the last norm: [T, E]. What the turn's tokens leave in pages and lanes is written on the way.

        `depth` runs the first layers only: the self-check needs no more. The residual stream after each layer in
        `captures` is appended to `features`, [T, E] each.
        """
        ops, eps = self.ops, self.spec.eps
        preparation = Preparation(ops, inputs, self._ropes)
        x = self.embed(inputs.tokens)
        own = None if self._input_table is None else self._input_table(inputs, x)
        for index, (layer, store) in enumerate(list(zip(self.layers, state.stores, strict=True))[:depth]):
            prepared = preparation.of(layer.spec.mixer)
            own_input = None if own is None else own[:, index]
            x = run_layer(x, layer, ops=ops, store=store, prepared=prepared, eps=eps, own_input=own_input)
            if features is not None and index in captures:
                features.append(x)
        return ops.rms_norm(x, self.norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [C', V'] of hidden states [C', E], C' from the row rule, V' padded."""
        logits = self.head(hidden).float()
        return logits if self.spec.softcap is None else softcapped(logits, self.spec.softcap)
