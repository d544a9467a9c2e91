"""`onedraw replay` and `--record`: a record on disk, the table, and an exit status that a script can trust."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.running import FAKE, Terminal

SHORT = ("--max-tokens", "12", "--ignore-eos", "--seed", "7")


@pytest.fixture
def folder(terminal: Terminal, tmp_path: Path) -> Path:
    for prompt in ("hello", "one two one two one"):
        assert terminal.run("generate", *FAKE, prompt, *SHORT, "--record", str(tmp_path / "records")) == 0, terminal.err
    return tmp_path / "records"


def change_a_token(folder: Path) -> None:
    file = folder / "requests-000002.jsonl"
    line = json.loads(file.read_text())
    assert line["reply"][4] != 65, "the changed token must differ"
    line["reply"][4] = 65
    file.write_text(json.dumps(line) + "\n")


def test_a_request_recorded_by_generate_replays_with_the_same_tokens(terminal: Terminal, folder: Path) -> None:
    assert terminal.run("replay", str(folder), "--backend", "fake", "--draft", "none") == 0, terminal.err
    assert terminal.out.startswith("2 requests, 24 tokens: 2 the same, 0 different, 0 not run\n")


def test_one_file_can_be_replayed(terminal: Terminal, folder: Path) -> None:
    report = terminal.json("replay", str(folder / "requests-000002.jsonl"), "--backend", "fake", "--max-batch", "2")
    assert (report["holds"], report["requests"], report["same"], report["tokens"]) == (True, 1, 1, 12)


def test_a_difference_is_shown_and_is_status_1(terminal: Terminal, folder: Path) -> None:
    change_a_token(folder)
    assert terminal.run("replay", str(folder), "--backend", "fake") == 1
    (row,) = [line for line in terminal.out.splitlines() if line.startswith("requests-000002.jsonl:1")]
    assert '65 "b"' in row
    assert row.endswith("another token")
    assert "1 the same, 1 different" in terminal.out
    assert terminal.run("replay", str(folder), "--backend", "fake", "--json") == 1
    verdict = json.loads(terminal.out)["verdicts"][1]
    assert (verdict["result"], verdict["index"], verdict["recorded"]) == ("different", 4, 65)


def test_a_damaged_line_is_named_and_the_others_are_replayed(terminal: Terminal, folder: Path) -> None:
    file = folder / "requests-000001.jsonl"
    file.write_text(file.read_text() + "nonsense\n")
    assert terminal.run("replay", str(folder), "--backend", "fake") == 0
    assert f"skipped {file}:2: not a record" in terminal.out
    assert "2 requests, 24 tokens: 2 the same" in terminal.out
    (fault,) = terminal.json("replay", str(folder), "--backend", "fake")["damaged"]
    assert fault.startswith(f"{file}:2: ")


def test_a_different_fingerprint_is_reported(terminal: Terminal, folder: Path) -> None:
    file = folder / "requests-000001.jsonl"
    file.write_text(file.read_text().replace('"fingerprint":"', '"fingerprint":"other-'))
    assert terminal.run("replay", str(folder), "--backend", "fake") == 0
    assert "equal tokens are promised only if these are equal" in terminal.out


def test_records_of_two_models_need_a_name(terminal: Terminal, folder: Path) -> None:
    file = folder / "requests-000001.jsonl"
    file.write_text(file.read_text().replace('"source":"fake"', '"source":"other"'))
    assert terminal.run("replay", str(folder), "--backend", "fake") == 2
    assert "several models (fake, other)" in terminal.err
    assert terminal.run("replay", str(folder), "--backend", "fake", "--model", "fake") == 0


def test_nothing_is_recorded_unless_a_folder_is_named(terminal: Terminal, tmp_path: Path) -> None:
    assert terminal.run("generate", *FAKE, "hello", *SHORT, "--record-text") == 2
    assert "--record-text: only with --record" in terminal.err
    assert terminal.run("replay", str(tmp_path), "--backend", "fake") == 2
    assert "holds no records yet" in terminal.err
