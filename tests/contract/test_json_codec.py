"""Values as JSON and back: what is written is read as it was, and what cannot be written is named."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onedraw.contract.record import Unwritable, read, write
from onedraw.llm.llm import Generation
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
ASKS = st.builds(
    Generation,
    prompt=st.lists(st.integers(0, 2**31)).map(tuple),
    params=PARAMS,
    stop=st.lists(st.text()).map(tuple),
    predicted=st.lists(st.integers(0, 9)).map(tuple),
    speculate=st.booleans(),
)


@given(ASKS)
def test_what_was_written_is_read_as_it_was(generation: Generation) -> None:
    line = json.dumps(write(generation), allow_nan=False)
    assert read(Generation, json.loads(line)) == generation


def test_what_has_no_written_form_is_named() -> None:
    with pytest.raises(Unwritable, match=r"params\.dry holds a object"):
        write(Generation((1,), SamplingParams(dry=object())))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"prompt": ["1"]}, "is no int"),
        ({"speculate": 1}, "is no bool"),
        ({"mood": 1}, "no field 'mood'"),
        ({"params": 3}, "must be an object"),
        ({"prompt": [True]}, "is no int"),
    ],
)
def test_another_kind_of_value_is_refused(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        read(Generation, {**write(Generation((1,), SamplingParams())), **change})
