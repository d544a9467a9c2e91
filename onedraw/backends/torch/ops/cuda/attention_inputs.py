"""What the attention kernels read of a turn, as one array of 32-bit integers: one copy to the device per kind of layer.

In: Inputs, and the sizes of a kind of attention. Out: HostView, and from it the kernels' View and TileSets. Turns of equal
layouts may share recorded kernels, so those that were padded to one bucket have one layout.
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
    LEAST,
    OWN,
    SHARED,
    TILE_WORDS,
    WHOLE,
    TileSet,
    View,
    block_keys,
    split_of,
)
from onedraw.backends.torch.runner.inputs import Bucket, Inputs, Ints

Words = npt.NDArray[np.int32]
Tile = tuple[int, int, int, int]  # first token, tokens, kind, tail
Found = dict[tuple[int, int], list[Tile]]  # by kind and height
PARTIAL_BYTES = 256 * 2**20  # of splits that wait to be merged
LONG = 128  # queries
FAR = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of a kind of attention, and how many programs keep the device busy."""

    heads: int
    kv_heads: int
    dim: int
    window: int | None
    busy: int
    small: bool = False  # a card with little shared memory per block

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def heights(self) -> tuple[int, ...]:
        """Tile heights, lowest first. Wide heads leave no room for high tiles."""
        least = max(16, 1 << (self.group - 1).bit_length())
        most = 128 if self.dim <= (128 if self.small else 256) else 64 if self.dim <= 256 else 16
        return tuple(h for h in (16, 32, 64, 128) if least <= h <= max(most, least))


@dataclass(frozen=True, slots=True)
class Cut:
    """Tiles of one height: where they lie in the words, and how they are launched."""

    height: int
    tiles: int
    tokens: int
    splits: int
    launched: int
    together: bool
    kind: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything lies in the words. Equal layouts may share captured kernels."""

    tokens: int
    rows: int
    width: int
    depth: int | None  # of the paths; None where no row branches
    page_size: int
    cuts: tuple[Cut, ...]

    @property
    def sizes(self) -> list[int]:
        tree = [] if self.depth is None else [self.tokens * self.depth]
        tiles = [size for cut in self.cuts for size in (cut.tiles * TILE_WORDS, cut.tokens)]
        return [*[self.tokens] * 6, self.rows * self.width, *tree, *tiles]


@dataclass(frozen=True, slots=True)
class Form:
    """A layout, words that hold what all its turns have in common, and where the other parts begin."""

    layout: Layout
    begins: tuple[int, ...]
    words: Words


@dataclass(frozen=True, slots=True)
class HostView:
    words: Words
    layout: Layout


@dataclass(frozen=True, slots=True)
class DeviceView:
    """The words on the device, and what they mean."""

    words: Tensor
    positions: Tensor  # [T]
    slots: Tensor  # [T]
    view: View
    sets: tuple[TileSet, ...]


def host_view(inputs: Inputs, heads: Heads) -> HostView:
    if inputs.bucket is None:
        cuts = _cuts(inputs, heads)
        form = _form(_layout(inputs, heads, tuple(cut for cut, _, _ in cuts)), [tokens for _, _, tokens in cuts])
        tiles = [table for _, table, _ in cuts]
    else:
        form = _bucket_form(inputs.bucket, heads, inputs.page_size)
        tiles = [_tile_table(inputs, heads, own) for own in _bucket_tiles(inputs, inputs.bucket, heads, form.layout.cuts)]
    firsts, table = inputs.host_firsts(heads.window), inputs.host_tables[inputs.group(heads.window)]
    parts = [inputs.host_positions, inputs.host_slots, inputs.host_rows, firsts, inputs.host_ends, table]
    parts += tiles if inputs.host_paths is None else [inputs.host_paths, *tiles]
    words = form.words.copy()
    for begin, part in zip(form.begins, parts, strict=True):
        words[begin : begin + part.size] = part.reshape(-1)
    return HostView(words, form.layout)


def _layout(inputs: Inputs, heads: Heads, cuts: tuple[Cut, ...]) -> Layout:
    depth = None if inputs.host_paths is None else inputs.host_paths.shape[1]
    rows, width = inputs.host_tables[inputs.group(heads.window)].shape
    return Layout(len(inputs.host_tokens), rows, width, depth, inputs.page_size, cuts)


def _form(layout: Layout, tokens: list[Ints]) -> Form:
    """`tokens`: of each cut, those that are kept until the merge."""
    begins = [0, *accumulate(map(_aligned, layout.sizes))]
    words = np.zeros(begins.pop(), dtype=np.int32)
    kept, behind = np.concatenate(tokens), 7 + (layout.depth is not None)
    words[begins[5] : begins[6]][kept] = np.arange(len(kept))
    for begin, own in zip(begins[behind + 1 :: 2], tokens, strict=True):
        words[begin : begin + len(own)] = own
    return Form(layout, (*begins[:5], *begins[6:behind], *begins[behind::2]), words)


def _aligned(size: int) -> int:
    """Every part begins at 16 bytes: kernels compiled for aligned addresses then serve every turn."""
    return -(-size // 4) * 4


def device_view(words: Tensor, layout: Layout) -> DeviceView:
    """`words` [layout's sizes] int32 on the device; nothing is copied."""
    sizes = layout.sizes
    parts = [part[:size] for part, size in zip(torch.split(words, list(map(_aligned, sizes))), sizes, strict=True)]
    positions, slots, rows, firsts, ends, lines, table = parts[:7]
    paths, rest = None, parts[7:]
    if layout.depth is not None:
        paths, rest = rest[0].view(layout.tokens, layout.depth), rest[1:]
    view = View(rows, firsts, ends, lines, table.view(layout.rows, layout.width), paths, layout.page_size)
    sets = tuple(
        TileSet(
            cut.height,
            rest[2 * i].view(cut.tiles, TILE_WORDS),
            rest[2 * i + 1],
            cut.splits,
            cut.launched,
            cut.together,
            cut.kind,
        )
        for i, cut in enumerate(layout.cuts)
    )
    return DeviceView(words, positions, slots, view, sets)


def to_view(inputs: Inputs, heads: Heads) -> DeviceView:
    host = host_view(inputs, heads)
    inputs.staging.note(host.layout)
    words = inputs.staging.put(host.words)
    return inputs.staging.cached(words, host.layout, lambda: device_view(words, host.layout))


def _cuts(inputs: Inputs, heads: Heads) -> list[tuple[Cut, Ints, Ints]]:
    """Tiles by height. A row takes the lowest height that holds its queries, else the highest."""
    splits = int(split_of(inputs.host_ends.max())) + 1
    found: Found = {}
    for span in inputs.spans:
        known = span.count - len(span.drafts) if span.branches else span.count
        if span.branches:
            # What the tokens have in common is read once for all of them, the rest by each for itself.
            known = max(known - 1, 0)
            _tile(found, heads, splits, span.first + known, span.count - known, SHARED, span.stop)
            for token in range(span.first + known, span.first + span.count):
                _tile(found, heads, splits, token, 1, OWN, span.stop)
        _tile(found, heads, splits, span.first, known, WHOLE, FAR)
    # In order of their kinds: what nodes share before what is their own.
    return [_cut(inputs, heads, height, tiles, splits) for (_, height), tiles in sorted(found.items())]


@lru_cache(maxsize=128)  # of long contexts and many rows, megabytes each
def _bucket_form(bucket: Bucket, heads: Heads, page_size: int) -> Form:
    """The same tiles for every turn of a bucket: a row has as many as the longest could need, those it does not need are
    empty. Every row is a chain, or every row is a tree of one known token and its drafts."""
    splits = int(split_of(np.asarray(bucket.reach - 1))) + 1
    if bucket.depth is None:
        cuts = [_bucket_cut(bucket, heads, WHOLE, bucket.longest, splits)]
    else:
        cuts = [_bucket_cut(bucket, heads, SHARED, bucket.longest, splits), _bucket_cut(bucket, heads, OWN, 1, splits)]
    layout = Layout(bucket.tokens, bucket.rows + 1, bucket.reach // page_size, bucket.depth, page_size, tuple(cuts))
    form = _form(layout, [np.arange(cut.tokens, dtype=np.int64) for cut in cuts])
    for cut, begin in zip(cuts, form.begins[-len(cuts) :], strict=True):
        size = cut.tiles * TILE_WORDS
        form.words[begin : begin + size] = np.tile([0, 0, -1, bucket.rows, LEAST, 0, 0, 1], cut.tiles)  # sees nothing
    return form


def _bucket_cut(bucket: Bucket, heads: Heads, kind: int, count: int, splits: int) -> Cut:
    """For so many tokens of a row; what is a node's own, for every one of them."""
    height = _height(heads, count, kind, splits)
    room = bucket.tokens if kind == OWN else bucket.rows * -(-count // (height // heads.group))
    tokens = 0 if kind == OWN else bucket.tokens
    together = _together(heads, kind, height, room, tokens, splits)
    seen = heads.window and heads.window + bucket.longest
    launched = splits if seen is None else min(splits, seen // LEAST + 2)
    return Cut(height, room, 0 if together else tokens, splits, launched, together, kind)


def _bucket_tiles(inputs: Inputs, bucket: Bucket, heads: Heads, cuts: tuple[Cut, ...]) -> list[list[Tile]]:
    """The tiles that a turn of a bucket needs, per cut."""
    rows = [span for span in inputs.spans if span.lane is not None]
    found: list[list[Tile]] = [[] for _ in cuts]
    for cut, tiles in zip(cuts, found, strict=True):
        for span in rows:
            tail = FAR if cut.kind == WHOLE else span.stop
            per = 1 if cut.kind == OWN else cut.height // heads.group
            _cover(tiles, per, span.first, span.count, cut.kind, tail)
    return found


def _tile(found: Found, heads: Heads, splits: int, first: int, count: int, kind: int, tail: int) -> None:
    if count:
        # What nodes share, and what is their own, is launched apart: one is always split, and the other short.
        height = _height(heads, count, kind, splits)
        _cover(found.setdefault((kind, height), []), height // heads.group, first, count, kind, tail)


def _height(heads: Heads, count: int, kind: int, splits: int) -> int:
    # High tiles pay for long prompts of narrow heads, and where one of them holds all queries of a row, which then read their
    # keys once, if there are enough of them all the same. Nodes of a tree would fill little of their last one.
    long = count >= LONG and heads.dim <= 128
    many = splits * heads.kv_heads >= heads.busy // 4 and kind == WHOLE
    joined = [h for h in heads.heights if h <= 64 or long or (many and count * heads.group <= h)]
    return next((h for h in joined if count * heads.group <= h), joined[-1])


def _cover(tiles: list[Tile], per: int, first: int, count: int, kind: int, tail: int) -> None:
    tiles.extend((first + offset, min(per, count - offset), kind, tail) for offset in range(0, count, per))


def _tile_table(inputs: Inputs, heads: Heads, tiles: list[Tile]) -> Ints:
    """[N, 8]: tiles of one kind."""
    if not tiles:
        return np.zeros((0, TILE_WORDS), dtype=np.int64)
    kind = tiles[0][2]
    first, count, _, tail = np.asarray(tiles, dtype=np.int64).T
    table = np.empty((len(tiles), TILE_WORDS), dtype=np.int64)
    firsts = inputs.host_firsts(heads.window)
    low, high = firsts[first], inputs.host_ends[first + count - 1]  # known tokens see more and more
    carried: Ints | int = -1
    if kind != WHOLE:
        common = tail // block_keys(heads.dim) * block_keys(heads.dim)  # where the blocks end that all nodes read alike
        if kind == OWN:
            carried = np.where(low < common, split_of(common - 1), -1)
            low = np.maximum(low, common)
        else:
            low, high = np.asarray([firsts[f : f + c].min() for f, c, _, _ in tiles]), common - 1
    for column, values in enumerate((first, count, carried, inputs.host_rows[first], low, high, tail, split_of(low))):
        table[:, column] = values
    return table


def _cut(inputs: Inputs, heads: Heads, height: int, tiles: list[Tile], splits: int) -> tuple[Cut, Ints, Ints]:
    table = _tile_table(inputs, heads, tiles)
    launched = max(int((split_of(table[:, 5]) + 1 - table[:, 7]).max()), 1)  # the most splits that a tile reads
    # A node's shared and own parts may lie in tiles of two heights; what it shares is kept for its own tile.
    ranges = [np.arange(f, f + c) for f, c, k, _ in tiles if k != OWN]
    tokens = np.concatenate(ranges) if ranges else np.zeros(0, dtype=np.int64)
    kind = tiles[0][2]
    together = _together(heads, kind, height, len(tiles), len(tokens), splits)
    cut = Cut(height, len(tiles), 0 if together else len(tokens), splits, launched, together, kind)
    return cut, table, tokens[: 0 if together else None]


def _together(heads: Heads, kind: int, height: int, tiles: int, tokens: int, splits: int) -> bool:
    """One split, or enough programs without splitting whose registers hold two sums, or too much to keep until the merge. What
    is a node's own always, what nodes share never."""
    many = tiles * heads.kv_heads >= heads.busy and height * heads.dim <= 128 * 128
    much = splits * tokens * heads.heads * heads.dim * 4 > PARTIAL_BYTES
    return kind == OWN or (kind == WHOLE and (splits == 1 or many or much))
