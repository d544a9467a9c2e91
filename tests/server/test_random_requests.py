"""Whatever JSON is sent to whatever endpoint: an answer, or a refusal in the shape of the API, never a server error."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onedraw.server.anthropic.messages import CountRequest, MessagesRequest
from onedraw.server.errors import log
from onedraw.server.ollama.requests import OllamaChat, OllamaGenerate, OllamaShow
from onedraw.server.openai.responses_request import ResponsesRequest
from onedraw.server.parsing import TABLES
from onedraw.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tests.server.running import Served, fake_llm, serving
from tests.support.searching import examples

SAID = [{"role": "user", "content": "a"}]
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
SHORT = {"num_predict": 3, "stop": ["b"]}
BASES: dict[str, tuple[type, dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "a", "max_tokens": 3}),
    "/v1/chat/completions": (ChatRequest, {"messages": SAID, "max_tokens": 3, "tools": [{"type": "function", "function": TOOL}]}),
    "/v1/responses": (ResponsesRequest, {"input": "a", "max_output_tokens": 3, "tools": [{"type": "function", **TOOL}]}),
    "/v1/responses/input_tokens": (ResponsesRequest, {"input": "a"}),
    "/v1/messages": (MessagesRequest, {"messages": SAID, "max_tokens": 3, "system": "b"}),
    "/v1/messages/count_tokens": (CountRequest, {"messages": SAID}),
    "/api/chat": (
        OllamaChat,
        {"messages": SAID, "options": {"num_predict": 3}, "tools": [{"type": "function", "function": TOOL}]},
    ),
    "/api/generate": (OllamaGenerate, {"prompt": "a", "options": SHORT}),
    "/api/show": (OllamaShow, {"model": "a"}),
    "/tokenize": (TokenizeRequest, {"prompt": "a"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1, 2]}),
}
WORDS = (
    *(
        "type",
        "function",
        "object",
        "string",
        "text",
        "user",
        "assistant",
        "tool",
        "system",
        "auto",
        "none",
        "required",
        "json_schema",
    ),
    *(
        "items",
        "properties",
        "$ref",
        "#",
        "anyOf",
        "enum",
        "required",
        "name",
        "content",
        "role",
        "tool_calls",
        "arguments",
        "id",
    ),
    *(
        "input_text",
        "output_text",
        "message",
        "function_call",
        "call_id",
        "low",
        "high",
        "a",
        "",
        "\u00e9\U0001f600",
        "<s>",
        "\u0000",
    ),
    *(
        "schema",
        "additionalProperties",
        "strict",
        "tool_result",
        "tool_use",
        "tool_use_id",
        "thinking",
        "budget_tokens",
        "enabled",
    ),
)
NUMBERS = st.sampled_from((0, 1, -1, 2, 3, 0.5, -0.0, 1e-9, 1e300, 128, 129, 2**31, 2**53, 2**63, -(2**63), 10**30, 50_000))
PLAIN = st.none() | st.booleans() | NUMBERS | st.sampled_from(WORDS) | st.text(max_size=5)
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=3), inner, max_size=4),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    """A server with a short context, so that no reply is long."""
    with fake_llm(max_context=512) as llm, serving(llm) as served:
        yield served


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside of a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


@st.composite
def bodies(draw: st.DrawFn, path: str) -> Any:
    """A valid body in which some fields, on any level, are replaced, added or removed."""
    kind, base = BASES[path]
    body = json.loads(json.dumps(base))
    for _ in range(draw(st.integers(0, 3))):
        body[draw(st.sampled_from(sorted(TABLES[kind])))] = draw(VALUES)
    for _ in range(draw(st.integers(0, 2))):
        container, key = draw(st.sampled_from(places(body)))
        match draw(st.sampled_from(("replace", "wrap", "remove", "add"))):
            case "replace":
                container[key] = draw(VALUES)
            case "wrap":
                container[key] = [container[key]] if draw(st.booleans()) else {draw(st.sampled_from(WORDS)): container[key]}
            case "remove":
                del container[key]
            case "add" if isinstance(container, dict):
                container[draw(st.sampled_from(WORDS))] = draw(VALUES)
        if not body:
            break
    return body if draw(st.integers(0, 19)) else draw(VALUES)


class Unexpected(logging.Handler):
    """Collects what the server logs as unexpected errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record)


@pytest.mark.parametrize("path", BASES)
def test_no_json_is_answered_with_a_server_error(small: Served, path: str) -> None:
    unexpected, seen = Unexpected(), set[int]()

    @examples(60, many=2_000)
    @given(bodies(path))
    def never(body: Any) -> None:
        answer = small.send(path, json.dumps(body))
        seen.add(answer.status_code)
        assert answer.status_code in (200, 400, 404, 413, 429), answer.text
        assert '"internal_error"' not in answer.text, answer.text  # in a stream, an error is an event
        assert "Traceback" not in answer.text
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert error if path.startswith("/api/") else error["message"]
            kinds = ("invalid_request_error", "not_found_error", "rate_limit_error")
            assert isinstance(error, str) if path.startswith("/api/") else error["type"] in kinds
        assert not unexpected.found, unexpected.found[0].exc_info

    level, disabled = log.level, log.disabled
    log.setLevel(logging.ERROR)  # the server of these tests logs nothing
    log.disabled = False
    log.addHandler(unexpected)
    try:
        never()
    finally:
        log.removeHandler(unexpected)
        log.setLevel(level)
        log.disabled = disabled
    assert 400 in seen
    assert small.post(path, **BASES[path][1]).status_code == 200


@examples(60, many=1_000)
@given(
    method=st.sampled_from(("GET", "DELETE", "POST", "PUT", "OPTIONS")),
    path=st.sampled_from(("/v1/responses/", "/v1/models/", "/page/", "/", "/v1/responses/a/input_items", "/metrics", "/health")),
    rest=st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    query=st.dictionaries(st.sampled_from(("limit", "order", "after", "stream", "include")), st.text(max_size=4), max_size=2),
)
def test_no_path_or_query_is_answered_with_a_server_error(
    small: Served, method: str, path: str, rest: str, query: dict[str, str]
) -> None:
    answer = small.http.request(method, path + quote(rest, safe=""), params=query)
    assert answer.status_code < 500, answer.text
