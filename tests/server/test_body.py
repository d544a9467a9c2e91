"""Request bodies: values and nesting are counted in the bytes, and too many are refused before any object is built."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from onedraw.errors import BadRequest
from onedraw.limits import MAX_BODY_DEPTH, MAX_BODY_PARTS, MAX_BODY_VALUES, MAX_ERROR_CHARACTERS
from onedraw.server.body import BodyShape, read_json, shape_of
from onedraw.server.parsing import TABLES
from tests.server.running import Served

TEXT = st.text() | st.text(alphabet='\\"[]{},:/nu')
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=20,
)


def counted(value: Any) -> BodyShape:
    """Count values and depth by walking through a parsed value."""
    match value:
        case dict():
            inside, fields = [counted(item) for item in value.values()], len(value)
        case list():
            inside, fields = [counted(item) for item in value], 0
        case _:
            return BodyShape()
    return BodyShape(
        values=max(len(inside) - 1, 0) + sum(one.values for one in inside),
        parts=1 + fields + sum(one.parts for one in inside),
        depth=1 + max((one.depth for one in inside), default=0),
    )


@given(value=VALUES, block=st.integers(1, 40), ascii=st.booleans(), indent=st.sampled_from([None, 1]))
def test_counting_bytes_gives_the_counts_of_the_parsed_body(value: Any, block: int, ascii: bool, indent: int | None) -> None:
    body = json.dumps(value, ensure_ascii=ascii, indent=indent).encode()
    assert shape_of(body, block=block) == counted(value)
    assert read_json(body) == value


@given(body=st.binary() | st.text(alphabet='\\"[]{},: 1u\n').map(str.encode))
def test_any_bytes_give_a_value_or_a_named_error(body: bytes) -> None:
    """A valid body is parsed as by the standard library."""
    try:
        value, refusal = read_json(body), None
    except BadRequest as error:
        refusal = error.code
    if refusal is None:
        assert value == json.loads(body.decode("utf-8-sig"))
    else:
        assert refusal in ("invalid_json", "invalid_number", "invalid_text", "body_too_complex")


@pytest.mark.parametrize("number", ["1" * 5_000, "-" + "1" * 1_000_000, "NaN", "-Infinity", "1e999"])
def test_a_number_that_cannot_be_read_is_refused_by_the_name_of_its_field(number: str) -> None:
    with pytest.raises(BadRequest) as error:
        read_json(b'{"prompt": [5], "seed": %b}' % number.encode())
    assert (error.value.param, error.value.code) == ("seed", "invalid_number")


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


TOO_MUCH = {
    "values": ("[" + "1," * (MAX_BODY_VALUES + 1) + "1]", MAX_BODY_VALUES),
    "empty lists": ("[" + "[]," * MAX_BODY_PARTS + "1]", MAX_BODY_PARTS),
    "fields": (json.dumps({str(n): 1 for n in range(MAX_BODY_PARTS)}), MAX_BODY_PARTS),
    "depth": (nested(MAX_BODY_DEPTH), MAX_BODY_DEPTH),
    "unclosed": ("[" * 5_000_000, MAX_BODY_DEPTH),
}


@pytest.mark.parametrize("field", ["metadata", "prompt", "no such field"])
@pytest.mark.parametrize("name", TOO_MUCH)
def test_a_body_with_too_many_values_is_refused(fake: Served, name: str, field: str) -> None:
    """Regression: parsing two million empty lists (8 MB) stopped every stream of the server for seconds."""
    inner, limit = TOO_MUCH[name]
    answer = fake.send("/v1/completions", f'{{"max_tokens": 1, "prompt": "a", "{field}": {inner}}}')
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "body_too_complex")
    assert f"over {limit:,} " in error["message"]


def test_a_body_within_the_limits_is_parsed(fake: Served) -> None:
    for inner in (
        "[" + "1," * (MAX_BODY_VALUES - 8) + "1]",
        "[" + "[]," * (MAX_BODY_PARTS - 8) + "1]",
        nested(MAX_BODY_DEPTH - 1),
    ):
        assert fake.send("/v1/completions", f'{{"max_tokens": 1, "prompt": "a", "metadata": {inner}}}').status_code == 200


def test_commas_and_brackets_inside_strings_are_not_counted(fake: Served) -> None:
    text = '[{"a": "\\"' * 300_000
    assert fake.post("/v1/completions", prompt="a", max_tokens=1, metadata={"code": text}).status_code == 200


def test_an_error_quotes_only_the_beginning_of_an_unknown_field_name(fake: Served) -> None:
    """Regression: a long unknown name was compared with every known one and quoted twice."""
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/messages", {"messages": [], "max_tokens": 1})):
        answer = fake.post(path, **body, **{"x" * 10_000_000: 1})
        assert answer.status_code == 400
        assert len(answer.content) < 3 * MAX_ERROR_CHARACTERS


@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: str(kind.__name__))
def test_a_list_of_invalid_items_gives_few_errors(kind: type[BaseModel]) -> None:
    """Regression: an error for each of a million items took seconds and a gigabyte, and only one was sent."""
    for name, field in kind.model_fields.items():
        with pytest.raises(ValidationError) as caught:
            kind.model_validate({field.alias or name: [object()] * 9})
        about = [detail for detail in caught.value.errors() if detail["loc"][:1] == (field.alias or name,)]
        assert len(about) < 5, name


def test_duplicate_names_among_many_tools_are_found(fake: Served) -> None:
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(20_000)]
    answer = fake.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}], tools=[*tools, tools[0]])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools[20000].function.name")
