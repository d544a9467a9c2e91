"""Constrained replies of the default model (schemas, tool calls) at temperature 1: all valid, and unchanged by drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from onedraw.build.llm import build_llm
from onedraw.llm.llm import LLM
from onedraw.llm.reply import Reply
from onedraw.llm.request_options import RequestOptions, make_chat_generation
from onedraw.settings import Settings
from onedraw.text.tools.dialects import Tool, ToolUse

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "units": {"enum": ["C", "F"]},
    },
    "required": ["city", "days", "units"],
    "additionalProperties": False,
}
TOOL = Tool("forecast", "The weather of the next days in a city.", json.dumps(SCHEMA), strict=True)
MUST = ToolUse((TOOL,), (TOOL,), required=True, parallel=False)
QUESTIONS = ("What will the weather be in Paris?", "Will it rain in Oslo this week?", "Is it hot in Cairo?", "Snow in the Alps?")

pytestmark = pytest.mark.weights


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with build_llm(Settings(model="smollm2", max_context=1024, draft_tokens=4)) as opened:
        yield opened


def answers(llm: LLM, count: int, *, use: ToolUse | None, speculation: bool) -> list[Reply]:
    form = {} if use is not None else {"guided_json": json.dumps(SCHEMA)}
    generations = [
        make_chat_generation(
            RequestOptions.of(temperature=1.0, seed=seed, max_tokens=250, speculation=speculation, checksums=True, **form),
            llm=llm,
            messages=[{"role": "user", "content": QUESTIONS[seed % len(QUESTIONS)] + " Answer as JSON."}],
            use=use,
        )
        for seed in range(count)
    ]
    return llm.run(*generations)


def check_replies(llm: LLM, count: int, use: ToolUse | None) -> None:
    drafted = answers(llm, count, use=use, speculation=True)
    for reply in drafted:
        assert reply.finish == ("stop" if use is None else "tool_calls")
        text = reply.text if use is None else reply.calls[0].arguments
        jsonschema.validate(json.loads(text), SCHEMA)
    assert sum(reply.usage.kept for reply in drafted) > 0
    plain = answers(llm, count, use=use, speculation=False)
    assert [reply.tokens for reply in plain] == [reply.tokens for reply in drafted]


@pytest.mark.parametrize("use", [None, MUST], ids=["schema", "tool"])
def test_twenty_replies_are_valid_and_the_same_without_drafts(llm: LLM, use: ToolUse | None) -> None:
    check_replies(llm, 20, use)


@pytest.mark.long
@pytest.mark.parametrize("use", [None, MUST], ids=["schema", "tool"])
def test_two_hundred_replies_are_valid_and_the_same_without_drafts(llm: LLM, use: ToolUse | None) -> None:
    check_replies(llm, 200, use)
