"""The operations of a model in plain torch, on any device.

In: a device. Out: `TorchOps`. The kernels of `ops/cpu` and `ops/cuda` are faster, and tests compare them with these. A tile is
some neighbouring queries of one row of a step. Axes: T tokens, K key heads, d rotary dimensions of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onedraw.backends.torch.ops.base import CaptureOps, DenseLayer, DraftCommit, FusedLayers, GatedProduct, KernelChoices
from onedraw.backends.torch.ops.plain import delta as plain_delta
from onedraw.backends.torch.ops.plain.attention import TileGroup, attend, store_rows, tile_groups
from onedraw.backends.torch.ops.plain.delta import DeltaWeights
from onedraw.backends.torch.ops.plain.elementwise import gated, rms_norm, rotate, times_gate
from onedraw.backends.torch.ops.plain.experts import ExpertBank, PlainExpertBank, choose_experts, join_shared
from onedraw.backends.torch.ops.plain.linear import Linear, default_rule
from onedraw.backends.torch.ops.plain.recurrent_rollback import commit_states
from onedraw.backends.torch.runner.inputs import Inputs
from onedraw.backends.torch.sampling.sampler import Sampler
from onedraw.backends.torch.state.kv_pages import PageStore, write_places
from onedraw.backends.torch.state.model_state import ModelState
from onedraw.backends.torch.state.recurrent_state import KeptDrafts, LaneStore, RecurrentSpans, recurrent_spans
from onedraw.models.source import LazyTensor
from onedraw.models.spec import Activation, AttentionSpec, DeltaSpec, Gate, MoeSpec


class BaseOps(ABC):
    """Defaults of all implementations: no operation works on quantized weights, fuses layers, captures steps in CUDA graphs or
    chooses a kernel by the number of rows, and output gates and mixtures of experts are computed in plain torch."""

    reads_weight_rows = False

    @property
    def thread_pool(self) -> int | None:
        return None

    @property
    def capture(self) -> CaptureOps | None:
        return None

    def packed_linear(self, tensors: Sequence[LazyTensor], *, bias: Tensor | None, pad: int, pad_columns: int) -> Linear | None:
        return None

    def packed_table(self, tensor: LazyTensor) -> Linear | None:
        return None

    def packed_expert_bank(self, gate_up: Sequence[LazyTensor], down: LazyTensor, activation: Activation) -> ExpertBank | None:
        return None

    def gated_product(self, gate_up: Linear, activation: Activation) -> GatedProduct | None:
        return None

    def fuse(self, layers: Sequence[DenseLayer]) -> FusedLayers | None:
        return None

    def kernel_borders(self, mixers: Collection[AttentionSpec | DeltaSpec]) -> tuple[int, ...]:
        return ()

    def check_supported(self, spec: DeltaSpec) -> None:
        return

    @abstractmethod
    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear: ...

    @abstractmethod
    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor: ...

    def apply_gate(self, x: Tensor, gate: Tensor, kind: Gate) -> Tensor:
        return times_gate(x, gate, kind)

    def expert_bank(self, gate_up: list[Tensor], down: list[Tensor], activation: Activation) -> ExpertBank:
        return PlainExpertBank(tuple(map(self.linear, gate_up)), tuple(map(self.linear, down)), activation, self.gated)

    def choose_experts(
        self, logits: Tensor, spec: MoeSpec, *, bias: Tensor | None, factors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return choose_experts(logits, spec, bias=bias, factors=factors)

    def join_shared(self, out: Tensor, always: Tensor, gate: Tensor | None, residual: Tensor | None) -> Tensor:
        return join_shared(out, always, gate, residual)

    def commit(self, state: ModelState, drafts: DraftCommit) -> None:
        paths = drafts.paths(state)
        state.move_kept_pages(paths)
        kept = state.kept_drafts(paths)
        for store in state.lanes if kept else ():
            self.commit_delta(store, kept)

    @abstractmethod
    def commit_delta(self, store: LaneStore, kept: Sequence[KeptDrafts]) -> None: ...


class TorchOps(BaseOps):
    """Operations in plain torch. The self-check changes `rule`, the row rule of products, if rows depend on each other, and
    `tile_heights` if attention tiles of different heights round differently."""

    def __init__(self, device: torch.device) -> None:
        self.name = f"{device.type}-torch"
        self.rule = default_rule(device)
        self.tile_heights: tuple[int, ...] = (4, 16) if device.type == "cpu" else (16,)

    @property
    def choices(self) -> KernelChoices:
        return KernelChoices(tile_heights=self.tile_heights)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return Linear(weight, bias=bias, rule=self.rule)

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return gated(gate_up, activation)

    def sampler(self, *, vocab: int, lanes: int, device: torch.device) -> Sampler:
        return Sampler(vocab=vocab, lanes=lanes, device=device)

    def prepare_attention(self, inputs: Inputs, spec: AttentionSpec, rope_table: Tensor) -> TorchAttentionInputs:
        groups = tile_groups(inputs, window=spec.window, heights=self.tile_heights)
        table = inputs.tables[inputs.group(spec.window)]
        pages = table[inputs.rows, inputs.slots // inputs.page_size]
        slots = inputs.slots % inputs.page_size
        return TorchAttentionInputs(
            page_table=table,
            rotation=rope_table.index_select(0, inputs.positions),
            places=write_places(pages, slots, kv_heads=spec.kv_heads, page_size=inputs.page_size),
            groups=groups,
            rows=[store_rows(group, kv_heads=spec.kv_heads, page_size=inputs.page_size) for group in groups],
        )

    def prepare_delta(self, inputs: Inputs, spec: DeltaSpec) -> TorchDeltaInputs:
        return TorchDeltaInputs(recurrent_spans(inputs, conv=spec.conv))

    def commit_delta(self, store: LaneStore, kept: Sequence[KeptDrafts]) -> None:
        commit_states(store, kept)


@dataclass(frozen=True, slots=True)
class TorchAttentionInputs:
    page_table: Tensor
    rotation: Tensor  # [T, 2, d/2]: cos and sin of each token's position
    places: Tensor  # [T * K]: where the key and value of each token and KV head are written
    groups: list[TileGroup]
    rows: list[Tensor]  # for each group of tiles, the rows of the page store that it reads (`store_rows`)

    def attend(
        self,
        qkv: Tensor,
        *,
        spec: AttentionSpec,
        store: PageStore,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        width = spec.heads * spec.head_dim
        q = qkv[:, :width].reshape(len(qkv), spec.heads, spec.head_dim)
        q = rotate(q if q_norm is None else rms_norm(q, q_norm, eps), self.rotation)
        if spec.reuses is None:
            self.write(qkv[:, width:], spec=spec, store=store, k_norm=k_norm, eps=eps)
        return attend(q, store, groups=self.groups, rows=self.rows, spec=spec)

    def write(self, kv: Tensor, *, spec: AttentionSpec, store: PageStore, k_norm: Tensor | None, eps: float) -> None:
        width = spec.kv_heads * spec.head_dim
        keys = kv[:, :width].reshape(len(kv), spec.kv_heads, spec.head_dim)
        values = keys if spec.keys_as_values else kv[:, width : 2 * width].reshape(keys.shape)
        values = rms_norm(values, None, eps) if spec.v_norm else values
        keys = keys if k_norm is None else rms_norm(keys, k_norm, eps)
        store.write(rotate(keys, self.rotation), values, self.places)


@dataclass(frozen=True, slots=True)
class TorchDeltaInputs:
    spans: RecurrentSpans

    def run(self, projected: Tensor, *, weights: DeltaWeights, store: LaneStore) -> Tensor:
        return plain_delta.delta(projected, self.spans, weights=weights, store=store).to(projected.dtype)
