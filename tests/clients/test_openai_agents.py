"""openai-agents."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel, Field

from tests.clients.conftest import Server


@pytest.fixture(autouse=True)
def no_tracing() -> None:
    """Tracing would send every run to OpenAI."""
    set_tracing_disabled(True)


def agent(
    server: Server, *, key: str | None = None, kind: Any = OpenAIChatCompletionsModel, more: Any = None, **settings: Any
) -> Agent:
    client = openai.AsyncOpenAI(base_url=server.base, api_key=key or server.key, max_retries=0)
    model = kind(model=server.model, openai_client=client)
    model_settings = ModelSettings(**{"max_tokens": 12, "extra_body": {"seed": 7}, **settings})
    return Agent(name="a", model=model, model_settings=model_settings, **(more or {}))


def test_chat(server: Server) -> None:
    reply = Runner.run_sync(agent(server), "Hello.")
    assert reply.final_output == server.reply(seed=7, max_tokens=12)


def test_streaming(server: Server) -> None:
    async def streamed() -> str:
        run = Runner.run_streamed(agent(server), "Hello.")
        result = [event.data async for event in run.stream_events() if event.type == "raw_response_event"]
        return "".join(data.delta for data in result if data.type == "response.output_text.delta")

    assert asyncio.run(streamed()) == server.reply(seed=7, max_tokens=12)


def test_errors(server: Server) -> None:
    with pytest.raises(openai.AuthenticationError):
        Runner.run_sync(agent(server, key="wrong"), "Hello.")


class Weather(BaseModel):
    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=9)


@function_tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
def test_a_tool_call_and_its_result(server: Server, needs: Callable[..., None], kind: Any) -> None:
    needs(field="tools", path="/v1/responses")
    must = {"kind": kind, "more": {"tools": [weather]}, "tool_choice": "required", "max_tokens": 500}
    run = Runner.run_sync(agent(server, **must), "Hello.", max_turns=3)  # the result is sent back with tool_choice auto
    kinds = [item.type for item in run.new_items]
    assert kinds[0] == "tool_call_item"
    assert "tool_call_output_item" in kinds
    assert kinds[-1] == "message_output_item"


@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
def test_structured_output(server: Server, needs: Callable[..., None], kind: Any) -> None:
    needs(field="response_format", path="/v1/responses")
    typed = agent(server, kind=kind, more={"output_type": Weather}, max_tokens=2000)
    assert 1 <= Runner.run_sync(typed, "Hello.").final_output.days <= 9


def test_responses(server: Server, needs: Callable[..., None]) -> None:
    needs(path="/v1/responses")
    assert Runner.run_sync(agent(server, kind=OpenAIResponsesModel, max_tokens=16), "Hello.").final_output is not None
