"""A reply does not depend on whether its engine is in this process or in one of its own: ids, logprobs, checksums, texts and
usage are equal for every kind of parameter, alone and in company, and for replies that are cancelled or continued."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from onedraw.build.engine_process import EngineProcess
from onedraw.build.llm import build_llm
from onedraw.engine.client import Event
from onedraw.engine.remote import RemoteEngine
from onedraw.llm.llm import LLM
from onedraw.settings import Settings
from tests.laws.test_replicas import REQUESTS, content, replies

SETTINGS = Settings(model="fake", backend="fake", threads=1, max_batch=4)


@pytest.fixture(scope="module")
def here() -> Iterator[LLM]:
    with build_llm(SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def there() -> Iterator[LLM]:
    with build_llm(SETTINGS, start_engine=EngineProcess) as llm:
        yield llm


def same(here: LLM, there: LLM, name: str, seed: int) -> bool:
    expected = [content(reply) for reply in replies(here, name, seed)]
    return [content(reply) for reply in replies(there, name, seed)] == expected


@pytest.mark.parametrize("name", REQUESTS)
def test_every_kind_of_request_has_the_same_reply(here: LLM, there: LLM, name: str) -> None:
    assert here.card == replace(there.card, created=here.card.created)
    before = there.service.stats().completion_tokens
    assert same(here, there, name, seed=4)
    assert there.service.stats().completion_tokens > before


def test_many_requests_at_once_have_the_replies_of_one_at_a_time(here: LLM, there: LLM) -> None:
    names = list(REQUESTS)
    work = [(names[number % len(names)], number) for number in range(48)]
    expected = [[content(reply) for reply in replies(here, *one)] for one in work]
    got: list[Any] = [None] * len(work)

    def run(index: int) -> None:
        got[index] = [content(reply) for reply in replies(there, *work[index])]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == expected
    assert there.service.stats().mixed_steps > 50


def test_a_reply_cut_at_any_token_is_continued_across_the_border(here: LLM, there: LLM) -> None:
    options: dict[str, Any] = {"seed": 6, "max_tokens": 24, "temperature": 1.1, "frequency_penalty": 0.7, "ignore_eos": True}
    whole = here.generate("The sea", **options)
    assert not isinstance(whole, list)
    for cut in range(1, 24, 5):
        stream = there.stream("The sea", **options)
        begun = [token.token for _ in range(cut) for token in next(stream).tokens]  # type: ignore[call-overload]
        stream.close()  # type: ignore[attr-defined]  # cancels the request
        assert begun == whole.token_ids[: len(begun)]
        rest = there.generate("The sea", **options, continue_ids=begun)
        assert not isinstance(rest, list)
        assert rest.token_ids == whole.token_ids[len(begun) :]


def test_events_of_another_request_are_caught(here: LLM, there: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: every fourth event is given to the wrong choice of a request with several."""
    right = RemoteEngine._deliver
    count = 0

    def swapped(self: RemoteEngine, event: Event) -> None:
        nonlocal count
        count += 1
        name, _, choice = event.request_id.rpartition("-")
        other = f"{name}-{1 - int(choice)}" if choice in ("0", "1") else event.request_id
        if count % 4 == 0 and event.finish is None and other in self._sinks:
            event = replace(event, request_id=other)
        right(self, event)

    assert same(here, there, "several choices", seed=9)
    monkeypatch.setattr(RemoteEngine, "_deliver", swapped)
    assert not same(here, there, "several choices", seed=9)


@pytest.mark.parametrize("name", ["plain", "penalties"])
def test_a_field_that_does_not_cross_is_caught(here: LLM, there: LLM, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Planted: the checksums of sampled tokens get lost on the way."""
    right = RemoteEngine._deliver

    def lossy(self: RemoteEngine, event: Event) -> None:
        right(self, replace(event, sampled=tuple(replace(one, checksum=None) for one in event.sampled)))

    monkeypatch.setattr(RemoteEngine, "_deliver", lossy)
    assert not same(here, there, name, seed=4)
