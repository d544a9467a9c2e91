"""Finished requests on disk, each with everything that decides its tokens. `onedraw replay` reads them.

A RecordingLLM writes every finished choice as a line of JSON to a file in a folder, before the caller gets the choice's last
piece. `read_records` reads these lines. Each of several choices of a request has a record of its own, which stands for a
request with that choice's seed and n = 1. Prompts are stored as token ids; their text is only written with `--record-text`.

`--learn-draft` writes records too, from which `train-draft` learns: of each reply only what a drafter learns from, in a folder of
bounded size whose oldest files are removed.
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
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from onedraw.errors import BadSetting, OnedrawError
from onedraw.llm.llm import LLM, PreparedChoice
from onedraw.llm.reply import Reply
from onedraw.llm.reply_stream import Generation
from onedraw.types import Finish, Piece, SamplingParams

log = logging.getLogger("onedraw.contract.record")

VERSION = 1
DEFAULT_SIZE = 64 * 2**20  # When a file has this many bytes, the next record begins a new file.
LEARNING_SIZE = 256 * 2**20  # bytes of all files that --learn-draft keeps
LEARNING_FILES = 8  # files that these bytes are divided into, so that an eighth of what was learned from is forgotten at a time
LEAST_LEARNED = 2  # A drafter learns only from replies of at least this many tokens.
LEARNED = "learned"  # the id of every record of --learn-draft, in place of the request's own id
NAME = "requests-{number:06d}.jsonl"  # names of files; a higher number is newer


@dataclass(frozen=True, slots=True)
class Record:
    """One finished choice. `generation` with n = 1 generates it again; it is None if it could not be written, and `unwritten`
    says why."""

    id: str
    time: float
    model: str  # the name by which clients call the model
    source: str  # the path or name from which the model was loaded
    fingerprint: str
    generation: Generation | None
    reply: tuple[int, ...]
    finish: Finish
    stop_reason: str | int | None
    checksums: tuple[int, ...] | None = None  # one checksum per token of the reply, if requested
    unwritten: str | None = None  # why `generation` is None
    text: tuple[str, str] | None = None  # the text of prompt and reply, with --record-text
    where: str = ""  # file and line from which the record was read


class RecordWriter:
    """Appends lines to files in a folder. It is thread-safe. A line is written whole and synced to disk, or OSError is raised.
    Each process begins new files, so no two processes write to the same one. A file contains whole lines only: after a failed
    write, such as on a full disk, it is truncated to its last whole line; if that fails too, the next line begins a new file."""

    def __init__(
        self, folder: Path, *, size: int = DEFAULT_SIZE, most: int | None = None, text: bool = False, option: str = "--record"
    ) -> None:
        """`size`: bytes after which a new file is begun. `most`: bytes of all files together, beyond which the oldest are
        removed; a line that does not fit into `size` is refused then. `text`: whether the text of requests is written. `option`
        is named in errors."""
        self.text = text
        self._folder = folder
        self._size, self._most = size, most
        self._lock = threading.Lock()
        self._file: int | None = None
        self._written = 0
        try:
            self._begin()
        except OSError as error:
            raise BadSetting(f"{option}: cannot write to {folder} ({error.strerror}); choose a folder that is writable") from None

    def write(self, line: dict[str, Any]) -> None:
        data = json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        if self._most is not None and len(data) > self._size:
            raise ValueError(f"its {len(data):,} bytes are over the {self._size:,} of a file")
        with self._lock:
            full = self._written and self._written + len(data) > self._size
            if self._file is None or full or os.fstat(self._file).st_nlink == 0:  # 0: someone has deleted the file
                self._begin()
            assert self._file is not None
            try:
                rest = data
                while rest:
                    rest = rest[os.write(self._file, rest) :]
                os.fsync(self._file)
            except OSError:
                self._cut_back()
                raise
            self._written += len(data)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _cut_back(self) -> None:
        """Remove the incomplete line that a failed write has left. If that fails, the file is closed, and readers skip the
        line."""
        assert self._file is not None
        try:
            os.ftruncate(self._file, self._written)
        except OSError:
            os.close(self._file)
            self._file = None

    def _begin(self) -> None:
        """Open a file with the next free number. The folder is synced too, since a crash could otherwise lose the file's name."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        number = max((_number(path) for path in self._folder.glob("requests-*.jsonl")), default=0)
        while self._file is None:
            number += 1
            try:
                path = self._folder / NAME.format(number=number)
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            except FileExistsError:
                continue
        self._written = 0
        self._remove_oldest(path)
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _remove_oldest(self, current: Path) -> None:
        """Remove the oldest files until the rest is within `most` bytes, with the current file counted as if it were full."""
        if self._most is None:
            return
        others = sorted((path for path in self._folder.glob("requests-*.jsonl") if path != current), key=_number)
        sizes = [path.stat().st_size for path in others]
        for index, path in enumerate(others):
            if sum(sizes[index:]) + self._size > self._most:
                path.unlink(missing_ok=True)


class RecordingLLM(LLM):
    """An LLM that records finished choices. It uses the service of the LLM it is made from and owns it from then on:
    closing it closes that service."""

    def __init__(
        self, llm: LLM, writer: RecordWriter | None = None, *, source: str, learning: RecordWriter | None = None
    ) -> None:
        """`writer` gets whole records; `learning` gets only the part from which a drafter learns."""
        super().__init__(
            service=llm.service,
            tokenizer=llm.tokenizer,
            template=llm.template,
            card=llm.card,
            constraints=llm.constraints,
            weight_updates=llm.weight_updates,
        )
        self._numbers = llm._numbers  # shared, so that both LLM objects never use the same request id
        self._writer, self._learning = writer, learning
        self._source = source

    def close(self, drain_seconds: float = 0.0) -> None:
        super().close(drain_seconds)
        for writer in (self._writer, self._learning):
            if writer is not None:
                writer.close()

    def pieces(self, choices: Sequence[PreparedChoice]) -> Generator[Piece, None, None]:
        replies = [Reply() for _ in choices]
        with closing(super().pieces(choices)) as pieces:
            for piece in pieces:
                replies[piece.index].add(piece)
                if piece.finish is not None:
                    self._record(choices[piece.index], piece.index, replies[piece.index])
                yield piece

    async def bursts(self, choices: Sequence[PreparedChoice]) -> AsyncGenerator[list[Piece], None]:
        replies = [Reply() for _ in choices]
        async with aclosing(super().bursts(choices)) as bursts:
            async for burst in bursts:
                for piece in burst:
                    replies[piece.index].add(piece)
                    if piece.finish is not None:  # A slow disk must not block the event loop, so a thread writes.
                        await asyncio.to_thread(self._record, choices[piece.index], piece.index, replies[piece.index])
                yield burst

    def _record(self, choice: PreparedChoice, index: int, reply: Reply) -> None:
        """Write the record of a finished choice, unless it was cancelled, moved, or generated with two versions of the weights.
        If the disk fails, the record is lost but the reply is not."""
        if reply.finish is None or reply.finish in ("cancelled", "moved"):
            return
        if choice.fingerprint != self.card.fingerprint:
            log.warning("%s is not recorded: the weights were replaced meanwhile, so it has tokens of both", choice.request.id)
            return
        single = replace(choice.generation, n=1, params=choice.request.params)
        identity = f"{choice.generation.label or 'request'}-{index}"
        learnable = learned_from(single) if len(reply.token_ids) >= LEAST_LEARNED else None
        for writer, generation in ((self._writer, single), (self._learning, learnable)):
            if writer is None or generation is None:
                continue
            name = identity if writer is self._writer else LEARNED
            try:  # A stop reason may be a stop string of the client, which is left out of what a drafter learns from.
                line = self._line(name, generation, reply, text=writer.text)
                writer.write(line if writer is self._writer else {**line, "stop_reason": None})
            except (OSError, ValueError, TypeError) as error:  # The disk failed, or JSON cannot express a value of the record.
                log.error("%s is not recorded: %s", identity, getattr(error, "strerror", None) or error)

    def _line(self, identity: str, generation: Generation, reply: Reply, *, text: bool) -> dict[str, Any]:
        checksums = [token.checksum for token in reply.tokens if token.checksum is not None]
        line: dict[str, Any] = {
            "version": VERSION,
            "id": identity,
            "time": round(time.time(), 3),
            "model": self.card.name,
            "source": self._source,
            "fingerprint": self.card.fingerprint,
            "ask": to_json(generation),
            "reply": reply.token_ids,
            "finish": reply.finish,
            "stop_reason": reply.stop_reason,
        }
        if checksums:
            line["checksums"] = [str(number) for number in checksums]  # as strings, since many JSON readers round 64-bit numbers
        if text:
            line["text"] = [self.tokenizer.decode(generation.prompt, skip_special=False), reply.reasoning + reply.text]
        return line


def learned_from(generation: Generation) -> Generation | None:
    """Return the part of a request from which a drafter learns: the tokens and how they were sampled, without anything else that
    the client sent. None for a reply that the client gave and the model did not sample."""
    if generation.forced:
        return None
    params = generation.params
    sampled = SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        max_tokens=params.max_tokens,
    )
    return Generation(generation.prompt, sampled, given=generation.given)


# ---------------------------------------------------------------------------------------------- reading


def read_records(path: Path, *, damaged: Callable[[str], None] = log.warning) -> list[Record]:
    """Return the records of a file, or of all files of a folder in order. A line that is not a record is skipped, and `damaged`
    is called with a message that names the file and line."""
    if path.is_dir():
        files = sorted(path.glob("requests-*.jsonl"), key=_number)
    elif path.is_file():
        files = [path]
    else:
        raise BadSetting(f"there are no records at {path}; name a file or folder that --record wrote")
    found = [read for file in files for read in _read_file(file)]
    records = [read for read in found if isinstance(read, Record)]
    faults = [read for read in found if isinstance(read, str)]
    if not records:
        raise BadSetting(f"{path} holds no records{f': {faults[0]}' if faults else ' yet'}")
    for fault in faults:
        damaged(fault)
    return records


def _read_file(file: Path) -> Iterator[Record | str]:
    """Yield for every line its record, or a message that says what is wrong with the line."""
    *lines, rest = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            yield _record(json.loads(line), f"{file.name}:{number}")
        except (ValueError, ArithmeticError, KeyError, IndexError, TypeError, RecursionError, OnedrawError) as error:
            yield f"{file}:{number}: not a record ({type(error).__name__}: {error})"
    if rest:
        yield f"{file}:{len(lines) + 1}: an incomplete last line"


def _record(line: dict[str, Any], where: str) -> Record:
    if line["version"] != VERSION:
        raise ValueError(f"version {line['version']}, and this program reads {VERSION}")
    for name in ("id", "model", "source", "fingerprint"):
        if not isinstance(line[name], str):
            raise TypeError(f"{name} is not a string")
    checksums, text = line.get("checksums"), line.get("text")
    if checksums is not None and len(checksums) != len(line["reply"]):
        raise ValueError(f"{len(checksums)} checksums of {len(line['reply'])} tokens")
    return Record(
        id=line["id"],
        time=line["time"],
        model=line["model"],
        source=line["source"],
        fingerprint=line["fingerprint"],
        generation=None if line["ask"] is None else _single(from_json(Generation, line["ask"])),
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
        raise ValueError(f"a request for {generation.n} replies; a record has one")
    return generation


def _number(path: Path) -> int:
    digits = path.stem.removeprefix("requests-")
    return int(digits) if digits.isdecimal() else 0


# ---------------------------------------------------------------------------------------------- JSON codec
# It turns frozen dataclasses into JSON values and back, by their type hints. A field's name in JSON is its own name, or `key` in
# the field's metadata. An `optional` field is left out while it has its default.

Value = TypeVar("Value")
# Fields that no longer exist, but are in older records as null.
RETIRED: Mapping[type, frozenset[str]] = {SamplingParams: frozenset({"constraint"})}


def to_json(value: object, *, path: str = "") -> Any:
    """Return the JSON value of a dataclass. Numbers that JSON cannot write become strings, such as "-inf"."""
    if is_dataclass(value) and not isinstance(value, type):
        written = [f for f in fields(value) if not (f.metadata.get("optional") and getattr(value, f.name) == f.default)]
        return {_key(f): to_json(getattr(value, f.name), path=f"{path}.{f.name}".lstrip(".")) for f in written}
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case tuple() | list():
            return [to_json(item, path=path) for item in value]
        case frozenset() | set():
            return sorted(to_json(item, path=path) for item in value)
        case Mapping():
            return {str(key): to_json(item, path=path) for key, item in value.items()}
        case _:
            raise TypeError(f"{path} is a {type(value).__name__}, which cannot be written as JSON")


def from_json(kind: type[Value], value: Any) -> Value:
    """Build a dataclass from its JSON value. Missing fields get their defaults; unknown ones are an error."""
    made: Value = _from_json(kind, value)
    return made


def _key(field: Any) -> str:
    return str(field.metadata.get("key", field.name))


def _from_json(kind: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        return _read_fields(kind, value)
    if isinstance(kind, types.UnionType) or origin is typing.Union:
        return _read_union(arguments, value)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is ...:
            return tuple(_from_json(arguments[0], item) for item in value)
        return tuple(_from_json(each, item) for each, item in zip(arguments, value, strict=True))
    if origin is frozenset:
        return frozenset(_from_json(arguments[0], item) for item in value)
    if origin is typing.Literal:
        if value not in arguments:
            raise ValueError(f"{value!r} is not one of {arguments}")
        return value
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        return float(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    raise ValueError(f"{value!r} is not of type {getattr(kind, '__name__', kind)}")


def _read_fields(kind: Any, value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{kind.__name__} must be an object")
    hints, known = typing.get_type_hints(kind), {_key(f): f.name for f in fields(kind)}
    retired = RETIRED.get(kind, frozenset())
    given = {key: item for key, item in value.items() if not (key in retired and item is None)}
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"{kind.__name__} has no field {unknown[0]!r}")
    return kind(**{known[key]: _from_json(hints[known[key]], item) for key, item in given.items()})


def _read_union(kinds: tuple[Any, ...], value: Any) -> Any:
    """Return the value as the first of these types that accepts it."""
    if value is None and type(None) in kinds:
        return None
    for kind in kinds:
        try:
            return _from_json(kind, value)
        except (ValueError, TypeError):
            continue
    raise ValueError(f"{value!r} is none of {kinds}")
