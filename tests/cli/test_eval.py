"""`onedraw eval` and `onedraw batch`: what they print, and their exit status."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.running import FAKE, Terminal

MODEL = ("--model", *FAKE)


def test_an_evaluation_prints_what_reproduces_it(terminal: Terminal, tmp_path: Path) -> None:
    task, samples = tmp_path / "sky.jsonl", tmp_path / "samples.jsonl"
    task.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a", "choices": ["b", "c"], "answer": "c"}\n')
    found = terminal.json("eval", str(task), *MODEL, "--seed", "4", "--top-p", "0.9", "--samples", str(samples))
    assert (found["seed"], found["task"], found["options"]) == (4, "sky", {"temperature": 0.0, "max_tokens": 64, "top_p": 0.9})
    assert [one["name"] for one in found["metrics"]] == ["match", "choice", "choice per character"]
    assert len(samples.read_text().splitlines()) == 2
    assert terminal.run("eval", str(task), *MODEL) == 0
    assert found["fingerprint"] in terminal.out
    assert found["task_sha256"][:16] in terminal.out
    assert terminal.run("eval", str(tmp_path / "none"), *MODEL) == 2
    assert "cannot read" in terminal.err


def test_a_batch_without_a_server(terminal: Terminal, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies = [{"prompt": "a", "max_tokens": 3}, {"prompt": "b", "max_tokens": 3, "seed": 1}, {"prompt": 7}]
    rows = [{"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body} for n, body in enumerate(bodies)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    found = terminal.json("batch", str(source), str(output), *MODEL)
    assert (found["lines"], found["completed"], found["errors"]) == (2, 2, None)
    before = output.read_bytes()
    assert terminal.run("batch", str(source), str(output), *MODEL, "--max-batch", "1") == 0
    assert output.read_bytes() == before
    assert "2 completed, 0 failed" in terminal.err
    assert terminal.run("batch", str(source), str(output), *MODEL, "--seed", "1") == 0
    assert output.read_bytes() != before
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert terminal.run("batch", str(source), str(output), *MODEL) == 1
    assert json.loads((tmp_path / "out.errors.jsonl").read_text())["response"]["body"]["error"]["param"].startswith("prompt")
    (tmp_path / "out.jsonl.partial").write_text("onedraw batch results: another\n")
    assert terminal.run("batch", str(source), str(output), *MODEL) == 2
    assert "results of another input, seed or model" in terminal.err
    assert terminal.run("batch", str(source), str(source), *MODEL) == 2
    source.write_text("{")
    assert terminal.run("batch", str(source), str(output), *MODEL) == 2
    assert "line 1: " in terminal.err
