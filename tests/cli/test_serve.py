"""`onedraw serve` as a process: it prints a curl command, answers it, and stops on a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn")


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "onedraw.cli.main", "serve", "fake", "--backend", "fake", "--port", "0"]
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
