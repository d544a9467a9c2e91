"""The model as a list of layers: Inputs → hidden states → logits.

In: weights read layer by layer, and the turn's Inputs. Out: hidden states [T, E], and logits of the positions asked for.
Each layer is a function of its arguments; what several layers read alike (rope turns, page rows) is made once per turn.
Layers lie in stages, one per device: embeddings with the first, last norm and head with the last. One device is one stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from onedraw.backends.staging import FEWEST_ROWS, inputs_behind
from onedraw.backends.torch.boundary import Boundary, current
from onedraw.backends.torch.feed_forward import Experts, FeedForward, load_feed_forward
from onedraw.backends.torch.fusing import LayerRun, dense_layer, run_fused, runs_of_layers
from onedraw.backends.torch.inputs import Inputs
from onedraw.backends.torch.layers.elementwise import activated, softcapped
from onedraw.backends.torch.layers.linear import Linear, RowRule
from onedraw.backends.torch.layers.rope import rope_table
from onedraw.backends.torch.loader import LANE, Loader, WeightSource, kept_rows, looked_up, table_rows
from onedraw.backends.torch.mixers import Mixer, load_mixer
from onedraw.backends.torch.ops import Fused, Ops, Preparation
from onedraw.backends.torch.pages import PageStore
from onedraw.backends.torch.state import Sizes, State, Store
from onedraw.models.spec import Activation, AttentionSpec, DeltaSpec, LayerSpec, ModelSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class LayerInput:
    """What a layer makes of its own input: x += norm(out(act(gate(x)) * input))."""

    gate: Linear
    out: Linear
    norm: Tensor
    activation: Activation
    width: int

    def __call__(self, x: Tensor, own: Tensor, ops: Ops, eps: float) -> Tensor:
        opened = activated(self.gate(x.to(self.gate.dtype)), self.activation)
        opened[:, : self.width] *= own  # what is padded meets zero columns of `out`
        return ops.rms_norm(self.out(opened).to(x.dtype), self.norm, eps)


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
    dtype: torch.dtype  # of its products; the residual stream may have another
    fused: Fused | None = None  # all of it in one operation

    @property
    def linears(self) -> list[Linear]:
        beside = [] if self.beside is None else self.beside.experts.linears
        inputs = [] if self.own_input is None else [self.own_input.gate, self.own_input.out]
        return [*self.mixer.linears, *self.feed_forward.linears, *beside, *inputs]


def load_layer(index: int, spec: LayerSpec, loader: Loader, ops: Ops, eps: float) -> Layer:
    beside = own_input = None
    if spec.beside is not None:
        norms = [loader.norm(index, name) for name in ("dense_norm", "experts_norm", "post_experts_norm")]
        beside = Beside(Experts.load(index, spec.beside, loader, eps), *norms)
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
    x: Tensor, layer: Layer, *, ops: Ops, store: Store, prepared: Any, eps: float, own_input: Tensor | None = None
) -> Tensor:
    """One layer over the turn's tokens: x [T, E] → [T, E]. own_input [T, width] where the layer has one."""
    if layer.fused is not None:
        assert isinstance(store, PageStore)
        return layer.fused(x, [prepared], [store])[0]
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


class InputTable:
    """The layers' own inputs: ((project(x₀) / sqrt(E), normed per layer) + embedding · sqrt(width)) / sqrt(2).

    The embedding has a row of layers × width numbers per token, more than all layers together; it stays where the
    checkpoint lies and the turn's rows are gathered from there.
    """

    def __init__(self, spec: ModelSpec, source: WeightSource, loader: Loader, ops: Ops) -> None:
        self._spec, self._ops = spec, ops
        self._embedding = source.tensor(None, "inputs_embed")
        self.project = loader.linear(None, "inputs_project")
        self._norm = loader.norm(None, "inputs_project_norm")

    def rows(self, inputs: Inputs) -> Tensor:
        """Of the turn's tokens, [T, layers * width] float32."""
        return inputs.feed.put(self._embedding.take_rows(inputs.host_tokens).float32())

    def __call__(self, rows: Tensor, x: Tensor) -> Tensor:
        """[T, layers, width] of embedded tokens x [T, E]."""
        spec = self._spec
        shape = (len(x), len(spec.layers), spec.inputs)
        rows = rows.to(x)
        projected = (self.project(x.to(self.project.dtype)) * spec.hidden**-0.5).to(x.dtype).view(shape)
        context = self._ops.rms_norm(projected, self._norm, spec.eps)
        both: Tensor = (context + rows.view(shape) * spec.inputs**0.5) * 2**-0.5
        return both


@dataclass(frozen=True, slots=True)
class Site:
    """A device, and how far the layers on it go: from where the site before ends to `stop`; None: to the last."""

    device: torch.device
    ops: Ops
    stop: int | None = None

    @staticmethod
    def named(device: str, ops: Ops, *, stop: int | None = None) -> Site:
        return Site(torch.device(device), ops, stop)


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers [start, start + len(layers)) on one device, and the way to it."""

    device: torch.device
    ops: Ops
    start: int
    layers: list[Layer]
    runs: list[LayerRun]
    ropes: dict[RopeSpec, Tensor]
    entrance: Boundary | None  # None for the first
    mixers: tuple[AttentionSpec | DeltaSpec, ...]  # each kind once

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return tuple(layer.spec for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Watch:
    """What somebody wants to see of a pass over the layers. Owner: who asked."""

    captures: tuple[int, ...] = ()  # layers whose outputs are wanted
    features: list[Tensor] = field(default_factory=list)  # the residual stream after each of them, [T, E]
    finite: list[Tensor] | None = None  # per layer: which tokens are finite after it, [T], on its device


NOTHING = Watch()


@dataclass(slots=True)
class Stream:
    """What goes from stage to stage. Owner: the stage it is in."""

    x: Tensor  # the residual stream, [T, E]
    own: Tensor | None  # [T, layers ahead, width], where layers have inputs of their own
    left: int  # layers still to run


@dataclass(frozen=True, slots=True)
class Ready:
    """What a pass over the layers of one device reads beside weights and state, on its way there."""

    tokens: Tensor
    own_rows: Tensor | None  # of the layers' own inputs
    preparation: Preparation


class Stack:
    """All layers, on one device or several. Complete when constructed.

    `device` and `ops` are those of the last stage, where hidden states come out and drafters live. `dtype` is that of
    weights and products; `activation` that of the residual stream. `rows`: tokens of a turn at most, where
    there are several stages.
    """

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        *,
        dtype: torch.dtype,
        sites: Sequence[Site],
        max_context: int,
        activation: torch.dtype | None = None,
        rows: int = FEWEST_ROWS,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.spec, self.dtype, self.activation, self.max_context = spec, dtype, activation or dtype, max_context
        first, last = sites[0], sites[-1]
        self.device, self.ops = last.device, last.ops
        loader = Loader(source, ops=first.ops, dtype=dtype, device=first.device, norm=spec.norm)
        looks_up = first.ops.looks_up and last.ops.looks_up
        stored = None if looks_up else first.ops.table(source.tensor(None, "embed"))
        table = None if looks_up or stored is not None else loader.kept(None, "embed", pad=LANE)  # [V', E]
        self._input_table = InputTable(spec, source, loader, first.ops) if spec.inputs else None
        self._embed_scale = torch.tensor(spec.embed_scale, dtype=dtype, device=first.device)
        loader = Loader(source, ops=last.ops, dtype=dtype, device=last.device, norm=spec.norm)
        self.norm = loader.norm(None, "norm")
        if table is not None and spec.tied:
            self.head = last.ops.linear(table.to(last.device))  # a second copy only where the devices differ
        elif stored is not None and spec.tied and first.device == last.device:
            self.head = stored
        else:
            self.head = loader.linear(None, "embed" if spec.tied else "head", pad=LANE)
        del loader  # its buffer is as large as the head
        if table is not None:
            self._embedding = table_rows(table)
        elif stored is not None:
            self._embedding = looked_up(stored)
        else:
            self._embedding = kept_rows(self.head, source, tied=spec.tied)
        self._rows, self._progress = rows, progress
        self.stages: list[Stage] = []
        for site in sites:
            with current(site.device):
                self.stages.append(self._stage(site, source))

    def _stage(self, site: Site, source: WeightSource) -> Stage:
        spec, before = self.spec, self.stages[-1] if self.stages else None
        start = 0 if before is None else before.start + len(before.layers)
        stop = len(spec.layers) if site.stop is None else site.stop
        loader = Loader(source, ops=site.ops, dtype=self.dtype, device=site.device, norm=spec.norm)
        layers = []
        for index in range(start, stop):
            layers.append(load_layer(index, spec.layers[index], loader, site.ops, spec.eps))
            if self._progress is not None:
                self._progress(index + 1, len(spec.layers))
        entrance = None
        if before is not None:
            sizes = {"rows": self._rows, "hidden": spec.hidden, "inputs": inputs_behind(spec, start)}
            entrance = Boundary(before.device, site.device, dtype=self.activation, **sizes)
        positions = max(self.max_context, LANE)  # padding tokens stand anywhere on a page, also where the context is shorter
        ropes = rope_tables(spec.layers[start:stop], positions, dtype=self.dtype, device=site.device)
        runs = runs_of_layers(layers, site.ops, spec.eps)
        mixers = tuple(dict.fromkeys(layer.spec.mixer for layer in layers))
        return Stage(site.device, site.ops, start, layers, runs, ropes, entrance, mixers)

    @property
    def layers(self) -> list[Layer]:
        return [layer for stage in self.stages for layer in stage.layers]

    def states(self, sizes: Sizes, pages: torch.dtype | None = None) -> list[State]:
        """Fresh states, one per stage. `pages`: the dtype of keys and values, where it is another than that of products."""
        return [State(s.specs, sizes, dtype=pages or self.dtype, device=s.device, first=s.start) for s in self.stages]

    def linears(self) -> list[Linear]:
        inner = [linear for layer in self.layers for linear in layer.linears]
        return [*inner, *([] if self._input_table is None else [self._input_table.project]), self.head]

    def obey(self, rule: RowRule) -> None:
        """Offer rows by another rule from now on."""
        for linear in self.linears():
            linear.rule = rule

    # ------------------------------------------------------------------ one turn

    def embed(self, tokens: Tensor, *, by: Ops | None = None) -> Tensor:
        """Rows [T, E] where the tokens are; they are looked up on the first stage, so there is one table. `by`: by the
        threads of these operations, since those of the head, else asked, may be at work on another turn."""
        with current(self.stages[0].device):
            x = self._embedding(tokens, by)
            return (x if self.spec.embed_scale == 1 else x * self._embed_scale).to(tokens.device)

    def hidden(self, inputs: Inputs, states: Sequence[State], *, depth: int | None = None, watch: Watch = NOTHING) -> Tensor:
        """Hidden states after the last norm: [T, E]. What the turn's tokens leave in pages and lanes is written on the way.

        `depth` runs the first layers only: the self-check needs no more.
        """
        stream = self.enter(inputs, depth=depth)
        for number, state in enumerate(states):
            self.advance(stream, number, inputs, state, watch=watch)
        return self.leave(stream)

    def prepare(self, inputs: Inputs) -> Ready:
        """All that the host has to say about a turn on one device. What `run` does with it reads the device alone."""
        (stage,) = self.stages
        preparation = Preparation(stage.ops, inputs, stage.ropes)
        tokens = inputs.tokens  # first: see `steady.py`
        own_rows = None if self._input_table is None else self._input_table.rows(inputs)
        for mixer in stage.mixers:
            preparation.of(mixer)
        return Ready(tokens, own_rows, preparation)

    def run(self, ready: Ready, state: State, *, watch: Watch = NOTHING) -> Tensor:
        """`hidden` of a turn that was prepared."""
        stream = self._enter(ready.tokens, ready.own_rows, None)
        self._advance(stream, self.stages[0], ready.preparation, state, watch)
        return self.leave(stream)

    def enter(self, inputs: Inputs, *, depth: int | None = None) -> Stream:
        """On the first stage."""
        return self._enter(inputs.tokens, None if self._input_table is None else self._input_table.rows(inputs), depth)

    def _enter(self, tokens: Tensor, own_rows: Tensor | None, depth: int | None) -> Stream:
        x = self.embed(tokens, by=self.stages[0].ops).to(self.activation)
        with current(self.stages[0].device):
            own = None if self._input_table is None or own_rows is None else self._input_table(own_rows, x)
        return Stream(x, own, len(self.spec.layers) if depth is None else depth)

    def advance(self, stream: Stream, number: int, inputs: Inputs, state: State, *, watch: Watch = NOTHING) -> None:
        """Over the way to a stage, and through its layers."""
        stage = self.stages[number]
        with current(stage.device):
            self._advance(stream, stage, Preparation(stage.ops, inputs.on(stage.device), stage.ropes), state, watch)

    def _advance(self, stream: Stream, stage: Stage, preparation: Preparation, state: State, watch: Watch) -> None:
        x, own = stream.x, stream.own
        if stage.entrance is not None:
            x, own = stage.entrance.cross(x, own)
        stream.x = self._run(stage, x, own, preparation, state, count=stream.left, watch=watch)
        stream.left = max(stream.left - len(stage.layers), 0)
        if own is not None:
            own = own[:, len(stage.layers) :]
            stream.own = own if stage.entrance is None else own.clone()  # the next turn may cross before this one goes on

    def leave(self, stream: Stream) -> Tensor:
        """On the last stage: hidden states after the last norm."""
        with current(self.device):
            return self.ops.rms_norm(stream.x, self.norm, self.spec.eps).to(self.dtype)

    def _run(
        self,
        stage: Stage,
        x: Tensor,
        own: Tensor | None,
        preparation: Preparation,
        state: State,
        *,
        count: int,
        watch: Watch,
    ) -> Tensor:
        """The stage's first `count` layers."""
        ops = stage.ops
        for run in stage.runs:
            span = range(run.start, min(run.stop, count))
            if run.fused is not None and watch.finite is None and span:
                x = run_fused(run.fused, span, x, stage, state, preparation, watch)
                continue
            for index in span:
                layer, own_input = stage.layers[index], None if own is None else own[:, index]
                prepared = preparation.of(layer.spec.mixer)
                store = state.stores[index]
                x = run_layer(x, layer, ops=ops, store=store, prepared=prepared, eps=self.spec.eps, own_input=own_input)
                if stage.start + index in watch.captures:
                    watch.features.append(x.to(self.device))
                if watch.finite is not None:
                    watch.finite.append(torch.isfinite(x).all(1))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [C', V'] of hidden states [C', E], C' from the row rule, V' padded."""
        return self.scores(hidden).float()

    def scores(self, hidden: Tensor) -> Tensor:
        """The same numbers, in the dtype that the head gives them in."""
        logits = self.head(hidden)
        return logits if self.spec.softcap is None else softcapped(logits.float(), self.spec.softcap)
