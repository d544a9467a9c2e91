"""Before the first layer and after the last: the embedding, the layers' own inputs, the last norm, the head.

In: a spec, weights, the devices of the first and the last stage. Out: EmbedAndHead. A table that is tied to the head is kept once
where the operations can read rows of a product's weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onedraw.backends.torch.model.weight_loader import LANE, EmbeddingRows, WeightLoader, head_rows, packed_rows, table_rows
from onedraw.backends.torch.ops.base import Ops
from onedraw.backends.torch.ops.plain.linear import Linear
from onedraw.backends.torch.runner.inputs import Inputs
from onedraw.backends.torch.runner.pipeline import StageDevice
from onedraw.models.source import WeightSource
from onedraw.models.spec import ModelSpec


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
        """Of the step's tokens, [T, layers * width] float32."""
        return inputs.staging.put(self._embedding.take_rows(inputs.host_tokens).float32())

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
class EmbedAndHead:
    """Embedding and input table on the first device, norm and head on the last."""

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
        head = last.ops.linear(table.to(last.device))  # copied only where the devices differ
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
