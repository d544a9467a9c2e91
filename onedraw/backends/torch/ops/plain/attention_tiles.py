"""The turn's queries cut into tiles of fixed height, and the blocks of keys each tile reads.

In: Inputs, a window, the tile heights. Out: TileGroups for `layers/attention.py`, made once per turn and window. Queries
of one tile read the same slots; the nodes of a tree read slots of their own, so each is a tile by itself.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from onedraw.backends.torch.ops.plain.attention import BLOCK, SPAN, TileGroup
from onedraw.backends.torch.runner.inputs import Inputs, Ints, to_device


def tile_groups(inputs: Inputs, *, window: int | None, heights: tuple[int, ...]) -> list[TileGroup]:
    """Rows take the smallest height that holds their queries, else tiles of the largest."""
    plain: dict[int, list[tuple[int, int]]] = {}
    nodes: list[tuple[int, int]] = []
    for span in inputs.spans:
        count = span.count - len(span.drafts) if span.branches else span.count
        nodes.extend((span.first + i, 1) for i in range(count, span.count))
        height = next((h for h in heights if count <= h), heights[-1])
        for offset in range(0, count, height):
            plain.setdefault(height, []).append((span.first + offset, min(height, count - offset)))
    groups = [_group(tiles, height, window, inputs, by_slot=False) for height, tiles in sorted(plain.items())]
    return [*groups, _group(nodes, heights[0], window, inputs, by_slot=True)] if nodes else groups


def _group(tiles: list[tuple[int, int]], height: int, window: int | None, inputs: Inputs, *, by_slot: bool) -> TileGroup:
    first, count = np.asarray(tiles, dtype=np.int64).T
    slot = np.minimum(np.arange(height)[None], count[:, None] - 1)  # [N, height]
    queries = first[:, None] + slot
    lowest, highest = inputs.host_firsts(window)[queries], inputs.host_ends[queries]  # [N, height]
    first_block, last_block = lowest.min(1) // BLOCK, highest.max(1) // BLOCK
    base_span = first_block // SPAN
    pair_tile = np.repeat(np.arange(len(tiles)), last_block - first_block + 1)
    pair_block = np.concatenate([np.arange(a, b + 1) for a, b in zip(first_block, last_block, strict=True)])
    spans = int((last_block // SPAN - base_span).max()) + 1
    # Where one span holds everything, the smallest power of two that reaches every block's place in it.
    leaves = SPAN if spans > 1 else 1 << int((last_block % SPAN).max()).bit_length()
    local = pair_block - base_span[pair_tile] * SPAN
    keep = np.arange(height)[None] < count[:, None]
    read = _slots if by_slot else _pages
    device = inputs.device
    return TileGroup(
        height=height,
        queries=to_device(queries.reshape(-1), device),
        slots=to_device(np.flatnonzero(keep.reshape(-1)), device),
        tokens=to_device(queries[keep], device),
        pair_tile=to_device(pair_tile, device),
        reads=to_device(read(inputs, inputs.host_tables[inputs.group(window)], first[pair_tile], pair_block), device),
        by_slot=by_slot,
        pair_place=to_device((pair_tile * spans + local // SPAN) * leaves + local % SPAN, device),
        mask=to_device(_mask(lowest[pair_tile], highest[pair_tile], pair_block), device),
        tiles=len(tiles),
        spans=spans,
        leaves=leaves,
    )


def _pages(inputs: Inputs, table: Ints, tokens: Ints, blocks: Ints) -> Ints:
    """Pages of each pair's block; past the end of a sequence any page will do, its keys are masked."""
    per_block = BLOCK // inputs.page_size
    wide = np.pad(table, ((0, 0), (0, -table.shape[1] % per_block)), mode="edge")
    return wide.reshape(len(table), -1, per_block)[inputs.host_rows[tokens], blocks].reshape(-1)


def _slots(inputs: Inputs, table: Ints, tokens: Ints, blocks: Ints) -> Ints:
    """Slots of each pair's keys, counted through all pages: known positions as they are, then the token's own path."""
    assert inputs.host_tails is not None
    assert inputs.host_paths is not None
    tail = inputs.host_tails[tokens][:, None]  # [X, 1]
    position = blocks[:, None] * BLOCK + np.arange(BLOCK)  # [X, BLOCK]
    depth = np.clip(position - tail, 0, inputs.host_paths.shape[1] - 1)
    slot = np.where(position < tail, position, tail + np.take_along_axis(inputs.host_paths[tokens], depth, axis=1))
    page = np.minimum(slot // inputs.page_size, table.shape[1] - 1)
    pages: Ints = table[inputs.host_rows[tokens][:, None], page]
    found: Ints = pages * inputs.page_size + slot % inputs.page_size
    return found.reshape(-1)


def _mask(lowest: Ints, highest: Ints, pair_block: Ints) -> npt.NDArray[np.bool_]:
    """[X, 1, 1, height, BLOCK]: true where the query does not see the key."""
    key_at = pair_block[:, None, None] * BLOCK + np.arange(BLOCK)  # [X, 1, BLOCK]
    hidden: npt.NDArray[np.bool_] = (key_at < lowest[:, :, None]) | (key_at > highest[:, :, None])
    return hidden[:, None, None]
