"""Prompts are cut into steps by the measured speed of the device. No speed, and no wrong clock, changes a bit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from onedraw.engine.scheduler import ScheduledRow, Scheduler
from onedraw.engine.sequence import Sequence as EngineSequence
from onedraw.engine.stats import Stats
from onedraw.types import Request, SamplingParams
from tests.laws.harness import Answer, Schedule, plain, run, same
from tests.support import tiny
from tests.support.torch_backend import make_backend

LENGTHS = (40, 500, 330, 70, 200)
NAMES = ("qwen3_5_odd", "gemma4_e2b")  # prompts are cut at multiples of 64 positions; sliding windows free pages


class WrongClock(Scheduler):
    """Believes that steps took random times, from a nanosecond to a quarter of an hour, or none that is possible."""

    clock = np.random.default_rng(7)

    def record_step(self, members: Sequence[ScheduledRow], seconds: float) -> None:
        told = float(self.clock.choice([0.0, math.inf, 10.0 ** self.clock.uniform(-9.0, 3.0)]))
        super().record_step(members, told)


class IgnoresChunks(WrongClock):
    """A planted fault: cuts a prompt at whatever position the time allows."""

    def _chunk_length(self, sequence: EngineSequence, budget: int) -> int:
        return min(sequence.remaining, budget, 77)


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Request], list[Answer]]:
    folder = tiny.write_safetensors(request.param, tmp_path_factory.mktemp("step_seconds") / request.param)
    rng = np.random.default_rng(3)
    requests = [
        Request(
            f"q{index}",
            tuple(int(t) for t in rng.integers(0, tiny.VOCAB, length)),
            SamplingParams(temperature=(0.0, 1.0)[index % 2], seed=index, max_tokens=30, checksums=True),
        )
        for index, length in enumerate(LENGTHS)
    ]
    backend = make_backend(folder, lanes=1, pages=-(-600 // 8), max_context=600)
    return folder, requests, plain(lambda: backend, requests)


def answers(folder: Path, requests: list[Request], scheduler: type[Scheduler]) -> tuple[list[Answer], Stats]:
    backend = make_backend(folder, lanes=5, pages=5 * -(-600 // 8), max_context=600)
    schedule = Schedule(arrivals=(0, 2, 4, 6, 8), step_seconds=0.1)
    return run(backend, requests, dataclasses.replace(schedule, scheduler=scheduler))


def test_no_clock_changes_a_bit(case: tuple[Path, list[Request], list[Answer]]) -> None:
    folder, requests, expected = case
    got, stats = answers(folder, requests, WrongClock)
    assert same(got, expected)
    assert stats.middle_chunks > 3
    assert stats.mixed_steps > 0


def test_a_planted_fault_is_caught(case: tuple[Path, list[Request], list[Answer]]) -> None:
    folder, requests, expected = case
    if "qwen3_5" not in folder.name:
        pytest.skip("attention has one form, so any cut gives the same bits")
    got, _ = answers(folder, requests, IgnoresChunks)
    assert not same(got, expected)
