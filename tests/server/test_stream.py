"""A whole reply equals the joined chunks of its stream, for all options."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from onedraw.errors import OnedrawError
from onedraw.server.streaming import NAMED, ChunkStream
from tests.server.running import backend_of, fake_llm, serving, slowed, wait_until

HELLO = [{"role": "user", "content": "Say hello."}]
EVERYTHING = {"return_token_ids": True, "return_checksums": True, "ignore_eos": True}


def fold(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Join chunks: texts and lists are concatenated, of other values the last one counts."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            add(choices.setdefault(choice["index"], {"index": choice["index"]}), choice)
    return choices


def add(whole: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        if name == "delta":
            name = "message"
        if isinstance(value, dict) and isinstance(whole.get(name), dict):
            add(whole[name], value)
        elif name in ("text", "content", "reasoning_content") and isinstance(value, str):
            whole[name] = whole.get(name, "") + value
        elif isinstance(value, list) and isinstance(whole.get(name), list):
            whole[name] = whole[name] + value
        elif value is not None or name not in whole:
            whole[name] = json.loads(json.dumps(value))


CHATS = [
    {},
    {"n": 3},
    {"logprobs": True, "top_logprobs": 2},
    {"n": 2, "logprobs": True, **EVERYTHING},
    {"stop": ["e", "a"], "return_token_ids": True},
    {"skip_special_tokens": False},
]
COMPLETIONS = [
    {},
    {"n": 2, "prompt": ["One", "Two"]},
    {"echo": True},
    {"echo": True, "logprobs": 2, **EVERYTHING},
    {"echo": True, "logprobs": 0, "max_tokens": 0, "n": 2},
    {"prompt_logprobs": 2, "n": 2},
    {"logprobs": 1, "stop": " ", **EVERYTHING},
]


@pytest.mark.parametrize("asked", CHATS, ids=str)
def test_a_whole_chat_completion_equals_its_joined_stream(served, asked):
    asked = {"messages": HELLO, "max_tokens": 9, "seed": 21, "temperature": 1.0, **asked}
    whole = served.post("/v1/chat/completions", **asked).json()
    folded = fold(served.chunks("/v1/chat/completions", **asked))
    for choice in whole["choices"]:
        assert choice["message"].pop("refusal") is None
        assert folded[choice["index"]] == choice
    assert len(folded) == len(whole["choices"])


@pytest.mark.parametrize("asked", COMPLETIONS, ids=str)
def test_a_whole_completion_equals_its_joined_stream(served, asked):
    asked = {"prompt": "Once upon a time", "max_tokens": 9, "seed": 21, "temperature": 1.0, **asked}
    whole = served.post("/v1/completions", **asked).json()
    folded = fold(served.chunks("/v1/completions", **asked))
    assert [folded[i] for i in range(len(folded))] == whole["choices"]


def test_every_chunk_of_every_choice_has_all_fields(served):
    chunks = served.chunks("/v1/chat/completions", messages=HELLO, max_tokens=4, n=2, stream_options={"include_usage": True})
    *spoken, last = chunks
    for chunk in spoken:
        assert set(chunk) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
        (choice,) = chunk["choices"]
        assert set(choice) == {"index", "delta", "logprobs", "finish_reason", "stop_reason", "seed"}
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] >= 2
    assert [c["choices"][0]["delta"] for c in spoken if "role" in c["choices"][0]["delta"]] == [
        {"role": "assistant", "content": ""}
    ] * 2


def test_usage_is_streamed_only_on_request(served):
    assert all("usage" not in chunk for chunk in served.chunks("/v1/completions", prompt="One", max_tokens=2))


def test_the_prompt_token_ids_are_sent_once_per_choice(served):
    chunks = served.chunks("/v1/chat/completions", messages=HELLO, max_tokens=3, n=2, return_token_ids=True)
    assert sum("prompt_token_ids" in chunk["choices"][0] for chunk in chunks) == 2


def test_a_stream_is_sent_as_server_sent_events(served):
    answer = served.post("/v1/completions", prompt="One", max_tokens=2, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-request-id"].startswith("cmpl-")


LONG = {"prompt": "One", "max_tokens": 2000, "ignore_eos": True}
TURN = 0.02  # seconds per step: such a reply is still running whenever a test checks it


def test_a_failure_after_the_start_sends_an_error_event_and_no_done():
    with slowed(fake_llm(), TURN) as llm, serving(llm) as served:
        backend = backend_of(llm)
        with served.stream("/v1/completions", **LONG) as answer:
            lines = answer.iter_lines()
            assert json.loads(next(lines).removeprefix("data: "))["choices"]
            backend.submit = lambda plan: 1 / 0
            events = [line for line in lines if line]
        error = json.loads(events[-1].removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("server_error", "internal_error")
        assert "ZeroDivision" not in error["message"]


def test_the_openai_client_raises_an_error_that_occurs_during_a_stream():
    with slowed(fake_llm(), TURN) as llm, serving(llm) as served:
        backend = backend_of(llm)
        asked = {"model": served.model, "prompt": "One", "max_tokens": 2000, "extra_body": {"ignore_eos": True}}
        stream = served.client().completions.create(**asked, stream=True)
        next(iter(stream))
        backend.submit = lambda plan: 1 / 0
        with pytest.raises(openai.APIError):
            list(stream)


def test_a_client_that_disconnects_during_a_stream_frees_its_pages():
    with slowed(fake_llm(prefix_cache=False), TURN) as llm, serving(llm) as served:
        idle = llm.service.stats().pages_used
        with served.stream("/v1/completions", **LONG, n=3) as answer:
            lines = answer.iter_lines()
            next(lines)
            wait_until(lambda: llm.service.stats().running == 3)
            assert llm.service.stats().pages_used > idle
        wait_until(lambda: (llm.service.stats().running, llm.service.stats().pages_used) == (0, idle))
        assert llm.service.stats().completion_tokens < 1000
        assert served.post("/v1/completions", prompt="One", max_tokens=1).status_code == 200


def test_a_client_that_disconnects_before_its_whole_reply_frees_its_pages():
    with slowed(fake_llm(prefix_cache=False), TURN) as llm, serving(llm) as served:
        idle = llm.service.stats().pages_used
        with served.unread("/v1/completions", json.dumps(LONG | {"prompt": ["One", "Two"]}).encode()):
            wait_until(lambda: (llm.service.stats().running, llm.service.stats().prompt_tokens) == (2, 6))
        wait_until(lambda: (llm.service.stats().running, llm.service.stats().pages_used) == (0, idle))
        assert llm.service.stats().completion_tokens < 1000


def test_a_queued_request_of_a_disconnected_client_is_removed():
    with (
        slowed(fake_llm(max_batch=1), TURN) as llm,
        serving(llm) as served,
        served.stream("/v1/completions", **LONG) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        with served.unread("/v1/completions", json.dumps(LONG | {"stream": True}).encode()):
            wait_until(lambda: llm.service.stats().waiting == 1)
        wait_until(lambda: llm.service.stats().waiting == 0)
        assert llm.service.stats().running == 1


def test_an_error_that_cannot_be_written_in_the_shape_of_the_api_is_written_in_the_plain_shape() -> None:
    """For example the shape of the API repeats the output, and the output is what could not be written."""

    async def chunks() -> Any:
        yield [{"type": "a", "text": "fine"}]
        yield [{"type": "b", "text": "\ud83d"}]

    def failed(error: OnedrawError) -> list[dict[str, Any]]:
        return [{"type": "c", "text": "\ud83d", "error": str(error)}]

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.sleep(60)

    stream = ChunkStream(chunks(), {}, NAMED, failed)
    asyncio.run(stream({"type": "http"}, receive, send))
    assert b'"fine"' in sent[1]["body"]
    assert sent[-1]["body"].startswith(b"event: error\ndata: ")
    assert json.loads(sent[-1]["body"].partition(b"data: ")[2])["error"]["code"] == "internal_error"
    assert not sent[-1]["more_body"]
