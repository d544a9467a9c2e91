"""How a packed product of few rows, or one of experts, is shared out among the multiprocessors of a GPU. Pure arithmetic.

In: the size of a product, and what the device has. Out: a `Share`, or a `GroupShare` for experts, which the kernels are
compiled for and launched with. An item is sixteen outputs by a segment of inputs; a block of threads works on one multiprocessor.
Nothing here can change a bit of a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from onedraw.backends.packing import SEGMENT, SPAN, UNIT_ROWS

TILE_ROWS = 8  # rows that one step of the matrix unit takes
TILES = (1, 2, 3, 4, 6, 8)  # tiles of rows that a kernel is compiled for
INSIDE_WARPS = {1: 16, 2: 16}  # of a block, at most, by tiles: where blocks have all segments of their outputs
# Registers of a thread there, at most (0: any). What sixteen warps leave of a multiprocessor's, 8,192 where they have 112, a
# small kernel may have beside a product: a norm or a gate neither waits for a block to end nor keeps the next one from coming.
INSIDE_REGISTERS = {1: 112, 2: 0}
APART_WARPS = {1: 16, 2: 16, 3: 16, 4: 16, 6: 8, 8: 8}  # where they have not
# Blocks have all segments of their outputs where rows, of which each block needs all inputs, are few beside the weights: whole
# units where blocks then have about as many as each other, else items of units that two blocks may share. Measured on an H200
# with cold weights (bench/gpu_rows.py time --all-forms).
BUSY = 0.9
MOST_ITEMS = 1 << 21  # that the kernel can tell apart by units, where blocks have all segments
FEW_ROWS = 4
TALL_ENOUGH = {1: 16, 2: 64}  # units of a block, by tiles, for more rows
ALIGNED = 0.97  # of them, where each then has rows of one segment only


@dataclass(frozen=True, slots=True)
class Share:
    tiles: int
    inside: bool  # a block has all segments of its outputs, but for units that two blocks share
    warps: int  # that the kernel is compiled for
    threads: int
    blocks: int
    granule: int  # items that no two blocks share, where inside: all of a unit, or one
    barriers: int  # where in shared memory rows are waited for, where inside
    buffers: int  # segments of rows that lie in shared memory at once
    shared: int  # bytes of shared memory
    sums: int  # numbers of a unit that wait in memory, where not inside

    @property
    def defines(self) -> dict[str, int]:
        return defines_of(self.tiles, self.inside)


def defines_of(tiles: int, inside: bool) -> dict[str, int]:
    """What the kernel of a share is compiled for, beside the weight's kind."""
    warps, registers = (INSIDE_WARPS[tiles], INSIDE_REGISTERS[tiles]) if inside else (APART_WARPS[tiles], 0)
    return {"TILES": tiles, "WARPS": warps, "INSIDE": int(inside), "REGISTERS": registers}


def buffer_bytes(rows: int, tiles: int) -> int:
    """A segment of rows and a row of zeros: numbers, sums, what brings eight rows into different banks, powers of two."""
    return (rows + 1) * (SEGMENT * (2 * SPAN + 32) + 16) + tiles * TILE_ROWS * 4


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
    height = -(-tall // multiprocessors)  # units of a block, or one less
    if tiles in INSIDE_WARPS and tall * segments < MOST_ITEMS and (_pays(rows, tiles, height) if inside is None else inside):
        blocks = min(multiprocessors, tall)
        whole = tall >= BUSY * height * multiprocessors or tall < multiprocessors
        granule = segments if whole else 1
        items = -(-tall * segments // (blocks * granule)) * granule  # of a block, or a granule less
        warps = min(items, INSIDE_WARPS[tiles])
        waiting = items + 1  # sums of items, and what a block takes over from the one before
        if whole:  # sums of a warp's own unit, and then of items that are spread over all
            waiting = max(warps, *(units % warps * segments for units in (tall // blocks, height)))
        barriers = segments * buffer + waiting * tiles * TILE_ROWS * UNIT_ROWS * 4
        if (needed := barriers + 8 * (segments + 1)) <= shared:
            return Share(tiles, True, INSIDE_WARPS[tiles], 32 * warps, blocks, granule, barriers, segments, needed, sums=0)
    aligned = multiprocessors // segments * segments
    blocks = min(aligned if aligned >= ALIGNED * multiprocessors else multiprocessors, tall * segments)
    buffers = min(2, segments, shared // buffer)
    threads = 32 * min(-(-tall * segments // blocks), APART_WARPS[tiles])
    sums = segments * tiles * TILE_ROWS * UNIT_ROWS
    return Share(tiles, False, APART_WARPS[tiles], threads, blocks, 1, 0, buffers, buffers * buffer, sums)


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


def _pays(rows: int, tiles: int, height: int) -> bool:
    return rows <= FEW_ROWS or height >= TALL_ENOUGH[tiles]


# ------------------------------------------------------------------ experts

GROUP_WARPS = 8  # of a block
GROUP_BLOCKS = {1: 2, 2: 2, 4: 2, 8: 1}  # that a multiprocessor shall have registers for, by tiles of rows
# Tiles of rows by how many pairs an expert has on average: not many more than are there, since what a tile lacks is computed too.
GROUP_PAIRS = {1: 4, 2: 12, 4: 48}
MOST_SIDES = 4  # warps that share sixteen outputs
RESERVED = 2 << 10  # bytes of shared memory of every block that are not rows and sums: the kernel's own, and the driver's


@dataclass(frozen=True, slots=True)
class GroupShare:
    sides: int  # warps that share sixteen outputs, a segment each
    threads: int
    across: int  # blocks beside each other that have all outputs of a tile of rows
    shared: int  # bytes of shared memory


def group_fits(tiles: int, shared: int) -> bool:
    """Whether a block has room for so many tiles of rows."""
    return buffer_bytes(tiles * TILE_ROWS, tiles) + RESERVED <= shared


def group_tiles(pairs: int, count: int, *, shared: int) -> int:
    """Tiles of eight rows that a block takes at once, where so many pairs go to so many experts."""
    wanted = next((tiles for tiles, most in GROUP_PAIRS.items() if pairs <= most * count), max(GROUP_BLOCKS))
    return max(tiles for tiles in GROUP_BLOCKS if tiles <= wanted and group_fits(tiles, shared))


def group_borders(count: int, *, shared: int) -> tuple[int, ...]:
    """Pairs up to which tiles of rows are lower than behind them."""
    edges = [most * count for most in GROUP_PAIRS.values()]
    return tuple(n for n in edges if group_tiles(n, count, shared=shared) != group_tiles(n + 1, count, shared=shared))


@lru_cache(maxsize=4096)
def share_group(rows: int, tiles: int, tall: int, segments: int, *, shared: int) -> GroupShare:
    """For tiles of up to `rows` rows. Sides need room for a segment each, and leave some to other blocks beside this one."""
    buffer, room = buffer_bytes(rows, tiles), shared // GROUP_BLOCKS[tiles] - RESERVED
    sides = 1
    while sides < min(MOST_SIDES, segments) and _group_bytes(2 * sides, buffer, tiles) <= room:
        sides *= 2
    units = min(GROUP_WARPS // sides, tall)
    return GroupShare(sides, 32 * units * sides, -(-tall // units), _group_bytes(sides, buffer, tiles))


def _group_bytes(sides: int, buffer: int, tiles: int) -> int:
    """Rows of a segment for every side, and sums of all sides but the first."""
    return sides * buffer + GROUP_WARPS // sides * (sides - 1) * tiles * TILE_ROWS * 16 * 4
