"""Finished requests on disk, each with everything that decides its tokens: what `onedraw replay` runs again.

In: a Door and a folder. Out: the same door, whose finished replies are lines of JSON in that folder; and those lines read
back as Records. A reply is on disk before its last piece is told. A choice of several is a record of its own: its seed with
n = 1 is the same request. Prompts are token ids; their text is written only where that was asked for.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import threading
import time
import types
import typing
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping
from contextlib import aclosing, closing
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from onedraw.errors import BadSetting, OnedrawError
from onedraw.llm.llm import LLM, Generation, Reply
from onedraw.sampling.noise import child_seed
from onedraw.types import Finish, Piece

# -------------------- Frozen dataclasses as JSON values and back, by their own type hints.


Value = TypeVar("Value")


class Unwritable(Exception):
    """The message names the field and what it holds."""


def write(value: object, *, path: str = "") -> Any:
    """The JSON form. Numbers that JSON lacks are texts: "-inf"."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: write(getattr(value, f.name), path=f"{path}.{f.name}".lstrip(".")) for f in fields(value)}
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case tuple() | list():
            return [write(item, path=path) for item in value]
        case frozenset() | set():
            return sorted(write(item, path=path) for item in value)
        case Mapping():
            return {str(key): write(item, path=path) for key, item in value.items()}
        case _:
            raise Unwritable(f"{path} holds a {type(value).__name__}, which has no written form")


def read(kind: type[Value], value: Any) -> Value:
    """A dataclass from its JSON form. Fields that are missing keep their defaults; unknown ones are an error."""
    made: Value = _read(kind, value)
    return made


def _read(kind: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        return _read_fields(kind, value)
    if isinstance(kind, types.UnionType) or origin is typing.Union:
        return _read_union(arguments, value)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is ...:
            return tuple(_read(arguments[0], item) for item in value)
        return tuple(_read(each, item) for each, item in zip(arguments, value, strict=True))
    if origin is frozenset:
        return frozenset(_read(arguments[0], item) for item in value)
    if origin is typing.Literal:
        if value not in arguments:
            raise ValueError(f"{value!r} is not one of {arguments}")
        return value
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        return float(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    raise ValueError(f"{value!r} is no {getattr(kind, '__name__', kind)}")


def _read_fields(kind: Any, value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{kind.__name__} must be an object")
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(value) - {f.name for f in fields(kind)})
    if unknown:
        raise ValueError(f"{kind.__name__} has no field {unknown[0]!r}")
    return kind(**{name: _read(hints[name], item) for name, item in value.items()})


def _read_union(kinds: tuple[Any, ...], value: Any) -> Any:
    """The first kind that takes the value; None is itself."""
    if value is None and type(None) in kinds:
        return None
    for kind in kinds:
        try:
            return _read(kind, value)
        except (ValueError, TypeError):
            continue
    raise ValueError(f"{value!r} is none of {kinds}")


# -------------------- Finished requests on disk, each with everything that decides its tokens: what `onedraw rep


log = logging.getLogger("onedraw.contract.record")

VERSION = 1
DEFAULT_SIZE = 64 * 2**20  # bytes of a file before the next one is begun
NAME = "requests-{number:06d}.jsonl"


@dataclass(frozen=True, slots=True)
class Record:
    """One finished choice. `ask` is what to ask for again, with n = 1; None where it cannot be written down: `unwritten`
    then says why."""

    id: str
    time: float
    model: str  # what clients call it
    source: str  # what it was opened by
    fingerprint: str
    generation: Generation | None
    reply: tuple[int, ...]
    finish: Finish
    stop_reason: str | int | None
    checksums: tuple[int, ...] | None = None  # where the request asked for them
    unwritten: str | None = None
    text: tuple[str, str] | None = None  # of prompt and reply, where that was asked for
    where: str = ""  # file and line, when it was read back


class Recorder:
    """Appends lines to files in a folder, one file after the other. Any thread may write; a line is whole and on disk, or
    an OSError says that it is not. The files are begun anew by every process, so two never write to one."""

    def __init__(self, folder: Path, *, size: int = DEFAULT_SIZE) -> None:
        self._folder = folder
        self._size = size
        self._lock = threading.Lock()
        self._file: int | None = None
        self._written = 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._begin()
        except OSError as error:
            raise BadSetting(
                f"--record: cannot write to {folder} ({error.strerror}); name a folder that can be written"
            ) from None

    def write(self, line: dict[str, Any]) -> None:
        data = json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            if self._file is None or (self._written and self._written + len(data) > self._size):
                self._begin()
            assert self._file is not None
            self._written += len(data)
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _begin(self) -> None:
        """The next free number. The folder is synced too: a file that nobody can find is no record."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        number = max((_number(path) for path in self._folder.glob("requests-*.jsonl")), default=0)
        while self._file is None:
            number += 1
            try:
                path = self._folder / NAME.format(number=number)
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            except FileExistsError:
                continue
        self._written = 0
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class RecordingLLM(LLM):
    """A door whose finished replies are recorded. It takes the place of the one it is made from, and closes it."""

    def __init__(self, llm: LLM, recorder: Recorder, *, source: str, text: bool = False) -> None:
        super().__init__(service=llm.service, tokenizer=llm.tokenizer, template=llm.template, card=llm.card)
        self._numbers = llm._numbers  # requests of both keep names of their own
        self._recorder = recorder
        self._source = source
        self._text = text

    def close(self, drain_seconds: float = 0.0) -> None:
        super().close(drain_seconds)
        self._recorder.close()

    def stream(self, *generations: Generation) -> Generator[Piece, None, None]:
        replies = self.replies(*generations)
        with closing(super().stream(*generations)) as pieces:
            for piece in pieces:
                replies[piece.index].add(piece)
                if piece.finish is not None:
                    self._record(generations, piece.index, replies[piece.index])
                yield piece

    async def bursts(self, *generations: Generation) -> AsyncGenerator[list[Piece], None]:
        replies = self.replies(*generations)
        async with aclosing(super().bursts(*generations)) as bursts:
            async for burst in bursts:
                for piece in burst:
                    replies[piece.index].add(piece)
                    if piece.finish is not None:  # a disk may take its time, and others wait for this loop
                        await asyncio.to_thread(self._record, generations, piece.index, replies[piece.index])
                yield burst

    def _record(self, generations: tuple[Generation, ...], index: int, reply: Reply) -> None:
        """A disk that fails costs the record, never the reply."""
        if reply.finish is None or reply.finish == "cancelled":
            return
        generation, child = _choice_of(generations, index)
        alone = replace(generation, n=1, params=replace(generation.params, seed=child_seed(generation.params.seed, child)))
        identity = f"{generation.label or 'request'}-{index}"
        try:
            self._recorder.write(self._line(identity, alone, reply))
        except (OSError, ValueError) as error:  # a text that is no text may be in it
            log.error("%s is not recorded: %s", identity, getattr(error, "strerror", None) or error)

    def _line(self, identity: str, generation: Generation, reply: Reply) -> dict[str, Any]:
        checksums = [choice.checksum for choice in reply.tokens if choice.checksum is not None]
        line: dict[str, Any] = {
            "version": VERSION,
            "id": identity,
            "time": round(time.time(), 3),
            "model": self.card.name,
            "source": self._source,
            "fingerprint": self.card.fingerprint,
        }
        try:
            line["ask"] = write(generation)
        except Unwritable as error:
            line |= {"ask": None, "unwritten": str(error)}
        line |= {"reply": reply.token_ids, "finish": reply.finish, "stop_reason": reply.stop_reason}
        if checksums:
            line["checksums"] = [str(number) for number in checksums]  # as text: other readers round numbers of 64 bits
        if self._text:
            line["text"] = [self.tokenizer.decode(generation.prompt, skip_special=False), reply.reasoning + reply.text]
        return line


def _choice_of(generations: tuple[Generation, ...], index: int) -> tuple[Generation, int]:
    """The ask behind a choice, and which of its children the choice is."""
    for generation in generations:
        if index < generation.n:
            return generation, index
        index -= generation.n
    raise AssertionError("a choice nobody asked for")


# ---------------------------------------------------------------------------------------------- reading


def read_records(path: Path) -> list[Record]:
    """The records of a file, or of all files of a folder in their order. A last line that was cut off is left out."""
    if path.is_dir():
        files = sorted(path.glob("requests-*.jsonl"), key=_number)
    elif path.is_file():
        files = [path]
    else:
        raise BadSetting(f"there are no records at {path}; name a file or folder that --record wrote")
    records = [record for file in files for record in _read_file(file)]
    if not records:
        raise BadSetting(f"{path} holds no record yet")
    return records


def _read_file(file: Path) -> Iterator[Record]:
    *lines, rest = file.read_bytes().split(b"\n")
    if rest:
        log.warning("%s: its last line was cut off and is left out", file)
    for number, line in enumerate(lines, start=1):
        where = f"{file.name}:{number}"
        try:
            yield _record(json.loads(line), where)
        except (ValueError, KeyError, IndexError, TypeError, RecursionError, OnedrawError) as error:
            raise BadSetting(f"{file}:{number}: this is no record ({type(error).__name__}: {error})") from None


def _record(line: dict[str, Any], where: str) -> Record:
    if line["version"] != VERSION:
        raise ValueError(f"version {line['version']}, and this program reads {VERSION}")
    for name in ("id", "model", "source", "fingerprint"):
        if not isinstance(line[name], str):
            raise TypeError(f"{name} is no text")
    checksums, text = line.get("checksums"), line.get("text")
    if checksums is not None and len(checksums) != len(line["reply"]):
        raise ValueError(f"{len(checksums)} checksums of {len(line['reply'])} tokens")
    return Record(
        id=line["id"],
        time=line["time"],
        model=line["model"],
        source=line["source"],
        fingerprint=line["fingerprint"],
        generation=None if line["ask"] is None else _single(read(Generation, line["ask"])),
        reply=tuple(int(token) for token in line["reply"]),
        finish=line["finish"],
        stop_reason=line["stop_reason"],
        checksums=None if checksums is None else tuple(int(number) for number in checksums),
        unwritten=line.get("unwritten"),
        text=None if text is None else (text[0], text[1]),
        where=where,
    )


def _single(generation: Generation) -> Generation:
    if generation.n != 1:
        raise ValueError(f"a request of {generation.n} replies, where a record has one")
    return generation


def _number(path: Path) -> int:
    digits = path.stem.removeprefix("requests-")
    return int(digits) if digits.isdecimal() else 0
