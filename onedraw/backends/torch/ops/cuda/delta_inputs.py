"""A turn's runs as the delta kernels read them: tables of 32-bit integers on the device.

In: RecurrentSpans. Out: Recurrence: taps, chunks, paths of steps, and where windows come from. A path is what one program steps
through: a row's known tokens and its drafts, a tree branch by branch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from onedraw.backends.torch.ops.cuda.delta import DraftIncrements, DeltaQkv
from onedraw.backends.torch.ops.cuda.delta_recurrent import PATH_WORDS, recurrent_delta
from onedraw.backends.torch.ops.cuda.delta_tree import REPEAT, RESTART, tree_delta
from onedraw.backends.torch.runner.inputs import Bucket, Ints
from onedraw.backends.torch.runner.staging_buffers import Staging
from onedraw.backends.torch.state.recurrent_spans import CHUNK, RecurrentSpan, RecurrentSpans
from onedraw.backends.torch.state.recurrent_state import KeptDrafts
from onedraw.speculation.draft_tree import chain_length
from onedraw.types import Draft

Words = npt.NDArray[np.int32]
TREE_BRANCHES = 2  # branches of a tree that are walked side by side


@dataclass(frozen=True, slots=True)
class RecurrentPaths:
    """No two paths are of one lane."""

    table: Tensor  # [P, 5]
    entries: Tensor  # [n] entries
    branches: int = 1  # entries of a step, one for each branch that is walked beside others


def run_paths(
    qkv: DeltaQkv, states: Tensor, out: Tensor, paths: RecurrentPaths, *, drafts: DraftIncrements | None = None, pdl: bool = False
) -> None:
    """The states step by step, chains in one way and branches in another (`triton_delta_steps.py`, `triton_strands.py`)."""
    if paths.branches == 1:
        recurrent_delta(qkv, states, out, paths=paths.table, entries=paths.entries, drafts=drafts, pdl=pdl)
    else:
        assert drafts is not None, "branches are drafts"
        tree_delta(qkv, states, out, paths=paths.table, entries=paths.entries, drafts=drafts, count=paths.branches, pdl=pdl)


class PathBuilder:
    """Paths on their way to the device. Owner: Recurrence."""

    def __init__(self, branches: int) -> None:
        self.branches = branches
        self.rows: list[list[int]] = []
        self.entries: list[int] = []

    def add(self, known: list[int], walks: list[list[int]], *, lane: int, fresh: bool) -> None:
        """Entries of the known tokens, and of the drafts behind them by strands."""
        longest = max(map(len, walks), default=0)
        if not (known or longest):
            return
        self.rows.append([lane, len(self.entries), len(known) + longest, len(known), int(fresh)])
        if self.branches == 1:
            self.entries += itertools.chain(known, *walks)
            return
        self.entries += [entry for entry in known for _ in range(self.branches)]
        # A strand that is at its end goes over something once more, and leaves nothing.
        idle = (known[0] if known else walks[0][0]) & ~3 | REPEAT
        walks = [*walks, *[[]] * (self.branches - len(walks))]
        self.entries += itertools.chain(*itertools.zip_longest(*walks, fillvalue=idle))

    def build(self, staging: Staging, rows: int = 0, entries: int = 0) -> RecurrentPaths:
        """With room for so many paths and entries; a path without entries does nothing."""
        table = _filled(self.rows, (max(rows, len(self.rows)), PATH_WORDS), 0)
        entries = _filled(self.entries, (max(entries * self.branches, len(self.entries)),), 0)
        return RecurrentPaths(staging.put(table), staging.put(entries), self.branches)


class DeltaTables:
    """Everything is on the device when it is constructed. Owner: the pass over the layers that made it."""

    def __init__(self, spans: RecurrentSpans, *, staging: Staging, bucket: Bucket | None = None) -> None:
        chunks: list[list[int]] = []
        slots: list[int] = []
        chunk_spans: list[list[int]] = []
        trees = any(map(_is_tree, spans.runs)) if bucket is None else bucket.depth is not None
        paths = PathBuilder(TREE_BRANCHES if trees else 1)
        for span in spans.runs:
            begin, saves = len(chunks), dict(span.saves)
            for start in range(0, span.prompt, CHUNK):
                stop = min(start + CHUNK, span.prompt)
                chunks.append([span.first + start, stop - start])
                slots.append(saves.get(stop, -1))
            if span.prompt:
                chunk_spans.append([span.lane, begin, len(chunks), int(span.fresh)])
            add_span(span, paths)
        put = staging.put
        self.chunks, self.chunk_spans = put(_filled(chunks, (len(chunks), 2))), put(_filled(chunk_spans, (len(chunk_spans), 4)))
        self.chunk_slots = put(_filled(slots, (len(slots),)))
        if bucket is None:
            self.paths = paths.build(staging)
        else:  # a draft is taken again at most once for each draft behind it
            entries = bucket.tokens * (1 if bucket.depth is None else bucket.depth)
            self.paths = paths.build(staging, bucket.rows, entries)
        self.taps = put(spans.host_taps.astype(np.int32))
        min_rows = 0 if bucket is None else bucket.rows
        self.window_sources = put(_window_sources([span.lane for span in spans.runs], spans.host_closings, min_rows))
        self.saved_window_sources = put(_window_sources([slot for span in spans.runs for _, slot in span.saves], spans.host_kept))
        drafting = any(span.drafts for span in spans.runs) if bucket is None else bucket.longest > 1
        self.draft_slots = put(_draft_slots(spans)) if drafting else None  # [T] place of each draft in the rollback buffer, -1 for others


def _window_sources(targets: list[int], rows: Ints, min_rows: int = 0) -> Words:
    """[m, 1 + K]: a place, the K - 1 rows of its window, padding; a place of -1 stands for nothing to do."""
    padded = np.full((max(len(targets), min_rows), rows.shape[1] + 2), -1, dtype=np.int32)
    padded[: len(targets), 0], padded[: len(targets), 1:-1] = targets, rows
    return padded


def _draft_slots(spans: RecurrentSpans) -> Words:
    slots = np.full(len(spans.host_taps), -1, dtype=np.int32)
    for span in spans.runs:
        first = span.first + span.known
        slots[first : first + len(span.drafts)] = np.arange(span.held, span.held + len(span.drafts))
    return slots


def add_span(span: RecurrentSpan, paths: PathBuilder) -> None:
    """Known tokens, and the drafts behind them."""
    known = [4 * token for token in range(span.first + span.prompt, span.first + span.known)]
    node = 4 * (span.first + span.known)
    walks = [list(range(node, node + 4 * len(span.drafts), 4))]
    if _is_tree(span):
        nodes = _depth_first(span.drafts)
        # As few steps as the strands allow, each with a part of the tree in its order.
        least = 1 + max(len(ancestors) for _, ancestors in nodes)
        limits = itertools.count(least)
        parts = next(walks for limit in limits if len(walks := _parallel_walks(nodes, limit)) <= paths.branches)
        walks = [[node + entry for entry in walk] for walk in parts]
    paths.add(known, walks, lane=span.lane, fresh=span.fresh and not span.prompt)


def _is_tree(span: RecurrentSpan) -> bool:
    """Whether some draft does not follow the one before it."""
    return chain_length(span.drafts) != len(span.drafts)


def _parallel_walks(nodes: list[tuple[int, list[int]]], limit: int) -> list[list[int]]:
    """Entries of drafts in their order, counted from the first, in strands of at most so many. Where a draft does not follow
    the one before it, what is before it is taken again, from the known tokens on."""
    walks: list[list[int]] = []
    last_path: list[int] = []
    for index, ancestors in nodes:
        follows = bool(walks) and ancestors == last_path
        repeated = [*(4 * i + REPEAT for i in ancestors), 4 * index]
        if not walks or len(walks[-1]) + (1 if follows else len(repeated)) > limit:
            walks.append(repeated)
        elif follows:
            walks[-1].append(4 * index)
        else:
            repeated[0] += RESTART
            walks[-1] += repeated
        last_path = [*ancestors, index]
    return walks


def _depth_first(drafts: Sequence[Draft]) -> list[tuple[int, list[int]]]:
    """Every draft with those before it, a parent's first child right behind it."""
    children: dict[int, list[int]] = {}
    for index, draft in enumerate(drafts):
        children.setdefault(draft.parent, []).append(index)
    nodes: list[tuple[int, list[int]]] = []
    stack: list[tuple[int, list[int]]] = [(index, []) for index in reversed(children.get(-1, []))]
    while stack:
        index, ancestors = stack.pop()
        nodes.append((index, ancestors))
        stack += [(child, [*ancestors, index]) for child in reversed(children.get(index, []))]
    return nodes


def commit_tables(kept: Sequence[KeptDrafts], *, conv: int, slot_count: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Lanes [n], places [n, longest] and window sources [n, 1 + K] of a commit; `held`: places the rollback buffer has."""
    longest = max(len(row_drafts.places) for row_drafts in kept)
    places = np.full((len(kept), longest), -1, dtype=np.int32)
    sources = np.full((len(kept), conv + 1), -1, dtype=np.int32)
    for row, row_drafts in enumerate(kept):
        places[row, : len(row_drafts.places)] = row_drafts.places
        window = [*(slot_count + row_drafts.lane * (conv - 1) + i for i in range(conv - 1)), *row_drafts.places]
        sources[row, 0], sources[row, 1:-1] = row_drafts.lane, window[len(window) - conv + 1 :]
    lanes = torch.tensor([row_drafts.lane for row_drafts in kept], dtype=torch.int32).to(device)
    return lanes, torch.from_numpy(places).to(device), torch.from_numpy(sources).to(device)


def _filled(values: list[int] | list[list[int]], shape: tuple[int, ...], fill: int = 0) -> Words:
    table = np.full(shape, fill, dtype=np.int32)
    if values:
        table[: len(values)] = values
    return table
