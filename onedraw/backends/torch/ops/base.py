"""What a stack asks of a device: products, norms, activations, attention, delta states. `TorchOps` answers with plain torch.

In: tensors. Out: tensors whose rows do not depend on each other. Kernels answer the same questions faster
(`kernels/cpu.py`); their bits are their own, so a fingerprint names which of them computed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from onedraw.backends.torch.ops.plain import delta as plain_delta
from onedraw.backends.torch.ops.plain.attention import TileGroup, attend, store_rows
from onedraw.backends.torch.ops.plain.attention_tiles import tile_groups
from onedraw.backends.torch.ops.plain.delta import DeltaWeights
from onedraw.backends.torch.ops.plain.elementwise import gated, times_gate
from onedraw.backends.torch.ops.plain.experts import ExpertBank, PlainExpertBank, choose_experts, join_shared
from onedraw.backends.torch.ops.plain.linear import Linear, RowRule, default_rule
from onedraw.backends.torch.ops.plain.norm_and_rope import rms_norm, rotate
from onedraw.backends.torch.runner.inputs import Inputs
from onedraw.backends.torch.sampling.sampler import Sampler
from onedraw.backends.torch.state.kv_pages import PageStore, write_places
from onedraw.backends.torch.state.recurrent_spans import RecurrentSpans, recurrent_spans
from onedraw.backends.torch.state.recurrent_state import KeptDrafts, LaneStore
from onedraw.models.source import LazyTensor
from onedraw.models.spec import Activation, AttentionSpec, DeltaSpec, Gate, MoeSpec, RopeSpec


class Ops(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def rule(self) -> RowRule:
        """How rows must be offered to the products."""
        ...

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear: ...

    def stored(self, tensors: Sequence[LazyTensor], *, bias: Tensor | None, pad: int, pad_columns: int) -> Linear | None:
        """A product of weights as they are stored, side by side; None where products want float tensors.

        Each weight has zero rows up to a multiple of `pad`; a row that is offered is padded to a multiple of `pad_columns`.
        """
        ...

    def stored_bank(self, gate_up: Sequence[LazyTensor], down: LazyTensor, activation: Activation) -> ExpertBank | None:
        """Experts from stacks of matrices as they are stored; None where `bank` is to have float tensors."""
        ...

    def table(self, tensor: LazyTensor) -> Linear | None:
        """A weight as it is stored, to be looked up on this device (`Linear.rows`) and perhaps multiplied with; None where a
        float table is wanted."""
        ...

    @property
    def looks_up(self) -> bool:
        """Whether rows of a weight can be read where a product has it (`Linear.rows`)."""
        ...

    @property
    def records(self) -> bool:
        """Whether a steady turn's work reads device memory alone, so that it may be recorded (`steady.py`)."""
        ...

    def fuse(self, layers: Sequence[DenseLayer]) -> Fused | None:
        """Neighbouring dense layers as one operation with the bits of its parts; None where there is no such operation."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """A weight in float32 meets the normed numbers before they are rounded, one in x's dtype after."""
        ...

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor: ...

    def opening(self, gate_up: Linear, activation: Activation) -> GatedProduct | None:
        """The product and `gated` behind it as one operation with their bits, which takes the product's place; None where
        there is no such operation."""
        ...

    def opened(self, x: Tensor, gate: Tensor, kind: Gate) -> Tensor:
        """x [T, W] times the gate [T, W], or [T, W / n] with one number for n neighbours."""
        ...

    def bank(self, gate_up: list[Tensor], down: list[Tensor], activation: Activation) -> ExpertBank:
        """Experts from their matrices: [2F, E] and [E, F] of each."""
        ...

    def choose_experts(
        self, logits: Tensor, spec: MoeSpec, *, bias: Tensor | None, factors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As `experts.choose_experts`."""
        ...

    def join_shared(self, out: Tensor, always: Tensor, gate: Tensor | None, residual: Tensor | None) -> Tensor:
        """As `experts.join_shared`."""
        ...

    def sampler(self, *, vocab: int, lanes: int, device: torch.device) -> Sampler: ...

    def prepare(self, inputs: Inputs, mixer: AttentionSpec, turns: Tensor) -> Any:
        """What layers of one kind read alike in one turn, for `attention`. turns: the rope table [positions, 2, d/2]."""
        ...

    def attention(
        self,
        qkv: Tensor,
        prepared: Any,
        *,
        spec: AttentionSpec,
        store: PageStore,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """qkv [T, (H + 2K) * D …] → [T, H * D]; the turn's keys and values are written before any is read.

        Behind q, k and v more may stand in a row. A layer that reuses another's keys has q alone, and writes nothing.
        """
        ...

    def remember(
        self, kv: Tensor, prepared: Any, *, spec: AttentionSpec, store: PageStore, k_norm: Tensor | None, eps: float
    ) -> None:
        """Norm, turn and write keys and values [T, 2K * D] without attending."""
        ...

    def turn_borders(self, mixers: Collection[AttentionSpec | DeltaSpec]) -> tuple[int, ...]:
        """Rows of one token each from which on other kernels than those of the products serve a turn."""
        ...

    def require(self, mixer: DeltaSpec) -> None:
        """Raises UnsupportedModel where these operations cannot compute such a layer. Asked before a weight of it is read."""
        ...

    def prepare_delta(self, inputs: Inputs, mixer: DeltaSpec) -> Any:
        """What delta layers of one kind read alike in one turn."""
        ...

    def delta(self, projected: Tensor, prepared: Any, *, weights: DeltaWeights, store: LaneStore) -> Tensor:
        """projected [T, C + Hv * Dv + 2 Hv] → [T, Hv * Dv]; lanes move on, drafts are held in the rollback buffer."""
        ...

    def commit_delta(self, store: LaneStore, kept: Sequence[KeptDrafts]) -> None:
        """Bring kept drafts from the rollback buffer to their lanes."""
        ...


class GatedProduct(Protocol):
    """A product of gate and up, opened on its way out."""

    def opened(self, x: Tensor) -> Tensor:
        """[T, K] → [T, F]"""
        ...


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A layer that attends, then feeds forward, with nothing besides."""

    spec: AttentionSpec
    attn_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    activation: Activation
    eps: float


class Fused(Protocol):
    def __call__(
        self, x: Tensor, prepared: Sequence[Any], stores: Sequence[PageStore], kept: Sequence[int] = ()
    ) -> dict[int, Tensor]:
        """Run the first layers, as many as are prepared: x [T, E] → what the last of them and the `kept` ones give."""
        ...


class Preparation:
    """`Ops.prepare` once per kind of mixer in one turn. Owner: the pass over the layers that made it."""

    def __init__(self, ops: Ops, inputs: Inputs, ropes: Mapping[RopeSpec, Tensor]) -> None:
        self._ops, self._inputs, self._ropes = ops, inputs, ropes
        self._found: dict[AttentionSpec | DeltaSpec, Any] = {}

    def of(self, mixer: AttentionSpec | DeltaSpec) -> Any:
        if mixer not in self._found:
            if isinstance(mixer, DeltaSpec):
                self._found[mixer] = self._ops.prepare_delta(self._inputs, mixer)
            else:
                self._found[mixer] = self._ops.prepare(self._inputs, mixer, self._ropes[mixer.rope])
        return self._found[mixer]


@dataclass(frozen=True, slots=True)
class TorchAttentionInputs:
    turn: Tensor  # [T, 2, d/2] cos and sin
    places: Tensor  # [T * K]
    groups: list[TileGroup]
    rows: list[Tensor]


class FloatOps:
    """What operations that want weights as float tensors say to the questions about stored ones."""

    looks_up = False
    records = False

    def stored(self, tensors: Sequence[LazyTensor], *, bias: Tensor | None, pad: int, pad_columns: int) -> Linear | None:
        return None

    def stored_bank(self, gate_up: Sequence[LazyTensor], down: LazyTensor, activation: Activation) -> ExpertBank | None:
        return None

    def table(self, tensor: LazyTensor) -> Linear | None:
        return None

    def choose_experts(
        self, logits: Tensor, spec: MoeSpec, *, bias: Tensor | None, factors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return choose_experts(logits, spec, bias=bias, factors=factors)

    def join_shared(self, out: Tensor, always: Tensor, gate: Tensor | None, residual: Tensor | None) -> Tensor:
        return join_shared(out, always, gate, residual)

    def fuse(self, layers: Sequence[DenseLayer]) -> Fused | None:
        return None

    def opening(self, gate_up: Linear, activation: Activation) -> GatedProduct | None:
        return None

    def turn_borders(self, mixers: Collection[AttentionSpec | DeltaSpec]) -> tuple[int, ...]:
        return ()

    def require(self, mixer: DeltaSpec) -> None:
        return


class TorchOps(FloatOps):
    """Plain torch operations on a CPU or a CUDA device. `obey` and `tile_heights` are set by the self-check."""

    def __init__(self, device: torch.device) -> None:
        self.name = f"{device.type}-torch"
        self.rule = default_rule(device)
        self.tile_heights: tuple[int, ...] = (4, 16) if device.type == "cpu" else (16,)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return Linear(weight, bias=bias, rule=self.rule)

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return gated(gate_up, activation)

    def opened(self, x: Tensor, gate: Tensor, kind: Gate) -> Tensor:
        return times_gate(x, gate, kind)

    def bank(self, gate_up: list[Tensor], down: list[Tensor], activation: Activation) -> PlainExpertBank:
        return PlainExpertBank(tuple(map(self.linear, gate_up)), tuple(map(self.linear, down)), activation, self.gated)

    def sampler(self, *, vocab: int, lanes: int, device: torch.device) -> Sampler:
        return Sampler(vocab=vocab, lanes=lanes, device=device)

    def prepare(self, inputs: Inputs, mixer: AttentionSpec, turns: Tensor) -> TorchAttentionInputs:
        groups = tile_groups(inputs, window=mixer.window, heights=self.tile_heights)
        pages = inputs.tables[inputs.group(mixer.window)][inputs.rows, inputs.slots // inputs.page_size]
        slots = inputs.slots % inputs.page_size
        return TorchAttentionInputs(
            turn=turns.index_select(0, inputs.positions),
            places=write_places(pages, slots, kv_heads=mixer.kv_heads, page_size=inputs.page_size),
            groups=groups,
            rows=[store_rows(group, kv_heads=mixer.kv_heads, page_size=inputs.page_size) for group in groups],
        )

    def attention(
        self,
        qkv: Tensor,
        prepared: TorchAttentionInputs,
        *,
        spec: AttentionSpec,
        store: PageStore,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        width = spec.heads * spec.head_dim
        q = qkv[:, :width].reshape(len(qkv), spec.heads, spec.head_dim)
        q = rotate(q if q_norm is None else rms_norm(q, q_norm, eps), prepared.turn)
        if spec.reuses is None:
            self.remember(qkv[:, width:], prepared, spec=spec, store=store, k_norm=k_norm, eps=eps)
        return attend(q, store, groups=prepared.groups, rows=prepared.rows, spec=spec)

    def remember(
        self,
        kv: Tensor,
        prepared: TorchAttentionInputs,
        *,
        spec: AttentionSpec,
        store: PageStore,
        k_norm: Tensor | None,
        eps: float,
    ) -> None:
        width = spec.kv_heads * spec.head_dim
        keys = kv[:, :width].reshape(len(kv), spec.kv_heads, spec.head_dim)
        values = keys if spec.keys_as_values else kv[:, width : 2 * width].reshape(keys.shape)
        values = rms_norm(values, None, eps) if spec.v_norm else values
        keys = keys if k_norm is None else rms_norm(keys, k_norm, eps)
        store.write(rotate(keys, prepared.turn), values, prepared.places)

    def prepare_delta(self, inputs: Inputs, mixer: DeltaSpec) -> RecurrentSpans:
        return recurrent_spans(inputs, conv=mixer.conv)

    def delta(self, projected: Tensor, prepared: RecurrentSpans, *, weights: DeltaWeights, store: LaneStore) -> Tensor:
        return plain_delta.delta(projected, prepared, weights=weights, store=store).to(projected.dtype)

    def commit_delta(self, store: LaneStore, kept: Sequence[KeptDrafts]) -> None:
        plain_delta.commit(store, kept)
