"""Messages between a client and an engine in another process or on another machine, as bytes: a version byte, then msgpack.

In: a message (ToEngine or FromEngine). Out: bytes, and back. Decoding is typed: a value of another type than the field's, or a
value that the field's class refuses, raises WireError, and nothing but these classes is ever built from the bytes. Every field
comes back as it was sent, floats with the same bits. Only integers without an upper limit, such as top_k, are cut to 64 bits,
where they mean the same.

A request describes its constraint as data that the engine package does not know, so whoever makes a RequestCodec also gives it
the two functions that turn such a description into bytes and back (`text/constraints/wire.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import numpy as np

from onedraw import errors
from onedraw.backends.base import Capacity
from onedraw.engine.engine import Event
from onedraw.engine.stats import Stats
from onedraw.errors import BadRequest, OnedrawError
from onedraw.types import ConstraintSpec, Request

VERSION = 5  # goes up with every change of a message or of a class in it
MAX_INTEGER = 2**63 - 1  # No vocabulary or history is as long, so a larger top_k or range means the same as this one.
# The classes of errors that can cross, by name. An error of another class crosses as the nearest of these that it inherits from.
ERRORS: dict[str, type[OnedrawError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, OnedrawError)
}

EncodeConstraint = Callable[[ConstraintSpec], bytes]
DecodeConstraint = Callable[[bytes], ConstraintSpec]


class WireError(Exception):
    """Bytes that are not a message of this version."""


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Requests that are accepted or refused together. Entry i of `constraints` describes the constraint of request i, whose own
    field `constraint` is None."""

    requests: tuple[Request, ...]
    constraints: tuple[bytes | None, ...]


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request_ids: tuple[str, ...]


class Close(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Refuse new requests, let running ones finish within `drain_seconds`, then stop the engine."""

    drain_seconds: float


class Started(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engine's first message: its sizes, the most requests that may run and wait together, its counters, and the fingerprint
    of the model as it runs there, which clients of the server get with replies."""

    capacity: Capacity
    max_requests: int
    stats: Stats
    fingerprint: str


class Events(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The events of one engine step or of several, oldest first, and the counters after them."""

    events: tuple[Event, ...]
    stats: Stats | None = None


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engine's last message if it could not be built or cannot continue."""

    error: OnedrawError


class Report(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A line of the engine's log, with its level; or, with level 0, a line about its progress while it is built."""

    level: int
    logger: str
    text: str


ToEngine = Submit | Cancel | Close
FromEngine = Started | Events | Failed | Report
MessageT = TypeVar("MessageT", ToEngine, FromEngine)


def _written(value: Any) -> Any:
    """Return what is encoded for a value that msgspec does not know."""
    if isinstance(value, OnedrawError):
        kind = next(kind for kind in type(value).__mro__ if ERRORS.get(kind.__name__) is kind)
        state = {name: _plain(field) for name, field in vars(value).items()}
        if kind is not type(value):  # The receiver cannot build this class, so keep its class attributes.
            state = {"code": value.code, "param": value.param} | state
        return [kind.__name__, [_plain(argument) for argument in value.args], state]
    if isinstance(value, np.generic):  # A sampler may leave its numbers as numpy made them; a float32 is exact as a float64.
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to another process")


def _plain(value: Any) -> Any:
    """Return a part of an error as it can be sent. A message may repeat text from a client that is not valid Unicode."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    return value if isinstance(value, bool | int | float | None) else str(value)


def _read(kind: type, value: Any) -> Any:
    """Build a value of a class that msgspec does not know. The bytes choose among the classes in ERRORS only."""
    if kind is not OnedrawError:
        raise NotImplementedError(f"{kind.__name__} cannot come from another process")
    name, arguments, state = msgspec.convert(value, tuple[str, list[Any], dict[str, Any]])
    if name not in ERRORS:
        raise ValueError(f"there is no error class {name!r}")
    made = ERRORS[name]
    error = made.__new__(made, *arguments)
    error.args = tuple(arguments)
    vars(error).update({sys.intern(key): item for key, item in state.items()})
    return error


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_written)
_TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine, dec_hook=_read)
_FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine, dec_hook=_read)
_PREFIX = bytes([VERSION])


def encode(message: ToEngine | FromEngine) -> bytes:
    return _PREFIX + _ENCODER.encode(message)


def decode_to_engine(data: bytes | memoryview) -> ToEngine:
    """Return the message that a client sent to the engine, or raise WireError."""
    return _decode(_TO_ENGINE, data)


def decode_from_engine(data: bytes | memoryview) -> FromEngine:
    """Return the message that an engine sent to its client, or raise WireError."""
    return _decode(_FROM_ENGINE, data)


def _decode(decoder: msgspec.msgpack.Decoder[MessageT], data: bytes | memoryview) -> MessageT:
    if not data or data[0] != VERSION:
        found = f"version {data[0]}" if data else "nothing"
        raise WireError(f"the other process sent {found}, and this one reads version {VERSION}: run the same version of Onedraw")
    try:
        return decoder.decode(memoryview(data)[1:])
    except (msgspec.DecodeError, OnedrawError, ValueError, TypeError, RecursionError) as error:
        raise WireError(f"a message of another process cannot be read: {error}") from error


class RequestCodec:
    """Requests with their constraints as Submit messages, and back."""

    def __init__(self, encode_constraint: EncodeConstraint, decode_constraint: DecodeConstraint) -> None:
        self._encode_constraint, self._decode_constraint = encode_constraint, decode_constraint

    def submit(self, requests: tuple[Request, ...]) -> bytes:
        """Return a Submit message. A request that cannot be sent raises BadRequest."""
        try:
            constraints = tuple(None if one.constraint is None else self._encode_constraint(one.constraint) for one in requests)
            bare = tuple(replace(one, constraint=None) for one in requests)
            try:
                return encode(Submit(bare, constraints))
            except OverflowError:
                return encode(Submit(tuple(map(_within_64_bits, bare)), constraints))
        except OverflowError as error:
            raise BadRequest(f"a number of the request does not fit into 64 bits ({error}); use a smaller one") from None
        except UnicodeEncodeError as error:
            raise BadRequest(f"a text of the request is not valid Unicode ({error.reason}); remove unpaired surrogates") from None

    def requests(self, message: Submit) -> tuple[Request, ...]:
        """Return the requests of a message with their constraints, or raise WireError."""
        if len(message.requests) != len(message.constraints) or any(one.constraint is not None for one in message.requests):
            raise WireError("a message has requests without the description of their constraints")
        return tuple(
            one if described is None else replace(one, constraint=self._read_constraint(described))
            for one, described in zip(message.requests, message.constraints, strict=True)
        )

    def _read_constraint(self, described: bytes) -> ConstraintSpec:
        try:
            return self._decode_constraint(described)
        except (msgspec.DecodeError, OnedrawError, ValueError, TypeError) as error:
            raise WireError(f"the description of a constraint cannot be read: {error}") from error


def _within_64_bits(request: Request) -> Request:
    """Return the request with the integers that have no upper limit cut to 64 bits, and the values of logit_bias as floats."""
    params = request.params
    dry = params.dry
    if dry is not None:
        dry = replace(dry, range=min(dry.range, MAX_INTEGER))
    bias = tuple((token, float(value)) for token, value in params.logit_bias)
    return replace(request, params=replace(params, top_k=min(params.top_k, MAX_INTEGER), dry=dry, logit_bias=bias))
