"""A ragged plan → the padded index tensors of one turn. Padding is private to this file.

In: rows of a plan, page size, the row rule. Out: Inputs: what every layer reads besides its weights. Built with numpy on
the host and moved once; nothing here is asked for again while the layers run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from onedraw.backends.torch.layers.linear import RowRule
from onedraw.types import Plan

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Shape:
    """What of the backend shapes its inputs."""

    page_size: int
    scratch_page: int  # a page nobody reads: padding tokens write there
    rule: RowRule


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a row's tokens stand in the turn: [first, first + count), at positions from `start` on, drafts included."""

    first: int
    count: int
    start: int


@dataclass(frozen=True, slots=True)
class Inputs:
    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    rows: Tensor  # [T] row of each token
    write_pages: Tensor  # [T] page each token's key and value go to
    table: Tensor  # [R, W] pages of each row, the scratch page past its end
    spots: tuple[Spot, ...]  # of the plan's rows, then of padding tokens, each a row of its own
    host_table: Ints
    page_size: int


def make_inputs(plan: Plan, *, shape: Shape, device: torch.device) -> Inputs:
    tokens = [token for row in plan.rows for token in (*row.tokens, *(d.token for d in row.drafts))]
    spots: list[Spot] = []
    pages: list[Ints] = []
    for row in plan.rows:
        first = spots[-1].first + spots[-1].count if spots else 0
        spots.append(Spot(first, len(row.tokens) + len(row.drafts), row.start))
        pages.append(np.asarray(row.pages, dtype=np.int64))
    padding = shape.rule.padded(len(tokens)) - len(tokens)
    for i in range(padding):
        spots.append(Spot(len(tokens), 1, i % shape.page_size))
        pages.append(np.asarray([shape.scratch_page], dtype=np.int64))
        tokens.append(0)
    table = np.full((len(spots), max(len(p) for p in pages)), shape.scratch_page, dtype=np.int64)
    for i, held in enumerate(pages):
        table[i, : len(held)] = held
    counts = [spot.count for spot in spots]
    rows = np.repeat(np.arange(len(spots), dtype=np.int64), counts)
    shift = np.repeat(np.asarray([spot.start - spot.first for spot in spots], dtype=np.int64), counts)
    positions = np.arange(len(tokens), dtype=np.int64) + shift
    return Inputs(
        tokens=to_device(np.asarray(tokens, dtype=np.int64), device),
        positions=to_device(positions, device),
        rows=to_device(rows, device),
        write_pages=to_device(table[rows, positions // shape.page_size], device),
        table=to_device(table, device),
        spots=tuple(spots),
        host_table=table,
        page_size=shape.page_size,
    )


def to_device(array: npt.NDArray[np.int64] | npt.NDArray[np.float32], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
