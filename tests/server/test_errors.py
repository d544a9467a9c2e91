"""Invalid requests over HTTP get an error in the shape of OpenAI that names the field."""

from __future__ import annotations

import json
import logging
import threading

import httpx
import pytest

from onedraw.server.config import ServerOptions
from tests.server.running import backend_of, fake_llm, serving, slowed, wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello."}]


def refused(answer: httpx.Response, status: int, *, param: str | None = None, code: str | None = None) -> str:
    """Check status, type, field and code of an error, and return its message."""
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["code"] == code or code is None
    assert "Traceback" not in error["message"]
    return error["message"]


NUMBERS = [
    "temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "dry_multiplier", "dry_base",
]  # fmt: skip
INTEGERS = ["top_k", "seed", "max_tokens", "min_tokens", "n", "dry_allowed_length", "dry_range"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("name", NUMBERS + INTEGERS)
@pytest.mark.parametrize("value", ['"1"', "true", "[1]", "{}", "NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400])
def test_a_value_of_the_wrong_type_is_refused_by_name(fake, path, name, value):
    asked = f'{{"messages": {json.dumps(HELLO)}, "{name}": {value}}}' if path == CHAT else f'{{"prompt": "a", "{name}": {value}}}'
    refused(fake.send(path, asked), 400, param=name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", 100.5), ("top_p", 0), ("top_p", 1.01), ("top_p", -1), ("min_p", -0.1),
        ("min_p", 1.1), ("top_k", -2), ("repetition_penalty", 0), ("repetition_penalty", -1), ("frequency_penalty", 101),
        ("presence_penalty", -101), ("dry_multiplier", -1), ("seed", 2**63), ("seed", -(2**63) - 1), ("n", 0), ("n", 129),
        ("max_tokens", -2), ("max_tokens", -5),
        ("min_tokens", -1), ("min_tokens", 17), ("logprobs", -1), ("logprobs", 129), ("stop_token_ids", [259]),
        ("stop_token_ids", [-1]), ("logit_bias", {"259": 1}), ("logit_bias", {"5": 101}),
        ("logit_bias", {"five": 1}), ("logit_bias", {"-1": 1}),
        ("logit_bias", {"5": "1"}), ("logit_bias", [5]), ("logit_bias", {"5": None}),
        ("stop", [""]), ("stop", ""), ("stop", [1]), ("stop", 1),
        ("logprobs_mode", "cooked"), ("bad_words", [1]), ("stream", "yes"), ("ignore_eos", 1), ("stop_token_ids", ["a"]),
        ("temperature", {"real": 1}), ("model", 7),
    ],
    ids=str,
)  # fmt: skip
def test_a_value_out_of_range_is_refused_by_name(fake, name, value):
    answer = fake.post(COMPLETIONS, **{"prompt": "a", name: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].split("[")[0] == name


def test_dry_values_are_checked_if_dry_is_enabled(fake):
    refused(fake.post(COMPLETIONS, prompt="a", dry_multiplier=1, dry_base=0.5), 400, param="dry_base")
    refused(fake.post(COMPLETIONS, prompt="a", dry_multiplier=1, dry_allowed_length=0), 400, param="dry_allowed_length")


@pytest.mark.parametrize("body", [b"", b"{", b'{"prompt": "a",}', b"\xff\xfe\x00", b"[" * 100], ids=repr)
def test_a_body_that_is_not_json_is_refused(fake, body):
    refused(fake.send(COMPLETIONS, body), 400, code="invalid_json")


@pytest.mark.parametrize("depth", [300, 600, 900, 990, 1100])
def test_deep_nesting_is_never_a_server_error(fake, depth):
    for field in (b"metadata", b"logit_bias", b"prompt"):
        body = b'{"max_tokens": 1, "prompt": "\\u00e9", "' + field + b'": ' + b"[" * depth + b"]" * depth + b"}"
        assert fake.send(COMPLETIONS, body).status_code in (200, 400)


@pytest.mark.parametrize("body", ["[]", '"text"', "1", "null"])
def test_a_body_that_is_not_an_object_is_refused(fake, body):
    refused(fake.send(CHAT, body), 400, code="invalid_json")


def test_a_lone_surrogate_is_refused_by_name(fake):
    refused(fake.send(COMPLETIONS, b'{"prompt": "\\ud83d"}'), 400, param="prompt")
    refused(fake.send(COMPLETIONS, b'{"prompt": "a", "stop": ["\\udc00"]}'), 400, param="stop")
    assert fake.send(COMPLETIONS, b'{"prompt": "\\ud83d\\ude00", "max_tokens": 1}').status_code == 200


@pytest.mark.parametrize("name", ["temprature", "frobnicate", "logprob", "", "Temperature", "größe"])
def test_an_unknown_field_is_refused_by_name(fake, name):
    refused(fake.post(CHAT, messages=HELLO, **{name: 1}), 400, param=name, code="unknown_field")


def test_more_choices_than_the_limit_are_refused(fake):
    assert "33 prompts" in refused(fake.post(COMPLETIONS, prompt=["a"] * 33, n=128, max_tokens=1), 400, param="prompt")


def test_a_misspelled_field_gets_a_suggestion(fake):
    assert "did you mean temperature?" in refused(fake.post(COMPLETIONS, prompt="a", temprature=1), 400, param="temprature")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tool_choice", "required"), ("guided_whitespace_pattern", " "),
        ("modalities", ["text", "audio"]), ("audio", {"voice": "x"}),
        ("service_tier", "priority"), ("store", True), ("echo", True), ("web_search_options", {}),
        ("functions", [{"name": "f"}]), ("use_beam_search", True),
        ("truncate_prompt_tokens", 5), ("logits_processors", ["x"]), ("include_stop_str_in_output", True), ("mirostat", 2),
    ],
    ids=str,
)  # fmt: skip
def test_an_unsupported_chat_field_is_refused_by_name(fake, name, value):
    refused(fake.post(CHAT, messages=HELLO, **{name: value}), 400, param=name, code="invalid_parameter")


@pytest.mark.parametrize(("name", "value"), [("best_of", 2), ("suffix", "end"), ("best_of", True)], ids=str)
def test_an_unsupported_completion_field_is_refused_by_name(fake, name, value):
    refused(fake.post(COMPLETIONS, prompt="a", **{name: value}), 400, param=name)


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], ["a", ""], [[5], []]], ids=repr)
def test_an_empty_prompt_is_refused(fake, prompt):
    refused(fake.post(COMPLETIONS, prompt=prompt, add_special_tokens=False), 400, param="prompt")


@pytest.mark.parametrize("prompt", [5, {"a": 1}, [1, "a"], [[1], "a"], [1.5], [True], [[[1]]]], ids=repr)
def test_a_prompt_of_the_wrong_type_is_refused(fake, prompt):
    refused(fake.post(COMPLETIONS, prompt=prompt), 400, param="prompt")


def test_a_missing_prompt_is_refused_by_name(fake):
    refused(fake.post(COMPLETIONS, max_tokens=1), 400, param="prompt", code="missing_field")
    refused(fake.post(COMPLETIONS, prompt=None), 400, param="prompt", code="missing_field")
    refused(fake.post(CHAT), 400, param="messages", code="missing_field")
    refused(fake.post(CHAT, messages=[]), 400, param="messages")


@pytest.mark.parametrize("token", [-1, 259, 10**30])
def test_token_ids_outside_the_vocabulary_are_refused(fake, token):
    assert str(token) in refused(fake.post(COMPLETIONS, prompt=[1, token]), 400, param="prompt")
    assert str(token) in refused(fake.post("/detokenize", tokens=[1, token]), 400, param="tokens")


def test_the_error_about_a_prompt_over_the_context_names_both_lengths(fake):
    message = refused(fake.post(COMPLETIONS, prompt=[5] * 2050), 400, param="prompt", code="context_length_exceeded")
    assert "2050" in message
    assert "2048" in message
    message = refused(fake.post(CHAT, messages=[{"role": "user", "content": "x" * 3000}]), 400, param="messages")
    assert "2048" in message


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"role": "function", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": "x", "mood": "good"}, "messages[0].mood"),
        ({"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls[0].function"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "input_audio"}]}, "messages[0].content[1]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": ["text"], "text": "x"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "mood": 1}]}, "messages[0].content[0].mood"),
        ("hello", "messages[0]"),
    ],
    ids=repr,
)  # fmt: skip
def test_an_invalid_message_is_refused_by_its_index(fake, message, param):
    refused(fake.post(CHAT, messages=[message]), 400, param=param)


def test_an_image_is_refused_by_the_path_of_its_part(fake):
    parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]
    assert "image_url" in refused(
        fake.post(CHAT, messages=[{"role": "user", "content": parts}]), 400, param="messages[0].content[0]"
    )


def test_a_field_without_the_field_it_needs_is_refused(fake):
    refused(fake.post(CHAT, messages=HELLO, stream_options={"include_usage": True}), 400, param="stream_options")
    refused(fake.post(CHAT, messages=HELLO, top_logprobs=2), 400, param="top_logprobs")
    refused(fake.post(CHAT, messages=HELLO, max_tokens=1, max_completion_tokens=2), 400, param="max_completion_tokens")
    refused(fake.post(CHAT, messages=HELLO, stream=True, stream_options={"x": 1}), 400, param="stream_options.x")
    refused(fake.post(CHAT, messages=HELLO, chat_template_kwargs={"messages": []}), 400, param="chat_template_kwargs")
    refused(fake.post(CHAT, messages=HELLO, chat_template_kwargs={"use": 1}), 400, param="chat_template_kwargs")
    refused(fake.post("/tokenize"), 400, param="prompt")
    refused(fake.post("/tokenize", prompt="a", messages=HELLO), 400, param="prompt")


def test_a_model_that_is_not_served_is_not_found_if_names_are_strict(fake):
    bodies = (
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1}),
        (CHAT, {"messages": HELLO, "max_tokens": 1}),
        ("/tokenize", {"prompt": "a"}),
    )
    with serving(fake.llm, ServerOptions(strict_model_names=True, aliases=("mine",))) as strict:
        for path, body in bodies:
            refused(strict.post(path, model="gpt-9", **body), 404, param="model", code="model_not_found")
            assert strict.post(path, model="mine", **body).status_code == 200
    for path, body in bodies:
        assert fake.post(path, model="gpt-9", **body).status_code == 200
    refused(fake.get("/v1/models/some/gpt-9"), 404, param="model", code="model_not_found")


def test_unknown_paths_and_methods_get_404_and_405(fake):
    assert "/v1/chat/completions" in refused(fake.get("/v2/models"), 404, code="not_found")
    for path, meant in (("/chat/completions", CHAT), ("/v1/v1/messages", "/v1/messages"), ("/v1/api/chat", "/api/chat")):
        answer = fake.post(path, messages=HELLO)
        assert (answer.status_code, f"did you mean {meant}?" in answer.text) == (404, True)
    refused(fake.get(COMPLETIONS), 405, code="method_not_allowed")
    refused(fake.get("/docs"), 404)
    assert fake.get(COMPLETIONS).headers["allow"] == "POST"


def test_sampling_parameters_that_leave_no_token_are_a_named_error(fake):
    asked = {"prompt": "a", "min_tokens": 1, "stop_token_ids": list(range(259))}
    refused(fake.post(COMPLETIONS, **asked), 400, code="no_token_left")
    refused(fake.post(COMPLETIONS, stream=True, **asked), 400, code="no_token_left")


def test_a_full_queue_returns_retry_after():
    free = threading.Event()  # the first request is still running until then
    with slowed(fake_llm(max_batch=1, queue_limit=1), 0.05, free) as llm, serving(llm) as served:
        long = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True}
        others = [threading.Thread(target=lambda: served.post(COMPLETIONS, **long)) for _ in range(2)]
        for number, other in enumerate(others):
            other.start()
            wait_until(lambda number=number: llm.service.stats().running + llm.service.stats().waiting == number + 1)
        for stream in (False, True):
            answer = served.post(COMPLETIONS, stream=stream, **long)
            refused(answer, 429, code="queue_full")
            assert int(answer.headers["retry-after"]) >= 1
        free.set()
        for other in others:
            other.join()
        assert served.post(COMPLETIONS, prompt="a", max_tokens=1).status_code == 200


def test_more_prompts_than_the_queue_holds_are_refused_as_a_whole():
    with slowed(fake_llm(max_batch=1, queue_limit=2), 0.002) as llm, serving(llm) as served:
        refused(served.post(COMPLETIONS, prompt=["a"] * 20, max_tokens=50), 400, param="prompt", code="too_many_replies")
        wait_until(lambda: (llm.service.stats().running, llm.service.stats().waiting) == (0, 0))


def test_a_failed_step_gives_500_and_the_next_request_succeeds():
    with fake_llm() as llm, serving(llm) as served:
        backend = backend_of(llm)
        submit, backend.submit = backend.submit, lambda plan: 1 / 0
        message = refused(served.post(COMPLETIONS, prompt="a"), 500, code="internal_error")
        assert "division" not in message
        backend.submit = submit
        assert served.post(COMPLETIONS, prompt="a").status_code == 200


def test_an_unexpected_error_returns_an_id_that_is_logged(caplog):
    with fake_llm() as llm, serving(llm) as served:
        encode, llm.encode = llm.encode, lambda *_, **__: {}["a secret place"]
        with caplog.at_level(logging.ERROR, logger="onedraw.server"):
            message = refused(served.post(COMPLETIONS, prompt="a"), 500, code="internal_error")
        identity = next(word for word in message.replace(";", " ").split() if word.startswith("err-"))
        assert "a secret place" not in message
        assert any(identity in record.getMessage() and record.exc_info for record in caplog.records)
        llm.encode = encode
        assert served.post(COMPLETIONS, prompt="a").status_code == 200


def test_a_closed_llm_gives_503():
    with fake_llm() as llm, serving(llm) as served:
        llm.close()
        refused(served.post(COMPLETIONS, prompt="a"), 503, code="shutting_down")
        refused(served.get("/health"), 503, code="shutting_down")


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_the_limit_is_refused_with_or_without_content_length(declared):
    with fake_llm() as llm, serving(llm, ServerOptions(max_body=1000)) as served:
        body = json.dumps({"prompt": "x" * 2000, "max_tokens": 1}).encode()
        content = body if declared else iter([body[:900], body[900:]])
        assert "1000" in refused(served.send(COMPLETIONS, content), 413, code="body_too_large")
        fits = json.dumps({"prompt": "x" * 900, "max_tokens": 1}).encode()
        assert served.send(COMPLETIONS, fits if declared else iter([fits])).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "a", "\xed\xa0\x80": 1}',
        b'{"prompt": "a", "stop": "\xed\xa0\x80"}',
        '{"prompt": "a"}'.encode("utf-16"),
    ],
    ids=ascii,
)
def test_a_body_that_is_not_utf_8_is_refused(fake, body):
    """The invalid bytes are in a value, or in a field name that the error would quote."""
    refused(fake.send(COMPLETIONS, body), 400, code="invalid_json")


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
def test_an_infinite_number_inside_a_field_is_refused(fake, path, number):
    """Schemas are returned in responses, and JSON cannot express such a number."""
    function = f'{{"type": "function", "name": "w", "parameters": {{"type": "object", "default": {number}}}}}'
    said = '"input": "hi"' if path == "/v1/responses" else '"messages": [{"role": "user", "content": "hi"}]'
    answer = fake.send(path, f'{{{said}, "tools": [{function}]}}')
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools"), answer.text


def test_the_number_of_stop_strings_is_limited(fake):
    refused(fake.post(CHAT, messages=HELLO, stop=["x" * 40_000, "y" * 40_000]), 400, param="stop")


def test_the_arguments_of_a_past_call_may_be_any_text(fake):
    """They may be nested deeper than a JSON parser allows, or cut off."""
    for arguments, status in (
        ("[" * 100_000, 400),
        ('{"city": "Par', 200),
        ("", 200),
    ):  # the first one is longer than the context
        call = {"id": "1", "type": "function", "function": {"name": "w", "arguments": arguments}}
        messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "x"}]
        assert fake.post(CHAT, messages=messages, max_tokens=2).status_code == status
