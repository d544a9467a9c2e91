"""`bench --plot`: a picture where matplotlib is, the line to install it where it is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.running import FAKE, Terminal

GIVEN = ("bench", *FAKE, "--batch", "1,2", "--prompt-tokens", "16", "--new-tokens", "4", "--repeats", "1")


def test_without_matplotlib_the_line_to_install_it_is_said_before_anything_runs(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert terminal.run(*GIVEN, "--plot", str(tmp_path / "out.png")) == 2
    assert "pip install 'onedraw[plot]'" in terminal.err
    assert terminal.out == ""


def test_a_picture_is_drawn(terminal: Terminal, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    assert terminal.run(*GIVEN, "--plot", str(path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "decode tokens/s" in terminal.out
