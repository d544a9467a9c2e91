"""`evaluate`: answers depend on the task, the options and the seed, never on how they are computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binomtest

from onedraw.build.llm import build_llm
from onedraw.contract.evaluate import Metric, evaluate, read_task
from onedraw.errors import BadSetting
from onedraw.llm.llm import LLM
from onedraw.llm.reply import Reply
from onedraw.sampling.noise import prompt_seed
from onedraw.settings import Settings
from tests.server.running import fake_llm

CHAT = [{"role": "user", "content": "Say it."}]


def task_of(path: Path, *rows: Any) -> Path:
    file = path / "task.jsonl"
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return file


def test_answers_are_those_of_the_library_whatever_runs_beside_them(tmp_path: Path) -> None:
    rows = [
        *({"prompt": f"Question {i}", "answer": "x"} for i in range(12)),
        *({"messages": CHAT, "choices": ["yes", "no, never"], "answer": "yes"} for _ in range(2)),
        {"prompt": "The sky is", "choices": [" green", " blue"], "answer": 1},
    ]
    task, options = read_task(task_of(tmp_path, *rows)), {"temperature": 1.0, "max_tokens": 6}
    found = []
    for settings in ({"max_batch": 1, "draft": ("none",), "queue_limit": 2}, {"max_batch": 16}):
        with fake_llm(**settings) as llm:
            done: list[tuple[int, int]] = []
            found.append(evaluate(llm, task, options, seed=9, notify=lambda at, total, done=done: done.append((at, total))))
            assert done == [(number, 18) for number in range(1, 19)]
            reply = llm.generate("Question 3", **options, seed=prompt_seed(9, 3))
            assert isinstance(reply, Reply)
            assert found[-1].answers[3].text == reply.text
            scored = [llm.score(CHAT, choice, ignore_eos=True) for choice in ("yes", "no, never")]
            sums = [sum(token.logprobs.logprob for token in one.tokens if token.logprobs) for one in scored]
            assert found[-1].answers[12].scores == pytest.approx(sums)
    assert found[0] == found[1]
    assert found[0].metrics[1].count == 3


def right(llm: LLM, path: Path, answer: str, **how: Any) -> bool:
    return evaluate(llm, read_task(task_of(path, {"prompt": "a", "answer": answer})), {"max_tokens": 4}, **how).answers[0].right


def test_a_reply_is_compared_as_the_option_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reply, "text", property(lambda reply: "  It is Blue.\n"))
    with fake_llm() as llm:
        assert right(llm, tmp_path, "It is Blue.")
        assert not right(llm, tmp_path, "it is blue.")
        assert right(llm, tmp_path, "it is blue.", match="ignore-case")
        assert not right(llm, tmp_path, "blue", match="ignore-case")
        assert right(llm, tmp_path, "blue", match="contains")


@pytest.mark.parametrize(("number", "count"), [(0, 5), (3, 7), (20, 20), (511, 1000)])
def test_intervals_are_wilsons(number: int, count: int) -> None:
    expected = binomtest(number, count).proportion_ci(method="wilson")
    assert Metric("m", number, count).interval == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("", "has no questions"),
        ("{", "task.jsonl:1:"),
        ([1], "must be a JSON object"),
        ({"prompt": "a"}, "answer must be a text"),
        ({"answer": "a"}, "either prompt or messages"),
        ({"prompt": "a", "answer": "b", "extra": 1}, "'extra' is unknown"),
        ({"prompt": "a", "choices": ["b"], "answer": 0}, "at least two texts"),
        ({"prompt": "a", "choices": ["b", "c"], "answer": 2}, "one of the choices"),
        ({"prompt": "a", "choices": ["b", "c"], "answer": True}, "one of the choices"),
    ],
)
def test_a_wrong_task_is_refused_with_its_line(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        read_task(task_of(tmp_path, row))


def test_a_question_that_cannot_be_asked_is_named(tmp_path: Path) -> None:
    with (
        build_llm(Settings(backend="fake", model="fake", max_context=32)) as llm,
        pytest.raises(BadSetting, match="question 2: "),
    ):
        evaluate(llm, read_task(task_of(tmp_path, *({"prompt": "a" * n, "answer": "b"} for n in (3, 99)))), {})
