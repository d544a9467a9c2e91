"""Inputs of the Gated DeltaNet kernels for one step: index tables of 32-bit integers on the device.

In: RecurrentSpans. Out: DeltaTables, which say from which rows of inputs the convolution of each token reads (taps), which
64-token chunks of prompts are computed at once, which tokens are computed one by one and in which order (paths), and from which
rows each lane's new convolution window is copied. A path lists the tokens that one program of the recurrent form, which
computes a token after the other, processes: a row's known tokens, then its drafts, a tree branch by branch. Axes: T tokens, P
paths, K taps of the convolution. A row is the work of one sequence in one step; a lane is the slot of its recurrent state; the
rollback buffer holds the state increments of drafts until the commit. A path is stored as entries, the integers 4 * (index of
the token) + flags of `delta_tree.py`; a time step has one entry for each branch that is processed in parallel.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from onedraw.backends.torch.ops.cuda.delta import DeltaQkv, DraftIncrements
from onedraw.backends.torch.ops.cuda.delta_recurrent import PATH_WORDS, recurrent_delta
from onedraw.backends.torch.ops.cuda.delta_tree import REPEAT, RESTART, tree_delta
from onedraw.backends.torch.runner.inputs import Bucket, Ints
from onedraw.backends.torch.runner.staging_buffers import Staging
from onedraw.backends.torch.state.recurrent_state import CHUNK, RecurrentSpan, RecurrentSpans
from onedraw.speculation.draft_tree import chain_length
from onedraw.types import Draft

Words = npt.NDArray[np.int32]
TREE_BRANCHES = 2  # branches of a tree that one program processes in parallel


@dataclass(frozen=True, slots=True)
class RecurrentPaths:
    """Paths for one launch; each belongs to a different lane."""

    table: Tensor  # [P, PATH_WORDS] int32: one row per path, as `delta_recurrent.py` describes it
    entries: Tensor  # [n] int32: 4 * token, plus the flags RESTART and REPEAT
    branches: int = 1  # entries per time step: one for each branch that is processed in parallel


def run_paths(
    qkv: DeltaQkv, states: Tensor, out: Tensor, paths: RecurrentPaths, *, drafts: DraftIncrements | None = None, pdl: bool = False
) -> None:
    """Advance the states token by token: `recurrent_delta` for chains, `tree_delta` for trees."""
    if paths.branches == 1:
        recurrent_delta(qkv, states, out, paths=paths.table, entries=paths.entries, drafts=drafts, pdl=pdl)
    else:
        assert drafts is not None, "a tree consists of drafts"
        tree_delta(qkv, states, out, paths=paths.table, entries=paths.entries, drafts=drafts, branches=paths.branches, pdl=pdl)


class PathBuilder:
    """Collects paths on the host. Owner: DeltaTables."""

    def __init__(self, branches: int) -> None:
        self.branches = branches
        self.rows: list[list[int]] = []
        self.entries: list[int] = []

    def add(self, known: list[int], walks: list[list[int]], *, lane: int, fresh: bool) -> None:
        """Add a path. `known`: the entries of its known tokens; `walks`: for each parallel branch, the entries of its drafts."""
        longest = max(map(len, walks), default=0)
        if not (known or longest):
            return
        self.rows.append([lane, len(self.entries), len(known) + longest, len(known), int(fresh)])
        if self.branches == 1:
            self.entries += itertools.chain(known, *walks)
            return
        self.entries += [entry for entry in known for _ in range(self.branches)]
        # A branch that ends early is filled up with a repeated entry, which stores nothing.
        idle = (known[0] if known else walks[0][0]) & ~3 | REPEAT
        walks = [*walks, *[[]] * (self.branches - len(walks))]
        self.entries += itertools.chain(*itertools.zip_longest(*walks, fillvalue=idle))

    def build(self, staging: Staging, rows: int = 0, entries: int = 0) -> RecurrentPaths:
        """The paths, padded to `rows` paths and `entries` time steps; a path without entries does nothing."""
        table = _filled(self.rows, (max(rows, len(self.rows)), PATH_WORDS), 0)
        padded = _filled(self.entries, (max(entries * self.branches, len(self.entries)),), 0)
        return RecurrentPaths(staging.put(table), staging.put(padded), self.branches)


class DeltaTables:
    """The index tables of a step, which are on the device once this is constructed. Owner: the pass over the layers that made
    it."""

    def __init__(self, spans: RecurrentSpans, *, staging: Staging, bucket: Bucket | None = None) -> None:
        chunks: list[list[int]] = []
        slots: list[int] = []
        chunk_spans: list[list[int]] = []
        trees = any(map(_is_tree, spans.spans)) if bucket is None else bucket.depth is not None
        paths = PathBuilder(TREE_BRANCHES if trees else 1)
        for span in spans.spans:
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
        else:  # an upper bound: a draft is repeated at most once for each of its descendants
            entries = bucket.tokens * (1 if bucket.depth is None else bucket.depth)
            self.paths = paths.build(staging, bucket.rows, entries)
        self.taps = put(spans.host_taps.astype(np.int32))
        min_rows = 0 if bucket is None else bucket.rows
        self.window_sources = put(_window_sources([span.lane for span in spans.spans], spans.host_closings, min_rows))
        self.saved_window_sources = put(
            _window_sources([slot for span in spans.spans for _, slot in span.saves], spans.host_kept)
        )
        drafting = any(span.drafts for span in spans.spans) if bucket is None else bucket.longest > 1
        self.draft_slots = put(_draft_slots(spans)) if drafting else None


def _window_sources(targets: list[int], rows: Ints, min_rows: int = 0) -> Words:
    """The table from which `shift_conv_windows` writes windows, [m, 1 + K]: the target window (-1: none), its K - 1 source rows,
    and padding; padded to `min_rows` windows."""
    padded = np.full((max(len(targets), min_rows), rows.shape[1] + 2), -1, dtype=np.int32)
    padded[: len(targets), 0], padded[: len(targets), 1:-1] = targets, rows
    return padded


def _draft_slots(spans: RecurrentSpans) -> Words:
    """The slot of each draft in the rollback buffer, -1 for known tokens: [T]."""
    slots = np.full(len(spans.host_taps), -1, dtype=np.int32)
    for span in spans.spans:
        first = span.first + span.known
        slots[first : first + len(span.drafts)] = np.arange(span.held, span.held + len(span.drafts))
    return slots


def add_span(span: RecurrentSpan, paths: PathBuilder) -> None:
    """Add the path of a span: its known tokens in recurrent form, then its drafts."""
    known = [4 * token for token in range(span.first + span.prompt, span.first + span.known)]
    node = 4 * (span.first + span.known)
    walks = [list(range(node, node + 4 * len(span.drafts), 4))]
    if _is_tree(span):
        nodes = _depth_first(span.drafts)
        # The length of walks is limited to the least with which the parallel branches cover the tree, so time steps are fewest.
        least = 1 + max(len(ancestors) for _, ancestors in nodes)
        limits = itertools.count(least)
        parts = next(walks for limit in limits if len(walks := _parallel_walks(nodes, limit)) <= paths.branches)
        walks = [[node + entry for entry in walk] for walk in parts]
    paths.add(known, walks, lane=span.lane, fresh=span.fresh and not span.prompt)


def _is_tree(span: RecurrentSpan) -> bool:
    """Whether some draft's parent is not the draft before it, so that the drafts form a tree and not a chain."""
    return chain_length(span.drafts) != len(span.drafts)


def _parallel_walks(nodes: list[tuple[int, list[int]]], limit: int) -> list[list[int]]:
    """Cut a tree of drafts into walks: lists of at most `limit` entries, which are processed in parallel. `nodes`: the drafts in
    depth-first order, each with its ancestors. Where a draft is not a child of the draft before it, the walk restarts from the
    state after the known tokens and repeats the draft's ancestors. Entries count tokens from the first draft on."""
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
    """Drafts in depth-first order, each with its ancestors from the root on."""
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


def _filled(values: list[int] | list[list[int]], shape: tuple[int, ...], fill: int = 0) -> Words:
    table = np.full(shape, fill, dtype=np.int32)
    if values:
        table[: len(values)] = values
    return table
