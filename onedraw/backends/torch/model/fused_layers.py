"""Neighbouring dense layers as one fused operation, where the device's operations have one.

In: loaded layers. Out: runs of layers, and a function that runs a fused one. A layer that is more than attention and a
feed-forward is not fused.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from onedraw.backends.torch.model.feed_forward import Mlp
from onedraw.backends.torch.model.mixers import AttentionMixer
from onedraw.backends.torch.ops.base import DenseLayer, FusedLayers, Ops, PreparedInputs
from onedraw.backends.torch.state.kv_pages import PageStore
from onedraw.backends.torch.state.model_state import ModelState

if TYPE_CHECKING:
    from onedraw.backends.torch.model.layer import Layer
    from onedraw.backends.torch.model.transformer import LayerProbe
    from onedraw.backends.torch.runner.stages import Stage


def dense_layer(layer: Layer, eps: float) -> DenseLayer | None:
    """The layer as `Ops.fuse` takes it; None where it is more than attention and a feed-forward."""
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
    """Layers [start, stop), in one operation where they are fused."""

    start: int
    stop: int
    fused: FusedLayers | None


def runs_of_layers(layers: Sequence[Layer], ops: Ops, eps: float) -> list[LayerRun]:
    """Neighbouring layers that can be fused are one run; so are neighbours that cannot."""
    runs: list[LayerRun] = []
    for fuses, group in itertools.groupby(enumerate(layers), lambda pair: pair[1].fused is not None):
        members = list(group)
        dense = [found for _, layer in members if fuses and (found := dense_layer(layer, eps)) is not None]
        runs.append(LayerRun(members[0][0], members[-1][0] + 1, ops.fuse(dense) if dense else None))
    return runs


def run_fused(
    fused: FusedLayers, span: range, x: Tensor, stage: Stage, state: ModelState, prepared: PreparedInputs, probe: LayerProbe
) -> Tensor:
    """Layers `span` of a stage in one operation."""
    inputs = [prepared.attention(stage.layers[index].spec.attention) for index in span]
    stores = [store for store in state.stores[span.start : span.stop] if isinstance(store, PageStore)]
    kept = [index - stage.start - span.start for index in probe.layers if index - stage.start in span]
    outputs = fused(x, inputs, stores, kept)
    probe.features.extend(outputs[index] for index in sorted(kept))
    return outputs[len(span) - 1]
