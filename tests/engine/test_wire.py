"""Messages between processes: whatever a request, an event, a counter or an error holds arrives bit for bit, and nothing else is
read from the bytes."""

from __future__ import annotations

import math
import struct
from dataclasses import fields, is_dataclass
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onedraw import errors
from onedraw.backends.base import Capacity, PageGroup
from onedraw.backends.fake import FakeBackend
from onedraw.engine import wire
from onedraw.engine.client import Event
from onedraw.engine.stats import DraftingEstimates, DraftStats, Stats
from onedraw.engine.wire import (
    ERRORS,
    MAX_INTEGER,
    Cancel,
    Close,
    Events,
    Failed,
    RequestCodec,
    Started,
    Submit,
    WireError,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from onedraw.errors import BadParameter, BadRequest, ContextOverflow, OnedrawError, QueueFull
from onedraw.text.constraints.factory import ReplyConstraint
from onedraw.text.constraints.response_format import ChoiceFormat, GbnfFormat, JsonFormat, LarkFormat, RegexFormat
from onedraw.text.constraints.wire import FORMATS, decode_constraint, encode_constraint
from onedraw.text.reasoning import ReasoningSyntax
from onedraw.text.reply_parser import ReplySyntax
from onedraw.text.tools.dialects import CallableTools, Tool
from onedraw.types import LONGEST_REPETITION, SEED_LIMIT, DryParams, Logprobs, Request, SampledToken, SamplingParams, Usage
from tests.support.searching import examples

CODEC = RequestCodec(encode_constraint, decode_constraint)

# ---------------------------------------------------------------------- random values of every field

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ids = st.integers(0, 2**31)
counts = st.integers(0, 2**53)
numbers = st.floats(allow_nan=True, allow_infinity=True)
tokens = st.lists(ids, max_size=5).map(tuple)


def of(kind: type, **given_fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Random values of a class. Every field must have a strategy, so a new field cannot be left out of this test."""
    assert {field.name for field in fields(kind)} == set(given_fields), kind
    return st.builds(kind, **given_fields)


dry = of(
    DryParams,
    multiplier=st.floats(0, 1e300),
    base=st.floats(1, 1e300),
    allowed_length=st.integers(1, LONGEST_REPETITION),
    range=st.integers(0, MAX_INTEGER),
    breakers=st.frozensets(ids, max_size=4),
)
biases = st.lists(st.tuples(ids, st.floats(max_value=1e9, allow_nan=False)), max_size=4).map(tuple)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    most = draw(st.integers(1, 2**53))
    made = of(
        SamplingParams,
        temperature=st.floats(0, 100),
        top_k=st.integers(0, MAX_INTEGER),
        top_p=st.floats(0, 1, exclude_min=True),
        min_p=st.floats(0, 1),
        repetition_penalty=st.floats(1e-9, 1e9),
        frequency_penalty=st.floats(-100, 100),
        presence_penalty=st.floats(-100, 100),
        dry=st.none() | dry,
        logit_bias=biases,
        seed=st.integers(0, SEED_LIMIT - 1),
        max_tokens=st.just(most),
        min_tokens=st.integers(0, most),
        stop_ids=st.frozensets(ids, max_size=4),
        bad_words=st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
        logprobs=st.none() | st.integers(0, 128),
        logprobs_mode=st.sampled_from(["raw", "processed", "both"]),
        logprob_token_ids=tokens,
        prompt_logprobs=st.none() | st.integers(0, 128),
        checksums=st.booleans(),
    )
    return draw(made)  # type: ignore[no-any-return]


reasoning = of(
    ReasoningSyntax,
    opens=words,
    closes=words,
    closing=words,
    anywhere=st.booleans(),
    switch=st.booleans(),
    effort=st.booleans(),
    prompted=st.booleans(),
)
tool = of(Tool, name=words, description=words, parameters=words, strict=st.booleans(), param=words)
calls = of(
    CallableTools,
    dialect=st.sampled_from(["hermes", "qwen_xml", "laguna", "gemma", "llama", "pythonic"]),
    tools=st.lists(tool, max_size=2).map(tuple),
    parallel=st.booleans(),
    required=st.booleans(),
)
syntax = of(
    ReplySyntax,
    opening=st.booleans(),
    reasoning=st.none() | reasoning,
    thinking=st.sampled_from(["may", "open", "over"]),
    spelled=st.frozensets(ids, max_size=3),
    calls=st.none() | calls,
)
formats = st.one_of(
    of(JsonFormat, schema=words, param=words),
    of(RegexFormat, pattern=words, param=words),
    of(ChoiceFormat, texts=st.lists(words.filter(bool), min_size=1, max_size=3).map(tuple), param=words),
    of(LarkFormat, lark=words, param=words, numbers=st.booleans()),
    of(GbnfFormat, gbnf=words, param=words),
)
constraints = of(ReplyConstraint, syntax=syntax, thinking_budget=st.none() | counts, response_format=st.none() | formats)
requests = of(
    Request,
    id=words,
    prompt=tokens,
    params=sampling_params(),
    given=tokens,
    forced=tokens,
    predicted=tokens,
    speculate=st.booleans(),
    constraint=st.none() | constraints,
    caller=words,
    parent=words,
    background=st.booleans(),
)
logprobs = of(
    Logprobs,
    logprob=numbers,
    top=st.lists(st.tuples(ids, numbers), max_size=3).map(tuple),
    processed=st.none() | numbers,
    mass=st.none() | numbers,
    asked=st.lists(st.tuples(ids, numbers), max_size=3).map(tuple),
)
sampled = of(
    SampledToken,
    token=ids,
    logprobs=st.none() | logprobs,
    checksum=st.none() | st.integers(0, 2**64 - 1),
    kept=st.booleans(),
    rejected=counts,
)
usage = of(Usage, **{field.name: counts for field in fields(Usage)} | {"queued": st.floats(0, 1e6)})
plain_errors = st.sampled_from(
    sorted((kind for kind in ERRORS.values() if kind not in (BadParameter, ContextOverflow)), key=lambda kind: kind.__name__)
)
failures = st.one_of(
    st.builds(lambda kind, message, param, code: kind(message, param=param, code=code), plain_errors, words, words, words),
    st.builds(BadParameter, words, words),
    st.builds(ContextOverflow, words, param=words, prompt=counts),
)
events = of(
    Event,
    request_id=words,
    sampled=st.lists(sampled, max_size=3).map(tuple),
    finish=st.sampled_from([None, "stop", "length", "cancelled"]),
    stop_id=st.none() | ids,
    usage=usage,
    scored=st.none() | st.lists(logprobs, max_size=3).map(tuple),
    error=st.none() | failures,
    kept=counts,
)
parts = st.tuples(numbers, numbers, numbers)
drafting = of(
    DraftingEstimates,
    step_cost=parts,
    drafter_cost=parts,
    acceptance=st.lists(st.tuples(words, numbers, numbers), max_size=2).map(tuple),
)
drafted_by = of(DraftStats, source=words, rows=counts, drafted=counts, kept=counts)
stats = of(
    Stats,
    **{field.name: numbers if field.type == "float" else counts for field in fields(Stats)}
    | {
        "accepted_per_position": st.lists(counts, max_size=3).map(tuple),
        "drafted_by": st.lists(drafted_by, max_size=2).map(tuple),
        "drafting": drafting,
    },
)
groups = of(PageGroup, pages=counts, window=st.none() | counts)
KINDS = {"int": counts, "bool": st.booleans(), "str": words, "int | None": st.none() | counts}
capacities = of(
    Capacity,
    **{field.name: KINDS[str(field.type)] for field in fields(Capacity) if field.name != "groups"}
    | {"groups": st.lists(groups, max_size=2).map(tuple)},
)


def bits(value: Any) -> Any:
    """A value as nested lists that are equal only if types, floats (bit for bit) and all fields are."""
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value), *(bits(getattr(value, field.name)) for field in fields(value))]
    if isinstance(value, OnedrawError):
        return [type(value), bits(value.args), sorted((name, bits(one)) for name, one in vars(value).items())]
    if isinstance(value, float):
        return ["float", struct.pack("<d", value)]
    if isinstance(value, tuple | list):
        return [type(value), *map(bits, value)]
    return [type(value), value]


# ---------------------------------------------------------------------- everything arrives


@examples(100, many=2000)
@given(st.lists(requests, max_size=3).map(tuple))
def test_every_field_of_a_request_arrives(sent: tuple[Request, ...]) -> None:
    message = decode_to_engine(CODEC.submit(sent))
    assert isinstance(message, Submit)
    assert bits(CODEC.requests(message)) == bits(sent)


@examples(100, many=2000)
@given(st.lists(events, max_size=3).map(tuple), st.none() | stats)
def test_every_field_of_an_event_arrives(sent: tuple[Event, ...], counters: Stats | None) -> None:
    message = decode_from_engine(encode(Events(sent, counters)))
    assert isinstance(message, Events)
    assert bits((message.events, message.stats)) == bits((sent, counters))


@examples(30, many=500)
@given(capacities, counts, stats, failures)
def test_the_first_and_the_last_message_arrive(capacity: Capacity, most: int, counters: Stats, failure: OnedrawError) -> None:
    first = decode_from_engine(encode(Started(capacity, most, counters, "one")))
    assert isinstance(first, Started)
    assert bits((first.capacity, first.max_requests, first.stats)) == bits((capacity, most, counters))
    last = decode_from_engine(encode(Failed(failure)))
    assert isinstance(last, Failed)
    assert bits(last.error) == bits(failure)
    assert str(last.error) == str(failure)
    assert last.error.status == failure.status


def test_cancellations_and_the_end_arrive() -> None:
    assert decode_to_engine(encode(Cancel(("a", "b")))) == Cancel(("a", "b"))
    assert decode_to_engine(encode(Close(2.5))) == Close(2.5)


def test_every_response_format_can_cross() -> None:
    from onedraw.text.constraints import response_format

    assert set(FORMATS.values()) == set(get_args(response_format.ReplyFormat))


def test_an_event_of_an_engine_arrives_as_the_engine_made_it() -> None:
    """Real events, whose numbers a sampler made: numpy's float32 and int64 become Python's numbers of the same value."""
    event = Event("a", (SampledToken(7, Logprobs(np.float32(-0.1), ((np.int64(7), np.float32(-0.1)),)), checksum=3),))  # type: ignore[arg-type]
    message = decode_from_engine(encode(Events((event,))))
    assert isinstance(message, Events)
    assert message.events == (event,)
    found = message.events[0].sampled[0].logprobs
    assert found is not None
    assert type(found.logprob) is float
    assert found.logprob == float(np.float32(-0.1))


def test_integers_without_a_limit_are_cut_to_64_bits() -> None:
    params = SamplingParams(top_k=10**400, dry=DryParams(1.0, range=10**40), logit_bias=((3, -(10**30)),))
    message = decode_to_engine(CODEC.submit((Request("a", (1,), params),)))
    assert isinstance(message, Submit)
    (found,) = CODEC.requests(message)
    assert found.params.top_k == MAX_INTEGER
    assert found.params.dry == DryParams(1.0, range=MAX_INTEGER)
    assert found.params.logit_bias == ((3, -1e30),)


# ---------------------------------------------------------------------- what cannot be sent is the request's error


def test_a_request_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(BadRequest, match="unpaired surrogates"):
        CODEC.submit((Request("\ud800", (1,), SamplingParams()),))
    with pytest.raises(BadRequest, match="64 bits"):
        CODEC.submit((Request("a", (10**30,), SamplingParams()),))
    unpaired = ReplyConstraint(ReplySyntax(), None, RegexFormat("\udfff", "guided_regex"))
    with pytest.raises(BadRequest, match="unpaired surrogates"):
        CODEC.submit((Request("a", (1,), SamplingParams(), constraint=unpaired),))


def test_an_error_that_quotes_a_broken_text_still_arrives() -> None:
    message = decode_from_engine(encode(Failed(BadRequest("no \ud800"))))
    assert isinstance(message, Failed)
    assert str(message.error) == "no \\ud800"


def test_an_error_of_another_package_arrives_as_the_nearest_of_the_tree() -> None:
    class Busy(QueueFull):
        code = "busy"

    message = decode_from_engine(encode(Failed(Busy("later"))))
    assert isinstance(message, Failed)
    assert type(message.error) is QueueFull
    assert (message.error.code, str(message.error)) == ("busy", "later")


# ---------------------------------------------------------------------- what is not a message is refused

WHOLE = CODEC.submit((Request("a", (1, 2), SamplingParams(), constraint=ReplyConstraint(ReplySyntax(), 5)),))


def raw(*parts: Any) -> bytes:
    return bytes([wire.VERSION]) + msgspec.msgpack.encode(parts)


REQUEST = {"id": "a", "prompt": [1], "params": {}}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes([wire.VERSION + 1]) + WHOLE[1:],
        WHOLE[:-1],
        WHOLE + b"\0",
        b"\x80\x04\x95",  # the beginning of a pickle
        raw("Unknown", []),
        raw("Submit", [REQUEST | {"prompt": ["1"]}], [None]),
        raw("Submit", [REQUEST | {"prompt": [1.0]}], [None]),
        raw("Submit", [REQUEST | {"params": {"temperature": -1.0}}], [None]),
        raw("Submit", [REQUEST | {"speculate": 1}], [None]),
        raw("Events", [{"request_id": "a", "finish": "tool_calls?"}], None),
        raw("Failed", ["SystemExit", [], {}]),
        encode(Failed(QueueFull("full"))),  # a message in the wrong direction
    ],
)
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_to_engine(data)


@pytest.mark.parametrize("data", [raw("Failed", ["SystemExit", [], {}]), raw("Failed", ["OnedrawError", [], []]), WHOLE])
def test_an_error_of_a_class_outside_the_tree_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_from_engine(data)


def test_a_constraint_that_cannot_be_read_is_refused() -> None:
    for described in (
        b"",
        b"\xc0",
        encode_constraint(ReplyConstraint(ReplySyntax(), 5))[:-1],
        msgspec.msgpack.encode([{}, 1, ["Any", {}]]),
    ):
        with pytest.raises(WireError):
            CODEC.requests(Submit((Request("a", (1,), SamplingParams()),), (described,)))
    with pytest.raises(WireError):
        CODEC.requests(Submit((Request("a", (1,), SamplingParams()),), ()))


def test_every_error_of_the_tree_can_cross() -> None:
    known = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, OnedrawError)}
    assert set(ERRORS.values()) == known
    assert len(known) > 15


def test_a_backend_as_it_is_can_be_described() -> None:
    capacity = FakeBackend().capacity
    message = decode_from_engine(encode(Started(capacity, 5, Stats(step_seconds=math.nan), "one")))
    assert isinstance(message, Started)
    assert bits(message.capacity) == bits(capacity)
    assert math.isnan(message.stats.step_seconds)
