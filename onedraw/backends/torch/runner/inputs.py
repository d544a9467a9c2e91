"""A ragged plan → the padded index tensors of one turn. Padding is private to this file.

In: rows of a plan, page size, the row rule. Out: Inputs: what every layer reads besides its weights. Built with numpy on
the host and moved once; nothing here is asked for again while the layers run.

A token has a position (what rope and visibility go by) and a slot (where its key and value lie in its row's pages). They
are the same but in a draft tree, whose nodes have slots of their own: there a token reads, from its row's last known
position on, the slots of its own path in order of position, so its arithmetic is a chain's.

A token that only the device knows (`Row.awaits_token`) stands as -1 - lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from onedraw.backends.torch.ops.plain.linear import RowRule
from onedraw.backends.torch.runner.staging_buffers import DirectStaging, Staging
from onedraw.sampling.verify import draft_paths
from onedraw.types import PENDING_TOKEN, CheckpointSave, Draft, Plan

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class InputLayout:
    """What of the backend shapes its inputs."""

    page_size: int
    scratch: tuple[int, ...]  # per page group, a page nobody reads: padding tokens write there
    rule: RowRule
    windows: tuple[int | None, ...] = (None,)  # of the page groups
    held: int = 0  # the turn's first place in the rollback buffer

    @property
    def alone(self) -> InputLayout:
        """For a model of its own beside the target: all its layers lie in pages numbered like those of the first group."""
        return replace(self, scratch=self.scratch[:1], windows=(None,))


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sizes that a turn is padded to, so that many turns look alike."""

    rows: int
    tokens: int
    longest: int  # tokens of one row at most
    reach: int  # positions that a token may see, and slots that it may lie in
    depth: int | None = None  # of a draft's path; None where every row is a chain


@dataclass(slots=True)  # not frozen: made for every row of every turn, and four times as fast like this
class Span:
    """Neighbouring tokens of one row: [first, first + count) of the turn, at positions and in slots from `start` on.

    `drafts` are its last tokens. `whole`: every token sees all of the span, not only what stands before it.
    `anchored`: a window is counted back from the span's start, the same for all of its tokens.
    `lane` is where its state lies, None for padding; `prompt_stop`, `saves` as in a row; `held` is the first place of
    its drafts in the rollback buffer.
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
        """Where the known tokens end."""
        return self.start + self.count - len(self.drafts)

    @property
    def branches(self) -> bool:
        return any(draft.parent != index - 1 for index, draft in enumerate(self.drafts))


@dataclass
class Inputs:
    """Host arrays and, made from them on first use, the tensors of the device."""

    spans: tuple[Span, ...]  # of the plan's rows, then of padding tokens, each a row of its own
    host_tokens: Ints  # [T]
    host_positions: Ints  # [T]
    host_slots: Ints  # [T]
    host_ends: Ints  # [T] the last position each token sees
    host_rows: Ints  # [T] row of each token
    host_tables: tuple[Ints, ...]  # per page group [R, W] pages of each row, the scratch page past its end
    host_tails: Ints | None  # [T] position from which a token reads its path; None where no row branches
    host_paths: Ints | None  # [T, depth] slots of the path, counted from the tail
    page_size: int
    windows: tuple[int | None, ...]  # of the page groups
    staging: Staging
    bucket: Bucket | None = None  # what the turn was padded to, if it was

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
        """The same turn on another device."""
        return self if device == self.device else replace(self, staging=DirectStaging(device))

    def group(self, window: int | None) -> int:
        """Where layers with this window keep their pages."""
        return self.windows.index(window) if window in self.windows else 0

    @cached_property
    def tails(self) -> Tensor | None:
        return None if self.host_tails is None else self.staging.put(self.host_tails)

    @cached_property
    def paths(self) -> Tensor | None:
        return None if self.host_paths is None else self.staging.put(self.host_paths)

    def host_firsts(self, window: int | None) -> Ints:
        """[T] the first position each token sees."""
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
    return fed_inputs(plan, layout=layout, staging=DirectStaging(device))


def fed_inputs(plan: Plan, *, layout: InputLayout, staging: Staging, bucket: Bucket | None = None) -> Inputs:
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
    return fed_layout(tokens, spans, [row.pages for row in plan.rows], layout=layout, staging=staging, bucket=bucket)


def lay_out(
    tokens: list[int],
    spans: list[Span],
    pages: Sequence[tuple[Sequence[int], ...]],
    *,
    layout: InputLayout,
    device: torch.device,
) -> Inputs:
    """Inputs of any spans of tokens, each with the pages of its row, per group."""
    return fed_layout(tokens, spans, pages, layout=layout, staging=DirectStaging(device))


def fed_layout(
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
    if bucket is not None and padding:  # has one row, behind the last
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
    """[R, W], the scratch page past a row's end and where a page was let go."""
    if bucket is None:
        size = (len(pages), max((len(held) for held in pages), default=1))
    else:
        size = (bucket.rows + 1, bucket.reach // page_size)
    table = np.full(size, scratch, dtype=np.int64)
    for line, held in zip(table, pages):
        line[: len(held)] = held[: size[1]]
    return np.where(table < 0, scratch, table) if table.min(initial=0) < 0 else table


def _paths(spans: list[Span], slots: Ints, depth: int) -> tuple[Ints, Ints, Ints]:
    """Positions, tails and paths where some rows branch, with room for `depth`. A token without drafts before it has an
    empty path."""
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
