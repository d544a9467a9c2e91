"""Dense layers in one call: norm, q k v, attention, out, norm, gate and up, silu, down, over and over.

In: the weights of neighbouring layers. Out: `FusedLayers`, which runs any first few of them. Its bits are those of the
operations one by one; only the calls between them are saved.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from onedraw.backends.torch.kernels.arguments import Prepared, point_to_pages
from onedraw.backends.torch.kernels.library import FLOAT, LONG, POINTER, Kernels
from onedraw.backends.torch.kernels.products import CpuLinear
from onedraw.backends.torch.ops import DenseLayer
from onedraw.backends.torch.pages import PageStore


class _Layer(ctypes.Structure):
    """`layer` of layer.c."""

    _fields_ = (
        *((name, POINTER) for name in ("qkv", "out", "gate_up", "down")),
        *((name, POINTER) for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm", "keys", "values")),
        *((name, LONG) for name in ("hidden", "mixed", "width")),
        ("eps", FLOAT),
        *((name, POINTER) for name in ("key_scales", "value_scales")),
        ("kept", LONG),
    )


class FusedLayers:
    """Owner: a stack. Points to the layers' weights, which it keeps alive, and to the pages it was last called with."""

    def __init__(self, kernels: Kernels, layers: Sequence[DenseLayer]) -> None:
        self._kernels, self._layers = kernels, tuple(layers)
        self._arguments = [_arguments(layer) for layer in layers]
        self._array = (POINTER * len(layers))(*(ctypes.addressof(one) for one in self._arguments))
        self._stores: list[PageStore] = []

    def __call__(
        self, x: Tensor, prepared: Sequence[Prepared], stores: Sequence[PageStore], kept: Sequence[int] = ()
    ) -> dict[int, Tensor]:
        """Run the first layers, as many as are prepared: x [T, E] → what the last of them and the `kept` ones give."""
        count, kernels = len(prepared), self._kernels
        self._point_to(stores)
        outputs = {index: torch.empty_like(x) for index in {*kept, count - 1}}
        passing = [torch.empty_like(x) for _ in range(2)] if len(outputs) < count else []
        residuals = [x, *(outputs[i] if i in outputs else passing[i % 2] for i in range(count))]
        kernels.layers(
            self._array,
            (POINTER * count)(*(one.address for one in prepared)),
            (POINTER * (count + 1))(*(one.data_ptr() for one in residuals)),
            count,
            len(x),
            kernels.memory(kernels.layers_bytes(self._array, count, len(x))),
            kernels.team,
        )
        return outputs

    def _point_to(self, stores: Sequence[PageStore]) -> None:
        known = len(self._stores) == len(stores) and all(a is b for a, b in zip(self._stores, stores, strict=True))
        if not known:
            for own, store in zip(self._arguments, stores, strict=False):
                point_to_pages(own, store)
            self._stores = list(stores)


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
