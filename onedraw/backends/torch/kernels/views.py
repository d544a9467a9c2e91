"""What the attention kernels read of a turn, as one array of 32-bit integers: one copy to the device per kind of layer.

In: Inputs, and the sizes of a kind of attention. Out: HostView, and from it the kernels' View and TileSets. Turns of equal
layouts may share recorded kernels, so those that were padded to one bucket have one layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from onedraw.backends.torch.inputs import Bucket, Inputs, Ints, Span
from onedraw.backends.torch.kernels.forms import TODAY, Forms
from onedraw.backends.torch.kernels.triton_attention import (
    OWN,
    SHARED,
    SPLITS,
    TILE_WORDS,
    WHOLE,
    TileSet,
    View,
    block_keys,
    split_of,
)

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
    forms: Forms = TODAY

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
    cuts = _cuts(inputs, heads) if inputs.bucket is None else _bucket_cuts(inputs, inputs.bucket, heads)
    parts: list[Ints] = [inputs.host_positions, inputs.host_slots, inputs.host_rows, inputs.host_firsts(heads.window)]
    lines = np.zeros(len(inputs.host_tokens), dtype=np.int64)
    for place, token in enumerate(token for _, _, tokens in cuts for token in tokens):
        lines[token] = place
    table = inputs.host_tables[inputs.group(heads.window)]
    parts += [inputs.host_ends, lines, table]
    depth = None
    if inputs.host_paths is not None:
        depth = inputs.host_paths.shape[1]
        parts.append(inputs.host_paths)
    layout = Layout(
        tokens=len(inputs.host_tokens),
        rows=table.shape[0],
        width=table.shape[1],
        depth=depth,
        page_size=inputs.page_size,
        cuts=tuple(cut for cut, _, _ in cuts),
    )
    for _, tiles, tokens in cuts:
        parts += [tiles, tokens]
    words = np.zeros(sum(map(_aligned, layout.sizes)), dtype=np.int32)
    begin = 0
    for part in parts:
        words[begin : begin + part.size] = part.reshape(-1)
        begin += _aligned(part.size)
    return HostView(words, layout)


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
    inputs.feed.note(host.layout)
    words = inputs.feed.put(host.words)
    return inputs.feed.remembered(words, host.layout, lambda: device_view(words, host.layout))


def _cuts(inputs: Inputs, heads: Heads) -> list[tuple[Cut, Ints, Ints]]:
    """Tiles by height. A row takes the lowest height that holds its queries, else the highest."""
    splits = int(split_of(inputs.host_ends.max())) + 1
    found: Found = {}
    for span in inputs.spans:
        known = span.count - len(span.drafts) if span.branches else span.count
        if span.branches:
            # What the tokens have in common is read once for all of them, the rest by each for itself.
            known = max(known - 1, 0)
            for offset, count in _shares(heads, span.count - known, splits):
                _tile(found, heads, splits, span.first + known + offset, count, SHARED, span.stop)
            for token in range(span.first + known, span.first + span.count):
                _tile(found, heads, splits, token, 1, OWN, span.stop)
        _tile(found, heads, splits, span.first, known, WHOLE, FAR)
    # In order of their kinds: what nodes share before what is their own.
    return [_cut(inputs, heads, height, tiles, splits) for (_, height), tiles in sorted(found.items())]


def _bucket_cuts(inputs: Inputs, bucket: Bucket, heads: Heads) -> list[tuple[Cut, Ints, Ints]]:
    """The same tiles for every turn of a bucket: a row has as many as the longest could need, those it does not need are
    empty. Every row is a chain, or every row is a tree of one known token and its drafts."""
    splits = int(split_of(np.asarray(bucket.reach - 1))) + 1
    rows = [span for span in inputs.spans if span.lane is not None]
    asked: list[tuple[int, int, list[tuple[int, int, int]]]]  # kind, room, (first token, tokens, tail) of the rows
    if bucket.depth is None:
        asked = [(WHOLE, bucket.longest, [(span.first, span.count, FAR) for span in rows])]
    else:
        nodes = [(token, 1, span.stop) for span in rows for token in range(span.first, span.first + span.count)]
        shares = _shares(heads, bucket.longest, splits)
        asked = [(SHARED, most, [_cutout(span, offset, most) for span in rows]) for offset, most in shares]
        asked.append((OWN, 1, nodes))
    found: list[tuple[Cut, Ints, Ints]] = []
    for kind, longest, spans in asked:
        height = _height(heads, longest, kind, splits)
        tiles: list[Tile] = []
        for first, count, tail in spans:
            _cover(tiles, height // heads.group, first, count, kind, tail)
        room = bucket.tokens if kind == OWN else bucket.rows * -(-longest // (height // heads.group))
        kept = 0 if kind == OWN or found else bucket.tokens  # each token has one line
        found.append(_bucket_cut(inputs, bucket, heads, height, tiles, splits, kind=kind, room=room, kept=kept))
    return found


def _shares(heads: Heads, count: int, splits: int) -> list[tuple[int, int]]:
    """Nodes that read what they share in tiles of one height: offset and count."""
    height = _height(heads, count, SHARED, splits)
    rest = count % (height // heads.group)
    little = rest < count and 0 < 2 * rest * heads.group <= height
    if heads.forms.apart and height >= 128 and little:
        return [(0, count - rest), (count - rest, rest)]
    return [(0, count)]


def _cutout(span: Span, offset: int, most: int) -> tuple[int, int, int]:
    """First token, tokens and tail of those of a span from `offset` on."""
    return span.first + offset, max(min(span.count - offset, most), 0), span.stop


def _bucket_cut(
    inputs: Inputs,
    bucket: Bucket,
    heads: Heads,
    height: int,
    tiles: list[Tile],
    splits: int,
    *,
    kind: int,
    room: int,
    kept: int,
) -> tuple[Cut, Ints, Ints]:
    """`room`: tiles; `kept`: tokens whose parts are kept for those who merge them."""
    table = np.tile(np.asarray([0, 0, -1, bucket.rows, SPLITS[0], 0, 0, 1], dtype=np.int64), (room, 1))  # sees nothing
    if tiles:
        table[: len(tiles)] = _tile_table(inputs, heads, tiles)[0]
    tokens = np.arange(kept, dtype=np.int64)
    together = _together(heads, kind, height, room, len(tokens), splits)
    seen = bucket.longest if kind == OWN else heads.window and heads.window + bucket.longest
    launched = splits if seen is None else min(splits, seen // SPLITS[0] + 2)
    cut = Cut(height, room, 0 if together else len(tokens), splits, launched, together, kind)
    return cut, table, tokens[: 0 if together else None]


def _tile(found: Found, heads: Heads, splits: int, first: int, count: int, kind: int, tail: int) -> None:
    if count:
        # What nodes share, and what is their own, is launched apart: one is always split, and the other short.
        height = _height(heads, count, kind, splits)
        _cover(found.setdefault((kind, height), []), height // heads.group, first, count, kind, tail)


def _height(heads: Heads, count: int, kind: int, splits: int) -> int:
    # High tiles pay for long prompts of narrow heads, and where one of them holds all queries of a row, which then read their
    # keys once, if there are enough of them all the same.
    long = count >= LONG and heads.dim <= 128
    many = splits * heads.kv_heads >= heads.busy // 4
    fits = heads.heights if kind != SHARED else [h for h in heads.heights if h <= heads.forms.height]
    joined = [h for h in fits if h <= 64 or long or (many and (count * heads.group <= h or kind == SHARED))]
    return next((h for h in joined if count * heads.group <= h), joined[-1])


def _cover(tiles: list[Tile], per: int, first: int, count: int, kind: int, tail: int) -> None:
    tiles.extend((first + offset, min(per, count - offset), kind, tail) for offset in range(0, count, per))


def _tile_table(inputs: Inputs, heads: Heads, tiles: list[Tile]) -> tuple[Ints, int]:
    """[N, 8], and the largest number of splits that a tile reads."""
    first, count, kind, tail = np.asarray(tiles, dtype=np.int64).T
    low, high = inputs.host_firsts(heads.window), inputs.host_ends
    if all(tokens == 1 for _, tokens, _, _ in tiles):
        low, high = low[first], high[first]
    else:
        bounds = np.stack([first, first + count], 1).reshape(-1)  # every other stretch is a tile's
        low = np.minimum.reduceat(np.append(low, 0), bounds)[::2]  # one more token ends the last
        high = np.maximum.reduceat(np.append(high, 0), bounds)[::2]
    common = tail // block_keys(heads.dim) * block_keys(heads.dim)  # where the blocks end that all nodes read alike
    carried = np.where((kind == OWN) & (low < common), split_of(common - 1), -1)
    low = np.where(kind == OWN, np.maximum(low, common), low)
    high = np.where(kind == SHARED, np.minimum(high, common - 1), high)
    begin, stop = split_of(low), split_of(high) + 1
    table = np.stack([first, count, carried, inputs.host_rows[first], low, high, tail, begin], 1)
    return table, max(int((stop - begin).max()), 1)


def _cut(inputs: Inputs, heads: Heads, height: int, tiles: list[Tile], splits: int) -> tuple[Cut, Ints, Ints]:
    table, launched = _tile_table(inputs, heads, tiles)
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
