"""Output to a terminal and output to a pipe."""

from __future__ import annotations

import io
import sys

import pytest

from onedraw.cli import terminal


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _an_ordinary_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_a_piped_table_is_plain_and_aligned() -> None:
    out = io.StringIO()
    terminal.table("sizes", ("name", "count"), [["one", "1"], ["hundred", "100"]], out=out)
    assert out.getvalue() == "sizes\nname     count\n-------  -----\none          1\nhundred    100\n"


def test_a_table_on_a_terminal_has_frames_and_the_same_cells() -> None:
    pytest.importorskip("rich")
    out = Terminal()
    terminal.table("sizes", ("name", "count"), [["[one]", "1"], ["hundred", "100"]], out=out)
    drawn = out.getvalue()
    assert "│" in drawn
    assert "[one]" in drawn


def test_without_rich_a_terminal_gets_the_plain_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    out = Terminal()
    terminal.table("", ("name", "count"), [["one", "1"]], out=out)
    assert out.getvalue() == terminal.plain_table("", ("name", "count"), [["one", "1"]])


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    terminal.dim("aside", out=out)
    assert out.getvalue() == "aside\n"


def test_a_note_is_dimmed_on_a_terminal() -> None:
    out, piped = Terminal(), io.StringIO()
    terminal.dim("aside", out=out)
    terminal.dim("aside", out=piped)
    assert out.getvalue() == "\x1b[2maside\x1b[0m\n"
    assert piped.getvalue() == "aside\n"


def test_progress_is_cleared_from_a_terminal() -> None:
    out = Terminal()
    with terminal.progress(out=out) as notify:
        notify("loading")
        notify("still loading")
    assert "still loading" in out.getvalue()
    assert "\n" not in out.getvalue()
    assert out.getvalue().endswith("\r\x1b[2K")


def test_a_log_is_not_flooded_by_progress() -> None:
    out = io.StringIO()
    with terminal.progress(out=out) as notify:
        for percent in range(100):
            notify(f"{percent} %")
    assert out.getvalue().startswith("0 %\n")
    assert out.getvalue().count("\n") < 5
