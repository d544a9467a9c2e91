"""Step inputs of the xla backend: the compiled shapes, and the rows of a plan as index arrays padded to one of these shapes.

In: rows of a plan, CompiledShapes. Out: XlaInputs, numpy arrays that are copied to the device once per step. Array names are
input names of exported graphs (`export.py`), so they must not change.

A token has a position in its sequence, and a place: the slot of its key and value, counted over all pages of a group of layers.
Nodes of a draft tree take the slots after the row's known tokens, in order, and attend to the slots of their own path. A lane is
the slot of a sequence's recurrent state. Rows, lanes, pages and checkpoints have one extra entry at the end, which padding reads
and writes.

This module imports no jax, so `inspect` can list the compiled shapes without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from onedraw.models.spec import DeltaSpec, ModelSpec
from onedraw.sampling.verify import draft_paths
from onedraw.types import Row

MIN_PRODUCT_ROWS = 4  # fewest rows of a matrix product: for fewer, libraries have other kernels, which round differently
# Most rows of a matrix product: with more, the order of additions along the reduced axis was seen to change.
MAX_PRODUCT_ROWS = 32
COLUMNS = 8  # columns of the matrix of ones in sums over a width, and of products that need one column only
KEYS = 128  # key positions per block of attention; blocks start at multiples of this
TILE = 16  # queries of one attention tile in a mixed step
TILES = 8  # attention tiles that are computed at once
CHUNK = 64  # prompt positions that a recurrent layer computes at once
ROW_TILE = {"cpu": None, "gpu": 64, "tpu": 64}  # rows of every matrix product, by jax platform; None: no fixed number


@dataclass(frozen=True, slots=True)
class ShapeBucket:
    """The shape of one compiled step."""

    tokens: int
    rows: int  # rows of each matrix product
    tile: int  # number of queries of one attention tile
    tiles: int  # number of attention tiles
    step: int  # attention tiles that are computed at once
    drafts: int  # maximum drafts of all rows

    @property
    def chunks(self) -> int:
        """The most prompt chunks of a step. Every row may have one partial chunk."""
        return self.tokens // CHUNK + self.tiles


@dataclass(frozen=True, slots=True)
class CompiledShapes:
    """Sizes common to all steps of a backend, and its two compiled shapes: decode (one token per row) and mixed (any rows)."""

    lanes: int
    page_size: int
    pages: tuple[int, ...]  # pages of each group of layers, without the extra page that padding writes to
    windows: tuple[int | None, ...]  # sliding window of each group; None: full attention
    max_context: int
    drafts: int  # maximum drafts of all rows of a step
    checkpoints: int
    decode: ShapeBucket
    mixed: ShapeBucket

    @property
    def table(self) -> int:
        """Pages in the page table of a row: enough for the longest context and its drafts, rounded up to whole blocks of keys."""
        return round_up(self.max_context + self.drafts + 1, KEYS) // self.page_size

    @property
    def slab(self) -> int:
        """The number of picks that one call of the sampling program handles."""
        return MIN_PRODUCT_ROWS if self.lanes <= MIN_PRODUCT_ROWS else 8

    @property
    def picks(self) -> int:
        """The most picks of a step. A pick is a token after which a token is sampled."""
        return round_up(self.lanes + self.drafts, self.slab)

    @property
    def uniform(self) -> CompiledShapes:
        """The same sizes with equal product rows and tiles in both shapes, for libraries whose rounding depends on the number of
        rows."""
        rows, step = self.mixed.rows, self.mixed.step
        tokens = round_up(self.decode.tokens, rows)
        return replace(self, decode=ShapeBucket(tokens, rows, self.mixed.tile, round_up(tokens, step), step, 0))


def compiled_shapes(
    *,
    lanes: int,
    page_size: int,
    pages: tuple[int, ...],
    windows: tuple[int | None, ...],
    max_context: int,
    step_tokens: int,
    drafts: int,
    checkpoints: int,
    rows: int | None = None,
) -> CompiledShapes:
    """The compiled shapes for these sizes. `rows`: the fixed number of rows of every matrix product; None: a number between
    MIN_PRODUCT_ROWS and MAX_PRODUCT_ROWS for each shape."""
    few = next((n for n in (MIN_PRODUCT_ROWS, 8, 16, MAX_PRODUCT_ROWS) if n >= lanes), MAX_PRODUCT_ROWS)
    height = rows or few
    tokens = round_up(lanes, height)
    step = min(TILES, tokens)
    most = rows or MAX_PRODUCT_ROWS
    mixed = round_up(max(step_tokens, lanes, 2 * CHUNK) + CHUNK, most)  # at least the tokens that the self-check needs
    shape = CompiledShapes(
        lanes=lanes,
        page_size=page_size,
        pages=pages,
        windows=windows,
        max_context=max_context,
        drafts=drafts,
        checkpoints=checkpoints,
        decode=ShapeBucket(tokens, height, 1, round_up(tokens, step), step, 0),
        mixed=ShapeBucket(mixed, most, TILE, round_up(mixed // TILE + lanes + drafts, TILES), TILES, drafts),
    )
    return shape if rows is None else shape.uniform


def product_rows(platform: str, dtype: str) -> int | None:
    """The fixed number of rows of every matrix product on a jax platform; None only for float32 on a CPU."""
    rows = ROW_TILE.get(platform, 64)
    return rows if dtype == "f32" else rows or MAX_PRODUCT_ROWS


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


# ---------------------------------------------------------------------- a plan as index arrays


Ints = npt.NDArray[np.int32]
NOWHERE = np.iinfo(np.int32).max // 2  # a position beyond the end of every sequence


@dataclass(frozen=True, slots=True)
class XlaInputs:
    """The index arrays of one step: `arrays` for all layers, `delta` for recurrent layers, `drafts` for the commit."""

    bucket: ShapeBucket
    firsts: tuple[int, ...]  # index of each row's first token
    arrays: dict[str, Any]
    delta: dict[str, Any]
    drafts: dict[str, Any]
    branches: bool  # whether some row has a draft tree


@dataclass(frozen=True, slots=True)
class RowLayout:
    """A row and its tokens in the step, which are [first, first + known + drafts)."""

    row: Row
    number: int  # index of the row in the plan
    first: int  # index of its first token in the step
    draft_paths: tuple[tuple[int, ...], ...]  # drafts on the path to the last known token (none), then to each draft

    @property
    def known(self) -> int:
        return len(self.row.tokens)

    @property
    def count(self) -> int:
        return self.known + len(self.row.drafts)

    @property
    def branches(self) -> bool:
        return any(draft.parent != index - 1 for index, draft in enumerate(self.row.drafts))


def make_inputs(rows: Sequence[Row], shape: CompiledShapes, *, conv: int = 0, bucket: ShapeBucket | None = None) -> XlaInputs:
    """The inputs of a step with these rows. `conv`: positions that the convolution of a recurrent layer reads; 0 without such
    layers. `bucket`: the compiled shape; None: the smallest in which the rows fit."""
    single = all(len(row.tokens) <= 1 and not row.drafts and not row.scores_prompt for row in rows)
    bucket = bucket or (shape.decode if single else shape.mixed)
    layouts, first = [], 0
    for number, row in enumerate(rows):
        layouts.append(RowLayout(row, number, first, draft_paths(row.drafts)))
        first += layouts[-1].count
    if first > bucket.tokens:
        raise AssertionError(f"a step of {first} tokens does not fit the compiled shape of {bucket.tokens}")
    tables = _tables(rows, shape)
    arrays = _tokens(layouts, bucket, shape, tables) | _tiles(layouts, bucket, shape)
    arrays["tables"] = tables
    return XlaInputs(
        bucket=bucket,
        firsts=tuple(layout.first for layout in layouts),
        arrays=arrays,
        delta=_recurrent_inputs(layouts, bucket, shape, conv) if conv else {},
        drafts=_drafts(layouts, shape, tables),
        branches=any(layout.branches for layout in layouts),
    )


def _full(shape: int | tuple[int, ...], value: int = 0) -> Ints:
    return np.full(shape, value, dtype=np.int32)


def _tables(rows: Sequence[Row], shape: CompiledShapes) -> Ints:
    """Page tables [groups, lanes + 1, pages]: one per row of the plan, the others for padding. Entries after a row's last page,
    and of freed pages, are the padding page."""
    tables = _full((len(shape.pages), shape.lanes + 1, shape.table))
    for group, scratch in enumerate(shape.pages):
        tables[group] = scratch
        for number, row in enumerate(rows):
            pages = np.asarray(row.pages[group], dtype=np.int32)
            tables[group, number, : len(pages)] = np.where(pages < 0, scratch, pages)
    return tables


def _places(tables: Ints, rows: Ints, slots: Ints, page_size: int) -> Ints:
    """The places of slots [n] of rows [n] in each group: [groups, n]."""
    found: Ints = tables[:, rows, slots // page_size] * page_size + slots % page_size
    return found


def _tokens(layouts: Sequence[RowLayout], bucket: ShapeBucket, shape: CompiledShapes, tables: Ints) -> dict[str, Any]:
    """Index arrays of tokens. `pieces`: how many pieces of `bucket.rows` tokens, the rows of a matrix product, are not all
    padding."""
    tokens, positions, slots = (_full(bucket.tokens) for _ in range(3))
    rows = _full(bucket.tokens, shape.lanes)
    slots[:] = np.arange(bucket.tokens) % shape.page_size
    for layout in layouts:
        row, here = layout.row, slice(layout.first, layout.first + layout.count)
        tokens[here] = [*row.tokens, *(draft.token for draft in row.drafts)]
        rows[here] = layout.number
        slots[here] = np.arange(row.start, row.start + layout.count)
        positions[here] = slots[here]
        for index, path in enumerate(layout.draft_paths[1:]):
            positions[layout.first + layout.known + index] = row.stop + len(path) - 1
    count = sum(layout.count for layout in layouts)
    return {
        "tokens": tokens,
        "positions": positions,
        "places": _places(tables, rows, slots, shape.page_size),
        "pieces": np.int32(-(-max(count, 1) // bucket.rows)),
    }


def _tiles(layouts: Sequence[RowLayout], bucket: ShapeBucket, shape: CompiledShapes) -> dict[str, Any]:
    """Index arrays of attention tiles. A tile is consecutive queries of one row; a node of a draft tree is a tile by itself,
    which attends to positions before its `tile_tails`, then to the drafts in its `tile_paths`."""
    rows, tails = _full(bucket.tiles, shape.lanes), _full(bucket.tiles, NOWHERE)
    queries = _full((bucket.tiles, bucket.tile), bucket.tokens - 1)
    paths = _full((bucket.tiles, max(bucket.drafts, 1)))
    slots = _full(bucket.tokens)
    lows, highs = _full((len(shape.windows), bucket.tiles), NOWHERE), _full(bucket.tiles, -1)
    number = 0
    for layout in layouts:
        plain = layout.known if layout.branches else layout.count
        cuts = [(start, min(bucket.tile, plain - start)) for start in range(0, plain, bucket.tile)]
        for start, count in [*cuts, *((index, 1) for index in range(plain, layout.count))]:
            place = np.minimum(np.arange(bucket.tile), count - 1) + layout.first + start
            rows[number], queries[number] = layout.number, place
            slots[layout.first + start : layout.first + start + count] = number * bucket.tile + np.arange(count)
            low, high = layout.row.start + start, layout.row.start + start + count - 1
            if start >= plain:
                path = layout.draft_paths[1 + start - layout.known]
                tails[number], paths[number, : len(path)] = layout.row.stop, path
                low = high = layout.row.stop + len(path) - 1
            highs[number] = high
            for group, window in enumerate(shape.windows):
                lows[group, number] = 0 if window is None else max(low - window + 1, 0)
            number += 1
    steps = bucket.tiles // bucket.step
    return {
        "tile_rows": rows,
        "tile_queries": queries,
        "tile_tails": tails,
        "tile_paths": paths,
        "token_slots": slots,
        "tile_steps": np.int32(-(-number // bucket.step)),
        "first_blocks": lows.reshape(len(shape.windows), steps, bucket.step).min(2) // KEYS,
        "last_blocks": highs.reshape(steps, bucket.step).max(1) // KEYS + 1,
    }


def _drafts(layouts: Sequence[RowLayout], shape: CompiledShapes, tables: Ints) -> dict[str, Any]:
    """The drafts of all rows, in order: tokens, parents and picks for verification, and the places between which the commit moves
    keys and values."""
    most = max(shape.drafts, 1)
    tokens, parents, picks, rows = _full(most), _full(most, -1), _full(most), _full(most, shape.lanes)
    lanes, sources, targets = _full(most, shape.lanes), _full(most), _full(most)
    number = pick = 0
    for layout in layouts:
        for index, draft in enumerate(layout.row.drafts):
            here = number + index
            tokens[here], rows[here], lanes[here] = draft.token, layout.number, layout.row.lane
            parents[here] = -1 if draft.parent < 0 else number + draft.parent
            picks[here] = pick + 1 + draft.parent
            sources[here] = layout.row.stop + index
            targets[here] = layout.row.stop + len(layout.draft_paths[1 + index]) - 1
        number += len(layout.row.drafts)
        pick += (1 + len(layout.row.drafts)) * layout.row.samples
    return {
        "count": np.int32(number),
        "tokens": tokens,
        "parents": parents,
        "picks": picks,
        "rows": rows,
        "lanes": lanes,
        "sources": _places(tables, rows, sources, shape.page_size),
        "targets": _places(tables, rows, targets, shape.page_size),
    }


def _recurrent_inputs(layouts: Sequence[RowLayout], bucket: ShapeBucket, shape: CompiledShapes, conv: int) -> dict[str, Any]:
    """Work lists of recurrent layers: prompt chunks, then single generated positions ("steps"), then drafts ("nodes"), each of
    which starts from its parent's state (`goes_on`: the parent is the preceding draft). `taps` are the convolution's inputs, as
    indices of [tokens of the step, conv - 1 window rows per lane, one row of zeros].
    """
    before, total = conv - 1, bucket.tokens
    zeros = total + (shape.lanes + 1) * before
    taps = _full((total, conv), zeros)
    closings, closing_lanes = _full((shape.lanes, before), zeros), _full(shape.lanes, shape.lanes)
    chunks = {name: _full(bucket.chunks, fill) for name, fill in _chunk_fields(shape)}
    kept = _full((bucket.chunks, before), zeros)
    steps = {"token": _full(total), "lane": _full(total, shape.lanes), "fresh": _full(total)}
    most = max(bucket.drafts, 1)
    nodes = {"token": _full(most), "lane": _full(most, shape.lanes), "goes_on": _full(most), "depth": _full(most)}
    paths = _full((most, most))
    counts = {"chunks": 0, "steps": 0, "nodes": 0}
    for layout in layouts:
        if not layout.count:
            continue
        row, lane, prompt = layout.row, layout.row.lane, _prompt_tokens(layout)
        fresh = row.start == 0
        opening = [zeros] * before if fresh else [total + lane * before + i for i in range(before)]
        line = np.asarray([*opening, *range(layout.first, layout.first + layout.known)], dtype=np.int32)
        taps[layout.first : layout.first + layout.known] = np.lib.stride_tricks.sliding_window_view(line, conv)
        for index, path in enumerate(layout.draft_paths[1:]):
            node = layout.first + layout.known
            taps[node + index] = [*line[len(line) - before :], *(node + i for i in path)][-conv:]
        closings[layout.number], closing_lanes[layout.number] = line[len(line) - before :], lane
        saves = {save.position - row.start: save.slot for save in row.saves}
        for start in range(0, prompt, CHUNK):
            stop, here = min(start + CHUNK, prompt), counts["chunks"]
            values = (layout.first + start, stop - start, lane, fresh and start == 0, saves.get(stop, shape.checkpoints))
            for (name, _), value in zip(_chunk_fields(shape), values, strict=True):
                chunks[name][here] = value
            kept[here] = line[stop : stop + before]
            counts["chunks"] += 1
        for index in range(prompt, layout.known):
            here = counts["steps"]
            steps["token"][here], steps["lane"][here], steps["fresh"][here] = layout.first + index, lane, fresh and index == 0
            counts["steps"] += 1
        first = counts["nodes"]
        for index, draft in enumerate(row.drafts):
            path = layout.draft_paths[1 + draft.parent]
            here = counts["nodes"]
            nodes["token"][here], nodes["lane"][here] = layout.first + layout.known + index, lane
            nodes["goes_on"][here], nodes["depth"][here] = index > 0 and draft.parent == index - 1, len(path)
            paths[here, : len(path)] = [first + i for i in path]
            counts["nodes"] += 1
    return {
        "taps": taps,
        "closings": closings,
        "closing_lanes": closing_lanes,
        "kept": kept,
        **{f"chunk_{name}": value for name, value in chunks.items()},
        **{f"step_{name}": value for name, value in steps.items()},
        **{f"node_{name}": value for name, value in nodes.items()},
        "node_path": paths,
        **{name: np.int32(count) for name, count in counts.items()},
    }


def _chunk_fields(shape: CompiledShapes) -> tuple[tuple[str, int], ...]:
    return ("first", 0), ("count", 0), ("lane", shape.lanes), ("fresh", 0), ("slot", shape.checkpoints)


def _prompt_tokens(layout: RowLayout) -> int:
    """The number of a row's known tokens that use the chunked form. Chunks must start at absolute multiples of CHUNK."""
    row = layout.row
    prompt = min(max(row.prompt_stop - row.start, 0), layout.known)
    if prompt and row.start % CHUNK:
        raise AssertionError(f"a prompt row starts at {row.start}, which is not a multiple of {CHUNK}")
    if prompt == layout.known and row.stop < row.prompt_stop and row.stop % CHUNK:
        raise AssertionError(f"a prompt row stops at {row.stop}, inside a chunk")
    return prompt


def conv_width(spec: ModelSpec) -> int:
    """The number of positions that the convolution of a recurrent layer reads. It is the same in all layers, and 0 without
    recurrent layers."""
    return next((layer.mixer.conv for layer in spec.layers if isinstance(layer.mixer, DeltaSpec)), 0)
