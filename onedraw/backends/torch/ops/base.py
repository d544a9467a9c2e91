"""The operations that models need from a device: `Ops` is Products, Attention, Delta, Experts, Sampling, and one commit.

In: tensors. Out: tensors in which no row depends on another row. `ops/plain` implements all of them in torch, `ops/cpu` in C,
`ops/cuda` in Triton and CUDA. Implementations may round differently, so a fingerprint names the one that is used.

Axes: T tokens of a step, R rows (one per sequence of the step), E hidden width, F feed-forward width, H query heads, K key and
value heads of size D, d rotary dimensions of a head. Gated DeltaNet has Hv value heads of size Dv and C convolution channels. In
products, K inputs and F outputs. A tile is some neighbouring queries of one row. A lane is the slot of a sequence's recurrent
state; the rollback buffer holds the state increments of drafts until the commit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from onedraw.backends.torch.ops.plain.delta import DeltaWeights
from onedraw.backends.torch.ops.plain.experts import ExpertBank
from onedraw.backends.torch.ops.plain.linear import Linear, RowRule
from onedraw.backends.torch.runner.inputs import Bucket, Inputs
from onedraw.backends.torch.sampling.sampler import Sampler
from onedraw.backends.torch.state.kv_pages import PageStore
from onedraw.backends.torch.state.model_state import KeptPath, ModelState
from onedraw.backends.torch.state.recurrent_state import LaneStore
from onedraw.models.source import LazyTensor
from onedraw.models.spec import Activation, AttentionSpec, DeltaSpec, Gate, MoeSpec, RopeSpec
from onedraw.sampling.verify import kept_drafts
from onedraw.types import Draft, Row


@dataclass(frozen=True, slots=True)
class KernelChoices:
    """Choices of an implementation that affect rounding, so a backend's identity contains them. None: there is no such choice."""

    tile_heights: tuple[int, ...] | None = None  # queries that an attention tile may have
    first_split: int | None = None  # keys in each of the first splits (ranges of keys with separate partial results)
    norm_warps: int | None = None  # the most warps of a program that computes a norm

    def texts(self) -> list[str]:
        named = {"tile_heights": self.tile_heights, "first_split": self.first_split, "norm_warps": self.norm_warps}
        return [f"{name} {'' if value is None else value}" for name, value in named.items()]


class Products(Protocol):
    """The operations of a layer that work row by row: matrix products, norms and activations."""

    @property
    def rule(self) -> RowRule:
        """The row counts that products must be called with, so that no row depends on another."""
        ...

    @property
    def reads_weight_rows(self) -> bool:
        """Whether `Linear.rows` can read rows of a product's weight, so that an embedding table needs no copy of its own."""
        ...

    @property
    def thread_pool(self) -> int | None:
        """The address of the thread pool that these operations created in C; None if they have none."""
        ...

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear: ...

    def packed_linear(self, tensors: Sequence[LazyTensor], *, bias: Tensor | None, pad: int, pad_columns: int) -> Linear | None:
        """A product with quantized weights in their stored blocks, concatenated along their rows; None if this device needs float
        tensors.

        Each weight is padded with zero rows to a multiple of `pad`. The inputs x of the product are padded to a multiple of
        `pad_columns` columns.
        """
        ...

    def packed_table(self, tensor: LazyTensor) -> Linear | None:
        """A quantized embedding table in its stored blocks, for `Linear.rows`; None if this device needs a float table."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """RMSNorm. A float32 weight is applied before rounding to x's dtype, a weight in x's dtype after it."""
        ...

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Gated activation, activation(gate) * up, where gate_up [T, 2F] has the gate in its first F columns: [T, F]."""
        ...

    def gated_product(self, gate_up: Linear, activation: Activation) -> GatedProduct | None:
        """One operation that computes `gated(gate_up(x))` and replaces the product `gate_up`; None if there is none."""
        ...

    def apply_gate(self, x: Tensor, gate: Tensor, kind: Gate) -> Tensor:
        """Multiply x [T, W] by sigmoid or softplus of a gate [T, W], or [T, W / n] with one value for n neighbouring columns."""
        ...

    def kernel_borders(self, mixers: Collection[AttentionSpec | DeltaSpec]) -> tuple[int, ...]:
        """Row counts from which attention, delta layers or norms use other kernels; the self-check compares results below and
        above. Products have `Linear.borders`."""
        ...


class Attention(Protocol):
    def prepare_attention(self, inputs: Inputs, spec: AttentionSpec, rope_table: Tensor) -> AttentionInputs:
        """The inputs of a step that all layers with this spec share. rope_table: cos and sin, [positions, 2, d/2]."""
        ...

    def fuse(self, layers: Sequence[DenseLayer]) -> FusedLayers | None:
        """Consecutive dense layers as one operation with the same bits; None if there is no such operation."""
        ...


class Delta(Protocol):
    def check_supported(self, spec: DeltaSpec) -> None:
        """Raise UnsupportedModel if such a layer cannot be computed. This is called before its weights are read."""
        ...

    def prepare_delta(self, inputs: Inputs, spec: DeltaSpec) -> DeltaInputs:
        """The inputs of a step that all delta layers with this spec share."""
        ...


class Experts(Protocol):
    def expert_bank(self, gate_up: list[Tensor], down: list[Tensor], activation: Activation) -> ExpertBank:
        """Experts from float matrices, one [2F, E] and one [E, F] for each expert."""
        ...

    def packed_expert_bank(self, gate_up: Sequence[LazyTensor], down: LazyTensor, activation: Activation) -> ExpertBank | None:
        """Experts from stacks of quantized matrices in their stored blocks; None if this device needs `expert_bank`."""
        ...

    def choose_experts(
        self, logits: Tensor, spec: MoeSpec, *, bias: Tensor | None, factors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The experts of each token and their weights, as `plain.experts.choose_experts` defines them."""
        ...

    def join_shared(self, out: Tensor, always: Tensor, gate: Tensor | None, residual: Tensor | None) -> Tensor:
        """The sum of the experts' output `out`, the gated output `always` of the shared expert, and the residual, as
        `plain.experts.join_shared` defines it."""
        ...


class Sampling(Protocol):
    def sampler(self, *, vocab: int, lanes: int, device: torch.device) -> Sampler: ...


class Ops(Products, Attention, Delta, Experts, Sampling, Protocol):
    @property
    def name(self) -> str: ...

    @property
    def choices(self) -> KernelChoices: ...

    @property
    def capture(self) -> CaptureOps | None:
        """The operations that steps captured as CUDA graphs need; None if steps cannot be captured, because they read host
        memory."""
        ...

    def commit(self, state: ModelState, drafts: DraftCommit) -> None:
        """Make kept drafts part of the state: move keys and values of a tree's kept path to the slots of their positions, and
        apply the increments in the rollback buffer to the recurrent states of the lanes."""
        ...


class CaptureOps(Protocol):
    """Operations on sampled tokens that stay on the device between steps. `last` [lanes + 1]: the token that each lane sampled
    last; the last element is for padding rows."""

    def resolve_tokens(self, tokens: Tensor, last: Tensor) -> Tensor:
        """The tokens of a step, where -1 - lane is replaced by the token that the lane sampled last."""
        ...

    def keep_last_tokens(self, samples: Tensor, lanes: Tensor, last: Tensor) -> None:
        """Store the token that each row sampled: last[lanes] = samples[:, 0]. `samples` [rows, columns] are the sampler's result
        rows, whose first column is the token. For steps without drafts."""
        ...


class AttentionInputs(Protocol):
    @property
    def page_table(self) -> Tensor:
        """The pages of each row, [R, W], where W is the most pages of a row."""
        ...

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
        """Attention of qkv [T, ≥ (H + 2K) * D] → [T, H * D]. The step's keys and values are written to the pages before any is
        read.

        Columns after q, k and v are ignored. A layer that reuses the keys of another layer has only q and writes nothing.
        """
        ...

    def write(self, kv: Tensor, *, spec: AttentionSpec, store: PageStore, k_norm: Tensor | None, eps: float) -> None:
        """Write keys, normalized and rotated, and values of kv [T, 2K * D] to the pages, without computing attention."""
        ...


class DeltaInputs(Protocol):
    def run(self, projected: Tensor, *, weights: DeltaWeights, store: LaneStore) -> Tensor:
        """Run the layer: projected [T, C + Hv * Dv + 2 Hv] → [T, Hv * Dv]. The states of lanes advance by known tokens; drafts
        only write their increments to the rollback buffer."""
        ...


class PreparedInputs:
    """The inputs of attention and delta layers in one step, by spec, prepared at first use. Owner: one pass over the layers."""

    def __init__(self, ops: Ops, inputs: Inputs, ropes: Mapping[RopeSpec, Tensor]) -> None:
        self._ops, self._inputs, self._ropes = ops, inputs, ropes
        self._attention: dict[AttentionSpec, AttentionInputs] = {}
        self._delta: dict[DeltaSpec, DeltaInputs] = {}

    def attention(self, spec: AttentionSpec) -> AttentionInputs:
        if spec not in self._attention:
            self._attention[spec] = self._ops.prepare_attention(self._inputs, spec, self._ropes[spec.rope])
        return self._attention[spec]

    def delta(self, spec: DeltaSpec) -> DeltaInputs:
        if spec not in self._delta:
            self._delta[spec] = self._ops.prepare_delta(self._inputs, spec)
        return self._delta[spec]


class GatedProduct(Protocol):
    def gated(self, x: Tensor) -> Tensor:
        """Both products and the gated activation, activation(gate) * up: x [T, K] → [T, F]."""
        ...


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """The weights of a layer that consists of attention and one dense feed-forward network."""

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


class FusedLayers(Protocol):
    def __call__(
        self, x: Tensor, prepared: Sequence[AttentionInputs], stores: Sequence[PageStore], kept: Sequence[int] = ()
    ) -> dict[int, Tensor]:
        """Run the first len(prepared) layers: x [T, E] → outputs, by index, of the last of them and of those in `kept`."""
        ...


@dataclass(frozen=True, slots=True)
class HostCommit:
    """The drafts to commit, if they were verified on the host: the kept path of each row."""

    kept: Sequence[KeptPath]

    @staticmethod
    def of(rows: Sequence[Row], kept: Sequence[Sequence[int]], rollback_start: int) -> HostCommit:
        """`kept`: for each row, the indices of its kept drafts, in order of position. `rollback_start`: slot of the step's first
        draft in the rollback buffer."""
        start, found = rollback_start, []
        for row, path in zip(rows, kept, strict=True):
            found.append(KeptPath(row.lane, start, row.stop, tuple(path), row.pages))
            start += len(row.drafts)
        return HostCommit(found)

    def paths(self, state: ModelState) -> Sequence[KeptPath]:
        return self.kept


@dataclass(frozen=True, slots=True)
class DeviceCommit:
    """The drafts to commit, if they are verified on the device, without a copy to the host."""

    samples: Tensor  # [T]: the token sampled at each position
    tokens: Tensor  # [T]: the input tokens
    parents: Tensor  # [T]: index of a draft's parent among its row's drafts; -1: it follows the last known token
    rows: Tensor  # [R, 5]; columns: first token, token count, lane, first rollback slot, KV slot of the first draft
    bucket: Bucket
    page_tables: Mapping[AttentionSpec, Tensor]

    def paths(self, state: ModelState) -> Sequence[KeptPath]:
        """The kept path of each row, found on the host after a copy, for operations that have no kernel to verify drafts."""
        samples, tokens, parents = self.samples.tolist(), self.tokens.tolist(), self.parents.tolist()
        tables = {state.group(spec): table.tolist() for spec, table in self.page_tables.items()}
        groups = range(len(state.sizes.pages))
        found = []
        for number, (first, count, lane, start, stop) in enumerate(self.rows.tolist()):
            drafts = [Draft(tokens[i], parents[i]) for i in range(first + 1, first + count)]
            path = kept_drafts(drafts, samples[first : first + count])
            found.append(KeptPath(lane, start, stop, path, tuple(tables[g][number] if g in tables else () for g in groups)))
        return found


DraftCommit = HostCommit | DeviceCommit
