"""The benchmark of splits compares the tokens of all layouts, and fails if they differ."""

from __future__ import annotations

import json
import threading

import pytest

import bench.split_overlap
from bench.split_overlap import Answer
from onedraw.backends.torch.runner.pipeline import StageBoundary

ARGUMENTS = [
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


def test_three_layouts_are_measured_and_give_the_same_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.split_overlap.main([*ARGUMENTS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same"]
    assert found["compared"] == "tokens and checksums"
    assert [one["max_in_flight"] for one in found["measures"]] == [1, 1, 2]
    assert all(one["replies_tokens_per_second"] > 0 for one in found["measures"])


def test_a_split_that_rounds_between_stages_fails_the_benchmark(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = StageBoundary.cross
    monkeypatch.setattr(StageBoundary, "cross", lambda self, x, *args: real(self, x.bfloat16().float(), *args))
    assert bench.split_overlap.main(ARGUMENTS) == 1
    assert "DIFFER" in capsys.readouterr().out


def test_a_cpu_and_a_gpu_are_compared_by_tokens_alone() -> None:
    done = threading.Event()
    one, low_bits, other = Answer([1, 2], [7], done), Answer([1, 2], [8], done), Answer([1, 3], [7], done)
    compare = bench.split_overlap.compare_answers
    assert compare([[one], [low_bits]], ["cuda:0", "cpu"]).same
    assert not compare([[one], [low_bits]], ["cuda:0", "cuda:0"]).same
    assert str(compare([[one], [other]], ["cpu", "cuda:1"])) == "tokens DIFFER"
