"""The CPU kernels as operations on tensors: float32, rows of any number, bits of each row its own.

In: the loaded library. Out: `CpuOps`, which a stack uses like `TorchOps`. Tensors are contiguous; a kernel never keeps a
pointer past its call.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from onedraw.backends.torch.inputs import Inputs
from onedraw.backends.torch.layers.elementwise import gated
from onedraw.backends.torch.layers.linear import Linear, RowRule
from onedraw.backends.torch.state import PageStore
from onedraw.models.spec import Activation, AttentionSpec

PANEL = 32
_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, list[Any]] = {
    "onedraw_pack": [_POINTER, _POINTER, _LONG, _LONG, _INT],
    "onedraw_linear": [_POINTER, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG, _INT],
    "onedraw_rms_norm": [_POINTER, _POINTER, _POINTER, _LONG, _LONG, _FLOAT, _INT],
    "onedraw_silu_gated": [_POINTER, _POINTER, _LONG, _LONG, _INT],
    "onedraw_attention": [_POINTER, _POINTER, _POINTER, _LONG, _INT],
}


class _Attention(ctypes.Structure):
    """`attention` of cpu.c, field by field."""

    _fields_ = (
        *((name, _LONG) for name in ("heads", "kv_heads", "dim", "rotary", "page_size", "table_width", "path_width")),
        *((name, _FLOAT) for name in ("scale", "eps")),
        *((name, _POINTER) for name in ("q_norm", "k_norm", "turns", "positions", "slots", "firsts", "ends")),
        *((name, _POINTER) for name in ("rows", "table", "tails", "paths", "keys", "values")),
    )


@dataclass(frozen=True, slots=True)
class Prepared:
    """A turn's arguments, and the tensors whose memory they point to."""

    arguments: _Attention
    inputs: Inputs
    firsts: Tensor
    turns: Tensor


class CpuLinear(Linear):
    """A weight in panels of 32 output columns."""

    def __init__(self, library: ctypes.CDLL, weight: Tensor, *, bias: Tensor | None, threads: int) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype, self.device, self.rule = weight.dtype, weight.device, RowRule(floor=1)
        self._library, self._threads = library, threads
        self._width = -(-self.out_features // PANEL) * PANEL
        missing = self._width - self.out_features
        if missing:
            weight = torch.cat([weight, weight.new_zeros(missing, self.in_features)])
            bias = None if bias is None else torch.cat([bias, bias.new_zeros(missing)])
        self.bias = bias
        weight = weight.contiguous()
        self._panels = torch.empty(self._width * self.in_features, dtype=torch.float32)
        library.onedraw_pack(weight.data_ptr(), self._panels.data_ptr(), self._width, self.in_features, threads)

    def __call__(self, x: Tensor) -> Tensor:
        y = _floats(len(x), self._width)
        self._library.onedraw_linear(
            x.data_ptr(),
            self._panels.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            y.data_ptr(),
            len(x),
            self.in_features,
            self._width,
            self._threads,
        )
        return y if self._width == self.out_features else y[:, : self.out_features].contiguous()


class CpuOps:
    """What a stack asks of a CPU. `threads` divide outputs only, so their number does not show."""

    name = "cpu-kernels"
    rule = RowRule(floor=1)

    def __init__(self, library: ctypes.CDLL, *, threads: int) -> None:
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        self._library, self._threads = library, threads

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return CpuLinear(self._library, weight, bias=bias, threads=self._threads)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        width = x.shape[-1]
        self._library.onedraw_rms_norm(
            x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // width, width, eps, self._threads
        )
        return y

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        if activation != "silu":
            return gated(gate_up, activation)
        width = gate_up.shape[1] // 2
        y = _floats(len(gate_up), width)
        self._library.onedraw_silu_gated(gate_up.data_ptr(), y.data_ptr(), len(gate_up), width, self._threads)
        return y

    def prepare(self, inputs: Inputs, mixer: AttentionSpec, turns: Tensor) -> Prepared:
        firsts = inputs.firsts(mixer.window)
        tails, paths = inputs.tails, inputs.paths
        arguments = _Attention(
            heads=mixer.heads,
            kv_heads=mixer.kv_heads,
            dim=mixer.head_dim,
            rotary=mixer.rope.dims,
            page_size=inputs.page_size,
            table_width=inputs.table.shape[1],
            path_width=0 if paths is None else paths.shape[1],
            scale=mixer.scale,
            turns=turns.data_ptr(),
            positions=inputs.positions.data_ptr(),
            slots=inputs.slots.data_ptr(),
            firsts=firsts.data_ptr(),
            ends=inputs.ends.data_ptr(),
            rows=inputs.rows.data_ptr(),
            table=inputs.table.data_ptr(),
            tails=None if tails is None else tails.data_ptr(),
            paths=None if paths is None else paths.data_ptr(),
        )
        return Prepared(arguments, inputs, firsts, turns)

    def attention(
        self,
        qkv: Tensor,
        prepared: Prepared,
        *,
        spec: AttentionSpec,
        store: PageStore,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        arguments = prepared.arguments
        arguments.eps = eps
        arguments.q_norm = None if q_norm is None else q_norm.data_ptr()
        arguments.k_norm = None if k_norm is None else k_norm.data_ptr()
        arguments.keys, arguments.values = store.keys.data_ptr(), store.values.data_ptr()
        out = _floats(len(qkv), spec.heads * spec.head_dim)
        self._library.onedraw_attention(qkv.data_ptr(), out.data_ptr(), ctypes.addressof(arguments), len(qkv), self._threads)
        return out

    def remember(
        self, kv: Tensor, prepared: Prepared, *, spec: AttentionSpec, store: PageStore, k_norm: Tensor | None, eps: float
    ) -> None:
        headless = replace(spec, heads=0)  # no queries: the kernel prepares and writes, and has nothing to attend
        prepared.arguments.heads = 0
        self.attention(kv, prepared, spec=headless, store=store, q_norm=None, k_norm=k_norm, eps=eps)
        prepared.arguments.heads = spec.heads


def _floats(rows: int, width: int) -> Tensor:
    """What a kernel writes to. A program may have set another default dtype or device, and kernels trust the size."""
    return torch.empty(rows, width, dtype=torch.float32, device="cpu")
