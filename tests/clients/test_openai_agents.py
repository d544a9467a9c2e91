"""openai-agents."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import openai
import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

from tests.clients.conftest import Server


@pytest.fixture(autouse=True)
def no_tracing() -> None:
    """Tracing would send every run to its maker."""
    set_tracing_disabled(True)


def agent(server: Server, *, key: str | None = None, tools: tuple[object, ...] = (), **settings: object) -> Agent:
    client = openai.AsyncOpenAI(base_url=server.base, api_key=key or server.key, max_retries=0)
    model = OpenAIChatCompletionsModel(model=server.model, openai_client=client)
    asked = ModelSettings(max_tokens=12, extra_body={"seed": 7}, **settings)
    return Agent(name="a", model=model, model_settings=asked, tools=list(tools))


def test_chat(server: Server) -> None:
    reply = Runner.run_sync(agent(server), "Hello.")
    assert reply.final_output == server.said(seed=7, max_tokens=12)


def test_streaming(server: Server) -> None:
    async def streamed() -> str:
        run = Runner.run_streamed(agent(server), "Hello.")
        told = [event.data async for event in run.stream_events() if event.type == "raw_response_event"]
        return "".join(data.delta for data in told if data.type == "response.output_text.delta")

    assert asyncio.run(streamed()) == server.said(seed=7, max_tokens=12)


def test_errors(server: Server) -> None:
    with pytest.raises(openai.AuthenticationError):
        Runner.run_sync(agent(server, key="wrong"), "Hello.")


@function_tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def test_tools(server: Server, needs: Callable[..., None]) -> None:
    needs(field="tools")
    running = agent(server, tools=(weather,), tool_choice="required")
    running.reset_tool_choice = False
    running.model_settings.max_tokens = 2000
    with pytest.raises(Exception, match="Max turns"):  # a tool that must be called is called in every turn
        Runner.run_sync(running, "Hello.", max_turns=2)
