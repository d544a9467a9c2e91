"""`onedraw prove`: the table, and an exit status that a script can trust."""

from __future__ import annotations

import pytest

import onedraw.contract.prove
from onedraw.contract.prove import ProofRow, ProofTable
from tests.cli.running import FAKE, Terminal


def test_the_table_has_a_line_per_variation(terminal: Terminal) -> None:
    assert terminal.run("prove", *FAKE, "--quick", "--threads", "1") == 0
    lines = dict(line.rsplit("  ", 1) for line in terminal.out.splitlines()[3:])
    found = {name.strip(): result.strip() for name, result in lines.items()}
    assert found["preempted, few pages"] == "same"
    assert found["2 threads"] == "not exercised"


def test_the_json_object_has_the_same_rows(terminal: Terminal) -> None:
    report = terminal.json("prove", *FAKE, "--quick")
    assert report["holds"] is True
    assert {f["result"] for f in report["findings"]} <= {"same", "not exercised"}


def test_any_difference_is_status_1(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    table = ProofTable("m", "f", requests=1, tokens=1, findings=(ProofRow("batched", "different", request=0, position=9),))
    monkeypatch.setattr(onedraw.contract.prove, "prove", lambda *args, **kwargs: table)
    assert terminal.run("prove", *FAKE) == 1
    assert "different (first at request 0, position 9)" in terminal.out
