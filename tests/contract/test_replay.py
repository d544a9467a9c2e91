"""Replay gives the same tokens under any settings, and finds edited records."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onedraw.build.llm import build_llm
from onedraw.contract.record import Record, RecordingLLM, RecordWriter, read_records
from onedraw.contract.replay import judge, replay
from onedraw.llm.llm import LLM
from onedraw.llm.request_options import RequestOptions, make_generation
from onedraw.settings import Settings
from onedraw.types import Row, RowOutcome, SampledToken
from tests.server.running import backend_of

TRAINED = Path(__file__).parents[1] / "fixtures" / "trained"
FAKE = Settings(backend="fake", model="fake")
TINY = Settings(model=str(TRAINED / "trained_qwen3"), threads=1, self_check=False, max_context=256, draft=("none",))
PROMPTS = ("one two three one two three one", "hello", "la la la la la la la la", "x")
LAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1},
    {"temperature": 1.0, "frequency_penalty": -1.5, "stop": ("e",)},
    {"temperature": 1.2, "min_p": 0.02, "logit_bias": {5: -2.0}, "checksums": True},
)


def record(settings: Settings, folder: Path) -> list[Record]:
    with build_llm(settings) as inner:
        llm = RecordingLLM(inner, RecordWriter(folder), source=settings.model)
        for number, text in enumerate(PROMPTS):
            for law in LAWS:
                asked = make_generation(RequestOptions.of(max_tokens=24, seed=number, **law), llm=llm, prompt=llm.encode(text))
                (reply,) = inner.run(asked)
                # Right at first, then wrong, so that drafts from it are kept and rejected.
                llm.run(replace(asked, predicted=(*reply.token_ids[:9], *reply.token_ids[:15])))
    return read_records(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"draft": ("none",), "max_batch": 1, "prefix_cache": False},
        {"draft": ("ngram", "prediction"), "draft_tokens": 4, "max_batch": 16},
        {"draft": ("auto",), "draft_tokens": 3, "max_batch": 3, "turn_tokens": 8, "page_size": 4},
    ],
    ids=["plain", "drafted crowd", "small turns"],
)
def test_settings_never_change_a_token(changes: dict[str, Any], tmp_path: Path) -> None:
    records = record(FAKE, tmp_path)
    with build_llm(replace(FAKE, **changes)) as llm:
        report = replay(records, llm)
    assert report.holds
    assert len(report.of("same")) == len(PROMPTS) * len(LAWS)
    assert report.recorded_by == (report.fingerprint,)
    if changes["max_batch"] > 1:
        assert 0 < report.counted.accepted_tokens < report.counted.draft_tokens
        assert report.counted.mixed_steps > 0


def test_a_drafter_does_not_change_a_real_models_tokens(tmp_path: Path) -> None:
    records = record(TINY, tmp_path)
    drafting = replace(TINY, draft=(str(TRAINED / "trained_dflash_qwen3"), "ngram"), draft_tokens=4, max_batch=4)
    with build_llm(drafting) as llm:
        report = replay(records, llm)
    assert report.holds, report.of("different")
    assert 0 < report.counted.accepted_tokens < report.counted.draft_tokens


def edited(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the sixth record."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    change(lines[5])
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda line: line["reply"].__setitem__(7, line["reply"][7] ^ 1), "another token"),
        (lambda line: line["reply"].append(3), "ended by"),
        (lambda line: line["reply"].pop(), "ended by"),
        (lambda line: line.__setitem__("finish", "stop"), "ended by"),
        (lambda line: line["ask"]["params"].__setitem__("seed", 99), "another token"),
    ],
    ids=["a token", "longer", "shorter", "ending", "seed"],
)
def test_a_record_that_was_edited_is_found(change: Callable[[dict[str, Any]], object], expected: str, tmp_path: Path) -> None:
    record(FAKE, tmp_path)
    edited(tmp_path / "requests-000001.jsonl", change)
    with build_llm(FAKE) as llm:
        report = replay(read_records(tmp_path), llm)
    (different,) = report.of("different")
    assert different.where == "requests-000001.jsonl:6"
    assert expected in different.note
    assert not report.holds
    assert len(report.of("same")) == len(report.verdicts) - 1


def test_the_same_token_with_other_scores_is_a_difference(tmp_path: Path) -> None:
    """A difference of 1e-7 almost never changes a token, so only the checksums show it."""
    records = record(FAKE, tmp_path)
    summed = next(r for r in records if r.checksums is not None)
    assert summed.checksums is not None
    lying = replace(summed, checksums=(*summed.checksums[:3], 1, *summed.checksums[4:]))
    with build_llm(FAKE) as llm:
        (verdict,) = replay([lying], llm).verdicts
    assert (verdict.result, verdict.index, verdict.note) == ("different", 3, "the same token with other scores")


def test_a_fault_of_the_engine_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the second of the kept drafts of a step is lost."""
    records = record(FAKE, tmp_path)
    with build_llm(replace(FAKE, draft_tokens=4)) as llm:
        backend = backend_of(llm)
        run = backend.run

        def faulty(row: Row) -> RowOutcome:
            outcome = run(row)
            if len(outcome.kept) < 2:
                return outcome
            return replace(outcome, sampled=(outcome.sampled[0], SampledToken(7), *outcome.sampled[2:]))

        monkeypatch.setattr(backend, "run", faulty)
        report = replay(records, llm)
    assert report.of("different")


def test_a_request_that_cannot_run_is_never_the_same(tmp_path: Path) -> None:
    records = record(FAKE, tmp_path)
    unwritten = replace(records[0], generation=None, unwritten="a thing without a written form")
    with build_llm(replace(FAKE, max_context=30)) as llm:
        report = replay([*records, unwritten], llm)
    notes = {verdict.note for verdict in report.of("not run")}
    assert not report.holds
    assert "a thing without a written form" in notes
    assert any("over the context of 30" in note for note in notes)


def test_several_runs_of_one_record_get_the_same_verdict(tmp_path: Path) -> None:
    records = record(FAKE, tmp_path)[:2]
    with build_llm(FAKE) as llm:
        assert judge(records[0], llm.run(_generation(records[0], llm))[0]).result == "same"
        assert judge(records[0], llm.run(_generation(records[1], llm))[0]).result == "different"


def _generation(given: Record, llm: LLM) -> Any:
    assert given.generation is not None
    return given.generation
