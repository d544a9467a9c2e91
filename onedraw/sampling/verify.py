"""Verification of drafts: a draft is kept if it equals the token sampled at its parent.

The input is the drafts of a row, and the tokens sampled after the last known token and after each draft; the output is the kept
drafts. A draft's parent is the draft before it in a tree, by index; -1 is the last known token. A chain of drafts is a tree in
which each draft is the parent of the next.
"""

from __future__ import annotations

from collections.abc import Sequence

from onedraw.types import Draft


def kept_drafts(drafts: Sequence[Draft], sampled: Sequence[int]) -> tuple[int, ...]:
    """Return the indices of the kept drafts, in order.

    sampled[0] is the token after the last known one, and sampled[1 + i] the token after draft i. A draft is kept if it equals
    the token sampled at its parent and its parent is kept. The token sampled after the last kept draft becomes the next token.
    Parents come before their children, so one pass finds the whole path.
    """
    path: list[int] = []
    last = -1
    for index, draft in enumerate(drafts):
        if draft.parent == last and draft.token == sampled[1 + last]:
            path.append(index)
            last = index
    return tuple(path)


def draft_paths(drafts: Sequence[Draft]) -> tuple[tuple[int, ...], ...]:
    """Return for each position of a row (after the last known token, then after each draft) the indices of the drafts on the path
    to that position: for the position after a draft, the draft's ancestors and the draft itself."""
    paths: list[tuple[int, ...]] = [()]
    for index, draft in enumerate(drafts):
        paths.append((*paths[1 + draft.parent], index))
    return tuple(paths)


def draft_prefixes(drafts: Sequence[Draft]) -> tuple[tuple[int, ...], ...]:
    """Return for each position of a row the tokens of the drafts on its path (`draft_paths`), which follow the history there."""
    if all(draft.parent == index - 1 for index, draft in enumerate(drafts)):
        tokens = tuple(draft.token for draft in drafts)
        return tuple(tokens[:count] for count in range(len(tokens) + 1))
    return tuple(tuple(drafts[index].token for index in path) for path in draft_paths(drafts))
