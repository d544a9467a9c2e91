"""The server as a process: it prints an example request, drains and exits."""

from __future__ import annotations

import gc
import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from onedraw.errors import BadSetting
from onedraw.server.config import ServerOptions
from onedraw.server.serve import Server, bind, exposed, greeting, model_card_lines, serve
from tests.server.running import PATIENCE, fake_llm, wait_until

# Its backend is slow until a file exists, so that requests are still running when a test checks them.
PROGRAM = """
import sys, time
from pathlib import Path
from onedraw.server.config import ServerOptions
from onedraw.server.serve import serve
from tests.server.running import fake_llm, slowed

class Free:
    def wait(self, seconds):
        if not Path(sys.argv[2]).exists():
            time.sleep(seconds)

serve(slowed(fake_llm(), 0.05, Free()), ServerOptions(port=0, **eval(sys.argv[1])))
"""
LONG = 1500  # tokens, which take more than a minute


def test_garbage_collection_does_not_walk_through_what_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stopped every stream for half a second, now and then and whenever a long body was read."""
    frozen: list[int] = []
    monkeypatch.setattr(Server, "run", lambda self: frozen.append(gc.get_freeze_count()))
    try:
        with fake_llm() as llm, bind("127.0.0.1", 0) as listener:
            serve(llm, ServerOptions(port=0), listener)
    finally:
        gc.unfreeze()
    assert frozen[0] > 100_000


@contextmanager
def process(free: Path | str = "/nowhere", **options):
    """A server process and the address that it printed."""
    command = [sys.executable, "-c", PROGRAM, repr(options), str(free)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            line = child.stdout.readline()
            assert line.startswith("curl "), child.stderr.read()
            yield child, line, shlex.split(line)[1].split("/v1")[0]
        finally:
            child.kill()
            child.wait()


def get(url: str, **headers: str) -> int:
    return httpx.get(url, headers=headers, timeout=PATIENCE).status_code


def stream(url: str):
    asked = {"prompt": "a", "max_tokens": LONG, "ignore_eos": True, "stream": True}
    return httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=PATIENCE)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_printed_curl_command_works():
    with process() as (_, line, _):
        answer = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=PATIENCE)
        assert json.loads(answer.stdout)["object"] == "chat.completion", answer.stderr


def test_the_start_message_never_shows_the_key():
    with fake_llm() as llm:
        line = greeting("http://127.0.0.1:8000", llm, ServerOptions(api_key="sesame"))
    assert "sesame" not in line
    assert '-H "Authorization: Bearer $ONEDRAW_API_KEY"' in line


def test_on_a_terminal_the_pasted_line_has_the_key_itself():
    with fake_llm() as llm:
        line = greeting("http://127.0.0.1:8000", llm, ServerOptions(api_key="se'same"), reveal=True)
    assert "Authorization: Bearer se'same" in shlex.split(line)


def test_the_card_names_addresses_model_memory_and_drafts_and_never_the_key():
    with fake_llm(max_context=128, max_batch=4) as llm:
        card = dict(model_card_lines("http://a:1", llm, ServerOptions(api_key="sesame", root_path="/llm"), proposers=["ngram"]))
    assert (card["page"], card["API"]) == ("http://a:1/llm/", "http://a:1/llm/v1")
    assert card["context"] == "128 tokens, 4 requests at once"
    assert re.fullmatch(r"keys and values of 512 tokens, [\d,]+ MiB of host memory so far", card["memory"])
    assert (card["drafts"], card["key"]) == ("ngram", "required")
    assert "sesame" not in str(card)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "my-machine"])
def test_a_host_that_others_reach_is_exposed_without_a_key(host):
    assert exposed(ServerOptions(host=host))
    assert not exposed(ServerOptions(host=host, api_key="sesame"))
    assert not any(exposed(ServerOptions(host=local)) for local in ("127.0.0.1", "::1", "localhost"))


def test_an_open_server_warns_and_a_redirected_log_ends_with_ready():
    with process(host="0.0.0.0") as (child, _, url):
        assert get(f"{url}/health") == 200
        child.send_signal(signal.SIGTERM)
        child.wait(PATIENCE)
        started = child.stderr.read().partition("Shutting down")[0]
    assert "WARNING --host 0.0.0.0 without an API key" in started
    lines = [line for line in started.splitlines() if " INFO " not in line]
    assert lines[-1] == "ready"


def test_with_json_logs_every_line_is_json():
    with process(log_format="json") as (child, _, _url):
        child.send_signal(signal.SIGTERM)
        child.wait(PATIENCE)
        assert "ready" in [json.loads(line)["message"] for line in child.stderr.read().splitlines()]


def test_a_busy_server_says_what_it_waits_for():
    with process(drain_seconds=0.3) as (child, _, url), stream(url) as answer:
        next(lines := answer.iter_lines())
        child.send_signal(signal.SIGINT)
        list(lines)
        assert child.wait(PATIENCE) == 0
        assert "stopping: 1 running and 0 waiting requests may finish within 0.3 seconds" in child.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_after_a_signal_running_requests_finish_and_new_ones_are_refused(number, tmp_path):
    with process(tmp_path / "free", drain_seconds=PATIENCE) as (child, _, url):
        with stream(url) as answer:
            lines = answer.iter_lines()
            next(lines)
            child.send_signal(number)
            wait_until(lambda: get(f"{url}/health") == 503)
            refused = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=PATIENCE)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            (tmp_path / "free").touch()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert len(rest) > 50
        assert child.wait(PATIENCE) == 0


def test_requests_that_outlast_the_drain_time_end_with_an_error():
    with process(drain_seconds=0.3) as (child, _, url):
        with stream(url) as answer:
            lines = answer.iter_lines()
            next(lines)
            child.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert child.wait(PATIENCE) == 0


def test_a_second_signal_exits_at_once():
    with process(drain_seconds=PATIENCE) as (child, _, url), stream(url) as answer:
        lines = answer.iter_lines()
        next(lines)
        child.send_signal(signal.SIGTERM)
        wait_until(lambda: get(f"{url}/health") == 503)
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE) == 128 + signal.SIGTERM
        with pytest.raises(httpx.TransportError):  # in the middle of the reply
            list(lines)


def test_an_idle_server_stops_without_messages():
    with process() as (child, _, url):
        assert get(f"{url}/health") == 200
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE) == 0
        assert "Traceback" not in child.stderr.read()


def test_no_secret_is_logged():
    with process(api_key="sesame-secret", log_level="debug") as (child, line, url):
        asked, right = {"prompt": "a", "max_tokens": 1}, {"authorization": "Bearer sesame-secret"}
        assert httpx.post(f"{url}/v1/completions", json=asked, headers=right, timeout=PATIENCE).status_code == 200
        assert get(f"{url}/v1/models", authorization="Bearer guessed-secret") == 401
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


def test_a_host_of_another_machine_is_a_clear_error():
    with pytest.raises(BadSetting, match="--host"):
        bind("no.such.host.invalid", 8000)
    for host in ("a..b", "x" * 80):  # names that cannot be encoded
        with pytest.raises(BadSetting, match="--host"):
            bind(host, 8000)
    with pytest.raises(BadSetting, match=r"192\.0\.2\.1"):
        bind("192.0.2.1", 0)


def test_of_two_servers_that_load_at_once_one_reports_the_port_in_use() -> None:
    first = bind("127.0.0.1", 0)
    port = first.getsockname()[1]
    second = bind("127.0.0.1", port)  # no server listens yet
    first.listen()
    with first, fake_llm() as llm, pytest.raises(BadSetting, match=f"--port: {port} on 127.0.0.1 is in use"):
        serve(llm, ServerOptions(port=port), second)
