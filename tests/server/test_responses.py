"""`/v1/responses` with the `openai` client: whole, streamed, with tools, reasoning, response formats and stored responses."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from onedraw.errors import BadParameter
from onedraw.server.auth import ApiKey
from onedraw.server.config import ServerOptions
from onedraw.server.openai.responses import NoSuchResponse, ResponseStore, StoredResponse
from tests.server.running import backend_of, fake_llm, serving, slowed

PATH = "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"type": "function", "name": "weather", "description": "w", "parameters": SCHEMA, "strict": True}
SHORT = {"max_output_tokens": 12, "extra_body": {"seed": 3}}


@pytest.fixture
def client(fake: Any) -> Iterator[openai.OpenAI]:
    with fake.client() as made:
        yield made


def test_a_response_has_the_text_of_the_equivalent_chat(fake: Any, client: openai.OpenAI) -> None:
    reply = client.responses.create(model=fake.model, input="Hello.", **SHORT)
    chat = fake.post("/v1/chat/completions", messages=[{"role": "user", "content": "Hello."}], max_tokens=12, seed=3).json()
    assert reply.output_text == chat["choices"][0]["message"]["content"]
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert reply.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert (reply.usage.output_tokens, reply.usage.total_tokens) == (12, 12 + reply.usage.input_tokens)


def test_instructions_are_the_system_message(fake: Any, client: openai.OpenAI) -> None:
    reply = client.responses.create(model=fake.model, input="Hello.", instructions="Be brief.", **SHORT)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}]
    chat = fake.post("/v1/chat/completions", messages=messages, max_tokens=12, seed=3).json()
    assert reply.output_text == chat["choices"][0]["message"]["content"]


def test_the_events_of_a_stream_are_complete_and_consistent(fake: Any, client: openai.OpenAI) -> None:
    thinking = {"seed": 3, "chat_template_kwargs": {"enable_thinking": True}, "thinking_budget": 8}
    asked = {"model": fake.model, "input": "Hello.", "max_output_tokens": 40, "extra_body": thinking}
    events = list(client.responses.create(stream=True, **asked))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.incomplete"
    item = ["response.output_item.added", "response.content_part.added"]
    ends = ["response.content_part.done", "response.output_item.done"]
    expected = [*item, "response.reasoning_text.done", *ends, *item, "response.output_text.done", *ends]
    assert [kind for kind in kinds[2:-1] if not kind.endswith("delta")] == expected
    whole = events[-1].response
    for part, delta in (("reasoning", "response.reasoning_text.delta"), ("message", "response.output_text.delta")):
        (found,) = [output for output in whole.output if output.type == part]
        assert found.content[0].text == "".join(event.delta for event in events if event.type == delta)
    again = client.responses.create(**asked)
    assert again.output_text == whole.output_text
    assert again.usage.output_tokens_details.reasoning_tokens == whole.usage.output_tokens_details.reasoning_tokens > 8


def test_the_reasoning_summary_is_the_reasoning_text(fake: Any, client: openai.OpenAI) -> None:
    extra = {"seed": 3, "chat_template_kwargs": {"enable_thinking": True}, "thinking_budget": 8}
    asked: dict[str, Any] = {"model": fake.model, "input": "Hello.", "max_output_tokens": 40, "extra_body": extra}
    plain = client.responses.create(**asked)
    events = list(client.responses.create(stream=True, reasoning={"summary": "auto"}, **asked))
    whole = events[-1].response
    assert whole.output[0].content == []
    assert whole.output[0].summary[0].text == plain.output[0].content[0].text
    assert whole.output_text == plain.output_text
    kinds = [event.type for event in events]
    ends = ["response.reasoning_summary_text.done", "response.reasoning_summary_part.done", "response.output_item.done"]
    assert [kind for kind in kinds if "reasoning" in kind and "delta" not in kind] == [
        "response.reasoning_summary_part.added",
        *ends[:2],
    ]
    assert kinds[kinds.index(ends[0]) :][:3] == ends
    assert (
        "".join(e.delta for e in events if e.type == "response.reasoning_summary_text.delta") == whole.output[0].summary[0].text
    )
    # It is accepted as reasoning when it is sent back.
    counts = [
        client.responses.input_tokens.count(
            model=fake.model, input=[{"role": "user", "content": "Hello."}, *(item.to_dict() for item in reply.output)]
        ).input_tokens
        for reply in (plain, whole)
    ]
    assert counts[0] == counts[1]


def test_the_stream_helper_of_the_client_works(fake: Any, client: openai.OpenAI) -> None:
    shape: Any = {"format": {"type": "json_schema", "name": "w", "schema": SCHEMA, "strict": True}}
    asked = {"model": fake.model, "input": "Hello.", "text": shape, "max_output_tokens": 300}
    with client.responses.stream(**asked, extra_body={"seed": 2}) as stream:
        final = stream.get_final_response() if [1 for _ in stream] else None
    assert final is not None
    assert final.status == "completed"
    jsonschema.validate(json.loads(final.output_text), SCHEMA)


def test_a_tool_call_and_its_result_make_a_round_trip(fake: Any, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": fake.model, "tools": [WEATHER], "max_output_tokens": 300, "temperature": 1.1}
    must = {"tool_choice": "required", "parallel_tool_calls": False, "extra_body": {"seed": 4}}
    first = client.responses.create(input="Weather?", **asked, **must)
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert first.status == "completed"
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    # The whole conversation, or only the new items after the stored response.
    sent = [{"role": "user", "content": "Weather?"}, *(item.model_dump(exclude_none=True) for item in first.output), output]
    told = {**asked, "max_output_tokens": 8, "extra_body": {"seed": 5}}
    whole = client.responses.create(input=sent, **told)
    rest = client.responses.create(input=[output], previous_response_id=first.id, **told)
    assert whole.output_text == rest.output_text
    assert whole.usage.input_tokens == rest.usage.input_tokens
    third = client.responses.create(input="And now?", previous_response_id=rest.id, **told)
    assert third.usage.input_tokens > rest.usage.input_tokens


def test_arguments_of_a_call_are_streamed(fake: Any, client: openai.OpenAI) -> None:
    named = {"type": "function", "name": "weather"}
    asked = {"tools": [WEATHER], "tool_choice": named, "parallel_tool_calls": False, "max_output_tokens": 300}
    events = list(client.responses.create(model=fake.model, input="?", stream=True, extra_body={"seed": 1}, **asked))
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert len(deltas) > 5
    assert "".join(deltas) == done.arguments
    assert events[-1].type == "response.completed"


def test_a_response_format_and_logprobs(fake: Any, client: openai.OpenAI) -> None:
    shape = {"format": {"type": "json_schema", "name": "w", "schema": SCHEMA, "strict": True}}
    asked = {"text": shape, "max_output_tokens": 300, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    reply = client.responses.create(model=fake.model, input="?", extra_body={"seed": 2}, **asked)
    jsonschema.validate(json.loads(reply.output_text), SCHEMA)
    logprobs = reply.output[0].content[0].logprobs
    assert len(logprobs) >= len(reply.output_text) - 4
    assert len(logprobs[0].top_logprobs) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"previous_response_id": "resp_0"}, "previous_response_id"),
        ({"max_output_tokens": -2}, "max_output_tokens"),
        ({"max_output_tokens": 2**31}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"tools": [{"type": "websearch"}]}, "tools[0].type"),
        ({"tools": [{**WEATHER, "parameters": {"not": {}}}]}, "tools[0].parameters.not"),
        ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format.schema.not"),
        ({"tool_choice": {"type": "function", "name": "weather"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "rain"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        ({"input": [{"role": "user", "content": "x", "frobnicate": 1}]}, "input[0].frobnicate"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "y": 1}]}]},
            "input[0].content[0].y",
        ),
        ({"frobnicate": 1}, "frobnicate"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ({"input": [{"type": "reasoning", "summary": "text"}, {"role": "user", "content": "x"}]}, "input[0].summary"),
        ({"input": [{"type": "reasoning", "content": [5]}, {"role": "user", "content": "x"}]}, "input[0].content[0]"),
        ({"input": [{"type": "reasoning", "summary": [{"type": "foo", "text": "x"}]}]}, "input[0].summary[0]"),
    ],
)
def test_invalid_fields_are_refused_by_the_callers_field_name(fake: Any, fields: dict[str, Any], param: str) -> None:
    answer = fake.post(PATH, **{"input": "Hello.", "max_output_tokens": 4, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_response_with_store_false_cannot_be_found(fake: Any) -> None:
    first = fake.post(PATH, input="Hello.", max_output_tokens=4, store=False).json()
    answer = fake.post(PATH, input="And?", previous_response_id=first["id"], max_output_tokens=4)
    assert answer.json()["error"]["param"] == "previous_response_id"


def stored_response(number: int, item: dict[str, Any] | None = None) -> StoredResponse:
    output = [item or {"id": f"msg_{number}", "type": "message"}]
    return StoredResponse({"id": f"resp_{number}", "output": output}, (), ({"role": "user", "content": "x" * 60},))


def test_stored_responses_are_bounded() -> None:
    memory = ResponseStore(500)
    for number in range(9):
        memory.keep(stored_response(number))
    assert memory.before("resp_8")[0]["content"] == "x" * 60
    with pytest.raises(BadParameter):
        memory.before("resp_0")
    with pytest.raises(BadParameter):
        memory.resolved([{"type": "item_reference", "id": "msg_0"}])


def test_an_item_is_stored_as_long_as_a_response_contains_it() -> None:
    memory, reference = ResponseStore(), [{"type": "item_reference", "id": "msg_0"}]
    memory.keep(stored_response(0))
    memory.keep(stored_response(1, memory.resolved(reference)[0]))
    memory.delete("resp_0")
    assert memory.resolved(reference)[0]["type"] == "message"
    memory.delete("resp_1")
    with pytest.raises(BadParameter):
        memory.resolved(reference)


def test_deleting_a_later_response_keeps_the_items_of_an_earlier_one() -> None:
    memory, reference = ResponseStore(), [{"type": "item_reference", "id": "msg_0"}]
    memory.keep(stored_response(0))
    memory.keep(StoredResponse({"id": "resp_1", "output": []}, (*memory.resolved(reference * 2),), ()))
    memory.delete("resp_1")
    assert memory.resolved(reference)[0]["type"] == "message"


def test_a_response_too_large_to_store_evicts_no_other() -> None:
    memory = ResponseStore(500)
    memory.keep(stored_response(0))
    memory.keep(StoredResponse({"id": "resp_1", "output": []}, (), ({"role": "user", "content": "x" * 600},)))
    assert memory.find("resp_0")
    with pytest.raises(NoSuchResponse):
        memory.find("resp_1")


def test_a_response_that_many_connections_could_ask_for_at_once_is_not_stored() -> None:
    """Regression: one of 25 MB was sent to any number of clients that did not read it, and took their number times its size."""
    memory = ResponseStore(10_000, most_of_one=500)
    memory.keep(stored_response(0))
    memory.keep(StoredResponse({"id": "resp_1", "output": []}, ({"id": "in_1", "text": "x" * 600},), ()))
    assert memory.find("resp_0")
    with pytest.raises(NoSuchResponse):
        memory.find("resp_1")


@pytest.mark.parametrize(
    "notes", [{"a": "x" * 513}, {"x" * 65: "a"}, {"": "a"}, {str(i): "a" for i in range(17)}, {"a": 1}, ["a"]]
)
def test_metadata_is_bounded(fake: Any, notes: Any) -> None:
    answer = fake.post(PATH, input="Hello.", max_output_tokens=2, metadata=notes)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("metadata")


def test_a_response_is_not_found_with_another_key() -> None:
    options = ServerOptions(api_keys=(ApiKey("ann", "a-key"), ApiKey("bob", "b-key")))
    with fake_llm() as llm, serving(llm, options) as served:
        ann, bob = ({"authorization": f"Bearer {key}"} for key in ("a-key", "b-key"))
        asked = {"input": "Hello.", "max_output_tokens": 4}
        told = served.http.post(PATH, json=asked, headers=ann).json()
        reference = {"type": "item_reference", "id": told["output"][0]["id"]}
        assert served.get(f"{PATH}/{told['id']}", headers=bob).status_code == 404
        assert served.http.delete(f"{PATH}/{told['id']}", headers=bob).status_code == 404
        for more in ({"previous_response_id": told["id"]}, {"input": [reference, {"role": "user", "content": "?"}]}):
            assert served.http.post(PATH, json={**asked, **more}, headers=bob).status_code == 400
            assert served.http.post(PATH, json={**asked, **more}, headers=ann).status_code == 200
        assert served.get(f"{PATH}/{told['id']}", headers=ann).json() == told


def test_a_stored_response_is_read_and_deleted(fake: Any, client: openai.OpenAI) -> None:
    told = client.responses.create(model=fake.model, input="Hello.", instructions="Be brief.", metadata={"a": "b"}, **SHORT)
    assert client.responses.retrieve(told.id).to_dict() == told.to_dict()
    (asked,) = client.responses.input_items.list(told.id)
    assert (asked.role, asked.content[0].text) == ("user", "Hello.")
    assert client.responses.delete(told.id) is None
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(told.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(told.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model=fake.model, input="And?", previous_response_id=told.id)


def test_input_items_are_paginated(fake: Any, client: openai.OpenAI) -> None:
    said: Any = [{"role": "user", "content": str(number)} for number in range(5)]
    told = client.responses.create(model=fake.model, input=said, **SHORT)
    listed = client.responses.input_items.list(told.id, limit=2, order="asc")
    assert [item.content[0].text for item in listed] == list("01234")  # the client requests the next pages
    newest = client.responses.input_items.list(told.id, limit=2)
    assert ([item.content[0].text for item in newest.data], newest.has_more) == (["4", "3"], True)
    for wrong in (
        "limit=0",
        "limit=many",
        "limit=00000001000",
        f"limit=000000001{5000 * '0'}",
        "order=up",
        "after=nobody",
        "page=2",
    ):
        answer = fake.get(f"{PATH}/{told.id}/input_items?{wrong}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, wrong.partition("=")[0])
    assert fake.get(f"{PATH}/{told.id}?stream=true").status_code == 400


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_an_item_referenced_several_times_is_listed_several_times(fake: Any, client: openai.OpenAI, order: Any) -> None:
    (first,) = client.responses.create(model=fake.model, input="a", **SHORT).output
    again = {"type": "item_reference", "id": first.id}
    said: Any = [{"role": "user", "content": "a"}, again, again, {"role": "user", "content": "b"}, again]
    told = client.responses.create(model=fake.model, input=said, **SHORT)
    listed = list(itertools.islice(client.responses.input_items.list(told.id, limit=1, order=order), 9))
    texts, answer = [item.content[0].text for item in listed], first.content[0].text
    assert (texts if order == "asc" else texts[::-1]) == ["a", answer, answer, "b", answer]
    assert len({item.id for item in listed}) == 5
    assert client.responses.create(model=fake.model, input=[*said, again], **SHORT).status is not None


def test_an_item_keeps_the_id_from_the_caller(fake: Any, client: openai.OpenAI) -> None:
    part = {"type": "output_text", "text": "Yes.", "annotations": []}
    mine: Any = {"type": "message", "id": "msg_mine", "role": "assistant", "status": "completed", "content": [part]}
    told = client.responses.create(model=fake.model, input=[mine, {"role": "user", "content": "b"}, mine], **SHORT)
    first, second, third = client.responses.input_items.list(told.id, order="asc")
    assert first.id == "msg_mine"
    assert len({first.id, second.id, third.id}) == 3
    reference: Any = [{"type": "item_reference", "id": "msg_mine"}, {"role": "user", "content": "?"}]
    assert client.responses.create(model=fake.model, input=reference, **SHORT).status is not None
    wrong = fake.post(PATH, input=[{**mine, "id": [1]}])
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "input[0].id")


def test_items_can_be_sent_by_reference(fake: Any, client: openai.OpenAI) -> None:
    """Clients that store responses send references to earlier items instead of the items."""
    first = client.responses.create(model=fake.model, input="Hello.", **SHORT)
    user: Any = {"role": "user", "content": "Hello."}
    more: Any = {"role": "user", "content": "More."}
    whole = client.responses.create(model=fake.model, input=[user, *(item.to_dict() for item in first.output), more], **SHORT)
    named: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
    short = client.responses.create(model=fake.model, input=[user, *named, more], **SHORT)
    assert short.output_text == whole.output_text
    assert short.usage.input_tokens == whole.usage.input_tokens
    counted = client.responses.input_tokens.count(model=fake.model, input=[user, *named, more])
    assert counted.input_tokens == whole.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match=r"input\[1\].id"):
        client.responses.create(model=fake.model, input=[user, {"type": "item_reference", "id": "msg_none"}])


def test_a_failure_during_a_stream_sends_an_error_event_and_a_failed_event() -> None:
    """Some clients wait for an `error` event, others for `response.failed`."""
    with slowed(fake_llm(), 0.02) as llm, serving(llm) as served:
        backend = backend_of(llm)
        asked = {"model": served.model, "input": "Hello.", "max_output_tokens": 1500, "extra_body": {"seed": 6}}
        stream = served.client().responses.create(**asked, stream=True)  # with this seed the reply does not end by itself
        events = [next(iter(stream))]
        backend.submit = lambda plan: 1 / 0
        events += list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert events[-2].code == "internal_error"
    assert (events[-1].response.status, events[-1].response.error.code) == ("failed", "internal_error")


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_called(fake: Any, client: openai.OpenAI, mode: str) -> None:
    tools: Any = [{"type": "function", "name": name} for name in ("one", "two", "three")]
    choice: Any = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "two"}]}
    asked = {"tools": tools, "tool_choice": choice, "max_output_tokens": 200, "temperature": 2.0}
    called = set()
    for seed in range(6):
        reply = client.responses.create(model=fake.model, input="?", extra_body={"seed": seed}, **asked)
        assert reply.to_dict()["tool_choice"] == choice
        called |= {item.name for item in reply.output if item.type == "function_call"}
    assert called <= {"two"}
    assert called or mode == "auto"


@pytest.mark.parametrize("instructions", [None, "Be brief."])
def test_an_error_names_the_callers_input_item(fake: Any, instructions: str | None) -> None:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "assistant", "content": "c"}]
    for wrong in (0, 3):
        items = [*said, {"role": "user", "content": "d"}]
        items[wrong] = {"role": "wizard", "content": "a"}
        given = {} if instructions is None else {"instructions": instructions}
        answer = fake.post("/v1/responses", input=items, **given)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == f"input[{wrong}].role", answer.text
