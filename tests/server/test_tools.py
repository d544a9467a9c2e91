"""Tools over HTTP: calls, streams, schemas, and prompts that begin with the tokens of the last reply."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "What is the weather?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "w", "parameters": SCHEMA, "strict": True}}
STOP = {"type": "function", "function": {"name": "stop"}}
MUST = {"tools": [WEATHER, STOP], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.2, "max_tokens": 400}


def said(served: Any, messages: list[Any] = HELLO, **options: Any) -> dict[str, Any]:
    answer = served.post(CHAT, messages=messages, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@pytest.mark.parametrize("seed", range(5))
def test_a_required_call_follows_its_schema(fake: Any, seed: int) -> None:
    choice = said(fake, **MUST | {"tool_choice": {"type": "function", "function": {"name": "weather"}}}, seed=seed)
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert choice["message"]["content"] is None
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


def test_required_allows_any_tool_and_none_hides_the_tools(fake: Any) -> None:
    names = {
        said(fake, **MUST | {"temperature": 9.0}, seed=seed)["message"]["tool_calls"][0]["function"]["name"] for seed in range(8)
    }
    assert names == {"weather", "stop"}
    hidden = said(fake, tools=[WEATHER], tool_choice="none", seed=1, max_tokens=8, return_token_ids=True)
    plain = said(fake, seed=1, max_tokens=8, return_token_ids=True)
    assert hidden == plain


def test_several_calls_in_one_reply(fake: Any) -> None:
    for seed in range(20):
        choice = said(fake, **MUST | {"tools": [STOP], "parallel_tool_calls": True}, seed=seed)
        calls = choice["message"].get("tool_calls", [])
        assert len({call["id"] for call in calls}) == len(calls)
        if len(calls) > 1:
            return
    pytest.fail("no reply had two calls")


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_tool_is_called_once(fake: Any, stream: bool) -> None:
    """Otherwise a small model repeats the call until `max_tokens`, and clients that wait for one object get a cut reply."""
    named = {"type": "function", "function": {"name": "stop"}}
    asked = MUST | {"tools": [WEATHER, STOP], "tool_choice": named, "parallel_tool_calls": True, "max_tokens": 100}
    for seed in range(6):
        if stream:
            chunks = [chunk["choices"][0] for chunk in fake.chunks(CHAT, messages=HELLO, seed=seed, **asked)]
            assert {call["index"] for chunk in chunks for call in chunk["delta"].get("tool_calls", ())} == {0}
            assert chunks[-1]["finish_reason"] == "tool_calls"
        else:
            choice = said(fake, **asked, seed=seed)
            assert (len(choice["message"]["tool_calls"]), choice["finish_reason"]) == (1, "tool_calls")


def test_the_joined_stream_equals_the_whole_call(fake: Any) -> None:
    options = MUST | {"seed": 3, "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    whole = said(fake, **options)["message"]["tool_calls"][0]["function"]
    name, arguments, pieces, finish = "", "", 0, None
    for chunk in fake.chunks(CHAT, messages=HELLO, **options):
        choice = chunk["choices"][0]
        finish = choice["finish_reason"] or finish
        assert not choice["delta"].get("content")
        for delta in choice["delta"].get("tool_calls", ()):
            assert delta["index"] == 0
            assert ("id" in delta) == ("name" in delta["function"])
            name += delta["function"].get("name", "")
            arguments += delta["function"].get("arguments", "")
            pieces += 1
    assert (name, arguments, finish) == (whole["name"], whole["arguments"], "tool_calls")
    assert pieces > 5


def test_drafts_and_batches_do_not_change_calls(fake: Any) -> None:
    options = MUST | {"n": 3, "seed": 6, "return_token_ids": True, "return_checksums": True}
    bodies = {"messages": HELLO, **options}

    def told(**more: Any) -> list[Any]:
        choices = fake.post(CHAT, **bodies, **more).json()["choices"]
        for choice in choices:
            for call in choice["message"]["tool_calls"]:
                call.pop("id")  # by chance
        return choices

    plain = told(speculation=False)
    guess = fake.llm.tokenizer.decode(plain[0]["token_ids"])
    assert told(prediction={"type": "content", "content": guess}) == plain


def test_a_call_cut_off_by_max_tokens_has_the_finish_reason_length(fake: Any) -> None:
    choice = said(fake, **MUST | {"max_tokens": 50, "tools": [WEATHER]}, seed=1)
    assert choice["finish_reason"] == "length"


def test_the_openai_client_sends_a_tool_result_back(fake: Any) -> None:
    messages: list[Any] = list(HELLO)
    asked = {"model": fake.model, "tools": [WEATHER], "seed": 2, "max_tokens": 300, "temperature": 1.1}
    with fake.client() as client:
        first = client.chat.completions.create(messages=messages, tool_choice="required", parallel_tool_calls=False, **asked)
        call = first.choices[0].message.tool_calls[0]
        messages += [first.choices[0].message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        second = client.chat.completions.create(messages=messages, **asked | {"max_tokens": 8})
    assert second.choices[0].message.role == "assistant"


def test_the_next_prompt_begins_with_the_tokens_of_the_last_reply(fake: Any) -> None:
    """The template would format the call differently; the original tokens are kept, so the whole prefix is cached."""
    options = MUST | {"seed": 4, "return_token_ids": True, "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    answer = fake.post(CHAT, messages=HELLO, **options).json()
    first = answer["choices"][0]
    known = [*answer["prompt_token_ids"], *first["token_ids"][:-1]]  # the template ends a message with another token
    call = first["message"]["tool_calls"][0]
    messages = [*HELLO, first["message"], {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}]
    second = fake.post(CHAT, messages=messages, **options).json()
    assert second["prompt_token_ids"][: len(known)] == known
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > len(answer["prompt_token_ids"])
    # And once more after this message.
    known = [*second["prompt_token_ids"], *second["choices"][0]["token_ids"][:-1]]
    again = second["choices"][0]["message"]
    messages += [again, {"role": "tool", "tool_call_id": again["tool_calls"][0]["id"], "content": "rain"}]
    third = fake.post(CHAT, messages=messages, **options).json()
    assert third["prompt_token_ids"][: len(known)] == known
    # A changed call is not found in the cache.
    changed = json.loads(json.dumps(messages))
    changed[3]["tool_calls"][0]["function"]["arguments"] = '{"city": "x", "days": 1}'
    other = fake.post(CHAT, messages=changed, **options).json()
    assert other["prompt_token_ids"][: len(known)] != known


def test_content_may_have_a_response_format_beside_tools(fake: Any) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1, 2]}}}
    seen = set()
    for seed in range(12):
        choice = said(
            fake, tools=[STOP], response_format=shape, seed=seed, max_tokens=200, temperature=9.0, parallel_tool_calls=False
        )
        seen.add(choice["finish_reason"])
        assert choice["message"].get("tool_calls") or json.loads(choice["message"]["content"]) in (1, 2)
    assert seen == {"stop", "tool_calls"}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
        ({"tools": [WEATHER], "guided_regex": "a"}, "guided_regex"),
        ({"tools": [WEATHER], "ignore_eos": True}, "ignore_eos"),
        ({"tools": [{"type": "websearch"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "strict": True, "parameters": {"not": {}}}}]},
            "tools[0].function.parameters.not",
        ),
    ],
)
def test_invalid_tool_fields_are_refused_by_name(fake: Any, options: dict[str, Any], param: str) -> None:
    answer = fake.post(CHAT, **{"messages": HELLO, "max_tokens": 5, **options})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_of_those_listed_are_called(fake: Any, mode: str) -> None:
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "stop"}}]}
    options = MUST | {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    replies = [said(fake, **options, seed=seed, return_token_ids=True) for seed in range(6)]
    names = {call["function"]["name"] for reply in replies for call in reply["message"].get("tool_calls", [])}
    assert names <= {"stop"}
    assert names or mode == "auto"
    assert replies[0]["prompt_token_ids"] == said(fake, **MUST, return_token_ids=True)["prompt_token_ids"]


def test_null_inside_a_tool_means_not_given(fake: Any) -> None:
    tool = {"type": "function", "function": {"name": "stop", "strict": None, "parameters": None, "description": None}}
    assert said(fake, tools=[tool], max_tokens=4)["finish_reason"] in ("length", "stop")


def test_calls_may_be_sent_back_with_the_indexes_of_a_stream(fake: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "stop", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c", "content": "done"}

    def prompt(*calls: dict[str, Any]) -> list[int]:
        asked = [*HELLO, {"role": "assistant", "tool_calls": list(calls)}, result]
        return said(fake, asked, max_tokens=1, return_token_ids=True)["prompt_token_ids"]

    assert prompt({**call, "index": 0}) == prompt(call)


def test_stop_strings_are_searched_in_the_content_only(fake: Any) -> None:
    """Calls contain line breaks and braces that the caller does not see; these must not match a stop string."""
    free = said(fake, **MUST, seed=3)
    assert free["message"]["tool_calls"]
    stopped = said(fake, **MUST, seed=3, stop=["\n", "}", "{"])
    assert [call["function"] for call in stopped["message"]["tool_calls"]] == [
        call["function"] for call in free["message"]["tool_calls"]
    ]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == (free["finish_reason"], free["stop_reason"])


def test_prompts_of_the_other_apis_begin_with_the_tokens_of_the_last_reply_too(fake: Any) -> None:
    """A call is sent back as an object, as an item, or by the id of its response; each time the whole prefix is cached."""
    function, hello = WEATHER["function"], {"role": "user", "content": "What is the weather in Messages?"}
    tool = {"name": "weather", "input_schema": SCHEMA, "strict": True}
    asked = {"tools": [tool], "max_tokens": 400, "seed": 4, "temperature": 1.2}
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    first = fake.post("/v1/messages", messages=[hello], tool_choice=choice, **asked).json()
    (used,) = first["content"]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": used["id"], "content": "sunny"}]}
    said = [hello, {"role": "assistant", "content": first["content"]}, result]
    second = fake.post("/v1/messages", messages=said, **asked | {"max_tokens": 1}).json()
    before = first["usage"]["input_tokens"] + first["usage"]["cache_read_input_tokens"] + first["usage"]["output_tokens"]
    page = fake.llm.service.capacity.page_size
    assert second["usage"]["cache_read_input_tokens"] >= before - 1 - page

    flat = {"type": "function", **function}
    options = {"tools": [flat], "seed": 4, "temperature": 1.2, "max_output_tokens": 400}
    must = {"tool_choice": {"type": "function", "name": "weather"}, "parallel_tool_calls": False}
    item = {"role": "user", "content": "What is the weather in Responses?"}
    told = fake.post("/v1/responses", input=[item], **options, **must).json()
    (call,) = told["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    for more in ({"input": [item, call, output]}, {"input": [output], "previous_response_id": told["id"]}):
        usage = fake.post("/v1/responses", **options | {"max_output_tokens": 1}, **more).json()["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] >= told["usage"]["total_tokens"] - 1 - page
