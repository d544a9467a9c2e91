"""Line plots as SVG, written without a plotting library.

In: a title and panels, each with its axes' names and its lines. Out: the text of an SVG file. Panels stand side by side; every
axis begins at zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 480, 320  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 48, 48  # margins of a panel
COLOURS = ("#1f5fa8", "#b3541e", "#4d7c2a")  # of the lines of a panel; a line beyond these is not drawn
TICKS = 5  # ticks of an axis, approximately


@dataclass(frozen=True, slots=True)
class Line:
    label: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    x_label: str
    y_label: str
    lines: Sequence[Line]


def draw(title: str, panels: Sequence[Panel]) -> str:
    width = WIDTH * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(width / 2, 20, title, size=14),
    ]
    for number, panel in enumerate(panels):
        parts += [f'<g transform="translate({WIDTH * number} 0)">', *_panel(panel), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel) -> list[str]:
    points = [point for line in panel.lines for point in line.points]
    x_ticks, y_ticks = ticks(max(x for x, _ in points)), ticks(max(y for _, y in points))
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + (right - LEFT) * x / x_ticks[-1], bottom - (bottom - TOP) * y / y_ticks[-1]

    parts = []
    for tick in y_ticks:
        _, y = place(0, tick)
        parts += [
            f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#dddddd"/>',
            _text(LEFT - 6, y + 4, f"{tick:g}", anchor="end"),
        ]
    for tick in x_ticks:
        x, _ = place(tick, 0)
        parts += [f'<path d="M{x:.1f} {bottom}v4" stroke="#444444"/>', _text(x, bottom + 18, f"{tick:g}")]
    parts.append(f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="#444444"/>')
    parts.append(_text((LEFT + right) / 2, HEIGHT - 10, panel.x_label))
    parts.append(f'<g transform="translate(16 {(TOP + bottom) / 2}) rotate(-90)">{_text(0, 0, panel.y_label)}</g>')
    for number, (line, colour) in enumerate(zip(panel.lines, COLOURS, strict=False)):
        places = [place(x, y) for x, y in sorted(line.points)]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        dashes = ' stroke-dasharray="5 4"' if line.dashed else ""
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places if not line.dashed]
        y = TOP + 4 + 16 * number
        parts.append(f'<path d="M{LEFT + 12} {y}h22" stroke="{colour}" stroke-width="2"{dashes}/>')
        parts.append(_text(LEFT + 40, y + 4, line.label, anchor="start"))
    return parts


def ticks(largest: float) -> list[float]:
    """Return round numbers at equal distances, from 0 to at least `largest`. If `largest` is 0, they go to 1."""
    largest = largest if largest > 0 else 1.0
    rough = largest / TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = unit * next(factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999999)
    return [round(step * i, 12) for i in range(math.ceil(largest / step - 1e-9) + 1)]


def _text(x: float, y: float, text: str, *, anchor: str = "middle", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="#222222">{escape(text)}</text>'
