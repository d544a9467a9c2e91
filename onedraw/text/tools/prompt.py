"""Messages with tools, in the form that a chat template can render.

In: messages in OpenAI's form, tools, and the template's tool syntax. Out: messages and keyword arguments for the template. The
arguments of past calls become objects, as templates expect. For a template without tools, the system message describes the tools,
past calls become text of the assistant, and their results become user messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from onedraw.text.tools.dialects import Tool, ToolSyntax

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
    """Messages and keyword arguments for the template."""
    converted = [_with_parsed_arguments(message, objects_only=syntax.dialect == "qwen_xml") for message in messages]
    if syntax.native:
        return converted, {"tools": [tool.as_openai() for tool in tools]} if tools else {}
    if not tools and not any(message.get("tool_calls") or message["role"] == "tool" for message in converted):
        return converted, {}
    return _tools_as_text(converted, tools), {}


def _with_parsed_arguments(message: Mapping[str, Any], *, objects_only: bool) -> dict[str, Any]:
    """`objects_only`: the template iterates over the arguments, so arguments that are not an object (a call that was cut off)
    become an empty one."""
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
