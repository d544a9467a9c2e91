"""Tools as data, and the dialects in which model families write tool calls.

In: a chat template's source. Out: the dialect of its calls. A template without tools, or with a call syntax that is not
supported, gets the Hermes syntax, which the system message then explains to the model (`prompt.py`).
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
    """A function that the model may call. `parameters` is the text of a JSON schema, `param` the caller's path to it, for errors.
    Part of recorded requests, which hold it by its field names."""

    name: str
    description: str = ""
    parameters: str = NO_PARAMETERS
    strict: bool = False
    param: str = "tools"

    @property
    def schema(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.parameters)
        return found

    def as_openai(self) -> dict[str, Any]:
        """OpenAI's JSON form, which chat templates expect."""
        description = {"description": self.description} if self.description else {}
        return {"type": "function", "function": {"name": self.name, **description, "parameters": self.schema}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tool settings of a request."""

    tools: tuple[Tool, ...]  # described to the model
    allowed: tuple[Tool, ...]  # those of them that it may call
    required: bool = False  # the reply must call a tool
    parallel: bool = True  # it may make several calls

    @property
    def restricted(self) -> bool:
        """Some of the tools that the model knows may not be called."""
        return len(self.allowed) < len(self.tools)


@dataclass(frozen=True, slots=True)
class CallableTools:
    """The tools that a reply may call, and the dialect of the calls. Part of recorded requests, which hold it by its field
    names."""

    dialect: Dialect
    tools: tuple[Tool, ...] = ()
    parallel: bool = True  # else the reply ends with its first call


# Markers around a call, which may be special tokens. The dialects llama and pythonic have none.
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
    native: bool  # the chat template renders tools itself


# Texts that only templates of this dialect contain, the most specific dialect first.
_TEMPLATE_SIGNS: Sequence[tuple[Dialect, tuple[str, ...]]] = (
    ("gemma", ("<|tool_call>", "call:")),
    ("laguna", ("<tool_call>", "<arg_key>", "<arg_value>")),
    ("qwen_xml", ("<tool_call>", "<function=", "<parameter=")),
    ("hermes", ("<tool_call>", "arguments")),
    ("pythonic", ("[func_name1(params_name1=params_value1",)),
    ("llama", ("ipython", '"parameters": ')),
)


def detect_tool_syntax(template_source: str) -> ToolSyntax:
    """The tool syntax of the family that this chat template belongs to."""
    if "tools" in template_source:
        for dialect, signs in _TEMPLATE_SIGNS:
            if all(sign in template_source for sign in signs):
                return ToolSyntax(dialect, native=True)
    return ToolSyntax("hermes", native=False)
