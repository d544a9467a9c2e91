"""The measurement of a split says whether all ways gave the same, and fails where they did not."""

from __future__ import annotations

import json

import pytest

import bench.split_overlap
from onedraw.backends.torch.boundary import Boundary

FEW = [
    "--shape",
    "tiny",
    "--devices",
    "cpu,cpu",
    "--requests",
    "3",
    "--prompt-tokens",
    "64",
    "--new-tokens",
    "6",
    "--repeats",
    "1",
]


def test_three_ways_are_measured_and_give_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.split_overlap.main([*FEW, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same"]
    assert [one["tickets"] for one in found["measures"]] == [1, 1, 2]
    assert all(one["replies_tokens_per_second"] > 0 for one in found["measures"])


def test_a_split_that_rounds_is_noticed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = Boundary.cross
    monkeypatch.setattr(Boundary, "cross", lambda self, x, own: real(self, x.bfloat16().float(), own))
    assert bench.split_overlap.main(FEW) == 1
    assert "DIFFER" in capsys.readouterr().out
