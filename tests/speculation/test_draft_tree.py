"""Draft trees built from the candidates of each position."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onedraw.speculation.draft_tree import build_tree, chain_length, tree_depth
from onedraw.speculation.proposers import chain
from onedraw.types import Draft


def path(drafts: tuple[Draft, ...], index: int) -> tuple[int, ...]:
    return () if index < 0 else (*path(drafts, drafts[index].parent), drafts[index].token)


def oracle(levels: list[list[tuple[int, float]]], budget: int) -> set[tuple[int, ...]]:
    """The paths of the tree: the chain, then repeatedly the best path that extends the tree by one node."""
    longest = min(budget or len(levels), len(levels))
    tree = {tuple(level[0][0] for level in levels[:n]) for n in range(1, longest + 1)}

    def score(branch: tuple[int, ...]) -> float:
        return sum(dict(level)[token] for level, token in zip(levels, branch, strict=False))

    while len(tree) < budget:
        stems = [(), *tree]
        options = {(*stem, token) for stem in stems if len(stem) < len(levels) for token, _ in levels[len(stem)]} - tree
        if not options:
            break
        tree.add(max(options, key=score))
    return tree


@st.composite
def candidates(draw: st.DrawFn) -> list[list[tuple[int, float]]]:
    """Distinct tokens per depth, best first, with scores whose sums are all different."""
    levels = []
    for place in range(draw(st.integers(1, 5))):
        tokens = draw(st.lists(st.integers(0, 30), min_size=1, max_size=4, unique=True))
        scores = sorted((-draw(st.integers(1, 1000)) - 2.0 ** -(1 + 4 * place + i) for i in range(len(tokens))), reverse=True)
        levels.append(list(zip(tokens, scores, strict=True)))
    return levels


@settings(max_examples=400, deadline=None)
@given(levels=candidates(), budget=st.integers(0, 40))
def test_the_tree_is_the_chain_and_the_best_branches(levels: list[list[tuple[int, float]]], budget: int) -> None:
    drafts = build_tree(levels, budget)
    assert all(-1 <= draft.parent < index for index, draft in enumerate(drafts))
    assert len({(d.parent, d.token) for d in drafts}) == len(drafts)
    top = min(budget or len(levels), len(levels))
    assert drafts[:top] == chain(tuple(level[0][0] for level in levels[:top]))
    assert {path(drafts, i) for i in range(len(drafts))} == oracle(levels, budget)
    possible = sum(math.prod(len(level) for level in levels[: n + 1]) for n in range(len(levels)))
    assert len(drafts) == (min(budget, possible) if budget else len(levels))


@settings(max_examples=200, deadline=None)
@given(levels=candidates(), budget=st.integers(1, 40), cut=st.integers(0, 40))
def test_a_smaller_budget_gives_the_beginning_of_the_same_tree(
    levels: list[list[tuple[int, float]]], budget: int, cut: int
) -> None:
    cut = min(cut, budget) or 1
    assert build_tree(levels, budget)[:cut] == build_tree(levels, cut)


def test_a_small_tree() -> None:
    levels = [[(1, -0.1), (2, -2.0), (3, -5.0)], [(4, -0.5), (5, -1.0)]]
    assert build_tree(levels, 6) == (
        Draft(1, -1),  # the chain
        Draft(4, 0),
        Draft(5, 0),  # -1.1
        Draft(2, -1),  # -2.0
        Draft(4, 3),  # -2.5
        Draft(5, 3),  # -3.0
    )


def test_one_candidate_per_depth_gives_a_chain() -> None:
    assert build_tree([[(1, -1.0)], [(2, -1.0)], [(3, -1.0)]], 24) == chain((1, 2, 3))


def test_a_budget_of_zero_gives_the_chain_alone() -> None:
    assert build_tree([[(1, -1.0), (9, -1.1)], [(2, -1.0), (8, -1.1)]], 0) == chain((1, 2))


def test_a_budget_shorter_than_the_chain_shortens_it() -> None:
    assert build_tree([[(1, -1.0), (9, -1.1)], [(2, -1.0)], [(3, -1.0)]], 2) == chain((1, 2))


def test_banned_and_repeated_tokens_are_left_out() -> None:
    levels = [[(1, -1.0), (1, -1.0), (2, -math.inf), (3, math.nan)], [(4, -1.0)], [(5, -math.inf)], [(6, -1.0)]]
    assert build_tree(levels, 10) == chain((1, 4))


def test_no_candidates_give_no_drafts() -> None:
    assert build_tree([], 8) == ()
    assert build_tree([[], [(1, -1.0)]], 8) == ()


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        build_tree([[(1, 0.0)]], -1)


def test_chain_length_and_depth_of_trees() -> None:
    tree = (Draft(1, -1), Draft(2, 0), Draft(3, -1), Draft(4, 2), Draft(5, 3))
    assert (chain_length(tree), tree_depth(tree)) == (2, 3)
    assert (chain_length(chain((1, 2, 3))), tree_depth(chain((1, 2, 3)))) == (3, 3)
    assert (chain_length(()), tree_depth(())) == (0, 0)
    assert tree_depth((Draft(1, -1), Draft(2, 5), Draft(3, 0))) == 1
