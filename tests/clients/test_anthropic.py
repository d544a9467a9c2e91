"""The anthropic package."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Literal

import anthropic
import pytest
from pydantic import BaseModel

from tests.clients.conftest import HELLO, WEATHER, Server

SEEDED = {"seed": 7}


@pytest.fixture
def client(server: Server, needs: Callable[..., None]) -> anthropic.Anthropic:
    needs(path="/v1/messages")
    return anthropic.Anthropic(base_url=server.url, api_key=server.key, max_retries=0)


def test_chat(server: Server, client: anthropic.Anthropic) -> None:
    reply = client.messages.create(model=server.model, messages=HELLO, max_tokens=12, extra_body=SEEDED)
    assert reply.content[0].type == "text"
    assert reply.stop_reason in ("end_turn", "max_tokens")


def test_streaming(server: Server, client: anthropic.Anthropic) -> None:
    with client.messages.stream(model=server.model, messages=HELLO, max_tokens=12, extra_body=SEEDED) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_message().content[0].text == text


def test_counting(server: Server, client: anthropic.Anthropic) -> None:
    assert client.messages.count_tokens(model=server.model, messages=HELLO).input_tokens > 0


def test_tools(server: Server, client: anthropic.Anthropic) -> None:
    tool = {"name": "weather", "input_schema": WEATHER}
    reply = client.messages.create(
        model=server.model,
        messages=HELLO,
        tools=[tool],
        tool_choice={"type": "tool", "name": "weather"},
        max_tokens=2000,
        extra_body={"seed": 3},
    )
    call, *_ = [block for block in reply.content if block.type == "tool_use"]  # it may call more than once
    assert 1 <= call.input["days"] <= 9
    assert reply.stop_reason == "tool_use"
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
        for block in reply.content
        if block.type == "tool_use"
    ]
    result = [*HELLO, {"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
    second = client.messages.create(model=server.model, messages=result, tools=[tool], max_tokens=8)
    assert second.usage.output_tokens <= 8


def test_a_call_is_streamed(server: Server, client: anthropic.Anthropic) -> None:
    tool = {"name": "weather", "input_schema": WEATHER, "strict": True}
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    body = {"model": server.model, "messages": HELLO, "tools": [tool], "tool_choice": choice, "max_tokens": 2000}
    with client.messages.stream(**body, extra_body=SEEDED) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        (block,) = stream.get_final_message().content
    assert len(pieces) > 5
    assert json.loads("".join(pieces)) == block.input


class Weather(BaseModel):
    """Without bounds: this client takes them out of the schema."""

    sky: Literal["blue", "grey"]
    rain: bool


def test_structured_output(server: Server, client: anthropic.Anthropic) -> None:
    reply = client.messages.parse(model=server.model, messages=HELLO, max_tokens=2000, output_format=Weather, extra_body=SEEDED)
    assert isinstance(reply.parsed_output, Weather)


def test_models(server: Server, client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == [server.model]


def test_errors(server: Server, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(model=server.model, messages=HELLO, max_tokens=4, extra_body={"temperature": -1})
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="another", messages=HELLO, max_tokens=4)
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(model=server.model, messages=HELLO, max_tokens=4)
