"""What clients of other servers send: field aliases, stream options, echo, CORS preflight requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from onedraw.errors import BadSetting
from onedraw.server.config import ServerOptions
from tests.server.running import Served, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"days": {"enum": [1, 2]}},
            "required": ["days"],
            "additionalProperties": False,
        },
    },
}


def ask(fake: Served, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    said = {"messages": HELLO} if path == CHAT else {}
    answer = fake.post(path, **{"seed": 5, "max_tokens": 12, **said, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def content(reply: dict[str, Any]) -> Any:
    return reply["choices"][0]["message"]["content"]


def test_the_last_chunk_of_a_chat_has_the_finish_and_an_empty_delta(fake: Served) -> None:
    for length in (1, 2, 9):
        chunks = fake.chunks(CHAT, messages=HELLO, seed=5, max_tokens=length, return_token_ids=True)
        *before, last = [chunk["choices"][0] for chunk in chunks]
        assert (last["delta"], last["finish_reason"]) == ({}, "length")
        assert not any(choice["finish_reason"] for choice in before)
        assert sum(len(choice["token_ids"]) for choice in (*before, last)) == length


def test_every_chunk_can_have_the_usage_so_far(fake: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = fake.chunks(CHAT, messages=HELLO, seed=5, max_tokens=9, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 9)
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}
    assert last["usage"]["completion_tokens"] == 9


def test_repeat_penalty_is_an_alias_of_repetition_penalty(fake: Served) -> None:
    plain, named = ask(fake, temperature=0), ask(fake, temperature=0, repetition_penalty=30.0)
    assert content(ask(fake, temperature=0, repeat_penalty=30.0)) == content(named) != content(plain)
    answer = fake.post(CHAT, messages=HELLO, repeat_penalty=2.0, repetition_penalty=3.0)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "repeat_penalty")


def test_thinking_can_be_switched_at_the_top_of_the_body(fake: Served) -> None:
    for switch in (True, False):
        nested = ask(fake, chat_template_kwargs={"enable_thinking": switch})["choices"]
        assert ask(fake, enable_thinking=switch)["choices"] == nested


def test_the_reasoning_of_a_message_is_accepted_under_two_names(fake: Served) -> None:
    def tokens(**thought: str) -> Any:
        said = [*HELLO, {"role": "assistant", "content": "x", **thought}, *HELLO]
        return fake.post("/tokenize", messages=said).json()["tokens"]

    assert tokens(reasoning="hm") == tokens(reasoning_content="hm")


def test_a_json_object_can_have_a_schema(fake: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}
    shape = {"type": "json_object", "schema": schema}
    assert json.loads(content(ask(fake, max_tokens=300, response_format=shape))) == {"a": 7}
    for wrong, param in (
        ({"type": "text", "schema": schema}, "response_format.schema"),
        ({"type": "json_object", "schema": {"not": {}}}, "response_format.schema.not"),
    ):
        answer = fake.post(CHAT, messages=HELLO, response_format=wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_cache_control_has_no_effect_anywhere(fake: Served) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    said = [{"role": "user", "content": [{"type": "text", "text": "Hello.", **mark}], **mark}]
    tools = [{**WEATHER, **mark}]
    assert ask(fake, messages=said, tools=tools, **mark)["choices"] == ask(fake, tools=[WEATHER])["choices"]


def test_a_reply_may_have_zero_tokens(fake: Served) -> None:
    reply = ask(fake, max_tokens=0)
    assert (content(reply), reply["choices"][0]["finish_reason"], reply["usage"]["completion_tokens"]) == ("", "length", 0)
    reply = ask(fake, COMPLETIONS, prompt="abc", max_tokens=0)
    assert (reply["choices"][0]["text"], reply["choices"][0]["logprobs"]) == ("", None)
    chunks = fake.chunks(CHAT, messages=HELLO, max_tokens=0)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_the_echo_of_a_token_prompt_keeps_special_tokens(fake: Served) -> None:
    (special,) = fake.llm.card.eos_ids
    prompt = [65, special, 66]
    text = fake.llm.tokenizer.decode(prompt, skip_special=False)
    assert text != "AB"
    assert ask(fake, COMPLETIONS, prompt=prompt, echo=True, max_tokens=0)["choices"][0]["text"] == text


@pytest.mark.parametrize("seed", [-1, -5, 2**53, 2**63 - 1, -(2**63)])
def test_a_reply_to_any_64_bit_seed_is_reproduced_by_the_returned_seed(fake: Served, seed: int) -> None:
    choice = ask(fake, seed=seed)["choices"][0]
    assert 0 <= choice["seed"] < 2**53
    assert ask(fake, seed=choice["seed"])["choices"][0] == choice
    if seed != -1:
        assert ask(fake, seed=seed)["choices"][0] == choice


def test_a_forced_tool_call_takes_precedence_over_a_response_format(fake: Served) -> None:
    forced = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400}
    plain, shaped = ask(fake, **forced), ask(fake, **forced, response_format={"type": "json_object"})
    for reply in (plain, shaped):
        reply["choices"][0]["message"]["tool_calls"][0].pop("id")
    assert shaped["choices"] == plain["choices"]
    assert ask(fake, **forced, guided_regex="a+")["choices"][0]["finish_reason"] == "tool_calls"


def test_a_tool_call_cut_off_anywhere_shows_no_marker(fake: Served) -> None:
    """A token of the fake model is one byte, so each length cuts the call at another byte."""
    forced = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    whole = ask(fake, **forced, max_tokens=400, return_token_ids=True)
    seen = set()
    for length in range(1, len(whole["choices"][0]["token_ids"])):
        choice = ask(fake, **forced, max_tokens=length)["choices"][0]
        if choice["finish_reason"] == "tool_calls":
            break
        assert choice["finish_reason"] == "length"
        assert not choice["message"]["content"]
        calls = choice["message"].get("tool_calls", [])
        assert [call["function"]["name"] for call in calls] in ([], ["weather"])
        seen.add(len(calls))
        chunks = fake.chunks(CHAT, messages=HELLO, seed=5, max_tokens=length, **forced)
        told = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        assert told == (choice["message"]["content"] or "")
    assert seen == {0, 1}


def test_responses_take_the_sampling_fields_of_a_chat(fake: Served) -> None:
    options: dict[str, Any] = {
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
        "repetition_penalty": 1.01,
        "logit_bias": {"65": 1.0},
        "dry_multiplier": 0.5,
        "min_tokens": 1,
        "bad_words": ["zz"],
        "stop_token_ids": [7],
        "ignore_eos": False,
    }
    plain = content(ask(fake, max_tokens=20, **options))
    options["stop"] = [plain[4:6]]
    chat = content(ask(fake, max_tokens=20, **options))
    answer = fake.post("/v1/responses", input="Hello.", seed=5, max_output_tokens=20, **options)
    assert answer.status_code == 200, answer.text
    assert "".join(part["text"] for item in answer.json()["output"] for part in item["content"]) == chat
    assert len(chat) < len(plain)


def test_the_request_id_of_the_caller_is_returned(fake: Served) -> None:
    for path, body in ((CHAT, {"messages": HELLO, "max_tokens": 1}), ("/v1/messages", {"messages": HELLO, "max_tokens": 1})):
        answer = fake.http.post(path, json=body, headers={"x-request-id": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"
    assert answer.headers["request-id"] == "mine-1"
    unsafe = fake.http.post(CHAT, json={"messages": HELLO, "max_tokens": 1}, headers={"x-request-id": "not ok"})
    assert unsafe.headers["x-request-id"] == unsafe.json()["id"]


def test_a_refused_preflight_request_gets_a_json_error(fake: Served) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    with serving(fake.llm, ServerOptions(cors_origins=("http://good.example",))) as served:
        good = served.http.options(CHAT, headers={"origin": "http://good.example", **asked})
        bad = served.http.options(CHAT, headers={"origin": "http://bad.example", **asked})
    assert good.status_code == 200
    assert bad.headers["content-type"] == "application/json"
    assert (bad.status_code, bad.json()["error"]["code"]) == (403, "foreign_page")
    assert "http://bad.example" in bad.json()["error"]["message"]


BEGUN = "Once upon  "


def test_a_continued_message_is_the_end_of_the_prompt(fake: Served) -> None:
    """Nothing comes after its last character, spaces included, and the reply has the rest alone."""
    said = [*HELLO, {"role": "assistant", "content": BEGUN}]
    asked = {"messages": said, "continue_final_message": True}
    prompt = fake.post("/apply-template", **asked).json()["prompt"]
    assert prompt.endswith(BEGUN)
    assert prompt.startswith(fake.post("/apply-template", messages=HELLO, add_generation_prompt=False).json()["prompt"])
    choice = ask(fake, **asked, return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == list(fake.llm.encode(prompt, add_special=False))
    assert fake.post("/tokenize", **asked, add_generation_prompt=False).json()["tokens"] == choice["prompt_token_ids"]
    same = ask(fake, COMPLETIONS, prompt=choice["prompt_token_ids"])["choices"][0]
    assert content({"choices": [choice]}) == same["text"]
    library = fake.llm.generate(said, continue_final_message=True, seed=5, max_tokens=12)
    assert (library.text, library.prompt_ids) == (same["text"], tuple(choice["prompt_token_ids"]))  # type: ignore[union-attr]


def test_a_last_message_of_the_assistant_is_continued_on_messages(fake: Served) -> None:
    said = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": BEGUN}]}]
    chat = ask(
        fake, messages=[HELLO[0], {"role": "assistant", "content": BEGUN}], continue_final_message=True, reasoning_effort="none"
    )
    message = fake.post("/v1/messages", messages=said, max_tokens=12, seed=5).json()
    assert message["content"] == [{"type": "text", "text": content(chat)}]
    assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    counted = fake.post("/v1/messages/count_tokens", messages=said).json()["input_tokens"]
    assert counted == chat["usage"]["prompt_tokens"]


def test_reasoning_that_is_open_in_a_continued_message_goes_on(fake: Served) -> None:
    for begun, channel in (("<think>\nhm", "reasoning_content"), ("<think>\nhm\n</think>\n\nSo", "content")):
        said = [*HELLO, {"role": "assistant", "content": begun}]
        message = ask(fake, messages=said, continue_final_message=True)["choices"][0]["message"]
        assert message[channel]
        assert not (message.get("reasoning_content") if channel == "content" else message["content"])


def test_what_cannot_be_continued_is_refused_by_name(fake: Served) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for last, param in (
        (HELLO[0], "messages[1].role"),
        ({"role": "assistant", "content": "x", "tool_calls": [call]}, "messages[1].tool_calls"),
    ):
        answer = fake.post(CHAT, messages=[*HELLO, last], continue_final_message=True)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_template_can_be_applied_without_a_reply(fake: Served) -> None:
    text = fake.post("/apply-template", messages=HELLO, tools=[WEATHER]).json()["prompt"]
    assert "weather" in text
    reply = ask(fake, tools=[WEATHER], return_token_ids=True)
    assert list(fake.llm.encode(text, add_special=False)) == reply["prompt_token_ids"]


def test_the_server_tells_its_version_and_its_tokenizer(fake: Served) -> None:
    from onedraw import __version__

    assert fake.get("/version").json() == {"version": __version__}
    info = fake.get("/tokenizer_info").json()
    assert fake.llm.template is not None
    assert (info["chat_template"], info["vocab_size"]) == (fake.llm.template.source, fake.llm.card.vocab)
    assert info["eos_token_ids"] == list(fake.llm.card.eos_ids)


def test_everything_is_also_served_below_a_root_path(fake: Served) -> None:
    with serving(fake.llm, ServerOptions(root_path="/llm/one", api_key="sesame")) as served:
        key = {"authorization": "Bearer sesame"}
        body = {"messages": HELLO, "max_tokens": 2, "seed": 1}
        for prefix in ("", "/llm/one"):
            assert served.http.get(f"{prefix}/health").status_code == 200
            assert served.http.get(f"{prefix}/page/main.js").status_code == 200
            assert served.http.get(f"{prefix}/").headers["content-type"].startswith("text/html")
            assert served.http.get(f"{prefix}/v1/models").status_code == 401
            assert served.http.post(f"{prefix}/v1/messages", json=body, headers=key).json()["type"] == "message"
        assert served.http.get("/llm/other/health", headers=key).status_code == 404
        assert served.http.get("/openapi.json", headers=key).json()["servers"] == [{"url": "/llm/one"}]
    page = fake.get("/").text + fake.get("/page/api.js").text
    assert 'href="/' not in page
    assert 'src="/' not in page
    assert 'fetch("/' not in page


@pytest.mark.parametrize("root", ["llm", "/", "/llm/", "/a b"])
def test_a_root_path_that_is_none_is_refused(root: str) -> None:
    with pytest.raises(BadSetting, match="--root-path"):
        ServerOptions(root_path=root)
