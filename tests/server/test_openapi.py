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
from onedraw.server.parsing import TABLES, TOOL_TYPES
from onedraw.server.protocol import ChatRequest, CompletionRequest
from tests.server.running import Served, fake_llm, serving

PATHS = {"/v1/completions": {"prompt": "a"}, "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]}}
HELLO = [{"role": "user", "content": "a"}]
OTHERS: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/v1/score": {"messages": HELLO, "reply": "b"},
    "/v1/batches": {"input_file_id": "file-0", "endpoint": "/v1/score", "completion_window": "24h"},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/apply-template": {"messages": HELLO},
    "/api/chat": {"messages": HELLO, "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "a", "options": {"num_predict": 2}},
    "/api/show": {},
    "/update_weights": {"weight_dir": "a"},
}
SHORT = {"max_tokens": 2, "seed": 1}


@pytest.fixture(scope="module")
def openapi(fake: Served) -> dict[str, Any]:
    answer = fake.get("/openapi.json")
    assert answer.status_code == 200
    value: dict[str, Any] = answer.json()
    return value


def test_the_document_has_every_path_and_method(fake: Served, openapi: dict[str, Any]) -> None:
    app = create_app(fake.llm, ServerOptions())
    there = {(re.sub(r":\w+}", "}", r.path), m.lower()) for r in app.routes for m in r.methods - {"HEAD"}}  # type: ignore[attr-defined]
    known = {(path, method) for path, methods in openapi["paths"].items() for method in methods}
    files = {(path, method) for path, method in there if path.startswith("/page/")}
    assert there - files == known


def test_the_document_has_every_field_of_every_table(openapi: dict[str, Any]) -> None:
    for model, rules in TABLES.items():
        schema = openapi["components"]["schemas"][model.__name__]
        if model in TOOL_TYPES:  # The alternative is a tool of another type, which the prompt leaves out.
            schema = schema["anyOf"][0]
        assert set(schema["properties"]) == set(rules), model
        assert schema["additionalProperties"] == {"type": "null"}


def test_every_link_names_an_operation_of_the_document(openapi: dict[str, Any]) -> None:
    """Regression: the dictionary of links held the fields of an operation."""
    operations = [operation for methods in openapi["paths"].values() for operation in methods.values()]
    names = {operation["operationId"] for operation in operations if "operationId" in operation}
    links = [link for o in operations for answer in o["responses"].values() for link in answer.get("links", {}).values()]
    assert {link["operationId"] for link in links} == names != set()


def test_every_reference_has_a_target(openapi: dict[str, Any]) -> None:
    named = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(openapi)))
    assert named <= set(openapi["components"]["schemas"])


def test_every_validator_has_a_schema() -> None:
    """Pydantic cannot derive a schema from a validator function; a new one needs an entry in VALIDATOR_SCHEMAS."""
    for model in TABLES:
        for field in model.model_fields.values():
            for entry in field.metadata:
                assert not isinstance(entry, PlainValidator) or entry.func in VALIDATOR_SCHEMAS, (model.__name__, entry.func)


def _numbers(openapi: dict[str, Any], model: type) -> list[tuple[str, dict[str, Any]]]:
    properties = openapi["components"]["schemas"][model.__name__]["properties"]
    found = [(name, inner) for name, schema in properties.items() for inner in schema.get("anyOf", [schema])]
    return [(name, inner) for name, inner in found if inner.get("type") in ("integer", "number")]


@pytest.mark.parametrize(("path", "model"), [("/v1/completions", CompletionRequest), ("/v1/chat/completions", ChatRequest)])
def test_the_server_accepts_exactly_the_documented_ranges(fake: Served, openapi: dict[str, Any], path: str, model: type) -> None:
    numbers = _numbers(openapi, model)
    assert len(numbers) > 10
    for name, schema in numbers:
        for value, inside in _edges(schema):
            echo = {"echo": True} if model is CompletionRequest else {}  # allows 0 tokens
            asked = {**PATHS[path], **SHORT, **echo, **_required_fields(name), name: value}
            answer = fake.post(path, **asked)
            if inside:
                assert answer.status_code == 200 or answer.json()["error"]["param"] != name or _unsupported_by_model(answer), (
                    name,
                    value,
                )
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


def _required_fields(name: str) -> dict[str, Any]:
    """Return the fields that the server requires before it checks this one."""
    if name.startswith("dry_"):
        return {"dry_multiplier": 1.0}
    if name == "top_logprobs":
        return {"logprobs": True}
    return {"max_tokens": None} if name == "max_completion_tokens" else {}


def _unsupported_by_model(answer: Any) -> bool:
    """Tell whether the value is in range but this model cannot serve it: its context is shorter, or it does not reason."""
    return any(word in answer.json()["error"]["message"] for word in ("over the context", "too long", "does not reason"))


@pytest.mark.parametrize("path", list(POSTS))
def test_documented_neutral_values_are_accepted_and_others_are_refused(fake: Served, openapi: dict[str, Any], path: str) -> None:
    model, _, _ = POSTS[path]
    asked = PATHS.get(path) or OTHERS[path]
    schema = openapi["components"]["schemas"][model.__name__]["properties"]
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


def test_ranges_are_parsed_from_their_texts() -> None:
    assert limits("integer, 0 … 2^53 - 1") == {"minimum": 0, "maximum": 2**53 - 1}
    assert limits("number, over 0 … 1") == {"exclusiveMinimum": 0, "maximum": 1}
    assert limits("number over 0") == {"exclusiveMinimum": 0}
    assert limits("integer >= -1") == {"minimum": -1}
    assert limits("string") == {}


def test_responses_have_the_documented_shape(fake: Served, openapi: dict[str, Any]) -> None:
    shapes = openapi["components"]["schemas"]
    for path, asked in PATHS.items():
        shape = shapes[POSTS[path][2]]
        reply = fake.post(path, **asked, **SHORT).json()
        assert set(shape["required"]) <= set(reply)
        assert reply["object"] == shape["properties"]["object"]["const"]
        assert set(shape["properties"]["choices"]["items"]["required"]) <= set(reply["choices"][0])
    refused = fake.post("/v1/completions", prompt="a", nonsense=1).json()
    assert set(OBJECTS["Error"]["properties"]["error"]["required"]) == set(refused["error"])  # type: ignore[index]


def test_the_document_says_whether_a_key_is_required_and_unknown_fields_are_accepted() -> None:
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
    assert set(VALIDATOR_SCHEMAS) == theirs | {protocol.texts, protocol._prompts, protocol._bias, protocol._content}
