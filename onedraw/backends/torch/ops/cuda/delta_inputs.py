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

from onedraw.backends.torch.ops.cuda.delta import Drafted, Gated
from onedraw.backends.torch.ops.cuda.delta_recurrent import PATH_WORDS
from onedraw.backends.torch.ops.cuda.delta_recurrent import steps as step_chains
from onedraw.backends.torch.ops.cuda.delta_tree import AGAIN, FROM_KNOWN, strands
from onedraw.backends.torch.runner.inputs import Bucket, Ints
from onedraw.backends.torch.runner.staging_buffers import Staging
from onedraw.backends.torch.state.recurrent_spans import CHUNK, RecurrentSpan, RecurrentSpans
from onedraw.backends.torch.state.recurrent_state import KeptDrafts
from onedraw.speculation.draft_tree import chain_length
from onedraw.types import Draft

Words = npt.NDArray[np.int32]
STRANDS = 2  # branches of a tree that are walked side by side


@dataclass(frozen=True, slots=True)
class Steps:
    """No two paths are of one lane."""

    paths: Tensor  # [P, 5]
    order: Tensor  # [n] entries
    strands: int = 1  # entries of a step, one for each branch that is walked beside others


def take_steps(
    gated: Gated, states: Tensor, out: Tensor, steps: Steps, *, drafted: Drafted | None = None, pdl: bool = False
) -> None:
    """The states step by step, chains in one way and branches in another (`triton_delta_steps.py`, `triton_strands.py`)."""
    if steps.strands == 1:
        step_chains(gated, states, out, paths=steps.paths, order=steps.order, drafted=drafted, pdl=pdl)
    else:
        assert drafted is not None, "branches are drafts"
        strands(gated, states, out, paths=steps.paths, order=steps.order, drafted=drafted, count=steps.strands, pdl=pdl)


class _Paths:
    """Paths on their way to the device. Owner: Recurrence."""

    def __init__(self, strands: int) -> None:
        self.strands = strands
        self.rows: list[list[int]] = []
        self.order: list[int] = []

    def add(self, known: list[int], walks: list[list[int]], *, lane: int, fresh: bool) -> None:
        """Entries of the known tokens, and of the drafts behind them by strands."""
        longest = max(map(len, walks), default=0)
        if not (known or longest):
            return
        self.rows.append([lane, len(self.order), len(known) + longest, len(known), int(fresh)])
        if self.strands == 1:
            self.order += itertools.chain(known, *walks)
            return
        self.order += [entry for entry in known for _ in range(self.strands)]
        # A strand that is at its end goes over something once more, and leaves nothing.
        idle = (known[0] if known else walks[0][0]) & ~3 | AGAIN
        walks = [*walks, *[[]] * (self.strands - len(walks))]
        self.order += itertools.chain(*itertools.zip_longest(*walks, fillvalue=idle))

    def steps(self, staging: Staging, rows: int = 0, entries: int = 0) -> Steps:
        """With room for so many paths and entries; a path without entries does nothing."""
        table = _filled(self.rows, (max(rows, len(self.rows)), PATH_WORDS), 0)
        order = _filled(self.order, (max(entries * self.strands, len(self.order)),), 0)
        return Steps(staging.put(table), staging.put(order), self.strands)


class Recurrence:
    """Everything is on the device when it is constructed. Owner: the pass over the layers that made it."""

    def __init__(self, runs: RecurrentSpans, *, staging: Staging, bucket: Bucket | None = None) -> None:
        chunks: list[list[int]] = []
        slots: list[int] = []
        rows: list[list[int]] = []
        trees = any(map(_branches, runs.runs)) if bucket is None else bucket.depth is not None
        paths = _Paths(STRANDS if trees else 1)
        for run in runs.runs:
            begin, saves = len(chunks), dict(run.saves)
            for start in range(0, run.prompt, CHUNK):
                stop = min(start + CHUNK, run.prompt)
                chunks.append([run.first + start, stop - start])
                slots.append(saves.get(stop, -1))
            if run.prompt:
                rows.append([run.lane, begin, len(chunks), int(run.fresh)])
            _walk(run, paths)
        put = staging.put
        self.chunks, self.chunk_runs = put(_filled(chunks, (len(chunks), 2))), put(_filled(rows, (len(rows), 4)))
        self.chunk_slots = put(_filled(slots, (len(slots),)))
        if bucket is None:
            self.steps = paths.steps(staging)
        else:  # a draft is taken again at most once for each draft behind it
            entries = bucket.tokens * (1 if bucket.depth is None else bucket.depth)
            self.steps = paths.steps(staging, bucket.rows, entries)
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


def _held(runs: RecurrentSpans) -> Words:
    places = np.full(len(runs.host_taps), -1, dtype=np.int32)
    for run in runs.runs:
        first = run.first + run.known
        places[first : first + len(run.drafts)] = np.arange(run.held, run.held + len(run.drafts))
    return places


def _walk(run: RecurrentSpan, paths: _Paths) -> None:
    """Known tokens, and the drafts behind them."""
    known = [4 * token for token in range(run.first + run.prompt, run.first + run.known)]
    node = 4 * (run.first + run.known)
    walks = [list(range(node, node + 4 * len(run.drafts), 4))]
    if _branches(run):
        found = _branch_by_branch(run.drafts)
        # As few steps as the strands allow, each with a part of the tree in its order.
        least = 1 + max(len(before) for _, before in found)
        limits = itertools.count(least)
        parted = next(walks for most in limits if len(walks := _strands(found, most)) <= paths.strands)
        walks = [[node + entry for entry in walk] for walk in parted]
    paths.add(known, walks, lane=run.lane, fresh=run.fresh and not run.prompt)


def _branches(run: RecurrentSpan) -> bool:
    """Whether some draft does not follow the one before it."""
    return chain_length(run.drafts) != len(run.drafts)


def _strands(found: list[tuple[int, list[int]]], most: int) -> list[list[int]]:
    """Entries of drafts in their order, counted from the first, in strands of at most so many. Where a draft does not follow
    the one before it, what is before it is taken again, from the known tokens on."""
    strands: list[list[int]] = []
    trail: list[int] = []
    for index, before in found:
        follows = bool(strands) and before == trail
        again = [*(4 * i + AGAIN for i in before), 4 * index]
        if not strands or len(strands[-1]) + (1 if follows else len(again)) > most:
            strands.append(again)
        elif follows:
            strands[-1].append(4 * index)
        else:
            again[0] += FROM_KNOWN
            strands[-1] += again
        trail = [*before, index]
    return strands


def _branch_by_branch(drafts: Sequence[Draft]) -> list[tuple[int, list[int]]]:
    """Every draft with those before it, a parent's first child right behind it."""
    children: dict[int, list[int]] = {}
    for index, draft in enumerate(drafts):
        children.setdefault(draft.parent, []).append(index)
    found: list[tuple[int, list[int]]] = []
    waiting: list[tuple[int, list[int]]] = [(index, []) for index in reversed(children.get(-1, []))]
    while waiting:
        index, before = waiting.pop()
        found.append((index, before))
        waiting += [(child, [*before, index]) for child in reversed(children.get(index, []))]
    return found


def commit_tables(kept: Sequence[KeptDrafts], *, conv: int, held: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
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
