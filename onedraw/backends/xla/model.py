"""The model as compiled programs: one XlaStage for each device.

In: weights read layer by layer, CompiledShapes, a step's XlaInputs. Out: XlaStages with weights, state and programs: `open` (page
copies and checkpoint restores before a step), `run` (the layers, one program per compiled shape) and `commit` (kept drafts). The
embedding belongs to the first stage, the last norm and the head to the last one; on a single device that is the same stage. A
picked token is one after which a token is sampled. Axes: T tokens of a step, C picked tokens, E hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from onedraw.backends.xla.delta import delta
from onedraw.backends.xla.experts import choose_experts, experts_of, run_experts
from onedraw.backends.xla.inputs import CompiledShapes, ShapeBucket, XlaInputs
from onedraw.backends.xla.layers import (
    RowArrays,
    activated,
    attend,
    feed_forward,
    gate_value,
    in_pieces,
    linear,
    project,
    rms_norm,
    times,
    write,
)
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
from onedraw.models.spec import AttentionSpec, DeltaSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from onedraw.types import Row


class XlaStream(NamedTuple):
    """What one stage passes to the next. Before the first stage `x` are the step's tokens [T], and `own` the stored rows of their
    per-layer inputs, [T, layers * width]."""

    x: Any  # the residual stream [T, E]
    own: Any  # the layers' own inputs, [T, layers, width]; None if the model has none


StageResult = tuple[State, list[Weights], XlaStream, Array]


def run_layers(
    weights: dict[str, Any],
    state: State,
    stream: XlaStream,
    inputs: dict[str, Any],
    runs: dict[str, Any],
    picks: Array,
    *,
    stage: XlaStage,
    bucket: ShapeBucket,
) -> StageResult:
    """Run the stage's layers. Returns the new state, the state increments of drafts, the stream after the layers, and the
    residuals [C, E] of the tokens that `picks` selects for sampling."""
    x, own = _embedded(weights, stream, inputs, stage, bucket) if stage.first else stream
    moved: State = []
    increments: list[Weights] = []
    for index, (layer, held, store) in enumerate(zip(stage.layers, weights["layers"], state, strict=True)):
        if isinstance(layer.mixer, AttentionSpec):
            angles = weights["ropes"][stage.ropes[layer.mixer.rope]][inputs["positions"]]
            reused = None if layer.mixer.reuses is None else moved[layer.mixer.reuses - stage.start]
            mixed, store = _attention(x, layer.mixer, held, store, reused, inputs, angles, stage, bucket)
            increments.append({})
        else:
            mixed, store, did = _delta(x, layer.mixer, held, store, inputs, runs, stage, bucket)
            increments.append(did)
        layer_input = x[:, :0] if own is None else own[:, stage.start + index]
        x = _after_mixer(x, mixed, layer_input, layer, held, stage, bucket, inputs["pieces"])
        moved.append(store)
    return moved, increments, XlaStream(x, own), x[picks]


def _embedded(
    weights: dict[str, Any], stream: XlaStream, inputs: dict[str, Any], stage: XlaStage, bucket: ShapeBucket
) -> XlaStream:
    """The embeddings of tokens, and the layers' own inputs: ((project(x) / sqrt(E), normed per layer) + rows * sqrt(width)) /
    sqrt(2). A tied embedding is read from the columns of the head, which saves a second table."""
    spec, (tokens, rows) = stage.spec, stream
    x = weights["embed"][tokens] if "embed" in weights else weights["head"][:, tokens].T
    if spec.embed_scale != 1:
        x = times(x, jnp.asarray(spec.embed_scale, x.dtype))
    x = x.astype(stage.activation)
    if rows is None:
        return XlaStream(x, None)

    def inputs_of(x: Array, rows: Array) -> RowArrays:
        shape = (len(x), len(spec.layers), spec.inputs)
        projected = times(
            linear(x.astype(stage.dtype), weights["inputs_project"]).astype(jnp.float32), jnp.float32(spec.hidden**-0.5)
        )
        context = rms_norm(projected.astype(x.dtype).reshape(shape), weights["inputs_project_norm"], spec.eps)
        stored = times(rows.astype(x.dtype).reshape(shape), jnp.asarray(spec.inputs**0.5, x.dtype))
        return (times(context + stored, jnp.asarray(2**-0.5, x.dtype)),)

    return XlaStream(x, in_pieces(inputs_of, bucket, inputs["pieces"], x, rows)[0])


def _attention(
    x: Array,
    spec: AttentionSpec,
    weights: Weights,
    store: Weights,
    reused: Weights | None,
    inputs: dict[str, Any],
    angles: Array,
    stage: XlaStage,
    bucket: ShapeBucket,
) -> tuple[RowArrays, Weights]:
    """The output of attention, [T, H * D], and the projection of its gate; and the layer's store with new keys and values.
    `reused`: the store of the layer whose keys and values this layer reads, if it has none of its own."""
    eps = stage.spec.eps

    def before(x: Array, angle: Array) -> RowArrays:
        return project(_normed(x, weights["attn_norm"], stage).astype(stage.dtype), angle, weights, spec, eps)

    q, k, v, gate = in_pieces(before, bucket, inputs["pieces"], x, angles)
    if reused is None:
        store = write(store, k, v, inputs["places"][stage.shape.windows.index(spec.window)])
    mixed = attend(q, store if reused is None else reused, inputs, bucket, stage.shape, spec)
    return (mixed, gate), store


def _delta(
    x: Array,
    spec: DeltaSpec,
    weights: Weights,
    store: Weights,
    inputs: dict[str, Any],
    runs: dict[str, Any],
    stage: XlaStage,
    bucket: ShapeBucket,
) -> tuple[RowArrays, Weights, Weights]:
    """The output of Gated DeltaNet, [T, Hv * Dv], the layer's new store, and the state increments of drafts."""

    def before(x: Array) -> RowArrays:
        h = _normed(x, weights["attn_norm"], stage).astype(stage.dtype)
        return (linear(h, weights["projections"]).astype(jnp.float32),)

    (projected,) = in_pieces(before, bucket, inputs["pieces"], x)
    mixed, store, did = delta(projected, store, runs, weights, spec, bucket, stage.spec.eps)
    return (mixed,), store, did


def _after_mixer(
    x: Array,
    mixed: RowArrays,
    own: Array,
    layer: LayerSpec,
    weights: Weights,
    stage: XlaStage,
    bucket: ShapeBucket,
    pieces: Array,
) -> Array:
    """The residual stream [T, E] after the layer, from the stream before it and the output of the mixer. `own`: the layer's own
    input [T, width], without columns if it has none."""
    moe = experts_of(layer)

    def before_experts(x: Array, *mixed: Array) -> RowArrays:
        """The stream after the mixer, and the output of the dense feed-forward or of the shared expert, without columns if there
        is neither; with experts also what they read: activations, the experts of each token, and their weights."""
        x = _added(x, _mixer_output(layer, mixed, weights, stage), weights.get("post_attn_norm"), stage)
        h = _normed(x, weights["mlp_norm"], stage).astype(stage.dtype)
        fed = feed_forward(h, weights, layer.feed_forward) if isinstance(layer.feed_forward, MlpSpec) else h[:, :0]
        if moe is None:
            return x, fed
        if moe.shared:
            fed = feed_forward(h, weights, MlpSpec(moe.shared, moe.activation), prefix="shared_")
        if moe.shared_gate:
            gate = gate_value(linear(h, weights["shared_route"])[:, :1].astype(jnp.float32), "sigmoid")
            fed = times(fed.astype(jnp.float32), gate)
        routed = h
        if moe.own_router_norm:
            normed = _normed(x, None, stage).astype(jnp.float32)
            routed = (normed * weights["router_scale"] * stage.spec.hidden**-0.5).astype(stage.dtype)
        if layer.parallel_experts is not None:
            h = _normed(x, weights["experts_norm"], stage).astype(stage.dtype)
        return x, fed, h, *choose_experts(linear(routed, weights["router"]), weights, moe)

    def after_experts(x: Array, own: Array, fed: Array, answers: Array) -> RowArrays:
        if layer.parallel_experts is not None:
            fed = _normed(fed, weights["dense_norm"], stage) + _normed(answers, weights["post_experts_norm"], stage)
        elif moe is not None:
            fed = (fed.astype(jnp.float32) + answers.astype(jnp.float32)).astype(answers.dtype) if moe.shared else answers
        x = _added(x, fed, weights.get("post_mlp_norm"), stage)
        if layer.inputs:
            gate = activated(
                linear(x.astype(stage.dtype), weights["inputs_gate"]).astype(jnp.float32), layer.feed_forward.activation
            )
            gated = (gate.astype(stage.dtype) * own.astype(stage.dtype)).astype(stage.dtype)
            x = x + rms_norm(linear(gated, weights["inputs_out"]).astype(x.dtype), weights["inputs_norm"], stage.spec.eps)
        return (times(x, weights["layer_scale"].astype(x.dtype)) if layer.scaled else x,)

    def dense(x: Array, own: Array, *mixed: Array) -> RowArrays:
        x, fed = before_experts(x, *mixed)
        return after_experts(x, own, fed, fed[:, :0])

    if moe is None:
        return in_pieces(dense, bucket, pieces, x, own, *mixed)[0]
    x, fed, h, ids, shares = in_pieces(before_experts, bucket, pieces, x, *mixed)
    answers = run_experts(h, ids, shares, weights, spec=moe, bucket=bucket, pieces=pieces)
    return in_pieces(after_experts, bucket, pieces, x, own, fed, answers)[0]


def _mixer_output(layer: LayerSpec, mixed: RowArrays, weights: Weights, stage: XlaStage) -> Array:
    """The mixer's output projection [T, E], after its gate if it has one."""
    out, spec = mixed[0], layer.mixer
    if isinstance(spec, AttentionSpec) and spec.gate is not None:
        wide, gate = out.astype(jnp.float32).reshape(len(out), spec.gate_width, -1), mixed[1].astype(jnp.float32)
        out = (wide * gate_value(gate, spec.gate)[:, :, None]).reshape(len(out), -1)
    return linear(out.astype(stage.dtype), weights["o"], weights.get("o_bias"))


def _added(x: Array, out: Array, norm: Array | None, stage: XlaStage) -> Array:
    """The residual stream plus the output of a part of a layer, normed first if the layer has a norm there."""
    return x + (out if norm is None else _normed(out, norm, stage)).astype(x.dtype)


def _normed(x: Array, weight: Array | None, stage: XlaStage) -> Array:
    """RMSNorm in the wider of the dtypes of the residual stream and of products, so that its input is not rounded."""
    return rms_norm(x.astype(jnp.promote_types(stage.activation, stage.dtype)), weight, stage.spec.eps)


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
        # The stored rows of the layers' own inputs are larger than the layers, so the rows of a step are gathered on the host.
        self._input_rows = source.tensor(None, "inputs_embed") if self.first and spec.inputs else None
        if self._input_rows is not None:
            self.weights |= loader.inputs_projection()
        self.weights["ropes"] = [loader.rope(rope, shape.max_context + shape.drafts + 1) for rope in ropes]
        self.weights["layers"] = []
        for index in range(start, stop):
            self.weights["layers"].append(loader.layer(index))
            if progress is not None:
                progress(index + 1, len(spec.layers))
        self._allocate = partial(allocate, self.layers, shape, dtype=dtype, device=device)
        self.state = self._allocate()
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

    def allocate_again(self) -> None:
        """Replace the state, which a failed program took, by new arrays."""
        self.state = []
        self.state = self._allocate()

    def close(self) -> None:
        """Free weights, state and programs. jax's caches keep a reference to the stage, so its arrays are dropped here."""
        self.weights, self.state, self._run, self._input_rows = {}, [], {}, None

    def open(self, rows: Sequence[Row]) -> None:
        for part in copies_before(rows, self.shape):
            self.copy(part)

    def copy(self, part: dict[str, Any]) -> None:
        self.state = self._open(self.state, part)

    def opened(self, tokens: npt.NDArray[np.int32]) -> XlaStream:
        """What the first stage reads: the tokens of a step, and their stored inputs of the layers."""
        rows = None if self._input_rows is None else self._input_rows.take_rows(tokens.astype(np.intp)).float32()
        return XlaStream(tokens, rows)

    def run(self, stream: XlaStream, inputs: XlaInputs, picks: Any) -> tuple[list[Weights], XlaStream, Array]:
        """Run the layers. `stream`: that of `opened`, or of the previous stage. Returns the state increments of drafts, the
        stream, and the residuals [C, E] of picked tokens."""
        given = jax.device_put(stream, self.device)
        program = self._run[inputs.bucket]
        self.state, increments, stream, picked = program(self.weights, self.state, given, inputs.arrays, inputs.delta, picks)
        return increments, stream, picked

    def commit(self, increments: list[Weights], sampled: Array, inputs: XlaInputs) -> None:
        self.state = self._commit(self.state, increments, jax.device_put(sampled, self.device), inputs.drafts)

    def export_checkpoint(self, slot: int, pages: Sequence[Sequence[int]]) -> dict[str, npt.NDArray[Any]]:
        return export_checkpoint(self.state, self.layers, slot, pages, shape=self.shape, first=self.start)

    def import_checkpoint(
        self, slot: int | None, page_maps: Sequence[Mapping[int, int]], arrays: Mapping[str, npt.NDArray[Any]]
    ) -> None:
        import_checkpoint(self.state, self.layers, slot, page_maps, arrays, shape=self.shape, first=self.start)
