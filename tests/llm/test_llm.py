"""The LLM: errors before and after the end of a reply, limits, and requests and errors that can be sent to another process."""

from __future__ import annotations

import asyncio
import pickle
import queue
import threading
from collections.abc import Callable, Sequence
from typing import cast

import pytest

from onedraw.build.llm import build_llm
from onedraw.engine.client import CheckedRequest, EngineClient, Event, Sink
from onedraw.errors import BadParameter, ContextOverflow, NoTokenLeft, OnedrawError
from onedraw.llm.llm import LLM, TOKENS_ON_LOOP
from onedraw.llm.reply import Reply
from onedraw.llm.reply_stream import Generation, ReplyStream
from onedraw.llm.request_options import RequestOptions, make_chat_generation, make_generation
from onedraw.settings import Settings
from onedraw.text.constraints.factory import ConstraintFactory
from onedraw.text.fake_tokenizer import fake_tokenizer
from onedraw.types import ModelCard, Piece, Request, SampledToken, SamplingParams

TOKENIZER = fake_tokenizer()
CARD = ModelCard(name="x", family="x", vocab=259, max_context=64, eos_ids=(), defaults={}, fingerprint="x")
Script = Callable[[Sequence[tuple[CheckedRequest, Sink]]], None]


class Scripted:
    """A service that delivers the events of a script."""

    max_requests = 8

    def __init__(self, script: Script) -> None:
        self.submit = script
        self.cancelled: list[str] = []

    def check(self, request: Request) -> CheckedRequest:
        return CheckedRequest(request)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)


def choices(text: str) -> tuple[SampledToken, ...]:
    return tuple(SampledToken(token) for token in TOKENIZER.encode(text, add_special=False))


def an_llm(script: Script) -> LLM:
    return LLM(
        service=cast(EngineClient, Scripted(script)),
        tokenizer=TOKENIZER,
        template=None,
        card=CARD,
        constraints=ConstraintFactory(TOKENIZER, ()),
    )


def test_an_error_after_a_stop_string_does_not_affect_the_other_choices() -> None:
    """The engine continues until it reads the cancellation, and may fail after the stop string."""

    def script(requests: Sequence[tuple[CheckedRequest, Sink]]) -> None:
        (first, to_first), (second, to_second) = requests
        to_first(Event(first.request.id, choices("yes.")))
        to_first(Event(first.request.id, error=NoTokenLeft("after the end")))
        to_second(Event(second.request.id, choices("no"), finish="length"))

    replies = an_llm(script).run(Generation((1,), SamplingParams(), stop=(".",), n=2))
    assert [(reply.text, reply.finish) for reply in replies] == [("yes", "stop"), ("no", "length")]


def test_an_error_before_the_end_of_a_reply_is_raised() -> None:
    def script(requests: Sequence[tuple[CheckedRequest, Sink]]) -> None:
        ((request, sink),) = requests
        sink(Event(request.request.id, choices("no end")))
        sink(Event(request.request.id, error=NoTokenLeft("too early")))

    with pytest.raises(NoTokenLeft, match="too early"):
        an_llm(script).run(Generation((1,), SamplingParams(), stop=(".",)))


@pytest.mark.parametrize("pieces", [("a.b.c.d",), ("a", ".", "b", ".", "c", ".", "d"), ("a.b", ".c.", "d")], ids=len)
def test_a_stop_string_does_not_end_a_reply_before_min_tokens(pieces: tuple[str, ...]) -> None:
    def script(requests: Sequence[tuple[CheckedRequest, Sink]]) -> None:
        ((request, sink),) = requests
        for piece in pieces:
            sink(Event(request.request.id, choices(piece)))

    (reply,) = an_llm(script).run(Generation((1,), SamplingParams(min_tokens=3), stop=(".",)))
    assert (reply.text, reply.finish, len(reply.tokens)) == ("a.b", "stop", 4)


def test_more_choices_than_can_run_and_wait_are_refused_by_name() -> None:
    with build_llm(Settings(backend="fake", queue_limit=4, max_batch=2)) as llm:
        with pytest.raises(BadParameter, match="n: must be at most 6"):
            llm.prepare(make_generation(RequestOptions.of(n=7, max_tokens=1), llm=llm, prompt=(1,)))
        with pytest.raises(BadParameter, match="n: must be at most 6"):
            llm.prepare(make_generation(RequestOptions.of(n=10**12, max_tokens=1), llm=llm, prompt=(1,)))
        assert len(llm.run(make_generation(RequestOptions.of(n=6, max_tokens=1), llm=llm, prompt=(1,)))) == 6


def test_closed_event_loops_are_forgotten() -> None:
    with build_llm(Settings(backend="fake")) as llm:
        for _ in range(4):
            asyncio.run(llm.arun(make_generation(RequestOptions(max_tokens=2), llm=llm, prompt=(5, 6))))
        assert len(llm._wakeups) == 1


def test_the_event_loop_stays_free_while_the_text_of_many_tokens_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a scored reply arrives in a few events, and reading a long one silenced all streams of a server. Here reading
    it waits until the event loop has run something else."""
    ran, push = threading.Event(), ReplyStream.push

    def slow(self: ReplyStream, event: Event) -> list[Piece]:
        assert len(event.sampled) <= TOKENS_ON_LOOP or ran.wait(60)
        return push(self, event)

    monkeypatch.setattr(ReplyStream, "push", slow)

    def script(requests: Sequence[tuple[CheckedRequest, Sink]]) -> None:
        ((request, sink),) = requests
        sink(Event(request.request.id, tuple(map(SampledToken, [65] * (TOKENS_ON_LOOP + 1)))))
        sink(Event(request.request.id, finish="length"))

    async def check() -> Reply:
        running = asyncio.ensure_future(an_llm(script).arun(Generation((1,), SamplingParams())))
        await asyncio.sleep(0.05)
        ran.set()
        (reply,) = await running
        return reply

    assert len(asyncio.run(check()).tokens) == TOKENS_ON_LOOP + 1


def test_a_request_can_be_sent_to_another_process() -> None:
    options = RequestOptions.of(guided_json={"type": "object"}, thinking_budget=3, max_tokens=4, seed=1)
    with build_llm(Settings(backend="fake", model="fake")) as llm:
        messages = [{"role": "user", "content": "?"}]
        generation = make_chat_generation(options, llm=llm, messages=messages, template_kwargs={"enable_thinking": True})
        (choice,) = llm.prepare(generation)
        copy = pickle.loads(pickle.dumps(choice.request))
        assert copy == choice.request
        assert copy.constraint is not None
        replies: queue.SimpleQueue[Event] = queue.SimpleQueue()
        llm.service.submit([(copy, replies.put)])
        events = [replies.get()]
        while events[-1].finish is None:
            events.append(replies.get())
        (reply,) = llm.run(generation)
    assert [token.token for event in events for token in event.sampled] == reply.token_ids
    assert pickle.loads(pickle.dumps(events)) == events


def test_an_error_of_an_event_can_be_sent_to_another_process() -> None:
    errors: list[OnedrawError] = [
        NoTokenLeft("none left"),
        BadParameter("top_p", "too large"),
        ContextOverflow("too long", param="max_tokens", prompt=9),
    ]
    for error in errors:
        copy = pickle.loads(pickle.dumps(Event("r", error=error))).error
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
        assert (copy.code, copy.status, copy.param) == (error.code, error.status, error.param)
