"""A prompt goes to the replica that was sent the longest beginning of it, unless that replica has more than its share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onedraw.cluster.routing import (
    FREE_REQUESTS,
    MAX_PAGE_HOLDERS,
    MAX_PAGES_HASHED,
    OVERLOAD,
    SentPages,
    choose_replica,
    page_hashes,
)

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=24)
SENT = st.lists(st.tuples(TOKENS, st.integers(0, 3)), max_size=20)
LOADS = st.dictionaries(st.integers(0, 9), st.integers(0, 60), min_size=1, max_size=10)
MATCHES = st.dictionaries(st.integers(0, 12), st.integers(0, 9), max_size=10)


def common_pages(first: list[int], second: list[int], size: int) -> int:
    count = 0
    while (count + 1) * size < min(len(first), len(second)) and first[: (count + 1) * size] == second[: (count + 1) * size]:
        count += 1
    return count


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_prompts_share_the_hashes_of_the_pages_they_share(first: list[int], second: list[int], size: int) -> None:
    hashes = page_hashes(first, size), page_hashes(second, size)
    shared = sum(a == b for a, b in zip(*hashes, strict=False))
    assert shared == common_pages(first, second, size)
    assert hashes[0][:shared] == hashes[1][:shared]


@given(SENT, TOKENS)
def test_a_replica_matches_as_many_pages_as_it_was_sent(sent: list[tuple[list[int], int]], prompt: list[int]) -> None:
    table: SentPages[int] = SentPages()
    for tokens, replica in sent:
        table.add(page_hashes(tokens, 2), replica)
    matches = table.matches(page_hashes(prompt, 2))
    for replica in range(4):
        longest = max((common_pages(tokens, prompt, 2) for tokens, other in sent if other == replica), default=0)
        assert matches.get(replica, 0) == longest


@given(SENT, st.integers(1, 12))
def test_the_table_never_holds_more_than_its_limit(sent: list[tuple[list[int], int]], most: int) -> None:
    table: SentPages[int] = SentPages(most)
    for tokens, replica in sent:
        table.add(page_hashes(tokens, 2), replica)
        assert len(table) <= most
    if sent and page_hashes(sent[-1][0], 2):
        assert table.matches(page_hashes(sent[-1][0], 2))[sent[-1][1]] >= 1, "the first pages of the latest prompt are kept"


def test_a_page_is_noted_for_a_bounded_number_of_replicas() -> None:
    table: SentPages[int] = SentPages()
    for replica in range(3 * MAX_PAGE_HOLDERS):
        table.add((b"page",), replica)
    assert set(table.matches((b"page",))) == set(range(2 * MAX_PAGE_HOLDERS, 3 * MAX_PAGE_HOLDERS))


def test_a_long_prompt_is_hashed_up_to_a_limit() -> None:
    assert len(page_hashes((7,) * (3 * MAX_PAGES_HASHED), 1)) == MAX_PAGES_HASHED


@given(SENT, TOKENS)
def test_a_dead_replica_matches_nothing_and_leaves_the_others_alone(sent: list[tuple[list[int], int]], prompt: list[int]) -> None:
    table: SentPages[int] = SentPages()
    for tokens, replica in sent:
        table.add(page_hashes(tokens, 2), replica)
    before = table.matches(page_hashes(prompt, 2))
    table.forget(0)
    before.pop(0, None)
    assert table.matches(page_hashes(prompt, 2)) == before


@given(MATCHES, LOADS)
def test_the_longest_match_wins_unless_its_replica_is_overloaded(matches: dict[int, int], loads: dict[int, int]) -> None:
    chosen = choose_replica(matches, loads)
    most = max(OVERLOAD * (sum(loads.values()) + 1) / len(loads), FREE_REQUESTS)
    assert chosen in loads
    assert loads[chosen] + 1 <= most or loads[chosen] == min(loads.values())
    for replica, pages in matches.items():
        if replica in loads and loads[replica] + 1 <= most:
            assert matches.get(chosen, 0) >= pages, "a longer match was free"


@given(st.lists(st.integers(0, 5), min_size=1, max_size=200), st.integers(1, 8))
def test_no_replica_gets_far_more_than_its_share_of_one_popular_prompt(prompts: list[int], replicas: int) -> None:
    table: SentPages[int] = SentPages()
    loads = dict.fromkeys(range(replicas), 0)
    for number in prompts:
        pages = page_hashes([number] * 9, 2)
        chosen = choose_replica(table.matches(pages), loads)
        table.add(pages, chosen)
        loads[chosen] += 1
    assert max(loads.values()) <= max(OVERLOAD * sum(loads.values()) / replicas + 1, FREE_REQUESTS)


def test_a_request_without_replicas_cannot_be_routed() -> None:
    with pytest.raises(ValueError, match="no replica"):
        choose_replica({}, {})
