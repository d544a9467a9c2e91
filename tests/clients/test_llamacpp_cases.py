"""What llama.cpp's tests of its server ask of a server, asked of this one on the paths of OpenAI's and Anthropic's APIs.

The cases are written anew after the behaviour that llama.cpp documents. Where this server differs on purpose, the case says so
and docs/api.md lists it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.clients.conftest import HELLO, WEATHER, Server

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
PROMPT = "def add(a, b):"
BOOK = [
    {"role": "system", "content": "Book"},
    {"role": "user", "content": "What is the best book"},
]
DIGITS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 2}
USER = {"role": "user"}


def ask(http: httpx.Client, path: str = COMPLETIONS, status: int = 200, **fields: Any) -> Any:
    answer = http.post(path, json={"max_tokens": 16, **fields})
    assert answer.status_code == status, answer.text
    return answer.json()


def text(http: httpx.Client, **fields: Any) -> str:
    (choice,) = ask(http, **{"prompt": PROMPT, **fields})["choices"]
    return str(choice["text"])


def events(http: httpx.Client, path: str, **fields: Any) -> list[Any]:
    with http.stream("POST", path, json={"max_tokens": 16, "stream": True, **fields}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


# ---------------------------------------------------------------------------------------------- start and security


@pytest.mark.parametrize("path", ["/health", "/"])
def test_public_paths_need_no_key(trained: Server, path: str) -> None:
    """llama.cpp lists its models without a key too; here only health and the page's files are public."""
    assert httpx.get(trained.url + path).status_code == 200


@pytest.mark.parametrize("key", [None, "", "wrong", "sesam", "sesames"])
@pytest.mark.parametrize("path", ["/v1/models", "/tokenizer_info", "/metrics", "/v1/completions"])
def test_a_wrong_key_is_refused(trained: Server, path: str, key: str | None) -> None:
    headers = {} if key is None else {"x-api-key": key}
    answer = httpx.request("POST" if "completions" in path else "GET", trained.url + path, headers=headers, json={"prompt": "a"})
    assert answer.status_code == 401
    error = answer.json()["error"]
    assert error["type"] == "authentication_error"
    assert "sesame" not in error["message"]


@pytest.mark.parametrize("headers", [{"authorization": "Bearer sesame"}, {"x-api-key": "sesame"}])
def test_both_headers_may_carry_the_key(trained: Server, headers: dict[str, str]) -> None:
    answer = httpx.post(trained.url + COMPLETIONS, headers=headers, json={"prompt": "a", "max_tokens": 2}, timeout=100)
    assert answer.status_code == 200


def test_the_openai_client_with_a_wrong_key(trained: Server) -> None:
    with (
        openai.OpenAI(base_url=trained.base, api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.completions.create(model="any", prompt="a")


def test_foreign_origins_are_not_allowed_by_default(http: httpx.Client) -> None:
    """llama.cpp answers every origin; here --cors-origin names those that may call."""
    asked = {"origin": "http://example.com", "access-control-request-method": "POST"}
    answer = http.options(CHAT, headers=asked)
    assert answer.status_code in (403, 405)
    assert answer.json()["error"]["message"]
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "path",
    [
        "/completion",
        "/props",
        "/slots",
        "/infill",
        "/embedding",
        "/v1/embeddings",
        "/v1/rerank",
        "/lora-adapters",
        "/slots/0?action=save",
    ],
)
def test_paths_of_llama_cpp_that_do_not_exist_here(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json={"prompt": "a"})
    assert answer.status_code == 404
    assert "/v1/completions" in answer.json()["error"]["message"]


# ---------------------------------------------------------------------------------------------- chat


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("model", [None, "llama-2", "codellama70b"])
def test_a_chat(http: httpx.Client, model: str | None, limit: str) -> None:
    body = {"messages": BOOK, "model": model, limit: 8, "seed": 42, "ignore_eos": True}
    answer = http.post(CHAT, json=body).json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["system_fingerprint"].startswith("onedraw-")
    (choice,) = answer["choices"]
    assert (choice["message"]["role"], choice["finish_reason"]) == ("assistant", "length")
    assert answer["usage"]["completion_tokens"] == 8


def test_the_first_and_the_last_chunk(http: httpx.Client) -> None:
    body = {"messages": BOOK, "seed": 42, "stream_options": {"include_usage": True}}
    first, *middle, end, usage = events(http, CHAT, **body)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in (*middle, end))
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in (first, *middle))
    assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"] in ("stop", "length")) == ({}, True)
    assert (usage["choices"], usage["usage"]["total_tokens"] > 0) == ([], True)


def test_cached_tokens_are_counted_in_whole_and_streamed_replies(http: httpx.Client) -> None:
    said = [{"role": "user", "content": "for line in open(path): yield line.strip()\n" * 5}]
    ask(http, CHAT, messages=said, seed=1)
    whole = ask(http, CHAT, messages=said, seed=1)["usage"]
    streamed = events(http, CHAT, messages=said, seed=1, stream_options={"include_usage": True})[-1]["usage"]
    assert streamed["prompt_tokens_details"]["cached_tokens"] == whole["prompt_tokens_details"]["cached_tokens"] > 0


def test_the_template_is_applied(http: httpx.Client) -> None:
    prompt = http.post("/apply-template", json={"messages": BOOK}).json()["prompt"]
    assert (
        prompt == "<|im_start|>system\nBook<|im_end|>\n<|im_start|>user\nWhat is the best book<|im_end|>\n<|im_start|>assistant\n"
    )
    spelled = ask(http, prompt=prompt, add_special_tokens=False, seed=4)["choices"][0]["text"]
    assert ask(http, CHAT, messages=BOOK, seed=4)["choices"][0]["message"]["content"] == spelled


def test_a_prefill_is_continued_where_it_is_asked_for(http: httpx.Client) -> None:
    """llama.cpp continues a last message of the assistant without being asked; here chat wants continue_final_message."""
    said = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "Whill"}]}]
    wanted = {"messages": said, "continue_final_message": True}
    assert http.post("/apply-template", json=wanted).json()["prompt"].endswith("<|im_start|>assistant\nWhill")
    assert (
        http.post("/apply-template", json={"messages": said})
        .json()["prompt"]
        .endswith("Whill<|im_end|>\n<|im_start|>assistant\n")
    )
    ask(http, CHAT, 400, messages=HELLO, continue_final_message=True)
    chat = ask(http, CHAT, seed=3, **wanted)["choices"][0]["message"]["content"]
    message = ask(http, MESSAGES, seed=3, messages=said)["content"][0]["text"]
    assert chat == message


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"type": "json_object", "schema": {"const": "42"}}, r'"42"'),
        ({"type": "json_object", "schema": DIGITS}, r"\[\s*\d,\s*\d\s*\]"),
        ({"type": "json_schema", "json_schema": {"schema": {"const": "foooooo"}}}, r'"foooooo"'),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [1, 2]}}}, "[12]"),
    ],
)  # fmt: skip
def test_response_formats(http: httpx.Client, form: Any, expected: str) -> None:
    content = ask(http, CHAT, messages=HELLO, response_format=form, max_tokens=64, seed=1)["choices"][0]["message"]["content"]
    assert re.fullmatch(expected, content)


@pytest.mark.parametrize(
    "form",
    [
        {"type": "sound"},
        {"type": 123},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": {"type": 123}}},
        {"type": "json_schema", "json_schema": {"schema": {"type": "hiccup"}}},
        {"type": "json_object", "schema": {"type": 123}},
    ],
)
def test_response_formats_that_cannot_be(http: httpx.Client, form: Any) -> None:
    error = ask(http, CHAT, 400, messages=HELLO, response_format=form)["error"]
    assert error["param"].startswith("response_format")


@pytest.mark.parametrize(("path", "prompt"), [(CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": PROMPT})])
def test_the_field_json_schema(http: httpx.Client, path: str, prompt: Any) -> None:
    choice = ask(http, path, **prompt, json_schema={"const": "42"}, seed=1)["choices"][0]
    assert (choice["message"]["content"] if path == CHAT else choice["text"]) == '"42"'
    ask(http, path, 400, **prompt, json_schema={"type": "hiccup"})
    assert ask(http, path, 400, **prompt, json_schema={}, guided_regex="a")["error"]["param"] in ("json_schema", "guided_regex")


@pytest.mark.parametrize(
    ("grammar", "expected"), [('root ::= "a"{5,5}', "aaaaa"), ('root ::= ("x" | "yz") [0-9]{2,5} "."', r"(x|yz)\d{2,5}\.")]
)
def test_grammars(http: httpx.Client, grammar: str, expected: str) -> None:
    content = ask(http, CHAT, messages=HELLO, grammar=grammar, max_tokens=64, temperature=0.3, seed=2)["choices"][0]["message"][
        "content"
    ]
    assert re.match(expected, content)


@pytest.mark.parametrize(
    "messages",
    [None, "text", 123, [], ["text"], [{}], [USER], [{"content": "a"}], [{"role": 1, "content": "a"}], [{**USER, "content": 1}]],
)
def test_messages_that_are_none(http: httpx.Client, messages: Any) -> None:
    error = ask(http, CHAT, 400, messages=messages)["error"]
    assert error["param"].startswith("messages")


def test_logprobs_spell_the_content(http: httpx.Client) -> None:
    body = {"messages": BOOK, "temperature": 0, "logprobs": True, "top_logprobs": 10}
    whole = ask(http, CHAT, **body)["choices"][0]
    streamed = [chunk["choices"][0] for chunk in events(http, CHAT, **body)]
    parts = [token for choice in streamed for token in (choice["logprobs"] or {}).get("content") or ()]
    assert parts == whole["logprobs"]["content"]
    assert "".join(choice["delta"].get("content") or "" for choice in streamed) == whole["message"]["content"]
    assert bytes(byte for token in parts for byte in token["bytes"]).decode() == whole["message"]["content"]
    assert all(token["logprob"] <= 0 and len(token["top_logprobs"]) == 10 for token in parts)


def test_banned_tokens_are_not_in_the_reply(http: httpx.Client) -> None:
    """llama.cpp also takes pairs and texts instead of ids; here the bias is an object of ids, as in OpenAI's API."""
    words = " a b c def return self in for ( ) :"
    ids = http.post("/tokenize", json={"prompt": words, "add_special_tokens": False}).json()["tokens"]
    body = {"prompt": PROMPT, "temperature": 0, "return_token_ids": True, "max_tokens": 32}
    assert set(ids) & set(ask(http, **body)["choices"][0]["token_ids"])
    banned = ask(http, **body, logit_bias={str(id): -100 for id in ids})["choices"][0]["token_ids"]
    assert not set(ids) & set(banned)
    ask(http, COMPLETIONS, 400, **body, logit_bias=[[5, -100]])


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_context(http: httpx.Client, stream: bool) -> None:
    """The context is never shifted: a prompt that is too long is refused before a stream begins."""
    error = ask(http, CHAT, 400, messages=[{"role": "user", "content": "Q " * 600}], stream=stream)["error"]
    assert error["code"] == "context_length_exceeded"
    assert "512" in error["message"]


def test_a_reply_ends_at_the_context(http: httpx.Client) -> None:
    for limit in (-1, 10**6):
        answer = ask(http, prompt="x = 1\n" * 60, max_tokens=limit, ignore_eos=True)
        assert answer["usage"]["total_tokens"] == 512
        assert answer["choices"][0]["finish_reason"] == "length"


def test_several_choices(http: httpx.Client) -> None:
    choices = ask(http, CHAT, messages=BOOK, n=2, seed=1, temperature=1)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert choices[0]["message"] != choices[1]["message"]


# ---------------------------------------------------------------------------------------------- completions


def test_a_stream_is_the_whole_reply(http: httpx.Client) -> None:
    whole = ask(http, prompt=PROMPT, seed=42, temperature=0.8)["choices"][0]
    chunks = [chunk["choices"][0] for chunk in events(http, COMPLETIONS, prompt=PROMPT, seed=42, temperature=0.8)]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert [chunk["finish_reason"] for chunk in chunks][-1] == whole["finish_reason"]


def test_the_openai_client(trained: Server, http: httpx.Client) -> None:
    with openai.OpenAI(base_url=trained.base, api_key=trained.key) as client:
        made = client.completions.create(model="davinci-002", prompt=PROMPT, max_tokens=8, seed=42)
        stream = client.completions.create(model="davinci-002", prompt=PROMPT, max_tokens=8, seed=42, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == made.choices[0].text == text(http, max_tokens=8, seed=42)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cached", [True, False])
def test_a_seed_gives_one_reply(http: httpx.Client, temperature: float, cached: bool) -> None:
    assert len({text(http, seed=42, temperature=temperature, cache_prompt=cached) for _ in range(4)}) == 1


def test_seeds_give_different_replies(http: httpx.Client) -> None:
    assert len({text(http, seed=seed, temperature=1.0) for seed in range(4)}) > 1
    assert len({text(http, seed=-1, temperature=1.0) for _ in range(4)}) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("requests", [2, 4, 9])
def test_a_batch_changes_no_reply(http: httpx.Client, requests: int, temperature: float) -> None:
    """llama.cpp promises this for greedy replies at most; here it is the contract."""
    body = {"seed": 42, "temperature": temperature, "max_tokens": 24}
    prompts = [PROMPT + "\n" * n for n in range(requests)]
    alone = [text(http, prompt=prompt, **body) for prompt in prompts]
    with ThreadPoolExecutor(requests) as pool:
        assert list(pool.map(lambda prompt: text(http, prompt=prompt, **body), prompts)) == alone


def test_a_cached_prompt_changes_no_reply(http: httpx.Client) -> None:
    beginning = "class Node:\n    def __init__(self, left, right):\n        self.left = left\n"
    first = text(http, prompt=beginning, seed=1)
    text(http, prompt=beginning + first, seed=2)
    answer = ask(http, prompt=beginning + first, seed=2)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert text(http, prompt=beginning, seed=1) == first


def test_prompts_of_ids_and_lists(http: httpx.Client) -> None:
    """llama.cpp also mixes ids and texts in one prompt; here a prompt is one or the other."""
    ids = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    single = text(http, temperature=0)
    assert text(http, prompt=ids, temperature=0) == single
    for prompts in ([PROMPT, PROMPT], [ids, ids]):
        assert [choice["text"] for choice in ask(http, prompt=prompts, temperature=0)["choices"]] == [single] * 2
    for prompt in ([1, 2, "a"], ["a", [1]]):
        ask(http, COMPLETIONS, 400, prompt=prompt)


def test_the_likeliest_tokens_of_a_greedy_reply(http: httpx.Client) -> None:
    (choice,) = ask(http, prompt=PROMPT, temperature=0, logprobs=10, max_tokens=8)["choices"]
    made = choice["logprobs"]
    for token, value, tops in zip(made["tokens"], made["token_logprobs"], made["top_logprobs"], strict=True):
        assert len(tops) == 10
        assert max(tops.values()) == value == tops[token]


def test_probabilities_after_sampling(http: httpx.Client) -> None:
    """What llama.cpp calls post_sampling_probs is logprobs_mode here: after top_k = 3 three tokens are left."""
    body = {"prompt": PROMPT, "temperature": 0.8, "top_k": 3, "logprobs": 10, "max_tokens": 8, "seed": 1}
    (choice,) = ask(http, **body, logprobs_mode="processed")["choices"]
    for tops in choice["logprobs"]["top_logprobs"]:
        left = [value for value in tops.values() if value > -9999]
        assert len(left) == 3
    assert ask(http, COMPLETIONS, 400, **body, post_sampling_probs=True)["error"]["param"] == "post_sampling_probs"


def test_a_cancelled_request_frees_its_lane(http: httpx.Client) -> None:
    with pytest.raises(httpx.ReadTimeout):
        http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 500, "ignore_eos": True, "n": 8}, timeout=0.1)
    for _ in range(600):
        if re.search(r"^num_requests_running(?:{[^}]*})? 0\.0$", http.get("/metrics").text, re.M):
            return
        time.sleep(0.05)
    pytest.fail("the request still runs")


def test_drafts_change_no_reply(http: httpx.Client) -> None:
    for body in ({"temperature": 0}, {"top_k": 1, "temperature": 1}, {"temperature": 0.9, "seed": 5}):
        drafted = ask(http, prompt="1 2 3 4 1 2 3 4 1 2", max_tokens=48, **body)
        plain = ask(http, prompt="1 2 3 4 1 2 3 4 1 2", max_tokens=48, speculation=False, **body)
        assert drafted["choices"][0]["text"] == plain["choices"][0]["text"]
    assert drafted["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0


# ---------------------------------------------------------------------------------------------- tokens


def test_tokens_and_back(http: httpx.Client) -> None:
    """llama.cpp names the text `content`; here it is `prompt`, as in vLLM."""
    for content in ("What is the capital of France?", "naïve 漢字 🙂", " leading and trailing "):
        made = http.post("/tokenize", json={"prompt": content, "add_special_tokens": False}).json()
        assert http.post("/detokenize", json={"tokens": made["tokens"]}).json()["prompt"] == content
    assert http.post("/tokenize", json={"content": "a"}).json()["error"]["param"] == "content"


# ---------------------------------------------------------------------------------------------- fields


@pytest.mark.parametrize(("path", "prompt"), [(CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": PROMPT})])
def test_the_fields_of_llama_cpp_are_known(http: httpx.Client, path: str, prompt: Any) -> None:
    """With the values that switch them off, since clients of llama.cpp send all of them; no value changes the reply."""
    plain = ask(http, path, **prompt, seed=3)
    off = {
        "id_slot": -1, "cache_prompt": True, "n_keep": 0, "n_discard": 0, "dynatemp_range": 0.0, "dynatemp_exponent": 1.0,
        "typical_p": 1.0, "typ_p": 1.0, "xtc_probability": 0.0, "xtc_threshold": 0.1, "top_n_sigma": -1.0, "min_keep": 0,
        "repeat_last_n": -1, "repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "dry_multiplier": 0.0,
        "dry_base": 1.75, "dry_allowed_length": 2, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1,
        "post_sampling_probs": False, "timings_per_token": False, "return_progress": False, "return_tokens": False,
        "t_max_predict_ms": 0, "response_fields": [], "lora": [], "reasoning_format": "auto", "parse_tool_calls": True,
        "speculative.n_max": 16, "speculative.n_min": 0, "speculative.p_min": 0.75, "logit_bias": {}, "ignore_eos": False,
    }  # fmt: skip
    assert ask(http, path, **prompt, seed=3, **off)["choices"] == plain["choices"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_predict", 5),
        ("n_probs", 5),
        ("samplers", ["top_k", "temperature"]),
        ("dry_penalty_last_n", 64),
        ("repeat_last_n", 64),
        ("xtc_probability", 0.5),
        ("dynatemp_range", 0.5),
        ("top_n_sigma", 1.0),
        ("typ_p", 0.5),
        ("mirostat", 2),
        ("min_keep", 3),
        ("t_max_predict_ms", 50),
        ("timings_per_token", True),
        ("lora", [{"id": 0, "scale": 1.0}]),
        ("reasoning_format", "none"),
    ],
)
def test_what_this_server_refuses_by_name(http: httpx.Client, field: str, value: Any) -> None:
    error = ask(http, COMPLETIONS, 400, prompt="a", **{field: value})["error"]
    assert (error["param"], error["code"]) == (field, "invalid_parameter")


# ---------------------------------------------------------------------------------------------- Anthropic and Responses


@pytest.fixture
def claude(trained: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=trained.url, api_key=trained.key, max_retries=0) as client:
        yield client


def message(claude: anthropic.Anthropic, **fields: Any) -> Any:
    body = {"model": "claude-any", "max_tokens": 16, "messages": HELLO, "extra_body": {"seed": 6}, **fields}
    return claude.messages.create(**body)


@pytest.mark.parametrize("system", [None, "Be brief.", [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]])
def test_a_message(claude: anthropic.Anthropic, system: Any) -> None:
    made = message(claude, **({} if system is None else {"system": system}))
    assert (made.type, made.role, made.content[0].type) == ("message", "assistant", "text")
    assert made.stop_reason in ("end_turn", "max_tokens")
    assert made.usage.output_tokens <= 16
    assert made.id.startswith("msg_")


def test_the_events_of_a_message(http: httpx.Client, claude: anthropic.Anthropic) -> None:
    made = events(http, MESSAGES, messages=HELLO, seed=6)
    kinds = [event["type"] for event in made]
    inner = [kind for kind in kinds if kind not in ("content_block_delta", "ping")]
    assert inner == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    whole = message(claude)
    texts = [event["delta"]["text"] for event in made if event["type"] == "content_block_delta"]
    assert "".join(texts) == whole.content[0].text
    assert made[0]["message"]["usage"]["output_tokens"] >= 0
    (end,) = (event for event in made if event["type"] == "message_delta")
    assert (end["delta"]["stop_reason"], end["usage"]["output_tokens"]) == (whole.stop_reason, whole.usage.output_tokens)


def test_a_message_ends_at_a_stop_sequence(claude: anthropic.Anthropic) -> None:
    whole = message(claude, max_tokens=40).content[0].text
    stop = whole[10:13]
    cut = message(claude, max_tokens=40, stop_sequences=[stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in cut.content) == whole[: whole.index(stop)]


def test_a_message_calls_a_tool_and_gets_its_result(claude: anthropic.Anthropic) -> None:
    tools = [{"name": "get_weather", "description": "The weather.", "input_schema": WEATHER}]
    made = message(claude, tools=tools, tool_choice={"type": "tool", "name": "get_weather"}, max_tokens=200)
    (call,) = made.content
    assert (made.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "get_weather")
    assert 1 <= call.input["days"] <= 9
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    said = [*HELLO, {"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}]
    assert message(claude, messages=said, tools=tools, tool_choice={"type": "none"}).content[0].text


def test_messages_are_counted(claude: anthropic.Anthropic) -> None:
    short = claude.messages.count_tokens(model="any", messages=HELLO).input_tokens
    long = claude.messages.count_tokens(model="any", messages=HELLO, system="You are a helpful assistant.").input_tokens
    made = message(claude).usage
    assert short == made.input_tokens + (made.cache_read_input_tokens or 0)
    assert long > short


@pytest.mark.parametrize(
    "body", [{"messages": None}, {"messages": []}, {"messages": "a"}, {"temperature": -1.0}, {"max_tokens": "many"}]
)
def test_messages_that_are_refused(http: httpx.Client, body: Any) -> None:
    answer = http.post(MESSAGES, json={"max_tokens": 4, "messages": HELLO, **body})
    assert answer.status_code == 400
    assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", "invalid_request_error")


def test_a_response(trained: Server) -> None:
    with openai.OpenAI(base_url=trained.base, api_key=trained.key) as client:
        body: dict[str, Any] = {"model": "any", "instructions": "Book", "input": "What is the best book", "max_output_tokens": 8}
        made = client.responses.create(**body, extra_body={"seed": 6})
        assert made.id.startswith("resp_")
        assert made.output[0].id.startswith("msg_")  # type: ignore[union-attr]
        seen = list(client.responses.create(**body, stream=True, extra_body={"seed": 6}))
    assert seen[0].type == "response.created"
    assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == made.output_text
    assert seen[-1].type in ("response.completed", "response.incomplete")
    assert seen[-1].response.output_text == made.output_text  # type: ignore[union-attr]
