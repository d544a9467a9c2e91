"""Tools as data: what may be called, and in which family's syntax calls are written.

In: a chat template's source. Out: the dialect of its calls. A template that knows no tools, or writes calls in a way that we
do not read, gets Hermes' syntax, explained to the model in the system message (`tool_prompt.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Dialect = Literal["hermes", "qwen_xml", "laguna", "gemma", "llama", "pythonic"]

NO_PARAMETERS = '{"type": "object", "properties": {}, "additionalProperties": false}'


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is the text of a JSON schema, `param` the caller's path to it."""

    name: str
    description: str = ""
    parameters: str = NO_PARAMETERS
    strict: bool = False
    param: str = "tools"

    @property
    def schema(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.parameters)
        return found

    def told(self) -> dict[str, Any]:
        """As chat templates expect it."""
        described = {"description": self.description} if self.description else {}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.schema}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says of tools: which the model hears of, which it may call, and whether it must."""

    tools: tuple[Tool, ...]
    allowed: tuple[Tool, ...]
    required: bool = False
    parallel: bool = True

    @property
    def restricted(self) -> bool:
        """The model hears of tools that it may not call."""
        return len(self.allowed) < len(self.tools)


@dataclass(frozen=True, slots=True)
class CallableTools:
    """How calls in a reply are read: part of its ReplySyntax."""

    dialect: Dialect
    tools: tuple[Tool, ...] = ()
    parallel: bool = True  # else the reply ends with its first call


# Markers around a call, which may be special tokens; the last two dialects have none.
MARKERS: dict[Dialect, tuple[str, str]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen_xml": ("<tool_call>", "</tool_call>"),
    "laguna": ("<tool_call>", "</tool_call>"),
    "gemma": ("<|tool_call>", "<tool_call|>"),
}
GEMMA_QUOTE = '<|"|>'


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    dialect: Dialect
    native: bool  # the template itself tells the model of tools


def detect_tool_syntax(template_source: str) -> ToolSyntax:
    """How the family that this chat template belongs to calls tools."""
    if "tools" in template_source:
        for dialect, signs in _SIGNS:
            if all(sign in template_source for sign in signs):
                return ToolSyntax(dialect, native=True)
    return ToolSyntax("hermes", native=False)


# What only this dialect's templates say; the most particular first.
_SIGNS: Sequence[tuple[Dialect, tuple[str, ...]]] = (
    ("gemma", ("<|tool_call>", "call:")),
    ("laguna", ("<tool_call>", "<arg_key>", "<arg_value>")),
    ("qwen_xml", ("<tool_call>", "<function=", "<parameter=")),
    ("hermes", ("<tool_call>", "arguments")),
    ("pythonic", ("[func_name1(params_name1=params_value1",)),
    ("llama", ("ipython", '"parameters": ')),
)
