"""Read the body of a request and parse its JSON.

A body that is too large, too slow, too deep or not JSON is refused. The number of its values and their depth are counted in its
bytes before it is parsed, because a small body can describe millions of Python objects. A text is a JSON string; commas and
brackets inside texts do not count.
"""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request

from onedraw.errors import BadRequest
from onedraw.limits import MAX_BODY_DEPTH, MAX_BODY_PARTS, MAX_BODY_VALUES
from onedraw.server.errors import BodyTooComplex, BodyTooLarge, BodyTooSlow

BODY_SECONDS = 60.0  # the time within which the last byte of a body must arrive
BLOCK = 1 << 18  # bytes that are counted at once; between blocks other threads can run

MOST_DIGITS = 4_000  # of an integer that is read; a longer one is refused

_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_MARK = b"\xef\xbb\xbf"  # the byte order mark that some programs write before UTF-8, which is no part of the JSON
_SHAPE = b'"[]{},:'
_TEXT = bytes(byte for byte in range(256) if byte not in _SHAPE)
_DEEPER = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # brackets → the change of depth, +1 or -1 as signed bytes


async def read_body(request: Request, *, limit: int, seconds: float = BODY_SECONDS) -> bytes:
    """Read the body. It is refused as soon as its declared or received size exceeds the limit, or when it takes too long."""
    declared = request.headers.get("content-length", "")
    body = bytearray()
    if not (declared.isdecimal() and int(declared) > limit):
        try:
            async with asyncio.timeout(seconds):
                async for block in request.stream():
                    body += block
                    if len(body) > limit:
                        break
                else:
                    return bytes(body)
        except TimeoutError:
            raise BodyTooSlow(f"the body did not arrive within {seconds:g} seconds") from None
    raise BodyTooLarge(f"the body is over the limit of {limit} bytes; send less, or serve with a larger --max-body")


@dataclass(slots=True)
class BodyShape:
    """How much a body contains, counted outside of its texts."""

    values: int = 0  # number of commas, which is about the number of values
    parts: int = 0  # number of lists, objects and fields of objects
    depth: int = 0  # how many lists and objects are inside each other at most

    def check(self) -> None:
        for found, most, what, advice in (
            (self.values, MAX_BODY_VALUES, "values", "split it over several requests"),
            (self.parts, MAX_BODY_PARTS, "lists, objects and fields", "split it over several requests, or send texts"),
            (self.depth, MAX_BODY_DEPTH, "lists and objects inside each other", "send a flatter one"),
        ):
            if found > most:
                raise BodyTooComplex(f"the body has over {most:,} {what}; {advice}")


def shape_of(body: bytes, *, block: int = BLOCK) -> BodyShape:
    """Return the shape of a body, or raise BodyTooComplex as soon as it is over a limit. After a mistake in the JSON the counts
    may be wrong, which does no harm, because the parser stops at the mistake."""
    shape = BodyShape()
    inside = escaped = False  # inside: the next byte is inside a text; escaped: a backslash precedes it
    depth = 0
    for start in range(0, len(body), block):
        part = body[start + escaped : start + block]
        escaped = False
        if b"\\" in part:  # Remove escaped quotes, so that every quote that is left begins or ends a text.
            part = part.replace(b"\\\\", b"").replace(b'\\"', b"")
            escaped = part.endswith(b"\\")
        texts = part.translate(None, _TEXT).split(b'"')  # parts that are alternately outside and inside of a text
        outside = b"".join(texts[inside::2])
        inside ^= len(texts) % 2 == 0
        shape.values += outside.count(b",")
        shape.parts += outside.count(b"[") + outside.count(b"{") + outside.count(b":")
        depths = depth + np.cumsum(np.frombuffer(outside.translate(_DEEPER, b",:"), np.int8), dtype=np.int64)
        if len(depths):
            shape.depth, depth = max(shape.depth, int(depths.max())), int(depths[-1])
        shape.check()
    return shape


def read_json(body: bytes) -> object:
    """Return the JSON value of a body as plain Python values, or raise BadRequest."""
    shape_of(body)
    try:
        value: object = _DECODER.decode(body.removeprefix(_MARK))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _explained(body, error) from None
    return value


def _explained(body: bytes, error: Exception) -> BadRequest:
    """Return the error for a body that the parser refused. To name the field that is to blame, the body is parsed again with
    Python's parser, which accepts more than JSON: NaN, infinite numbers, half of a surrogate pair."""
    try:
        value = json.loads(body.decode("utf-8-sig"), parse_int=_integer)
    except ValueError as mistake:
        return BadRequest(f"the body is not valid JSON: {mistake}", code="invalid_json")
    for name, field in value.items() if isinstance(value, dict) else ():
        shown = name.encode("utf-8", "replace").decode()
        try:
            _DECODER.decode(json.dumps([name, field]))
        except msgspec.ValidationError:
            return BadRequest(f"{shown}: contains a number that is too large", param=shown, code="invalid_number")
        except msgspec.DecodeError:
            if _has_surrogate([name, field]):
                reason, code = "contains half of a surrogate pair; send valid Unicode", "invalid_text"
            else:
                reason, code = "contains NaN, or a number that is infinite or too long", "invalid_number"
            return BadRequest(f"{shown}: {reason}", param=shown, code=code)
    return BadRequest(f"the body is not valid JSON: {error}", code="invalid_json")


def _integer(digits: str) -> float:
    """Return an integer, or infinity for one with more digits than Python and msgspec read."""
    return int(digits) if len(digits) <= MOST_DIGITS else math.inf


def _has_surrogate(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False
