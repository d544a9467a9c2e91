"""The model as a list of layers: Inputs → hidden states → logits.

In: weights read layer by layer, and the turn's Inputs. Out: hidden states [T, E], and logits of the positions asked for.
Each layer is a function of its arguments; what several layers read alike (rope turns, page rows) is made once per turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from onedraw.backends.torch.inputs import Inputs
from onedraw.backends.torch.layers.elementwise import softcapped
from onedraw.backends.torch.layers.linear import Linear, RowRule
from onedraw.backends.torch.layers.rope import rope_table
from onedraw.backends.torch.ops import Ops
from onedraw.backends.torch.state import State
from onedraw.models.spec import LayerSpec, ModelSpec, RopeSpec

Floats = npt.NDArray[np.float32]
LANE = 64  # widths are padded to a multiple of it: see layers/elementwise.py


class WeightSource(Protocol):
    """Named float32 weights, one layer at a time."""

    def outer(self) -> Mapping[str, Floats]: ...

    def layer(self, index: int) -> Mapping[str, Floats]: ...


@dataclass(frozen=True, slots=True)
class Layer:
    spec: LayerSpec
    attn_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Stack:
    """All layers on one device. Complete when constructed."""

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        *,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
        max_context: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.spec, self.dtype, self.device, self.ops = spec, dtype, device, ops
        outer = source.outer()
        self.embedding = self._tensor(outer["embed"])
        self.norm = self._tensor(outer["norm"])
        head = self.embedding if spec.tied else self._tensor(outer["head"])
        del outer
        self.head = ops.linear(_pad_rows(head))
        del head
        self.layers: list[Layer] = []
        for index, layer in enumerate(spec.layers):
            self.layers.append(self._layer(layer, source.layer(index)))
            if progress is not None:
                progress(index + 1, len(spec.layers))
        ropes = {layer.mixer.rope for layer in spec.layers}
        self._ropes: dict[RopeSpec, Tensor] = {rope: rope_table(rope, max_context, dtype=dtype, device=device) for rope in ropes}

    # ------------------------------------------------------------------ weights

    def _tensor(self, array: Floats) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device=self.device, dtype=self.dtype)

    def _joined(self, weights: Mapping[str, Floats], names: tuple[str, ...], *, pad: int = 1) -> Tensor:
        """Several weights as one product's rows, each padded to a multiple of `pad` rows."""
        return torch.cat([_pad_rows(self._tensor(weights[name]), pad) for name in names])

    def _layer(self, spec: LayerSpec, weights: Mapping[str, Floats]) -> Layer:
        mixer, mlp = spec.mixer, spec.feed_forward
        down = self._tensor(weights["down"])
        down = F.pad(down, (0, -down.shape[1] % LANE))  # zero columns meet the padded rows of gate and up
        optional = {name: self._tensor(weights[name]) for name in ("q_norm", "k_norm", "o_bias", "down_bias") if name in weights}
        return Layer(
            spec=spec,
            attn_norm=self._tensor(weights["attn_norm"]),
            qkv=self.ops.linear(
                self._joined(weights, ("q", "k", "v")),
                self._joined(weights, ("q_bias", "k_bias", "v_bias")) if mixer.qkv_bias else None,
            ),
            q_norm=optional.get("q_norm"),
            k_norm=optional.get("k_norm"),
            out=self.ops.linear(self._tensor(weights["o"]), optional.get("o_bias")),
            mlp_norm=self._tensor(weights["mlp_norm"]),
            gate_up=self.ops.linear(
                self._joined(weights, ("gate", "up"), pad=LANE),
                self._joined(weights, ("gate_bias", "up_bias"), pad=LANE) if mlp.bias else None,
            ),
            down=self.ops.linear(down, optional.get("down_bias")),
        )

    def linears(self) -> list[Linear]:
        inner = [linear for layer in self.layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        return [*inner, self.head]

    def obey(self, rule: RowRule) -> None:
        """Offer rows by another rule from now on."""
        for linear in self.linears():
            linear.rule = rule

    # ------------------------------------------------------------------ one turn

    def hidden(self, inputs: Inputs, state: State, *, depth: int | None = None) -> Tensor:
        """Hidden states after the last norm: [T, E]. Keys and values of the turn's tokens are written on the way.

        `depth` runs the first layers only: the self-check needs no more.
        """
        ops, eps = self.ops, self.spec.eps
        prepared: dict[tuple[RopeSpec, int | None, int], Any] = {}
        x = self.embedding.index_select(0, inputs.tokens)  # [T, E]
        for layer, store in list(zip(self.layers, state.layers, strict=True))[:depth]:
            mixer = layer.spec.mixer
            key = (mixer.rope, mixer.window, mixer.kv_heads)
            if key not in prepared:
                prepared[key] = ops.prepare(inputs, mixer, self._ropes[mixer.rope])
            qkv = layer.qkv(ops.rms_norm(x, layer.attn_norm, eps))  # [T, (H + 2K) * D]
            mixed = ops.attention(qkv, prepared[key], spec=mixer, store=store, q_norm=layer.q_norm, k_norm=layer.k_norm, eps=eps)
            x = x + layer.out(mixed)
            gate_up = layer.gate_up(ops.rms_norm(x, layer.mlp_norm, eps))  # [T, 2F]
            x = x + layer.down(ops.gated(gate_up, layer.spec.feed_forward.activation))
        return ops.rms_norm(x, self.norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [C', V'] of hidden states [C', E], C' from the row rule, V' padded."""
        logits = self.head(hidden).float()
        return logits if self.spec.softcap is None else softcapped(logits, self.spec.softcap)


def _pad_rows(weight: Tensor, multiple: int = LANE) -> Tensor:
    """Zero rows up to a multiple: their products are exact zeros and nobody reads them."""
    missing = -weight.shape[0] % multiple
    if not missing:
        return weight
    return torch.cat([weight, weight.new_zeros(missing, *weight.shape[1:])])
