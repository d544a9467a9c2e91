"""A draft is kept if it equals the token sampled at its parent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from onedraw.sampling.verify import draft_prefixes, kept_drafts
from onedraw.types import Draft


def chain(*tokens: int) -> list[Draft]:
    return [Draft(token, parent) for parent, token in enumerate(tokens, start=-1)]


def test_a_chain_is_kept_up_to_the_first_unequal_token() -> None:
    assert kept_drafts(chain(5, 6, 7), [5, 6, 7, 8]) == (0, 1, 2)
    assert kept_drafts(chain(5, 6, 7), [5, 9, 7, 8]) == (0,)
    assert kept_drafts(chain(5, 6, 7), [4, 6, 7, 8]) == ()
    assert kept_drafts([], [4]) == ()


def test_an_equal_draft_after_a_rejected_one_is_not_kept() -> None:
    assert kept_drafts(chain(5, 6, 6), [5, 1, 6, 6]) == (0,)


def test_a_tree_keeps_one_path() -> None:
    # 0:a ── 2:c        after the last token: b; after b: d
    # 1:b ── 3:c ; 4:d
    drafts = [Draft(10, -1), Draft(11, -1), Draft(12, 0), Draft(12, 1), Draft(13, 1)]
    assert kept_drafts(drafts, [11, 12, 13, 0, 0, 0]) == (1, 4)
    assert draft_prefixes(drafts) == ((), (10,), (11,), (10, 12), (11, 12), (11, 13))


def test_no_draft_follows_a_position_without_a_token() -> None:
    assert kept_drafts(chain(5, 6), [5, -1, 3]) == (0,)


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[Draft], list[int]]:
    count = draw(st.integers(0, 12))
    drafts = [Draft(draw(st.integers(0, 2)), draw(st.integers(-1, index - 1))) for index in range(count)]
    return drafts, draw(st.lists(st.integers(0, 2), min_size=count + 1, max_size=count + 1))


@given(trees())
def test_kept_drafts_are_the_path_of_the_sampled_tokens(tree: tuple[list[Draft], list[int]]) -> None:
    drafts, sampled = tree
    path, at = [], -1
    while True:
        step = [i for i, draft in enumerate(drafts) if draft.parent == at and draft.token == sampled[1 + at]]
        if not step:
            break
        at = step[0]
        path.append(at)
    assert kept_drafts(drafts, sampled) == tuple(path)
    if path:
        assert draft_prefixes(drafts)[1 + path[-1]] == tuple(drafts[i].token for i in path)
