"""The padded index tensors of one step, laid out from a ragged plan. Only this file adds padding tokens to a step.

In: rows of a plan, page size, the row rule. Out: Inputs, which every layer reads besides its weights. They are built with numpy
on the host, and each array is copied to the device once.

A token has a position (for rope and visibility) and a slot (for its key and value in the pages of its row). They differ only in
a draft tree, where every node has a slot of its own. After the row's last known position, a node reads the slots of its own path
in order of position, so its arithmetic is that of a chain.

A token that only the device knows (`Row.awaits_token`) is represented as -1 - lane. A row is the work of one sequence in one
step; a lane is the slot of its recurrent state. A group is the layers that keep the same positions in pages. A path is the slots
of the drafts from the tree's root to a node; its tail is the position of the first of them. Axes: T tokens, R rows, W the most
pages of a row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from onedraw.backends.base import is_plain_decode
from onedraw.backends.torch.ops.plain.linear import RowRule
from onedraw.backends.torch.runner.staging_buffers import DirectStaging, Staging
from onedraw.sampling.verify import draft_paths
from onedraw.types import PENDING_TOKEN, CheckpointSave, Draft, Plan

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class InputLayout:
    """The sizes of a backend that determine how inputs are laid out."""

    page_size: int
    scratch: tuple[int, ...]  # for each page group, a page to which padding tokens write and which is never read
    rule: RowRule
    windows: tuple[int | None, ...] = (None,)  # attention window of each page group; None: all positions
    held: int = 0  # the first slot of the rollback buffer that this step uses

    @property
    def alone(self) -> InputLayout:
        """The layout of a draft model beside the target: all its layers use pages numbered like those of the first group."""
        return replace(self, scratch=self.scratch[:1], windows=(None,))


@dataclass(frozen=True, slots=True)
class Bucket:
    """The sizes to which a step is padded, so that many steps share one graph."""

    rows: int
    tokens: int
    longest: int  # the most tokens of one row
    reach: int  # positions for which the page table of a row has room, drafts included
    depth: int | None = None  # the length of a draft's path; None if every row is a chain


# The numbers of rows, of tokens, and of tokens of one row to which steps are padded.
PADDED = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LEAST_REACH = 512  # positions that the tokens of the smallest bucket may see
LEAST_DEPTH = 8


def bucket_of(plan: Plan, *, recurrent: bool) -> Bucket | None:
    """The shape to which a step is padded; None if there are no rows, if some row is no plain decode row, or if there are more
    tokens than in the largest shape."""
    rows = plan.rows
    if not rows or not all(is_plain_decode(row, recurrent=recurrent) for row in rows):
        return None
    tokens = sum(1 + len(row.drafts) for row in rows)
    if tokens > PADDED[-1]:
        return None
    longest = _padded(max(1 + len(row.drafts) for row in rows))
    padded_rows = _padded(len(rows))
    last = max(row.stop + len(row.drafts) for row in rows)
    depth = None
    if any(draft.parent != index - 1 for row in rows for index, draft in enumerate(row.drafts)):
        depth = max(LEAST_DEPTH, 1 << (longest - 1).bit_length())
    return Bucket(
        rows=padded_rows,
        tokens=padded_rows if longest == 1 else max(_padded(tokens), padded_rows),
        longest=longest,
        reach=max(LEAST_REACH, 1 << (last - 1).bit_length()),
        depth=depth,
    )


def _padded(count: int) -> int:
    return PADDED[bisect_left(PADDED, count)]


@dataclass(slots=True)  # not frozen: construction is four times as fast, and every row of every step needs a Span
class Span:
    """Neighbouring tokens of one row: the tokens [first, first + count) of the step, at positions and in slots from `start` on.

    `drafts` are its last tokens. `whole`: every token sees all tokens of the span, not only those before it. `anchored`: an
    attention window is counted back from the start of the span, so it is the same for all tokens of the span. `lane`: the lane of
    its recurrent state, None for padding. `prompt_stop`: positions below it belong to the prompt. `saves`: the checkpoints to
    save. `held`: the first slot of its drafts in the rollback buffer.
    """

    first: int
    count: int
    start: int
    drafts: tuple[Draft, ...] = ()
    whole: bool = False
    anchored: bool = False
    lane: int | None = None
    prompt_stop: int = 0
    saves: tuple[CheckpointSave, ...] = ()
    held: int = 0

    @property
    def stop(self) -> int:
        """The position after the last known token."""
        return self.start + self.count - len(self.drafts)

    @property
    def branches(self) -> bool:
        return any(draft.parent != index - 1 for index, draft in enumerate(self.drafts))


@dataclass
class Inputs:
    """Host arrays, and the tensors on the device that are made from them at first use."""

    spans: tuple[Span, ...]  # the spans of the plan's rows, then those of padding tokens, each of which is a row of its own
    host_tokens: Ints  # [T] token ids
    host_positions: Ints  # [T] position of each token in its sequence
    host_slots: Ints  # [T] slot of each token's key and value in its row's pages laid end to end; the position, except in a tree
    host_ends: Ints  # [T] the last position that each token sees
    host_rows: Ints  # [T] the row of each token
    host_tables: tuple[Ints, ...]  # for each page group [R, W]: the pages of each row, filled up with the scratch page
    host_tails: Ints | None  # [T] the position from which a token reads its path; None if no row branches
    host_paths: Ints | None  # [T, depth] the slots of the path, counted from the tail
    page_size: int
    windows: tuple[int | None, ...]  # attention window of each page group; None: all positions
    staging: Staging
    bucket: Bucket | None = None  # the sizes to which the step is padded; None: it is padded by the row rule alone

    @property
    def device(self) -> torch.device:
        return self.staging.device

    @cached_property
    def tokens(self) -> Tensor:
        return self.staging.put(self.host_tokens)

    @cached_property
    def positions(self) -> Tensor:
        return self.staging.put(self.host_positions)

    @cached_property
    def slots(self) -> Tensor:
        return self.staging.put(self.host_slots)

    @cached_property
    def ends(self) -> Tensor:
        return self.staging.put(self.host_ends)

    @cached_property
    def rows(self) -> Tensor:
        return self.staging.put(self.host_rows)

    @cached_property
    def tables(self) -> tuple[Tensor, ...]:
        return tuple(self.staging.put(table) for table in self.host_tables)

    def on(self, device: torch.device) -> Inputs:
        """The same step on another device."""
        return self if device == self.device else replace(self, staging=DirectStaging(device))

    def group(self, window: int | None) -> int:
        """The page group of layers with this window."""
        return self.windows.index(window) if window in self.windows else 0

    @cached_property
    def tails(self) -> Tensor | None:
        return None if self.host_tails is None else self.staging.put(self.host_tails)

    @cached_property
    def paths(self) -> Tensor | None:
        return None if self.host_paths is None else self.staging.put(self.host_paths)

    def host_firsts(self, window: int | None) -> Ints:
        """The first position that each token sees, [T]."""
        if window is None:
            return np.zeros_like(self.host_positions)
        firsts: Ints = self.host_positions - window + 1
        for span in self.spans:
            if span.anchored:
                firsts[span.first : span.first + span.count] = span.start - window
        return np.maximum(firsts, 0)

    def firsts(self, window: int | None) -> Tensor:
        return self.staging.put(self.host_firsts(window))


def make_inputs(plan: Plan, *, layout: InputLayout, device: torch.device) -> Inputs:
    return staged_inputs(plan, layout=layout, staging=DirectStaging(device))


def staged_inputs(plan: Plan, *, layout: InputLayout, staging: Staging, bucket: Bucket | None = None) -> Inputs:
    tokens: list[int] = []
    spans: list[Span] = []
    held = layout.held
    for row in plan.rows:
        span = Span(
            first=len(tokens),
            count=len(row.tokens) + len(row.drafts),
            start=row.start,
            drafts=row.drafts,
            lane=row.lane,
            prompt_stop=row.prompt_stop,
            saves=row.saves,
            held=held,
        )
        spans.append(span)
        tokens += row.tokens if row.tokens != (PENDING_TOKEN,) else (-1 - row.lane,)
        tokens += (draft.token for draft in row.drafts)
        held += len(row.drafts)
    return staged_layout(tokens, spans, [row.pages for row in plan.rows], layout=layout, staging=staging, bucket=bucket)


def lay_out(
    tokens: list[int],
    spans: list[Span],
    pages: Sequence[tuple[Sequence[int], ...]],
    *,
    layout: InputLayout,
    device: torch.device,
) -> Inputs:
    """The inputs of a step with these spans of tokens. `pages`: for each span, the pages of its row in every group."""
    return staged_layout(tokens, spans, pages, layout=layout, staging=DirectStaging(device))


def staged_layout(
    tokens: list[int],
    spans: list[Span],
    pages: Sequence[tuple[Sequence[int], ...]],
    *,
    layout: InputLayout,
    staging: Staging,
    bucket: Bucket | None = None,
) -> Inputs:
    padding = (layout.rule.padded(len(tokens)) if bucket is None else bucket.tokens) - len(tokens)
    spans = [*spans, *(Span(len(tokens) + i, 1, i % layout.page_size) for i in range(padding))]
    pages = [*pages, *[tuple((page,) for page in layout.scratch)] * padding]
    tokens = [*tokens, *[0] * padding]
    counts = [span.count for span in spans]
    rows = np.repeat(np.arange(len(spans), dtype=np.int64), counts)
    shift = np.repeat(np.asarray([span.start - span.first for span in spans], dtype=np.int64), counts)
    slots = np.arange(len(tokens), dtype=np.int64) + shift
    positions, tails, paths = slots, None, None
    if bucket is not None and padding:  # all padding tokens share one row, after the last
        rows = np.minimum(rows, bucket.rows)
    if any(span.branches for span in spans) if bucket is None else bucket.depth is not None:
        positions, tails, paths = _paths(spans, slots, 0 if bucket is None else bucket.depth or 0)
    ends = positions
    for span in spans:
        if span.whole:
            ends = ends.copy() if ends is positions else ends
            ends[span.first : span.first + span.count] = span.start + span.count - 1
    return Inputs(
        spans=tuple(spans),
        host_tokens=np.asarray(tokens, dtype=np.int64),
        host_positions=positions,
        host_slots=slots,
        host_ends=ends,
        host_rows=rows,
        host_tables=tuple(
            _table([held[group] for held in pages], scratch, layout.page_size, bucket)
            for group, scratch in enumerate(layout.scratch)
        ),
        host_tails=tails,
        host_paths=paths,
        page_size=layout.page_size,
        windows=layout.windows,
        staging=staging,
        bucket=bucket,
    )


def _table(pages: list[Sequence[int]], scratch: int, page_size: int, bucket: Bucket | None) -> Ints:
    """The page table [R, W]. It has the scratch page past a row's end, and where a page was released."""
    if bucket is None:
        size = (len(pages), max((len(held) for held in pages), default=1))
    else:
        size = (bucket.rows + 1, bucket.reach // page_size)
    table = np.full(size, scratch, dtype=np.int64)
    for line, held in zip(table, pages):
        line[: len(held)] = held[: size[1]]
    return np.where(table < 0, scratch, table) if table.min(initial=0) < 0 else table


def _paths(spans: list[Span], slots: Ints, depth: int) -> tuple[Ints, Ints, Ints]:
    """Positions, tails and paths of a step in which some rows branch. Paths have room for `depth` slots. A node's path
    ends with the node itself; a token that is no draft has an empty path."""
    positions = slots.copy()
    tails = np.full(len(slots), np.iinfo(np.int64).max, dtype=np.int64)
    found: dict[int, tuple[int, ...]] = {}
    for span in spans:
        known = span.count - len(span.drafts)
        for index, path in enumerate(draft_paths(span.drafts)[1:]):
            token = span.first + known + index
            positions[token] = span.stop + len(path) - 1
            tails[token] = span.stop
            found[token] = path
    longest = max((len(path) for path in found.values()), default=1)
    paths = np.zeros((len(slots), max(longest, depth)), dtype=np.int64)
    for token, path in found.items():
        paths[token, : len(path)] = path
    return positions, tails, paths


def to_device(array: npt.NDArray[np.int64] | npt.NDArray[np.bool_], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
