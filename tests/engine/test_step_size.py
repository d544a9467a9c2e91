"""The limits on a step: measured prompt speed, and what is left after the device ran out of memory."""

from __future__ import annotations

import math

import pytest

from onedraw.engine.step_size import GROW_STEPS, LEAST_PROMPT_TOKENS, StepSize


def make(*, seconds: float | None = 0.1, chunk: int = 1) -> StepSize:
    return StepSize(rows=8, tokens=4096, chunk=chunk, seconds=seconds)


def test_prompts_get_what_the_device_computes_in_the_given_time() -> None:
    size = make()
    for _ in range(10):
        size.record(prompt_tokens=500, seconds=0.05)
    assert size.prompt_tokens(generating=True) == pytest.approx(1000, abs=2)


def test_a_step_with_a_fixed_cost_settles_at_the_given_time() -> None:
    size, tokens = make(), 4096
    for _ in range(40):
        tokens = size.prompt_tokens(generating=True)
        size.record(prompt_tokens=tokens, seconds=0.04 + tokens * 1e-4)
    assert tokens == pytest.approx(600, rel=0.05)  # 0.04 + 600 * 1e-4 = 0.1


@pytest.mark.parametrize(("seconds", "generating"), [(None, True), (0.1, False)])
def test_prompts_get_whole_steps_if_no_reply_waits_or_no_time_is_set(seconds: float | None, generating: bool) -> None:
    size = make(seconds=seconds)
    size.record(prompt_tokens=100, seconds=60.0)
    assert size.prompt_tokens(generating=generating) == 4096


@pytest.mark.parametrize("chunk", [1, 128])
def test_a_slow_device_still_computes_a_few_tokens_and_at_least_a_chunk(chunk: int) -> None:
    size = make(chunk=chunk)
    size.record(prompt_tokens=1, seconds=1e6)
    assert size.prompt_tokens(generating=True) == max(chunk, LEAST_PROMPT_TOKENS)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_impossible_times_are_ignored(seconds: float) -> None:
    size = make()
    size.record(prompt_tokens=100, seconds=seconds)
    assert size.prompt_tokens(generating=True) == 4096


def test_steps_are_halved_without_memory_and_grow_again() -> None:
    size = make()
    assert size.shrink(rows=8, tokens=1000)
    assert (size.rows, size.tokens) == (4, 500)
    grown = [size.record(prompt_tokens=0, seconds=0.01) for _ in range(GROW_STEPS)]
    assert grown == [False] * (GROW_STEPS - 1) + [True]
    assert (size.rows, size.tokens) == (8, 1000)
    assert not make().shrink(rows=1, tokens=1)
