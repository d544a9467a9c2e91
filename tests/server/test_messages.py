"""`/v1/messages` with the `anthropic` client: whole and streamed, tools, thinking, and errors in the shape of Anthropic."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import pytest

from onedraw.server.auth import ApiKey
from onedraw.server.config import ServerOptions
from onedraw.server.openai.chat import arguments_object
from tests.server.running import fake_llm, serving

PATH = "/v1/messages"
HELLO: list[Any] = [{"role": "user", "content": "Hello."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"name": "weather", "description": "w", "input_schema": SCHEMA, "strict": True}


def client_of(served: Any, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key=key, max_retries=0, timeout=120)


@pytest.fixture
def client(fake: Any) -> Iterator[anthropic.Anthropic]:
    with client_of(fake) as made:
        yield made


def test_a_message_has_the_text_of_the_equivalent_chat(fake: Any, client: anthropic.Anthropic) -> None:
    reply = client.messages.create(model=fake.model, max_tokens=12, messages=HELLO, system="Be brief.", extra_body={"seed": 3})
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    asked = {"max_tokens": 12, "seed": 3, "reasoning_effort": "none"}
    chat = fake.post("/v1/chat/completions", messages=messages, **asked).json()
    assert reply.content[0].text == chat["choices"][0]["message"]["content"]
    assert (reply.stop_reason, reply.usage.output_tokens) == ("max_tokens", 12)
    assert reply.usage.input_tokens + reply.usage.cache_read_input_tokens == chat["usage"]["prompt_tokens"]
    counted = client.messages.count_tokens(model=fake.model, messages=HELLO, system="Be brief.")
    assert counted.input_tokens == chat["usage"]["prompt_tokens"]


def test_thinking_is_a_separate_block_within_its_budget(fake: Any, client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": fake.model, "max_tokens": 60, "messages": HELLO, "extra_body": {"seed": 3}}
    reply = client.messages.create(thinking={"type": "enabled", "budget_tokens": 10}, **asked)
    thought, said = reply.content
    assert (thought.type, said.type) == ("thinking", "text")
    assert thought.thinking
    with client.messages.stream(thinking={"type": "enabled", "budget_tokens": 10}, **asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in reply.content]
    assert final.usage.output_tokens == reply.usage.output_tokens == 60
    assert final.stop_reason == "max_tokens"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    # The blocks of a reply can be sent back.
    turns = [*HELLO, {"role": "assistant", "content": [b.to_dict() for b in reply.content]}, {"role": "user", "content": "?"}]
    assert client.messages.create(**asked | {"messages": turns, "max_tokens": 4}).usage.output_tokens == 4


def test_a_tool_call_and_its_result_make_a_round_trip(fake: Any, client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": fake.model, "max_tokens": 300, "tools": [WEATHER]}
    must = {"tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}, "extra_body": {"seed": 1}}
    reply = client.messages.create(messages=HELLO, **asked, **must)
    (used,) = reply.content
    assert (used.type, used.name, reply.stop_reason) == ("tool_use", "weather", "tool_use")
    jsonschema.validate(used.input, SCHEMA)
    with client.messages.stream(messages=HELLO, **asked, **must) as stream:
        final = stream.get_final_message()
    assert final.content[0].input == used.input
    result = {"type": "tool_result", "tool_use_id": used.id, "content": [{"type": "text", "text": "sunny"}]}
    turns = [*HELLO, {"role": "assistant", "content": [used.to_dict()]}, {"role": "user", "content": [result]}]
    last = client.messages.create(messages=turns, **asked | {"max_tokens": 6})
    assert last.stop_reason in ("max_tokens", "end_turn")
    assert last.usage.cache_read_input_tokens > 0


def test_a_stop_sequence_is_named(fake: Any, client: anthropic.Anthropic) -> None:
    reply = client.messages.create(model=fake.model, max_tokens=200, messages=HELLO, stop_sequences=["e"], extra_body={"seed": 2})
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "e")


def test_a_reply_follows_its_output_format(fake: Any, client: anthropic.Anthropic) -> None:
    import json

    shape = {"format": {"type": "json_schema", "schema": SCHEMA}}
    body = {"seed": 2, "output_config": shape}
    reply = client.messages.create(model=fake.model, max_tokens=300, messages=HELLO, extra_body=body)
    jsonschema.validate(json.loads(reply.content[0].text), SCHEMA)


def test_the_client_parses_errors(fake: Any, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature") as refusal:
        client.messages.create(model=fake.model, max_tokens=4, messages=HELLO, extra_body={"temperature": -1})
    assert refusal.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("other")


def test_a_key_may_come_in_the_header_of_the_client() -> None:
    options = ServerOptions(api_keys=(ApiKey("me", "secret"),))
    with fake_llm() as llm, serving(llm, options) as served:
        asked: dict[str, Any] = {"model": served.model, "max_tokens": 2, "messages": HELLO}
        with client_of(served, "secret") as right, client_of(served, "wrong") as wrong:
            assert right.messages.create(**asked).type == "message"
            with pytest.raises(anthropic.AuthenticationError):
                wrong.messages.create(**asked)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": -2}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [*HELLO, {"role": "system", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "messages[1].content[0].type",
        ),
        ({"tools": [{**WEATHER, "input_schema": {"not": {}}}]}, "tools[0].input_schema.not"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"container": "c"}, "container"),
        ({"frobnicate": 1}, "frobnicate"),
    ],
)
def test_invalid_fields_are_refused_by_the_callers_field_name(fake: Any, fields: dict[str, Any], param: str) -> None:
    answer = fake.post(PATH, **{"messages": HELLO, "max_tokens": 4, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_max_tokens_is_required(fake: Any) -> None:
    answer = fake.post(PATH, messages=HELLO)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")


def test_the_text_of_thinking_can_be_omitted(fake: Any, client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": fake.model, "max_tokens": 60, "messages": HELLO, "extra_body": {"seed": 3}}
    shown = client.messages.create(thinking={"type": "enabled", "budget_tokens": 10}, **asked)
    quiet: Any = {"type": "enabled", "budget_tokens": 10, "display": "omitted"}
    hidden = client.messages.create(thinking=quiet, **asked)
    assert shown.content[0].thinking
    assert [block.type for block in hidden.content] == ["thinking", "text"]
    assert (hidden.content[0].thinking, hidden.content[1].text) == ("", shown.content[1].text)
    with client.messages.stream(thinking=quiet, **asked) as stream:
        deltas = [event.delta.type for event in stream if event.type == "content_block_delta"]
        final = stream.get_final_message().content
    assert [block.to_dict() for block in final] == [block.to_dict() for block in hidden.content]
    assert set(deltas) == {"text_delta"}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "auto", "name": "w"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ],
)
def test_a_tool_choice_without_tools_is_refused(fake: Any, given: dict[str, Any], param: str) -> None:
    answer = fake.post(PATH, messages=HELLO, max_tokens=4, **given)
    assert answer.status_code == 400, answer.text
    assert param in answer.json()["error"]["message"]


def test_a_prompt_longer_than_the_context_is_counted(fake: Any) -> None:
    text = "a" * 50_000
    said = [{"role": "user", "content": text}]
    answers = [
        fake.post(f"{PATH}/count_tokens", messages=said),
        fake.post("/v1/responses/input_tokens", input=text),
    ]
    assert [answer.status_code for answer in answers] == [200, 200], [answer.text for answer in answers]
    assert all(answer.json()["input_tokens"] > len(text) for answer in answers)


def test_a_failed_tool_result_is_marked_as_an_error(fake: Any) -> None:
    def prompt(**result: Any) -> int:
        used = {"type": "tool_use", "id": "t", "name": "weather", "input": {}}
        told = {"type": "tool_result", "tool_use_id": "t", "content": "no such city", **result}
        said = [*HELLO, {"role": "assistant", "content": [used]}, {"role": "user", "content": [told]}]
        answer = fake.post(f"{PATH}/count_tokens", messages=said)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["input_tokens"])

    assert prompt(is_error=True) == prompt() + len("Error: ")
    assert prompt(is_error=False) == prompt(cache_control={"type": "ephemeral"}) == prompt()


def test_the_client_finds_the_model_and_the_request_id(fake: Any, client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type, model.display_name) == (fake.model, "model", fake.model)
    reply = client.messages.create(model=fake.model, max_tokens=4, messages=HELLO)
    assert reply._request_id == reply.id  # the documented attribute of the anthropic client


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}]}, "messages[0].content[0].y"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"thinking": {"type": "disabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
    ],
)
def test_fields_that_would_change_the_prompt_are_refused(fake: Any, fields: dict[str, Any], param: str) -> None:
    answer = fake.post(PATH, **{"messages": HELLO, "max_tokens": 4, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_neutral_fields_are_accepted(fake: Any) -> None:
    nothing = {"context_management": {"edits": []}, "tools": [{**WEATHER, "strict": None, "defer_loading": False}]}
    assert fake.post(PATH, messages=HELLO, max_tokens=4, **nothing).status_code == 200


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"a": 6e390, "b": [-1e999], "c": 1.5}', {"a": sys.float_info.max, "b": [-sys.float_info.max], "c": 1.5}),
        ('{"a": NaN, "b": Infinity}', {"a": None, "b": None}),
        ('{"a": 1', {}),
        ("[1]", {}),
    ],
)
def test_invalid_arguments_of_a_call_become_a_valid_json_object(arguments: str, given: Any) -> None:
    assert arguments_object(arguments) == given
    json.dumps(given, allow_nan=False)
