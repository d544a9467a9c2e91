"""The Triton kernels as a model's operations, on an NVIDIA GPU.

In: a device and a dtype that the kernels support. Out: `TritonOps`. A step may have any number of rows: the bits of a row do not
depend on it.

Axes: T tokens of a step, N outputs and K inputs of a weight, E hidden width, F feed-forward width, d rotary dimensions of a head.
A tile is some neighbouring queries of one row of a step, and a split is a range of key positions (`attention.py`). A border is a
number of rows from which another kernel or tile is used; the self-check at start compares results on both sides of each.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from onedraw.backends.torch.ops.base import CaptureOps, DeviceCommit, DraftCommit, KernelChoices
from onedraw.backends.torch.ops.cuda import delta as delta_kernels
from onedraw.backends.torch.ops.cuda.attention import FIRST_SPLIT, attend
from onedraw.backends.torch.ops.cuda.attention_inputs import AttentionShape, DeviceAttentionInputs, stage_attention_inputs
from onedraw.backends.torch.ops.cuda.commit import move_kept_kv, resolve_pending_tokens, store_last_tokens, verify_drafts
from onedraw.backends.torch.ops.cuda.cublas import WHOLE_ROWS, forbid_split_sums, is_faster, library_rows, multiply
from onedraw.backends.torch.ops.cuda.delta_chunked import chunked_delta
from onedraw.backends.torch.ops.cuda.delta_inputs import DeltaTables, run_paths
from onedraw.backends.torch.ops.cuda.delta_recurrent import MANY_PATHS
from onedraw.backends.torch.ops.cuda.experts import add_shared_expert, choose_experts, route, route_borders, run_experts
from onedraw.backends.torch.ops.cuda.linear import SMALL_SHARED, linear, shared_memory, tile_borders
from onedraw.backends.torch.ops.cuda.norm import ACTIVATIONS, MAX_WARPS, apply_gate, gated_activation, rms_norm
from onedraw.backends.torch.ops.cuda.recurrent_rollback import commit_states, commit_tables
from onedraw.backends.torch.ops.cuda.rope import norm_rope_and_cache
from onedraw.backends.torch.ops.cuda.sampler import TritonSampler
from onedraw.backends.torch.ops.plain.delta import DeltaWeights
from onedraw.backends.torch.ops.plain.linear import Linear, RowRule
from onedraw.backends.torch.ops.plain.ops import BaseOps
from onedraw.backends.torch.runner.inputs import Inputs
from onedraw.backends.torch.sampling.sampler import Sampler
from onedraw.backends.torch.state.kv_pages import PageStore
from onedraw.backends.torch.state.model_state import ModelState
from onedraw.backends.torch.state.recurrent_state import KeptDrafts, LaneStore, recurrent_spans
from onedraw.errors import UnsupportedModel
from onedraw.models.spec import Activation, AttentionSpec, DeltaSpec, Gate, MoeSpec

OLDEST = (8, 0)  # the compute capability from which Triton has bf16 products


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels run on this device with this dtype."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.cuda.get_device_capability(device) >= OLDEST


class TritonLinear(Linear):
    """A weight [N, K]. cuBLAS computes the products of row counts at which it is faster and gives the bits of the Triton kernel;
    the Triton kernel computes all others."""

    def __init__(self, weight: Tensor, *, bias: Tensor | None, pdl: bool) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype, self.device, self.rule = weight.dtype, weight.device, RowRule(floor=1)
        self.bias, self._weight, self._pdl = bias, weight.contiguous(), pdl
        self.library_rows = library_rows(self._weight)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The product x Wᵀ + b + residual of x [T, K], each sum rounded."""
        x = _straight(x)
        if not self._uses_library(x):
            return linear(x, self._weight, bias=self.bias, residual=residual, pdl=self._pdl)
        y = torch.empty(len(x), self.out_features, dtype=x.dtype, device=x.device)
        for start in range(0, len(x), WHOLE_ROWS):
            part = slice(start, start + WHOLE_ROWS)
            self._write(x[part], y[part], None if residual is None else residual[part])
        return y

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        return self(x, residual) if residual.dtype == self.dtype else super().added(x, residual)

    @property
    def borders(self) -> tuple[int, ...]:
        """Row counts from which another tile or library computes the product. cuBLAS is used at isolated counts, so each of
        them and the count after it are borders."""
        # On a CPU Triton's interpreter runs the kernels; the self-check of so many rows would take it seconds.
        if self.device.type != "cuda":
            return ()
        tiles = tile_borders(self.out_features, self.in_features, self.dtype, shared_memory(self.device))
        return tuple(sorted({*tiles, *self.library_rows, *(count + 1 for count in self.library_rows)}))

    @property
    def choices(self) -> tuple[str, ...]:
        counts = " ".join(map(str, self.library_rows))
        return (f"{self.out_features} x {self.in_features} by cuBLAS at {counts} rows",) if counts else ()

    def _by_library(self, rows: int) -> bool:
        return rows in self.library_rows and is_faster(rows, self._weight)

    def _uses_library(self, x: Tensor) -> bool:
        """Whether cuBLAS computes the product of x, or of its parts of WHOLE_ROWS rows. Its bits were compared with those of the
        Triton kernel for contiguous rows alone."""
        return x.is_contiguous() and self._by_library(min(len(x), WHOLE_ROWS))

    def _write(self, x: Tensor, y: Tensor, residual: Tensor | None) -> None:
        if not self._by_library(len(x)):
            linear(x, self._weight, bias=self.bias, residual=residual, out=y, pdl=self._pdl)
            return
        multiply(x, self._weight, out=y)
        if self.bias is not None:
            y += self.bias
        if residual is not None:
            y += residual


class TritonGated(TritonLinear):
    """Gate and up projection in one product with the activation fused. It is made from a linear layer, which it replaces: the
    rows of its weight are reordered so that each gate row is followed by the up row of the same output."""

    def __init__(self, joined: TritonLinear, activation: Activation) -> None:
        half = joined.out_features // 2
        weight = joined._weight.view(2, half, -1).transpose(0, 1).reshape(joined.out_features, -1)
        bias = None if joined.bias is None else joined.bias.view(2, half).t().reshape(-1)
        super().__init__(weight, bias=bias, pdl=joined._pdl)
        self._activation = activation

    def gated(self, x: Tensor) -> Tensor:
        """Gate and up projection with the activation, activation(gate x) · up x: [T, K] → [T, F]."""
        x = _straight(x)
        if not self._uses_library(x):
            return linear(x, self._weight, bias=self.bias, gate=ACTIVATIONS[self._activation], pdl=self._pdl)
        return gated_activation(self(x), self._activation, paired=True, pdl=self._pdl)


def _straight(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


@dataclass(frozen=True, slots=True)
class TritonAttentionInputs:
    rope_table: Tensor  # [positions, 2, d/2]: cos and sin, for d rotary dimensions
    device: DeviceAttentionInputs
    pdl: bool

    @property
    def page_table(self) -> Tensor:
        return self.device.metadata.page_table

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
        q = self.rotated_queries(qkv, spec=spec, store=store, q_norm=q_norm, k_norm=k_norm, eps=eps, heads=spec.heads)
        return attend(
            q,
            store.keys,
            store.values,
            scales=store.scales,
            metadata=self.device.metadata,
            tile_sets=list(self.device.tile_sets),
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            dim=spec.head_dim,
            scale=spec.scale,
            pdl=self.pdl,
        )

    def write(self, kv: Tensor, *, spec: AttentionSpec, store: PageStore, k_norm: Tensor | None, eps: float) -> None:
        self.rotated_queries(kv, spec=spec, store=store, q_norm=None, k_norm=k_norm, eps=eps, heads=0)

    def rotated_queries(
        self,
        x: Tensor,
        *,
        spec: AttentionSpec,
        store: PageStore,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        heads: int,
    ) -> Tensor:
        device = self.device
        return norm_rope_and_cache(
            _straight(x),
            store,
            cos_sin=self.rope_table,
            positions=device.positions,
            rows=device.metadata.rows,
            slots=device.slots,
            page_table=device.metadata.page_table,
            heads=heads,
            kv_heads=spec.kv_heads,
            dim=spec.head_dim,
            page_size=device.metadata.page_size,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            v_norm=spec.v_norm,
            keys_as_values=spec.keys_as_values,
            writes=spec.reuses is None,
            pdl=self.pdl,
        )


@dataclass(frozen=True, slots=True)
class TritonDeltaInputs:
    tables: DeltaTables
    pdl: bool

    def run(self, projected: Tensor, *, weights: DeltaWeights, store: LaneStore) -> Tensor:
        spec, tables, projected = store.spec, self.tables, _straight(projected)
        drafts = None
        if tables.draft_slots is not None:
            drafts = delta_kernels.DraftIncrements(tables.draft_slots, store.decays, store.keys, store.changes, store.fed)
        gates = delta_kernels.conv_and_gates(
            projected,
            store.windows,
            tables.taps,
            conv=weights.conv,
            decay=weights.decay,
            bias=weights.bias,
            key_heads=spec.key_heads,
            value_heads=spec.value_heads,
            key_dim=spec.key_dim,
            value_dim=spec.value_dim,
            drafts=drafts,
            pdl=self.pdl,
        )
        # Rows of padding stay uninitialized.
        out = torch.empty(len(projected), spec.value_heads, spec.value_dim, device=projected.device)
        chunks = {"chunks": tables.chunks, "spans": tables.chunk_spans, "save_slots": tables.chunk_slots}
        chunked_delta(gates, store.states, store.saved_states, out, **chunks)
        run_paths(gates, store.states, out, tables.paths, drafts=drafts, pdl=self.pdl)
        delta_kernels.shift_conv_windows(projected, store.windows, store.saved_windows, tables.saved_window_sources, pdl=self.pdl)
        return delta_kernels.gated_norm(
            out,
            projected,
            weights.norm,
            weights.eps,
            channels=spec.channels,
            windows=store.windows,
            sources=tables.window_sources,
            pdl=self.pdl,
        )


class TritonBank:
    """The matrices of all experts, stacked: gate_up [experts, 2F, E] and down [experts, E, F]."""

    def __init__(self, gate_up: Tensor, down: Tensor, activation: Activation, *, pdl: bool) -> None:
        self._gate_up, self._down, self._activation, self._pdl = gate_up, down, activation, pdl

    @property
    def kind(self) -> str:
        return str(self._down.dtype).removeprefix("torch.")

    @property
    def linears(self) -> list[Linear]:
        """Empty: the self-check looks for the row counts that products need (`Linear.rule`), and expert kernels accept any."""
        return []

    def borders(self, used: int) -> tuple[int, ...]:
        return route_borders(len(self._gate_up), used) if self._down.device.type == "cuda" else ()

    def __call__(self, h: Tensor, ids: Tensor, weights: Tensor, scale: float) -> Tensor:
        routes = route(ids, weights, count=len(self._gate_up), pdl=self._pdl)
        return run_experts(
            h,
            routes,
            gate_up=self._gate_up,
            down=self._down,
            activation=self._activation,
            scale=scale,
            pdl=self._pdl,
        )


class TritonOps(BaseOps):
    """The operations of a model in Triton. `pdl`: use programmatic dependent launch, where a kernel may start while the one
    before it ends (Hopper and later)."""

    rule = RowRule(floor=1)
    choices = KernelChoices(first_split=FIRST_SPLIT, norm_warps=MAX_WARPS)

    def __init__(self, device: torch.device, *, pdl: bool = False) -> None:
        self.name = f"{device.type}-triton"
        self._device, self._pdl = device, pdl
        if device.type == "cuda":
            forbid_split_sums()

    @property
    def capture(self) -> CaptureOps:
        return self

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> TritonLinear:
        return TritonLinear(weight, bias=bias, pdl=self._pdl)

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return rms_norm(x, weight, eps, pdl=self._pdl)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return gated_activation(gate_up, activation, pdl=self._pdl)

    def gated_product(self, gate_up: Linear, activation: Activation) -> TritonGated | None:
        return TritonGated(gate_up, activation) if isinstance(gate_up, TritonLinear) else None

    def apply_gate(self, x: Tensor, gate: Tensor, kind: Gate) -> Tensor:
        return apply_gate(x, gate, kind, pdl=self._pdl)

    def expert_bank(self, gate_up: list[Tensor], down: list[Tensor], activation: Activation) -> TritonBank:
        return TritonBank(torch.stack(gate_up), torch.stack(down), activation, pdl=self._pdl)

    def choose_experts(
        self, logits: Tensor, spec: MoeSpec, *, bias: Tensor | None, factors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return choose_experts(logits, spec, bias=bias, factors=factors, pdl=self._pdl)

    def join_shared(self, out: Tensor, always: Tensor, gate: Tensor | None, residual: Tensor | None) -> Tensor:
        return add_shared_expert(out, always, gate, residual, pdl=self._pdl)

    def sampler(self, *, vocab: int, lanes: int, device: torch.device) -> Sampler:
        return TritonSampler(vocab=vocab, lanes=lanes, device=device, pdl=self._pdl)

    def prepare_attention(self, inputs: Inputs, spec: AttentionSpec, rope_table: Tensor) -> TritonAttentionInputs:
        return TritonAttentionInputs(rope_table, stage_attention_inputs(inputs, self.heads(spec)), self._pdl)

    def heads(self, mixer: AttentionSpec) -> AttentionShape:
        small = shared_memory(self._device) <= SMALL_SHARED
        return AttentionShape(mixer.heads, mixer.kv_heads, mixer.head_dim, mixer.window, _busy(self._device), small)

    def kernel_borders(self, mixers: Collection[AttentionSpec | DeltaSpec]) -> tuple[int, ...]:
        """Row counts from which attention or Gated DeltaNet divides its work in another way, for the self-check. Attention: the
        number of tokens from which tiles fill the device, so that one program computes all splits of its tile. Gated DeltaNet:
        from MANY_PATHS rows on, a program computes more columns of a state."""
        if self._device.type != "cuda":  # Triton's interpreter would take seconds for every step
            return ()
        found = {-(-_busy(self._device) // one.kv_heads) for one in mixers if isinstance(one, AttentionSpec)}
        return tuple(sorted(found | {MANY_PATHS for one in mixers if isinstance(one, DeltaSpec)}))

    def check_supported(self, spec: DeltaSpec) -> None:
        why = delta_kernels.unsupported_reason(spec)
        if why:
            raise UnsupportedModel(f"this model's delta layers have {why}; use --device cpu")

    def prepare_delta(self, inputs: Inputs, spec: DeltaSpec) -> TritonDeltaInputs:
        spans = recurrent_spans(inputs, conv=spec.conv)
        return TritonDeltaInputs(DeltaTables(spans, staging=inputs.staging, bucket=inputs.bucket), self._pdl)

    def resolve_tokens(self, tokens: Tensor, last: Tensor) -> Tensor:
        return resolve_pending_tokens(tokens, last)

    def keep_last_tokens(self, samples: Tensor, lanes: Tensor, last: Tensor) -> None:
        store_last_tokens(samples, lanes, last)

    def commit(self, state: ModelState, drafts: DraftCommit) -> None:
        if isinstance(drafts, DeviceCommit):
            self._commit_on_device(state, drafts)
        else:
            super().commit(state, drafts)

    def commit_delta(self, store: LaneStore, kept: Sequence[KeptDrafts]) -> None:
        held, device = (store.decays, store.keys, store.changes), store.states.device
        lanes, places, sources = commit_tables(kept, conv=store.spec.conv, slot_count=len(store.fed), device=device)
        commit_states(store.states, increments=held, lanes=lanes, kept_slots=places)
        delta_kernels.shift_conv_windows(store.fed, store.windows, store.windows, sources)

    def _commit_on_device(self, state: ModelState, drafts: DeviceCommit) -> None:
        """Commit without reading anything on the host, so that the commit can be captured in a CUDA graph."""
        bucket, rows = drafts.bucket, drafts.rows
        if not state.commits(bucket):
            return
        first = next(iter(state.lanes), None)
        taps, held = (1, 0) if first is None else (first.spec.conv, len(first.fed))
        verified = verify_drafts(
            drafts.samples,
            tokens=drafts.tokens,
            parents=drafts.parents,
            rows=rows,
            longest=bucket.longest,
            taps=taps,
            slot_count=held,
            pdl=self._pdl,
        )
        for block in state.blocks.values():
            given = (block.decays, block.keys, block.changes)
            commit_states(block.states, increments=given, lanes=verified.lanes, kept_slots=verified.slots, pdl=self._pdl)
            delta_kernels.shift_conv_windows(block.fed, block.windows, block.windows, verified.window_sources, pdl=self._pdl)
        for spec, placed in state.addresses.items() if bucket.depth is not None else ():
            for stores, head_bytes in placed:
                move_kept_kv(
                    stores,
                    verified,
                    rows=rows,
                    page_table=drafts.page_tables[spec],
                    kv_heads=spec.kv_heads,
                    head_bytes=head_bytes,
                    page_size=state.sizes.page_size,
                    pdl=self._pdl,
                )


@lru_cache(maxsize=8)
def _busy(device: torch.device) -> int:
    """The number of programs that fills the device: two per multiprocessor."""
    if device.type != "cuda":  # Triton's interpreter has no device to fill, so any number will do
        return 64
    return 2 * int(torch.cuda.get_device_properties(device).multi_processor_count)
