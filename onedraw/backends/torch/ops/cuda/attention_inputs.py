"""Inputs of the attention kernels for one step, packed into one int32 array: one host-to-device copy per attention shape.

In: Inputs and an AttentionShape. Out: HostAttentionInputs, and on the device AttentionMetadata and TileSets for the kernels.
Steps with equal layouts can share captured CUDA graphs, so all steps padded to one bucket have one layout. A tile is some queries
of one row; a split is a range of key positions whose attention is computed by itself and then merged (`attention.py`). A row is
the work of one sequence in one step. A bucket is the sizes to which a step is padded. Axes: T tokens, N tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from onedraw.backends.torch.ops.cuda.attention import (
    FIRST_SPLIT,
    FULL,
    TILE_WORDS,
    TREE_PATH,
    TREE_PREFIX,
    AttentionMetadata,
    TileSet,
    block_keys,
    split_indices,
)
from onedraw.backends.torch.runner.inputs import Bucket, Inputs, Ints

Words = npt.NDArray[np.int32]
AttentionTile = tuple[int, int, int, int]  # first token, token count, kind, position of the first draft (NO_TREE without a tree)
TileLists = dict[tuple[int, int], list[AttentionTile]]  # tiles by kind and height
SPLIT_BUFFER_BYTES = 256 * 2**20  # the most memory that stored splits may take; beyond it, tiles are sequential
LONG_PROMPT = 128  # rows of at least this many queries use tall tiles if heads are small
NO_TREE = np.iinfo(np.int32).max  # the start of the drafts of a row without a tree: a position after all others


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of an attention layer, and how many programs fill the device."""

    heads: int
    kv_heads: int
    dim: int
    window: int | None
    full_grid: int  # the number of programs that fills the device: two per multiprocessor
    small_shared_memory: bool = False  # whether a program has at most SMALL_SHARED bytes (`linear.py`) of shared memory

    @property
    def group_size(self) -> int:
        return self.heads // self.kv_heads

    @property
    def tile_heights(self) -> tuple[int, ...]:
        """Tile heights, lowest first. Large heads leave no shared memory for tall tiles."""
        least = max(16, 1 << (self.group_size - 1).bit_length())
        most = 128 if self.dim <= (128 if self.small_shared_memory else 256) else 64 if self.dim <= 256 else 16
        return tuple(h for h in (16, 32, 64, 128) if least <= h <= max(most, least))


@dataclass(frozen=True, slots=True)
class TileSetLayout:
    """Sizes of a TileSet in the packed array, and how it is launched."""

    height: int  # rows of a tile: queries times query heads per KV head
    tiles: int  # number of tiles
    merge_tokens: int  # tokens whose splits are stored to be merged; 0 if `sequential`
    splits: int  # one more than the index of the last split of any token
    grid_splits: int  # the largest number of splits of a tile
    sequential: bool  # whether one program processes all splits of a tile
    kind: int  # the kind of its tiles: FULL, TREE_PREFIX or TREE_PATH


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """Sizes of the packed arrays. Equal layouts can share captured kernels."""

    tokens: int
    rows: int
    width: int  # number of columns of the page table
    depth: int | None  # columns of the array of tree paths; None if no row has a draft tree
    page_size: int
    tile_sets: tuple[TileSetLayout, ...]

    @property
    def sizes(self) -> list[int]:
        tree = [] if self.depth is None else [self.tokens * self.depth]
        tiles = [size for tile_set in self.tile_sets for size in (tile_set.tiles * TILE_WORDS, tile_set.merge_tokens)]
        return [*[self.tokens] * 6, self.rows * self.width, *tree, *tiles]


@dataclass(frozen=True, slots=True)
class LayoutTemplate:
    """A layout, the array with the words that all its steps have in common, and the start of each array that a step fills in."""

    layout: AttentionLayout
    starts: tuple[int, ...]
    words: Words


@dataclass(frozen=True, slots=True)
class HostAttentionInputs:
    words: Words
    layout: AttentionLayout


@dataclass(frozen=True, slots=True)
class DeviceAttentionInputs:
    """The packed words on the device, and views of them: key ranges, page table and tiles."""

    words: Tensor
    positions: Tensor  # [T] int32: position of each token
    # [T] int32: slot of each token's key and value, counted over its row's pages laid end to end. It equals the position, except
    # for drafts of a tree.
    slots: Tensor
    metadata: AttentionMetadata
    tile_sets: tuple[TileSet, ...]


def host_attention_inputs(inputs: Inputs, shape: AttentionShape) -> HostAttentionInputs:
    if inputs.bucket is None:
        tile_sets = _tile_sets(inputs, shape)
        template = _template(
            _attention_layout(inputs, shape, tuple(tile_set for tile_set, _, _ in tile_sets)),
            [tokens for _, _, tokens in tile_sets],
        )
        tiles = [table for _, table, _ in tile_sets]
    else:
        template = _bucket_template(inputs.bucket, shape, inputs.page_size)
        tiles = [
            _tile_table(inputs, shape, own) for own in _bucket_tiles(inputs, inputs.bucket, shape, template.layout.tile_sets)
        ]
    firsts, table = inputs.host_firsts(shape.window), inputs.host_tables[inputs.group(shape.window)]
    arrays = [inputs.host_positions, inputs.host_slots, inputs.host_rows, firsts, inputs.host_ends, table]
    arrays += tiles if inputs.host_paths is None else [inputs.host_paths, *tiles]
    words = template.words.copy()
    for start, array in zip(template.starts, arrays, strict=True):
        words[start : start + array.size] = array.reshape(-1)
    return HostAttentionInputs(words, template.layout)


def _attention_layout(inputs: Inputs, shape: AttentionShape, tile_sets: tuple[TileSetLayout, ...]) -> AttentionLayout:
    depth = None if inputs.host_paths is None else inputs.host_paths.shape[1]
    rows, width = inputs.host_tables[inputs.group(shape.window)].shape
    return AttentionLayout(len(inputs.host_tokens), rows, width, depth, inputs.page_size, tile_sets)


def _template(layout: AttentionLayout, tokens: list[Ints]) -> LayoutTemplate:
    """A template with `AttentionMetadata.merge_rows` filled in. `tokens`: for each tile set, the tokens whose splits are
    merged."""
    starts = [0, *accumulate(map(_aligned, layout.sizes))]
    words = np.zeros(starts.pop(), dtype=np.int32)
    kept, behind = np.concatenate(tokens), 7 + (layout.depth is not None)
    words[starts[5] : starts[6]][kept] = np.arange(len(kept))
    for start, own in zip(starts[behind + 1 :: 2], tokens, strict=True):
        words[start : start + len(own)] = own
    return LayoutTemplate(layout, (*starts[:5], *starts[6:behind], *starts[behind::2]), words)


def _aligned(size: int) -> int:
    """The size rounded up to four words (16 bytes): kernels specialized for pointers aligned to 16 bytes then fit the arrays of
    every step."""
    return -(-size // 4) * 4


def device_attention_inputs(words: Tensor, layout: AttentionLayout) -> DeviceAttentionInputs:
    """Views of `words` (int32, on the device) as `layout` describes; nothing is copied."""
    sizes = layout.sizes
    arrays = [array[:size] for array, size in zip(torch.split(words, list(map(_aligned, sizes))), sizes, strict=True)]
    positions, slots, rows, first_keys, last_keys, merge_rows, page_table = arrays[:7]
    paths, rest = None, arrays[7:]
    if layout.depth is not None:
        paths, rest = rest[0].view(layout.tokens, layout.depth), rest[1:]
    metadata = AttentionMetadata(
        rows, first_keys, last_keys, merge_rows, page_table.view(layout.rows, layout.width), paths, layout.page_size
    )
    tile_sets = tuple(
        TileSet(
            tile_set.height,
            rest[2 * i].view(tile_set.tiles, TILE_WORDS),
            rest[2 * i + 1],
            tile_set.splits,
            tile_set.grid_splits,
            tile_set.sequential,
            tile_set.kind,
        )
        for i, tile_set in enumerate(layout.tile_sets)
    )
    return DeviceAttentionInputs(words, positions, slots, metadata, tile_sets)


def stage_attention_inputs(inputs: Inputs, shape: AttentionShape) -> DeviceAttentionInputs:
    host = host_attention_inputs(inputs, shape)
    inputs.staging.note(host.layout)
    words = inputs.staging.put(host.words)
    return inputs.staging.cached(words, host.layout, lambda: device_attention_inputs(words, host.layout))


def _tile_sets(inputs: Inputs, shape: AttentionShape) -> list[tuple[TileSetLayout, Ints, Ints]]:
    """The tile sets of an eager step. A row uses the lowest tile height that holds its queries, or the tallest if none does."""
    splits = int(split_indices(inputs.host_ends.max())) + 1
    tile_lists: TileLists = {}
    for span in inputs.spans:
        known = span.count - len(span.drafts) if span.branches else span.count
        if span.branches:
            # The key blocks that all nodes share are read by tiles of many nodes, the other blocks by one tile per node.
            known = max(known - 1, 0)
            _add_tiles(tile_lists, shape, splits, span.first + known, span.count - known, TREE_PREFIX, span.stop)
            for token in range(span.first + known, span.first + span.count):
                _add_tiles(tile_lists, shape, splits, token, 1, TREE_PATH, span.stop)
        _add_tiles(tile_lists, shape, splits, span.first, known, FULL, NO_TREE)
    # Sorted by kind, so that TREE_PREFIX comes before TREE_PATH, which reads the splits that it stores.
    return [_tile_set(inputs, shape, height, tiles, splits) for (_, height), tiles in sorted(tile_lists.items())]


@lru_cache(maxsize=128)  # the size is bounded because a template takes megabytes for long contexts and many rows
def _bucket_template(bucket: Bucket, shape: AttentionShape, page_size: int) -> LayoutTemplate:
    """The same tiles for every step of a bucket: each row has as many as the longest row could need, and unused tiles are empty.
    Either every row is a chain of drafts, or every row is a tree of one known token and its drafts."""
    splits = int(split_indices(np.asarray(bucket.reach - 1))) + 1
    if bucket.depth is None:
        tile_sets = [_bucket_tile_set(bucket, shape, FULL, bucket.longest, splits)]
    else:
        tile_sets = [
            _bucket_tile_set(bucket, shape, TREE_PREFIX, bucket.longest, splits),
            _bucket_tile_set(bucket, shape, TREE_PATH, 1, splits),
        ]
    layout = AttentionLayout(bucket.tokens, bucket.rows + 1, bucket.reach // page_size, bucket.depth, page_size, tuple(tile_sets))
    template = _template(layout, [np.arange(tile_set.merge_tokens, dtype=np.int64) for tile_set in tile_sets])
    for tile_set, start in zip(tile_sets, template.starts[-len(tile_sets) :], strict=True):
        size = tile_set.tiles * TILE_WORDS
        empty = [0, 0, -1, bucket.rows, FIRST_SPLIT, 0, 0, 1]  # a tile without tokens and keys
        template.words[start : start + size] = np.tile(empty, tile_set.tiles)
    return template


def _bucket_tile_set(bucket: Bucket, shape: AttentionShape, kind: int, count: int, splits: int) -> TileSetLayout:
    """Tiles for up to `count` tokens of each row; for TREE_PATH a tile for every token."""
    height = _tile_height(shape, count, kind, splits)
    tile_count = bucket.tokens if kind == TREE_PATH else bucket.rows * -(-count // (height // shape.group_size))
    tokens = 0 if kind == TREE_PATH else bucket.tokens
    sequential = _is_sequential(shape, kind, height, tile_count, tokens, splits)
    reach = shape.window and shape.window + bucket.longest
    grid_splits = splits if reach is None else min(splits, reach // FIRST_SPLIT + 2)
    return TileSetLayout(height, tile_count, 0 if sequential else tokens, splits, grid_splits, sequential, kind)


def _bucket_tiles(
    inputs: Inputs, bucket: Bucket, shape: AttentionShape, tile_sets: tuple[TileSetLayout, ...]
) -> list[list[AttentionTile]]:
    """The tiles that a step of a bucket uses, for each tile set."""
    rows = [span for span in inputs.spans if span.lane is not None]
    tile_lists: list[list[AttentionTile]] = [[] for _ in tile_sets]
    for tile_set, tiles in zip(tile_sets, tile_lists, strict=True):
        for span in rows:
            tree_start = NO_TREE if tile_set.kind == FULL else span.stop
            per = 1 if tile_set.kind == TREE_PATH else tile_set.height // shape.group_size
            _append_tiles(tiles, per, span.first, span.count, tile_set.kind, tree_start)
    return tile_lists


def _add_tiles(
    tile_lists: TileLists, shape: AttentionShape, splits: int, first: int, count: int, kind: int, tree_start: int
) -> None:
    if count:
        height = _tile_height(shape, count, kind, splits)
        _append_tiles(tile_lists.setdefault((kind, height), []), height // shape.group_size, first, count, kind, tree_start)


def _tile_height(shape: AttentionShape, count: int, kind: int, splits: int) -> int:
    # Tiles taller than 64 are faster for long prompts with small heads. They are also faster where one tile holds all queries of
    # a row, whose keys are then read once, provided that splits alone give enough programs. For a tree the last such tile would
    # be nearly empty.
    long_prompt = count >= LONG_PROMPT and shape.dim <= 128
    enough_splits = splits * shape.kv_heads >= shape.full_grid // 4 and kind == FULL
    heights = [h for h in shape.tile_heights if h <= 64 or long_prompt or (enough_splits and count * shape.group_size <= h)]
    return next((h for h in heights if count * shape.group_size <= h), heights[-1])


def _append_tiles(tiles: list[AttentionTile], per: int, first: int, count: int, kind: int, tree_start: int) -> None:
    tiles.extend((first + offset, min(per, count - offset), kind, tree_start) for offset in range(0, count, per))


def _tile_table(inputs: Inputs, shape: AttentionShape, tiles: list[AttentionTile]) -> Ints:
    """Tiles of one kind as the table [N, TILE_WORDS] of a TileSet."""
    if not tiles:
        return np.zeros((0, TILE_WORDS), dtype=np.int64)
    kind = tiles[0][2]
    first, count, _, tree_start = np.asarray(tiles, dtype=np.int64).T
    table = np.empty((len(tiles), TILE_WORDS), dtype=np.int64)
    firsts = inputs.host_firsts(shape.window)
    # The last token has the largest end, because key ranges of known tokens grow.
    low, high = firsts[first], inputs.host_ends[first + count - 1]
    carried_split: Ints | int = -1
    if kind != FULL:
        # The first position after the key blocks that all nodes of the tree share.
        prefix_stop = tree_start // block_keys(shape.dim) * block_keys(shape.dim)
        if kind == TREE_PATH:
            carried_split = np.where(low < prefix_stop, split_indices(prefix_stop - 1), -1)
            low = np.maximum(low, prefix_stop)
        else:
            low, high = np.asarray([firsts[f : f + c].min() for f, c, _, _ in tiles]), prefix_stop - 1
    for column, values in enumerate(
        (first, count, carried_split, inputs.host_rows[first], low, high, tree_start, split_indices(low))
    ):
        table[:, column] = values
    return table


def _tile_set(
    inputs: Inputs, shape: AttentionShape, height: int, tiles: list[AttentionTile], splits: int
) -> tuple[TileSetLayout, Ints, Ints]:
    table = _tile_table(inputs, shape, tiles)
    grid_splits = max(int((split_indices(table[:, 5]) + 1 - table[:, 7]).max()), 1)
    # A TREE_PATH tile stores no splits: it reads those that the TREE_PREFIX tile of its node stored.
    token_ranges = [np.arange(f, f + c) for f, c, k, _ in tiles if k != TREE_PATH]
    tokens = np.concatenate(token_ranges) if token_ranges else np.zeros(0, dtype=np.int64)
    kind = tiles[0][2]
    sequential = _is_sequential(shape, kind, height, len(tiles), len(tokens), splits)
    tile_set = TileSetLayout(height, len(tiles), 0 if sequential else len(tokens), splits, grid_splits, sequential, kind)
    return tile_set, table, tokens[: 0 if sequential else None]


def _is_sequential(shape: AttentionShape, kind: int, height: int, tiles: int, tokens: int, splits: int) -> bool:
    """Whether one program processes all splits of a tile: where there is one split, where the tiles fill the device and the
    registers hold two accumulators, or where the stored splits would exceed SPLIT_BUFFER_BYTES. TREE_PATH tiles always are,
    TREE_PREFIX tiles never."""
    enough_programs = tiles * shape.kv_heads >= shape.full_grid and height * shape.dim <= 128 * 128
    large_buffers = splits * tokens * shape.heads * shape.dim * 4 > SPLIT_BUFFER_BYTES
    return kind == TREE_PATH or (kind == FULL and (splits == 1 or enough_programs or large_buffers))
