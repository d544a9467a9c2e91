"""Three seconds of the load test: no stream is lost or mixed, and disconnected clients leave nothing behind on the server."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

import bench.load
from bench.load import load


@pytest.fixture(autouse=True)
def _long_settle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.load, "SETTLE_SECONDS", 120.0)


def test_no_concurrent_stream_is_lost_or_mixed() -> None:
    result = asyncio.run(load(clients=40, seconds=3.0, disconnect=0.2))
    assert (result.lost, result.mixed) == (0, 0), result
    assert (result.left_running, result.left_waiting, result.left_pages) == (0, 0, 0)
    assert result.finished + result.disconnected >= 40
    assert result.finished > 20
    assert result.disconnected > 4  # even if every client runs a single request
    assert result.overhead_p99_ms > 0
    assert result.memory_last_mib < 1.3 * result.memory_first_mib


def test_a_stream_with_a_different_token_is_counted_as_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: the expected tokens of every request are wrong."""
    wrong = [replace(case, tokens=(case.tokens[0] ^ 1, *case.tokens[1:])) for case in bench.load.cases()]
    monkeypatch.setattr(bench.load, "cases", lambda: wrong)
    result = asyncio.run(load(clients=4, seconds=0.5, disconnect=0.2))
    assert result.mixed == result.finished + result.disconnected > 0
    assert not result.passed
