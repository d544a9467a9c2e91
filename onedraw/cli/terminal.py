"""Terminal output: tables, a status line, dim notes. On a terminal it is drawn by rich if that is installed, else plain text.

Results go to stdout, progress and notes to stderr, so that a pipe receives results only.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from onedraw.types import Piece

Progress = Callable[[str], None]

PLAIN_INTERVAL = 2.0  # the least seconds between two progress lines if stderr is not a terminal


def decorated(stream: TextIO) -> bool:
    """Whether the stream is a terminal that may get colours. NO_COLOR and TERM=dumb turn them off."""
    return stream.isatty() and os.environ.get("TERM") != "dumb" and "NO_COLOR" not in os.environ


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], *, out: TextIO | None = None) -> None:
    """Print a table. Columns of numbers are right-aligned."""
    out = out or sys.stdout
    rich = _rich() if decorated(out) else None
    if rich is None:
        out.write(plain_table(title, heads, rows))
        return
    console, Table = rich(file=out, highlight=False, soft_wrap=True), _rich_table()
    drawn = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for index, head in enumerate(heads):
        drawn.add_column(head, justify="right" if _numeric(rows, index) else "left")
    for row in rows:
        drawn.add_row(*(_escape(cell) for cell in row))
    console.print(drawn)


def plain_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(heads, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        fitted = [
            cell.rjust(width) if _numeric(rows, i) else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(fitted).rstrip() + "\n"

    rule = line(["-" * width for width in widths])
    return (f"{title}\n" if title else "") + line(heads) + rule + "".join(line(row) for row in rows)


def dim(text: str, *, out: TextIO | None = None) -> None:
    """Print one line of notes, which a terminal shows dimmed."""
    out = out or sys.stderr
    out.write(f"\x1b[2m{text}\x1b[0m\n" if decorated(out) else f"{text}\n")
    out.flush()


def print_piece(piece: Piece, *, thinking: TextIO | None = None) -> None:
    """Print a piece of a reply: the answer to stdout, and reasoning, dimmed on a terminal, to `thinking` or stderr."""
    out = sys.stdout
    if piece.channel == "reasoning":
        out = thinking or sys.stderr
    out.write(f"\x1b[2m{piece.text}\x1b[0m" if piece.channel == "reasoning" and piece.text and decorated(out) else piece.text)
    out.flush()


def print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False, allow_nan=False), flush=True)


@contextlib.contextmanager
def progress(*, out: TextIO | None = None) -> Iterator[Progress]:
    """Return a function that reports progress. On a terminal one status line is rewritten; elsewhere a line is printed every
    few seconds."""
    out = out or sys.stderr
    if decorated(out):
        status = StatusLine(out)
        try:
            yield status.show
        finally:
            status.clear()
        return
    last = -PLAIN_INTERVAL

    def notify(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= PLAIN_INTERVAL:
            last = time.monotonic()
            out.write(text + "\n")
            out.flush()

    yield notify


def bar(done: int, total: int) -> str:
    """Return a progress bar with the numbers behind it."""
    width = 24
    filled = width * done // max(total, 1)
    return f"{'█' * filled}{'░' * (width - filled)} {done} of {total}"


class StatusLine:
    """A line of the terminal that is rewritten in place."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def show(self, text: str) -> None:
        width = max(_terminal_width() - 1, 20)
        self._out.write("\r\x1b[2K\x1b[2m" + text.replace("\n", " ")[:width] + "\x1b[0m")
        self._out.flush()

    def clear(self) -> None:
        self._out.write("\r\x1b[2K")
        self._out.flush()


def _terminal_width() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except OSError:
        return 80


def _numeric(rows: Sequence[Sequence[str]], index: int) -> bool:
    """Whether every cell of a column begins with a digit. A dash or an empty cell stands for a missing value. The first column
    has names, so it never counts."""
    return index > 0 and bool(rows) and all(row[index][:1].isdigit() or row[index] in ("-", "") for row in rows)


def _rich() -> Any | None:
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console


def _rich_table() -> Any:
    from rich.table import Table

    return Table


def _escape(cell: str) -> str:
    return cell.replace("[", r"\[")
