"""A turn's runs as the delta kernels read them: tables of 32-bit integers on the device.

In: Runs. Out: Recurrence: taps, chunks, paths of steps, and where windows come from. A path is the tokens one program steps
through: a row's known tokens and its chain of drafts, or from the root to a leaf of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from onedraw.backends.torch.inputs import Ints
from onedraw.backends.torch.lanes import Kept
from onedraw.backends.torch.runs import CHUNK, Run, Runs
from onedraw.sampling.verify import trails


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

    def steps(self, device: torch.device) -> Steps:
        return Steps(_table(self.rows, 6, device), _line(self.order, device), _line(self.places, device))


class Recurrence:
    """Owner: the pass over the layers that made it."""

    def __init__(self, runs: Runs) -> None:
        self.runs, self._device = runs, runs.device
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
        self.chunks, self.chunk_runs = _table(chunks, 2, runs.device), _table(rows, 4, runs.device)
        self.chunk_slots = _line(slots, runs.device)
        self.calls = tuple(paths.steps(runs.device) for paths in (first, second) if paths.rows)

    @cached_property
    def taps(self) -> Tensor:
        return torch.from_numpy(self.runs.host_taps.astype(np.int32)).to(self._device)

    @cached_property
    def closings(self) -> Tensor:
        return self._sources([run.lane for run in self.runs.runs], self.runs.host_closings)

    @cached_property
    def kept(self) -> Tensor:
        return self._sources([slot for run in self.runs.runs for _, slot in run.saves], self.runs.host_kept)

    def _sources(self, places: list[int], rows: Ints) -> Tensor:
        """[m, 1 + K]: a place, the K - 1 rows of its window, padding."""
        padded = np.full((len(places), rows.shape[1] + 2), -1, dtype=np.int32)
        padded[:, 0], padded[:, 1:-1] = places, rows
        return torch.from_numpy(padded).to(self._device)


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
    lanes = _line([one.lane for one in kept], device)
    return lanes, torch.from_numpy(places).to(device), torch.from_numpy(sources).to(device)


def _table(rows: list[list[int]], width: int, device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32).view(-1, width).to(device)


def _line(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).to(device)
