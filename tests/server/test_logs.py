"""Logs: one line per request with its id; prompts only on request."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from typing import Any

import pytest

from onedraw.server.config import ServerOptions
from onedraw.server.logs import JsonFormatter, TextFormatter
from tests.server.running import PATIENCE, Served, fake_llm, serving, slowed, wait_until

CHAT = "/v1/chat/completions"
SECRET = [{"role": "user", "content": "my secret question"}]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, fake: Served) -> Any:
    """Return the log lines of requests. Call it after the server has started, since the start sets the log levels."""

    def facts() -> list[dict[str, Any]]:
        caplog.set_level(logging.INFO, logger="onedraw.access")
        return [record.facts for record in caplog.records if hasattr(record, "facts")]

    facts()
    fake.get("/health", headers={"x-request-id": "before"})  # no line of an earlier test can follow the line of this request
    wait_until(lambda: any(line.get("caller_id") == "before" for line in facts()))
    caplog.clear()
    return facts


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_is_logged_with_its_request_id(fake: Served, lines: Any, stream: bool) -> None:
    answer = fake.post(CHAT, messages=SECRET, max_tokens=5, ignore_eos=True, seed=3, stream=stream)
    answer.read()
    wait_until(lambda: len(lines()) == 1)
    (facts,) = lines()
    assert facts["id"] == answer.headers["x-request-id"]
    assert (facts["method"], facts["path"], facts["status"], facts["seed"]) == ("POST", CHAT, 200, 3)
    assert facts["completion_tokens"] == 5
    assert facts["prompt_tokens"] > 5
    assert facts["seconds"] > 0
    assert "secret" not in json.dumps(facts)


def test_a_refused_request_is_logged(fake: Served, lines: Any) -> None:
    answer = fake.post(CHAT, messages=SECRET, frobnicate=1)
    assert answer.headers["x-request-id"].startswith("req-")
    wait_until(lambda: len(lines()) == 1)
    assert (lines()[0]["status"], lines()[0]["id"]) == (400, answer.headers["x-request-id"])


def test_the_request_id_of_the_caller_is_logged_if_it_cannot_break_the_line(fake: Served, lines: Any) -> None:
    fake.get("/health", headers={"x-request-id": "trace-7.a:b"})
    fake.get("/health", headers={"x-request-id": "two words"})
    fake.get("/nowhere%0Aforged")
    wait_until(lambda: len(lines()) == 3)
    first, second, third = lines()
    assert first["caller_id"] == "trace-7.a:b"
    assert "caller_id" not in second
    assert third["path"] == "/nowhere\nforged"


def test_prompts_are_logged_only_on_request(lines: Any) -> None:
    for asked in (False, True):
        with fake_llm() as llm, serving(llm, ServerOptions(log_prompts=asked)) as served:
            before = len(lines())
            served.post(CHAT, messages=SECRET, max_tokens=2)
            wait_until(lambda: len(lines()) > before)  # noqa: B023
        assert ("secret question" in json.dumps(lines()[-1])) == asked


def test_a_client_that_disconnects_is_logged(lines: Any) -> None:
    with fake_llm() as llm, serving(slowed(llm, 0.02)) as served:
        assert lines() == []
        with served.stream(CHAT, messages=SECRET, max_tokens=1500, ignore_eos=True) as answer:
            next(answer.iter_lines())
        wait_until(lambda: len(lines()) == 1)
        assert lines()[0]["gone"] is True
        assert "completion_tokens" not in lines()[0]


def test_an_error_in_a_request_is_logged_with_its_id(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.handler.setFormatter(JsonFormatter())
    with fake_llm() as llm, serving(llm) as served:
        caplog.set_level(logging.ERROR, logger="onedraw.server")
        monkeypatch.setattr(llm, "prepare", lambda *generations, **named: 1 / 0)
        answer = served.post(CHAT, messages=SECRET)
    told = [json.loads(line) for line in caplog.text.splitlines() if "unexpected error" in line]
    assert answer.status_code == 500
    assert told[0]["id"] == answer.headers["x-request-id"]
    assert "ZeroDivisionError" in told[0]["error"]


def test_logs_are_text_or_json() -> None:
    record = logging.LogRecord("onedraw.engine", logging.WARNING, "", 0, "take %s", ("care",), None)
    assert TextFormatter().format(record).endswith(" WARNING take care")
    said = json.loads(JsonFormatter().format(record))
    assert (said["level"], said["logger"], said["message"]) == ("warning", "onedraw.engine", "take care")
    assert said["time"].endswith("Z")


def test_the_process_logs_nothing_but_json_on_stderr() -> None:
    program = (
        "import threading, httpx\n"
        "from onedraw.server.config import ServerOptions\n"
        "from onedraw.server.serve import Server\n"
        "from tests.server.running import fake_llm, wait_until\n"
        "server = Server(fake_llm(), ServerOptions(port=0, log_format='json'))\n"
        "thread = threading.Thread(target=server.run); thread.start()\n"
        "wait_until(lambda: server.started)\n"
        f"httpx.get(server.url + '/health', timeout={PATIENCE})\n"
        "server._loop.call_soon_threadsafe(server.stop); thread.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, env={**os.environ})
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["path"] for line in told if line["message"] == "request"] == ["/health"]
