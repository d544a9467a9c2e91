"""Generations as JSON and back: they are read as they were written, and older records can still be read."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onedraw.contract.record import from_json, to_json
from onedraw.llm.reply_stream import Generation
from onedraw.types import DryParams, SamplingParams

PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_p=st.floats(0.001, 1),
    logit_bias=st.just(((3, -math.inf), (5, 1.25))),
    dry=st.none() | st.builds(DryParams, multiplier=st.floats(0, 9), breakers=st.frozensets(st.integers(0, 99))),
    seed=st.integers(0, 2**53 - 1),
    stop_ids=st.frozensets(st.integers(0, 2**31)),
    bad_words=st.lists(st.lists(st.integers(0, 9), min_size=1).map(tuple), max_size=3).map(tuple),
    logprobs=st.none() | st.integers(0, 128),
)
GENERATIONS = st.builds(
    Generation,
    prompt=st.lists(st.integers(0, 2**31)).map(tuple),
    params=PARAMS,
    stop=st.lists(st.text()).map(tuple),
    predicted=st.lists(st.integers(0, 9)).map(tuple),
    speculate=st.booleans(),
)


@given(GENERATIONS)
def test_a_generation_is_read_as_it_was_written(generation: Generation) -> None:
    line = json.dumps(to_json(generation), allow_nan=False)
    assert from_json(Generation, json.loads(line)) == generation


def test_a_value_that_json_cannot_hold_is_named() -> None:
    with pytest.raises(TypeError, match=r"params\.dry is a object"):
        to_json(Generation((1,), SamplingParams(dry=object())))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"prompt": ["1"]}, "is not of type int"),
        ({"speculate": 1}, "is not of type bool"),
        ({"mood": 1}, "no field 'mood'"),
        ({"params": 3}, "must be an object"),
        ({"prompt": [True]}, "is not of type int"),
    ],
)
def test_a_value_of_another_type_is_refused(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        from_json(Generation, {**to_json(Generation((1,), SamplingParams())), **change})


def test_the_keys_of_a_record_stay() -> None:
    """Records on disk hold these names."""
    written = to_json(Generation((1,), SamplingParams()))
    assert list(written) == [
        *("prompt", "params", "stop", "n", "skip_special", "reading", "thinking_budget", "guide", "origin", "predicted"),
        *("speculate", "label"),
    ]
    assert list(written["reading"]) == ["opening", "reasoning", "thinking", "spelled", "calls"]


def test_a_record_of_an_older_version_is_read() -> None:
    written = to_json(Generation((1,), SamplingParams()))
    older = {**written, "params": {**written["params"], "constraint": None}}
    assert from_json(Generation, older) == Generation((1,), SamplingParams())
    with pytest.raises(ValueError, match="no field 'constraint'"):
        from_json(Generation, {**written, "params": {**written["params"], "constraint": {}}})
