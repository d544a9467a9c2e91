"""What a stack remembers between turns: keys and values of every layer, in pages.

In: the turn's new keys and values. Out: page stores that attention reads. Allocated once, zeroed, one scratch page more
than the ledger lends: padding tokens write there, and blocks past a sequence's end read it under a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onedraw.errors import NoRoom
from onedraw.models.spec import AttentionSpec, LayerSpec
from onedraw.types import Row


class PageStore:
    """Keys and values of one layer: [P * K, S * D], a row per (page, head)."""

    def __init__(self, spec: AttentionSpec, *, pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = ((pages + 1) * spec.kv_heads, page_size * spec.head_dim)
        try:
            self.keys = torch.zeros(shape, dtype=dtype, device=device)
            self.values = torch.zeros(shape, dtype=dtype, device=device)
        except (RuntimeError, MemoryError):  # how torch says that there is not enough
            raise NoRoom(
                f"{pages} pages of {page_size} positions do not fit into the memory of {device}; "
                f"lower --kv-memory, --max-context or --max-batch"
            ) from None
        self.dim = spec.head_dim

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


class State:
    """The page stores of all layers on one device."""

    def __init__(
        self, layers: Sequence[LayerSpec], *, pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.page_size = page_size
        self.scratch_page = pages
        self._device = device
        self.layers = [PageStore(layer.mixer, pages=pages, page_size=page_size, dtype=dtype, device=device) for layer in layers]

    def compact(self, moves: Sequence[Move]) -> None:
        """Bring kept nodes of trees to their positions, in every layer. All are read before any is written."""
        if not moves:
            return
        table = torch.tensor([(m.from_page, m.from_slot, m.to_page, m.to_slot) for m in moves], device=self._device)
        from_page, from_slot, to_page, to_slot = table.unbind(1)
        for layer in self.layers:
            for store in (layer.keys, layer.values):
                slots = store.view(self.scratch_page + 1, -1, self.page_size, layer.dim)
                slots[to_page, :, to_slot] = slots[from_page, :, from_slot]


@dataclass(frozen=True, slots=True)
class Move:
    """A kept node of a tree: from its own slot to the slot of its position, both in the pages of its row."""

    from_page: int
    from_slot: int
    to_page: int
    to_slot: int


def moves_of(row: Row, kept: Sequence[int], page_size: int) -> list[Move]:
    """What brings a kept path home. A kept chain stands there already."""
    moves = []
    for depth, index in enumerate(kept):
        if index != depth:
            source, target = row.stop + index, row.stop + depth
            moves.append(
                Move(row.pages[0][source // page_size], source % page_size, row.pages[target // page_size], target % page_size)
            )
    return moves


def write_places(pages: Tensor, slots: Tensor, *, kv_heads: int, page_size: int) -> Tensor:
    """Where each (token, head) goes in a store seen as slots of one head's key: [T * K]."""
    heads = torch.arange(kv_heads, device=pages.device)
    return ((pages[:, None] * kv_heads + heads) * page_size + slots[:, None]).reshape(-1)
