"""Splits a packed product of few rows, or a product of experts, among the multiprocessors of a GPU. Pure arithmetic.

In: the size of a product and the limits of a device. Out: a `WorkSplit`, or an `ExpertWorkSplit`: compile-time constants and the
launch configuration of the kernels. A work item is a unit of sixteen outputs by a segment of 1,024 inputs; in a product of few
rows each multiprocessor runs one thread block. No value here can change a result. A row tile is eight rows of activations; whole
K means that a block computes all segments of its outputs, except for units that two blocks share.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from onedraw.backends.packing import SEGMENT, SPAN, UNIT_ROWS

TILE_ROWS = 8  # rows of activations in one mma.m16n8k16: the columns of its operand B
TILES = (1, 2, 3, 4, 6, 8)  # compiled kernel variants: tiles of eight rows that a block computes
WHOLE_K_WARPS = {1: 16, 2: 16}  # maximum warps per block, by row tiles, if a block computes all segments of its outputs (whole K)
# Maximum registers per thread for whole K (0: no limit). Sixteen warps with 112 registers leave 8,192 registers of a
# multiprocessor, so a small kernel (norm, gate) can run next to a product without waiting for a block to end or delaying the next
# one.
WHOLE_K_REGISTERS = {1: 112, 2: 0}
SPLIT_K_WARPS = {1: 16, 2: 16, 3: 16, 4: 16, 6: 8, 8: 8}  # maximum warps per block, by row tiles, without whole K
# A block computes all segments of its outputs (whole K) if the activations, which every block then reads completely, are small
# compared to the weights. Blocks get whole units if that balances them; otherwise they get items, and two blocks may share a
# unit. The thresholds are measured on an H200 with weights that are not in the L2 cache (bench/gpu_few_rows.py time
# --all-splits).
BALANCED = 0.9  # minimum ratio of mean to maximum units per block for whole units
MAX_ITEMS = 1 << 21  # whole K: the kernel divides item numbers by float multiplication, which is exact below this number
ALWAYS_WHOLE_K_ROWS = 4  # products of at most this many rows use whole K whenever it is possible
WHOLE_K_UNITS = {1: 16, 2: 64}  # products of more rows use whole K from this many units per block on, by row tiles
# Fewer blocks are launched, so that each reads rows of one segment, if they still use this fraction of the multiprocessors.
ALIGNED = 0.97


@dataclass(frozen=True, slots=True)
class WorkSplit:
    tiles: int  # row tiles that a block computes
    whole_k: bool  # a block computes all segments of its outputs, except for units shared by two blocks
    warps: int  # maximum warps per block, a compile-time constant
    threads: int  # threads per block of this launch
    blocks: int
    granule: int  # with whole_k, the items that are assigned together: all items of a unit, or one item
    barriers: int  # with whole_k, byte offset in shared memory of the mbarriers, one per segment, for copies of rows
    buffers: int  # segments of rows that are in shared memory at a time
    shared: int  # bytes of shared memory
    sums: int  # floats of partial sums per unit in global memory; 0 with whole_k

    @property
    def defines(self) -> dict[str, int]:
        return split_defines(self.tiles, self.whole_k)


def split_defines(tiles: int, whole_k: bool) -> dict[str, int]:
    """The compile-time constants of few_rows.cu, except KIND."""
    warps, registers = (WHOLE_K_WARPS[tiles], WHOLE_K_REGISTERS[tiles]) if whole_k else (SPLIT_K_WARPS[tiles], 0)
    return {"TILES": tiles, "WARPS": warps, "WHOLE_K": int(whole_k), "REGISTERS": registers}


def buffer_bytes(rows: int, tiles: int) -> int:
    """Bytes of shared memory for a segment of rows plus a row of zeros: values, block sums, padding against bank conflicts, and
    the factors 2^e."""
    return (rows + 1) * (SEGMENT * (2 * SPAN + 32) + 16) + tiles * TILE_ROWS * 4


def rows_at_once(rows: int, shared: int) -> int:
    """The number of rows that one launch computes: `rows`, or if these do not fit into `shared` bytes of shared memory, the
    largest listed number of rows that does."""
    return next(count for count in (rows, 48, 32, 24, 16, 8) if count <= rows and buffer_bytes(count, tiles_of(count)) <= shared)


def tiles_of(rows: int) -> int:
    return next(tiles for tiles in TILES if tiles * TILE_ROWS >= rows)


@lru_cache(maxsize=4096)
def split_work(
    rows: int, unit_count: int, segments: int, *, multiprocessors: int, shared: int, whole_k: bool | None = None
) -> WorkSplit:
    """Decide how to launch a product whose rows fit into shared memory. `whole_k` overrides the choice where both variants are
    possible; only measurements and tests set it."""
    tiles = tiles_of(rows)
    buffer = buffer_bytes(rows, tiles)
    height = -(-unit_count // multiprocessors)  # maximum units per block; some blocks have one less
    if (
        tiles in WHOLE_K_WARPS
        and unit_count * segments < MAX_ITEMS
        and (_prefers_whole_k(rows, tiles, height) if whole_k is None else whole_k)
    ):
        blocks = min(multiprocessors, unit_count)
        whole = unit_count >= BALANCED * height * multiprocessors or unit_count < multiprocessors
        granule = segments if whole else 1
        items = -(-unit_count * segments // (blocks * granule)) * granule  # the most items of a block; some have a granule less
        warps = min(items, WHOLE_K_WARPS[tiles])
        pending = items + 1  # sums to keep: those of all items, and the carry from the preceding block
        if whole:  # first the sum of each warp's unit, later in the same place those of items distributed over all warps
            pending = max(warps, *(units % warps * segments for units in (unit_count // blocks, height)))
        barriers = segments * buffer + pending * tiles * TILE_ROWS * UNIT_ROWS * 4
        if (needed := barriers + 8 * (segments + 1)) <= shared:
            return WorkSplit(tiles, True, WHOLE_K_WARPS[tiles], 32 * warps, blocks, granule, barriers, segments, needed, sums=0)
    aligned = multiprocessors // segments * segments
    blocks = min(aligned if aligned >= ALIGNED * multiprocessors else multiprocessors, unit_count * segments)
    buffers = min(2, segments, shared // buffer)
    threads = 32 * min(-(-unit_count * segments // blocks), SPLIT_K_WARPS[tiles])
    sums = segments * tiles * TILE_ROWS * UNIT_ROWS
    return WorkSplit(tiles, False, SPLIT_K_WARPS[tiles], threads, blocks, 1, 0, buffers, buffers * buffer, sums)


def split_borders(unit_count: int, segments: int, *, multiprocessors: int, shared: int, most: int) -> tuple[int, ...]:
    """Row counts, up to `most`, from which a product uses another kernel variant, another work split, or two launches."""

    def variant(rows: int) -> tuple[int, int, bool]:
        at_once = rows_at_once(rows, shared)
        split = split_work.__wrapped__(at_once, unit_count, segments, multiprocessors=multiprocessors, shared=shared)
        return rows > at_once, split.tiles, split.whole_k

    variants = [variant(rows) for rows in range(1, most + 1)]
    return tuple(rows for rows, (before, here) in enumerate(pairwise(variants), start=2) if before != here)


def output_slabs(unit_count: int, most: int) -> list[slice]:
    """Slices of at most `most` units, of about equal size, that cover all units."""
    assert most > 0, "the partial-sum buffer is too small for sixteen outputs"
    count = -(-unit_count // most)
    height = -(-unit_count // count)
    return [slice(start, min(start + height, unit_count)) for start in range(0, unit_count, height)]


def _prefers_whole_k(rows: int, tiles: int, height: int) -> bool:
    return rows <= ALWAYS_WHOLE_K_ROWS or height >= WHOLE_K_UNITS[tiles]


# ------------------------------------------------------------------ experts

EXPERT_WARPS = 8  # warps of a block that computes experts
EXPERT_BLOCKS = {1: 2, 2: 2, 4: 2, 8: 1}  # blocks per multiprocessor that the register limit allows, by row tiles
# Row tiles and the largest average number of pairs per expert for which they are used. Tall tiles read weights less often, but a
# kernel also computes the unused rows of a tile.
EXPERT_PAIRS = {1: 4, 2: 12, 4: 48}
MAX_SPLIT_K = 4  # maximum warps that share a unit of sixteen outputs
RESERVED_SHARED = 2 << 10  # bytes of shared memory per block for static variables of the kernel and for the driver


@dataclass(frozen=True, slots=True)
class ExpertWorkSplit:
    split_k: int  # warps that share a unit of sixteen outputs, each computing other segments
    threads: int
    blocks_per_tile: int  # blocks that cover all outputs of a row tile
    shared: int  # bytes of shared memory


def expert_tiles_fit(tiles: int, shared: int) -> bool:
    """Whether `tiles` row tiles fit into `shared` bytes of shared memory per block."""
    return buffer_bytes(tiles * TILE_ROWS, tiles) + RESERVED_SHARED <= shared


def expert_tiles(pairs: int, count: int, *, shared: int) -> int:
    """Row tiles per block for `pairs` (row, expert) pairs routed to `count` experts."""
    wanted = next((tiles for tiles, most in EXPERT_PAIRS.items() if pairs <= most * count), max(EXPERT_BLOCKS))
    return max(tiles for tiles in EXPERT_BLOCKS if tiles <= wanted and expert_tiles_fit(tiles, shared))


def expert_borders(count: int, *, shared: int) -> tuple[int, ...]:
    """Numbers of pairs after which a larger row tile is used."""
    edges = [most * count for most in EXPERT_PAIRS.values()]
    return tuple(n for n in edges if expert_tiles(n, count, shared=shared) != expert_tiles(n + 1, count, shared=shared))


@lru_cache(maxsize=4096)
def split_expert_work(rows: int, tiles: int, unit_count: int, segments: int, *, shared: int) -> ExpertWorkSplit:
    """Decide how to launch a product of experts with tiles of up to `rows` rows. Each warp that shares a unit needs a segment of
    rows in shared memory, and a block must leave shared memory for the other blocks of its multiprocessor."""
    buffer, available = buffer_bytes(rows, tiles), shared // EXPERT_BLOCKS[tiles] - RESERVED_SHARED
    split_k = 1
    while split_k < min(MAX_SPLIT_K, segments) and _expert_bytes(2 * split_k, buffer, tiles) <= available:
        split_k *= 2
    units = min(EXPERT_WARPS // split_k, unit_count)
    return ExpertWorkSplit(split_k, 32 * units * split_k, -(-unit_count // units), _expert_bytes(split_k, buffer, tiles))


def _expert_bytes(split_k: int, buffer: int, tiles: int) -> int:
    """Bytes of shared memory: a segment of rows for each warp that shares a unit, and the sums of all these warps but the
    first."""
    return split_k * buffer + EXPERT_WARPS // split_k * (split_k - 1) * tiles * TILE_ROWS * 16 * 4
