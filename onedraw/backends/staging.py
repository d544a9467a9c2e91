"""What crosses from one stage of layers to the next, in bytes. Pure arithmetic.

In: widths, rows, a dtype. Out: bytes, and how many rows fit. A boundary has a buffer that sends and one that receives, and
where layers have inputs of their own a third for those of the layers behind it. They hold the rows of one turn, so they do
not grow with the context; `context_bytes` says what buffers of a whole context would take.
"""

from __future__ import annotations

from dataclasses import dataclass

from onedraw.errors import NoRoom
from onedraw.models.spec import DTYPE_BYTES, ModelSpec

MOST_BYTES = 64 * 2**20  # of one boundary
STEP = 64  # rows come in multiples of it: rows are padded to blocks of up to 64 (see layers/linear.py)
FEWEST_ROWS = 256  # what the self-check of the torch backend runs at once


@dataclass(frozen=True, slots=True)
class StagingPlan:
    """The buffers of every boundary, in order."""

    rows: int
    boundaries: tuple[int, ...]  # bytes of each

    @property
    def total_bytes(self) -> int:
        return sum(self.boundaries)


def row_bytes(hidden: int, dtype: str, *, inputs: int = 0) -> int:
    """One row at a boundary; `inputs`: numbers of the layers' own inputs that cross with it."""
    return (2 * hidden + inputs) * DTYPE_BYTES[dtype]


def inputs_behind(spec: ModelSpec, cut: int) -> int:
    return (len(spec.layers) - cut) * spec.inputs


def staging_plan(spec: ModelSpec, cuts: tuple[int, ...], *, tokens: int, dtype: str) -> StagingPlan:
    """Buffers for turns of up to `tokens` tokens, or fewer where those would take more than MOST_BYTES."""
    sizes = [row_bytes(spec.hidden, dtype, inputs=inputs_behind(spec, cut)) for cut in cuts]
    wanted = -(-max(tokens, FEWEST_ROWS) // STEP) * STEP
    rows = min([wanted, *(MOST_BYTES // size // STEP * STEP for size in sizes)])
    if rows < FEWEST_ROWS:
        raise NoRoom(f"a boundary of {max(sizes)} bytes per row leaves {rows} rows within {MOST_BYTES} bytes; use one device")
    return StagingPlan(rows, tuple(rows * size for size in sizes))


def most_tokens(rows: int, *, chunk: int) -> int:
    """The token budget that keeps a turn within so many rows: a prompt moves by one chunk beside whatever else runs."""
    return rows - chunk


def context_bytes(hidden: int, *, buffers: int, context: int, dtype: str) -> int:
    """Buffers that hold every position of a context."""
    return buffers * hidden * context * DTYPE_BYTES[dtype]
