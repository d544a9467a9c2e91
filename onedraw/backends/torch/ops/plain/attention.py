"""Paged attention in one form for all rows: prompt chunks, single tokens, drafts.

In: queries q [T, H, D], the layer's KV pages (in q's dtype or a narrower one, or codes with scales), and the step's tiles.
Out: [T, H * D]. Axes: T tokens, H query heads, K KV heads, G = H / K query heads per KV head, D size of a head, P pages of S
slots, N tiles, X pairs of a tile and a block of keys, W values of a pair, t tokens of one group of tiles.

Keys are read in blocks of 64 absolute positions. A tile is a few neighbouring queries of one row; every (tile, block) pair is one
product of a fixed shape. The maximum over blocks is exact in any order. Block sums are added pairwise (neighbours first) inside
spans of 16 blocks that start at absolute multiples, and spans are added in order. Blocks that a query does not attend to add
exact zeros, so neither the batch, nor prompt chunks, nor tiles change a bit of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from onedraw.backends.torch.ops.plain.elementwise import exp_
from onedraw.backends.torch.runner.inputs import Inputs, Ints, to_device
from onedraw.backends.torch.sampling.exact import ordered_sum
from onedraw.backends.torch.state.kv_pages import PageStore, bits, code_values, transformed
from onedraw.models.spec import AttentionSpec

BLOCK = 64  # keys per block
SPAN = 16  # blocks per span
LAUNCH = 64  # products per call of torch.bmm on a GPU


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Tiles of one height, and the blocks of keys that they read. The index tensors are created once per step."""

    height: int  # queries per tile
    queries: Tensor  # [N * height]: index of each query's token; a tile with fewer queries repeats its last one
    slots: Tensor  # [t]: index in `queries` of each token of `tokens`
    tokens: Tensor  # [t]: the tokens of this group, without the padding of `queries`
    pair_tile: Tensor  # [X]: the tile of each (tile, block) pair
    reads: Tensor  # [X * BLOCK / S]: the pages of each pair's block, or [X * BLOCK]: the slots of its keys
    by_slot: bool  # whether `reads` has slots instead of pages
    pair_place: Tensor  # [X]: flat index of the pair's sum in the array of block sums, padded to [N, spans * leaves]
    mask: Tensor  # [X, 1, 1, height, BLOCK]: true where the query does not attend to the key
    tiles: int  # N, the number of tiles
    spans: int  # the most spans of a tile
    leaves: int  # blocks per span after padding for pairwise sums: a power of two up to SPAN


def store_rows(group: TileGroup, *, kv_heads: int, page_size: int) -> Tensor:
    """Indices of the rows that a group reads, in the order (pair, head, page or key): rows of a page store viewed as [P * K, S *
    D], or for `by_slot` as [P * K * S, D]."""
    heads = torch.arange(kv_heads, device=group.reads.device).view(1, -1, 1)
    reads = group.reads.view(len(group.pair_tile), 1, -1)
    if not group.by_slot:
        return (reads * kv_heads + heads).reshape(-1)
    return ((reads // page_size * kv_heads + heads) * page_size + reads % page_size).reshape(-1)


def attend(q: Tensor, store: PageStore, *, groups: list[TileGroup], rows: list[Tensor], spec: AttentionSpec) -> Tensor:
    """Attention of q [T, H, D] over a layer's pages → [T, H * D]. rows[i] is `store_rows` of groups[i]."""
    out = q.new_empty(q.shape[0], spec.heads * spec.head_dim)
    scaled = (transformed(q, kept=False).to(q.dtype) if store.transforms else q) * spec.scale
    for group, row in zip(groups, rows, strict=True):
        result = _attend_group(scaled, store, group=group, rows=row, spec=spec)
        out.index_copy_(0, group.tokens, result.index_select(0, group.slots))
    if store.transforms:
        out = transformed(out.view(q.shape), kept=False).to(q.dtype).view(out.shape)
    return out


def _attend_group(q: Tensor, store: PageStore, *, group: TileGroup, rows: Tensor, spec: AttentionSpec) -> Tensor:
    kv, per, dim, height = spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim, group.height
    tiles, pairs = group.tiles, len(group.pair_tile)
    tiled = q.index_select(0, group.queries).view(tiles, height, kv, per, dim).permute(0, 2, 3, 1, 4)
    tiled = tiled.reshape(tiles, kv * per * height * dim)
    left = tiled.index_select(0, group.pair_tile).view(pairs * kv, per * height, dim)
    right = code_values(_gathered(store.keys, group, rows, store.width, pairs * kv))
    if store.key_scales is None:
        scores = _products(left, right.to(q.dtype).transpose(1, 2)).float()  # [X * K, G * height, BLOCK]
    else:  # float32, because products with 8-bit codes can exceed the range of f16
        scores = _products(left.float(), right.float().transpose(1, 2))
        scores *= _gathered(store.key_scales, group, rows, 1, pairs * kv).transpose(1, 2)
    scores.view(pairs, kv, per, height, BLOCK).masked_fill_(group.mask, float("-inf"))  # replaces NaN of masked keys, too
    peak = scores.amax(-1).view(pairs, -1)  # [X, K * G * height]
    peak = _spread(peak, group, fill=float("-inf")).amax(1)  # [N, K * G * height]
    scores.view(pairs, -1, BLOCK).sub_(peak.index_select(0, group.pair_tile).unsqueeze(-1))
    weights = exp_(scores)
    total = _ordered_sum(ordered_sum(weights).view(pairs, -1), group)  # [N, K * G * height]
    if store.value_scales is not None:
        weights *= _gathered(store.value_scales, group, rows, 1, pairs * kv).transpose(1, 2)
    right = code_values(_gathered(store.values, group, rows, store.width, pairs * kv))
    mixed = _products(weights.to(q.dtype), right.to(q.dtype)).float()
    mixed = _ordered_sum(mixed.view(pairs, -1), group).view(tiles, kv * per, height, dim)
    mixed = mixed / total.view(tiles, kv * per, height, 1)
    return mixed.transpose(1, 2).reshape(tiles * height, kv * per * dim).to(q.dtype)


def _gathered(store: Tensor, group: TileGroup, rows: Tensor, width: int, blocks: int) -> Tensor:
    """The keys or values that a group reads as they are stored, or (width 1) their scales: [X * K, BLOCK, width]."""
    found = bits(store).view(-1, width) if group.by_slot else bits(store)
    return found.index_select(0, rows).view(store.dtype).view(blocks, BLOCK, width)


def _products(left: Tensor, right: Tensor) -> Tensor:
    """Multiply left and right, one small product per pair. A GPU library selects its kernel by the number of products, so there
    it always gets LAUNCH of them, padded with zeros."""
    if left.device.type == "cpu":
        return torch.bmm(left, right)
    missing = -len(left) % LAUNCH
    if missing:
        left = torch.cat([left, left.new_zeros(missing, *left.shape[1:])])
        right = torch.cat([right, right.new_zeros(missing, *right.shape[1:])])
    parts = [torch.bmm(left[i : i + LAUNCH], right[i : i + LAUNCH]) for i in range(0, len(left), LAUNCH)]
    return torch.cat(parts)[: len(left) - missing]


def _spread(parts: Tensor, group: TileGroup, *, fill: float) -> Tensor:
    """Values of pairs [X, W], moved to the positions of their blocks in their tiles: [N, spans * leaves, W]."""
    places = group.tiles * group.spans * group.leaves
    wide = parts.new_full((places, parts.shape[1]), fill)
    wide.index_copy_(0, group.pair_place, parts)
    return wide.view(group.tiles, group.spans * group.leaves, -1)


def _ordered_sum(parts: Tensor, group: TileGroup) -> Tensor:
    """Sum over the blocks of each tile in a fixed order: pairwise inside a span, then span after span. [X, W] → [N, W]"""
    wide = _spread(parts, group, fill=0.0).view(group.tiles, group.spans, group.leaves, -1)
    while wide.shape[2] > 1:
        wide = wide[:, :, 0::2] + wide[:, :, 1::2]
    total = wide[:, 0, 0]
    for span in range(1, group.spans):
        total = total + wide[:, span, 0]
    return total


# ------------------------------------------------------------------ tiles of a step


def tile_groups(inputs: Inputs, *, window: int | None, heights: tuple[int, ...]) -> list[TileGroup]:
    """A step's queries in tiles of fixed height, with the blocks of keys that each tile reads; created once per step and window.

    A row uses the smallest height that holds its queries, or several tiles of the largest. Queries of a tile read the same slots;
    each node of a draft tree reads slots of its own, so it is a tile by itself.
    """
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
    # With one span, leaves are reduced to the smallest power of two that covers all blocks: leaving out blocks of zeros changes
    # no bit of a sum.
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
    """Pages of each pair's block. Past the end of a sequence the last page is repeated, because its keys are masked there."""
    per_block = BLOCK // inputs.page_size
    wide = np.pad(table, ((0, 0), (0, -table.shape[1] % per_block)), mode="edge")
    return wide.reshape(len(table), -1, per_block)[inputs.host_rows[tokens], blocks].reshape(-1)


def _slots(inputs: Inputs, table: Ints, tokens: Ints, blocks: Ints) -> Ints:
    """Slots of each pair's keys, counted over all pages: known positions first, then the drafts on the token's own path."""
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
    """The mask of pairs, [X, 1, 1, height, BLOCK]: true where the query does not attend to the key."""
    key_at = pair_block[:, None, None] * BLOCK + np.arange(BLOCK)  # [X, 1, BLOCK]
    hidden: npt.NDArray[np.bool_] = (key_at < lowest[:, :, None]) | (key_at > highest[:, :, None])
    return hidden[:, None, None]
