"""Loads weights from a source to a jax device: a dictionary of arrays for each layer, with matrices as [inputs, outputs].

In: a source of named weights (names in `models/spec.py`). Out: one dictionary per layer, and one for embedding and head. Layers
are not stacked into one array, because jax would copy a slice at every use. Matrices with the same input are concatenated along
their outputs. Axes: E hidden width, V' vocabulary padded to a multiple of VECTOR, K taps and C channels of a convolution.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from onedraw.backends.xla.inputs import COLUMNS, round_up
from onedraw.backends.xla.platform import DTYPES, Array
from onedraw.models.source import StackItem, WeightSource
from onedraw.models.spec import AttentionSpec, MlpSpec, ModelSpec, MoeSpec, RopeSpec

VECTOR = 64  # the vocabulary is padded with zero columns to a multiple of this
NORMS = (
    *("attn_norm", "q_norm", "k_norm", "post_attn_norm", "mlp_norm", "post_mlp_norm"),
    *("dense_norm", "experts_norm", "post_experts_norm", "inputs_norm"),
)
EXPERT_PARTS = ("gate", "up", "down")

Floats = npt.NDArray[np.float32]
Weights = dict[str, Array]


class XlaWeightLoader:
    """Reads the weights of a stage, converts them to its dtype and copies them to its device."""

    def __init__(self, spec: ModelSpec, source: WeightSource, *, dtype: str, device: jax.Device) -> None:
        self._spec, self._source, self._dtype, self._device = spec, source, DTYPES[dtype], device

    def layer(self, index: int) -> Weights:
        spec = self._spec.layers[index]
        mixer, mlp = spec.mixer, spec.feed_forward
        found = {name: self._norm(index, name) for name in NORMS if name in spec.shapes(self._spec.hidden)}
        found |= self._attention(index, mixer) if isinstance(mixer, AttentionSpec) else self._delta(index)
        if isinstance(mlp, MlpSpec):
            found |= {"gate_up": self._matrix(index, "gate", "up"), "down": self._matrix(index, "down")}
            if mlp.bias:
                found["gate_up_bias"] = self._vector(index, "gate_bias", "up_bias")
                found["down_bias"] = self._vector(index, "down_bias")
        for moe in (mlp, spec.parallel_experts):
            if isinstance(moe, MoeSpec):
                found |= self._experts(index, moe)
        if spec.inputs:
            found |= {name: self._matrix(index, name) for name in ("inputs_gate", "inputs_out")}
        if spec.scaled:
            found["layer_scale"] = self._vector(index, "layer_scale")
        return found

    def embedding(self) -> Weights:
        """The embedding table, needed if the head is not tied to it or is on another device."""
        return {"embed": self._put(self._read(None, "embed"))}

    def inputs_projection(self) -> Weights:
        """The projection of the embedded tokens that is a part of the layers' own inputs."""
        return {
            "inputs_project": self._matrix(None, "inputs_project"),
            "inputs_project_norm": self._norm(None, "inputs_project_norm"),
        }

    def head(self) -> Weights:
        """The last norm's weight, and the head [E, V'], from whose columns a tied embedding is read."""
        name = "embed" if self._spec.tied else "head"
        rows = self._read(None, name)
        width = round_up(self._spec.vocab, VECTOR)
        wide = np.zeros((self._spec.hidden, width), dtype=np.float32)
        wide[:, : self._spec.vocab] = rows.T
        return {"norm": self._norm(None, "norm"), "head": self._put(wide)}

    def rope(self, rope: RopeSpec, positions: int) -> Array:
        """The table of cos and sin of every position, [positions, 2, d/2], for d rotary dimensions of a head."""
        frequencies = np.asarray(rope.inverse_frequencies(), dtype=np.float32)
        wide = (np.arange(positions, dtype=np.float32)[:, None] * frequencies).astype(np.float64)
        return self._put((np.stack([np.cos(wide), np.sin(wide)], axis=1) * rope.scale).astype(np.float32))

    def _attention(self, index: int, spec: AttentionSpec) -> Weights:
        own = spec.reuses is None
        parts = ["q", *(["k"] if own else []), *(["v"] if own and not spec.keys_as_values else [])]
        gate = ["attn_gate"] if spec.gate is not None else []
        found = {"qkv": self._matrix(index, *parts, *gate), "o": self._matrix(index, "o")}
        if spec.qkv_bias:
            biases = [self._read(index, f"{part}_bias") for part in parts]
            found["qkv_bias"] = self._put(np.concatenate([*biases, np.zeros(spec.gate_width, np.float32)]))
        if spec.out_bias:
            found["o_bias"] = self._vector(index, "o_bias")
        return found

    def _delta(self, index: int) -> Weights:
        found = {"projections": self._matrix(index, "delta_qkv", "delta_z", "delta_a", "delta_b"), "o": self._matrix(index, "o")}
        found["conv"] = self._wide(np.ascontiguousarray(self._read(index, "conv").T))  # [K, C]
        return found | {name: self._wide(self._read(index, name)) for name in ("decay", "delta_bias", "delta_norm")}

    def _experts(self, index: int, spec: MoeSpec) -> Weights:
        """The router, all experts stacked, [experts, inputs, outputs], and the shared expert if there is one."""
        hidden, (gate, up, down) = self._spec.hidden, (self._source.tensor(index, f"expert_{name}") for name in EXPERT_PARTS)
        gate_up = np.empty((spec.experts, hidden, 2 * spec.width), self._dtype)
        downs = np.empty((spec.experts, spec.width, hidden), self._dtype)
        for expert in range(spec.experts):
            gate_up[expert, :, : spec.width] = StackItem(gate, expert).float32().T
            gate_up[expert, :, spec.width :] = StackItem(up, expert).float32().T
            downs[expert] = StackItem(down, expert).float32().T
        found = {"router": self._matrix(index, "router"), "expert_gate_up": self._wide(gate_up), "expert_down": self._wide(downs)}
        names = {"select_bias": spec.select_bias, "expert_scale": spec.expert_scale, "router_scale": spec.own_router_norm}
        found |= {name: self._wide(self._read(index, name)) for name, has in names.items() if has}
        if spec.shared:
            found["shared_gate_up"] = self._matrix(index, "shared_gate", "shared_up")
            found["shared_down"] = self._matrix(index, "shared_down")
        if spec.shared_gate:
            # A product with one column is computed by other kernels, which round differently; so columns of zeros are added.
            route = self._read(index, "shared_route").T
            found["shared_route"] = self._put(np.pad(route, ((0, 0), (0, COLUMNS - 1))))
        return found

    def _read(self, layer: int | None, name: str) -> Floats:
        return self._source.tensor(layer, name).float32()

    def _matrix(self, layer: int | None, *names: str) -> Array:
        return self._put(np.ascontiguousarray(np.concatenate([self._read(layer, name) for name in names]).T))

    def _vector(self, layer: int, *names: str) -> Array:
        return self._put(np.concatenate([self._read(layer, name) for name in names]))

    def _norm(self, layer: int | None, name: str) -> Array:
        """The weight of a norm, in float32 if the model applies it before rounding, otherwise in the model's dtype."""
        value = self._read(layer, name)
        return self._wide(value) if self._spec.norm == "wide" else self._put(value)

    def _put(self, value: Floats) -> Array:
        return jax.device_put(value.astype(self._dtype), self._device)

    def _wide(self, value: npt.NDArray[Any]) -> Array:
        """The array on the device, in its own dtype."""
        return jax.device_put(value, self._device)
