"""Prompts and records as training data, and the counting of decode steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onedraw.contract.record import Record
from onedraw.errors import BadSetting
from onedraw.llm.reply_stream import Generation
from onedraw.training.acceptance import ReplyCount, acceptance
from onedraw.training.builtin_prompts import builtin_prompts
from onedraw.training.data import BUILTIN, NamedPrompt, read_data, split_records
from onedraw.types import SamplingParams

ROOT = Path(__file__).parents[2]


def record(number: int, prompt: tuple[int, ...], reply: tuple[int, ...] = (1, 2, 3)) -> Record:
    generation = Generation(prompt, SamplingParams(seed=number))
    return Record(f"r{number}", 0.0, "m", "m", "f", generation, reply, "length", None)


def test_prompt_files_have_messages_or_texts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "Hello"}]
    path.write_text(f'{json.dumps({"messages": messages, "kind": "chat"})}\n\n{{"prompt": "Once"}}\n')
    assert read_data(str(path)) == [NamedPrompt(messages, "chat"), NamedPrompt("Once")]


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"prompt": "", "kind": "x"}', '{"prompt": "x", "messages": []}', '{"messages": [1]}']
)
def test_a_line_that_is_no_prompt_is_refused_with_its_place(line: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "Once"}}\n{line}\n')
    with pytest.raises(BadSetting, match=r"prompts\.jsonl:2: "):
        read_data(str(path))


def test_missing_data_is_refused_with_what_may_be_given(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=r"name records, a \.jsonl file of prompts, or builtin"):
        read_data(str(tmp_path / "nothing"))


def test_replies_to_one_prompt_are_all_trained_on_or_all_held_out() -> None:
    records = [record(number, (number % 40,)) for number in range(160)]
    training, held_out = split_records(records)
    prompts = [{one.generation.prompt for one in part if one.generation} for part in (training, held_out)]
    assert prompts[0].isdisjoint(prompts[1])
    assert len(training) + len(held_out) == 160
    assert 0 < len(prompts[1]) < 10
    assert split_records(records[::-1])[1] == held_out[::-1]


def test_data_of_a_single_prompt_cannot_be_split() -> None:
    with pytest.raises(BadSetting, match="fewer than two different prompts"):
        split_records([record(1, (5,)), record(2, (5,))])


def test_builtin_prompts_are_many_of_six_kinds_and_none_is_measured_with() -> None:
    prompts = list(builtin_prompts())
    assert len(prompts) == len({text for _, text in prompts}) == len(read_data(BUILTIN)) > 500
    assert {kind for kind, _ in prompts} == {"chat", "code", "edit", "quote", "json", "math"}
    routed = "conversations.jsonl"  # With these the routing of replicas is measured, not drafters.
    measured = " ".join(path.read_text() for path in (ROOT / "bench" / "prompts").iterdir() if path.name != routed)
    assert not [text for _, text in prompts if json.dumps(text)[1:-1] in measured]


def test_a_step_ends_with_each_token_that_is_no_draft_and_with_the_reply() -> None:
    ids = tuple(range(6))
    assert ReplyCount(ids, (False,) * 6).steps == 5
    assert ReplyCount(ids, (False, True, True, False, True, False)).steps == 2
    assert ReplyCount(ids, (False, True, True, False, True, True)).steps == 2  # a draft ended the reply
    assert ReplyCount((1,), (False,)).steps == 0


def test_tokens_per_step_has_an_interval_around_it() -> None:
    counts = [ReplyCount(tuple(range(n)), (False, *([True, False] * n))[:n]) for n in (9, 11, 13)]
    counts.append(ReplyCount((1, 2, 3), (False,) * 3))
    found = acceptance(counts)
    assert (found.replies, found.tokens) == (4, 32)
    assert found.mean == pytest.approx(32 / 17)
    assert 1 <= found.low < found.mean < found.high <= 2
