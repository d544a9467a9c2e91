"""`bench --plot`: the time of a step over batch size and context as an SVG file, beside the floor."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from onedraw.cli.svg_plot import Line, Panel, draw, ticks
from onedraw.lab import references
from tests.cli.running import FAKE, Terminal

GIVEN = ("bench", *FAKE, "--batch", "1,2", "--prompt-tokens", "16", "--new-tokens", "4", "--repeats", "1")


def test_a_file_of_another_format_is_refused_before_anything_runs(terminal: Terminal, tmp_path: Path) -> None:
    assert terminal.run(*GIVEN, "--plot", str(tmp_path / "out.png")) == 2
    assert "does not end in .svg" in terminal.err
    assert terminal.out == ""


def test_a_plot_is_written(terminal: Terminal, tmp_path: Path) -> None:
    path = tmp_path / "out.svg"
    assert terminal.run(*GIVEN, "--plot", str(path)) == 0
    texts = {one.text for one in ElementTree.parse(path).iter() if one.tag.endswith("text")}
    assert {"requests at once", "milliseconds per step", "tokens of context, one request"} <= texts
    assert "floor" not in texts  # the fake backend has none
    assert "decode tokens/s" in terminal.out


def test_the_floor_stands_beside_the_steps(terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "decode_step_floor", lambda settings: lambda rows, context: rows * context * 1e-6)
    path = tmp_path / "out.svg"
    assert terminal.run(*GIVEN, "--plot", str(path)) == 0
    assert path.read_text(encoding="utf-8").count(">floor<") == 2
    assert "of floor" in terminal.out


def test_points_are_where_the_axes_have_their_numbers() -> None:
    svg = draw("a < b", [Panel("x", "y", [Line("one", [(8, 40), (4, 20), (0, 0)])])])
    assert "a &lt; b" in svg
    (x0, y0), (x1, y1), (x2, y2) = ((float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', svg))
    assert (x1 - x0, y1 - y0) == pytest.approx((x2 - x1, y2 - y1))
    assert f'<text x="{x2}" y="290.0" text-anchor="middle" font-size="12" fill="#222222">8</text>' in svg
    assert f'y="{y2 + 4}" text-anchor="end" font-size="12" fill="#222222">40</text>' in svg


@pytest.mark.parametrize(
    ("largest", "expected"), [(8, [0, 2, 4, 6, 8]), (1.1, [0, 0.5, 1, 1.5]), (7600, [0, 2000, 4000, 6000, 8000])]
)
def test_ticks_are_round_numbers_that_cover_the_axis(largest: float, expected: list[float]) -> None:
    assert ticks(largest) == expected
