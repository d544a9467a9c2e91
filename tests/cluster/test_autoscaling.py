"""The number of replicas follows the load: up after a short delay, down after a long one, within its limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onedraw.cluster.autoscaling import AutoscalingConfig, Change, replica_range, scaled
from onedraw.errors import BadSetting

CONFIG = AutoscalingConfig(1, 4, target_ongoing_requests=10, upscale_delay=5, downscale_delay=60)


def run(config: AutoscalingConfig, loads: list[int], *, replicas: int = 1) -> list[int]:
    """Return the number of replicas in each second, with these loads."""
    found, change = [], None
    for now, ongoing in enumerate(loads):
        desired = config.desired(ongoing, lanes=8)
        replicas, change = scaled(config, change, replicas=replicas, desired=desired, now=float(now))
        found.append(replicas)
    return found


@given(st.integers(0, 10**6), st.integers(1, 50), st.integers(0, 50), st.floats(0.1, 1000))
def test_there_are_as_many_replicas_as_bring_the_load_to_its_target(load: int, least: int, more: int, target: float) -> None:
    config = AutoscalingConfig(least, least + more, target)
    desired = config.desired(load, lanes=3)
    assert least <= desired <= least + more
    assert load / desired <= target or desired == least + more
    assert desired == least or load / (desired - 1) > target


def test_the_target_is_what_a_replica_runs_at_once_unless_it_is_given() -> None:
    config = AutoscalingConfig(1, 9)
    assert [config.desired(load, lanes=8) for load in (0, 8, 9, 16, 17)] == [1, 1, 2, 2, 3]


def test_a_target_near_zero_brings_all_replicas() -> None:
    assert AutoscalingConfig(1, 9, 1e-320).desired(1, lanes=8) == 9


def test_a_load_that_lasts_brings_replicas_after_the_delay() -> None:
    assert run(CONFIG, [35] * 7) == [1] * 5 + [4] * 2


def test_a_short_burst_brings_none() -> None:
    assert run(CONFIG, ([35] * 4 + [5]) * 5) == [1] * 25


def test_the_lowest_load_of_the_delay_decides_how_many_replicas_come() -> None:
    assert run(CONFIG, [15, 15, 35, 35, 35, 35, 35]) == [1] * 5 + [2] * 2


def test_the_highest_load_of_the_delay_decides_how_many_replicas_go() -> None:
    loads = [25] + [5] * 59 + [5]
    assert run(CONFIG, loads, replicas=4)[-2:] == [4, 3]
    assert run(CONFIG, [5] * 61, replicas=4)[-2:] == [4, 1]


def test_a_moment_of_load_begins_the_delay_of_going_anew() -> None:
    assert run(CONFIG, [5] * 50 + [35] + [5] * 60, replicas=4) == [4] * 111
    assert run(CONFIG, [5] * 50 + [35] + [5] * 61, replicas=4)[-1] == 1


def test_without_delays_the_number_follows_at_once() -> None:
    config = AutoscalingConfig(1, 4, 10, upscale_delay=0, downscale_delay=0)
    assert run(config, [0, 15, 50, 35, 0]) == [1, 2, 4, 4, 1]


@given(st.lists(st.integers(0, 60), max_size=200), st.integers(1, 4))
def test_the_number_moves_only_towards_what_the_load_asks_for(loads: list[int], replicas: int) -> None:
    before = replicas
    for load, now in zip(loads, run(CONFIG, loads, replicas=replicas), strict=True):
        desired = CONFIG.desired(load, lanes=8)
        assert min(before, desired) <= now <= max(before, desired)
        before = now


def test_a_change_that_waits_is_forgotten_when_the_load_is_right() -> None:
    assert scaled(CONFIG, Change(0.0, 3), replicas=2, desired=2, now=99.0) == (2, None)


def test_a_range_is_the_least_and_the_most() -> None:
    assert [replica_range(text) for text in ("2", "1..4")] == [(2, 2), (1, 4)]


@pytest.mark.parametrize("text", ["", "two", "1..", "..4", "1...4", "1..2..3", "1-4", "1.5"])
def test_a_text_that_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(BadSetting, match=r"write for example 2, or 1\.\.4"):
        replica_range(text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, 0), "--replicas: .* at least 1"),
        ((3, 2), r"--replicas: .* not 3\.\.2"),
        ((1, 2, 0.0), "--target-ongoing-requests: must be more than 0"),
        ((1, 2, float("nan")), "--target-ongoing-requests"),
        ((1, 2, None, -1.0), "--upscale-delay: must be a number of seconds"),
        ((1, 2, None, 1.0, float("inf")), "--downscale-delay"),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(values: tuple[float, ...], message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        AutoscalingConfig(*values)  # type: ignore[arg-type]
