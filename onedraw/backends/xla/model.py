"""The model as compiled programs: one XlaStage for each device.

In: weights read layer by layer, CompiledShapes, a step's XlaInputs. Out: XlaStages with weights, state and programs: `open` (page
copies and checkpoint restores before a step), `run` (the layers, one program per compiled shape) and `commit` (kept drafts). The
embedding belongs to the first stage, the last norm and the head to the last one; on a single device that is the same stage. A
picked token is one after which a token is sampled. Axes: T tokens of a step, C picked tokens, E hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy.typing as npt

from onedraw.backends.xla.delta import delta
from onedraw.backends.xla.inputs import CompiledShapes, ShapeBucket, XlaInputs
from onedraw.backends.xla.layers import attend, feed_forward, gate_value, in_pieces, linear, project, rms_norm, write
from onedraw.backends.xla.platform import DTYPES, OPTIONS, Array
from onedraw.backends.xla.state import (
    State,
    allocate,
    apply_copies,
    commit_drafts,
    copies_before,
    export_checkpoint,
    import_checkpoint,
)
from onedraw.backends.xla.weights import Weights, XlaWeightLoader
from onedraw.models.source import WeightSource
from onedraw.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from onedraw.types import Row

StageResult = tuple[State, list[Weights], Array, Array]


def run_layers(
    weights: dict[str, Any],
    state: State,
    x: Array,
    inputs: dict[str, Any],
    runs: dict[str, Any],
    picks: Array,
    *,
    stage: XlaStage,
    bucket: ShapeBucket,
) -> StageResult:
    """Run the stage's layers on x: tokens in the first stage, residuals [T, E] in the others. Returns the new state, the state
    increments of drafts, the residuals [T, E], and the residuals [C, E] of the tokens that `picks` selects for sampling."""
    if stage.first:
        x = _embedded(weights, x).astype(stage.activation)
    moved: State = []
    increments: list[Weights] = []
    for layer, own, store in zip(stage.layers, weights["layers"], state, strict=True):
        if isinstance(layer.mixer, AttentionSpec):
            angles = weights["ropes"][stage.ropes[layer.mixer.rope]][inputs["positions"]]
            x, store = _attention_layer(x, layer, own, store, inputs, angles, stage, bucket)
            increments.append({})
        else:
            x, store, did = _delta_layer(x, layer, own, store, inputs, runs, stage, bucket)
            increments.append(did)
        moved.append(store)
    return moved, increments, x, x[picks]


def _embedded(weights: dict[str, Any], tokens: Array) -> Array:
    """Embeddings of tokens. A tied embedding is read from the columns of the head, which saves a second table."""
    return weights["embed"][tokens] if "embed" in weights else weights["head"][:, tokens].T


def _attention_layer(
    x: Array,
    layer: LayerSpec,
    weights: Weights,
    store: Weights,
    inputs: dict[str, Any],
    angles: Array,
    stage: XlaStage,
    bucket: ShapeBucket,
) -> tuple[Array, Weights]:
    spec, eps = layer.attention, stage.spec.eps

    def before(x: Array, angle: Array) -> tuple[Array, ...]:
        return project(rms_norm(x, weights["attn_norm"], eps).astype(stage.dtype), angle, weights, spec, eps)

    def after(x: Array, mixed: Array, gate: Array) -> tuple[Array, ...]:
        if spec.gate is not None:
            wide = mixed.astype(jnp.float32).reshape(len(mixed), spec.gate_width, -1)
            mixed = (
                (wide * gate_value(gate.astype(jnp.float32), spec.gate)[:, :, None]).reshape(len(mixed), -1).astype(mixed.dtype)
            )
        return (_feed_forward(x + linear(mixed, weights["o"], weights.get("o_bias")).astype(x.dtype), layer, weights, stage),)

    q, k, v, gate = in_pieces(before, bucket, inputs["pieces"], x, angles)
    store = write(store, k, v, inputs["places"][stage.shape.windows.index(spec.window)])
    mixed = attend(q, store, inputs, bucket, stage.shape, spec)
    (x,) = in_pieces(after, bucket, inputs["pieces"], x, mixed, gate)
    return x, store


def _delta_layer(
    x: Array,
    layer: LayerSpec,
    weights: Weights,
    store: Weights,
    inputs: dict[str, Any],
    runs: dict[str, Any],
    stage: XlaStage,
    bucket: ShapeBucket,
) -> tuple[Array, Weights, Weights]:
    mixer, eps = layer.mixer, stage.spec.eps
    assert not isinstance(mixer, AttentionSpec)

    def before(x: Array) -> tuple[Array, ...]:
        h = rms_norm(x, weights["attn_norm"], eps).astype(stage.dtype)
        return (linear(h, weights["projections"]).astype(jnp.float32),)

    def after(x: Array, mixed: Array) -> tuple[Array, ...]:
        return (_feed_forward(x + linear(mixed.astype(stage.dtype), weights["o"]).astype(x.dtype), layer, weights, stage),)

    (projected,) = in_pieces(before, bucket, inputs["pieces"], x)
    mixed, store, did = delta(projected, store, runs, weights, mixer, bucket, eps)
    (x,) = in_pieces(after, bucket, inputs["pieces"], x, mixed)
    return x, store, did


def _feed_forward(x: Array, layer: LayerSpec, weights: Weights, stage: XlaStage) -> Array:
    assert isinstance(layer.feed_forward, MlpSpec)
    h = rms_norm(x, weights["mlp_norm"], stage.spec.eps).astype(stage.dtype)
    return x + feed_forward(h, weights, layer.feed_forward).astype(x.dtype)


class XlaStage:
    """Layers [start, stop) on one device. It owns their weights, state and compiled programs."""

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        shape: CompiledShapes,
        *,
        dtype: str,
        activation: str,
        device: jax.Device,
        start: int,
        stop: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.spec, self.shape, self.device, self.start = spec, shape, device, start
        self.dtype, self.activation = DTYPES[dtype], DTYPES[activation]
        self.layers: Sequence[LayerSpec] = spec.layers[start:stop]
        self.first, self.last = start == 0, stop == len(spec.layers)
        loader = XlaWeightLoader(spec, source, dtype=dtype, device=device)
        ropes = list(dict.fromkeys(layer.mixer.rope for layer in self.layers if isinstance(layer.mixer, AttentionSpec)))
        self.ropes: dict[RopeSpec, int] = {rope: number for number, rope in enumerate(ropes)}
        self.weights: dict[str, Any] = dict(loader.head()) if self.last else {}
        if self.first and not (self.last and spec.tied):
            self.weights |= loader.embedding()
        self.weights["ropes"] = [loader.rope(rope, shape.max_context + shape.drafts + 1) for rope in ropes]
        self.weights["layers"] = []
        for index in range(start, stop):
            self.weights["layers"].append(loader.layer(index))
            if progress is not None:
                progress(index + 1, len(spec.layers))
        self.state = allocate(self.layers, shape, dtype=dtype, device=device)
        self.reshape(shape)

    def reshape(self, shape: CompiledShapes) -> None:
        """Replace the programs by programs for other compiled shapes. State and weights are kept."""
        self.shape = shape
        fixed: dict[str, Any] = {"layers": self.layers, "shape": shape}
        self._open = jax.jit(partial(apply_copies, **fixed), donate_argnums=0, compiler_options=OPTIONS)
        self._commit = jax.jit(partial(commit_drafts, **fixed), donate_argnums=0, compiler_options=OPTIONS)
        self._run = {
            bucket: jax.jit(partial(run_layers, stage=self, bucket=bucket), donate_argnums=1, compiler_options=OPTIONS)
            for bucket in (shape.decode, shape.mixed)
        }

    def close(self) -> None:
        """Free weights, state and programs. jax's caches keep a reference to the stage, so its arrays are dropped here."""
        self.weights, self.state, self._run = {}, [], {}

    def open(self, rows: Sequence[Row]) -> None:
        for part in copies_before(rows, self.shape):
            self.copy(part)

    def copy(self, part: dict[str, Any]) -> None:
        self.state = self._open(self.state, part)

    def run(self, x: Any, inputs: XlaInputs, picks: Any) -> tuple[list[Weights], Array, Array]:
        """Run the layers. x: tokens, or the residuals of the previous stage. Returns the state increments of drafts, residuals
        [T, E], and the residuals [C, E] of picked tokens."""
        given = jax.device_put(x, self.device)
        program = self._run[inputs.bucket]
        self.state, increments, x, picked = program(self.weights, self.state, given, inputs.arrays, inputs.delta, picks)
        return increments, x, picked

    def commit(self, increments: list[Weights], sampled: Array, inputs: XlaInputs) -> None:
        self.state = self._commit(self.state, increments, jax.device_put(sampled, self.device), inputs.drafts)

    def export_checkpoint(self, slot: int, pages: Sequence[Sequence[int]]) -> dict[str, npt.NDArray[Any]]:
        return export_checkpoint(self.state, self.layers, slot, pages, shape=self.shape, first=self.start)

    def import_checkpoint(
        self, slot: int | None, page_maps: Sequence[Mapping[int, int]], arrays: Mapping[str, npt.NDArray[Any]]
    ) -> None:
        import_checkpoint(self.state, self.layers, slot, page_maps, arrays, shape=self.shape, first=self.start)
