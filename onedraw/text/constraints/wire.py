"""The description of a reply's constraint as bytes, and back, so that it can be sent to an engine in another process.

The bytes are msgpack and are decoded into typed objects. `engine/wire.py` calls these functions for its messages. The grammar of
a response format is sent as its text; the engine's process compiles it.
"""

from __future__ import annotations

import msgspec

from onedraw.text.constraints.factory import ReplyConstraint
from onedraw.text.constraints.response_format import (
    ChoiceFormat,
    GbnfFormat,
    JsonFormat,
    LarkFormat,
    RegexFormat,
    ReplyFormat,
)
from onedraw.text.reply_parser import ReplySyntax
from onedraw.types import ConstraintSpec

FORMATS: dict[str, type[ReplyFormat]] = {
    kind.__name__: kind for kind in (JsonFormat, RegexFormat, ChoiceFormat, LarkFormat, GbnfFormat)
}


class WireConstraint(msgspec.Struct, frozen=True, array_like=True):
    """A ReplyConstraint. The format is preceded by the name of its class, since its fields alone do not tell which one it is."""

    syntax: ReplySyntax
    thinking_budget: int | None
    response_format: tuple[str, msgspec.Raw] | None


_DECODER = msgspec.msgpack.Decoder(WireConstraint)


def encode_constraint(spec: ConstraintSpec) -> bytes:
    assert isinstance(spec, ReplyConstraint)
    found = spec.response_format
    form = None if found is None else (type(found).__name__, msgspec.Raw(msgspec.msgpack.encode(found)))
    return msgspec.msgpack.encode(WireConstraint(spec.syntax, spec.thinking_budget, form))


def decode_constraint(data: bytes) -> ReplyConstraint:
    """Return the constraint that these bytes describe. Raise msgspec.DecodeError or ValueError if they describe none."""
    found = _DECODER.decode(data)
    form: ReplyFormat | None = None
    if found.response_format is not None:
        name, fields = found.response_format
        if name not in FORMATS:
            raise ValueError(f"there is no response format {name!r}")
        form = msgspec.msgpack.decode(fields, type=FORMATS[name])
    return ReplyConstraint(found.syntax, found.thinking_budget, form)
