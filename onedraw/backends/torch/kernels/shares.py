"""How a packed product of few rows is shared out among the multiprocessors of a GPU. Pure arithmetic.

In: the size of a product, and what the device has. Out: a `Share`, which `packed_rows.cu` is compiled for and launched with. An
item is sixteen outputs by a segment of inputs; a block of threads works on one multiprocessor. Nothing here can change a bit of
a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from onedraw.backends.packing import SEGMENT, SPAN

TILE_ROWS = 8  # rows that one step of the matrix unit takes
TILES = (1, 2, 3, 4, 6, 8)  # tiles of rows that a kernel is compiled for
INSIDE_WARPS = {1: 20, 2: 16}  # of a block, at most, by tiles: where blocks have all segments of their outputs
APART_WARPS = {1: 16, 2: 16, 3: 16, 4: 16, 6: 8, 8: 8}  # where they have not
# Blocks have all segments of their outputs where that leaves few multiprocessors idle, and where rows, of which each block then
# needs all inputs, are few beside the weights. Measured on an H200 with cold weights (bench/gpu_rows.py time --all-forms).
BUSY = 0.9
FEW_ROWS = 4
TALL_ENOUGH = {1: 16, 2: 64}  # units of a block, by tiles, for more rows
LEAST_STEP = 6  # units of a block whose sums must have room at once, so that its warps seldom wait for each other
ALIGNED = 0.97  # of them, where each then has rows of one segment only


@dataclass(frozen=True, slots=True)
class Share:
    tiles: int
    inside: bool  # a block has all segments of its outputs
    warps: int  # that the kernel is compiled for
    threads: int
    blocks: int
    height: int  # units of sixteen outputs of a block, where inside
    step: int  # of them, those whose sums there is room for at once
    buffers: int  # segments of rows that lie in shared memory at once
    shared: int  # bytes of shared memory

    @property
    def defines(self) -> dict[str, int]:
        return {"TILES": self.tiles, "WARPS": self.warps, "INSIDE": int(self.inside)}


def buffer_bytes(rows: int, tiles: int) -> int:
    """A segment of rows and a row of zeros: numbers, sums, what brings eight rows into different banks, powers of two."""
    return (rows + 1) * (SEGMENT * (2 * SPAN + 32) + 16) + tiles * TILE_ROWS * SEGMENT * 4


def rows_at_once(rows: int, shared: int) -> int:
    """So many rows, or as many as there is shared memory for."""
    return next(count for count in (rows, 48, 32, 24, 16, 8) if count <= rows and buffer_bytes(count, tiles_of(count)) <= shared)


def tiles_of(rows: int) -> int:
    return next(tiles for tiles in TILES if tiles * TILE_ROWS >= rows)


@lru_cache(maxsize=4096)
def share_out(rows: int, tall: int, segments: int, *, multiprocessors: int, shared: int, inside: bool | None = None) -> Share:
    """For rows that fit at once. `inside` is for measuring: what to do where both ways are open."""
    tiles = tiles_of(rows)
    buffer = buffer_bytes(rows, tiles)
    height = -(-tall // multiprocessors)
    sums = segments * tiles * TILE_ROWS * 16 * 4  # bytes of a unit's
    room = max(0, shared - segments * buffer) // sums
    fits = tiles in INSIDE_WARPS and room >= min(height, LEAST_STEP)
    if fits and (_pays(rows, tiles, tall, height, multiprocessors) if inside is None else inside):
        step = -(-height // -(-height // room))  # equal steps
        threads = 32 * min(step * segments, INSIDE_WARPS[tiles])
        needed = segments * buffer + step * sums
        return Share(tiles, True, INSIDE_WARPS[tiles], threads, -(-tall // height), height, step, segments, needed)
    aligned = multiprocessors // segments * segments
    blocks = min(aligned if aligned >= ALIGNED * multiprocessors else multiprocessors, tall * segments)
    buffers = min(2, segments, shared // buffer)
    threads = 32 * min(-(-tall * segments // blocks), APART_WARPS[tiles])
    return Share(tiles, False, APART_WARPS[tiles], threads, blocks, 0, 0, buffers, buffers * buffer)


def share_borders(tall: int, segments: int, *, multiprocessors: int, shared: int, most: int) -> tuple[int, ...]:
    """Row counts, up to `most`, from which on a product is compiled otherwise, shared out otherwise, or made in two."""

    def way(rows: int) -> tuple[int, int, bool]:
        at_once = rows_at_once(rows, shared)
        share = share_out.__wrapped__(at_once, tall, segments, multiprocessors=multiprocessors, shared=shared)
        return rows > at_once, share.tiles, share.inside

    ways = [way(rows) for rows in range(1, most + 1)]
    return tuple(rows for rows, (before, here) in enumerate(pairwise(ways), start=2) if before != here)


def slabs_of(tall: int, most: int) -> list[slice]:
    """Units of outputs in slabs of at most so many, all of about one height."""
    assert most > 0, "no room for the sums of sixteen outputs"
    count = -(-tall // most)
    height = -(-tall // count)
    return [slice(start, min(start + height, tall)) for start in range(0, tall, height)]


def _pays(rows: int, tiles: int, tall: int, height: int, multiprocessors: int) -> bool:
    few = rows <= FEW_ROWS or height >= TALL_ENOUGH[tiles]
    return few and (tall >= BUSY * height * multiprocessors or tall < multiprocessors)
