"""The fair scheduling policy on plain numbers: shares of callers, bounded waiting, and no row that is preempted in a cycle."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from onedraw.engine.fairness import PromptTurns, RunningRow, TurnKey, displaced, newest_of_most, ranks, turn_length

A, B, C = (TurnKey(caller, "1") for caller in "abc")
KEYS = st.builds(
    lambda caller, request, background: TurnKey(f"c{caller}", f"c{caller}.r{request}", background),
    st.integers(0, 4),
    st.integers(0, 3),
    st.booleans(),
)
ROWS = st.lists(st.builds(RunningRow, KEYS, st.integers(-5, 5)), max_size=12)


def test_rows_are_ranked_round_robin_over_the_requests_of_their_caller() -> None:
    many, one = TurnKey("a", "many"), TurnKey("a", "one")
    assert [rank.in_caller for rank in ranks([many, many, many, one])] == [0, 2, 3, 1]
    assert [rank.in_request for rank in ranks([many, many, many, one])] == [0, 1, 2, 0]


def test_a_new_caller_displaces_the_newest_row_of_the_caller_that_holds_most() -> None:
    rows = [RunningRow(key, -1) for key in (A, A, B, A, B)]
    assert displaced(C, rows) == [3, 4, 1]


def test_a_new_request_displaces_a_row_of_a_request_with_several_choices() -> None:
    many, one = TurnKey("a", "many"), TurnKey("a", "one")
    rows = [RunningRow(many, -1), RunningRow(one, -1), RunningRow(many, -1)]
    assert displaced(TurnKey("a", "new"), rows) == [2]


def test_among_callers_with_equal_shares_the_row_longest_past_its_turn_is_displaced() -> None:
    rows = [RunningRow(A, 3), RunningRow(B, -1), RunningRow(C, 7)]
    assert displaced(TurnKey("d", "1"), rows) == [2, 0]


def test_choices_of_one_request_never_displace_each_other() -> None:
    assert displaced(A, [RunningRow(A, 90), RunningRow(A, 80)]) == []


def test_background_rows_are_displaced_first_and_displace_background_rows_only() -> None:
    batch = TurnKey("a", "batch", background=True)
    rows = [RunningRow(A, 9), RunningRow(batch, -1), RunningRow(A, -1), RunningRow(batch, -1)]
    assert displaced(TurnKey("a", "new"), rows) == [3, 1, 2, 0]
    assert displaced(TurnKey("a", "1"), rows) == [3, 1]  # its own rows never
    assert displaced(batch, rows) == []
    assert displaced(TurnKey("b", "batch", background=True), rows) == [3]
    assert newest_of_most([row.key for row in rows], [0, 1, 2]) == 1


def test_background_rows_do_not_count_as_rows_of_their_caller() -> None:
    """A caller with a batch gets as many lanes for its other requests as a caller without one."""
    rows = [RunningRow(TurnKey("a", "batch", background=True), -1)] * 3 + [RunningRow(B, -1)] * 2
    assert displaced(A, rows) == [2, 1, 0, 4]
    assert ranks([row.key for row in rows] + [A])[-1] == (0, 0)


def test_with_one_key_the_newest_row_is_preempted_for_pages() -> None:
    assert newest_of_most([A, A, A], [0, 1, 2]) == 2
    assert newest_of_most([A, B, A, B], [0, 1, 3]) == 3


def test_a_longer_history_has_a_longer_turn() -> None:
    assert turn_length(100, 64) == 64
    assert turn_length(8000, 64) == 1000


@settings(max_examples=300)
@given(KEYS, ROWS)
def test_a_displaced_caller_still_holds_as_many_rows_as_the_one_that_displaced_it(key: TurnKey, rows: list[RunningRow]) -> None:
    """Therefore the displaced row cannot displace the other one in return."""
    for victim in displaced(key, rows):
        row = rows[victim]
        assert key.background <= row.key.background
        after = [other for index, other in enumerate(rows) if index != victim] + [RunningRow(key, -64)]
        if row.overtime < 0:
            assert len(after) - 1 not in displaced(row.key, after)
        held = Counter(other.key.share for other in after)
        kinds = row.key.background, key.background
        assert kinds == (True, False) or row.key.caller == key.caller or held[row.key.share] >= held[key.share] - 1


@settings(max_examples=300)
@given(ROWS)
def test_the_oldest_row_is_never_the_first_to_be_preempted_for_pages(rows: list[RunningRow]) -> None:
    keys = [row.key for row in rows]
    if len(keys) > 1:
        first = newest_of_most(keys, range(len(keys)))
        assert keys[first].background == any(key.background for key in keys)
        assert first != 0 or [key.background for key in keys].count(keys[0].background) == 1


@settings(max_examples=200)
@given(st.integers(1, 4), st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 6))
def test_every_caller_is_served_within_a_bound_and_no_lane_is_idle(lanes: int, work: list[int], turn: int) -> None:
    """A model of lanes alone. `work`: tokens that each caller wants; all arrive at once and take turns of this many tokens."""
    left = dict(enumerate(work))
    waiting, running = list(left), {}  # tokens in its current turn, by caller
    first: dict[int, int] = {}
    for step in range(sum(work) + 1):
        while waiting:
            if len(running) == lanes:
                rows = [RunningRow(TurnKey(str(caller), ""), done - turn) for caller, done in running.items()]
                victims = displaced(TurnKey(str(waiting[0]), ""), rows)
                if not victims:
                    break
                victim = list(running)[victims[0]]
                del running[victim]
                waiting.append(victim)
            running[waiting.pop(0)] = 0
        assert len(running) == min(lanes, len(left))  # work conserving
        for caller in list(running):
            first.setdefault(caller, step)
            running[caller] += 1
            left[caller] -= 1
            if not left[caller]:
                del left[caller], running[caller]
    assert not left
    assert all(first[caller] <= caller // lanes * turn for caller in first), (first, lanes, turn)


def test_a_small_prompt_goes_before_the_rest_of_a_long_one() -> None:
    turns = PromptTurns()
    assert turns.order([A]) == [0]
    turns.record(A, 512)
    assert turns.order([A, B]) == [0, 1]  # a new request gets no credit for the time before its arrival
    turns.record(A, 512)
    assert turns.order([A, B]) == [1, 0]


def test_prompts_in_the_background_get_the_tokens_that_others_leave() -> None:
    turns, batch = PromptTurns(), TurnKey("b", "batch", background=True)
    turns.order([batch, A])
    turns.record(A, 5000)
    assert turns.order([batch, A]) == [1, 0]


@settings(max_examples=200)
@given(st.lists(KEYS.map(lambda key: key._replace(background=False)), min_size=1, max_size=8))
def test_every_prompt_gets_tokens_within_as_many_steps_as_there_are_prompts(keys: list[TurnKey]) -> None:
    """A step serves one prompt; requests of a caller and callers take turns, whatever comes meanwhile."""
    turns, served = PromptTurns(), Counter[TurnKey]()
    requests = list(dict.fromkeys(keys))
    callers = {key.caller for key in requests}
    most = len(callers) * max(sum(key.caller == caller for key in requests) for caller in callers)
    for _ in range(most):
        chosen = requests[turns.order(requests)[0]]
        turns.record(chosen, 512)
        served[chosen] += 1
    assert all(served[key] for key in requests)
