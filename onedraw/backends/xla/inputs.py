"""A ragged plan → the index arrays of one bucket. Padding is private to this file.

In: rows of a plan, CompiledShapes. Out: XlaInputs: numpy arrays of the bucket's fixed shapes, and how much of each is real. They
cross to the device once per turn.

A token has a position and a place: where its key and value lie, counted in slots through all pages of a group. The nodes of
a draft tree have slots behind the row's known tokens in order of the drafts, and each reads the slots of its own path.
Rows, lanes, pages and checkpoints have one more than the engine knows: nobody's, for padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from onedraw.sampling.verify import draft_paths
from onedraw.types import Row

# -------------------- The fixed shapes that turns are compiled for. Pure arithmetic.


MIN_PRODUCT_ROWS = 4  # of a product: with fewer, libraries take other ways through it
MAX_PRODUCT_ROWS = 32  # of a product at once; with more, the order along the reduced axis was seen to change
KEYS = 128  # positions of a block of keys, on absolute multiples
TILE = 16  # queries of a tile in a mixed turn
TILES = 8  # tiles computed at once
CHUNK = 64  # prompt positions that a recurrent layer takes at once
ROW_TILE = {"cpu": None, "gpu": 64, "tpu": 64}  # rows of every product on a platform of jax; None: as few as there are


@dataclass(frozen=True, slots=True)
class ShapeBucket:
    """The shape of one compiled turn."""

    tokens: int
    rows: int  # of a product at once
    tile: int  # queries of a tile
    tiles: int
    step: int  # tiles computed at once
    drafts: int

    @property
    def chunks(self) -> int:
        """Most chunks of prompts in a turn: every row may begin one that it does not fill."""
        return self.tokens // CHUNK + self.tiles


@dataclass(frozen=True, slots=True)
class CompiledShapes:
    """What all turns of a backend have in common."""

    lanes: int
    page_size: int
    pages: tuple[int, ...]  # per group; the page behind the last is nobody's: padding writes there
    windows: tuple[int | None, ...]
    max_context: int
    drafts: int  # of a turn, all rows together
    checkpoints: int
    decode: ShapeBucket
    mixed: ShapeBucket

    @property
    def table(self) -> int:
        """Pages of one row, up to a whole block of keys behind the longest draft."""
        return round_up(self.max_context + self.drafts + 1, KEYS) // self.page_size

    @property
    def slab(self) -> int:
        """Positions that are chosen at in one program."""
        return MIN_PRODUCT_ROWS if self.lanes <= MIN_PRODUCT_ROWS else 8

    @property
    def picks(self) -> int:
        """Positions of a turn at which a token may be chosen."""
        return round_up(self.lanes + self.drafts, self.slab)

    @property
    def uniform(self) -> CompiledShapes:
        """The same with products and tiles of one height in both buckets: for libraries whose bits follow the rows."""
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
    turn_tokens: int,
    drafts: int,
    checkpoints: int,
    rows: int | None = None,
) -> CompiledShapes:
    """`rows`: every product has exactly so many rows, every tile the same height; None: MIN_PRODUCT_ROWS to MAX_PRODUCT_ROWS."""
    few = next((n for n in (MIN_PRODUCT_ROWS, 8, 16, MAX_PRODUCT_ROWS) if n >= lanes), MAX_PRODUCT_ROWS)
    height = rows or few
    tokens = round_up(lanes, height)
    step = min(TILES, tokens)
    most = rows or MAX_PRODUCT_ROWS
    mixed = round_up(max(turn_tokens, lanes, 2 * CHUNK) + CHUNK, most)  # the self-check's prompts fit, however few are asked for
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
    """Rows of every product on a platform of jax; None: MIN_PRODUCT_ROWS to MAX_PRODUCT_ROWS, which float32 on a CPU allows."""
    rows = ROW_TILE.get(platform, 64)
    return rows if dtype == "f32" else rows or MAX_PRODUCT_ROWS


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


# -------------------- A ragged plan → the index arrays of one bucket. Padding is private to this file.


Ints = npt.NDArray[np.int32]
NOWHERE = np.iinfo(np.int32).max // 2  # a position that no key has
ZERO = -1  # a tap before the sequence's beginning


@dataclass(frozen=True, slots=True)
class XlaInputs:
    """One turn. `arrays` go to the layers, `delta` to recurrent layers, `drafts` to the commit."""

    bucket: ShapeBucket
    firsts: tuple[int, ...]  # the first token of each row
    arrays: dict[str, Any]
    delta: dict[str, Any]
    drafts: dict[str, Any]
    branches: bool  # some row carries a tree


@dataclass(frozen=True, slots=True)
class RowLayout:
    """A row in its turn: tokens [first, first + known + drafts)."""

    row: Row
    number: int
    first: int
    draft_paths: tuple[tuple[int, ...], ...]

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
    """`conv`: positions that recurrent layers' convolutions read; 0: there are no such layers. `bucket` None: the smallest."""
    single = all(len(row.tokens) <= 1 and not row.drafts and not row.scores_prompt for row in rows)
    bucket = bucket or (shape.decode if single else shape.mixed)
    laid, first = [], 0
    for number, row in enumerate(rows):
        laid.append(RowLayout(row, number, first, draft_paths(row.drafts)))
        first += laid[-1].count
    if first > bucket.tokens:
        raise AssertionError(f"a turn of {first} tokens meets a bucket of {bucket.tokens}")
    tables = _tables(rows, shape)
    arrays = _tokens(laid, bucket, shape, tables) | _tiles(laid, bucket, shape)
    arrays["tables"] = tables
    return XlaInputs(
        bucket=bucket,
        firsts=tuple(one.first for one in laid),
        arrays=arrays,
        delta=_runs(laid, bucket, shape, conv) if conv else {},
        drafts=_drafts(laid, shape, tables),
        branches=any(one.branches for one in laid),
    )


def _full(shape: int | tuple[int, ...], value: int = 0) -> Ints:
    return np.full(shape, value, dtype=np.int32)


def _tables(rows: Sequence[Row], shape: CompiledShapes) -> Ints:
    """[groups, rows + 1, pages]; nobody's page past a row's end and where one was let go."""
    tables = _full((len(shape.pages), shape.lanes + 1, shape.table))
    for group, scratch in enumerate(shape.pages):
        tables[group] = scratch
        for number, row in enumerate(rows):
            held = np.asarray(row.pages[group], dtype=np.int32)
            tables[group, number, : len(held)] = np.where(held < 0, scratch, held)
    return tables


def _places(tables: Ints, rows: Ints, slots: Ints, page_size: int) -> Ints:
    """[groups, n] where slots of rows lie."""
    found: Ints = tables[:, rows, slots // page_size] * page_size + slots % page_size
    return found


def _tokens(laid: Sequence[RowLayout], bucket: ShapeBucket, shape: CompiledShapes, tables: Ints) -> dict[str, Any]:
    tokens, positions, slots = (_full(bucket.tokens) for _ in range(3))
    rows = _full(bucket.tokens, shape.lanes)
    slots[:] = np.arange(bucket.tokens) % shape.page_size
    for one in laid:
        row, here = one.row, slice(one.first, one.first + one.count)
        tokens[here] = [*row.tokens, *(draft.token for draft in row.drafts)]
        rows[here] = one.number
        slots[here] = np.arange(row.start, row.start + one.count)
        positions[here] = slots[here]
        for index, path in enumerate(one.draft_paths[1:]):
            positions[one.first + one.known + index] = row.stop + len(path) - 1
    count = sum(one.count for one in laid)
    return {
        "tokens": tokens,
        "positions": positions,
        "places": _places(tables, rows, slots, shape.page_size),
        "pieces": np.int32(-(-max(count, 1) // bucket.rows)),
    }


def _tiles(laid: Sequence[RowLayout], bucket: ShapeBucket, shape: CompiledShapes) -> dict[str, Any]:
    """Neighbouring queries of one row in tiles; a node of a tree is a tile by itself."""
    rows, tails = _full(bucket.tiles, shape.lanes), _full(bucket.tiles, NOWHERE)
    queries = _full((bucket.tiles, bucket.tile), bucket.tokens - 1)
    paths = _full((bucket.tiles, max(bucket.drafts, 1)))
    slots = _full(bucket.tokens)
    lows, highs = _full((len(shape.windows), bucket.tiles), NOWHERE), _full(bucket.tiles, -1)
    number = 0
    for one in laid:
        plain = one.known if one.branches else one.count
        cuts = [(start, min(bucket.tile, plain - start)) for start in range(0, plain, bucket.tile)]
        for start, count in [*cuts, *((index, 1) for index in range(plain, one.count))]:
            place = np.minimum(np.arange(bucket.tile), count - 1) + one.first + start
            rows[number], queries[number] = one.number, place
            slots[one.first + start : one.first + start + count] = number * bucket.tile + np.arange(count)
            low, high = one.row.start + start, one.row.start + start + count - 1
            if start >= plain:
                path = one.draft_paths[1 + start - one.known]
                tails[number], paths[number, : len(path)] = one.row.stop, path
                low = high = one.row.stop + len(path) - 1
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


def _drafts(laid: Sequence[RowLayout], shape: CompiledShapes, tables: Ints) -> dict[str, Any]:
    """Drafts of all rows in order: what verification compares, and where a kept one goes."""
    most = max(shape.drafts, 1)
    tokens, parents, picks, rows = _full(most), _full(most, -1), _full(most), _full(most, shape.lanes)
    lanes, sources, targets = _full(most, shape.lanes), _full(most), _full(most)
    number = pick = 0
    for one in laid:
        for index, draft in enumerate(one.row.drafts):
            here = number + index
            tokens[here], rows[here], lanes[here] = draft.token, one.number, one.row.lane
            parents[here] = -1 if draft.parent < 0 else number + draft.parent
            picks[here] = pick + 1 + draft.parent
            sources[here] = one.row.stop + index
            targets[here] = one.row.stop + len(one.draft_paths[1 + index]) - 1
        number += len(one.row.drafts)
        pick += (1 + len(one.row.drafts)) * one.row.samples
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


def _runs(laid: Sequence[RowLayout], bucket: ShapeBucket, shape: CompiledShapes, conv: int) -> dict[str, Any]:
    """What recurrent layers do: chunks of prompts, then single steps, then drafts, each from its parent's state.

    Taps are rows of [the turn's tokens, conv - 1 window rows per lane, zeros].
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
    for one in laid:
        if not one.count:
            continue
        row, lane, prompt = one.row, one.row.lane, _prompt(one)
        fresh = row.start == 0
        opening = [zeros] * before if fresh else [total + lane * before + i for i in range(before)]
        line = np.asarray([*opening, *range(one.first, one.first + one.known)], dtype=np.int32)
        taps[one.first : one.first + one.known] = np.lib.stride_tricks.sliding_window_view(line, conv)
        for index, path in enumerate(one.draft_paths[1:]):
            node = one.first + one.known
            taps[node + index] = [*line[len(line) - before :], *(node + i for i in path)][-conv:]
        closings[one.number], closing_lanes[one.number] = line[len(line) - before :], lane
        saves = {save.position - row.start: save.slot for save in row.saves}
        for start in range(0, prompt, CHUNK):
            stop, here = min(start + CHUNK, prompt), counts["chunks"]
            values = (one.first + start, stop - start, lane, fresh and start == 0, saves.get(stop, shape.checkpoints))
            for (name, _), value in zip(_chunk_fields(shape), values, strict=True):
                chunks[name][here] = value
            kept[here] = line[stop : stop + before]
            counts["chunks"] += 1
        for index in range(prompt, one.known):
            here = counts["steps"]
            steps["token"][here], steps["lane"][here], steps["fresh"][here] = one.first + index, lane, fresh and index == 0
            counts["steps"] += 1
        first = counts["nodes"]
        for index, draft in enumerate(row.drafts):
            path = one.draft_paths[1 + draft.parent]
            here = counts["nodes"]
            nodes["token"][here], nodes["lane"][here] = one.first + one.known + index, lane
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


def _prompt(one: RowLayout) -> int:
    """How many of a row's known tokens are in the chunked form; a chunk off the grid is refused."""
    row = one.row
    prompt = min(max(row.prompt_stop - row.start, 0), one.known)
    if prompt and row.start % CHUNK:
        raise AssertionError(f"a prompt row starts at {row.start}, which is no multiple of {CHUNK}")
    if prompt == one.known and row.stop < row.prompt_stop and row.stop % CHUNK:
        raise AssertionError(f"a prompt row stops at {row.stop}, inside a chunk")
    return prompt
