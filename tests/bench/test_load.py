"""Three seconds of the load: streams are whole and their own, and those who vanish leave nothing behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

import bench.load
from bench.load import load


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.load, "SETTLE_SECONDS", 120.0)


def test_many_streams_at_once_are_whole_and_their_own() -> None:
    result = asyncio.run(load(clients=40, seconds=3.0, vanish=0.2))
    assert (result.lost, result.mixed) == (0, 0), result
    assert (result.left_running, result.left_waiting, result.left_pages) == (0, 0, 0)
    assert result.finished + result.vanished >= 40
    assert result.finished > 20
    assert result.vanished > 4  # so many do with their first request already
    assert result.overhead_p99_ms > 0
    assert result.memory_last_mib < 1.3 * result.memory_first_mib


def test_a_stream_with_another_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what the requests say alone is written down wrongly."""
    given = [replace(case, tokens=(case.tokens[0] ^ 1, *case.tokens[1:])) for case in bench.load.cases()]
    monkeypatch.setattr(bench.load, "cases", lambda: given)
    result = asyncio.run(load(clients=4, seconds=0.5, vanish=0.2))
    assert result.mixed == result.finished + result.vanished > 0
    assert not result.holds
