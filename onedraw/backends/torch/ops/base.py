"""The operations that a model needs of a device: `Ops` is Products, Attention, Delta, Experts, Sampling, and one commit.

In: tensors. Out: tensors in which no row depends on another row. `ops/plain` implements all of them in torch, `ops/cpu` in C,
`ops/cuda` in Triton and CUDA. Implementations may round differently, so a fingerprint names the one that computed.
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
    """Choices of an implementation that decide about rounding, so that a backend's identity names them. None: it has none."""

    tile_heights: tuple[int, ...] | None = None
    first_split: int | None = None
    norm_warps: int | None = None

    def texts(self) -> list[str]:
        named = {"tile_heights": self.tile_heights, "first_split": self.first_split, "norm_warps": self.norm_warps}
        return [f"{name} {'' if value is None else value}" for name, value in named.items()]


class Products(Protocol):
    """Matrix products, norms and activations."""

    @property
    def rule(self) -> RowRule:
        """How many rows a product must be given."""
        ...

    @property
    def reads_weight_rows(self) -> bool:
        """Whether rows of a weight can be read back from a product (`Linear.rows`)."""
        ...

    @property
    def thread_pool(self) -> int | None:
        """The address of these operations' own thread pool; None where they have none."""
        ...

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear: ...

    def packed_linear(self, tensors: Sequence[LazyTensor], *, bias: Tensor | None, pad: int, pad_columns: int) -> Linear | None:
        """A product of quantized weights in their blocks, joined by rows; None where products need float tensors.

        Each weight has zero rows up to a multiple of `pad`; an input row is padded to a multiple of `pad_columns`.
        """
        ...

    def packed_table(self, tensor: LazyTensor) -> Linear | None:
        """A quantized embedding in its blocks, for `Linear.rows` and perhaps for products; None where a float table is needed."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """A float32 weight is applied before rounding to x's dtype, one in x's dtype after it."""
        ...

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up of [T, 2F], gate first: [T, F]."""
        ...

    def gated_product(self, gate_up: Linear, activation: Activation) -> GatedProduct | None:
        """`gated_product(x) == gated(gate_up(x))` in one operation that replaces the product; None where there is none."""
        ...

    def apply_gate(self, x: Tensor, gate: Tensor, kind: Gate) -> Tensor:
        """x [T, W] times the gate [T, W], or [T, W / n] with one number for n neighbours."""
        ...

    def kernel_borders(self, mixers: Collection[AttentionSpec | DeltaSpec]) -> tuple[int, ...]:
        """Numbers of rows from which other kernels than those of the products take over; the self-check compares across them."""
        ...


class Attention(Protocol):
    def prepare_attention(self, inputs: Inputs, spec: AttentionSpec, rope_table: Tensor) -> AttentionInputs:
        """What layers of one kind read alike in one step. rope_table: cos and sin, [positions, 2, d/2]."""
        ...

    def fuse(self, layers: Sequence[DenseLayer]) -> FusedLayers | None:
        """Neighbouring dense layers as one operation with the same bits; None where there is no such operation."""
        ...


class Delta(Protocol):
    def check_supported(self, spec: DeltaSpec) -> None:
        """Raises UnsupportedModel where such a layer cannot be computed. Called before its weights are read."""
        ...

    def prepare_delta(self, inputs: Inputs, spec: DeltaSpec) -> DeltaInputs:
        """What delta layers of one kind read alike in one step."""
        ...


class Experts(Protocol):
    def expert_bank(self, gate_up: list[Tensor], down: list[Tensor], activation: Activation) -> ExpertBank:
        """Experts from their matrices: [2F, E] and [E, F] of each."""
        ...

    def packed_expert_bank(self, gate_up: Sequence[LazyTensor], down: LazyTensor, activation: Activation) -> ExpertBank | None:
        """Experts from stacks of quantized matrices in their blocks; None where `expert_bank` needs float tensors."""
        ...

    def choose_experts(
        self, logits: Tensor, spec: MoeSpec, *, bias: Tensor | None, factors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As `plain.experts.choose_experts`."""
        ...

    def join_shared(self, out: Tensor, always: Tensor, gate: Tensor | None, residual: Tensor | None) -> Tensor:
        """As `plain.experts.join_shared`."""
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
        """What capturing a step as CUDA graphs needs; None where a step of these operations reads host memory."""
        ...

    def commit(self, state: ModelState, drafts: DraftCommit) -> None:
        """Make kept drafts part of the state: keys and values of a tree's path move to the slots of their positions, recurrent
        state advances from the rollback buffer to its lane."""
        ...


class CaptureOps(Protocol):
    """Tokens that stay on the device between steps. `last` [lanes + 1]: the token that each lane sampled last, and of padding."""

    def resolve_tokens(self, tokens: Tensor, last: Tensor) -> Tensor:
        """All tokens of a step: a token of -1 - lane is replaced by that lane's last one."""
        ...

    def keep_last_tokens(self, samples: Tensor, lanes: Tensor, last: Tensor) -> None:
        """last[lanes] = samples[:, 0]."""
        ...


class AttentionInputs(Protocol):
    @property
    def page_table(self) -> Tensor:
        """[R, W]: the pages of each row."""
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
        """qkv [T, (H + 2K) * D …] → [T, H * D]; the step's keys and values are written before any is read.

        A row may be wider than q, k and v. A layer that reuses another's keys has q alone, and writes nothing.
        """
        ...

    def write(self, kv: Tensor, *, spec: AttentionSpec, store: PageStore, k_norm: Tensor | None, eps: float) -> None:
        """Norm, rotate and write keys and values [T, 2K * D] without attending."""
        ...


class DeltaInputs(Protocol):
    def run(self, projected: Tensor, *, weights: DeltaWeights, store: LaneStore) -> Tensor:
        """projected [T, C + Hv * Dv + 2 Hv] → [T, Hv * Dv]; lanes advance, drafts are written to the rollback buffer."""
        ...


class PreparedInputs:
    """The inputs of each kind of mixer in one step, prepared at first use. Owner: one pass over the layers."""

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
        """[T, K] → [T, F]"""
        ...


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A layer of attention and one feed-forward, and nothing else."""

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
        """Run the first len(prepared) layers: x [T, E] → outputs of the last of them and of those in `kept`."""
        ...


@dataclass(frozen=True, slots=True)
class HostCommit:
    """A commit of drafts that were verified on the host."""

    rows: Sequence[Row]
    kept: Sequence[Sequence[int]]  # per row, indices of its kept drafts in order of position
    rollback_start: int  # the step's first slot of the rollback buffer

    def paths(self, state: ModelState) -> list[KeptPath]:
        start, found = self.rollback_start, []
        for row, path in zip(self.rows, self.kept, strict=True):
            found.append(KeptPath(row.lane, start, row.stop, tuple(path), row.pages))
            start += len(row.drafts)
        return found


@dataclass(frozen=True, slots=True)
class DeviceCommit:
    """A commit of drafts that are verified on the device, without a copy to the host."""

    samples: Tensor  # [T] sampled after each token
    tokens: Tensor  # [T]
    parents: Tensor  # [T] of drafts
    rows: Tensor  # [R, 5]: first token, tokens, lane, first slot of the rollback buffer, slot of the first draft
    bucket: Bucket
    page_tables: Mapping[AttentionSpec, Tensor]

    def paths(self, state: ModelState) -> list[KeptPath]:
        """The same by a copy to the host, for operations that have no kernel for it."""
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
