"""Build a tree of drafts from the candidates of each position.

A tree proposes several tokens for the same position; its depth is the number of positions that it covers. For each depth there
are candidates (token, score), the best first. Scores add up along a path like log-probabilities, so they should be at most 0. In
the resulting list, parents come before children and the chain of best candidates comes first. So every prefix of the list is a
tree too, and the list begins with the drafts that a drafter without a tree would make.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from onedraw.types import Draft

Candidates = Sequence[tuple[int, float]]


class Branch(NamedTuple):
    """A node that may be added next. Tuples compare field by field, so the lowest cost wins, and among equals the oldest."""

    cost: float  # minus the sum of the scores on the path from the root
    age: int  # number of drafts in the tree when this node was added to the heap; the lower one wins a tie
    parent: int  # index of the draft that this node follows; -1: it follows the last known token
    depth: int
    rank: int  # index among the candidates of its depth


def build_tree(candidates: Sequence[Candidates], budget: int) -> tuple[Draft, ...]:
    """Return at most `budget` drafts: the chain of best candidates, then the best branches. A budget of 0 gives the chain."""
    if budget < 0:
        raise ValueError(f"a tree cannot have {budget} drafts")
    levels = _levels(candidates)
    drafts: list[Draft] = []
    costs: list[float] = []  # for each draft, minus the sum of the scores on its path
    branches: list[Branch] = []

    def offer(parent: int, depth: int, rank: int) -> None:
        if depth < len(levels) and rank < len(levels[depth]):
            path_cost = costs[parent] if parent >= 0 else 0.0
            heapq.heappush(branches, Branch(path_cost - levels[depth][rank][1], len(drafts), parent, depth, rank))

    def add(parent: int, depth: int, rank: int) -> None:
        token, score = levels[depth][rank]
        drafts.append(Draft(token, parent))
        costs.append((costs[parent] if parent >= 0 else 0.0) - score)
        offer(parent, depth, rank + 1)

    for depth in range(min(budget or len(levels), len(levels))):
        add(depth - 1, depth, 0)
    while branches and len(drafts) < budget:
        best = heapq.heappop(branches)
        add(best.parent, best.depth, best.rank)
        offer(len(drafts) - 1, best.depth + 1, 0)
    return tuple(drafts)


def _levels(candidates: Sequence[Candidates]) -> list[list[tuple[int, float]]]:
    """Return the candidates of each depth, each token once and without those that score -inf or NaN. The first depth without
    candidates ends the tree."""
    levels: list[list[tuple[int, float]]] = []
    for level in candidates:
        usable: dict[int, float] = {}
        for token, score in level:
            if score > -math.inf:
                usable.setdefault(token, score)
        if not usable:
            break
        levels.append(list(usable.items()))
    return levels


def chain_length(drafts: Sequence[Draft]) -> int:
    """Return how many drafts from the first one on form a chain."""
    return next((i for i, draft in enumerate(drafts) if draft.parent != i - 1), len(drafts))


def tree_depth(drafts: Sequence[Draft]) -> int:
    """Return the largest number of drafts that can be kept together. At an invalid parent the rest of the list is ignored."""
    depths: list[int] = []
    for index, draft in enumerate(drafts):
        if not -1 <= draft.parent < index:
            break
        depths.append(1 if draft.parent < 0 else depths[draft.parent] + 1)
    return max(depths, default=0)
