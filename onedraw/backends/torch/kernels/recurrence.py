"""A turn's runs as the delta kernels read them: tables of 32-bit integers on the device.

In: Runs. Out: Recurrence: taps, chunks, paths of steps, and where windows come from. A path is the tokens one program steps
through: a row's known tokens and its chain of drafts, or from the root to a leaf of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from onedraw.backends.torch.feed import Feed
from onedraw.backends.torch.inputs import Bucket, Ints
from onedraw.backends.torch.lanes import Kept
from onedraw.backends.torch.runs import CHUNK, Run, Runs
from onedraw.sampling.verify import trails

Words = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Steps:
    """Paths of one call: no two of them write one lane."""

    paths: Tensor  # [P, 6]
    order: Tensor  # [n] tokens
    places: Tensor  # [n] of drafts in the rollback buffer, -1 for known tokens


class _Paths:
    """Paths on their way to the device. Owner: Recurrence."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []
        self.order: list[int] = []
        self.places: list[int] = []

    def add(self, tokens: list[int], places: list[int], *, lane: int, known: int, given: int = 0, fresh: bool = False) -> None:
        if tokens:
            self.rows.append([lane, len(self.order), len(tokens), known, given, int(fresh)])
            self.order += tokens
            self.places += places

    def steps(self, feed: Feed, rows: int = 0, tokens: int = 0) -> Steps:
        """With room for so many paths and tokens; a path without tokens does nothing."""
        table = _filled(self.rows, (max(rows, len(self.rows)), 6), 0)
        line = (max(tokens, len(self.order)),)
        return Steps(feed.put(table), feed.put(_filled(self.order, line, 0)), feed.put(_filled(self.places, line, -1)))


class Recurrence:
    """Everything is on the device when it is constructed. Owner: the pass over the layers that made it."""

    def __init__(self, runs: Runs, *, feed: Feed, bucket: Bucket | None = None) -> None:
        chunks: list[list[int]] = []
        slots: list[int] = []
        rows: list[list[int]] = []
        first, second = _Paths(), _Paths()
        for run in runs.runs:
            begin, saves = len(chunks), dict(run.saves)
            for start in range(0, run.prompt, CHUNK):
                stop = min(start + CHUNK, run.prompt)
                chunks.append([run.first + start, stop - start])
                slots.append(saves.get(stop, -1))
            if run.prompt:
                rows.append([run.lane, begin, len(chunks), int(run.fresh)])
            _walk(run, first, second)
        put = feed.put
        self.chunks, self.chunk_runs = put(_filled(chunks, (len(chunks), 2))), put(_filled(rows, (len(rows), 4)))
        self.chunk_slots = put(_filled(slots, (len(slots),)))
        if bucket is None:
            calls = [paths.steps(feed) for paths in (first, second) if paths.rows]
        else:
            calls = [first.steps(feed, bucket.rows, bucket.tokens)]
            if bucket.depth is not None:  # at most every draft is a leaf
                calls.append(second.steps(feed, bucket.tokens, bucket.tokens * bucket.depth))
        self.calls = tuple(calls)
        self.taps = put(runs.host_taps.astype(np.int32))
        room = 0 if bucket is None else bucket.rows
        self.closings = put(_sources([run.lane for run in runs.runs], runs.host_closings, room))
        self.kept = put(_sources([slot for run in runs.runs for _, slot in run.saves], runs.host_kept))
        drafting = any(run.drafts for run in runs.runs) if bucket is None else bucket.longest > 1
        self.held = put(_held(runs)) if drafting else None  # [T] place of each draft in the rollback buffer, -1 for others


def _sources(places: list[int], rows: Ints, room: int = 0) -> Words:
    """[m, 1 + K]: a place, the K - 1 rows of its window, padding; a place of -1 stands for nothing to do."""
    padded = np.full((max(len(places), room), rows.shape[1] + 2), -1, dtype=np.int32)
    padded[: len(places), 0], padded[: len(places), 1:-1] = places, rows
    return padded


def _held(runs: Runs) -> Words:
    places = np.full(len(runs.host_taps), -1, dtype=np.int32)
    for run in runs.runs:
        first = run.first + run.known
        places[first : first + len(run.drafts)] = np.arange(run.held, run.held + len(run.drafts))
    return places


def _walk(run: Run, first: _Paths, second: _Paths) -> None:
    """Known tokens and a chain behind them in the first call; the leaves of a tree in the second."""
    known = list(range(run.first + run.prompt, run.first + run.known))
    fresh = run.fresh and not run.prompt
    node = run.first + run.known
    drafts, chain = len(run.drafts), all(draft.parent == i - 1 for i, draft in enumerate(run.drafts))
    if chain:
        places = [-1] * len(known) + [run.held + i for i in range(drafts)]
        first.add([*known, *range(node, node + drafts)], places, lane=run.lane, known=len(known), fresh=fresh)
        return
    first.add(known, [-1] * len(known), lane=run.lane, known=len(known), fresh=fresh)
    parents = {draft.parent for draft in run.drafts}
    written: set[int] = set()
    for path in (path for i, path in enumerate(trails(run.drafts)[1:]) if i not in parents):
        given = sum(index in written for index in path)  # what leaves have in common, the first one gives
        written.update(path)
        second.add([node + i for i in path], [run.held + i for i in path], lane=run.lane, known=0, given=given)


def commit_tables(kept: Sequence[Kept], *, conv: int, held: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Lanes [n], places [n, longest] and window sources [n, 1 + K] of a commit; `held`: places the rollback buffer has."""
    longest = max(len(one.places) for one in kept)
    places = np.full((len(kept), longest), -1, dtype=np.int32)
    sources = np.full((len(kept), conv + 1), -1, dtype=np.int32)
    for row, one in enumerate(kept):
        places[row, : len(one.places)] = one.places
        line = [*(held + one.lane * (conv - 1) + i for i in range(conv - 1)), *one.places]
        sources[row, 0], sources[row, 1:-1] = one.lane, line[len(line) - conv + 1 :]
    lanes = torch.tensor([one.lane for one in kept], dtype=torch.int32).to(device)
    return lanes, torch.from_numpy(places).to(device), torch.from_numpy(sources).to(device)


def _filled(values: list[int] | list[list[int]], shape: tuple[int, ...], fill: int = 0) -> Words:
    table = np.full(shape, fill, dtype=np.int32)
    if values:
        table[: len(values)] = values
    return table
