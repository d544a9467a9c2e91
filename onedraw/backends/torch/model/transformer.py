"""The model as a list of layers between an embedding and a head: Inputs → hidden states → logits.

In: weights read layer by layer, and a step's Inputs. Out: hidden states [T, E], and logits of given positions. Each layer is a
function of its arguments (`layer.py`); what several layers read alike (rope angles, page tables) is prepared once per step.
Layers are in stages (`runner/pipeline.py`), one per device: the embedding in the first, the last norm and the head in the last.
A boundary holds the buffers between two stages. Axes: T tokens of a step, E hidden width, C tokens whose logits are computed, C'
that number as the row rule rounds it, V' vocabulary with padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from onedraw.backends.placement import MIN_STAGING_ROWS
from onedraw.backends.torch.model.layer import Layer, run_fused, run_layer
from onedraw.backends.torch.model.weight_loader import LANE, EmbeddingRows, WeightLoader, head_rows, packed_rows, table_rows
from onedraw.backends.torch.ops.base import Ops, PreparedInputs
from onedraw.backends.torch.ops.plain.elementwise import softcapped
from onedraw.backends.torch.ops.plain.linear import Linear, RowRule
from onedraw.backends.torch.runner.inputs import Inputs
from onedraw.backends.torch.runner.pipeline import Stage, StageBoundary, StageDevice, current_device, load_stage, stage_boundary
from onedraw.backends.torch.state.model_state import ModelState, StateSizes
from onedraw.models.source import WeightSource
from onedraw.models.spec import DeltaSpec, ModelSpec


class InputTable:
    """The layers' own inputs: ((project(x₀) / sqrt(E), normed per layer) + embedding · sqrt(width)) / sqrt(2).

    The embedding has layers × width numbers per token, more than all layers together; it stays in the mapped checkpoint file,
    from which the rows of a step are gathered.
    """

    def __init__(self, spec: ModelSpec, source: WeightSource, loader: WeightLoader, ops: Ops) -> None:
        self._spec, self._ops = spec, ops
        self._embedding = source.tensor(None, "inputs_embed")
        self.project = loader.linear(None, "inputs_project")
        self._norm = loader.norm(None, "inputs_project_norm")

    def rows(self, inputs: Inputs) -> Tensor:
        """The stored embeddings of the step's tokens for all layers, [T, layers * width] float32."""
        return inputs.staging.put(self._embedding.take_rows(inputs.host_tokens).float32())

    def __call__(self, rows: Tensor, x: Tensor) -> Tensor:
        """The layers' own inputs [T, layers, width], from their stored rows and the embedded tokens x [T, E]."""
        spec = self._spec
        shape = (len(x), len(spec.layers), spec.inputs)
        rows = rows.to(x)
        projected = (self.project(x.to(self.project.dtype)) * spec.hidden**-0.5).to(x.dtype).view(shape)
        context = self._ops.rms_norm(projected, self._norm, spec.eps)
        both: Tensor = (context + rows.view(shape) * spec.inputs**0.5) * 2**-0.5
        return both


@dataclass(frozen=True, slots=True)
class EmbedAndHead:
    """The weights outside the layers: embedding and input table on the first device, norm and head on the last."""

    embedding: EmbeddingRows
    input_table: InputTable | None
    norm: Tensor
    head: Linear


def load_embed_and_head(
    spec: ModelSpec, source: WeightSource, first: StageDevice, last: StageDevice, *, dtype: torch.dtype
) -> EmbedAndHead:
    loader = WeightLoader(source, ops=first.ops, dtype=dtype, device=first.device, norm=spec.norm)
    reads_rows = first.ops.reads_weight_rows and last.ops.reads_weight_rows
    stored = None if reads_rows else first.ops.packed_table(source.tensor(None, "embed"))
    table = None if reads_rows or stored is not None else loader.kept(None, "embed", pad=LANE)  # [V', E]
    input_table = InputTable(spec, source, loader, first.ops) if spec.inputs else None
    loader = WeightLoader(source, ops=last.ops, dtype=dtype, device=last.device, norm=spec.norm)
    norm = loader.norm(None, "norm")
    if table is not None and spec.tied:
        head = last.ops.linear(table.to(last.device))  # a tied head is copied only where the devices differ
    elif stored is not None and spec.tied and first.device == last.device:
        head = stored
    else:
        head = loader.linear(None, "embed" if spec.tied else "head", pad=LANE)
    if table is not None:
        embedding = table_rows(table)
    elif stored is not None:
        embedding = packed_rows(stored)
    else:
        embedding = head_rows(head, source, tied=spec.tied)
    return EmbedAndHead(embedding, input_table, norm, head)


@dataclass(frozen=True, slots=True)
class LayerProbe:
    """Layer outputs that a pass over the layers collects. Owner: the caller of the pass."""

    layers: tuple[int, ...] = ()  # numbers of the layers whose outputs are wanted
    features: list[Tensor] = field(default_factory=list)  # the residual stream after each of them, [T, E]
    # For each layer, which tokens are finite after it, [T], on its device; None: layers are not checked.
    finite: list[Tensor] | None = None

    def empty(self) -> LayerProbe:
        return LayerProbe(self.layers, finite=None if self.finite is None else [])


NOTHING = LayerProbe()


@dataclass(frozen=True, slots=True)
class ResidualStream:
    """The hidden states between two stages."""

    x: Tensor  # the residual stream, [T, E]
    own: Tensor | None  # [T, later layers, width]: own inputs of the layers still to run; None if layers have none
    left: int  # number of layers still to run


@dataclass(frozen=True, slots=True)
class StageInputs:
    """Inputs of the layers of one stage, on its device; they also read weights and state."""

    tokens: Tensor
    own_rows: Tensor | None  # per-layer input embeddings of the step's tokens; None if the model has none
    prepared: PreparedInputs


class Transformer:
    """A model: all layers, on one device or several. When it is constructed, all weights are loaded.

    `device` and `ops` are those of the last stage, where hidden states come out and drafters run. `dtype` is that of weights and
    products; `activation` that of the residual stream. `rows`: tokens of a step at most, where there are several stages.
    """

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        *,
        dtype: torch.dtype,
        stage_devices: Sequence[StageDevice],
        max_context: int,
        activation: torch.dtype | None = None,
        rows: int = MIN_STAGING_ROWS,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.spec, self.dtype, self.activation, self.max_context = spec, dtype, activation or dtype, max_context
        first, last = stage_devices[0], stage_devices[-1]
        self.device, self.ops = last.device, last.ops
        ends = load_embed_and_head(spec, source, first, last, dtype=dtype)
        self.norm, self.head = ends.norm, ends.head
        self._embedding, self._input_table = ends.embedding, ends.input_table
        self._embed_scale = torch.tensor(spec.embed_scale, dtype=dtype, device=first.device)
        self.stages: list[Stage] = []
        sizes = {"max_context": max_context, "rows": rows}
        stage: Stage | None = None
        for stage_device in stage_devices:
            with current_device(stage_device.device):
                stage = load_stage(
                    stage_device, stage, spec, source, dtype=dtype, activation=self.activation, progress=progress, **sizes
                )
            self.stages.append(stage)

    def boundary(self, number: int, *, rows: int) -> StageBoundary:
        """A new boundary before stage `number`, for steps of up to `rows` tokens."""
        source, stage = self.stages[number - 1].device, self.stages[number]
        return stage_boundary(source, stage.device, self.spec, stage.start, rows=rows, dtype=self.activation)

    @property
    def layers(self) -> list[Layer]:
        return [layer for stage in self.stages for layer in stage.layers]

    def states(self, sizes: StateSizes, pages: torch.dtype | None = None) -> list[ModelState]:
        """New states, one per stage, all zero. `pages`: the dtype of keys and values; None stands for that of products."""
        return [ModelState(s.specs, sizes, dtype=pages or self.dtype, device=s.device, first=s.start) for s in self.stages]

    def linears(self) -> list[Linear]:
        inner = [linear for layer in self.layers for linear in layer.linears]
        return [*inner, *([] if self._input_table is None else [self._input_table.project]), self.head]

    def obey(self, rule: RowRule) -> None:
        """Call products by this row rule from now on."""
        for linear in self.linears():
            linear.rule = rule

    # ------------------------------------------------------------------ one step

    def embed(self, tokens: Tensor, *, by: Ops | None = None) -> Tensor:
        """The embeddings of tokens, [T, E] on their device, looked up on the first stage, which has the only table. `by`: the
        operations whose threads read the rows, since those of the head may be busy with another step."""
        with current_device(self.stages[0].device):
            x = self._embedding(tokens, None if by is None else by.thread_pool)
            return (x if self.spec.embed_scale == 1 else x * self._embed_scale).to(tokens.device)

    def hidden(
        self, inputs: Inputs, states: Sequence[ModelState], *, depth: int | None = None, probe: LayerProbe = NOTHING
    ) -> Tensor:
        """Run all stages: hidden states after the last norm, [T, E]. Keys, values and recurrent state are written on the way.

        `depth`: the number of layers to run, for the self-check; None stands for all.
        """
        stream = self.enter(inputs, depth=depth)
        for number, state in enumerate(states):
            stream = self.advance(stream, number, inputs, state, probe=probe)
        return self.leave(stream)

    def prepare(self, inputs: Inputs, number: int) -> StageInputs:
        """All host inputs of a step in one stage. `pass_stage` then reads device memory alone."""
        stage = self.stages[number]
        prepared = PreparedInputs(stage.ops, inputs, stage.ropes)
        tokens = inputs.tokens  # first in the staging buffer, so that their address does not depend on other inputs
        own_rows = None if self._input_table is None or number else self._input_table.rows(inputs)
        for mixer in stage.mixers:
            prepared.delta(mixer) if isinstance(mixer, DeltaSpec) else prepared.attention(mixer)
        return StageInputs(tokens, own_rows, prepared)

    def pass_stage(
        self, number: int, ready: StageInputs, entered: ResidualStream | None, state: ModelState, *, probe: LayerProbe = NOTHING
    ) -> ResidualStream:
        """Run a prepared step through one stage. `entered`: the residual stream on this device; None on the first stage, which
        embeds."""
        stage = self.stages[number]
        stream = self._enter(ready.tokens, ready.own_rows, None) if entered is None else entered
        return self._passed(stage, stream, ready.prepared, state, probe)

    def enter(self, inputs: Inputs, *, depth: int | None = None) -> ResidualStream:
        """Embed the step's tokens on the first stage. `depth`: the number of layers to run; None stands for all."""
        return self._enter(inputs.tokens, None if self._input_table is None else self._input_table.rows(inputs), depth)

    def _enter(self, tokens: Tensor, own_rows: Tensor | None, depth: int | None) -> ResidualStream:
        x = self.embed(tokens, by=self.stages[0].ops).to(self.activation)
        with current_device(self.stages[0].device):
            own = None if self._input_table is None or own_rows is None else self._input_table(own_rows, x)
        return ResidualStream(x, own, len(self.spec.layers) if depth is None else depth)

    def advance(
        self, stream: ResidualStream, number: int, inputs: Inputs, state: ModelState, *, probe: LayerProbe = NOTHING
    ) -> ResidualStream:
        """Copy the residual stream across the boundary to a stage, and run the layers of that stage."""
        stage, seen = self.stages[number], len(probe.features)
        with current_device(stage.device):
            if stage.entrance is not None:
                stream = ResidualStream(*stage.entrance.cross(stream.x, stream.own, len(inputs.host_tokens)), stream.left)
            prepared = PreparedInputs(stage.ops, inputs.on(stage.device), stage.ropes)
            stream = self._passed(stage, stream, prepared, state, probe)
            if stage.entrance is not None and stream.own is not None:
                stream = replace(stream, own=stream.own.clone())  # the next step may cross before this one reaches the next stage
        probe.features[seen:] = [feature.to(self.device) for feature in probe.features[seen:]]
        return stream

    def _passed(
        self, stage: Stage, stream: ResidualStream, prepared: PreparedInputs, state: ModelState, probe: LayerProbe
    ) -> ResidualStream:
        x = self._run(stage, stream.x, stream.own, prepared, state, count=stream.left, probe=probe)
        own = None if stream.own is None else stream.own[:, len(stage.layers) :]
        return ResidualStream(x, own, max(stream.left - len(stage.layers), 0))

    def leave(self, stream: ResidualStream) -> Tensor:
        """Hidden states after the last norm, on the last stage."""
        with current_device(self.device):
            return self.ops.rms_norm(stream.x, self.norm, self.spec.eps).to(self.dtype)

    def _run(
        self,
        stage: Stage,
        x: Tensor,
        own: Tensor | None,
        prepared: PreparedInputs,
        state: ModelState,
        *,
        count: int,
        probe: LayerProbe,
    ) -> Tensor:
        """Run the first `count` layers of a stage."""
        ops = stage.ops
        for run in stage.runs:
            span = range(run.start, min(run.stop, count))
            if run.fused is not None and probe.finite is None and span:
                x = run_fused(run.fused, span, x, stage, state, prepared, probe)
                continue
            for index in span:
                layer, own_input = stage.layers[index], None if own is None else own[:, index]
                store = state.stores[index]
                x = run_layer(x, layer, ops=ops, store=store, prepared=prepared, eps=self.spec.eps, own_input=own_input)
                if stage.start + index in probe.layers:
                    probe.features.append(x)
                if probe.finite is not None:
                    probe.finite.append(torch.isfinite(x).all(1))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [C', V'] of hidden states [C', E]; the number of rows must satisfy the row rule."""
        return self.scores(hidden).float()

    def scores(self, hidden: Tensor) -> Tensor:
        """The same logits, in the head's dtype."""
        logits = self.head(hidden)
        return logits if self.spec.softcap is None else softcapped(logits.float(), self.spec.softcap)
