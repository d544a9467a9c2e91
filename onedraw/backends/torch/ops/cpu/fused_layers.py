"""Runs consecutive dense layers in one call: norm, q k v, attention, output projection, norm, gate and up, silu, down.

In: the weights of consecutive layers. Out: `FusedLayers`, which runs the first n of them. The results are bitwise those of the
separate operations. A residual stream of bf16 or f16 is converted to float32 where it enters and back where it leaves; both are
exact, because the kernel rounds the stream to its dtype after each addition. Axes: T tokens, E hidden width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from onedraw.backends.torch.ops.base import AttentionInputs, DenseLayer
from onedraw.backends.torch.ops.cpu.library import FLOAT, LONG, POINTER, Kernels
from onedraw.backends.torch.ops.cpu.packed_linear import CpuLinear
from onedraw.backends.torch.runner.inputs import Inputs
from onedraw.backends.torch.state.kv_pages import INT4, PageStore
from onedraw.models.spec import AttentionSpec

# ------------------------------------------------------------------ attention


class AttentionArguments(ctypes.Structure):
    """The ctypes mirror of `attention` in attention.h."""

    _fields_ = (
        *((name, LONG) for name in ("heads", "kv_heads", "dim", "rotary", "page_size", "table_width", "path_width")),
        *((name, LONG) for name in ("width", "writes", "keys_as_values", "norm_values")),
        *((name, FLOAT) for name in ("scale", "eps")),
        *((name, POINTER) for name in ("q_norm", "k_norm", "rope_table", "positions", "slots", "firsts", "ends")),
        *((name, POINTER) for name in ("rows", "table", "tails", "paths", "keys", "values", "key_scales", "value_scales")),
        ("kv_dtype", LONG),
        ("waiting", POINTER),
        ("room", LONG),
    )


# The dtypes of KV pages and of the residual stream; the index of a dtype is its number in the enum of kv_quant.h.
KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, INT4)


def point_to_pages(arguments: Any, store: PageStore) -> None:
    """Set the pointers to keys, values and scales, and their dtype, in the arguments of attention or of a layer."""
    arguments.keys, arguments.values = store.keys.data_ptr(), store.values.data_ptr()
    arguments.key_scales = None if store.key_scales is None else store.key_scales.data_ptr()
    arguments.value_scales = None if store.value_scales is None else store.value_scales.data_ptr()
    arguments.kv_dtype = KV_DTYPES.index(store.keys.dtype)


@dataclass(frozen=True, slots=True)
class CpuAttentionInputs:
    """The arguments of attention in a step. The tensors that they point to are fields too, which keeps them alive."""

    kernels: Kernels
    arguments: AttentionArguments
    inputs: Inputs
    page_table: Tensor
    firsts: Tensor
    rope_table: Tensor

    @property
    def address(self) -> int:
        return ctypes.addressof(self.arguments)

    def point_to(self, store: PageStore, q_norm: Tensor | None, k_norm: Tensor | None, *, eps: float, width: int) -> int:
        """Fill in the fields of one layer and return the address of the arguments."""
        arguments = self.arguments
        arguments.eps, arguments.width = eps, width
        arguments.q_norm = None if q_norm is None else q_norm.data_ptr()
        arguments.k_norm = None if k_norm is None else k_norm.data_ptr()
        point_to_pages(arguments, store)
        return self.address

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
        arguments = self.point_to(store, q_norm, k_norm, eps=eps, width=qkv.shape[1])
        out = torch.empty(len(qkv), spec.heads * spec.head_dim, dtype=torch.float32, device="cpu")
        self.kernels.attention(qkv.data_ptr(), out.data_ptr(), arguments, len(qkv), self.kernels.thread_pool)
        return out

    def write(self, kv: Tensor, *, spec: AttentionSpec, store: PageStore, k_norm: Tensor | None, eps: float) -> None:
        self.arguments.heads = 0  # without queries, the kernel writes keys and values and computes no attention
        self.attend(kv, spec=replace(spec, heads=0), store=store, q_norm=None, k_norm=k_norm, eps=eps)
        self.arguments.heads = spec.heads


# ------------------------------------------------------------------ dense layers


class _Layer(ctypes.Structure):
    """The ctypes mirror of `layer` in fused_layers.h."""

    _fields_ = (
        *((name, POINTER) for name in ("qkv", "out", "gate_up", "down")),
        *((name, POINTER) for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm", "keys", "values")),
        *((name, LONG) for name in ("hidden", "mixed", "width")),
        ("eps", FLOAT),
        *((name, POINTER) for name in ("key_scales", "value_scales")),
        *((name, LONG) for name in ("kv_dtype", "stream")),
    )


class CpuFusedLayers:
    """The weights of consecutive layers for the C kernel. It keeps the weights alive, and points to the pages of the latest
    call. Owner: the layers that it replaces."""

    def __init__(self, kernels: Kernels, layers: Sequence[DenseLayer]) -> None:
        self._kernels, self._layers = kernels, tuple(layers)
        self._arguments = [_arguments(layer) for layer in layers]
        self._array = (POINTER * len(layers))(*(ctypes.addressof(one) for one in self._arguments))
        self._stores: list[PageStore] = []

    def __call__(
        self, x: Tensor, prepared: Sequence[AttentionInputs], stores: Sequence[PageStore], kept: Sequence[int] = ()
    ) -> dict[int, Tensor]:
        """Run the first len(prepared) layers: x [T, E] → by index, the outputs of the last of them and of those in `kept`."""
        count, kernels, stream = len(prepared), self._kernels, x.dtype
        self._point_to(stores)
        for own in self._arguments[:count]:
            own.stream = KV_DTYPES.index(stream)
        x = x.float().contiguous()
        outputs = {index: torch.empty_like(x) for index in {*kept, count - 1}}
        passing = [torch.empty_like(x) for _ in range(2)] if len(outputs) < count else []
        residuals = [x, *(outputs[i] if i in outputs else passing[i % 2] for i in range(count))]
        kernels.layers(
            self._array,
            (POINTER * count)(*map(_address, prepared)),
            (POINTER * (count + 1))(*(one.data_ptr() for one in residuals)),
            count,
            len(x),
            kernels.scratch(kernels.layers_bytes(self._array, count, len(x))),
            kernels.thread_pool,
        )
        return {index: output.to(stream) for index, output in outputs.items()}

    def _point_to(self, stores: Sequence[PageStore]) -> None:
        known = len(self._stores) == len(stores) and all(a is b for a, b in zip(self._stores, stores, strict=True))
        if not known:
            for own, store in zip(self._arguments, stores, strict=False):
                point_to_pages(own, store)
            self._stores = list(stores)


def _address(inputs: AttentionInputs) -> int:
    assert isinstance(inputs, CpuAttentionInputs), "fused CPU layers need attention inputs that CpuOps prepared"
    return inputs.address


def _arguments(layer: DenseLayer) -> _Layer:
    qkv, gate_up = cast(CpuLinear, layer.qkv), cast(CpuLinear, layer.gate_up)
    return _Layer(
        qkv=qkv.address,
        out=cast(CpuLinear, layer.out).address,
        gate_up=gate_up.address,
        down=cast(CpuLinear, layer.down).address,
        attn_norm=layer.attn_norm.data_ptr(),
        mlp_norm=layer.mlp_norm.data_ptr(),
        q_norm=None if layer.q_norm is None else layer.q_norm.data_ptr(),
        k_norm=None if layer.k_norm is None else layer.k_norm.data_ptr(),
        hidden=qkv.in_features,
        mixed=layer.spec.heads * layer.spec.head_dim,
        width=gate_up.out_features // 2,
        eps=layer.eps,
    )
