"""Limits per API key or client address: what is refused, with which error, and that everything taken is returned."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onedraw.errors import BadRequest, BadSetting
from onedraw.server.auth import ApiKey
from onedraw.server.config import ServerOptions
from onedraw.server.limits import Accounts, Allowance, CallerLimits, RateLimited
from tests.server.running import Served, fake_llm, serving, slowed, wait_until

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def accounts(**limits: int) -> tuple[Accounts, Clock]:
    clock = Clock()
    return Accounts(CallerLimits(**limits), clock=clock), clock


def test_requests_in_flight_are_limited_and_returned_once() -> None:
    found, _ = accounts(requests=2)
    first, _ = found.begin("a"), found.begin("a")
    with pytest.raises(RateLimited, match=r"2 requests in flight.*--key-requests") as refused:
        found.begin("a")
    assert (refused.value.limit, refused.value.retry_seconds) == ("requests", 1)
    found.begin("b")
    first.close()
    first.close()
    found.begin("a")
    with pytest.raises(RateLimited):
        found.begin("a")


def test_requests_per_minute_refill_evenly() -> None:
    found, clock = accounts(requests_per_minute=6)
    for _ in range(6):
        found.begin("a").close()
    with pytest.raises(RateLimited) as refused:
        found.begin("a")
    assert refused.value.retry_seconds == 10
    clock.now += 9.9
    with pytest.raises(RateLimited):
        found.begin("a")
    clock.now += 0.1
    found.begin("a").close()
    with pytest.raises(RateLimited):
        found.begin("a")


def test_tokens_per_minute_are_paid_back_before_the_next_request() -> None:
    found, clock = accounts(tokens_per_minute=600)
    permit = found.begin("a")
    permit.reserve(prompt=500, reply=1000)
    permit.use(400)  # only what was sampled counts
    with pytest.raises(RateLimited, match="--key-tokens-per-minute") as refused:
        found.begin("a")
    assert refused.value.retry_seconds == 31
    clock.now += 31
    found.begin("a")


def test_tokens_in_flight_are_prompts_and_max_tokens() -> None:
    found, _ = accounts(tokens=100)
    first = found.begin("a")
    first.reserve(prompt=30, reply=40)
    second = found.begin("a")
    with pytest.raises(RateLimited, match="70 tokens in flight, and this request needs 31"):
        second.reserve(prompt=1, reply=30)
    with pytest.raises(BadRequest, match="101 tokens together") as never:
        second.reserve(prompt=1, reply=100)
    assert never.value.code == "request_too_large"
    second.close()
    first.close()
    found.begin("a").reserve(prompt=50, reply=50)


def test_a_clock_that_goes_back_takes_nothing_away() -> None:
    allowance = Allowance(60, 100.0)
    allowance.take(30, 100.0)
    assert allowance.left(50.0) == 30
    assert allowance.left(51.0) == 31


@settings(max_examples=200)
@given(st.integers(1, 50), st.lists(st.floats(0, 30), max_size=80))
def test_no_more_requests_pass_than_the_limit_and_its_refill(limit: int, pauses: list[float]) -> None:
    found, clock = accounts(requests_per_minute=limit)
    passed, begin = 0, clock.now
    for pause in pauses:
        clock.now += pause
        with suppress(RateLimited):
            found.begin("a").close()
            passed += 1
    assert passed <= limit + (clock.now - begin) * limit / 60 + 1e-6


def test_accounts_of_callers_that_left_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onedraw.server.limits.MANY_ACCOUNTS", 10)
    found, clock = accounts(requests_per_minute=60)
    kept = found.begin("kept")
    for number in range(1000):
        clock.now += 1
        found.begin(f"c{number}").close()
    assert len(found) < 30
    assert kept.account.requests == 1
    assert "kept" in {caller for caller, _, _ in found.in_flight()}


@pytest.mark.parametrize("name", ["key_requests", "key_tokens", "key_requests_per_minute", "key_tokens_per_minute"])
def test_a_limit_of_zero_is_refused(name: str) -> None:
    with pytest.raises(BadSetting, match=f"--{name.replace('_', '-')}: must be at least 1"):
        ServerOptions(**{name: 0})  # type: ignore[arg-type]


# ---------------------------------------------------------------------- over HTTP

KEYS = (ApiKey("ann", "k1"), ApiKey("bob", "k2"))


def send(served: Served, path: str, key: str = "k1", **body: Any) -> httpx.Response:
    return served.http.post(path, json=body, headers={"authorization": f"Bearer {key}"})


def refused(answer: httpx.Response, flag: str) -> dict[str, Any]:
    assert answer.status_code == 429, answer.text
    assert int(answer.headers["retry-after"]) >= 1
    error: dict[str, Any] = answer.json()["error"]
    assert error["type"] == "rate_limit_error"
    assert flag in error["message"]
    return error


@pytest.fixture
def limited() -> Iterator[Served]:
    with fake_llm() as llm, serving(llm, ServerOptions(api_keys=KEYS, key_requests_per_minute=2)) as served:
        yield served


@pytest.mark.parametrize("stream", [False, True])
def test_the_error_has_the_shape_of_its_endpoint(limited: Served, stream: bool) -> None:
    hello = [{"role": "user", "content": "hi"}]
    for _ in range(2):
        assert send(limited, COMPLETIONS, prompt="a", max_tokens=1).status_code == 200
    error = refused(send(limited, CHAT, messages=hello, stream=stream), "--key-requests-per-minute")
    assert error["code"] == "rate_limit_exceeded"
    refused(send(limited, "/v1/responses", input="hi", stream=stream), "--key-requests-per-minute")
    answer = send(limited, MESSAGES, model=limited.model, messages=hello, max_tokens=5, stream=stream)
    refused(answer, "--key-requests-per-minute")
    assert answer.json()["type"] == "error"
    assert send(limited, COMPLETIONS, key="k2", prompt="a", max_tokens=1).status_code == 200  # another key has its own
    assert 'requests_limited_total{key="ann",limit="requests_per_minute"' in metrics(limited)


def metrics(served: Served) -> str:
    return served.http.get("/metrics", headers={"authorization": "Bearer k1"}).text


def test_requests_in_flight_are_returned_also_if_the_client_leaves_or_the_request_is_wrong() -> None:
    free = threading.Event()
    options = ServerOptions(api_keys=KEYS, key_requests=1, key_tokens=500)
    with slowed(fake_llm(max_batch=2), 0.02, free) as llm, serving(llm, options) as served:
        long = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
        headers = {"authorization": "Bearer k1"}
        for _ in range(3):
            with served.http.stream("POST", COMPLETIONS, json=long, headers=headers) as answer:
                assert answer.status_code == 200
                lines = answer.iter_lines()  # kept: without it the connection would be closed
                next(lines)
                refused(send(served, COMPLETIONS, prompt="a", max_tokens=1), "--key-requests")
                assert 'key_tokens_in_flight{key="ann"' in metrics(served)
            wait_until(lambda: "key_requests_in_flight" in metrics(served) and in_flight(served) == (0, 0))
        assert send(served, COMPLETIONS, prompt="a", max_tokens=501).status_code == 400
        assert send(served, COMPLETIONS, prompt="a", temperature=-1).status_code == 400
        free.set()
        assert send(served, COMPLETIONS, prompt="a", max_tokens=3).status_code == 200
        wait_until(lambda: in_flight(served) == (0, 0))


def in_flight(served: Served) -> tuple[float, float]:
    lines = [line for line in metrics(served).splitlines() if line.startswith("key_") and 'key="ann"' in line]
    values = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}
    return values["key_requests_in_flight"], values["key_tokens_in_flight"]


def test_without_keys_the_limits_hold_for_an_address() -> None:
    with fake_llm() as llm, serving(llm, ServerOptions(key_tokens_per_minute=20)) as served:
        assert served.post(COMPLETIONS, prompt=[5] * 10, max_tokens=15, ignore_eos=True).status_code == 200
        error = refused(served.post(COMPLETIONS, prompt="a", max_tokens=1), "--key-tokens-per-minute")
        assert "try again in" in error["message"]
        assert served.post("/tokenize", prompt="a").status_code == 200
