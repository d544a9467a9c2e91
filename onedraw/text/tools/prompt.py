"""Messages with tools, as a chat template can render them.

In: messages in OpenAI's form, tools, and how the template knows tools. Out: messages and keyword arguments for the template.
Arguments of past calls become objects, as templates expect. A template that knows no tools gets them explained in the system
message, past calls as the text they were, and results as messages of the user.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from onedraw.text.tools.dialects import Tool, ToolSyntax

_EXPLAINED = """You can call functions. Each line between the tags describes one of them:
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
    objects = [_with_objects(message, syntax.dialect == "qwen_xml") for message in messages]
    if syntax.native:
        return objects, {"tools": [tool.told() for tool in tools]} if tools else {}
    if not tools and not any(message.get("tool_calls") or message["role"] == "tool" for message in objects):
        return objects, {}
    return _explained(objects, tools), {}


def _with_objects(message: Mapping[str, Any], objects: bool) -> dict[str, Any]:
    """`objects`: the template walks over arguments, so those of a call that was cut off are none instead of a text."""
    said = dict(message)
    if said.get("tool_calls"):
        said["tool_calls"] = [_call_with_object(call, objects) for call in said["tool_calls"]]
    return said


def _call_with_object(call: Mapping[str, Any], objects: bool) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            found = json.loads(function["arguments"])
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            function["arguments"] = found
        elif objects:
            function["arguments"] = {}
    return {**call, "function": function}


def _explained(messages: Sequence[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    written: list[dict[str, Any]] = []
    for message in messages:
        match message["role"]:
            case "assistant":
                calls = [_call_text(call) for call in message.get("tool_calls") or ()]
                content = "\n".join([*([message["content"]] if message.get("content") else []), *calls])
                written.append({key: value for key, value in message.items() if key != "tool_calls"} | {"content": content})
            case "tool":
                result = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
                if written and written[-1].get("tool_results"):
                    written[-1]["content"] += "\n" + result
                else:
                    written.append({"role": "user", "content": result, "tool_results": True})
            case _:
                written.append(message)
    if tools:
        told = _EXPLAINED.format(tools="\n".join(json.dumps(tool.told(), ensure_ascii=False) for tool in tools))
        if written and written[0]["role"] == "system":
            written[0] = {**written[0], "content": f"{written[0]['content']}\n\n{told}"}
        else:
            written.insert(0, {"role": "system", "content": told})
    return [{key: value for key, value in message.items() if key != "tool_results"} for message in written]


def _call_text(call: Mapping[str, Any]) -> str:
    function = call["function"]
    said = {"name": function["name"], "arguments": function.get("arguments", {})}
    return f"<tool_call>\n{json.dumps(said, ensure_ascii=False)}\n</tool_call>"
