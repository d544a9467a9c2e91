"""Keys and values of one layer in pages, and where a token's own go.

In: the turn's new keys and values. Out: page stores that attention reads. Allocated once, zeroed, one scratch page more
than the ledger lends: padding tokens write there, and blocks past a sequence's end read it under a mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from onedraw.errors import NoRoom
from onedraw.models.spec import AttentionSpec


class PageStore:
    """Keys and values of one layer: [P * K, S * D], a row per (page, head)."""

    def __init__(self, spec: AttentionSpec, *, pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = ((pages + 1) * spec.kv_heads, page_size * spec.head_dim)
        try:
            self.keys, self.values = zeros(shape, dtype, device), zeros(shape, dtype, device)
        except (RuntimeError, MemoryError):  # how torch says that there is not enough
            raise NoRoom(
                f"{pages} pages of {page_size} positions do not fit into the memory of {device}; "
                f"lower --kv-memory, --max-context or --max-batch"
            ) from None
        self.dim = spec.head_dim
        self._page_size, self._heads = page_size, spec.kv_heads

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        for store in (self.keys, self.values):
            paged = store.view(-1, self._heads, self._page_size * self.dim)
            paged[targets] = paged[sources]

    def read(self, pages: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Copies of keys and values on the host: [n, K, S * D]."""
        shape = (-1, self._heads, self._page_size * self.dim)
        return tuple(store.view(shape)[list(pages)].cpu() for store in (self.keys, self.values))  # type: ignore[return-value]

    def fill(self, places: Mapping[int, int], keys: Tensor, values: Tensor) -> None:
        """Stored pages → pages here."""
        shape = (-1, self._heads, self._page_size * self.dim)
        for store, given in ((self.keys, keys), (self.values, values)):
            if given.shape[1:] != (self._heads, self._page_size * self.dim):
                raise ValueError(f"pages of {tuple(given.shape[1:])}, not of {(self._heads, self._page_size * self.dim)}")
            paged = store.view(shape)
            for stored, here, count in _runs(places):
                paged[here : here + count].copy_(given[stored : stored + count])

    def move(self, table: Tensor) -> None:
        """Slots to slots: rows of (from page, from slot, to page, to slot). All are read before any is written."""
        from_page, from_slot, to_page, to_slot = table.unbind(1)
        for store in (self.keys, self.values):
            slots = store.view(-1, self._heads, self._page_size, self.dim)
            slots[to_page, :, to_slot] = slots[from_page, :, from_slot]

    def write(self, keys: Tensor, values: Tensor, places: Tensor) -> None:
        """Keys and values [T, K, D] at places [T * K], counted in heads' slots.

        A value that is not finite lies here as a key of NaN and a value of zero: whoever sees it gets NaN, and whoever
        does not (a neighbour in a tile, the next owner of the page) is not touched, since zero times zero is zero.
        """
        dim = keys.shape[-1]
        broken = torch.isfinite(values).all(-1, keepdim=True).logical_not_()
        keys, values = keys.masked_fill(broken, torch.nan), values.masked_fill(broken, 0.0)
        self.keys.view(-1, dim).index_copy_(0, places, keys.reshape(-1, dim))
        self.values.view(-1, dim).index_copy_(0, places, values.reshape(-1, dim))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU the system's own untouched pages, which take no time and no memory before they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)
    return torch.from_numpy(raw).view(dtype)


def write_places(pages: Tensor, slots: Tensor, *, kv_heads: int, page_size: int) -> Tensor:
    """Where each (token, head) goes in a store seen as slots of one head's key: [T * K]."""
    heads = torch.arange(kv_heads, device=pages.device)
    return ((pages[:, None] * kv_heads + heads) * page_size + slots[:, None]).reshape(-1)


def _runs(places: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """Neighbours that stay neighbours: (first key, first value, how many)."""
    runs: list[tuple[int, int, int]] = []
    for key, value in sorted(places.items()):
        if runs and (key, value) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((key, value, 1))
    return runs
