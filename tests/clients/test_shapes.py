"""Every object and every event has every field that the types of the official clients require.

The clients do not validate replies; validating with their types shows missing fields. /v1/completions is left out: its type
forbids the null of an unfinished choice and of a prompt's first token, which OpenAI's server sends.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import httpx
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from openai.types import Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.clients.conftest import HELLO, PATIENCE, WEATHER, Server

FUNCTION = {"name": "weather", "parameters": WEATHER, "strict": True}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_budget": 6}
FORM = {"name": "weather", "schema": WEATHER, "strict": True}


@pytest.fixture
def http(server: Server) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {server.key}"}, timeout=PATIENCE)


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """Cached: an adapter for a union of dozens of events takes a second to build."""
    return TypeAdapter(kind)


def check_shapes(http: httpx.Client, path: str, body: dict[str, Any], *, whole: Any, event: Any) -> None:
    """Validate whole and streamed replies, for several seeds because their lengths differ."""
    for seed in range(2):
        answer = http.post(path, json={**body, "seed": seed})
        assert answer.status_code == 200, answer.text
        adapter(whole).validate_python(answer.json())
        streamed = http.post(path, json={**body, "seed": seed, "stream": True}).text
        events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        assert len(events) > 2
        for result in events:
            adapter(event).validate_python(result)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
        THINKING,
        {"logprobs": True, "top_logprobs": 2, "n": 2},
        {"response_format": {"type": "json_schema", "json_schema": FORM}},
    ],
    ids=["plain", "tools", "thinking", "logprobs", "form"],
)
def test_chat(http: httpx.Client, options: dict[str, Any]) -> None:
    body = {"messages": HELLO, "max_tokens": 200, **options}
    check_shapes(http, "/v1/chat/completions", body, whole=ChatCompletion, event=ChatCompletionChunk)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
        {"tools": [{"type": "function", **FUNCTION}], "tool_choice": {"type": "function", "name": "weather"}},
        THINKING,
        {**THINKING, "reasoning": {"summary": "auto"}},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"text": {"format": {"type": "json_schema", **FORM}}, "instructions": "Be brief.", "metadata": {"a": "b"}},
    ],
    ids=["plain", "tools", "named", "thinking", "summary", "logprobs", "form"],
)
def test_responses(http: httpx.Client, needs: Callable[..., None], options: dict[str, Any]) -> None:
    needs(path="/v1/responses")
    body = {"input": "Hello.", "max_output_tokens": 200, **options}
    check_shapes(http, "/v1/responses", body, whole=Response, event=ResponseStreamEvent)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tools": [{"name": "weather", "input_schema": WEATHER}], "tool_choice": {"type": "any"}},
        {"thinking": {"type": "enabled", "budget_tokens": 6}},
        {"stop_sequences": ["e", "a"]},
    ],
    ids=["plain", "tools", "thinking", "stop"],
)
def test_messages(http: httpx.Client, needs: Callable[..., None], options: dict[str, Any]) -> None:
    needs(path="/v1/messages")
    check_shapes(
        http, "/v1/messages", {"messages": HELLO, "max_tokens": 200, **options}, whole=Message, event=RawMessageStreamEvent
    )


def test_models_and_counts(http: httpx.Client, needs: Callable[..., None]) -> None:
    needs(path="/v1/messages")
    Model.model_validate(http.get("/v1/models").json()["data"][0])
    MessageTokensCount.model_validate(http.post("/v1/messages/count_tokens", json={"messages": HELLO}).json())


def test_every_parameter_of_the_clients_is_known(server: Server) -> None:
    """Honoured or refused by its own name, never "unknown": the document has a line for each."""
    from anthropic.types.message_count_tokens_params import MessageCountTokensParams
    from anthropic.types.message_create_params import MessageCreateParamsBase
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
    from openai.types.completion_create_params import CompletionCreateParamsBase as TextParams
    from openai.types.responses.response_create_params import ResponseCreateParamsBase

    kinds = {
        "ChatRequest": ChatParams,
        "CompletionRequest": TextParams,
        "ResponsesRequest": ResponseCreateParamsBase,
        "MessagesRequest": MessageCreateParamsBase,
        "CountRequest": MessageCountTokensParams,
    }
    for name, params in kinds.items():
        known = server.document["components"]["schemas"][name]["properties"]
        assert set(params.__annotations__) <= set(known), name
