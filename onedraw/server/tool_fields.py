"""Tools in request bodies: `tools`, `tool_choice`, and earlier calls.

In: their JSON. Out: frozen models. `tool_choice` has one shape in /v1/chat/completions and another in /v1/responses; both are
parsed to the same ToolChoice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic_core import PydanticCustomError

from onedraw.server.fields import TOOL_NAME, StrictModel, Whole, field_doc

Mode = Literal["none", "auto", "required"]


class CalledFunction(StrictModel):
    name: str = field_doc("string", "required", ..., pattern=TOOL_NAME)
    arguments: str = field_doc("string", "a JSON object, as text", "{}")


class ToolCall(StrictModel):
    id: str = field_doc("string", "as in the reply; required", ...)
    type: Literal["function"] = field_doc('"function"', "", "function")
    function: CalledFunction = field_doc("object", "`name` and `arguments`, as in the reply", ...)
    index: Whole | None = field_doc("integer", "accepted, as in a stream", exclude=True)


class FunctionTool(StrictModel):
    name: str = field_doc("string", "letters, digits, `_ . : / -`; required", ..., pattern=TOOL_NAME)
    description: str | None = field_doc("string", "shown to the model")
    parameters: dict[str, Any] | None = field_doc("object", "a JSON schema of the arguments; none: no arguments")
    strict: bool = field_doc("boolean", "arguments of this tool always follow its schema", False)


class ToolSpec(StrictModel):
    type: Literal["function"] = field_doc('"function"', "required", ...)
    function: FunctionTool = field_doc("object", "see below; required", ...)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools may be called, and whether one must be. `names` with the caller's path to each; None: all of them."""

    mode: Mode
    names: tuple[tuple[str, str], ...] | None = None
    named: bool = False  # one tool, by its name alone

    def allows(self, name: str) -> bool:
        return self.names is None or any(name == allowed for allowed, _ in self.names)


def chat_choice(value: object) -> ToolChoice:
    """The shape of /v1/chat/completions: names inside `function`, allowed tools inside `allowed_tools`."""
    if isinstance(value, ToolChoice):  # from a request of another API
        return value
    given = _object_or_mode(value)
    if isinstance(given, ToolChoice):
        return given
    if given["type"] == "function":
        _only(given, ("type", "function"))
        return ToolChoice("required", (_named(given.get("function"), ".function"),), named=True)
    _only(given, ("type", "allowed_tools"))
    return _allowed(given.get("allowed_tools"), ".allowed_tools", "function")


def response_choice(value: object) -> ToolChoice:
    """The shape of /v1/responses: everything in one object."""
    given = _object_or_mode(value)
    if isinstance(given, ToolChoice):
        return given
    if given["type"] == "function":
        return ToolChoice("required", (_named({k: v for k, v in given.items() if k != "type"}, ""),), named=True)
    return _allowed({k: v for k, v in given.items() if k != "type"}, "", None)


def _object_or_mode(value: Any) -> ToolChoice | Mapping[str, Any]:
    match value:
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function" | "allowed_tools"}:
            given: Mapping[str, Any] = value
            return given
        case {"type": str(kind)}:
            raise PydanticCustomError("choice", "tools of type {kind} are not supported", {"kind": kind, "at": ".type"})
        case _:
            raise PydanticCustomError("choice", 'must be "none", "auto", "required", or an object that names tools')


def _allowed(value: object, at: str, inside: str | None) -> ToolChoice:
    """The tools of `allowed_tools`; `inside`: the field of each tool that contains its name."""
    if not isinstance(value, dict):
        raise PydanticCustomError("choice", "must be an object with mode and tools", {"at": at})
    _only(value, ("mode", "tools"), at)
    mode, tools = value.get("mode"), value.get("tools")
    if mode not in ("auto", "required"):
        raise PydanticCustomError("choice", 'must be "auto" or "required"', {"at": f"{at}.mode"})
    if not isinstance(tools, list) or not tools:
        raise PydanticCustomError("choice", "must be a list of tools, at least one", {"at": f"{at}.tools"})
    return ToolChoice(mode, tuple(_reference(tool, f"{at}.tools[{number}]", inside) for number, tool in enumerate(tools)))


def _reference(value: object, at: str, inside: str | None) -> tuple[str, str]:
    if not isinstance(value, dict) or value.get("type") != "function":
        raise PydanticCustomError("choice", 'must be {"type": "function", …}', {"at": f"{at}.type"})
    if inside is None:
        return _named({k: v for k, v in value.items() if k != "type"}, at)
    _only(value, ("type", inside), at)
    return _named(value.get(inside), f"{at}.{inside}")


def _named(value: object, at: str) -> tuple[str, str]:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise PydanticCustomError("choice", "must be the name of a tool", {"at": f"{at}.name"})
    _only(value, ("name",), at)
    return value["name"], f"{at}.name"


def _only(value: Mapping[str, Any], names: Sequence[str], at: str = "") -> None:
    for name, inner in value.items():
        if name not in names and inner is not None:
            raise PydanticCustomError("choice", "unknown field", {"at": f"{at}.{name}"})
