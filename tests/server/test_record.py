"""Requests recorded by a server can be replayed under other settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onedraw.build.llm import build_llm
from onedraw.contract.record import RecordingLLM, RecordWriter, read_records
from onedraw.contract.replay import replay
from onedraw.settings import Settings
from tests.server.running import fake_llm, serving

HELLO = [{"role": "user", "content": "Hello, my secret."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": ["a", "la la la la la"], "n": 2, "max_tokens": 20}),
    ("/v1/completions", {"prompt": "a", "stop": ["e", "t"], "max_tokens": 40, "logit_bias": {"7": -3.5}}),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 24, "stream": True}),
    ("/v1/chat/completions", {"messages": HELLO, "tools": [TOOL], "tool_choice": "required", "max_tokens": 900}),
    ("/v1/chat/completions", {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    ("/v1/chat/completions", {"messages": HELLO, "guided_regex": "[ab]{3,9}c", "max_tokens": 30}),
    ("/v1/chat/completions", {"messages": HELLO, "guided_choice": ["yes", "no"], "max_tokens": 30}),
)


def test_every_kind_of_recorded_request_can_be_replayed(tmp_path: Path) -> None:
    with fake_llm(max_context=2048) as inner:
        llm = RecordingLLM(inner, RecordWriter(tmp_path), source="fake")
        with serving(llm) as served:
            for path, asked in ASKED:
                answer = served.post(path, seed=5, **asked)
                assert answer.status_code == 200, answer.text
    records = read_records(tmp_path)
    assert len(records) == 10
    assert [record.unwritten for record in records] == [None] * 10
    assert "secret" not in "".join(file.read_text() for file in tmp_path.iterdir())
    again = Settings(backend="fake", model="fake", max_context=2048, max_batch=5, draft=("ngram",), draft_tokens=3)
    with build_llm(again) as other:
        report = replay(records, other)
    assert report.holds, [verdict for verdict in report.verdicts if verdict.result != "same"]
    assert report.counted.mixed_steps > 0
