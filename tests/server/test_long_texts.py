"""Texts that are too long for the context are refused before they are tokenized, and long texts are tokenized in turn."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from onedraw.limits import MAX_CHARACTERS_COUNTED, MAX_LONG_WORK, MAX_PROMPT_TOKENS
from onedraw.server.app import LONG_BODY
from onedraw.server.errors import ClientGone
from onedraw.server.ollama.requests import OpenCalls
from onedraw.server.openai.chat import OpenAIWriter
from onedraw.server.openai.responses_request import numbered
from onedraw.server.prompts import PreparedRequest, prepare
from onedraw.server.worker_threads import Turns, Workers
from onedraw.text.chat_template import ChatTemplate
from onedraw.text.constraints.checker import GrammarChecker
from onedraw.text.tokenizer import Tokenizer
from onedraw.types import Piece
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
    assert f"maximum context length is {fake.llm.card.max_context} tokens" in error["message"]
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

    def __init__(self, address: str = "10.0.0.1") -> None:
        self.gone = asyncio.Event()
        scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "client": (address, 1)}
        self.request = Request(scope, receive=self._receive)

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


# ---------------------------------------------------------------------------------------------- callers take turns


def test_callers_take_turns_for_threads() -> None:
    """Regression: threads were given out in the order of arrival, so a caller with many requests delayed all others."""
    go, order = threading.Event(), list[str]()

    def work(name: str) -> None:
        go.wait()
        order.append(name)

    async def check() -> None:
        workers = Workers()
        callers = {name: Client(f"10.0.0.{number}") for number, name in enumerate("abc")}

        def run(name: str) -> asyncio.Future[None]:
            return asyncio.ensure_future(workers.run(callers[name].request, lambda: work(name), long=True))

        tasks = [run(name) for name in "a" * (MAX_LONG_WORK + 20) + "bbc"]
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(*tasks)

    asyncio.run(check())
    assert {"b", "c"} <= set(order[: 2 * MAX_LONG_WORK + 4]), order
    assert order.count("a") == MAX_LONG_WORK + 20


def test_a_caller_that_disconnects_while_it_waits_leaves_its_turn_to_the_next() -> None:
    async def check() -> list[str]:
        turns, got = Turns(1), list[str]()

        async def take(caller: str) -> None:
            await turns.acquire(caller)
            got.append(caller)

        await turns.acquire("a")
        waiting = {name: asyncio.ensure_future(take(name)) for name in ("b", "c", "d")}
        await asyncio.sleep(0)
        waiting["b"].cancel()
        turns.release("a")  # c has the slot now, and disconnects before it runs
        waiting["c"].cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        turns.release("d")
        await turns.acquire("e")  # the one slot is free again
        return got

    assert asyncio.run(check()) == ["d"]


def test_one_caller_leaves_a_slot_to_the_others() -> None:
    """Regression: two costly formats of one caller held up those of all others until both were compiled."""

    async def check() -> list[str]:
        turns, got = Turns(2, share=1), list[str]()

        async def take(caller: str) -> None:
            await turns.acquire(caller)
            got.append(caller)

        tasks = [asyncio.ensure_future(take(caller)) for caller in "aaab"]
        await asyncio.sleep(0)
        assert got == ["a", "b"]
        tasks += [asyncio.ensure_future(take("c"))]
        for caller in ("b", "a", "c", "a", "a"):
            turns.release(caller)
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        return got

    assert asyncio.run(check()) == ["a", "b", "c", "a", "a"]


def test_requests_are_answered_while_many_formats_wait_to_be_compiled(fake: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each of them waited on one of the threads that tokenize prompts."""
    go, check = threading.Event(), GrammarChecker.check

    def slow(self: GrammarChecker, request: Any) -> Any:
        go.wait(PATIENCE)
        return check(self, request)

    monkeypatch.setattr(GrammarChecker, "check", slow)
    answers: list[int] = []

    def ask(number: int) -> None:
        answers.append(fake.post("/v1/completions", prompt="a", max_tokens=1, guided_regex=f"x{{{number}}}").status_code)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(1, 41)]
    for thread in threads:
        thread.start()
    try:
        assert fake.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200
        assert fake.post("/apply-template", messages=HELLO).status_code == 200
        assert not answers
    finally:
        go.set()
        for thread in threads:
            thread.join()
    assert answers == [200] * 40


# ---------------------------------------------------------------------------------------------- work that grows with the body


def test_long_conversations_are_read_in_time_that_grows_with_their_length() -> None:
    """Regression: a body of 20 MB took minutes, also after its client had left, because each message copied all before it, or
    each result of a tool looked at every open call. Here that would take minutes too."""
    many, text = 40_000, "x" * 1_000
    [(_, joined)] = numbered([{"type": "message", "role": "assistant", "content": text}] * many)
    assert joined["content"] == text * many
    template = ChatTemplate("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", bos_token="", eos_token="")
    said = template.render([{"role": "user", "content": "a"}, *[{"role": "system", "content": text}] * many])
    assert said == "\n\n".join(["a", *[f"<system>\n{text}\n</system>"] * many])
    calls = OpenCalls()
    for number in range(200_000):
        calls.add(f"call_{number}", "f")
    assert [calls.take(None, "g") for _ in range(100_000)] == [f"call_{number}" for number in range(100_000)]
    assert [calls.take(None, "f") for _ in range(50_000)] == [f"call_{number}" for number in range(100_000, 150_000)]
    assert calls.take("call_199999", "f") == "call_199999"
    assert calls.take("unknown", None) == "call_150000"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("fg"), st.booleans())))
def test_open_calls_are_taken_by_id_then_by_name_then_in_order(steps: list[tuple[str, str, bool]]) -> None:
    calls, plain = OpenCalls(), list[tuple[str, str]]()
    for id, name, takes in steps:
        if not takes:
            calls.add(id, name)
            plain.append((id, name))
            continue
        expected = next((c for c in (*(c for c in plain if c[0] == id), *(c for c in plain if c[1] == name), *plain)), None)
        if expected is not None:
            plain.remove(expected)
        assert calls.take(id, name) == (None if expected is None else expected[0])


def test_a_short_input_cannot_refer_to_more_text_than_the_limit(fake: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a body of 1 MB with many references to one long item took gigabytes."""
    monkeypatch.setattr("onedraw.server.openai.responses.MAX_REFERENCED_CHARACTERS", 1_000)
    first = fake.post("/v1/responses", input="z" * 120, max_output_tokens=1).json()
    [item] = fake.get(f"/v1/responses/{first['id']}/input_items").json()["data"]
    reference = {"type": "item_reference", "id": item["id"]}
    assert fake.post("/v1/responses", input=[reference], max_output_tokens=1).status_code == 200
    refused = fake.post("/v1/responses", input=[reference] * 20, max_output_tokens=1)
    assert refused.status_code == 400
    assert "over 1,000 characters" in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"].startswith("input[")


# ---------------------------------------------------------------------------------------------- logprobs


def test_the_number_of_logprobs_of_a_reply_is_limited(fake: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the logprobs of 16 prompts took a gigabyte, and writing them silenced all streams for half a minute."""
    monkeypatch.setattr("onedraw.server.prompts.MAX_PROMPT_LOGPROBS", 50)
    monkeypatch.setattr("onedraw.server.prompts.MAX_REPLY_LOGPROBS", 50)
    echoed = {"prompt": [[5] * 10] * 2, "echo": True, "max_tokens": 0}
    assert fake.post("/v1/completions", **echoed, logprobs=1).status_code == 200
    for path, body, param in (
        ("/v1/completions", {**echoed, "logprobs": 2}, "logprobs"),
        ("/v1/completions", {"prompt": [[5] * 10] * 2, "max_tokens": 1, "prompt_logprobs": 2}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": [5], "max_tokens": 10, "logprobs": 4, "n": 2}, "logprobs"),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 10, "logprobs": True, "top_logprobs": 5}, "top_logprobs"),
        ("/api/chat", {"messages": HELLO, "options": {"num_predict": 51}, "logprobs": True}, "top_logprobs"),
    ):
        answer = fake.post(path, **body)
        assert answer.status_code == 400, answer.text
        assert "at most 50 are returned" in answer.text
        assert param in answer.text


def test_a_reply_with_many_logprobs_is_the_same_written_on_a_thread(fake: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": "a bc", "echo": True, "logprobs": 3, "max_tokens": 9, "n": 2, "seed": 5}
    plain, chunks = fake.post("/v1/completions", **body), fake.chunks("/v1/completions", **body)
    monkeypatch.setattr("onedraw.server.app.LOGPROBS_ON_LOOP", 0)
    threaded, again = fake.post("/v1/completions", **body), fake.chunks("/v1/completions", **body)
    assert threaded.headers["content-type"] == plain.headers["content-type"]
    named = {"id", "created"}
    assert {k: v for k, v in threaded.json().items() if k not in named} == {
        k: v for k, v in plain.json().items() if k not in named
    }
    assert [one["choices"] for one in again] == [one["choices"] for one in chunks]
    assert len(threaded.content) == len(plain.content)


def test_logprobs_that_are_asked_for_by_id_count_among_those_that_are_written_on_a_thread(
    fake: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: set[str] = set()
    chunks = OpenAIWriter.chunks

    def noted(self: OpenAIWriter, piece: Piece) -> list[dict[str, Any]]:
        if piece.tokens:
            writers.add(threading.current_thread().name)
        return chunks(self, piece)

    monkeypatch.setattr(OpenAIWriter, "chunks", noted)
    monkeypatch.setattr("onedraw.server.app.LOGPROBS_ON_LOOP", 100)
    body = {"prompt": "a bc", "logprobs": 0, "max_tokens": 3, "ignore_eos": True}
    fake.chunks("/v1/completions", **body)
    (loop,) = writers
    writers.clear()
    fake.chunks("/v1/completions", **body, logprob_token_ids=list(range(128)))
    assert writers
    assert loop not in writers
