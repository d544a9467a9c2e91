"""`onedraw serve` as a process: it prints a curl command, answers it, and stops on a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("uvicorn")


@pytest.fixture(params=[(), ("--engine-process", "on")], ids=["one process", "engine process"])
def server(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "onedraw.cli.main", "serve", "fake", "--backend", "fake", "--port", "0", *request.param]
    known = {**os.environ, "ONEDRAW_API_KEY": "key"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=known)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_printed_curl_command_works(server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    line = server.stdout.readline()
    assert line.startswith("curl http://127.0.0.1:")

    def pasted(**known: str) -> Any:
        done = subprocess.run(
            ["bash", "-c", line], env={"PATH": "/usr/bin:/bin", **known}, capture_output=True, text=True, timeout=300, check=True
        )
        return json.loads(done.stdout)

    reply = pasted(ONEDRAW_API_KEY="key")
    assert reply["model"] == "fake"
    assert reply["choices"][0]["message"]["role"] == "assistant"
    assert "error" in pasted(ONEDRAW_API_KEY="wrong")


def test_a_signal_stops_it_with_status_0(server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    server.stdout.readline()
    server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=300) == 0


def test_health_says_that_the_engine_process_has_ended() -> None:
    command = [sys.executable, "-m", "onedraw.cli.main", "serve", "fake", "--backend", "fake", "--port", "0"]
    process = subprocess.Popen([*command, "--engine-process", "on"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        health = process.stdout.readline().split()[1].replace("/v1/chat/completions", "/health")
        assert httpx.get(health).status_code == 200
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (engine,) = (int(one) for one in children if b"engine_process" in Path(f"/proc/{one}/cmdline").read_bytes())
        os.kill(engine, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while httpx.get(health).status_code == 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert httpx.get(health).status_code == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=300) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("server", [()], indirect=True)
def test_a_port_in_use_is_one_line_and_no_traceback(server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    port = server.stdout.readline().partition("127.0.0.1:")[2].partition("/")[0]
    second = subprocess.run(
        [
            sys.executable,
            "-m",
            "onedraw.cli.main",
            "serve",
            "no-such-model",
            "--port",
            port,
        ],  # the port is checked before the model
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert second.returncode == 2
    assert second.stderr.splitlines()[-1].startswith(f"onedraw: --port: {port} on 127.0.0.1 is in use")
    assert "Traceback" not in second.stderr
