"""The benchmark of logprobs and constraints, run on the fake backend."""

from __future__ import annotations

import json

import pytest

from bench.requested import main


def test_every_kind_of_request_is_measured_beside_plain_ones(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch", "1,2", "--mixed", "3", "--prompt-tokens", "8", "--new-tokens", "12", "--repeats", "1"]
    assert main(["fake", "--backend", "fake", *sizes, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(cost["requested"], cost["batch"]) for cost in found] == [
        *((name, batch) for batch in (1, 2) for name in ("plain, T .8", "logprobs 5, T .8", "plain, T 1", "JSON schema, T 1")),
        ("plain, T 1", 3),
        ("one of them constrained", 3),
    ]
    assert all(cost["tokens_per_second"] >= 0 for cost in found)
    assert found[0]["share"] == 1
