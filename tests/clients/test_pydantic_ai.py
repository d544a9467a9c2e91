"""pydantic-ai."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.conftest import Server


def agent(server: Server, *, key: str | None = None, **more: Any) -> Agent[None, Any]:
    provider = OpenAIProvider(base_url=server.base, api_key=key or server.key)
    return Agent(OpenAIChatModel(server.model, provider=provider), retries=0, **more)


def test_chat(server: Server) -> None:
    reply = agent(server).run_sync("Hello.", model_settings={"seed": 7, "max_tokens": 12})
    assert reply.output == server.reply(seed=7, max_tokens=12)
    assert reply.usage.output_tokens <= 12


def test_streaming(server: Server) -> None:
    async def streamed() -> str:
        async with agent(server).run_stream("Hello.", model_settings={"seed": 7, "max_tokens": 12}) as run:
            return "".join([piece async for piece in run.stream_text(delta=True)])

    assert asyncio.run(streamed()) == server.reply(seed=7, max_tokens=12)


def test_errors(server: Server) -> None:
    with pytest.raises(ModelHTTPError) as wrong:
        agent(server).run_sync("Hello.", model_settings={"temperature": -1})
    assert wrong.value.status_code == 400
    with pytest.raises(ModelHTTPError) as locked:
        agent(server, key="wrong").run_sync("Hello.")
    assert locked.value.status_code == 401


class Weather(BaseModel):
    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=9)


def test_a_typed_reply(server: Server, needs: Callable[..., None]) -> None:
    needs(field="tools")
    reply = agent(server, output_type=Weather).run_sync("Hello.", model_settings={"seed": 3, "max_tokens": 2000})
    assert isinstance(reply.output, Weather)


def test_a_tool_call_and_its_result(server: Server, needs: Callable[..., None]) -> None:
    needs(field="tools")
    called: list[str] = []

    def weather(city: str) -> str:
        """The weather in a city."""
        called.append(city)
        return "sunny"

    typed = agent(server, output_type=Weather, tools=[weather])
    for seed in range(20):  # each turn calls a tool or gives the typed reply, depending on the seed
        reply = typed.run_sync("Hello.", model_settings={"seed": seed, "max_tokens": 2000, "temperature": 5.0})
        assert isinstance(reply.output, Weather)
        if called:
            break
    assert called


def test_structured_output(server: Server, needs: Callable[..., None]) -> None:
    needs(field="response_format")
    reply = agent(server, output_type=NativeOutput(Weather)).run_sync("Hello.", model_settings={"seed": 3, "max_tokens": 2000})
    assert isinstance(reply.output, Weather)


def test_responses(server: Server, needs: Callable[..., None]) -> None:
    needs(path="/v1/responses")
    model = OpenAIResponsesModel(server.model, provider=OpenAIProvider(base_url=server.base, api_key=server.key))
    settings: Any = {"max_tokens": 16, "extra_body": {"seed": 7}}
    assert Agent(model).run_sync("Hello.", model_settings=settings).usage.output_tokens <= 16
