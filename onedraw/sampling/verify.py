"""Which drafts of a verification row are kept: an equality, not a statistic.

In: the row's drafts and the token chosen after every one of them. Out: the kept drafts. A chain is a tree in which
every draft follows the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from onedraw.types import Draft


def kept_drafts(drafts: Sequence[Draft], chosen: Sequence[int]) -> tuple[int, ...]:
    """Indices of the kept drafts, in order.

    chosen[0] is the choice after the last known token, chosen[1 + i] the choice after draft i. A draft is kept if it
    equals the choice at its parent and its parent is kept; the choice after the last kept one is the next token.
    Parents stand before their children, so one pass walks the whole path.
    """
    path: list[int] = []
    last = -1
    for index, draft in enumerate(drafts):
        if draft.parent == last and draft.token == chosen[1 + last]:
            path.append(index)
            last = index
    return tuple(path)


def draft_paths(drafts: Sequence[Draft]) -> tuple[tuple[int, ...], ...]:
    """For each position of a row (after the last known token, then after each draft): the drafts on the way to it, by
    index. In a tree these are the ancestors alone."""
    paths: list[tuple[int, ...]] = [()]
    for index, draft in enumerate(drafts):
        paths.append((*paths[1 + draft.parent], index))
    return tuple(paths)


def draft_prefixes(drafts: Sequence[Draft]) -> tuple[tuple[int, ...], ...]:
    """The same as tokens: what stands between the history and each position, if the drafts on the way were right."""
    if all(draft.parent == index - 1 for index, draft in enumerate(drafts)):
        tokens = tuple(draft.token for draft in drafts)
        return tuple(tokens[:count] for count in range(len(tokens) + 1))
    return tuple(tuple(drafts[index].token for index in path) for path in draft_paths(drafts))
