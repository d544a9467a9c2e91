"""instructor: typed replies, by structured output and by tools."""

from __future__ import annotations

from collections.abc import Callable

import instructor
import openai
import pytest
from pydantic import BaseModel, Field

from tests.clients.conftest import HELLO, Server


class Weather(BaseModel):
    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=9)


@pytest.mark.parametrize(("mode", "field"), [(instructor.Mode.JSON_SCHEMA, "response_format"), (instructor.Mode.TOOLS, "tools")])
def test_a_typed_reply(server: Server, needs: Callable[..., None], mode: instructor.Mode, field: str) -> None:
    needs(field=field)
    client = instructor.from_openai(openai.OpenAI(base_url=server.base, api_key=server.key, max_retries=0), mode=mode)
    reply = client.chat.completions.create(
        model=server.model, messages=HELLO, response_model=Weather, max_retries=0, seed=5, max_tokens=2000
    )
    assert 1 <= reply.days <= 9


def test_errors(server: Server) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=server.base, api_key="wrong", max_retries=0))
    with pytest.raises(Exception, match=r"401|API key"):
        client.chat.completions.create(model=server.model, messages=HELLO, response_model=None, max_retries=0)


def test_chat(server: Server) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=server.base, api_key=server.key, max_retries=0))
    reply = client.chat.completions.create(
        model=server.model, messages=HELLO, response_model=None, max_retries=0, seed=7, max_tokens=12
    )
    assert reply.choices[0].message.content == server.reply(seed=7, max_tokens=12)


def test_streaming(server: Server, needs: Callable[..., None]) -> None:
    """A typed reply that is parsed while it is streamed."""
    needs(field="response_format")
    client = instructor.from_openai(
        openai.OpenAI(base_url=server.base, api_key=server.key, max_retries=0), mode=instructor.Mode.JSON_SCHEMA
    )
    grown = list(
        client.chat.completions.create_partial(
            model=server.model, messages=HELLO, response_model=Weather, max_retries=0, seed=5, max_tokens=2000
        )
    )
    assert len(grown) > 1
    assert 1 <= grown[-1].days <= 9
