"""Records: finished replies are on disk, complete and in order, and nothing else."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onedraw.build.llm import build_llm
from onedraw.contract.record import RecordingLLM, RecordWriter, read_records
from onedraw.errors import BadSetting
from onedraw.llm.reply import Reply
from onedraw.llm.reply_stream import Generation
from onedraw.llm.request_options import RequestOptions, make_generation
from onedraw.settings import Settings
from onedraw.types import SamplingParams


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[RecordingLLM]:
    with build_llm(Settings(backend="fake", model="fake")) as inner:
        yield RecordingLLM(inner, RecordWriter(tmp_path), source="fake")


def generation(llm: RecordingLLM, text: str = "hello", **options: Any) -> Generation:
    return make_generation(RequestOptions.of(**{"max_tokens": 12, **options}), llm=llm, prompt=llm.encode(text))


def test_a_record_holds_request_and_reply(llm: RecordingLLM, tmp_path: Path) -> None:
    asked = generation(llm, seed=5, temperature=0.7, logit_bias={3: -1.5}, stop=("e",), checksums=True)
    (reply,) = llm.run(asked)
    (record,) = read_records(tmp_path)
    assert record.generation == asked
    assert (record.reply, record.finish, record.stop_reason) == (tuple(reply.token_ids), reply.finish, reply.stop_reason)
    assert record.checksums == tuple(choice.checksum for choice in reply.tokens)
    assert (record.model, record.source, record.fingerprint) == ("fake", "fake", llm.card.fingerprint)
    assert record.where == "requests-000001.jsonl:1"


def test_every_choice_has_its_own_record(llm: RecordingLLM, tmp_path: Path) -> None:
    replies = llm.run(generation(llm, "one", n=3, seed=1), generation(llm, "two", n=2, seed=2))
    by_reply = {
        (r.generation.prompt, r.generation.params.seed): r.reply for r in read_records(tmp_path) if r.generation is not None
    }
    assert by_reply == {(r.prompt_ids, r.seed): tuple(r.token_ids) for r in replies}
    assert len(by_reply) == 5


def test_asyncio_streams_are_recorded_too(llm: RecordingLLM, tmp_path: Path) -> None:
    asked = generation(llm, seed=3)

    async def both() -> list[Reply]:
        return [*await llm.arun(asked), *llm.run(asked)]

    replies = asyncio.run(both())
    first, second = read_records(tmp_path)
    assert first.reply == second.reply == tuple(replies[0].token_ids)


def test_the_record_is_on_disk_before_the_last_piece(llm: RecordingLLM, tmp_path: Path) -> None:
    for piece in llm.pieces(llm.prepare(generation(llm))):
        written = (tmp_path / "requests-000001.jsonl").read_bytes().count(b"\n")
        assert written == (piece.finish is not None)


def test_a_cancelled_reply_is_not_recorded(llm: RecordingLLM, tmp_path: Path) -> None:
    stream = llm.pieces(llm.prepare(generation(llm, max_tokens=200, ignore_eos=True)))
    next(stream)
    stream.close()
    with pytest.raises(BadSetting, match="no records yet"):
        read_records(tmp_path)


def test_text_is_written_only_on_request(tmp_path: Path) -> None:
    with build_llm(Settings(backend="fake", model="fake")) as inner:
        for text in (False, True):
            folder = tmp_path / str(text)
            llm = RecordingLLM(inner, RecordWriter(folder, text=text), source="fake")
            (reply,) = llm.run(generation(llm, "a secret prompt", seed=1))
            (line,) = (folder / "requests-000001.jsonl").read_text().splitlines()
            assert ("a secret prompt" in line) == text
            assert read_records(folder)[0].text == (("a secret prompt", reply.text) if text else None)


def test_a_full_disk_loses_the_record_and_not_the_reply(
    llm: RecordingLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    caplog.set_level(logging.ERROR, logger="onedraw.contract.record")  # a server of another test may have silenced the logger
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        (reply,) = llm.run(generation(llm))
    assert reply.finish is not None
    assert "is not recorded: No space left on device" in caplog.text


def _fails_halfway(monkeypatch: pytest.MonkeyPatch, *, cut: bool) -> None:
    """Make the disk full after half of the next write; `cut`: whether the file can be truncated again."""
    write = os.write

    def half(file: int, data: bytes) -> int:
        monkeypatch.setattr(os, "write", full)
        return write(file, data[: len(data) // 2])

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    if not cut:
        monkeypatch.setattr(os, "ftruncate", full)


@pytest.mark.parametrize("cut", [True, False])
def test_a_disk_that_was_full_loses_only_the_records_of_that_time(
    llm: RecordingLLM, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, cut: bool
) -> None:
    """Regression: the next record was appended to half a line, and `replay` refused the whole folder."""
    caplog.set_level(logging.WARNING, logger="onedraw.contract.record")
    replies = llm.run(generation(llm, seed=1))
    with monkeypatch.context() as patched:
        _fails_halfway(patched, cut=cut)
        llm.run(generation(llm, seed=2))
        llm.run(generation(llm, seed=3))
    replies += llm.run(generation(llm, seed=4))
    records = read_records(tmp_path)
    assert [record.reply for record in records] == [tuple(reply.token_ids) for reply in replies]
    assert [record.generation.params.seed for record in records if record.generation] == [1, 4]
    assert ("requests-000001.jsonl:2: an incomplete last line" in caplog.text) == (not cut)


# ---------------------------------------------------------------------------------------------- files


def test_files_are_rotated_by_size_and_read_in_order(tmp_path: Path) -> None:
    recorder = RecordWriter(tmp_path, size=200)
    for number in range(30):
        recorder.write({"number": number, "padding": "x" * 40})
    recorder.write({"number": 30, "padding": "x" * 400})  # larger than the size limit, so it has a file of its own
    recorder.close()
    files = sorted(tmp_path.iterdir())
    lines = [json.loads(line)["number"] for file in files for line in file.read_text().splitlines()]
    assert lines == list(range(31))
    assert len(files) > 10
    assert all(file.stat().st_size <= 200 for file in files[:-1])


def test_a_bounded_folder_keeps_the_newest_records(tmp_path: Path) -> None:
    recorder = RecordWriter(tmp_path, size=200, most=1000)
    for number in range(100):
        recorder.write({"number": number, "padding": "x" * 40})
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 1000
    with pytest.raises(ValueError, match=r"over the 200 of a file"):
        recorder.write({"number": 100, "padding": "x" * 400})
    recorder.close()
    lines = [json.loads(line)["number"] for file in sorted(tmp_path.iterdir()) for line in file.read_text().splitlines()]
    assert lines == list(range(lines[0], 100))
    assert len(lines) > 8
    again = RecordWriter(tmp_path, size=200, most=400)  # a smaller bound, at the next start
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 200
    again.close()


def test_a_learned_record_has_tokens_and_how_they_were_sampled_and_nothing_else(tmp_path: Path) -> None:
    """Stop strings, schemas, biases and labels may tell about a client; a drafter needs none of them."""
    wanted = {"temperature": 0.7, "top_p": 0.9, "seed": 3, "stop": ("secret",), "logit_bias": {5: 1.0}, "bad_words": ("private",)}
    with build_llm(Settings(backend="fake", model="fake")) as inner:
        folders = tmp_path / "whole", tmp_path / "learned"
        whole, learning = RecordWriter(folders[0]), RecordWriter(folders[1], size=10_000, most=100_000)
        llm = RecordingLLM(inner, whole, source="fake", learning=learning)
        asked = replace(generation(llm, **wanted, guided_regex="[ab]{3}"), label="client-7")
        (reply,) = llm.run(asked)
        given = generation(llm, seed=4, reply_ids=(1, 2, 3), max_tokens=3)  # scored, not sampled
        llm.run(given)
    assert [record.generation for record in read_records(folders[0])] == [asked, given]
    (record,) = read_records(folders[1])
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=12)
    assert record.generation == Generation(asked.prompt, params)
    assert (record.id, record.reply, record.stop_reason) == ("learned", tuple(reply.token_ids), None)
    text = (folders[1] / record.where.split(":")[0]).read_text()
    assert not any(word in text for word in ("secret", "private", "client-7", "[ab]", 'logit_bias":[[5'))


@pytest.mark.parametrize("all_of_it", [False, True])
def test_records_are_kept_after_someone_has_deleted_the_file_or_its_folder(tmp_path: Path, all_of_it: bool) -> None:
    folder = tmp_path / "records"
    writer = RecordWriter(folder)
    writer.write({"number": 1})
    shutil.rmtree(folder)
    if not all_of_it:
        folder.mkdir()
    for number in (2, 3):
        writer.write({"number": number})
    assert (folder / "requests-000001.jsonl").read_bytes() == b'{"number":2}\n{"number":3}\n'


def test_a_new_process_writes_to_a_new_file(tmp_path: Path) -> None:
    """The last file may end with half a line, and another process may still write to it."""
    first, second = RecordWriter(tmp_path), RecordWriter(tmp_path)
    first.write({"by": 1})
    second.write({"by": 2})
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["requests-000001.jsonl", "requests-000002.jsonl"]


def test_lines_written_by_many_threads_are_complete(tmp_path: Path) -> None:
    recorder = RecordWriter(tmp_path, size=2000)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: recorder.write({"number": number, "padding": "y" * 99}), range(100)))
    lines = [json.loads(line)["number"] for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    assert sorted(lines) == list(range(100))


def test_only_the_owner_may_read_records(tmp_path: Path) -> None:
    RecordWriter(tmp_path / "new").write({})
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "new" / "requests-000001.jsonl").stat().st_mode) == 0o600


def test_an_incomplete_last_line_is_skipped_with_a_warning(
    llm: RecordingLLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="onedraw.contract.record")
    llm.run(generation(llm), generation(llm))
    file = tmp_path / "requests-000001.jsonl"
    file.write_bytes(file.read_bytes()[:-7])
    assert len(read_records(file)) == 1
    assert "incomplete last line" in caplog.text


@pytest.mark.parametrize("damage", [b"nonsense", b"", b"[1]", b'{"version": 9}', b"\xff", b"[" * 100_000])
def test_a_damaged_line_is_named_and_the_others_are_read(llm: RecordingLLM, tmp_path: Path, damage: bytes) -> None:
    llm.run(*(generation(llm, seed=seed) for seed in range(3)))
    file = tmp_path / "requests-000001.jsonl"
    first, _, last, end = file.read_bytes().split(b"\n")
    file.write_bytes(b"\n".join((first, damage, last, end)))
    named: list[str] = []
    assert [record.where for record in read_records(tmp_path, damaged=named.append)] == [f"{file.name}:1", f"{file.name}:3"]
    (fault,) = named
    assert fault.startswith(f"{file}:2: not a record (")


def test_a_number_that_is_no_token_costs_its_line_alone(llm: RecordingLLM, tmp_path: Path) -> None:
    """An infinite number ended `onedraw replay` with an unexpected error."""
    llm.run(generation(llm, seed=1), generation(llm, seed=2))
    file = tmp_path / "requests-000001.jsonl"
    first, second = file.read_text().splitlines()
    file.write_text(json.dumps({**json.loads(first), "reply": [math.inf]}) + f"\n{second}\n")
    named: list[str] = []
    assert [record.where for record in read_records(tmp_path, damaged=named.append)] == [f"{file.name}:2"]
    assert "OverflowError" in named[0]


def test_an_edited_line_is_refused(llm: RecordingLLM, tmp_path: Path) -> None:
    llm.run(generation(llm))
    file = tmp_path / "requests-000001.jsonl"
    line = json.loads(file.read_text())
    for changed in ({"ask": {**line["ask"], "n": 5}}, {"checksums": [1]}, {"text": ""}):
        file.write_text(json.dumps({**line, **changed}) + "\n")
        with pytest.raises(BadSetting, match="not a record"):
            read_records(tmp_path)
    file.write_text(100_000 * "[" + "\n")
    with pytest.raises(BadSetting, match="not a record"):
        read_records(tmp_path)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [("{}", "KeyError"), ("nonsense", "not a record"), ('{"version": 9}', "version 9"), ("[]", "not a record")],
)
def test_a_line_that_is_not_a_record_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    file = tmp_path / "requests-000001.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(BadSetting, match=rf"requests-000001.jsonl:1.*{complaint}"):
        read_records(tmp_path)


def test_a_folder_that_is_not_writable_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadSetting, match="--record: cannot write to"):
        RecordWriter(tmp_path / "file")
    with pytest.raises(BadSetting, match="no records at"):
        read_records(tmp_path / "nowhere")
