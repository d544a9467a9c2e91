"""langchain-openai."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from tests.clients.conftest import Server


def model(server: Server, **more: Any) -> ChatOpenAI:
    given = {"model": server.model, "base_url": server.base, "api_key": server.key, "max_retries": 0, "seed": 7, "max_tokens": 12}
    return ChatOpenAI(**given | more)


def test_chat(server: Server) -> None:
    reply = model(server).invoke("Hello.")
    assert reply.content == server.said(seed=7, max_tokens=12)
    assert reply.usage_metadata["output_tokens"] <= 12


def test_streaming(server: Server) -> None:
    text = "".join(str(chunk.content) for chunk in model(server).stream("Hello."))
    assert text == server.said(seed=7, max_tokens=12)


def test_errors(server: Server) -> None:
    with pytest.raises(openai.BadRequestError):
        model(server, temperature=-1.0).invoke("Hello.")


class Weather(BaseModel):
    """The weather somewhere."""

    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=9)


def test_tools(server: Server, needs: Callable[..., None]) -> None:
    needs(field="tools")
    reply = model(server, max_tokens=2000).bind_tools([Weather], tool_choice="required", strict=True).invoke("Hello.")
    assert reply.tool_calls[0]["name"] == "Weather"


def test_structured_output(server: Server, needs: Callable[..., None]) -> None:
    needs(field="response_format")
    reply = model(server, max_tokens=2000).with_structured_output(Weather, method="json_schema").invoke("Hello.")
    assert isinstance(reply, Weather)
