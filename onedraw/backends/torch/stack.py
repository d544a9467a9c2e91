"""The model as a list of layers: Inputs → hidden states → logits.

In: weights read layer by layer, and the turn's Inputs. Out: hidden states [T, E], and logits of the positions asked for.
Each layer is a function of its arguments; what several layers read alike (rope turns, page rows) is made once per turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from onedraw.backends.torch.inputs import Inputs
from onedraw.backends.torch.layers.elementwise import softcapped
from onedraw.backends.torch.layers.linear import Linear, RowRule
from onedraw.backends.torch.layers.rope import rope_table
from onedraw.backends.torch.ops import Ops, Preparation
from onedraw.backends.torch.state import PageStore, State
from onedraw.models.source import Tensor as Stored
from onedraw.models.spec import LayerSpec, ModelSpec, RopeSpec

LANE = 64  # widths are padded to a multiple of it: see layers/elementwise.py


class WeightSource(Protocol):
    """Named weights, each read when asked for; layer None for the outer ones (`models/weights.py` lists the names)."""

    def tensor(self, layer: int | None, weight: str) -> Stored: ...


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


class Loader:
    """Weights on their way from a source to a device. Owner: the stack, while it is being made.

    Matrices pass through one buffer on the host. Fresh ones, freed after every layer, would leave holes between the
    weights that stay, and the process would end an eighth larger than its weights.
    """

    def __init__(self, source: WeightSource, *, dtype: torch.dtype, device: torch.device) -> None:
        self._source, self._dtype, self._device = source, dtype, device
        self._buffer = torch.empty(0)

    def kept(self, layer: int | None, *names: str, pad: int = 1) -> Tensor:
        """Weights joined by rows, each padded with zeros to a multiple of `pad` rows, in memory of their own."""
        return self._joined(layer, names, pad=pad, take=torch.empty)

    def passing(self, layer: int | None, *names: str, pad: int = 1, pad_columns: int = 1) -> Tensor:
        """The same for matrices that are about to be packed. In float32 on a CPU they lie in the buffer until the next
        call, so whoever takes them there keeps a copy, never the tensor itself."""
        return self._joined(layer, names, pad=pad, pad_columns=pad_columns, take=self._take)

    def layer(self, index: int, spec: LayerSpec, ops: Ops) -> Layer:
        """Padding adds zero rows and columns whose products are exact zeros: those of gate and up meet those of down."""
        mixer, mlp, linear = spec.mixer, spec.feed_forward, ops.linear
        return Layer(
            spec=spec,
            attn_norm=self.kept(index, "attn_norm"),
            qkv=linear(
                self.passing(index, "q", "k", "v"),
                self.kept(index, "q_bias", "k_bias", "v_bias") if mixer.qkv_bias else None,
            ),
            q_norm=self.kept(index, "q_norm") if mixer.qk_norm else None,
            k_norm=self.kept(index, "k_norm") if mixer.qk_norm else None,
            out=linear(self.passing(index, "o"), self.kept(index, "o_bias") if mixer.out_bias else None),
            mlp_norm=self.kept(index, "mlp_norm"),
            gate_up=linear(
                self.passing(index, "gate", "up", pad=LANE),
                self.kept(index, "gate_bias", "up_bias", pad=LANE) if mlp.bias else None,
            ),
            down=linear(self.passing(index, "down", pad_columns=LANE), self.kept(index, "down_bias") if mlp.bias else None),
        )

    def _take(self, shape: tuple[int, ...]) -> Tensor:
        count = math.prod(shape)
        if self._buffer.numel() < count:
            self._buffer = torch.empty(0)  # the old one goes before the new one comes
            self._buffer = torch.empty(count)
        return self._buffer[:count].view(shape)

    def _joined(
        self,
        layer: int | None,
        names: tuple[str, ...],
        *,
        pad: int,
        pad_columns: int = 1,
        take: Callable[[tuple[int, ...]], Tensor],
    ) -> Tensor:
        stored = [self._source.tensor(layer, name) for name in names]
        heights = [_padded(tensor.shape[0], pad) for tensor in stored]
        width = tuple(_padded(columns, pad_columns) for columns in stored[0].shape[1:])  # () for vectors
        out = take((sum(heights), *width))
        for part, tensor in zip(torch.split(out, heights), stored, strict=True):
            rows = tensor.shape[0]
            part[rows:] = 0
            if width == tensor.shape[1:]:
                tensor.into(part[:rows].numpy())
            else:
                part[:rows] = F.pad(torch.from_numpy(tensor.float32()), (0, width[0] - tensor.shape[1]))
        return out.to(device=self._device, dtype=self._dtype)


def run_layer(x: Tensor, layer: Layer, *, ops: Ops, store: PageStore, prepared: Any, eps: float) -> Tensor:
    """One layer over the turn's tokens: x [T, E] → [T, E]."""
    qkv = layer.qkv(ops.rms_norm(x, layer.attn_norm, eps))  # [T, (H + 2K) * D]
    mixer = layer.spec.mixer
    mixed = ops.attention(qkv, prepared, spec=mixer, store=store, q_norm=layer.q_norm, k_norm=layer.k_norm, eps=eps)
    x = x + layer.out(mixed)
    gate_up = layer.gate_up(ops.rms_norm(x, layer.mlp_norm, eps))  # [T, 2F]
    return x + layer.down(ops.gated(gate_up, layer.spec.feed_forward.activation))


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
        self.max_context = max_context
        loader = Loader(source, dtype=dtype, device=device)
        self.embedding = loader.kept(None, "embed", pad=LANE)  # [V', E]
        self.norm = loader.kept(None, "norm")
        self.head = ops.linear(self.embedding if spec.tied else loader.passing(None, "head", pad=LANE))
        loader = Loader(source, dtype=dtype, device=device)  # lets go of a buffer as large as the head
        self.layers: list[Layer] = []
        for index, layer in enumerate(spec.layers):
            self.layers.append(loader.layer(index, layer, ops))
            if progress is not None:
                progress(index + 1, len(spec.layers))
        ropes = {layer.mixer.rope for layer in spec.layers}
        positions = max(max_context, LANE)  # padding tokens stand anywhere on a page, also where the context is shorter
        self._ropes: dict[RopeSpec, Tensor] = {rope: rope_table(rope, positions, dtype=dtype, device=device) for rope in ropes}

    def linears(self) -> list[Linear]:
        inner = [linear for layer in self.layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        return [*inner, self.head]

    def obey(self, rule: RowRule) -> None:
        """Offer rows by another rule from now on."""
        for linear in self.linears():
            linear.rule = rule

    # ------------------------------------------------------------------ one turn

    def hidden(
        self,
        inputs: Inputs,
        state: State,
        *,
        depth: int | None = None,
        captures: tuple[int, ...] = (),
        features: list[Tensor] | None = None,
    ) -> Tensor:
        """Hidden states after the last norm: [T, E]. Keys and values of the turn's tokens are written on the way.

        `depth` runs the first layers only: the self-check needs no more. The residual stream after each layer in
        `captures` is appended to `features`, [T, E] each.
        """
        ops, eps = self.ops, self.spec.eps
        preparation = Preparation(ops, inputs, self._ropes)
        x = self.embedding.index_select(0, inputs.tokens)  # [T, E]
        for index, (layer, store) in enumerate(list(zip(self.layers, state.layers, strict=True))[:depth]):
            x = run_layer(x, layer, ops=ops, store=store, prepared=preparation.of(layer.spec.mixer), eps=eps)
            if features is not None and index in captures:
                features.append(x)
        return ops.rms_norm(x, self.norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [C', V'] of hidden states [C', E], C' from the row rule, V' padded."""
        logits = self.head(hidden).float()
        return logits if self.spec.softcap is None else softcapped(logits, self.spec.softcap)


def _padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
