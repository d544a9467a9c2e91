"""The results of the lines of one batch, in a file that survives the end of the process at any moment.

A result is appended when its line has ended. At the end the results are written in the order of the input, so the files are the
same whatever was interrupted. A result that is lost or torn is dropped when the file is read again; its line then runs once more,
with the same bytes. So nothing needs to be synced to disk before the end.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import msgspec

from onedraw.server.batch.lines import LineResult

_RECORD = re.compile(rb"(\d{1,9}) ([+-]) (\{.*\})", re.DOTALL)  # number of the line, whether it succeeded, its result


class ForeignResults(Exception):
    """The file has the results of another batch or input file."""


class ResultLog:
    """The results so far. Close it after use, or use it in a `with`. `title` says what the results belong to: a
    file with another title stays as it is, and ForeignResults is raised."""

    def __init__(self, path: Path, *, title: str) -> None:
        self.path = path
        self.completed = self.failed = 0
        self._places: dict[int, tuple[bool, int, int]] = {}  # number of the line → (whether it succeeded, offset, length)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self.size = self._read(f"onedraw batch results: {title}\n".encode())
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> ResultLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def __len__(self) -> int:
        return len(self._places)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def add(self, number: int, result: LineResult) -> None:
        """Append the result of a line. If that fails, as on a full disk, the file ends with its last whole result."""
        record = b"%d %c " % (number, b"-+"[result.ok]) + result.text + b"\n"
        try:
            written = 0
            while written < len(record):
                written += os.pwrite(self._file, record[written:], self.size + written)
        except OSError:
            os.ftruncate(self._file, self.size)
            raise
        self._place(number, result.ok, self.size + len(record) - 1 - len(result.text), len(result.text))
        self.size += len(record)

    def results(self, *, ok: bool) -> Iterator[tuple[int, bytes]]:
        """Yield number and text of the results that succeeded, or of those that did not, in the order of the input."""
        for number, (succeeded, offset, length) in sorted(self._places.items()):
            if succeeded is ok:
                yield number, os.pread(self._file, length, offset)

    def _place(self, number: int, ok: bool, offset: int, length: int) -> None:
        if number not in self._places:
            self._places[number] = ok, offset, length
            self.completed += ok
            self.failed += not ok

    def _read(self, title: bytes) -> int:
        """Read the results of an earlier process and return where the next one is written."""
        with os.fdopen(os.dup(self._file), "rb") as file:
            if (first := file.readline(1 << 16)) != title:
                if first.endswith(b"\n"):
                    raise ForeignResults(first[:-1].decode("utf-8", "replace"))
                os.ftruncate(self._file, 0)  # The title was not written completely.
                os.pwrite(self._file, title, 0)
                return len(title)
            end = len(title)
            for record in file:
                found = _RECORD.fullmatch(record[:-1]) if record.endswith(b"\n") else None
                if found is None or not _is_json(found[3]):
                    break  # Everything after an incomplete record is dropped too.
                self._place(int(found[1]), found[2] == b"+", end + found.start(3), len(found[3]))
                end += len(record)
        os.ftruncate(self._file, end)
        return end


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


def write_whole(path: Path, parts: Iterator[bytes]) -> int:
    """Write a file whole, or not at all, and return its size. It is on disk when this returns."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            size = 0
            for text in parts:
                size += file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)  # An incomplete file would only use up a full disk.
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return size
