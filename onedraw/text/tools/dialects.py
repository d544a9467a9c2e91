"""Tools as data, and the dialects (call syntaxes) in which model families write tool calls.

A marker is the text before or after a call, such as <tool_call>. Constrained calls follow a grammar; a strict tool is one whose
schema the calls must follow completely.

The source of a chat template shows the dialect. If the template has no tools, or a call syntax that is not supported, calls have
the Hermes syntax, and a system message explains it to the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Dialect = Literal["hermes", "qwen_xml", "laguna", "gemma", "llama", "pythonic"]

NO_PARAMETERS = '{"type": "object", "properties": {}, "additionalProperties": false}'  # the schema of a tool without arguments


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is the text of a JSON schema, and `param` is its path in the caller's
    request, for errors. Recorded requests store a tool by its field names, which must not be renamed."""

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
        """Return the tool in OpenAI's JSON shape, which chat templates expect."""
        description = {"description": self.description} if self.description else {}
        return {"type": "function", "function": {"name": self.name, **description, "parameters": self.schema}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Which tools a request has, and how the reply may use them."""

    tools: tuple[Tool, ...]  # the tools that the prompt describes
    allowed: tuple[Tool, ...]  # the tools among them that the reply may call
    required: bool = False  # whether the reply must call a tool
    parallel: bool = True  # whether the reply may call several tools

    @property
    def restricted(self) -> bool:
        """Whether the prompt describes tools that the reply may not call."""
        return len(self.allowed) < len(self.tools)


@dataclass(frozen=True, slots=True)
class CallableTools:
    """The tools that a reply may call, and the dialect of the calls. Recorded requests store it by its field names, which must
    not be renamed."""

    dialect: Dialect
    tools: tuple[Tool, ...] = ()
    parallel: bool = True  # whether the reply may have several calls; if not, it ends with the first
    required: bool = False  # whether the reply must be a call


# The texts before and after a call, which may be special tokens. The dialects llama and pythonic have none.
MARKERS: dict[Dialect, tuple[str, str]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen_xml": ("<tool_call>", "</tool_call>"),
    "laguna": ("<tool_call>", "</tool_call>"),
    "gemma": ("<|tool_call>", "<tool_call|>"),
}
# In dialects with tags: the tag that closes the value of a parameter, and the texts that can come next. A closing tag before any
# other text is part of the value.
VALUE_ENDS: dict[Dialect, tuple[str, tuple[str, ...]]] = {
    "qwen_xml": ("</parameter>", ("<parameter=", "</function>", "</tool_call>", "<tool_call>")),
    "laguna": ("</arg_value>", ("<arg_key>", "</tool_call>", "<tool_call>")),
}
GEMMA_QUOTE = '<|"|>'  # Gemma writes this before and after a string.


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    dialect: Dialect
    native: bool  # whether the chat template can render tools and calls itself


# Texts that occur together only in templates of the dialect. More specific dialects come first.
_TEMPLATE_SIGNS: Sequence[tuple[Dialect, tuple[str, ...]]] = (
    ("gemma", ("<|tool_call>", "call:")),
    ("laguna", ("<tool_call>", "<arg_key>", "<arg_value>")),
    ("qwen_xml", ("<tool_call>", "<function=", "<parameter=")),
    ("hermes", ("<tool_call>", "arguments")),
    ("pythonic", ("[func_name1(params_name1=params_value1",)),
    ("llama", ("ipython", '"parameters": ')),
)


def detect_tool_syntax(template_source: str) -> ToolSyntax:
    """Return the call syntax that the source of a chat template shows."""
    if "tools" in template_source:
        for dialect, signs in _TEMPLATE_SIGNS:
            if all(sign in template_source for sign in signs):
                return ToolSyntax(dialect, native=True)
    return ToolSyntax("hermes", native=False)


# ---------------------------------------------------------------------- messages with tools, as a chat template can render them


_INSTRUCTIONS = """You can call functions. Each line between the tags describes one of them:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as JSON between tags, and then wait for the result:
<tool_call>
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def template_inputs(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], syntax: ToolSyntax
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the messages and keyword arguments for the chat template. If it cannot render tools, they become plain text."""
    converted = [_with_parsed_arguments(message, objects_only=syntax.dialect == "qwen_xml") for message in messages]
    if syntax.native:
        return converted, {"tools": [tool.as_openai() for tool in tools]} if tools else {}
    if not tools and not any(message.get("tool_calls") or message["role"] == "tool" for message in converted):
        return converted, {}
    return _tools_as_text(converted, tools), {}


def _with_parsed_arguments(message: Mapping[str, Any], *, objects_only: bool) -> dict[str, Any]:
    """Parse the arguments of a message's calls. With `objects_only` the template iterates over them, so arguments that are not an
    object, such as those of a cut-off call, become an empty one."""
    converted = dict(message)
    if converted.get("tool_calls"):
        converted["tool_calls"] = [_parse_arguments(call, objects_only=objects_only) for call in converted["tool_calls"]]
    return converted


def _parse_arguments(call: Mapping[str, Any], *, objects_only: bool) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            found = json.loads(function["arguments"])
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            function["arguments"] = found
        elif objects_only:
            function["arguments"] = {}
    return {**call, "function": function}


def _tools_as_text(messages: Sequence[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    converted: list[dict[str, Any]] = []
    for message in messages:
        match message["role"]:
            case "assistant":
                calls = [_call_as_text(call) for call in message.get("tool_calls") or ()]
                content = "\n".join([*([message["content"]] if message.get("content") else []), *calls])
                converted.append({key: value for key, value in message.items() if key != "tool_calls"} | {"content": content})
            case "tool":
                result = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
                if converted and converted[-1].get("tool_results"):
                    converted[-1]["content"] += "\n" + result
                else:
                    converted.append({"role": "user", "content": result, "tool_results": True})
            case _:
                converted.append(message)
    if tools:
        described = "\n".join(json.dumps(tool.as_openai(), ensure_ascii=False) for tool in tools)
        instructions = _INSTRUCTIONS.format(tools=described)
        if converted and converted[0]["role"] == "system":
            converted[0] = {**converted[0], "content": f"{converted[0]['content']}\n\n{instructions}"}
        else:
            converted.insert(0, {"role": "system", "content": instructions})
    return [{key: value for key, value in message.items() if key != "tool_results"} for message in converted]


def _call_as_text(call: Mapping[str, Any]) -> str:
    function = call["function"]
    value = {"name": function["name"], "arguments": function.get("arguments", {})}
    return f"<tool_call>\n{json.dumps(value, ensure_ascii=False)}\n</tool_call>"
