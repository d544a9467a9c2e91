"""A prompt goes to the replica that was sent the longest beginning of it, unless that replica has more than its share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from onedraw.cluster.routing import (
    MAX_PAGE_HOLDERS,
    MAX_PAGES_HASHED,
    REQUEST_TOKENS,
    Loads,
    SentPages,
    choose_replica,
    is_noted,
    page_hashes,
)

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=24)
SENT = st.lists(st.tuples(TOKENS, st.integers(0, 3)), max_size=20)
LOADS = st.dictionaries(st.integers(0, 9), st.integers(0, 60), min_size=1, max_size=10)
MATCHES = st.dictionaries(st.integers(0, 12), st.integers(0, 9), max_size=10)


def loads_of(counts: dict[int, int]) -> Loads[int]:
    loads: Loads[int] = Loads()
    for replica, count in counts.items():
        loads.add(replica)
        loads.change(replica, count)
    return loads


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
def test_a_replica_matches_what_it_was_sent_up_to_a_third(sent: list[tuple[list[int], int]], prompt: list[int]) -> None:
    table: SentPages[int] = SentPages()
    for tokens, replica in sent:
        table.add(page_hashes(tokens, 2), replica)
    matches = table.matches(page_hashes(prompt, 2))
    for replica in range(4):
        longest = max((common_pages(tokens, prompt, 2) for tokens, other in sent if other == replica), default=0)
        assert 2 / 3 * longest <= matches.get(replica, 0) <= longest
        assert is_noted(longest) <= (matches.get(replica, 0) == longest)


@given(SENT, TOKENS, TOKENS)
def test_the_next_turn_of_a_conversation_matches_all_of_the_last(
    sent: list[tuple[list[int], int]], last: list[int], more: list[int]
) -> None:
    table: SentPages[int] = SentPages()
    table.add(page_hashes(last, 2), 9)
    for tokens, replica in sent:
        table.add(page_hashes(tokens, 2), replica)
    matches = table.matches(page_hashes(last + more, 2))
    assert matches.get(9, 0) >= len(page_hashes(last, 2))


def test_a_conversation_keeps_its_replica_though_many_others_were_sent_its_system_prompt() -> None:
    """A page is noted for few replicas. When only those of the first pages counted, a conversation lost its replica as soon as
    a few others had been sent the same system prompt."""
    table: SentPages[int] = SentPages()
    system = [7] * 100
    table.add(page_hashes([*system, *range(20)], 2), 0)
    for replica in range(1, 100):
        table.add(page_hashes([*system, 1000 + replica] * 2, 2), replica)
    matches = table.matches(page_hashes([*system, *range(30)], 2))
    assert max(matches, key=lambda replica: matches[replica]) == 0


def test_a_prompt_takes_few_entries_of_the_table() -> None:
    table: SentPages[int] = SentPages()
    prompt = list(range(4 * MAX_PAGES_HASHED))
    for length in range(1000, 3001, 100):
        table.add(page_hashes(prompt[:length], 1), 0)
    assert len(table) <= 21 + 24


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


def test_a_replica_that_has_left_is_not_chosen() -> None:
    loads = loads_of({0: 0, 1: 0})
    loads.remove(0)
    assert choose_replica({0: 5}, loads, page_size=16, lanes=8) == 1


@given(MATCHES, LOADS, st.sets(st.integers(0, 9)), st.integers(1, 60))
def test_the_replica_with_the_least_cost_wins(
    matches: dict[int, int], counts: dict[int, int], unable: set[int], lanes: int
) -> None:
    chosen = choose_replica(matches, loads_of(counts), page_size=100, lanes=lanes, able=lambda replica: replica not in unable)
    able = counts.keys() - unable
    if not able:
        assert chosen is None
        return
    assert chosen in able
    mean = sum(counts.values()) / len(counts)
    costs = {
        replica: REQUEST_TOKENS * max(counts[replica] + 1 - mean, 0) - 100 * matches.get(replica, 0)
        for replica in able
        if counts[replica] < lanes or min(counts[one] for one in able) >= lanes
    }
    assert costs[chosen] == min(costs.values()) or counts[chosen] == min(counts[replica] for replica in able)
    assert all(costs[chosen] <= cost for replica, cost in costs.items() if replica in matches), "a cheaper match was free"


def test_a_request_does_not_wait_where_another_replica_has_a_free_lane() -> None:
    matches = {0: 1000}
    assert choose_replica(matches, loads_of({0: 3, 1: 3}), page_size=16, lanes=4) == 0
    assert choose_replica(matches, loads_of({0: 4, 1: 3}), page_size=16, lanes=4) == 1
    assert choose_replica(matches, loads_of({0: 5, 1: 4}), page_size=16, lanes=4) == 0, "it waits anywhere"


@given(st.lists(st.tuples(st.sampled_from(("add", "remove", "up", "down")), st.integers(0, 5)), max_size=60))
def test_loads_are_the_sums_of_their_changes(changes: list[tuple[str, int]]) -> None:
    loads: Loads[int] = Loads()
    counts: dict[int, int] = {}
    for what, replica in changes:
        if (what == "add") == (replica in counts):
            continue
        if what == "add":
            counts[replica] = 0
            loads.add(replica)
        elif what == "remove":
            del counts[replica]
            loads.remove(replica)
        else:
            counts[replica] += 1 if what == "up" else -1
            loads.change(replica, 1 if what == "up" else -1)
        assert (loads.total, {one: loads[one] for one in loads}) == (sum(counts.values()), counts)
        assert [counts[one] for one in loads.ascending()] == sorted(counts.values())
        busiest = loads.busiest()
        assert (None if busiest is None else counts[busiest]) == max(counts.values(), default=None)


def test_idle_replicas_get_new_prompts_in_turn() -> None:
    loads = loads_of(dict.fromkeys(range(4), 0))
    chosen = []
    for _ in range(8):
        replica = choose_replica({}, loads, page_size=16, lanes=8)
        assert replica is not None
        chosen.append(replica)
        loads.change(replica, 1)
        loads.change(replica, -1)
    assert chosen == [0, 1, 2, 3, 0, 1, 2, 3]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=200), st.integers(1, 8), st.sampled_from((1, 100)))
def test_no_replica_gets_far_more_than_its_share_of_one_popular_prompt(prompts: list[int], replicas: int, page: int) -> None:
    table: SentPages[int] = SentPages()
    loads = loads_of(dict.fromkeys(range(replicas), 0))
    for number in prompts:
        pages = page_hashes([number] * 9, 2)
        chosen = choose_replica(table.matches(pages), loads, page_size=page, lanes=1000)
        assert chosen is not None
        table.add(pages, chosen)
        loads.change(chosen, 1)
    assert max(loads[replica] for replica in loads) <= loads.total / replicas + 4 * page / REQUEST_TOKENS + 1


def test_without_replicas_none_is_chosen() -> None:
    assert choose_replica({1: 3}, Loads(), page_size=16, lanes=8) is None
