"""Constrained replies over HTTP, at any temperature."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from typing import Any

import jsonschema
import openai
import pytest

from tests.fixtures.hostile_formats import CORPUS
from tests.support.helper_process import checking, helper_pid

HELLO = [{"role": "user", "content": "Hello."}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "toys": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["kind", "age", "toys"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}


def _schema_format(options: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": options["guided_json"]}}


def said(served: Any, **options: Any) -> dict[str, Any]:
    answer = served.post(CHAT, messages=HELLO, **{"max_tokens": 400, "temperature": 1.3, **options})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def refusal(served: Any, path: str = CHAT, **options: Any) -> dict[str, Any]:
    base = {"messages": HELLO} if path == CHAT else {"prompt": "a"}
    answer = served.post(path, **base, **{"max_tokens": 5, **options})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize("seed", range(4))
def test_a_reply_is_valid_against_its_schema_and_ends(fake: Any, seed: int) -> None:
    choice = said(fake, response_format=FORMAT, seed=seed)
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_all_spellings_of_a_response_format_give_the_same_reply(fake: Any) -> None:
    spellings: list[dict[str, Any]] = [
        {"response_format": FORMAT},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
    ]
    assert len({said(fake, seed=7, **spelling)["message"]["content"] for spelling in spellings}) == 1


def test_json_object_gives_an_object(fake: Any) -> None:
    choice = said(fake, response_format={"type": "json_object"}, seed=1, logit_bias={"92": 8, "1": 6})
    assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize(
    ("option", "pattern"),
    [
        ({"guided_regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'root ::= "<" [a-z]{1,5} ">"'}, "<[a-z]{1,5}>"),
        ({"guided_grammar": 'start: "<" /[a-z]{1,5}/ ">"'}, "<[a-z]{1,5}>"),
        ({"structured_outputs": {"choice": ["maybe"]}}, "maybe"),
        ({"structured_outputs": {"regex": "x{4}"}}, "x{4}"),
    ],
)
def test_a_reply_follows_a_regex_a_choice_or_a_grammar(fake: Any, option: dict[str, Any], pattern: str) -> None:
    choice = said(fake, seed=3, **option)
    assert re.fullmatch(pattern, choice["message"]["content"])
    assert choice["finish_reason"] == "stop"
    plain = fake.post(COMPLETIONS, prompt="a", max_tokens=100, seed=3, **option).json()["choices"][0]
    assert re.fullmatch(pattern, plain["text"])


def test_reasoning_comes_first_and_is_unconstrained(fake: Any) -> None:
    options = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_budget": 8, "guided_choice": ["yes", "no"]}
    choice = said(fake, seed=2, **options)
    assert choice["message"]["content"] in ("yes", "no")
    assert choice["message"]["reasoning_content"]


def test_batches_and_drafts_do_not_change_a_constrained_reply(fake: Any) -> None:
    options = {"n": 4, "seed": 11, "response_format": FORMAT, "return_token_ids": True, "return_checksums": True}
    body = {"messages": HELLO, "max_tokens": 400, "temperature": 1.3, **options}
    plain = fake.post(CHAT, **body, speculation=False).json()["choices"]
    assert len({choice["message"]["content"] for choice in plain}) > 1
    guess = {"type": "content", "content": plain[0]["message"]["content"]}
    assert fake.post(CHAT, **body, prediction=guess).json()["choices"] == plain
    alone = said(fake, **options | {"n": 1, "seed": plain[2]["seed"]})
    assert alone["token_ids"] == plain[2]["token_ids"]


def test_a_stream_has_the_same_constrained_reply(fake: Any) -> None:
    whole = said(fake, seed=5, response_format=FORMAT)["message"]["content"]
    body = {"messages": HELLO, "max_tokens": 400, "temperature": 1.3, "seed": 5, "response_format": FORMAT}
    deltas = [chunk["choices"][0]["delta"].get("content") or "" for chunk in fake.chunks(CHAT, **body)]
    assert "".join(deltas) == whole


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_unsupported_keyword_is_named_with_its_path(fake: Any, path: str) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    error = refusal(fake, path, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": bad}})
    assert error["param"] == "response_format.json_schema.schema.properties.a.uniqueItems"
    assert "uniqueItems" in error["message"]
    assert refusal(fake, path, guided_json=bad)["param"] == "guided_json.properties.a.uniqueItems"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"guided_regex": "(?=a)"}, "guided_regex"),
        ({"grammar": "start: /a/"}, "grammar"),
        ({"grammar": "root ::= <[7]>"}, "grammar"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a"], "guided_regex": "b"}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "grammar": 'root ::= "a"'}, "grammar"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": 100_000 * "["}, "guided_json"),
        ({"guided_regex": "(a{1000}){1000}"}, "guided_regex"),
        (CORPUS["doubling_rules"](60), "guided_grammar"),
        ({"structured_outputs": {"grammar": CORPUS["doubling_rules"](60)["guided_grammar"]}}, "structured_outputs.grammar"),
        ({"response_format": _schema_format(CORPUS["many_properties"](2_000))}, "response_format.json_schema.schema"),
        ({"response_format": _schema_format(CORPUS["items_chain"](1_100))}, "response_format.json_schema.schema"),
        ({"response_format": _schema_format(CORPUS["any_of_chain"](2_000))}, "response_format.json_schema.schema"),
        ({"response_format": _schema_format(CORPUS["reference_chain"](20_000))}, "response_format.json_schema.schema"),
        (CORPUS["rule_chain"](3_000), "guided_grammar"),
        ({"grammar": CORPUS["gbnf_chain"](3_000)["guided_grammar"]}, "grammar"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ],
)
def test_invalid_response_formats_are_refused_by_name(fake: Any, options: dict[str, Any], param: str) -> None:
    assert refusal(fake, **options)["param"] == param


def test_the_format_text_does_not_constrain_the_reply(fake: Any) -> None:
    plain = said(fake, seed=1, max_tokens=8)["message"]
    assert said(fake, seed=1, max_tokens=8, response_format={"type": "text"})["message"] == plain


def test_the_openai_client_parses_a_reply_into_a_pydantic_model(fake: Any) -> None:
    from pydantic import BaseModel

    class Pet(BaseModel):
        age: int
        good: bool

    client: openai.OpenAI
    with fake.client() as client:
        reply = client.chat.completions.parse(
            model=fake.model, messages=HELLO, response_format=Pet, temperature=1.2, seed=4, max_tokens=300
        )
    assert isinstance(reply.choices[0].message.parsed, Pet)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["items_chain", "any_of_chain", "all_of_chain", "reference_chain"])
def test_a_schema_that_is_too_deep_is_refused_by_name_on_every_endpoint(fake: Any, name: str, strict: bool) -> None:
    schema = {"type": "object", **CORPUS[name](1_100)["guided_json"]}
    chat = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}
    flat = {"type": "function", "name": "f", "parameters": schema, "strict": strict}
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    requests = [
        (CHAT, {"messages": HELLO, "tools": [chat]}, "tools[0].function.parameters"),
        ("/v1/responses", {"input": "Hello.", "tools": [flat]}, "tools[0].parameters"),
        ("/v1/responses", {"input": "Hello.", "text": text}, "text.format.schema"),
        (
            "/v1/messages",
            {"messages": HELLO, "max_tokens": 5, "tools": [{"name": "f", "input_schema": schema}]},
            "tools[0].input_schema",
        ),
        (
            "/v1/messages/count_tokens",
            {"messages": HELLO, "tools": [{"name": "f", "input_schema": schema}]},
            "tools[0].input_schema",
        ),
    ]
    for path, body, param in requests:
        answer = fake.post(path, **body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert "levels deep" in error["message"]
        assert error["param"] == param
    assert fake.post(CHAT, messages=HELLO, max_tokens=2).status_code == 200


def test_a_neighbour_is_answered_while_a_costly_format_is_compiled(fake: Any) -> None:
    """The helper process that compiles it is stopped meanwhile, so the answer cannot have waited for it."""
    said(fake, guided_choice=["yes"])
    compiler = fake.llm.constraints.grammars
    pid = helper_pid(compiler)
    os.kill(pid, signal.SIGSTOP)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(fake.post(CHAT, messages=HELLO, max_tokens=9, guided_regex="[xyz]")))
    thread.start()
    try:
        while not checking(compiler):
            threading.Event().wait(0.001)
        chunks = list(fake.chunks(CHAT, messages=HELLO, max_tokens=30, seed=1))
        assert chunks
        assert said(fake, guided_choice=["yes"])["message"]["content"] == "yes"
        assert not answers
    finally:
        os.kill(pid, signal.SIGCONT)
        thread.join()
    assert answers[0].status_code == 200
