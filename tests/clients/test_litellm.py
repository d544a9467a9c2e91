"""litellm."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import litellm
import pytest
from pydantic import BaseModel, Field

from tests.clients.conftest import HELLO, WEATHER, Server


def ask(server: Server, **more: Any) -> Any:
    given = {
        "model": f"openai/{server.model}",
        "messages": HELLO,
        "api_base": server.base,
        "api_key": server.key,
        "num_retries": 0,
    }
    return litellm.completion(**given | more)


def test_chat(server: Server) -> None:
    assert ask(server, seed=7, max_tokens=12).choices[0].message.content == server.reply(seed=7, max_tokens=12)


def test_streaming(server: Server) -> None:
    chunks = list(ask(server, seed=7, max_tokens=12, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == server.reply(seed=7, max_tokens=12)


def test_errors(server: Server) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        ask(server, temperature=-1)
    with pytest.raises(litellm.NotFoundError):
        ask(server, model="openai/another")
    with pytest.raises(litellm.AuthenticationError):
        ask(server, api_key="wrong")


def test_tools(server: Server, needs: Callable[..., None]) -> None:
    needs(field="tools")
    tool = {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}}
    message = ask(server, tools=[tool], tool_choice="required", seed=3, max_tokens=2000).choices[0].message
    (call,) = message.tool_calls
    assert 1 <= json.loads(call.function.arguments)["days"] <= 9
    result = [*HELLO, message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert ask(server, messages=result, tools=[tool], max_tokens=8).usage.completion_tokens <= 8


class Weather(BaseModel):
    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=9)


def test_structured_output(server: Server, needs: Callable[..., None]) -> None:
    needs(field="response_format")
    reply = ask(server, response_format=Weather, seed=2, max_tokens=2000)
    assert 1 <= Weather.model_validate_json(reply.choices[0].message.content).days <= 9


def test_the_shape_of_anthropic(server: Server, needs: Callable[..., None]) -> None:
    needs(path="/v1/messages")
    reply = ask(
        server, model=f"anthropic/{server.model}", api_base=server.url, max_tokens=12, seed=7, allowed_openai_params=["seed"]
    )
    assert reply.usage.completion_tokens <= 12
