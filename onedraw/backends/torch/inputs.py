"""A ragged plan → the padded index tensors of one turn. Padding is private to this file.

In: rows of a plan, page size, the row rule. Out: Inputs: what every layer reads besides its weights. Built with numpy on
the host and moved once; nothing here is asked for again while the layers run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from onedraw.backends.torch.layers.attention import BLOCK, SPAN, TileGroup
from onedraw.backends.torch.layers.linear import RowRule
from onedraw.types import Plan, Row

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Shape:
    """What of the backend shapes its inputs."""

    page_size: int
    scratch_page: int  # a page nobody reads: padding tokens write there
    windows: tuple[int | None, ...]  # the different windows of the model's layers
    tile_heights: tuple[int, ...]  # ascending; rows use the smallest that holds their queries, else the largest
    rule: RowRule


@dataclass(frozen=True, slots=True)
class Inputs:
    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    write_pages: Tensor  # [T] page each token's key and value go to
    write_slots: Tensor  # [T] slot inside it
    groups: dict[int | None, list[TileGroup]]  # by window
    spots: tuple[tuple[int, int], ...]  # per row: its first token and its number of tokens, drafts included


def make_inputs(plan: Plan, *, shape: Shape, device: torch.device) -> Inputs:
    tokens: list[int] = []
    positions: list[Ints] = []
    pages: list[Ints] = []
    spots: list[tuple[int, int]] = []
    for row in plan.rows:
        row_tokens = [*row.tokens, *(d.token for d in row.drafts)]
        spots.append((len(tokens), len(row_tokens)))
        tokens.extend(row_tokens)
        at = np.arange(row.start, row.start + len(row_tokens), dtype=np.int64)
        positions.append(at)
        pages.append(np.asarray(row.pages, dtype=np.int64)[at // shape.page_size])
    padding = shape.rule.padded(len(tokens)) - len(tokens)
    tokens.extend([0] * padding)
    positions.append(np.arange(padding, dtype=np.int64) % shape.page_size)
    pages.append(np.full(padding, shape.scratch_page, dtype=np.int64))
    at = np.concatenate(positions)
    page_index = np.concatenate(pages)
    return Inputs(
        tokens=_to(np.asarray(tokens, dtype=np.int64), device),
        positions=_to(at, device),
        write_pages=_to(page_index, device),
        write_slots=_to(at % shape.page_size, device),
        groups={w: _groups(plan, spots, len(tokens) - padding, padding, w, shape, device) for w in shape.windows},
        spots=tuple(spots),
    )


def _to(array: npt.NDArray[np.int64] | npt.NDArray[np.float32], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Tile:
    first: int  # token of its first query
    count: int  # queries
    start: int  # position of its first query
    pages: Ints  # of its sequence


def _groups(
    plan: Plan,
    spots: list[tuple[int, int]],
    padding_first: int,
    padding: int,
    window: int | None,
    shape: Shape,
    device: torch.device,
) -> list[TileGroup]:
    by_height: dict[int, list[Tile]] = {}
    for row, (first, count) in zip(plan.rows, spots, strict=True):
        _cut(row, first, count, shape.tile_heights, by_height)
    for i in range(padding):  # padding tokens read the scratch page they write
        page = np.asarray([shape.scratch_page], dtype=np.int64)
        by_height.setdefault(shape.tile_heights[0], []).append(Tile(padding_first + i, 1, i % shape.page_size, page))
    return [_group(tiles, height, window, shape, device) for height, tiles in sorted(by_height.items())]


def _cut(row: Row, first: int, count: int, heights: tuple[int, ...], by_height: dict[int, list[Tile]]) -> None:
    height = next((h for h in heights if count <= h), heights[-1])
    pages = np.asarray(row.pages, dtype=np.int64)
    tiles = by_height.setdefault(height, [])
    for offset in range(0, count, height):
        tiles.append(Tile(first + offset, min(height, count - offset), row.start + offset, pages))


def _group(tiles: list[Tile], height: int, window: int | None, shape: Shape, device: torch.device) -> TileGroup:
    count = np.asarray([t.count for t in tiles])
    start = np.asarray([t.start for t in tiles])
    first = np.asarray([t.first for t in tiles])
    slot = np.minimum(np.arange(height)[None], count[:, None] - 1)  # [N, height]
    queries = first[:, None] + slot
    query_at = start[:, None] + slot
    last_block = (start + count - 1) // BLOCK
    lowest = np.zeros_like(start) if window is None else np.maximum(start - window + 1, 0)
    first_block = lowest // BLOCK
    base_span = first_block // SPAN
    blocks = last_block - first_block + 1
    pair_tile = np.repeat(np.arange(len(tiles)), blocks)
    pair_block = np.concatenate([np.arange(a, b + 1) for a, b in zip(first_block, last_block, strict=True)])
    spans = int((last_block // SPAN - base_span).max()) + 1
    leaves = SPAN if spans > 1 else _leaves(first_block, last_block)
    local = pair_block - base_span[pair_tile] * SPAN
    place = (pair_tile * spans + local // SPAN) * leaves + local % SPAN
    keep = np.arange(height)[None] < count[:, None]
    return TileGroup(
        height=height,
        queries=_to(queries.reshape(-1), device),
        slots=_to(np.flatnonzero(keep.reshape(-1)), device),
        tokens=_to(queries[keep], device),
        pair_tile=_to(pair_tile, device),
        pair_pages=_to(_block_pages(tiles, pair_tile, pair_block, shape), device),
        pair_place=_to(place, device),
        mask=_to(_mask(query_at[pair_tile], pair_block, window), device),
        tiles=len(tiles),
        spans=spans,
        leaves=leaves,
    )


def _leaves(first_block: Ints, last_block: Ints) -> int:
    """The smallest power of two that holds every block's place in its one span."""
    highest = int((last_block % SPAN).max())
    return 1 << highest.bit_length()


def _block_pages(tiles: list[Tile], pair_tile: Ints, pair_block: Ints, shape: Shape) -> Ints:
    """Pages of each pair's block; past the end of a sequence the scratch page, whose keys nobody sees."""
    per_block = BLOCK // shape.page_size
    longest = max(len(t.pages) for t in tiles)
    table = np.full((len(tiles), -(-longest // per_block) * per_block), shape.scratch_page, dtype=np.int64)
    for i, tile in enumerate(tiles):
        table[i, : len(tile.pages)] = tile.pages
    return table.reshape(len(tiles), -1, per_block)[pair_tile, pair_block].reshape(-1)


def _mask(query_at: Ints, pair_block: Ints, window: int | None) -> npt.NDArray[np.float32]:
    key_at = pair_block[:, None, None] * BLOCK + np.arange(BLOCK)  # [X, 1, BLOCK]
    query = query_at[:, :, None]  # [X, height, 1]
    seen = key_at <= query
    if window is not None:
        seen &= key_at > query - window
    mask = np.where(seen, np.float32(0), np.float32(-np.inf)).astype(np.float32)
    return mask[:, None, None]
