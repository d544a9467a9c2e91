"""The cost of HTTP per token: a short run with the engine in the server's process and in its own counts tokens and CPU time."""

from __future__ import annotations

import json

import pytest

from bench.http_streams import main


@pytest.mark.parametrize("engine_process", ["off", "on"])
def test_a_short_run_counts_tokens_and_the_cpu_time_of_each_process(
    engine_process: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"--flags=--engine-process {engine_process}"
    assert main(["--streams", "4", "--new-tokens", "8", "--seconds", "0.5", "--warm-up", "0.2", "--json", flags]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tokens"] > 8
    assert result["server_us"] > 0
    assert (result["engine_us"] > 0) == (engine_process == "on")
