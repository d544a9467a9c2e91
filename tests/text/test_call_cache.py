"""The cache of replies with tool calls, and messages with tools in the form that templates render."""

from __future__ import annotations

from typing import Any

from onedraw.text.tools.call_cache import CachedReply, ToolCallCache, cached_prompt, prompt_hash
from onedraw.text.tools.dialects import Tool, ToolSyntax, template_inputs

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
ASSISTANT = {"role": "assistant", "content": "", "tool_calls": [CALL]}
USER, RESULT = {"role": "user", "content": "hi"}, {"role": "tool", "tool_call_id": "call_1", "content": "5"}


def render(messages: Any, add_generation_prompt: bool) -> str:
    """A template that formats calls in its own way."""
    text = ""
    for message in messages:
        calls = "".join(f"<call>{c['function']['name']}</call>" for c in message.get("tool_calls", ()))
        text += f"[{message['role']}]{message['content']}{calls}<end>\n"
    return text + ("[assistant]" if add_generation_prompt else "")


def cache_with(**changes: Any) -> ToolCallCache:
    """A cache with one reply, whose fields may be changed."""
    cache = ToolCallCache()
    fields = {"prompt_hash": prompt_hash(render([USER], True)), "ids": (1, 2, 3), "content": "", "calls": (("f", '{"a":1}'),)}
    cache.put("call_1", CachedReply(**fields | changes))
    return cache


def found(cache: ToolCallCache, messages: Any, render: Any = render) -> Any:
    text = render(messages, True)
    return cached_prompt(messages, text, cache=cache, render=render, eos_texts=["<end>"], special_texts=["<end>"])


def test_the_prompt_begins_with_the_cached_tokens() -> None:
    messages = [USER, ASSISTANT, RESULT]
    assert found(cache_with(), messages) == ((1, 2, 3), "<end>\n[tool]5<end>\n[assistant]")
    reordered = {"name": "f", "arguments": '{"b": [true], "a": 1}'}
    messages[1] = {**ASSISTANT, "tool_calls": [{**CALL, "function": reordered}]}
    assert found(cache_with(calls=(("f", '{"a":1,"b":[ true ]}'),)), messages) is not None


def test_a_different_prompt_call_or_content_is_not_found() -> None:
    messages = [USER, ASSISTANT, RESULT]
    assert found(cache_with(prompt_hash="other"), messages) is None
    assert found(cache_with(calls=(("g", '{"a":1}'),)), messages) is None
    assert found(cache_with(calls=(("f", '{"a":2}'),)), messages) is None
    assert found(cache_with(calls=(("f", '{"a":1.0}'),)), messages) is None
    assert found(cache_with(calls=(("f", '{"a":true}'),)), messages) is None
    assert found(cache_with(content="x"), messages) is None
    assert found(cache_with(), [USER, {**ASSISTANT, "tool_calls": [{**CALL, "id": "call_2"}]}, RESULT]) is None
    assert found(ToolCallCache(), messages) is None


def test_a_template_may_render_the_last_message_differently() -> None:
    def with_empty_reasoning(messages: Any, add_generation_prompt: bool) -> str:
        text = render(messages, add_generation_prompt)
        return text if add_generation_prompt else text.replace("[assistant]", "[assistant]<think></think>")

    assert found(cache_with(), [USER, ASSISTANT, RESULT], with_empty_reasoning) == (
        (1, 2, 3),
        "<end>\n[tool]5<end>\n[assistant]",
    )


def test_the_oldest_replies_are_dropped_when_the_cache_is_full() -> None:
    cache = ToolCallCache(max_tokens=10)
    for number in range(5):
        cache.put(f"call_{number}", CachedReply("hash", (0,) * 4, "", (("f", '{"a": 1}'),)))
    messages = [{**ASSISTANT, "tool_calls": [{**CALL, "id": f"call_{number}"}]} for number in range(5)]
    assert [cache.get(message) is not None for message in messages] == [False, False, False, True, True]


def test_a_template_with_tools_gets_them_with_arguments_as_objects() -> None:
    tool = Tool("f", "does f", '{"type": "object"}')
    messages, arguments = template_inputs([USER, ASSISTANT, RESULT], [tool], ToolSyntax("hermes", native=True))
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert arguments["tools"][0]["function"] == {"name": "f", "description": "does f", "parameters": {"type": "object"}}


def test_for_a_template_without_tools_the_system_message_explains_them() -> None:
    tool = Tool("f", "does f", '{"type": "object"}')
    chat = [{"role": "system", "content": "Be brief."}, USER, ASSISTANT, RESULT, {**RESULT, "content": "6"}]
    messages, arguments = template_inputs(chat, [tool], ToolSyntax("hermes", native=False))
    assert arguments == {}
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user"]
    assert messages[0]["content"].startswith("Be brief.")
    assert '"name": "f"' in messages[0]["content"]
    assert messages[2]["content"] == '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert messages[3]["content"] == "<tool_response>\n5\n</tool_response>\n<tool_response>\n6\n</tool_response>"
    assert template_inputs([USER], [], ToolSyntax("hermes", native=False)) == ([USER], {})
