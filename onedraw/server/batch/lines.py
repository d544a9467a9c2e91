"""The lines of a batch's input file, and the lines of its output.

The input is a file of JSON lines in OpenAI's shape: `custom_id`, `method`, `url`, `body`. The output is BatchLines with the
body's bytes, or faults that name the line. A LineIdentity holds what a live request draws at random or reads from the clock: it
follows from the batch and the number of the line, so a line that runs again after a crash gives the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from onedraw.errors import BadRequest
from onedraw.limits import MAX_BATCH_FAULTS, MAX_BATCH_LINES, MAX_CUSTOM_ID
from onedraw.sampling.noise import prompt_seed
from onedraw.server.body import shape_of

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/score")
LINE = "onedraw.batch_line"  # the entry of the ASGI scope with the LineIdentity of a line; a live request has none
SHOWN_CHARACTERS = 200  # the most characters of a parser's message that are shown, since it may repeat the line
_MARK = b"\xef\xbb\xbf"  # the byte order mark that some programs write before UTF-8


@dataclass(frozen=True, slots=True)
class LineIdentity:
    id: str  # hexadecimal digits from which the ids in the reply are made
    created: int  # the time in the reply's field `created`
    seed: int  # the seed of a request that has none
    fingerprint: str  # fingerprint of the batch's model; no other model may answer its lines


@dataclass(frozen=True, slots=True)
class BatchIdentity:
    """The facts that, together with the input file, decide the replies of a batch."""

    id: str
    created: int
    seed: int
    fingerprint: str

    def line(self, number: int) -> LineIdentity:
        return LineIdentity(digits(self.id, number), self.created, prompt_seed(self.seed, number), self.fingerprint)


@dataclass(frozen=True, slots=True)
class BatchLine:
    number: int  # counted from 0 over all lines of the file
    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True, slots=True)
class LineFault:
    """Why a line, or the whole file if `line` is None, cannot be part of a batch. Lines count from 1 here, as in editors."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class LineResult:
    ok: bool
    text: bytes  # the line of the output or error file, without the line break


class ModelChanged(Exception):
    """The served model is not the one that the batch was made for, so its replies would differ."""


class LineMoved(Exception):
    """A pause of the engine ended the reply before its end, so the line runs again."""


def check_model(fingerprint: str, identity: LineIdentity) -> None:
    if fingerprint != identity.fingerprint:
        raise ModelChanged


class _Written(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


_DECODER = msgspec.json.Decoder(_Written)


def digits(*parts: object) -> str:
    """Return 24 hexadecimal digits that depend on all parts."""
    return hashlib.sha256(":".join(map(str, parts)).encode()).hexdigest()[:24]


def read_lines(path: Path, *, longest: int, endpoint: str | None = None) -> Iterator[BatchLine | LineFault]:
    """Yield every line that is not empty, as a BatchLine or a LineFault. A line may have 1024 bytes more than `longest`, for the
    fields around its body; a longer one ends the reading. With `endpoint`, the url of every line must be that endpoint. The
    number of empty lines is bounded too, since a small file can have millions."""
    with path.open("rb") as file:
        number = empty = 0
        while raw := file.readline(longest + 1024):
            if len(raw) >= longest + 1024:
                yield LineFault("line_too_long", f"the line has over {longest:,} bytes (--max-body)", number + 1)
                return
            if stripped := raw.removeprefix(_MARK if number == 0 else b"").strip():
                yield _read_line(stripped, number, endpoint)
            else:
                empty += 1
                if empty > MAX_BATCH_LINES:
                    yield LineFault("too_many_lines", f"the file has over {MAX_BATCH_LINES:,} empty lines; remove them")
                    return
            number += 1


def _read_line(raw: bytes, number: int, endpoint: str | None) -> BatchLine | LineFault:
    at = number + 1
    try:
        shape_of(raw)
        found = _DECODER.decode(raw)
    except msgspec.ValidationError as error:
        return LineFault("invalid_line", f"{_shown(error)}; a line has custom_id, method, url and body", at)
    except (msgspec.DecodeError, UnicodeDecodeError, BadRequest) as error:
        return LineFault("invalid_json_line", f"the line is not valid JSON: {_shown(error)}", at)
    if not 1 <= len(found.custom_id) <= MAX_CUSTOM_ID:
        return LineFault("invalid_custom_id", f"custom_id must have 1 to {MAX_CUSTOM_ID} characters", at, "custom_id")
    if found.method != "POST":
        return LineFault("invalid_method", "method must be POST", at, "method")
    if found.url not in (ENDPOINTS if endpoint is None else (endpoint,)):
        allowed = ", ".join(ENDPOINTS) if endpoint is None else f"{endpoint}, the endpoint of the batch"
        return LineFault("mismatched_endpoint", f"url must be {allowed}", at, "url")
    body = bytes(found.body).strip()
    if not body.startswith(b"{"):
        return LineFault("invalid_body", "body must be a JSON object", at, "body")
    return BatchLine(number, found.custom_id, found.url, body)


def _shown(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"


def check_lines(path: Path, *, longest: int, endpoint: str | None = None) -> tuple[int, list[LineFault]]:
    """Return the number of valid lines and the faults of the file, as far as it was read: too many faults or lines end the
    check."""
    faults: list[LineFault] = []
    seen: dict[str, int] = {}
    for found in read_lines(path, longest=longest, endpoint=endpoint):
        if isinstance(found, LineFault):
            faults.append(found)
        elif (first := seen.setdefault(found.custom_id, found.number)) != found.number:
            message = f"custom_id {found.custom_id[:80]!r} is also that of line {first + 1}; every line needs its own"
            faults.append(LineFault("duplicate_custom_id", message, found.number + 1, "custom_id"))
        if len(seen) > MAX_BATCH_LINES:
            faults.append(LineFault("too_many_lines", f"the file has over {MAX_BATCH_LINES:,} lines; split it"))
        if len(faults) >= MAX_BATCH_FAULTS or len(seen) > MAX_BATCH_LINES:
            return len(seen), faults
    if not seen and not faults:
        faults.append(LineFault("empty_file", "the file has no lines"))
    return len(seen), faults


def result_line(line: BatchLine, identity: LineIdentity, *, status: int, body: bytes) -> LineResult:
    """Return the output line of a request that was answered. `body` is the JSON of the answer, as a live client would get it."""
    head = f'"response":{{"status_code":{status},"request_id":"req_{identity.id}","body":'.encode()
    return LineResult(status == 200, _opening(line, identity) + head + body + b'},"error":null}')


def unfinished_line(line: BatchLine, identity: LineIdentity, *, code: str, message: str) -> LineResult:
    """Return the line of the error file for a request that was not run to its end."""
    error: dict[str, Any] = {"code": code, "message": message}
    return LineResult(False, _opening(line, identity) + b'"response":null,"error":' + msgspec.json.encode(error) + b"}")


def _opening(line: BatchLine, identity: LineIdentity) -> bytes:
    return f'{{"id":"batch_req_{identity.id}","custom_id":'.encode() + msgspec.json.encode(line.custom_id) + b","
