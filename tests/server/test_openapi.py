"""The OpenAPI document has every path, and its ranges are those that the server accepts."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from pydantic import PlainValidator

from onedraw.server import protocol
from onedraw.server import protocol as called
from onedraw.server.anthropic import messages
from onedraw.server.app import create_app
from onedraw.server.config import ServerOptions
from onedraw.server.fields import Treatment
from onedraw.server.openai import responses_request as items
from onedraw.server.openapi import OBJECTS, POSTS, VALIDATOR_SCHEMAS, document, limits
from onedraw.server.parsing import TABLES
from onedraw.server.protocol import ChatRequest, CompletionRequest
from tests.server.running import Served, fake_llm, serving

PATHS = {"/v1/completions": {"prompt": "a"}, "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]}}
HELLO = [{"role": "user", "content": "a"}]
OTHERS: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/apply-template": {"messages": HELLO},
}
SHORT = {"max_tokens": 2, "seed": 1}


@pytest.fixture(scope="module")
def told(fake: Served) -> dict[str, Any]:
    answer = fake.get("/openapi.json")
    assert answer.status_code == 200
    value: dict[str, Any] = answer.json()
    return value


def test_every_path_and_method_is_in_the_document(fake: Served, told: dict[str, Any]) -> None:
    app = create_app(fake.llm, ServerOptions())
    there = {(re.sub(r":\w+}", "}", r.path), m.lower()) for r in app.routes for m in r.methods - {"HEAD"}}  # type: ignore[attr-defined]
    known = {(path, method) for path, methods in told["paths"].items() for method in methods}
    files = {(path, method) for path, method in there if path.startswith("/page/")}
    assert there - files == known


def test_every_field_of_every_table_is_in_the_document(told: dict[str, Any]) -> None:
    for model, rules in TABLES.items():
        schema = told["components"]["schemas"][model.__name__]
        assert set(schema["properties"]) == set(rules), model
        assert schema["additionalProperties"] is False


def test_every_link_names_an_operation_of_the_document(told: dict[str, Any]) -> None:
    """The dictionary of links once shared a variable with the operations, and held an operation's fields instead."""
    operations = [operation for methods in told["paths"].values() for operation in methods.values()]
    names = {operation["operationId"] for operation in operations if "operationId" in operation}
    links = [link for o in operations for answer in o["responses"].values() for link in answer.get("links", {}).values()]
    assert {link["operationId"] for link in links} == names != set()


def test_every_reference_leads_somewhere(told: dict[str, Any]) -> None:
    named = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(told)))
    assert named <= set(told["components"]["schemas"])


def test_every_validator_has_a_schema() -> None:
    """Pydantic knows nothing of what a function takes; a new one needs its line in VALIDATOR_SCHEMAS."""
    for model in TABLES:
        for field in model.model_fields.values():
            for entry in field.metadata:
                assert not isinstance(entry, PlainValidator) or entry.func in VALIDATOR_SCHEMAS, (model.__name__, entry.func)


def _numbers(told: dict[str, Any], model: type) -> list[tuple[str, dict[str, Any]]]:
    properties = told["components"]["schemas"][model.__name__]["properties"]
    found = [(name, inner) for name, schema in properties.items() for inner in schema.get("anyOf", [schema])]
    return [(name, inner) for name, inner in found if inner.get("type") in ("integer", "number")]


@pytest.mark.parametrize(("path", "model"), [("/v1/completions", CompletionRequest), ("/v1/chat/completions", ChatRequest)])
def test_the_ranges_are_where_the_server_begins_to_refuse(fake: Served, told: dict[str, Any], path: str, model: type) -> None:
    numbers = _numbers(told, model)
    assert len(numbers) > 10
    for name, schema in numbers:
        for value, inside in _edges(schema):
            echo = {"echo": True} if model is CompletionRequest else {}  # with which 0 tokens may be asked for
            asked = {**PATHS[path], **SHORT, **echo, **_company(name), name: value}
            answer = fake.post(path, **asked)
            if inside:
                assert answer.status_code == 200 or answer.json()["error"]["param"] != name or _no_room(answer), (name, value)
            else:
                assert answer.status_code == 400, (name, value)
                assert answer.json()["error"]["param"] in (name, name.replace("_completion", "")), (name, value)


def _edges(schema: dict[str, Any]) -> list[tuple[float, bool]]:
    step: float = 1 if schema["type"] == "integer" else 0.001
    edges: list[tuple[float, bool]] = []
    if "minimum" in schema:
        edges += [(schema["minimum"], True), (schema["minimum"] - step, False)]
    if "exclusiveMinimum" in schema:
        edges += [(schema["exclusiveMinimum"] + step, True), (schema["exclusiveMinimum"], False)]
    if "maximum" in schema:
        edges += [(schema["maximum"], True), (schema["maximum"] + step, False)]
    return edges


def _company(name: str) -> dict[str, Any]:
    """What a field needs beside it to be judged at all."""
    if name.startswith("dry_"):
        return {"dry_multiplier": 1.0}
    if name == "top_logprobs":
        return {"logprobs": True}
    return {"max_tokens": None} if name == "max_completion_tokens" else {}


def _no_room(answer: Any) -> bool:
    """In range, but not with this model: its context, or a model that does not reason."""
    return any(word in answer.json()["error"]["message"] for word in ("over the context", "does not reason"))


@pytest.mark.parametrize("path", list(POSTS))
def test_neutral_values_are_accepted_and_others_are_not(fake: Served, told: dict[str, Any], path: str) -> None:
    model, _, _ = POSTS[path]
    asked = PATHS.get(path) or OTHERS[path]
    schema = told["components"]["schemas"][model.__name__]["properties"]
    for name, rule in TABLES[model].items():
        if rule.treatment is Treatment.HONOURED:
            continue
        options = schema[name].get("anyOf", [schema[name]])
        values = [value for option in options for value in option.get("enum", [])]
        more = SHORT if path in PATHS else {}
        for value in (*values, None):
            assert fake.post(path, **asked, **more, **{name: value}).status_code == 200, (name, value)
        if schema[name].keys() - {"description"}:
            assert fake.post(path, **asked, **more, **{name: {"surely": "not"}}).status_code == 400, name


def test_ranges_are_read_from_their_texts() -> None:
    assert limits("integer, 0 … 2^53 - 1") == {"minimum": 0, "maximum": 2**53 - 1}
    assert limits("number, over 0 … 1") == {"exclusiveMinimum": 0, "maximum": 1}
    assert limits("number over 0") == {"exclusiveMinimum": 0}
    assert limits("integer >= -1") == {"minimum": -1}
    assert limits("string") == {}


def test_answers_have_the_documented_shape(fake: Served, told: dict[str, Any]) -> None:
    shapes = told["components"]["schemas"]
    for path, asked in PATHS.items():
        shape = shapes[POSTS[path][2]]
        reply = fake.post(path, **asked, **SHORT).json()
        assert set(shape["required"]) <= set(reply)
        assert reply["object"] == shape["properties"]["object"]["const"]
        assert set(shape["properties"]["choices"]["items"]["required"]) <= set(reply["choices"][0])
    refused = fake.post("/v1/completions", prompt="a", nonsense=1).json()
    assert set(OBJECTS["Error"]["properties"]["error"]["required"]) == set(refused["error"])  # type: ignore[index]


def test_the_document_says_whether_a_key_is_needed_and_what_lenience_takes() -> None:
    with fake_llm() as llm:
        locked = document(llm.card, lenient=True, locked=True)
        assert locked["paths"]["/v1/completions"]["post"]["security"] == [{"key": []}]
        assert "security" not in locked["paths"]["/health"]["get"]
        assert locked["components"]["schemas"]["ChatRequest"]["additionalProperties"] is True
        with serving(llm, ServerOptions(api_key="sesame")) as served:
            assert served.get("/openapi.json").status_code == 401


def test_every_documented_model_is_in_the_protocol() -> None:
    theirs = {messages._text_of, messages._blocks, messages.tool_type, items._items}
    theirs |= {called.function_type, called.chat_choice, called.response_choice}
    assert set(VALIDATOR_SCHEMAS) == theirs | {protocol._texts, protocol._prompts, protocol._bias, protocol._content}
