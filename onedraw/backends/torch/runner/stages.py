"""The layers of a model in stages, one per device.

In: a device, and the stage before it. Out: a Stage with its layers loaded, and the boundary before it. A model on one device is
one stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from onedraw.backends.placement import layer_inputs_after
from onedraw.backends.torch.model.fused_layers import LayerRun, runs_of_layers
from onedraw.backends.torch.model.layer import Layer, load_layer, rope_tables
from onedraw.backends.torch.model.weight_loader import LANE, WeightLoader
from onedraw.backends.torch.ops.base import Ops
from onedraw.backends.torch.runner.pipeline import StageBoundary
from onedraw.models.source import WeightSource
from onedraw.models.spec import AttentionSpec, DeltaSpec, LayerSpec, ModelSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class StageDevice:
    """A device, its operations, and the layer before which its stage stops; None: after the last."""

    device: torch.device
    ops: Ops
    stop: int | None = None

    @staticmethod
    def named(device: str, ops: Ops, *, stop: int | None = None) -> StageDevice:
        return StageDevice(torch.device(device), ops, stop)


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers [start, start + len(layers)) on one device, and the boundary before it."""

    device: torch.device
    ops: Ops
    start: int
    layers: list[Layer]
    runs: list[LayerRun]
    ropes: dict[RopeSpec, Tensor]
    entrance: StageBoundary | None  # None for the first
    mixers: tuple[AttentionSpec | DeltaSpec, ...]  # each kind once

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return tuple(layer.spec for layer in self.layers)


def load_stage(
    stage_device: StageDevice,
    before: Stage | None,
    spec: ModelSpec,
    source: WeightSource,
    *,
    dtype: torch.dtype,
    activation: torch.dtype,
    max_context: int,
    rows: int,
    progress: Callable[[int, int], None] | None,
) -> Stage:
    """The layers from the end of `before` to the stop of the device."""
    start = 0 if before is None else before.start + len(before.layers)
    stop = len(spec.layers) if stage_device.stop is None else stage_device.stop
    loader = WeightLoader(source, ops=stage_device.ops, dtype=dtype, device=stage_device.device, norm=spec.norm)
    layers = []
    for index in range(start, stop):
        layers.append(load_layer(index, spec.layers[index], loader, stage_device.ops, spec.eps))
        if progress is not None:
            progress(index + 1, len(spec.layers))
    positions = max(max_context, LANE)  # padding tokens have any position of a page, also where the context is shorter
    return Stage(
        device=stage_device.device,
        ops=stage_device.ops,
        start=start,
        layers=layers,
        runs=runs_of_layers(layers, stage_device.ops, spec.eps),
        ropes=rope_tables(spec.layers[start:stop], positions, dtype=dtype, device=stage_device.device),
        entrance=None
        if before is None
        else stage_boundary(before.device, stage_device.device, spec, start, rows=rows, dtype=activation),
        mixers=tuple(dict.fromkeys(layer.spec.mixer for layer in layers)),
    )


def stage_boundary(
    source: torch.device, target: torch.device, spec: ModelSpec, start: int, *, rows: int, dtype: torch.dtype
) -> StageBoundary:
    """From one device to the stage that begins with layer `start` on another."""
    return StageBoundary(source, target, rows=rows, hidden=spec.hidden, inputs=layer_inputs_after(spec, start), dtype=dtype)
