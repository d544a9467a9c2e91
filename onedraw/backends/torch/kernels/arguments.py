"""What attention is told about a turn, as the kernels read it.

In: a turn's tensors. Out: `attention` of attention.h, with the tensors whose memory it points to kept alive beside it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onedraw.backends.torch.inputs import Inputs
from onedraw.backends.torch.kernels.library import FLOAT, LONG, POINTER
from onedraw.backends.torch.pages import PageStore


class AttentionArguments(ctypes.Structure):
    """`attention` of attention.h, field by field."""

    _fields_ = (
        *((name, LONG) for name in ("heads", "kv_heads", "dim", "rotary", "page_size", "table_width", "path_width")),
        *((name, LONG) for name in ("width", "writes", "keys_as_values", "norm_values")),
        *((name, FLOAT) for name in ("scale", "eps")),
        *((name, POINTER) for name in ("q_norm", "k_norm", "turns", "positions", "slots", "firsts", "ends")),
        *((name, POINTER) for name in ("rows", "table", "tails", "paths", "keys", "values", "key_scales", "value_scales")),
        ("kept", LONG),
    )


KEPT = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8)  # as codes.h counts them


def point_to_pages(arguments: Any, store: PageStore) -> None:
    """Keys, values, their scales and what they are, in a structure that has such fields."""
    arguments.keys, arguments.values = store.keys.data_ptr(), store.values.data_ptr()
    arguments.key_scales = None if store.key_scales is None else store.key_scales.data_ptr()
    arguments.value_scales = None if store.value_scales is None else store.value_scales.data_ptr()
    arguments.kept = KEPT.index(store.keys.dtype)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A turn's arguments, and the tensors whose memory they point to."""

    arguments: AttentionArguments
    inputs: Inputs
    firsts: Tensor
    turns: Tensor

    @property
    def address(self) -> int:
        return ctypes.addressof(self.arguments)

    def point_to(self, store: PageStore, q_norm: Tensor | None, k_norm: Tensor | None, *, eps: float, width: int) -> int:
        """The arguments' address, filled with one layer's own."""
        arguments = self.arguments
        arguments.eps, arguments.width = eps, width
        arguments.q_norm = None if q_norm is None else q_norm.data_ptr()
        arguments.k_norm = None if k_norm is None else k_norm.data_ptr()
        point_to_pages(arguments, store)
        return self.address
