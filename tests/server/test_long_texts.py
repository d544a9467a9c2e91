"""Texts that are too long for the context are refused before they are tokenized, and long texts are tokenized in turn."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request

from onedraw.limits import MAX_CHARACTERS_COUNTED, MAX_LONG_WORK, MAX_PROMPT_TOKENS
from onedraw.server.app import LONG_BODY
from onedraw.server.errors import ClientGone
from onedraw.server.prompts import PreparedRequest, prepare
from onedraw.server.work import Workers
from onedraw.text.tokenizer import Tokenizer
from tests.server.running import PATIENCE, Served, fake_llm, serving, wait_until

LONG = "zq" * MAX_CHARACTERS_COUNTED
SAID = [{"role": "user", "content": LONG}]
HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "description": LONG, "parameters": {"type": "object"}}}
REQUESTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "prompt": ("/v1/completions", {"prompt": LONG}, "prompt"),
    "second prompt": ("/v1/completions", {"prompt": ["a", LONG]}, "prompt"),
    "prediction": ("/v1/completions", {"prompt": "a", "prediction": {"type": "content", "content": LONG}}, "prediction"),
    "chat": ("/v1/chat/completions", {"messages": SAID}, "messages"),
    "chat prediction": (
        "/v1/chat/completions",
        {"messages": HELLO, "prediction": {"type": "content", "content": LONG}},
        "prediction",
    ),
    "response": ("/v1/responses", {"input": LONG}, "input"),
    "instructions": ("/v1/responses", {"input": "a", "instructions": LONG}, "input"),
    "message": ("/v1/messages", {"messages": SAID, "max_tokens": 1}, "messages"),
    "system": ("/v1/messages", {"messages": HELLO, "system": LONG, "max_tokens": 1}, "messages"),
    "count": ("/v1/messages/count_tokens", {"messages": SAID}, "messages"),
    "response count": ("/v1/responses/input_tokens", {"input": LONG}, "input"),
    "tokenize": ("/tokenize", {"prompt": LONG}, "prompt"),
    "tokenize chat": ("/tokenize", {"messages": SAID}, "messages"),
}


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which the length of every tokenized text is appended."""
    lengths: list[int] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, *, add_special: bool = True) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, add_special=add_special)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    return lengths


@pytest.mark.parametrize("name", REQUESTS)
def test_a_text_too_long_for_the_context_is_refused_before_it_is_tokenized(fake: Served, tokenized: list[int], name: str) -> None:
    """Regression: ten megabytes took seconds and a gigabyte before the refusal, and a long prediction was not refused."""
    path, body, param = REQUESTS[name]
    answer = fake.post(path, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), answer.text[:500]
    assert f"the context of {fake.llm.card.max_context:,}" in error["message"]
    assert max(tokenized, default=0) < len(LONG)


def test_tools_too_long_for_the_context_are_refused_before_they_are_tokenized() -> None:
    with fake_llm() as llm, serving(llm) as served:
        answer = served.post("/v1/chat/completions", messages=HELLO, tools=[TOOL])
        assert answer.status_code == 400


def test_the_number_of_prompts_of_a_request_is_limited(fake: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onedraw.server.prompts.MAX_PROMPT_TOKENS", 100)
    answer = fake.post("/v1/completions", prompt=["z" * 60, "z" * 60], max_tokens=1)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert "over 100 tokens in all" in answer.json()["error"]["message"]
    assert MAX_PROMPT_TOKENS > 1 << 20


def test_more_prompts_than_the_queue_holds_are_refused_before_they_are_tokenized(tokenized: list[int]) -> None:
    with fake_llm(max_batch=1, queue_limit=2) as llm, serving(llm) as served:
        answer = served.post("/v1/completions", prompt=["a" * 50] * 20, max_tokens=1)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_replies")
    assert 50 not in tokenized


def test_a_disconnected_client_ends_the_tokenization_of_its_prompts(fake: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remaining prompts of a list are not tokenized after the client has disconnected."""
    begun, hung_up, ended = threading.Event(), threading.Event(), threading.Event()
    encode, tokenized, flags = Tokenizer.encode, [], []

    def waits(self: Tokenizer, text: str, *, add_special: bool = True) -> list[int]:
        if text == "one of many":
            tokenized.append(text)
            begun.set()
            hung_up.wait()
        return encode(self, text, add_special=add_special)

    def watched(*args: Any, cancelled: Callable[[], bool], **kwargs: Any) -> PreparedRequest:
        flags.append(cancelled)
        try:
            return prepare(*args, cancelled=cancelled, **kwargs)
        finally:
            ended.set()

    monkeypatch.setattr(Tokenizer, "encode", waits)
    monkeypatch.setattr("onedraw.server.app.prepare", watched)
    body = json.dumps({"max_tokens": 1, "prompt": ["one of many"] * 20, "user": "x" * LONG_BODY}).encode()
    with fake.unread("/v1/completions", body):
        assert begun.wait(PATIENCE)
    wait_until(lambda: flags[0]())
    hung_up.set()
    assert ended.wait(PATIENCE)
    assert tokenized == ["one of many"]


# ---------------------------------------------------------------------------------------------- order of long work


class Client:
    """A request whose client disconnects when the test says so."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.request = Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive=self._receive)

    async def _receive(self) -> dict[str, str]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


def test_long_tasks_run_one_at_a_time_and_short_tasks_do_not_wait() -> None:
    running, most, go = 0, 0, threading.Event()
    lock = threading.Lock()

    def work() -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        go.wait()
        with lock:
            running -= 1
        return 7

    async def check() -> None:
        workers = Workers()
        long = [asyncio.ensure_future(workers.run(Client().request, work, long=True)) for _ in range(3 * MAX_LONG_WORK)]
        while running < MAX_LONG_WORK:
            await asyncio.sleep(0)
        assert await workers.run(Client().request, lambda: 5, long=False) == 5
        go.set()
        assert await asyncio.gather(*long) == [7] * len(long)

    asyncio.run(check())
    assert most == MAX_LONG_WORK


def test_a_running_task_of_a_disconnected_client_counts_until_it_ends_and_a_waiting_one_is_dropped() -> None:
    """Otherwise clients that disconnect at once could have more tasks running than others."""
    begun, go = threading.Semaphore(0), threading.Event()
    ran: list[int] = []

    def work(number: int) -> None:
        ran.append(number)
        begun.release()
        go.wait()

    async def check() -> None:
        workers = Workers()
        clients = [Client() for _ in range(MAX_LONG_WORK + 2)]
        tasks = [
            asyncio.ensure_future(workers.run(client.request, lambda number=number: work(number), long=True))
            for number, client in enumerate(clients)
        ]
        for _ in range(MAX_LONG_WORK):
            await asyncio.to_thread(begun.acquire)
        for client in clients[:-1]:
            client.gone.set()
        for task in tasks[:-1]:
            with pytest.raises(ClientGone):
                await task
        assert ran == list(range(MAX_LONG_WORK))
        go.set()
        await tasks[-1]

    asyncio.run(check())
    assert ran == [*range(MAX_LONG_WORK), MAX_LONG_WORK + 1]
