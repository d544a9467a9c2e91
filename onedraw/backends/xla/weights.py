"""Loads weights from a source to a jax device: a dictionary of arrays for each layer, with matrices as [inputs, outputs].

In: a source of named weights (names in `models/spec.py`). Out: one dictionary per layer, and one for embedding and head. Layers
are not stacked into one array, because jax would copy a slice at every use. Matrices with the same input are concatenated along
their outputs. Axes: E hidden width, V' vocabulary padded to a multiple of VECTOR, K taps and C channels of a convolution.
"""

from __future__ import annotations

import jax
import numpy as np
import numpy.typing as npt

from onedraw.backends.xla.inputs import round_up
from onedraw.backends.xla.platform import DTYPES, Array
from onedraw.models.source import WeightSource
from onedraw.models.spec import AttentionSpec, MlpSpec, ModelSpec, RopeSpec

VECTOR = 64  # the vocabulary is padded with zero columns to a multiple of this

Floats = npt.NDArray[np.float32]
Weights = dict[str, Array]


class XlaWeightLoader:
    """Reads the weights of a stage, converts them to its dtype and copies them to its device."""

    def __init__(self, spec: ModelSpec, source: WeightSource, *, dtype: str, device: jax.Device) -> None:
        self._spec, self._source, self._dtype, self._device = spec, source, DTYPES[dtype], device

    def layer(self, index: int) -> Weights:
        spec = self._spec.layers[index]
        found = {name: self._norm(index, name) for name in ("attn_norm", "mlp_norm")}
        mixer, mlp = spec.mixer, spec.feed_forward
        assert isinstance(mlp, MlpSpec)
        found |= self._attention(index, mixer) if isinstance(mixer, AttentionSpec) else self._delta(index)
        found |= {"gate_up": self._matrix(index, "gate", "up"), "down": self._matrix(index, "down")}
        if mlp.bias:
            found |= {"gate_up_bias": self._vector(index, "gate_bias", "up_bias"), "down_bias": self._vector(index, "down_bias")}
        return found

    def embedding(self) -> Weights:
        """The embedding table, needed if the head is not tied to it or is on another device."""
        return {"embed": self._put(self._read(None, "embed"))}

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
        parts = ["q", "k", "v", *(["attn_gate"] if spec.gate is not None else [])]
        found = {"qkv": self._matrix(index, *parts), "o": self._matrix(index, "o")}
        if spec.qkv_bias:
            bias = np.concatenate([*(self._read(index, f"{part}_bias") for part in "qkv"), np.zeros(spec.gate_width, np.float32)])
            found["qkv_bias"] = self._put(bias)
        if spec.out_bias:
            found["o_bias"] = self._vector(index, "o_bias")
        if spec.qk_norm:
            found |= {name: self._norm(index, name) for name in ("q_norm", "k_norm")}
        return found

    def _delta(self, index: int) -> Weights:
        found = {"projections": self._matrix(index, "delta_qkv", "delta_z", "delta_a", "delta_b"), "o": self._matrix(index, "o")}
        found["conv"] = self._wide(np.ascontiguousarray(self._read(index, "conv").T))  # [K, C]
        return found | {name: self._wide(self._read(index, name)) for name in ("decay", "delta_bias", "delta_norm")}

    def _read(self, layer: int | None, name: str) -> Floats:
        return self._source.tensor(layer, name).float32()

    def _matrix(self, layer: int, *names: str) -> Array:
        return self._put(np.ascontiguousarray(np.concatenate([self._read(layer, name) for name in names]).T))

    def _vector(self, layer: int, *names: str) -> Array:
        return self._put(np.concatenate([self._read(layer, name) for name in names]))

    def _norm(self, layer: int | None, name: str) -> Array:
        """The weight of a norm, in float32 if the model applies it before rounding, otherwise in the model's dtype."""
        value = self._read(layer, name)
        return self._wide(value) if self._spec.norm == "wide" else self._put(value)

    def _put(self, value: Floats) -> Array:
        return jax.device_put(value.astype(self._dtype), self._device)

    def _wide(self, value: Floats) -> Array:
        return jax.device_put(value, self._device)
