"""`bench --plot`: an image if matplotlib is installed, otherwise an error with the command that installs it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.running import FAKE, Terminal

GIVEN = ("bench", *FAKE, "--batch", "1,2", "--prompt-tokens", "16", "--new-tokens", "4", "--repeats", "1")


def test_without_matplotlib_the_error_comes_before_anything_runs(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert terminal.run(*GIVEN, "--plot", str(tmp_path / "out.png")) == 2
    assert "pip install 'onedraw[plot]'" in terminal.err
    assert terminal.out == ""


def test_an_image_is_written(terminal: Terminal, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    assert terminal.run(*GIVEN, "--plot", str(path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "decode tokens/s" in terminal.out
