"""The fixed shapes that turns are compiled for. Pure arithmetic.

In: lanes, tokens of a turn, drafts, page size. Out: Shape, and the two Buckets of a stack: `decode` (one token per row, as
many rows as there are lanes) and `mixed` (anything else: chunks of prompts beside single tokens and drafts).

A program is compiled for its bucket once, and walks through it in pieces of a fixed size, as many as hold something: rows
of a product, tiles of queries, blocks of keys. So a turn costs what is in it, padding is not computed, and a piece has the
same shape whatever else is in the turn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

FEWEST_ROWS = 4  # of a product: with fewer, libraries take other ways through it
MOST_ROWS = 32  # of a product at once; with more, the order along the reduced axis was seen to change
KEYS = 128  # positions of a block of keys, on absolute multiples
TILE = 16  # queries of a tile in a mixed turn
TILES = 8  # tiles computed at once
CHUNK = 64  # prompt positions that a recurrent layer takes at once
ROW_TILE = {"cpu": None, "gpu": 64, "tpu": 64}  # rows of every product on a platform of jax; None: as few as there are


@dataclass(frozen=True, slots=True)
class Bucket:
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
class Shape:
    """What all turns of a backend have in common."""

    lanes: int
    page_size: int
    pages: tuple[int, ...]  # per group; the page behind the last is nobody's: padding writes there
    windows: tuple[int | None, ...]
    max_context: int
    drafts: int  # of a turn, all rows together
    checkpoints: int
    decode: Bucket
    mixed: Bucket

    @property
    def table(self) -> int:
        """Pages of one row, up to a whole block of keys behind the longest draft."""
        return round_up(self.max_context + self.drafts + 1, KEYS) // self.page_size

    @property
    def slab(self) -> int:
        """Positions that are chosen at in one program."""
        return FEWEST_ROWS if self.lanes <= FEWEST_ROWS else 8

    @property
    def picks(self) -> int:
        """Positions of a turn at which a token may be chosen."""
        return round_up(self.lanes + self.drafts, self.slab)

    @property
    def uniform(self) -> Shape:
        """The same with products and tiles of one height in both buckets: for libraries whose bits follow the rows."""
        rows, step = self.mixed.rows, self.mixed.step
        tokens = round_up(self.decode.tokens, rows)
        return replace(self, decode=Bucket(tokens, rows, self.mixed.tile, round_up(tokens, step), step, 0))


def make_shape(
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
) -> Shape:
    """`rows`: every product has exactly so many rows, every tile the same height; None: products of FEWEST_ROWS to MOST_ROWS."""
    few = next((n for n in (FEWEST_ROWS, 8, 16, MOST_ROWS) if n >= lanes), MOST_ROWS)
    height = rows or few
    tokens = round_up(lanes, height)
    step = min(TILES, tokens)
    most = rows or MOST_ROWS
    mixed = round_up(max(turn_tokens, lanes, 2 * CHUNK) + CHUNK, most)  # the self-check's prompts fit, however few are asked for
    shape = Shape(
        lanes=lanes,
        page_size=page_size,
        pages=pages,
        windows=windows,
        max_context=max_context,
        drafts=drafts,
        checkpoints=checkpoints,
        decode=Bucket(tokens, height, 1, round_up(tokens, step), step, 0),
        mixed=Bucket(mixed, most, TILE, round_up(mixed // TILE + lanes + drafts, TILES), TILES, drafts),
    )
    return shape if rows is None else shape.uniform


def product_rows(platform: str, dtype: str) -> int | None:
    """Rows of every product on a platform of jax; None: FEWEST_ROWS to MOST_ROWS, which float32 on a CPU allows."""
    rows = ROW_TILE.get(platform, 64)
    return rows if dtype == "f32" else rows or MOST_ROWS


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
