"""Verification of drafts: a draft is kept if it equals the token sampled at its parent.

In: the row's drafts and the token sampled after each of them. Out: the kept drafts. A chain is a tree in which every draft
follows the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from onedraw.types import Draft


def kept_drafts(drafts: Sequence[Draft], sampled: Sequence[int]) -> tuple[int, ...]:
    """Indices of the kept drafts, in order.

    sampled[0] is the token after the last known one, sampled[1 + i] the token after draft i. A draft is kept if it equals the
    token sampled at its parent and its parent is kept; the token after the last kept draft is the next token. Parents come
    before their children, so one pass finds the whole path.
    """
    path: list[int] = []
    last = -1
    for index, draft in enumerate(drafts):
        if draft.parent == last and draft.token == sampled[1 + last]:
            path.append(index)
            last = index
    return tuple(path)


def draft_paths(drafts: Sequence[Draft]) -> tuple[tuple[int, ...], ...]:
    """For each position of a row (after the last known token, then after each draft): indices of the drafts on the path to
    it, which in a tree are its ancestors."""
    paths: list[tuple[int, ...]] = [()]
    for index, draft in enumerate(drafts):
        paths.append((*paths[1 + draft.parent], index))
    return tuple(paths)


def draft_prefixes(drafts: Sequence[Draft]) -> tuple[tuple[int, ...], ...]:
    """The same as tokens: those between the history and each position if the drafts on the path are correct."""
    if all(draft.parent == index - 1 for index, draft in enumerate(drafts)):
        tokens = tuple(draft.token for draft in drafts)
        return tuple(tokens[:count] for count in range(len(tokens) + 1))
    return tuple(tuple(drafts[index].token for index in path) for path in draft_paths(drafts))
