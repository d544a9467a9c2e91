"""The openai package for Python."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import openai
import pytest
from pydantic import BaseModel, Field

from tests.clients.conftest import HELLO, PATIENCE, WEATHER, Server


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base, api_key=server.key, max_retries=0)


def test_chat(server: Server, client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=server.model, messages=HELLO, seed=7, max_tokens=12)
    assert reply.choices[0].message.content == server.reply(seed=7, max_tokens=12)
    assert reply.usage is not None
    assert reply.usage.completion_tokens <= 12


def test_streaming(server: Server, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=server.model, messages=HELLO, seed=7, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == server.reply(seed=7, max_tokens=12)
    assert chunks[-1].usage is not None
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] in ("stop", "length")


def test_errors(server: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=server.model, messages=HELLO, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="another", messages=HELLO)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_models(server: Server, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [server.model]


def test_tools(server: Server, client: openai.OpenAI, needs: Callable[..., None]) -> None:
    needs(field="tools")
    tool = {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}}
    body = {"model": server.model, "tools": [tool], "tool_choice": "required", "seed": 3, "max_tokens": 2000}
    message = client.chat.completions.create(messages=HELLO, **body).choices[0].message  # type: ignore[call-overload]
    (call,) = message.tool_calls
    assert call.function.name == "weather"
    assert 1 <= json.loads(call.function.arguments)["days"] <= 9
    result = [*HELLO, message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    reply = client.chat.completions.create(messages=result, model=server.model, max_tokens=8, seed=1)  # type: ignore[arg-type]
    assert reply.choices[0].message.content is not None


class Weather(BaseModel):
    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=9)


def test_structured_output(server: Server, client: openai.OpenAI, needs: Callable[..., None]) -> None:
    needs(field="response_format")
    reply = client.chat.completions.parse(model=server.model, messages=HELLO, response_format=Weather, seed=2, max_tokens=2000)
    assert reply.choices[0].finish_reason == "stop"
    assert isinstance(reply.choices[0].message.parsed, Weather)


def test_the_stream_helper(server: Server, client: openai.OpenAI, needs: Callable[..., None]) -> None:
    """The helper joins the chunks and parses the result."""
    needs(field="response_format")
    body = {"model": server.model, "messages": HELLO, "max_tokens": 2000, "seed": 2}
    with client.chat.completions.stream(response_format=Weather, **body) as stream:
        kinds = {event.type for event in stream}
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Weather)
    assert {"chunk", "content.delta", "content.done"} <= kinds
    tool = openai.pydantic_function_tool(Weather)
    with client.chat.completions.stream(tools=[tool], tool_choice="required", parallel_tool_calls=False, **body) as stream:
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds


def test_responses(server: Server, client: openai.OpenAI, needs: Callable[..., None]) -> None:
    needs(path="/v1/responses")
    body = {"model": server.model, "input": "Hello.", "max_output_tokens": 16, "extra_body": {"seed": 7}}
    assert client.responses.create(**body).output_text
    events = [event.type for event in client.responses.create(**body, stream=True)]
    assert events[0] == "response.created"
    assert events[-1] in ("response.completed", "response.incomplete")


def test_responses_with_tools_and_response_formats(server: Server, client: openai.OpenAI, needs: Callable[..., None]) -> None:
    needs(path="/v1/responses")
    tool = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
    body = {"model": server.model, "extra_body": {"seed": 7}}
    must = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 2000}
    first = client.responses.create(input="Hello.", **must, **body)
    (call,) = first.output
    assert 1 <= json.loads(call.arguments)["days"] <= 9
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = client.responses.create(input=[result], previous_response_id=first.id, tools=[tool], max_output_tokens=16, **body)
    assert client.responses.retrieve(second.id).output == second.output
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    parsed = client.responses.parse(input="Hello.", text_format=Weather, max_output_tokens=2000, **body)
    assert isinstance(parsed.output_parsed, Weather)


def test_a_batch(server: Server, client: openai.OpenAI) -> None:
    rows = [
        {
            "custom_id": f"q{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": HELLO, "max_tokens": 6, "seed": number},
        }
        for number in range(12)
    ]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    assert client.files.content(file.id).content == content
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"of": "a test"}
    )
    deadline = time.monotonic() + PATIENCE
    while (batch := client.batches.retrieve(batch.id)).status != "completed":
        assert batch.status in ("validating", "in_progress", "finalizing")
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (12, 12, 0)
    assert batch.output_file_id is not None
    replies = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert [reply["custom_id"] for reply in replies] == [row["custom_id"] for row in rows]
    for number, reply in enumerate(replies):
        text = reply["response"]["body"]["choices"][0]["message"]["content"]
        assert text == server.reply(seed=number, max_tokens=6)
    assert batch.id in [one.id for one in client.batches.list(limit=1)]
    assert file.id in [one.id for one in client.files.list(purpose="batch")]
    assert client.batches.cancel(batch.id).status == "completed"
    assert client.files.delete(file.id).deleted
