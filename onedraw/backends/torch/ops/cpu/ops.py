"""The CPU kernels as a model's operations. They compute in float32, whatever the dtype of the residual stream, and no row depends
on another.

In: the loaded library. Out: `CpuOps`, whose sampler is `CpuSampler`. The kernels read raw pointers, so tensors passed to them
must be contiguous. A row is the work of one sequence in one step, and in a product one input row. Packed weights stay in their
quantized blocks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from onedraw.backends.sampled_rows import SamplingPosition
from onedraw.backends.torch.model.weight_loader import LANE, padded
from onedraw.backends.torch.ops.base import DenseLayer, KernelChoices
from onedraw.backends.torch.ops.cpu.fused_layers import AttentionArguments, CpuAttentionInputs, CpuFusedLayers
from onedraw.backends.torch.ops.cpu.library import FLOAT, LONG, POINTER, Kernels
from onedraw.backends.torch.ops.cpu.packed_linear import CpuLinear, pack_panels, pack_rows
from onedraw.backends.torch.ops.plain.delta import DeltaWeights
from onedraw.backends.torch.ops.plain.elementwise import gated
from onedraw.backends.torch.ops.plain.experts import PlainExpertBank
from onedraw.backends.torch.ops.plain.linear import RowRule
from onedraw.backends.torch.ops.plain.ops import BaseOps
from onedraw.backends.torch.runner.inputs import Inputs
from onedraw.backends.torch.sampling.sampler import FilteredScores, Sampler
from onedraw.backends.torch.state.recurrent_state import CHUNK, KeptDrafts, LaneStore, RecurrentSpans, recurrent_spans
from onedraw.errors import UnsupportedModel
from onedraw.models.source import LazyTensor, StackItem
from onedraw.models.spec import Activation, AttentionSpec, DeltaSpec
from onedraw.sampling.law import NO_TOKEN, filters
from onedraw.sampling.noise import key
from onedraw.types import SamplingParams

MOST_DELTA_DIMS = 512  # the largest key or value dimension of a head; must equal MOST of delta.c
# The numpy mirror of `row_parameters` in sampling.h.
ROW_PARAMETERS = np.dtype(
    [
        *(("top_p", "f8"), ("top_k", "i8"), ("divisor", "f4"), ("limit", "f4")),
        *(("first", "u4"), ("second", "u4"), ("greedy", "i4"), ("padding", "i4")),
    ]
)


class _Run(ctypes.Structure):
    """The ctypes mirror of `run` in delta.h."""

    _fields_ = tuple(
        (name, LONG) for name in ("first", "lane", "fresh", "prompt", "known", "drafts", "held", "save_first", "saves")
    )


class _Delta(ctypes.Structure):
    """The ctypes mirror of `delta` in delta.h."""

    _fields_ = (
        *((name, LONG) for name in ("key_heads", "value_heads", "key_dim", "value_dim", "conv", "channels")),
        *((name, LONG) for name in ("tokens", "runs", "width")),
        ("eps", FLOAT),
        *((name, POINTER) for name in ("conv_weight", "decay_weight", "bias", "norm")),
        *((name, POINTER) for name in ("taps", "closings", "kept", "parents", "save_counts", "save_slots", "run")),
        *((name, POINTER) for name in ("states", "windows", "saved_states", "saved_windows")),
        *((name, POINTER) for name in ("decays", "keys", "changes", "fed", "mixed", "gates")),
    )


class CpuDeltaInputs:
    """The spans of a step as an array of `_Run`, and the tensors that the kernel's arguments point to, which this keeps alive."""

    def __init__(self, kernels: Kernels, spans: RecurrentSpans) -> None:
        self._kernels, self._spans = kernels, spans
        parents = torch.full((len(spans.host_taps),), -1, dtype=torch.int64)
        saves = [save for span in spans.spans for save in span.saves]
        self._saves = torch.tensor(saves or [(0, 0)], dtype=torch.int64).t().contiguous()
        self._array = (_Run * max(len(spans.spans), 1))()
        before = 0
        for place, span in enumerate(spans.spans):
            node = span.first + span.known
            parents[node : node + len(span.drafts)] = torch.tensor([d.parent for d in span.drafts], dtype=torch.int64)
            numbers = (
                span.first,
                span.lane,
                span.fresh,
                span.prompt,
                span.known,
                len(span.drafts),
                span.held,
                before,
                len(span.saves),
            )
            self._array[place] = _Run(*numbers)
            before += len(span.saves)
        self._parents = parents

    def run(self, projected: Tensor, *, weights: DeltaWeights, store: LaneStore) -> Tensor:
        spec, tokens = store.spec, len(projected)
        arguments = _delta_arguments(store)
        self._fill(arguments, weights)
        arguments.tokens, arguments.width = tokens, projected.shape[1]
        mixed, gates = _floats(tokens, spec.channels), _floats(tokens, 3 * spec.value_heads)
        arguments.mixed, arguments.gates = mixed.data_ptr(), gates.data_ptr()
        out = torch.zeros(tokens, spec.value_heads * spec.value_dim, dtype=torch.float32)
        size = spec.value_dim * max(CHUNK, spec.key_dim)
        work, window = _floats(self._kernels.threads, size), _floats(spec.conv - 1, spec.channels)
        self._kernels.delta(
            projected.data_ptr(),
            out.data_ptr(),
            ctypes.addressof(arguments),
            work.data_ptr(),
            size,
            window.data_ptr(),
            self._kernels.thread_pool,
        )
        return out

    def _fill(self, arguments: _Delta, weights: DeltaWeights) -> None:
        spans = self._spans
        arguments.eps, arguments.runs, arguments.run = weights.eps, len(spans.spans), ctypes.addressof(self._array)
        arguments.conv_weight, arguments.decay_weight = weights.conv.data_ptr(), weights.decay.data_ptr()
        arguments.bias, arguments.norm = weights.bias.data_ptr(), weights.norm.data_ptr()
        arguments.taps, arguments.closings, arguments.kept = (t.data_ptr() for t in (spans.taps, spans.closings, spans.kept))
        arguments.parents = self._parents.data_ptr()
        arguments.save_counts, arguments.save_slots = self._saves[0].data_ptr(), self._saves[1].data_ptr()


@dataclass(frozen=True, slots=True)
class Packing:
    """How weights are stored: in their quantized blocks if `as_stored`, else in float32. `coded`: activations are quantized too,
    to 8 bits."""

    as_stored: bool = False
    coded: bool = False


class CpuOps(BaseOps):
    """The operations of a CPU, computed by C kernels. Threads only divide the outputs, so their number does not change any
    bits."""

    rule = RowRule(floor=1)
    reads_weight_rows = True
    choices = KernelChoices()

    def __init__(
        self, library: ctypes.CDLL, *, threads: int, packing: Packing | None = None, path: str | None = None, fuses: bool = True
    ) -> None:
        self._kernels = Kernels(library, threads=threads, instruction_set=path)
        self._packing, self._fuses = packing or Packing(), fuses
        self.name = f"cpu-{self._kernels.instruction_set}"

    @property
    def thread_pool(self) -> int | None:
        return int(self._kernels.thread_pool)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> CpuLinear:
        rows, width = weight.shape
        panels = pack_rows(self._kernels, weight.contiguous().numpy(), "F32", rows=rows, width=width, height=rows)
        return CpuLinear(self._kernels, [panels], bias=bias, coded=False)

    def packed_linear(
        self, tensors: Sequence[LazyTensor], *, bias: Tensor | None, pad: int, pad_columns: int
    ) -> CpuLinear | None:
        return self._side_by_side(tensors, bias=bias, pad=pad, pad_columns=pad_columns) if self._packing.as_stored else None

    def packed_expert_bank(
        self, gate_up: Sequence[LazyTensor], down: LazyTensor, activation: Activation
    ) -> PlainExpertBank | None:
        if not self._packing.as_stored:
            return None
        first, second = [], []
        for number in range(down.shape[0]):
            first.append(self._side_by_side([StackItem(tensor, number) for tensor in gate_up], pad=LANE))
            second.append(self._side_by_side([StackItem(down, number)], pad_columns=LANE))
        return PlainExpertBank(tuple(first), tuple(second), activation, self.gated)

    def _side_by_side(
        self, tensors: Sequence[LazyTensor], *, bias: Tensor | None = None, pad: int = 1, pad_columns: int = 1
    ) -> CpuLinear:
        parts = [pack_panels(self._kernels, tensor, height=padded(tensor.shape[0], pad)) for tensor in tensors]
        width = padded(parts[0].width, pad_columns)
        return CpuLinear(self._kernels, parts, bias=bias, coded=self._packing.coded, in_features=width)

    def fuse(self, layers: Sequence[DenseLayer]) -> CpuFusedLayers | None:
        plain = all(layer.activation == "silu" and layer.spec.gate is None for layer in layers)
        return CpuFusedLayers(self._kernels, layers) if self._fuses and plain else None

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        wide = x.float().contiguous()
        y = torch.empty_like(wide)
        width, scale = x.shape[-1], None if weight is None else weight.data_ptr()
        self._kernels.rms_norm(wide.data_ptr(), scale, y.data_ptr(), x.numel() // width, width, eps, self._kernels.thread_pool)
        return y.to(x.dtype)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        if activation != "silu":
            return gated(gate_up, activation)
        width = gate_up.shape[1] // 2
        y = _floats(len(gate_up), width)
        self._kernels.silu_gated(gate_up.data_ptr(), y.data_ptr(), len(gate_up), width, self._kernels.thread_pool)
        return y

    def sampler(self, *, vocab: int, lanes: int, device: torch.device) -> Sampler:
        return CpuSampler(self._kernels, vocab=vocab, lanes=lanes, device=device)

    def prepare_attention(self, inputs: Inputs, spec: AttentionSpec, rope_table: Tensor) -> CpuAttentionInputs:
        firsts = inputs.firsts(spec.window)
        tails, paths, table = inputs.tails, inputs.paths, inputs.tables[inputs.group(spec.window)]
        arguments = AttentionArguments(
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            dim=spec.head_dim,
            rotary=spec.rope.dims,
            page_size=inputs.page_size,
            table_width=table.shape[1],
            path_width=0 if paths is None else paths.shape[1],
            writes=spec.reuses is None,
            keys_as_values=spec.keys_as_values,
            norm_values=spec.v_norm,
            scale=spec.scale,
            rope_table=rope_table.data_ptr(),
            positions=inputs.positions.data_ptr(),
            slots=inputs.slots.data_ptr(),
            firsts=firsts.data_ptr(),
            ends=inputs.ends.data_ptr(),
            rows=inputs.rows.data_ptr(),
            table=table.data_ptr(),
            tails=None if tails is None else tails.data_ptr(),
            paths=None if paths is None else paths.data_ptr(),
            waiting=self._kernels.waiting.data_ptr(),
            room=self._kernels.waiting.numel(),
        )
        return CpuAttentionInputs(self._kernels, arguments, inputs, table, firsts, rope_table)

    def prepare_delta(self, inputs: Inputs, spec: DeltaSpec) -> CpuDeltaInputs:
        return CpuDeltaInputs(self._kernels, recurrent_spans(inputs, conv=spec.conv))

    def commit_delta(self, store: LaneStore, kept: Sequence[KeptDrafts]) -> None:
        arguments, window = _delta_arguments(store), _floats(store.spec.conv - 1, store.spec.channels)
        for one in kept:
            places = torch.tensor(one.places, dtype=torch.int64)
            self._kernels.delta_commit(
                ctypes.addressof(arguments),
                one.lane,
                places.data_ptr(),
                len(places),
                window.data_ptr(),
                self._kernels.thread_pool,
            )


def _delta_arguments(store: LaneStore) -> _Delta:
    """The arguments that all calls of a layer share: its sizes and its stores. Raises UnsupportedModel for heads that are too
    large."""
    spec = store.spec
    if max(spec.key_dim, spec.value_dim) > MOST_DELTA_DIMS:
        raise UnsupportedModel(
            f"delta heads of {spec.key_dim} x {spec.value_dim} exceed {MOST_DELTA_DIMS}, the limit of the CPU kernels; "
            "use --device cuda"
        )
    sizes = ("key_heads", "value_heads", "key_dim", "value_dim", "conv", "channels")
    stores = ("states", "windows", "saved_states", "saved_windows", "decays", "keys", "changes", "fed")
    return _Delta(
        **{name: getattr(spec, name) for name in sizes},
        **{name: getattr(store, name).data_ptr() for name in stores},
    )


def _floats(rows: int, width: int) -> Tensor:
    """An uninitialized output of a kernel. dtype and device are explicit, since a program may have changed torch's defaults."""
    return torch.empty(rows, width, dtype=torch.float32, device="cpu")


class _SamplingArguments(ctypes.Structure):
    """The ctypes mirror of `sampling_arguments` in sampling.h."""

    _fields_ = (
        *((name, POINTER) for name in ("scores", "raw")),
        *((name, LONG) for name in ("stride", "raw_stride", "vocab", "width")),
        *((name, POINTER) for name in ("parameters", "deficits", "limits", "tokens", "masses")),
    )


class CpuSampler(Sampler):
    """The sampler with its vocabulary-wide steps in one call into C (sampling.c). The sampling rule is the same; exponentials and
    logarithms are computed in C. As in every sampler, bias, penalties, bans and sets of allowed tokens are applied to the scores
    before this call, and logprobs are computed after it."""

    def __init__(self, kernels: Kernels, *, vocab: int, lanes: int, device: torch.device) -> None:
        super().__init__(vocab=vocab, lanes=lanes, device=device)
        self._kernels = kernels

    def _chosen(self, raw: Tensor, scores: Tensor, positions: Sequence[SamplingPosition]) -> tuple[FilteredScores, Tensor]:
        adjusted = scores is not raw
        raw = raw.contiguous()
        scores = scores.contiguous() if adjusted else raw
        parameters = self._row_parameters(positions)
        rows = len(positions)
        deficits = self._scratch.take("deficit", (rows, self._width), torch.float32)
        masses = self._scratch.take("masses", (self._kernels.threads, self._width), torch.int64)
        limits = torch.empty(rows, dtype=torch.float32, device="cpu")
        tokens = torch.empty(rows, dtype=torch.int64, device="cpu")
        arguments = _SamplingArguments(
            scores=scores.data_ptr(),
            raw=raw.data_ptr() if adjusted else None,
            stride=scores.stride(0),
            raw_stride=raw.stride(0),
            vocab=self._vocab,
            width=self._width,
            parameters=parameters.ctypes.data,
            deficits=deficits.data_ptr(),
            limits=limits.data_ptr(),
            tokens=tokens.data_ptr(),
            masses=masses.data_ptr(),
        )
        self._kernels.sample(ctypes.addressof(arguments), rows, self._kernels.thread_pool)
        return FilteredScores(deficits, limits[:, None], tokens != NO_TOKEN), tokens.clamp_(min=0)

    def _row_parameters(self, positions: Sequence[SamplingPosition]) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        return np.array([self._parameters_of(p.params, p.at) for p in positions], dtype=ROW_PARAMETERS)

    def _parameters_of(self, params: SamplingParams, index: int) -> tuple[float, ...]:
        """A row's entry of the table `ROW_PARAMETERS`, in the order of its fields."""
        row_filters = filters(params, self._vocab)
        first, second = (0, 0) if params.greedy else key(params.seed, index)
        return (row_filters.top_p, row_filters.top_k, row_filters.divisor, row_filters.limit, first, second, params.greedy, 0)
