"""The soak: its judge catches lost, mixed and wrong answers, and three minutes of it find none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench.soak import STEADY, Answer, Case, Choice, Judgement, Tally, compare, make_case, slope, soak

MODEL = STEADY.model
ALONE: dict[int, Answer] = {
    0: {0: Choice([1, 2, 3], [-0.5, -1.0, -2.0], "abc", "stop")},
    1: {0: Choice([4, 5], [-0.5, -1.0], "de", "length")},
}


def judged(case: int, answer: Answer, *, whole: bool = True) -> Judgement:
    tally, verdict = Tally(), Judgement()
    tally.received(MODEL, Case(case, "/v1/completions", {}), answer, whole=whole)
    compare(MODEL, ALONE, [tally], verdict)
    return verdict


def test_the_answer_of_a_request_that_ran_alone_is_right() -> None:
    verdict = judged(0, {0: Choice([1, 2, 3], [-0.5, -1.0, -2.0], "abc", "stop")})
    assert (verdict.judged, verdict.wrong, verdict.mixed) == (1, 0, 0)


@pytest.mark.parametrize(
    "choice",
    [
        Choice([1, 2, 4], [-0.5, -1.0, -2.0], "abc", "stop"),
        Choice([1, 2, 3], [-0.5, -1.0, -2.0000001], "abc", "stop"),
        Choice([1, 2, 3], [-0.5, -1.0, -2.0], "abd", "stop"),
        Choice([1, 2, 3], [-0.5, -1.0, -2.0], "abc", "length"),
    ],
    ids=["token", "logprob", "text", "ending"],
)
def test_a_planted_difference_is_wrong(choice: Choice) -> None:
    assert judged(0, {0: choice}).wrong == 1


def test_the_answer_of_another_request_is_mixed() -> None:
    assert judged(0, ALONE[1]).mixed == 1


def test_an_answer_that_was_cut_off_must_be_a_beginning() -> None:
    assert judged(0, {0: Choice([1, 2], [-0.5, -1.0], "ab")}, whole=False).wrong == 0
    assert judged(0, {0: Choice([1, 3], [-0.5, -1.0], "ac")}, whole=False).wrong == 1


def test_a_case_is_the_same_request_every_time() -> None:
    assert make_case(5, STEADY, seed=1) == make_case(5, STEADY, seed=1) != make_case(5, STEADY, seed=2)


def test_the_slope_is_in_mib_per_ten_thousand_requests() -> None:
    assert slope([(0.0, 0, 100.0, 9), (1.0, 5_000, 101.0, 9), (2.0, 10_000, 102.0, 9)]) == pytest.approx(2.0)


@pytest.mark.long
@pytest.mark.weights
def test_three_minutes_of_faults_lose_mix_and_change_nothing(tmp_path: Path) -> None:
    report = asyncio.run(soak(minutes=3, seed=1, out=tmp_path, notify=False))
    assert report.broken == [], report
    assert report.faults["kills"] > 0
    assert report.faults["clock jumps"] > 0
    assert report.partial_answers > 0
    assert report.records_read > 0
