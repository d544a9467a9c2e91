"""A server treats every field as the field table says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from onedraw.errors import BadRequest
from onedraw.server.anthropic import messages
from onedraw.server.api_docs import page
from onedraw.server.fields import Treatment
from onedraw.server.openai import responses_request as items
from onedraw.server.parsing import TABLES, parse
from onedraw.server.protocol import ChatRequest, CompletionRequest

BASE = {
    CompletionRequest: {"prompt": "a"},
    ChatRequest: {"messages": [{"role": "user", "content": "a"}]},
}
RULES = [(kind, rule) for kind in BASE for rule in TABLES[kind].values()]


@pytest.mark.parametrize(("kind", "rule"), RULES, ids=lambda value: getattr(value, "name", getattr(value, "__name__", "")))
def test_a_field_is_treated_as_its_rule_says(kind, rule):
    plain = parse(kind, BASE[kind]).request
    if rule.name not in BASE[kind]:
        assert parse(kind, BASE[kind] | {rule.name: None}).request == plain, "null means: not asked for"
    for value in rule.neutral:
        assert parse(kind, BASE[kind] | {rule.name: value}).request == plain
    match rule.treatment:
        case Treatment.HONOURED:
            with pytest.raises(BadRequest) as refusal:
                parse(
                    kind,
                    BASE[kind]
                    | {
                        rule.name: {"no": {"such": ["value"]}}
                        if rule.name not in ("chat_template_kwargs", "guided_json", "json_schema")
                        else 5
                    },
                )
            assert refusal.value.param.startswith(rule.name)
        case Treatment.INERT if not rule.neutral:
            assert parse(kind, BASE[kind] | {rule.name: {"anything": 1}}).request == plain
        case _:
            with pytest.raises(BadRequest) as refusal:
                parse(kind, BASE[kind] | {rule.name: "something else"})
            assert refusal.value.param == rule.name
            assert rule.note in str(refusal.value)


def test_the_reference_page_is_up_to_date():
    file = Path(__file__).parents[2] / "docs" / "api.md"
    assert file.read_text() == page(), "run: python -m onedraw.server.api_docs > docs/api.md"


def test_the_reference_page_names_every_field():
    for rules in TABLES.values():
        for name in rules:
            assert f"| `{name}` |" in page()


def test_a_neutral_number_may_be_an_integer_or_a_float():
    assert parse(CompletionRequest, {"prompt": "a", "best_of": 1.0, "length_penalty": 1}).request.prompt == ("a",)


def test_max_completion_tokens_is_max_tokens():
    base = BASE[ChatRequest]
    assert parse(ChatRequest, base | {"max_completion_tokens": 7}).request.options(logprobs=None).max_tokens == 7
    assert parse(ChatRequest, base | {"max_tokens": 7, "max_completion_tokens": 7}).request.options(logprobs=None).max_tokens == 7


def test_a_developer_message_is_a_system_message():
    asked = parse(ChatRequest, {"messages": [{"role": "developer", "content": "a", "name": "b"}]}).request
    assert asked.messages[0].plain() == {"role": "system", "content": "a", "name": "b"}


def test_a_reply_of_the_openai_client_can_be_sent_back(fake):
    """Clients append `message.model_dump()` to the conversation: its null fields must not be refused."""
    messages = [{"role": "user", "content": "Hello."}]
    asked = {"model": fake.model, "max_tokens": 4, "temperature": 0}
    reply = fake.client().chat.completions.create(messages=messages, extra_body={"logit_bias": {"72": 100}}, **asked)
    messages.append(reply.choices[0].message.model_dump())
    messages.append({"role": "user", "content": "And now?"})
    assert fake.client().chat.completions.create(messages=messages, **asked).choices[0].message.role == "assistant"


SAID = [{"role": "user", "content": "a"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "w"}}
CALLED: dict[str, Any] = {"id": "1", "function": {"name": "w", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("kind", "raw", "names"),
    [
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
            ["messages[0].content[0].x"],
        ),
        (
            ChatRequest,
            {"messages": [*SAID, {"role": "assistant", "tool_calls": [{**CALLED, "x": 1}]}]},
            ["messages[1].tool_calls[0].x"],
        ),
        (items.ResponsesRequest, {"input": "a", "text": {"x": 1}, "reasoning": {"y": 2}}, ["text.x", "reasoning.y"]),
        *(
            (
                kind,
                {"messages": SAID, "system": [{"type": "text", "text": "b", "cache_control": {}, "x": 42}], **more},
                ["system[0].x"],
            )
            for kind, more in ((messages.MessagesRequest, {"max_tokens": 4}), (messages.CountRequest, {}))
        ),
        (
            ChatRequest,
            {"messages": SAID, "prediction": {"type": "content", "content": [{"type": "text", "text": "b", "x": 1}]}},
            ["prediction.content[0].x"],
        ),
        (
            ChatRequest,
            {"messages": SAID, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "w", "x": 1}, "y": 2}},
            ["tool_choice.function.x", "tool_choice.y"],
        ),
        (
            ChatRequest,
            {
                "messages": SAID,
                "tools": [TOOL],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "w"}, "x": 1}]},
                },
            },
            ["tool_choice.allowed_tools.tools[0].x"],
        ),
        (
            items.ResponsesRequest,
            {
                "input": "a",
                "tools": [{"type": "function", "name": "w"}],
                "tool_choice": {"type": "function", "name": "w", "x": 1},
            },
            ["tool_choice.x"],
        ),
        (
            messages.MessagesRequest,
            {"messages": SAID, "max_tokens": 4, "thinking": {"type": "disabled", "x": 1}},
            ["thinking.x"],
        ),
    ],
)
def test_unknown_fields_inside_objects_are_refused_or_ignored_by_path(
    kind: type[BaseModel], raw: dict[str, Any], names: list[str]
) -> None:
    with pytest.raises(BadRequest) as refusal:
        parse(kind, raw)
    assert refusal.value.param in names
    assert sorted(parse(kind, raw, lenient=True).ignored) == sorted(names)


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        (ChatRequest, {"messages": [*SAID, {"role": "assistant", "tool_calls": [{**CALLED, "type": None, "x": None}]}]}),
        (messages.MessagesRequest, {"messages": SAID, "max_tokens": 4, "thinking": {"type": "disabled", "x": None}}),
    ],
)
def test_null_inside_an_object_means_not_given(kind: type[BaseModel], raw: dict[str, Any]) -> None:
    assert not parse(kind, raw).ignored


def test_an_error_in_a_field_of_several_types_names_the_type_that_the_caller_used() -> None:
    with pytest.raises(BadRequest) as refusal:
        parse(CompletionRequest, {"prompt": "a", "guided_json": True})
    assert refusal.value.param == "guided_json"
