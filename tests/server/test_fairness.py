"""Fair scheduling over HTTP: many choices of one caller do not delay a small request of another one."""

from __future__ import annotations

import threading

import pytest

from onedraw.server.auth import CALLER, ApiKey, turn_caller
from onedraw.server.config import ServerOptions
from tests.server.running import fake_llm, serving, wait_until

COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ({CALLER: "ann", "client": ("10.0.0.7", 5)}, "ann"),
        ({"client": ("10.0.0.7", 5)}, "10.0.0.7"),
        ({"client": ("2001:db8:1:2:3:4:5:6", 5)}, "2001:db8:1:2::/64"),
        ({"client": ("testclient", 5)}, "testclient"),
        ({"client": None}, ""),
        ({}, ""),
    ],
)
def test_a_caller_is_identified_by_its_key_or_its_address(scope: dict[str, object], expected: str) -> None:
    assert turn_caller(scope) == expected


def test_a_small_request_is_answered_while_128_choices_of_another_key_run() -> None:
    keys = (ApiKey("many", "k1"), ApiKey("one", "k2"))
    with fake_llm(max_batch=4) as llm, serving(llm, ServerOptions(api_keys=keys)) as served:
        ended = threading.Event()

        def many() -> None:
            body = {"prompt": "a", "n": 128, "max_tokens": 80, "ignore_eos": True}
            served.http.post(COMPLETIONS, json=body, headers={"authorization": "Bearer k1"})
            ended.set()

        thread = threading.Thread(target=many)
        thread.start()
        wait_until(lambda: llm.service.stats().running == 4)
        body = {"prompt": "b", "max_tokens": 5}
        answer = served.http.post(COMPLETIONS, json=body, headers={"authorization": "Bearer k2"})
        assert answer.status_code == 200
        assert not ended.is_set()
        assert llm.service.stats().turn_preemptions == 1
        thread.join()
