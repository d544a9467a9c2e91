"""What a stack remembers between turns: keys and values of every layer, in pages.

In: the turn's new keys and values. Out: page stores that attention reads. Allocated once, zeroed, one scratch page more
than the ledger lends: padding tokens write there, and blocks past a sequence's end read it under a mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onedraw.models.spec import AttentionSpec, ModelSpec


class PageStore:
    """Keys and values of one layer: [P * K, S * D], a row per (page, head)."""

    def __init__(self, spec: AttentionSpec, *, pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = ((pages + 1) * spec.kv_heads, page_size * spec.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def write(self, keys: Tensor, values: Tensor, places: Tensor) -> None:
        """Keys and values [T, K, D] at places [T * K], counted in heads' slots."""
        dim = keys.shape[-1]
        self.keys.view(-1, dim).index_copy_(0, places, keys.reshape(-1, dim))
        self.values.view(-1, dim).index_copy_(0, places, values.reshape(-1, dim))


class State:
    """The page stores of all layers on one device."""

    def __init__(self, spec: ModelSpec, *, pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.page_size = page_size
        self.scratch_page = pages
        self.layers = [
            PageStore(layer.mixer, pages=pages, page_size=page_size, dtype=dtype, device=device) for layer in spec.layers
        ]


def write_places(pages: Tensor, slots: Tensor, *, kv_heads: int, page_size: int) -> Tensor:
    """Where each (token, head) goes in a store seen as slots of one head's key: [T * K]."""
    heads = torch.arange(kv_heads, device=pages.device)
    return ((pages[:, None] * kv_heads + heads) * page_size + slots[:, None]).reshape(-1)
