"""The turn's queries cut into tiles of fixed height, and the blocks of keys each tile reads.

In: Inputs, a window, the tile heights. Out: TileGroups for `layers/attention.py`, made once per turn and window.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from onedraw.backends.torch.inputs import Inputs, Ints, to_device
from onedraw.backends.torch.layers.attention import BLOCK, SPAN, TileGroup


def tile_groups(inputs: Inputs, *, window: int | None, heights: tuple[int, ...]) -> list[TileGroup]:
    """Rows take the smallest height that holds their queries, else tiles of the largest."""
    by_height: dict[int, list[tuple[int, int, int, int]]] = {}
    for number, spot in enumerate(inputs.spots):
        height = next((h for h in heights if spot.count <= h), heights[-1])
        tiles = by_height.setdefault(height, [])
        for offset in range(0, spot.count, height):
            tiles.append((spot.first + offset, min(height, spot.count - offset), spot.start + offset, number))
    return [
        _group(np.asarray(tiles, dtype=np.int64), height, window, inputs, inputs.tokens.device)
        for height, tiles in sorted(by_height.items())
    ]


def _group(tiles: Ints, height: int, window: int | None, inputs: Inputs, device: torch.device) -> TileGroup:
    """tiles [N, 4]: first token, queries, position of the first, row."""
    first, count, start, row = tiles.T
    slot = np.minimum(np.arange(height)[None], count[:, None] - 1)  # [N, height]
    queries = first[:, None] + slot
    last_block = (start + count - 1) // BLOCK
    lowest = np.zeros_like(start) if window is None else np.maximum(start - window + 1, 0)
    first_block = lowest // BLOCK
    base_span = first_block // SPAN
    pair_tile = np.repeat(np.arange(len(tiles)), last_block - first_block + 1)
    pair_block = np.concatenate([np.arange(a, b + 1) for a, b in zip(first_block, last_block, strict=True)])
    spans = int((last_block // SPAN - base_span).max()) + 1
    # Where one span holds everything, the smallest power of two that reaches every block's place in it.
    leaves = SPAN if spans > 1 else 1 << int((last_block % SPAN).max()).bit_length()
    local = pair_block - base_span[pair_tile] * SPAN
    keep = np.arange(height)[None] < count[:, None]
    query_at = start[:, None] + slot
    return TileGroup(
        height=height,
        queries=to_device(queries.reshape(-1), device),
        slots=to_device(np.flatnonzero(keep.reshape(-1)), device),
        tokens=to_device(queries[keep], device),
        pair_tile=to_device(pair_tile, device),
        pair_pages=to_device(_block_pages(inputs, row[pair_tile], pair_block), device),
        pair_place=to_device((pair_tile * spans + local // SPAN) * leaves + local % SPAN, device),
        mask=to_device(_mask(query_at[pair_tile], pair_block, window), device),
        tiles=len(tiles),
        spans=spans,
        leaves=leaves,
    )


def _block_pages(inputs: Inputs, rows: Ints, blocks: Ints) -> Ints:
    """Pages of each pair's block; past the end of a sequence any page will do, its keys are masked."""
    per_block = BLOCK // inputs.page_size
    table = inputs.host_table
    wide = np.pad(table, ((0, 0), (0, -table.shape[1] % per_block)), mode="edge")
    return wide.reshape(len(table), -1, per_block)[rows, blocks].reshape(-1)


def _mask(query_at: Ints, pair_block: Ints, window: int | None) -> npt.NDArray[np.float32]:
    key_at = pair_block[:, None, None] * BLOCK + np.arange(BLOCK)  # [X, 1, BLOCK]
    query = query_at[:, :, None]  # [X, height, 1]
    seen = key_at <= query
    if window is not None:
        seen &= key_at > query - window
    mask = np.where(seen, np.float32(0), np.float32(-np.inf)).astype(np.float32)
    return mask[:, None, None]
