"""Ollama's API: the tokens of the same request in OpenAI's shape, streamed and whole, and errors that name Ollama's fields."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from onedraw.build.llm import build_llm
from onedraw.server.auth import ApiKey
from onedraw.server.config import ServerOptions
from onedraw.server.ollama.requests import OllamaChat
from onedraw.server.parsing import parse
from onedraw.settings import Settings
from tests.server.running import Served, backend_of, fake_llm, serving
from tests.support.scripted import write_scripted

HELLO: list[Any] = [{"role": "user", "content": "Hello."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
SAMPLING = {"seed": 7, "temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01}


def whole(served: Served, path: str = "/api/chat", **body: Any) -> dict[str, Any]:
    answer = served.post(path, stream=False, **body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def lines(served: Served, path: str = "/api/chat", **body: Any) -> list[dict[str, Any]]:
    """The objects of a stream, which is the default."""
    answer = served.post(path, **body)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-ndjson"), answer.text
    found = [json.loads(line) for line in answer.text.splitlines()]
    assert [one["done"] for one in found] == [False] * (len(found) - 1) + [True]
    return found


def chat(served: Served, **body: Any) -> dict[str, Any]:
    answer = served.post("/v1/chat/completions", **body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_the_same_seed_gives_the_text_of_a_chat_completion(served: Served) -> None:
    asked = {**SAMPLING, "repeat_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1}
    theirs = whole(served, messages=HELLO, options={**asked, "num_predict": 24, "stop": ["never said"], "num_ctx": 512})
    ours = chat(served, messages=HELLO, max_tokens=24, **asked)
    assert theirs["message"]["content"] == ours["choices"][0]["message"]["content"]
    assert (theirs["prompt_eval_count"], theirs["eval_count"]) == (ours["usage"]["prompt_tokens"], 24)
    assert (theirs["done_reason"], theirs["seed"]) == ("length", 7)
    assert theirs["system_fingerprint"] == ours["system_fingerprint"]
    streamed = lines(served, messages=HELLO, options={**asked, "num_predict": 24})
    assert "".join(line["message"]["content"] for line in streamed) == theirs["message"]["content"]
    assert streamed[-1]["message"]["content"] == ""
    assert streamed[-1]["eval_count"] == 24


def test_the_reported_seed_replays_a_reply_of_a_request_without_one(fake: Served) -> None:
    first = whole(fake, messages=HELLO, options={"num_predict": 12, "seed": -1})
    again = whole(fake, messages=HELLO, options={"num_predict": 12, "seed": first["seed"]})
    assert again["message"] == first["message"]


def test_durations_are_those_of_this_request(fake: Served) -> None:
    last = lines(fake, messages=HELLO, options={"num_predict": 4})[-1]
    parts = last["prompt_eval_duration"] + last["eval_duration"]
    assert 0 < parts <= last["total_duration"] + 2
    assert last["load_duration"] == 0


def test_generate_answers_through_the_chat_template_and_raw_without_it(fake: Served) -> None:
    asked = {"prompt": "Hello.", "system": "Be brief.", "options": {**SAMPLING, "num_predict": 12}}
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}]
    one = whole(fake, "/api/generate", **asked)
    assert one["response"] == chat(fake, messages=said, max_tokens=12, **SAMPLING)["choices"][0]["message"]["content"]
    assert "".join(line["response"] for line in lines(fake, "/api/generate", **asked)) == one["response"]
    raw = whole(fake, "/api/generate", prompt="Hello.", raw=True, options={**SAMPLING, "num_predict": 20})
    plain = fake.post("/v1/completions", prompt="Hello.", max_tokens=20, **SAMPLING).json()
    assert raw["response"] == plain["choices"][0]["text"]
    assert raw["prompt_eval_count"] == plain["usage"]["prompt_tokens"]


def test_without_num_predict_a_raw_reply_is_as_long_as_the_context_allows() -> None:
    """A completion in OpenAI's shape would end after 16 tokens."""
    with fake_llm(max_context=64) as llm, serving(llm) as small:
        for limit in ({}, {"num_predict": -1}, {"num_predict": -2}):
            last = whole(small, "/api/generate", prompt="Hello.", raw=True, options={"seed": 1, **limit})
            assert last["prompt_eval_count"] + last["eval_count"] == 64, limit


def test_json_and_schemas_constrain_the_reply(fake: Served) -> None:
    made = whole(fake, messages=HELLO, format=SCHEMA, options={"seed": 2})["message"]["content"]
    jsonschema.validate(json.loads(made), SCHEMA)
    wanted = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    assert made == chat(fake, messages=HELLO, response_format=wanted, seed=2)["choices"][0]["message"]["content"]
    told = whole(fake, "/api/generate", prompt="Hello.", format="json", options={"seed": 3, "num_predict": 400})
    assert told["done_reason"] == "length" or isinstance(json.loads(told["response"]), dict)
    assert told["response"].startswith("{")


def test_thinking_is_a_field_of_its_own(fake: Served) -> None:
    options = {"seed": 5, "num_predict": 40}
    thought = whole(fake, messages=HELLO, think=True, options=options)["message"]
    ours = chat(fake, messages=HELLO, enable_thinking=True, seed=5, max_tokens=40)["choices"][0]["message"]
    assert (thought["thinking"], thought["content"]) == (ours["reasoning_content"], ours["content"])
    streamed = lines(fake, messages=HELLO, think=True, options=options)
    assert "".join(line["message"].get("thinking", "") for line in streamed) == thought["thinking"]
    assert "thinking" not in whole(fake, messages=HELLO, think=False, options=options)["message"]
    assert whole(fake, "/api/generate", prompt="Hello.", think="low", options=options)["thinking"]


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A tiny real model that calls the tool `weather` once and then answers."""
    folder = tmp_path_factory.mktemp("ollama") / "scripted"
    write_scripted(folder, name="weather", arguments='{"city": "Oslo", "days": 3}', answer="It will rain.")
    with build_llm(Settings(model=str(folder), max_context=2048)) as llm, serving(llm) as served:
        yield served


def test_a_tool_call_comes_whole_and_its_result_is_sent_back(caller: Served) -> None:
    free = {"type": "function", "function": {**WEATHER["function"], "strict": False}}
    asked: dict[str, Any] = {"tools": [free], "options": {"temperature": 0}}
    first = whole(caller, messages=HELLO, **asked)
    (call,) = first["message"]["tool_calls"]
    assert call["function"] == {"index": 0, "name": "weather", "arguments": {"city": "Oslo", "days": 3}}
    assert (first["done_reason"], first["message"]["content"]) == ("stop", "")
    streamed = [
        line["message"]["tool_calls"] for line in lines(caller, messages=HELLO, **asked) if "tool_calls" in line["message"]
    ]
    assert [one["function"] for (one,) in streamed] == [call["function"]]
    result = {"role": "tool", "tool_name": "weather", "content": "rain"}
    said = [*HELLO, first["message"], result]
    assert whole(caller, messages=said, **asked)["message"]["content"] == "It will rain."
    # Many clients send calls back without their ids.
    del call["id"]
    assert whole(caller, messages=said, **asked)["message"]["content"] == "It will rain."


def test_a_call_that_num_predict_cuts_is_left_out(caller: Served) -> None:
    asked: dict[str, Any] = {"messages": HELLO, "tools": [WEATHER], "options": {"temperature": 0, "num_predict": 2}}
    for last in (whole(caller, **asked), lines(caller, **asked)[-1]):
        assert (last["done_reason"], last["message"]) == ("length", {"role": "assistant", "content": ""})


def test_results_belong_to_the_call_with_their_id_or_name_or_else_to_the_first_open_one(fake: Served) -> None:
    calls = [{"id": id, "function": {"name": name, "arguments": {}}} for id, name in (("a", "f"), ("b", "g"), ("c", "f"))]
    results = [{"tool_call_id": "c"}, {"tool_name": "g"}, {}, {}]
    said = [*HELLO, {"role": "assistant", "tool_calls": calls}, *({"role": "tool", "content": "1", **one} for one in results)]
    made = parse(OllamaChat, {"messages": said}).request.chat(context=100)["messages"]
    assert [one["tool_call_id"] for one in made[2:]] == ["c", "b", "a", "call_5"]


def test_logprobs_have_openais_shape_and_numbers(fake: Served) -> None:
    asked = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
    theirs = whole(fake, **asked, options={"seed": 4, "num_predict": 6})
    ours = chat(fake, **asked, seed=4, max_tokens=6)["choices"][0]["logprobs"]["content"]
    assert theirs["logprobs"] == ours
    streamed = lines(fake, **asked, options={"seed": 4, "num_predict": 6})
    assert [entry for line in streamed for entry in line.get("logprobs", [])] == ours
    raw = whole(fake, "/api/generate", prompt="a", raw=True, logprobs=True, options={"seed": 4, "num_predict": 3})
    assert len(raw["logprobs"]) == 3


def test_a_last_message_of_the_assistant_is_continued(fake: Served) -> None:
    said = [*HELLO, {"role": "assistant", "content": "Once upon"}]
    ours = chat(fake, messages=said, continue_final_message=True, seed=5, max_tokens=8)["choices"][0]["message"]["content"]
    assert whole(fake, messages=said, options={"seed": 5, "num_predict": 8})["message"]["content"] == ours


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/api/chat", {"messages": HELLO, "options": {"temperature": -1}}, "options.temperature", "must be in"),
        ("/api/chat", {"messages": HELLO, "options": {"top_k": 1.5}}, "options.top_k", "integer"),
        ("/api/chat", {"messages": HELLO, "options": {"repeat_penalty": -1.0}}, "options.repeat_penalty", "must be"),
        ("/api/chat", {"messages": HELLO, "options": {"num_predict": -3}}, "options.num_predict", "must be"),
        ("/api/chat", {"messages": HELLO, "options": {"num_ctx": 10**6}}, "options.num_ctx", "--max-context"),
        ("/api/chat", {"messages": HELLO, "options": {"repeat_last_n": 64}}, "options.repeat_last_n", "whole prompt"),
        ("/api/chat", {"messages": HELLO, "options": {"mirostat": 2}}, "options.mirostat", "replay"),
        ("/api/chat", {"messages": HELLO, "options": {"temprature": 1}}, "options.temprature", "temperature"),
        ("/api/chat", {"messages": HELLO, "format": "yaml"}, "format", ""),
        ("/api/chat", {"messages": HELLO, "format": {"type": "nothing"}}, "format.type", ""),
        ("/api/chat", {"messages": [{**HELLO[0], "images": ["aGk="]}]}, "messages[0].images", "reads text"),
        ("/api/chat", {"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role", ""),
        ("/api/chat", {"messages": HELLO, "top_logprobs": 3}, "top_logprobs", "logprobs"),
        ("/api/generate", {"prompt": "a", "images": ["aGk="]}, "images", "reads text"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, "suffix", "middle"),
        ("/api/generate", {"prompt": "a", "template": "{{ .Prompt }}"}, "template", "raw"),
        ("/api/generate", {"prompt": "a", "context": [1, 2]}, "context", "messages"),
        ("/api/generate", {"prompt": "a", "system": "b", "raw": True}, "system", "raw"),
        ("/api/generate", {"prompt": "a" * 50_000}, "prompt", "context"),
        ("/api/generate", {"prompt": "a", "raw": True, "options": {"min_p": 2.0}}, "options.min_p", "must be"),
    ],
)
def test_errors_name_the_caller_s_field(fake: Served, path: str, body: dict[str, Any], param: str, says: str) -> None:
    answer = fake.post(path, **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert error["param"] == param, error
    assert says in error["error"]


def test_what_cannot_change_the_answer_is_accepted(fake: Served) -> None:
    asked = {"seed": 1, "num_predict": 4}
    loading = {"num_thread": 8, "num_gpu": 1, "num_batch": 2, "use_mmap": True, "num_keep": 5, "mirostat": 0, "repeat_last_n": -1}
    plain = whole(fake, messages=HELLO, options=asked)
    for more in ({"keep_alive": "5m"}, {"keep_alive": -1}, {"truncate": True, "shift": True}, {"options": {**asked, **loading}}):
        assert whole(fake, messages=HELLO, **{"options": asked, **more})["message"] == plain["message"], more


def test_a_request_without_a_prompt_generates_nothing(fake: Served) -> None:
    for path, body in (("/api/chat", {"messages": []}), ("/api/generate", {}), ("/api/generate", {"keep_alive": 0})):
        answer = fake.post(path, model=fake.model, **body).json()
        assert (answer["done"], answer["done_reason"]) == (True, "load")
        refused = fake.post(path, **body, options={"temperature": -1})
        assert (refused.status_code, refused.json()["param"]) == (400, "options.temperature")


def test_the_served_model_is_listed_and_shown(served: Served) -> None:
    for path in ("/api/tags", "/api/ps"):
        (entry,) = served.get(path).json()["models"]
        assert entry["name"] == entry["model"] == served.model
        assert len(entry["digest"]) == 64
    assert entry["context_length"] == served.llm.card.max_context
    shown = served.post("/api/show", model=served.model).json()
    assert shown["capabilities"][:2] == ["completion", "tools"]
    assert ("thinking" in shown["capabilities"]) is (served.llm.reasoning is not None)
    assert shown["model_info"][f"{shown['model_info']['general.architecture']}.context_length"] == served.llm.card.max_context
    assert shown["template"] == served.llm.template.source
    version = served.get("/api/version").json()
    assert tuple(map(int, version["version"].split("."))) > (0, 6, 4)
    assert version["onedraw"] == served.get("/version").json()["version"]


def test_strict_names_accept_ollamas_tag_and_other_names_are_not_found() -> None:
    with fake_llm() as llm, serving(llm, ServerOptions(strict_model_names=True, aliases=("mine",))) as served:
        for name in ("fake", "fake:latest", "mine:latest"):
            assert whole(served, model=name, messages=HELLO, options={"num_predict": 1})["done"]
        for path, body in (("/api/chat", {"messages": HELLO}), ("/api/show", {})):
            answer = served.post(path, model="other:latest", **body)
            assert (answer.status_code, answer.json()["code"]) == (404, "model_not_found")
        assert served.post("/api/show", name="other").status_code == 404


def test_a_key_is_required_and_its_absence_told_in_ollamas_shape() -> None:
    with fake_llm() as llm, serving(llm, ServerOptions(api_keys=(ApiKey("me", "sesame"),))) as served:
        answer = served.get("/api/tags")
        assert (answer.status_code, "API key" in answer.json()["error"]) == (401, True)
        assert served.get("/api/tags", headers={"authorization": "Bearer sesame"}).status_code == 200
        assert served.get("/v1/models").json()["error"]["code"] == "invalid_api_key"


def test_an_error_in_the_middle_of_a_stream_is_its_last_line() -> None:
    with fake_llm() as llm, serving(llm, ServerOptions(request_seconds=0.3)) as served:
        backend = backend_of(llm)
        submit, steps = backend.submit, []

        def slow_submit(plan: Any) -> Any:
            steps.append(plan)
            time.sleep(0.05)
            return submit(plan)

        backend.submit = slow_submit
        answer = served.post("/api/chat", messages=HELLO, options={"num_predict": 500, "seed": 1})
        *_, last = [json.loads(line) for line in answer.text.splitlines()]
    assert "--request-seconds" in last["error"]
