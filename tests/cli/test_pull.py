"""`onedraw pull`: a name becomes a path."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.running import Terminal


def test_a_local_model_is_its_own_path(terminal: Terminal, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert terminal.run("pull", str(model)) == 0
    assert terminal.out == f"{model}\n"


@pytest.mark.parametrize(("name", "near"), [("smolm2", "smollm2"), ("Qwen3-0.6", "qwen3-0.6b"), ("llama-3.2-1b", "llama3.2-1b")])
def test_an_unknown_name_gets_the_nearest_one(name: str, near: str, terminal: Terminal, tmp_path: Path) -> None:
    assert terminal.run("pull", name, "--cache-dir", str(tmp_path)) == 1
    assert f"Did you mean {near}?" in terminal.err


def test_an_unknown_name_lists_the_built_in_models(terminal: Terminal, tmp_path: Path) -> None:
    assert terminal.run("pull", "no-such-model", "--cache-dir", str(tmp_path)) == 1
    assert "smollm2" in terminal.err
    assert terminal.out == ""
