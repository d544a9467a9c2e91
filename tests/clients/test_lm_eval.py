"""lm-eval's API models, unmodified: loglikelihood, rolling loglikelihood and generation, with the server's tokenizer. The samples
are the same at any concurrency, with and without drafts, and after a restart; `onedraw eval` has the same scores."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import PYTHON, ROOT, Server, running

TASKS = ROOT / "examples/evals"
MODEL = str(ROOT / "tests/fixtures/trained/trained_qwen3")
QUESTIONS = 20
Evaluate = Callable[..., dict[str, list[dict[str, Any]]]]


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Evaluate:
    """Run tasks and return their samples."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    monkeypatch.chdir(TASKS)  # The tasks name their data by a relative path.

    def run(server: Server, *tasks: str, chat: bool = False, concurrent: int) -> dict[str, list[dict[str, Any]]]:
        monkeypatch.setenv("OPENAI_API_KEY", server.key)
        kind, path = ("local-chat-completions", "chat/completions") if chat else ("local-completions", "completions")
        given = {
            **{"model": server.model, "base_url": f"{server.base}/{path}", "auth_token": server.key},
            **{"num_concurrent": concurrent, "max_length": 512, "timeout": 300, "max_retries": 1},
        }
        found = lm_eval.simple_evaluate(
            model=kind,
            model_args=given if chat else {**given, "tokenizer_backend": "remote"},
            tasks=list(tasks),
            task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
            apply_chat_template=chat,
            log_samples=True,
            bootstrap_iters=0,
        )
        assert found is not None
        samples: dict[str, list[dict[str, Any]]] = found["samples"]
        assert {name: len(rows) for name, rows in samples.items()} == dict.fromkeys(tasks, QUESTIONS)
        return samples

    return run


def responses(samples: dict[str, list[dict[str, Any]]]) -> str:
    """What the server answered, as text that shows every bit of the numbers."""
    return json.dumps({name: [row["resps"] for row in rows] for name, rows in sorted(samples.items())})


def test_samples_are_the_same_at_any_concurrency_with_any_drafts_and_after_a_restart(evaluate: Evaluate, tmp_path: Path) -> None:
    tasks = ("onedraw_choices", "onedraw_rolling", "onedraw_replies")
    flags = ("--max-context", "512", "--no-self-check")
    with running(*flags, "--max-batch", "16", model=(MODEL,)) as server:
        alone = evaluate(server, *tasks, concurrent=1)
        assert responses(evaluate(server, *tasks, concurrent=64)) == responses(alone)
        chats = evaluate(server, "onedraw_replies", chat=True, concurrent=1)
    with running(*flags, "--draft", "none", model=(MODEL,)) as server:
        assert responses(evaluate(server, *tasks, concurrent=64)) == responses(alone)
        assert responses(evaluate(server, "onedraw_replies", chat=True, concurrent=64)) == responses(chats)
    samples = tmp_path / "samples.jsonl"
    command = [
        PYTHON,
        "-m",
        "onedraw",
        "eval",
        str(TASKS / "questions.jsonl"),
        "--model",
        MODEL,
        "--samples",
        str(samples),
        *flags,
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    ours = [json.loads(line) for line in samples.read_text().splitlines()]
    for row, one in zip(alone["onedraw_choices"], ours, strict=True):
        assert [answer[0][0] for answer in row["resps"]] == pytest.approx(one["scores"], rel=1e-12)
        assert (row["acc"], row["acc_norm"]) == (one["right"], one["right_normalized"])
    assert len({row["resps"][0][0] for row in alone["onedraw_replies"]}) > QUESTIONS // 2
