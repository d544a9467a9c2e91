"""The server as a process: it greets, it drains, it exits."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import pytest

from onedraw.errors import BadSetting
from onedraw.server.options import ServerOptions
from onedraw.server.serve import bind, greeting
from tests.serve.running import PATIENCE, fake_door, wait_until

PROGRAM = """
import sys
from onedraw.server.options import ServerOptions
from onedraw.server.serve import serve
from tests.serve.running import fake_door, slowed
serve(slowed(fake_door(), 0.01), ServerOptions(port=0, **eval(sys.argv[1])))
"""


@contextmanager
def process(**options):
    """A serving process, and the address it printed."""
    command = [sys.executable, "-c", PROGRAM, repr(options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            line = child.stdout.readline()
            assert line.startswith("curl "), child.stderr.read()
            yield child, line, shlex.split(line)[1].split("/v1")[0]
        finally:
            child.kill()
            child.wait()


def stream(url: str, tokens: int):
    asked = {"prompt": "a", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    return httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=PATIENCE)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_printed_line_works_when_pasted():
    with process() as (_, line, _):
        answer = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=PATIENCE)
        assert json.loads(answer.stdout)["object"] == "chat.completion", answer.stderr


def test_the_greeting_never_shows_the_key():
    with fake_door() as door:
        line = greeting("http://127.0.0.1:8000", door, ServerOptions(api_key="sesame"))
    assert "sesame" not in line
    assert '-H "Authorization: Bearer $ONEDRAW_API_KEY"' in line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_running_finish_and_refuses_the_new(number):
    with process() as (child, _, url):
        with stream(url, 150) as answer:
            lines = answer.iter_lines()
            next(lines)
            child.send_signal(number)
            wait_until(lambda: httpx.get(f"{url}/health").status_code == 503)
            refused = httpx.post(f"{url}/v1/completions", json={"prompt": "a"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert len(rest) > 50
        assert child.wait(PATIENCE) == 0


def test_draining_ends_in_bounded_time_and_tells_the_client():
    with process(drain_seconds=0.3) as (child, _, url):
        with stream(url, 2000) as answer:
            lines = answer.iter_lines()
            next(lines)
            child.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert child.wait(PATIENCE) == 0


def test_a_second_signal_exits_at_once():
    with process() as (child, _, url), stream(url, 2000) as answer:
        lines = answer.iter_lines()
        next(lines)
        child.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 503)
        begun = time.monotonic()
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE) == 128 + signal.SIGTERM
        assert time.monotonic() - begun < 2


def test_an_idle_server_stops_quietly():
    with process() as (child, _, url):
        assert httpx.get(f"{url}/health").status_code == 200
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE) == 0
        assert "Traceback" not in child.stderr.read()


def test_no_secret_is_logged():
    with process(api_key="sesame-secret", log_level="debug") as (child, line, url):
        right = {"authorization": "Bearer sesame-secret"}
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=right).status_code == 200
        assert httpx.get(f"{url}/v1/models", headers={"authorization": "Bearer guessed-secret"}).status_code == 401
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE) == 0
        assert "secret" not in child.stderr.read() + child.stdout.read() + line


def test_a_port_in_use_is_a_clear_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BadSetting, match=f"{port} on 127.0.0.1 is in use.*--port"):
            bind("127.0.0.1", port)


def test_a_host_that_is_not_ours_is_a_clear_error():
    with pytest.raises(BadSetting, match="--host"):
        bind("no.such.host.invalid", 8000)
    for host in ("a..b", "x" * 80):  # names that cannot be written as one
        with pytest.raises(BadSetting, match="--host"):
            bind(host, 8000)
    with pytest.raises(BadSetting, match=r"192\.0\.2\.1"):
        bind("192.0.2.1", 0)
