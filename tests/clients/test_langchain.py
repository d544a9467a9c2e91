"""langchain-openai."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from tests.clients.conftest import Server


def model(server: Server, **more: Any) -> ChatOpenAI:
    given = {"model": server.model, "base_url": server.base, "api_key": server.key, "max_retries": 0, "seed": 7, "max_tokens": 12}
    return ChatOpenAI(**given | more)


def test_chat(server: Server) -> None:
    reply = model(server).invoke("Hello.")
    assert reply.content == server.reply(seed=7, max_tokens=12)
    assert reply.usage_metadata["output_tokens"] <= 12


def test_streaming(server: Server) -> None:
    text = "".join(str(chunk.content) for chunk in model(server).stream("Hello."))
    assert text == server.reply(seed=7, max_tokens=12)


def test_errors(server: Server) -> None:
    with pytest.raises(openai.BadRequestError):
        model(server, temperature=-1.0).invoke("Hello.")
    with pytest.raises(openai.AuthenticationError):
        model(server, api_key="wrong").invoke("Hello.")


class Weather(BaseModel):
    """The weather somewhere."""

    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=9)


def test_tools(server: Server, needs: Callable[..., None]) -> None:
    needs(field="tools")
    bound = model(server, max_tokens=2000).bind_tools([Weather], tool_choice="required", strict=True)
    reply = bound.invoke("Hello.")
    assert reply.tool_calls[0]["name"] == "Weather"
    results = [ToolMessage("sunny", tool_call_id=call["id"]) for call in reply.tool_calls]
    second = model(server).bind_tools([Weather]).invoke([HumanMessage("Hello."), reply, *results])
    assert second.usage_metadata["output_tokens"] <= 12
    streamed = sum(bound.stream("Hello."), start=AIMessageChunk(""))
    assert [call["args"] for call in streamed.tool_calls] == [call["args"] for call in reply.tool_calls]


def test_responses(server: Server, needs: Callable[..., None]) -> None:
    needs(path="/v1/responses")
    body = {"use_responses_api": True, "seed": None, "extra_body": {"seed": 7}, "max_tokens": 16}
    assert model(server, **body).invoke("Hello.").usage_metadata["output_tokens"] <= 16
    structured = model(server, **{**body, "max_tokens": 2000}).with_structured_output(Weather, method="json_schema")
    assert isinstance(structured.invoke("Hello."), Weather)


def test_structured_output(server: Server, needs: Callable[..., None]) -> None:
    needs(field="response_format")
    reply = model(server, max_tokens=2000).with_structured_output(Weather, method="json_schema").invoke("Hello.")
    assert isinstance(reply, Weather)
