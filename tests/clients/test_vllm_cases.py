"""What vLLM's tests of its OpenAI server ask of a server, asked of this one through the openai package and plain HTTP.

The cases are written anew after the behaviour that vLLM documents. Where this server differs on purpose, the case says so and
docs/api.md lists it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.clients.conftest import HELLO, WEATHER, Server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = 2**63 - 1
PROMPT = "def add(a, b):"
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": WEATHER}}
FORM = {"name": "weather", "schema": WEATHER}


@pytest.fixture
def client(trained: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=trained.base, api_key=trained.key, max_retries=0) as made:
        yield made


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "any", "messages": HELLO, "max_tokens": 10, "seed": 5, **fields})


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    return client.completions.create(**{"model": "any", "prompt": PROMPT, "max_tokens": 10, "seed": 5, **fields})


def refused(client: openai.OpenAI, call: Any, **fields: Any) -> openai.BadRequestError:
    """The error of a request that is refused, after which the server still answers."""
    with pytest.raises(openai.BadRequestError) as wrong:
        list(call(client, **fields))
    assert call(client).choices
    return wrong.value


# ---------------------------------------------------------------------------------------------- the server itself


def test_the_server_says_what_it_is(http: httpx.Client, trained: Server) -> None:
    assert http.get("/health").status_code == 200
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", http.get("/version").json()["version"])
    (card,) = http.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (trained.model, "model", 512)


def test_a_client_that_hangs_up_frees_its_place(http: httpx.Client) -> None:
    def count(name: str) -> float:
        found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", http.get("/metrics").text, re.M)
        assert found is not None
        return float(found[1])

    body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "stream": True}
    with http.stream("POST", COMPLETIONS, json=body) as answer:
        next(answer.iter_lines())
    for _ in range(600):
        if count("num_requests_running") + count("num_requests_waiting") == 0:
            break
    else:
        pytest.fail("the request still runs")
    assert http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 2}).status_code == 200


def test_the_counters_count_tokens(http: httpx.Client) -> None:
    """Of prompts they count the tokens that were computed, so a cached prompt adds none."""

    def counted() -> dict[str, float]:
        lines = re.findall(r"^(prompt_tokens|generation_tokens)_total(?:{[^}]*})? (\S+)$", http.get("/metrics").text, re.M)
        return {name: float(value) for name, value in lines}

    before = counted()
    usage = http.post(
        COMPLETIONS, json={"prompt": "a prompt that no other test has", "max_tokens": 7, "ignore_eos": True}
    ).json()["usage"]
    after = counted()
    assert after["generation_tokens"] - before["generation_tokens"] == usage["completion_tokens"] == 7
    assert after["prompt_tokens"] - before["prompt_tokens"] == usage["prompt_tokens"]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"text"', b"\xff\xfe{}"])
def test_a_body_that_is_no_json_object_is_refused(http: httpx.Client, body: bytes) -> None:
    answer = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


# ---------------------------------------------------------------------------------------------- chat


def test_a_session_of_two_turns(client: openai.OpenAI) -> None:
    first = chat(client, max_tokens=None, max_completion_tokens=10, extra_body={"ignore_eos": True})
    (choice,) = first.choices
    assert (choice.finish_reason, choice.message.role) == ("length", "assistant")
    assert first.usage.completion_tokens == 10
    assert first.usage.total_tokens == first.usage.prompt_tokens + 10
    said = [*HELLO, {"role": "assistant", "content": choice.message.content}, {"role": "user", "content": "Go on."}]
    second = chat(client, messages=said)
    assert second.choices[0].message.content
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


@pytest.mark.parametrize("top", [None, 0, 5, 20])
def test_logprobs_of_a_chat(client: openai.OpenAI, top: int | None) -> None:
    fields = {} if top is None else {"top_logprobs": top}
    (choice,) = chat(client, logprobs=True, **fields).choices
    tokens = choice.logprobs.content
    assert "".join(token.token for token in tokens) == choice.message.content
    assert all(bytes(token.bytes).decode() == token.token for token in tokens)
    assert {len(token.top_logprobs) for token in tokens} == {top or 0}
    assert all(token.logprob <= 0 for token in tokens)
    for token in tokens:
        assert [one.logprob for one in token.top_logprobs] == sorted((one.logprob for one in token.top_logprobs), reverse=True)
    assert chat(client).choices[0].logprobs is None
    assert chat(client).choices[0].message.content == choice.message.content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields", [{"logprobs": True, "top_logprobs": 129}, {"top_logprobs": 2}, {"logprobs": True, "top_logprobs": -1}]
)
def test_logprobs_that_cannot_be(client: openai.OpenAI, fields: dict[str, Any], stream: bool) -> None:
    assert refused(client, chat, stream=stream, **fields).param == "top_logprobs"


def test_a_streamed_chat_is_the_whole_one(client: openai.OpenAI) -> None:
    whole = chat(client, temperature=0)
    chunks = list(chat(client, temperature=0, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [whole.choices[0].finish_reason]
    assert not deltas[-1].content
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


@pytest.mark.parametrize("call", [chat, complete])
def test_usage_in_a_stream(client: openai.OpenAI, call: Any) -> None:
    whole = call(client).usage
    for options in (None, {"include_usage": False}):
        fields = {} if options is None else {"stream_options": options}
        assert all(chunk.usage is None for chunk in call(client, stream=True, **fields))
    *chunks, last = call(client, stream=True, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (whole.prompt_tokens, whole.completion_tokens)
    chunks = list(call(client, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert all(chunk.usage.total_tokens == chunk.usage.prompt_tokens + chunk.usage.completion_tokens for chunk in chunks)
    assert refused(client, call, stream_options={"include_usage": True}).param == "stream_options"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice.function.name"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "get_weather"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ],
)
def test_tool_choices_that_do_not_fit_the_tools(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    assert refused(client, chat, **fields).param == param


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_follows_the_schema(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    made = chat(
        client,
        tools=[TOOL],
        tool_choice=choice,
        max_tokens=200,
        stream=stream,
        **({"parallel_tool_calls": False} if choice == "required" else {}),
    )
    if stream:
        deltas = [call for chunk in made for call in chunk.choices[0].delta.tool_calls or ()]
        assert [delta.function.name for delta in deltas if delta.function.name] == ["get_weather"]
        assert len([delta for delta in deltas if delta.id]) == 1
        arguments = "".join(delta.function.arguments or "" for delta in deltas)
    else:
        (call,) = made.choices[0].message.tool_calls
        arguments = call.function.arguments
        assert made.choices[0].finish_reason == "tool_calls"
    assert 1 <= json.loads(arguments)["days"] <= 9


def test_no_tool_is_called_if_none_is_wanted(client: openai.OpenAI) -> None:
    message = chat(client, tools=[TOOL], tool_choice="none").choices[0].message
    assert message.tool_calls is None
    assert message.content


@pytest.mark.parametrize(
    ("fields", "check"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": FORM}},
            lambda text: json.loads(text)["days"] in range(1, 10),
        ),
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
        ({"extra_body": {"structured_outputs": {"json": WEATHER}}}, lambda text: json.loads(text)["days"] in range(1, 10)),
        ({"extra_body": {"structured_outputs": {"choice": ["Python", "Rust"]}}}, lambda text: text in ("Python", "Rust")),
        ({"extra_body": {"structured_outputs": {"regex": r"\d{3}-[a-c]+x"}}}, lambda text: re.fullmatch(r"\d{3}-[a-c]+x", text)),
        ({"extra_body": {"guided_choice": ["Python", "Rust"]}}, lambda text: text in ("Python", "Rust")),
        (
            {"extra_body": {"structured_outputs": {"grammar": 'root ::= "SELECT " ("a" | "b")'}}},
            lambda text: text[:-1] == "SELECT ",
        ),
    ],
)
def test_structured_output(client: openai.OpenAI, fields: dict[str, Any], check: Any) -> None:
    reply = chat(client, max_tokens=300, temperature=1, **fields).choices[0]
    if reply.finish_reason == "length":  # a free object of a model this small may not end
        assert "json_object" in json.dumps(fields)
        return
    assert check(reply.message.content)


@pytest.mark.parametrize(
    "outputs",
    [{"regex": {"a": 1}}, {"regex": "a", "choice": ["a"]}, {"grammar": "not a grammar ::"}, {"json": "{"}, {"choice": []}],
)
def test_structured_output_that_cannot_be(client: openai.OpenAI, outputs: dict[str, Any]) -> None:
    assert str(refused(client, chat, extra_body={"structured_outputs": outputs}).param).startswith("structured_outputs")


def test_logprobs_beside_a_constraint_are_numbers(client: openai.OpenAI) -> None:
    made = chat(client, logprobs=True, top_logprobs=5, extra_body={"guided_choice": ["Python", "Rust"]})
    tops = [one.logprob for token in made.choices[0].logprobs.content for one in token.top_logprobs]
    assert tops
    assert all(-9999 <= value <= 0 for value in tops)


def test_content_in_parts(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there."}]
    one = [{"role": "user", "content": "Hello\nthere."}]
    assert chat(client, messages=[{"role": "user", "content": parts}]).choices == chat(client, messages=one).choices


def test_the_last_message_is_continued(http: httpx.Client) -> None:
    """vLLM wants add_generation_prompt to be false beside it; here either is accepted."""
    said = [*HELLO, {"role": "assistant", "content": "def f("}]
    body = {"messages": said, "max_tokens": 8, "seed": 1, "continue_final_message": True}
    answers = [http.post(CHAT, json={**body, "add_generation_prompt": add}).json() for add in (False, True)]
    prompt = http.post("/apply-template", json={"messages": said, "continue_final_message": True}).json()["prompt"]
    assert prompt.endswith("def f(")
    as_text = http.post(COMPLETIONS, json={"prompt": prompt, "add_special_tokens": False, "max_tokens": 8, "seed": 1}).json()
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["choices"][0]["message"]["content"] == as_text["choices"][0]["text"]


@pytest.mark.parametrize("seed", [LONG, -LONG - 1, -1, 0])
def test_seeds_of_64_bits(client: openai.OpenAI, seed: int) -> None:
    (choice,) = chat(client, seed=seed).choices
    assert chat(client, seed=choice.seed).choices == [choice]


@pytest.mark.parametrize("seed", [LONG + 1, -LONG - 2])
@pytest.mark.parametrize("call", [chat, complete])
def test_longer_seeds_are_refused(client: openai.OpenAI, call: Any, seed: int) -> None:
    assert refused(client, call, seed=seed).param == "seed"


def test_another_role_is_refused(client: openai.OpenAI) -> None:
    """vLLM passes every role to the template."""
    assert refused(client, chat, messages=[{"role": "narrator", "content": "Rain."}]).param == "messages[0].role"


def test_an_unknown_field_is_refused(client: openai.OpenAI) -> None:
    """vLLM ignores it; here --lenient does."""
    assert refused(client, chat, extra_body={"extra_field": "0"}).code == "unknown_field"


def test_a_prompt_over_the_context_is_refused(client: openai.OpenAI) -> None:
    assert refused(client, chat, messages=[{"role": "user", "content": "x y z " * 600}]).code == "context_length_exceeded"
    assert refused(client, complete, prompt=[5] * 513).code == "context_length_exceeded"


# ---------------------------------------------------------------------------------------------- completions


def test_a_completion(client: openai.OpenAI) -> None:
    made = complete(client, extra_body={"ignore_eos": True})
    (choice,) = made.choices
    assert choice.finish_reason == "length"
    assert len(choice.text) >= 5
    assert (made.usage.completion_tokens, made.usage.total_tokens) == (10, made.usage.prompt_tokens + 10)
    ids = complete(client, prompt=[5, 6, 7], max_tokens=5, extra_body={"ignore_eos": True})
    assert (ids.usage.prompt_tokens, ids.usage.completion_tokens) == (3, 5)


def test_without_a_length_a_completion_has_sixteen_tokens(http: httpx.Client) -> None:
    made = http.post(COMPLETIONS, json={"prompt": PROMPT, "ignore_eos": True}).json()
    assert made["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("top", [0, 1, 5])
def test_logprobs_of_a_completion(client: openai.OpenAI, top: int) -> None:
    (choice,) = complete(client, logprobs=top).choices
    made = choice.logprobs
    assert "".join(made.tokens) == choice.text
    assert len(made.tokens) == len(made.token_logprobs) == len(made.text_offset) == len(made.top_logprobs)
    assert made.text_offset == [len("".join(made.tokens[:n])) for n in range(len(made.tokens))]
    for token, value, tops in zip(made.tokens, made.token_logprobs, made.top_logprobs, strict=True):
        assert tops[token] == value
        assert max(top, 1) <= len(tops) <= top + 1
    assert complete(client).choices[0].logprobs is None


def test_too_many_logprobs_are_refused(client: openai.OpenAI) -> None:
    assert refused(client, complete, logprobs=129).param == "logprobs"


def test_an_echo_has_the_logprobs_of_the_prompt(client: openai.OpenAI) -> None:
    count = complete(client).usage.prompt_tokens
    (choice,) = complete(client, echo=True, logprobs=1).choices
    assert choice.text.startswith(PROMPT)
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
    assert len(choice.logprobs.tokens) > count
    (alone,) = complete(client, echo=True, logprobs=1, max_tokens=0).choices
    assert alone.text == PROMPT
    assert alone.logprobs.token_logprobs == choice.logprobs.token_logprobs[:count]


def test_three_streams_at_once(client: openai.OpenAI) -> None:
    whole = {choice.index: choice.text for choice in complete(client, n=3).choices}
    texts = dict.fromkeys(range(3), "")
    ends: list[int] = []
    for chunk in complete(client, n=3, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        ends += [choice.index] if choice.finish_reason else []
    assert texts == whole
    assert sorted(ends) == [0, 1, 2]
    assert len(set(texts.values())) > 1


@pytest.mark.parametrize("prompts", [[PROMPT] * 2, [[5, 6], [7, 8]]])
def test_a_list_of_prompts(client: openai.OpenAI, prompts: Any) -> None:
    made = complete(client, prompt=prompts, temperature=0)
    assert [choice.index for choice in made.choices] == [0, 1]
    assert made.choices[0].text == complete(client, prompt=prompts[0], temperature=0).choices[0].text
    several = complete(client, prompt=prompts, n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    texts = dict.fromkeys(range(4), "")
    for chunk in complete(client, prompt=prompts, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [texts[n] for n in range(4)] == [choice.text for choice in several.choices]


def test_a_bias_forces_and_forbids_tokens(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    plain = http.post(COMPLETIONS, json=body).json()["choices"][0]["token_ids"]
    forced = http.post(COMPLETIONS, json={**body, "logit_bias": {"77": 100}}).json()["choices"][0]["token_ids"]
    assert forced == [77] * 5
    without = http.post(COMPLETIONS, json={**body, "logit_bias": {str(plain[0]): -100}}).json()["choices"][0]["token_ids"]
    assert plain[0] not in without


@pytest.mark.parametrize("prompt", ["", [], [[]], [99999], [-1], None, 7, ["a", [5]], [5, "a"], [[5], "a"]])
def test_prompts_that_are_none(http: httpx.Client, prompt: Any) -> None:
    answer = http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 2})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


def test_stops(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 40, "seed": 3, "return_token_ids": True, "ignore_eos": True}
    whole = http.post(COMPLETIONS, json=body).json()["choices"][0]
    text, ids = whole["text"], whole["token_ids"]
    middle = text[len(text) // 2 - 2 : len(text) // 2 + 2]  # crosses tokens
    found = http.post(COMPLETIONS, json={**body, "stop": ["never seen", middle]}).json()["choices"][0]
    assert (found["text"], found["finish_reason"], found["stop_reason"]) == (text[: text.index(middle)], "stop", middle)
    found = http.post(COMPLETIONS, json={**body, "stop_token_ids": [ids[9]]}).json()["choices"][0]
    assert (found["stop_reason"], found["token_ids"]) == (ids[9], ids[: ids.index(ids[9]) + 1])
    late = http.post(COMPLETIONS, json={**body, "stop_token_ids": [ids[0]], "min_tokens": 5}).json()
    assert late["usage"]["completion_tokens"] > 5


def test_the_end_is_ignored_on_request(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 1, "seed": 2, "logit_bias": {"2": 30}}
    assert http.post(COMPLETIONS, json=body).json()["usage"]["completion_tokens"] < 60
    assert http.post(COMPLETIONS, json={**body, "ignore_eos": True}).json()["usage"]["completion_tokens"] == 60


def test_ids_of_prompt_and_reply(http: httpx.Client) -> None:
    body = {"messages": HELLO, "max_tokens": 6, "seed": 1, "return_token_ids": True}
    (choice,) = http.post(CHAT, json=body).json()["choices"]
    rendered = http.post("/tokenize", json={"messages": HELLO}).json()
    assert choice["prompt_token_ids"] == rendered["tokens"]
    with http.stream("POST", CHAT, json={**body, "stream": True}) as answer:
        chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    ids = [id for chunk in chunks for id in chunk["choices"][0].get("token_ids") or ()]
    prompts = [chunk["choices"][0].get("prompt_token_ids") for chunk in chunks]
    assert ids == choice["token_ids"]
    assert [prompt for prompt in prompts if prompt] == [rendered["tokens"]]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("include_stop_str_in_output", True),
        ("truncate_prompt_tokens", 5),
        ("allowed_token_ids", [5]),
        ("return_tokens_as_token_ids", True),
        ("use_beam_search", True),
        ("cache_salt", "x"),
        ("priority", 1),
    ],
)
def test_what_this_server_refuses_by_name(http: httpx.Client, field: str, value: Any) -> None:
    answer = http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1, field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert answer.json()["error"]["code"] == "invalid_parameter"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_fields_of_vllm_are_known(http: httpx.Client, path: str) -> None:
    """With the values that vLLM documents as defaults, so that a client may send all of them."""
    defaults = {
        "use_beam_search": False, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "length_penalty": 1.0,
        "stop_token_ids": [], "include_stop_str_in_output": False, "ignore_eos": False, "min_tokens": 0,
        "skip_special_tokens": True, "spaces_between_special_tokens": True, "truncate_prompt_tokens": None,
        "prompt_logprobs": None, "allowed_token_ids": None, "bad_words": [], "echo": False, "priority": 0,
        "request_id": "1f", "return_tokens_as_token_ids": False, "return_token_ids": False, "cache_salt": None,
        "logits_processors": None, "structured_outputs": None, "response_format": None, "logit_bias": None, "user": "me",
    }  # fmt: skip
    if path == CHAT:
        defaults |= {"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False}
        defaults |= {"documents": None, "chat_template": None, "chat_template_kwargs": {}, "include_reasoning": True}
    body = {"max_tokens": 2, "messages": HELLO} if path == CHAT else {"max_tokens": 2, "prompt": "a"}
    answer = http.post(path, json={**body, **defaults})
    assert answer.status_code == 200, answer.text


# ---------------------------------------------------------------------------------------------- tokens, cache, batches


@pytest.mark.parametrize("text", ["Hello, world.", "def f(x):\n    return x  # naïve 漢字 🙂"])
def test_tokens_and_back(http: httpx.Client, text: str) -> None:
    made = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert made["count"] == len(made["tokens"])
    assert made["max_model_len"] == 512
    assert http.post("/detokenize", json={"tokens": made["tokens"]}).json()["prompt"] == text


def test_tokens_of_a_chat(http: httpx.Client) -> None:
    plain = http.post("/tokenize", json={"messages": HELLO, "add_generation_prompt": False}).json()["tokens"]
    ready = http.post("/tokenize", json={"messages": HELLO, "add_generation_prompt": True}).json()["tokens"]
    assert ready[: len(plain)] == plain
    assert len(ready) > len(plain)
    usage = http.post(CHAT, json={"messages": HELLO, "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens"] == len(ready)
    info = http.get("/tokenizer_info").json()
    assert "messages" in info["chat_template"]


def test_a_second_request_reuses_the_prompt(http: httpx.Client) -> None:
    body = {"prompt": "for i in range(10): print(i)\n" * 8, "max_tokens": 4, "temperature": 0}
    first, second = (http.post(COMPLETIONS, json=body).json() for _ in range(2))
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_seeds_in_a_batch_with_drafts_give_what_they_give_alone(http: httpx.Client) -> None:
    def ask(seed: int, **fields: Any) -> Any:
        body = {"messages": HELLO, "max_tokens": 40, "temperature": 0.9, "seed": seed, "return_token_ids": True}
        return http.post(CHAT, json={**body, **fields}).json()["choices"][0]["token_ids"]

    alone = [ask(seed, speculation=False) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, range(8)))
    assert together == alone
    assert len({tuple(ids) for ids in alone}) > 1
