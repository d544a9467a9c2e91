"""The model as a list of layers between an embedding and a head: Inputs → hidden states → logits.

In: weights read layer by layer, and a step's Inputs. Out: hidden states [T, E], and logits of given positions. Each layer is a
function of its arguments (`layer.py`); what several layers read alike (rope angles, page tables) is prepared once per step.
Layers are in stages (`runner/pipeline.py`), one per device: the embedding in the first, the last norm and the head in the last.
A boundary holds the buffers between two stages. Axes: T tokens of a step, E hidden width, C tokens whose logits are computed, C'
that number as the row rule rounds it up, V' vocabulary with padding. The row rule says with how many rows products are called, so
that no row's result depends on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onedraw.backends.placement import MIN_STAGING_ROWS
from onedraw.backends.torch.model.layer import Layer, load_layer
from onedraw.backends.torch.model.weight_loader import LANE, EmbeddingRows, ProductRows, StoredRows, TableRows, WeightLoader
from onedraw.backends.torch.model.weight_update import WeightUpdate
from onedraw.backends.torch.ops.base import Ops, PreparedInputs
from onedraw.backends.torch.ops.plain.elementwise import softcapped
from onedraw.backends.torch.ops.plain.linear import Linear, RowRule
from onedraw.backends.torch.runner.inputs import Inputs
from onedraw.backends.torch.runner.pipeline import (
    LayerProbe,
    ResidualStream,
    Stage,
    StageBoundary,
    StageDevice,
    StageStream,
    current_device,
    load_stage,
    stage_boundary,
)
from onedraw.backends.torch.state.model_state import ModelState, StageState, StateSizes
from onedraw.models.source import WeightSource
from onedraw.models.spec import DeltaSpec, ModelSpec

if TYPE_CHECKING:  # stages in other processes need packages that only they use
    from onedraw.backends.torch.remote.stage import RemoteStage


class InputTable:
    """The layers' own inputs: ((project(x₀) / sqrt(E), normed per layer) + embedding · sqrt(width)) / sqrt(2), with
    x₀ the embedded tokens.

    The embedding has layers × width numbers per token, more than the weights of all layers together; it stays in the mapped
    checkpoint file, from which the rows of a step are gathered.
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
    spec: ModelSpec,
    source: WeightSource,
    *,
    first: StageDevice,
    last: StageDevice,
    first_dtype: torch.dtype,
    last_dtype: torch.dtype,
) -> EmbedAndHead:
    loader = WeightLoader(source, ops=first.ops, dtype=first_dtype, device=first.device, norm=spec.norm)
    reads_rows = first.ops.reads_weight_rows
    stored = None if reads_rows else first.ops.packed_table(source.tensor(None, "embed"))
    table = None if reads_rows or stored is not None else loader.kept(None, "embed", pad=LANE)  # [V', E]
    input_table = InputTable(spec, source, loader, first.ops) if spec.inputs else None
    loader = WeightLoader(source, ops=last.ops, dtype=last_dtype, device=last.device, norm=spec.norm)
    norm = loader.norm(None, "norm")
    # A tied head is stored again where the devices, or their dtypes, differ.
    shared = spec.tied and first.device == last.device and first_dtype == last_dtype
    if shared and table is not None:
        head = last.ops.linear(table)
    elif shared and stored is not None:
        head = stored
    else:
        head = loader.linear(None, "embed" if spec.tied else "head", pad=LANE)
    embedding: EmbeddingRows
    if table is not None:
        embedding = TableRows(table)
    elif stored is not None:
        embedding = ProductRows(stored)
    elif shared and last.ops.reads_weight_rows:
        embedding = ProductRows(head)
    else:
        embedding = StoredRows(source.tensor(None, "embed"))
    return EmbedAndHead(embedding, input_table, norm, head)


NOTHING = LayerProbe()


@dataclass(frozen=True, slots=True)
class StageInputs:
    """All that the layers of one stage read in a step besides weights and state, on the stage's device."""

    tokens: Tensor
    own_rows: Tensor | None  # per-layer input embeddings of the step's tokens; None if the model has none
    prepared: PreparedInputs


class Transformer:
    """A model: all layers, on one device or several. When it is constructed, all weights are loaded.

    `device`, `ops` and `dtype`, the dtype of weights and products, are those of the last stage, where hidden states come out and
    drafters run. `stage_dtypes`: the dtype of each stage, if they differ. `activation`: the dtype of the residual stream. `rows`:
    the most tokens of a step, if there are several stages.
    """

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        *,
        dtype: torch.dtype,
        stage_devices: Sequence[StageDevice | RemoteStage],
        stage_dtypes: Sequence[torch.dtype] = (),
        max_context: int,
        activation: torch.dtype | None = None,
        rows: int = MIN_STAGING_ROWS,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.spec, self.dtype, self.activation, self.max_context = spec, dtype, activation or dtype, max_context
        first, last = stage_devices[0], stage_devices[-1]
        assert isinstance(last, StageDevice), "the last stage is in this process"
        first = first if isinstance(first, StageDevice) else last  # the embedding is in this process, since drafters read it
        self.device, self.ops = last.device, last.ops
        self.embed_device, self._embed_ops = first.device, first.ops
        stage_dtypes = stage_dtypes or (dtype,) * len(stage_devices)
        first_dtype = dtype if first is last else stage_dtypes[0]
        self._load_ends = partial(load_embed_and_head, spec, first=first, last=last, first_dtype=first_dtype, last_dtype=dtype)
        self._ends = ends = self._load_ends(source)
        self.norm, self.head = ends.norm, ends.head
        self._embedding, self._input_table = ends.embedding, ends.input_table
        self._embed_scale = torch.tensor(spec.embed_scale, dtype=first_dtype, device=first.device)
        self.stages: list[Stage | RemoteStage] = []
        before, start = None if isinstance(stage_devices[0], StageDevice) else self.embed_device, 0
        for place, stage_dtype in zip(stage_devices, stage_dtypes, strict=True):
            stage: Stage | RemoteStage
            if isinstance(place, StageDevice):
                with current_device(place.device):
                    stage = load_stage(
                        place,
                        before,
                        spec,
                        source,
                        start=start,
                        dtype=stage_dtype,
                        activation=self.activation,
                        max_context=max_context,
                        rows=rows,
                        progress=progress,
                    )
            else:
                stage = place
            assert stage.start == start, "stages follow each other"
            self.stages.append(stage)
            before, start = stage.device, stage.stop

    @property
    def local_stages(self) -> list[Stage]:
        """The stages in this process."""
        return [stage for stage in self.stages if isinstance(stage, Stage)]

    @property
    def remote_stages(self) -> list[RemoteStage]:
        return [stage for stage in self.stages if not isinstance(stage, Stage)]

    def boundary(self, number: int, *, rows: int) -> StageBoundary:
        """A new boundary before stage `number`, for steps of up to `rows` tokens."""
        source, stage = self.stages[number - 1].device, self.stages[number]
        assert isinstance(stage, Stage)
        return stage_boundary(source, stage.device, self.spec, stage.start, rows=rows, dtype=self.activation)

    @property
    def layers(self) -> list[Layer]:
        """The layers in this process."""
        return [layer for stage in self.local_stages for layer in stage.layers]

    def states(self, sizes: StateSizes, pages: torch.dtype | None = None) -> list[StageState]:
        """The states of all stages, all zero. `pages`: the dtype of keys and values; None stands for that of products."""
        return [
            self._new_state(stage, sizes, pages or self.dtype) if isinstance(stage, Stage) else stage.state
            for stage in self.stages
        ]

    def state(self, sizes: StateSizes) -> ModelState:
        """A new state of the only stage."""
        [stage] = self.local_stages
        return self._new_state(stage, sizes, self.dtype)

    def _new_state(self, stage: Stage, sizes: StateSizes, pages: torch.dtype) -> ModelState:
        return ModelState(stage.specs, sizes, dtype=pages, device=stage.device, first=stage.start)

    def load_update(self, source: WeightSource) -> WeightUpdate:
        """Load other weights of the same shapes beside those in use, which change when the update is applied. Raises
        UnsupportedModel if the model would differ in more than its weights."""
        update = WeightUpdate()
        update.match(self._ends, self._load_ends(source))
        for stage in self.local_stages:
            dtype = stage.layers[0].dtype
            loader = WeightLoader(source, ops=stage.ops, dtype=dtype, device=stage.device, norm=self.spec.norm)
            with current_device(stage.device):
                for index, layer in enumerate(stage.layers, start=stage.start):
                    update.match(layer, load_layer(index, layer.spec, loader, stage.ops, self.spec.eps))
        return update

    def linears(self) -> list[Linear]:
        """The matrix products in this process."""
        inner = [linear for layer in self.layers for linear in layer.linears]
        return [*inner, *([] if self._input_table is None else [self._input_table.project]), self.head]

    def obey(self, rule: RowRule) -> None:
        """Call products by this row rule from now on."""
        for linear in self.linears():
            linear.rule = rule

    # ------------------------------------------------------------------ one step

    def embed(self, tokens: Tensor, *, by: Ops | None = None) -> Tensor:
        """The embeddings of tokens, [T, E], on the tokens' device. They are read on the device of the table: that of the first
        stage, or of the last one if the first is in another process. `by`: the operations whose threads read the rows, since the
        threads of the head may be busy with another step."""
        with current_device(self.embed_device):
            x = self._embedding(tokens, None if by is None else by.thread_pool)
            return (x if self.spec.embed_scale == 1 else x * self._embed_scale).to(tokens.device)

    def hidden(
        self, inputs: Inputs, states: Sequence[StageState], *, depth: int | None = None, probe: LayerProbe = NOTHING
    ) -> Tensor:
        """Run all stages: hidden states after the last norm, [T, E]. Keys, values and recurrent state are written on the way.

        `depth`: the number of layers to run, for the self-check; None stands for all.
        """
        stream: StageStream = self.enter(inputs, depth=depth)
        for number, state in enumerate(states):
            stream = self.advance(stream, number, inputs, state, probe=probe)
        return self.leave(stream)

    def prepare(self, inputs: Inputs, number: int) -> StageInputs:
        """Copy everything that a stage needs from the host in a step. After that `pass_stage` reads device memory only."""
        stage = self._local(number)
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
        stream = self._enter(ready.tokens, ready.own_rows, None) if entered is None else entered
        return self._local(number).run(stream, ready.prepared, state, probe=probe)

    def _local(self, number: int) -> Stage:
        stage = self.stages[number]
        assert isinstance(stage, Stage), "a stage in another process prepares its own inputs"
        return stage

    def enter(self, inputs: Inputs, *, depth: int | None = None) -> ResidualStream:
        """Embed the step's tokens on the first stage. `depth`: the number of layers to run; None stands for all."""
        return self._enter(inputs.tokens, None if self._input_table is None else self._input_table.rows(inputs), depth)

    def _enter(self, tokens: Tensor, own_rows: Tensor | None, depth: int | None) -> ResidualStream:
        x = self.embed(tokens, by=self._embed_ops).to(self.activation)
        with current_device(self.embed_device):
            own = None if self._input_table is None or own_rows is None else self._input_table(own_rows, x)
        return ResidualStream(x, own, len(self.spec.layers) if depth is None else depth)

    def advance(
        self, stream: StageStream, number: int, inputs: Inputs, state: StageState, *, probe: LayerProbe = NOTHING
    ) -> StageStream:
        """Run one stage: the residual stream before it in, the residual stream after it out."""
        stage, seen = self.stages[number], len(probe.features)
        if not isinstance(stage, Stage):
            return stage.advance(stream, inputs, probe=probe)
        assert isinstance(state, ModelState)
        after = stage.advance(stream, inputs, state, probe=probe)
        probe.features[seen:] = [feature.to(self.device) for feature in probe.features[seen:]]
        return after

    def leave(self, stream: StageStream) -> Tensor:
        """Hidden states after the last norm, on the last stage."""
        assert isinstance(stream, ResidualStream)
        with current_device(self.device):
            x = stream.x.to(torch.promote_types(stream.x.dtype, self.dtype))  # the last norm reads the stream in the wider dtype
            return self.ops.rms_norm(x, self.norm, self.spec.eps).to(self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [C', V'] of hidden states [C', E]; the number of rows must satisfy the row rule."""
        return self.scores(hidden).float()

    def scores(self, hidden: Tensor) -> Tensor:
        """Logits as `logits` computes them, in the head's dtype, or in float32 if they are softcapped."""
        logits = self.head(hidden)
        return logits if self.spec.softcap is None else softcapped(logits.float(), self.spec.softcap)
