"""CallableTools as they were written, found again by the message that tells of them."""

from __future__ import annotations

from typing import Any

from onedraw.text.tools.call_cache import CachedReply, ToolCallCache, cached_prompt, prompt_hash
from onedraw.text.tools.dialects import Tool, ToolSyntax
from onedraw.text.tools.prompt import template_inputs

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
ASSISTANT = {"role": "assistant", "content": "", "tool_calls": [CALL]}
USER, RESULT = {"role": "user", "content": "hi"}, {"role": "tool", "tool_call_id": "call_1", "content": "5"}


def render(messages: Any, follows: bool) -> str:
    """A template that writes calls in its own way."""
    text = ""
    for message in messages:
        calls = "".join(f"<call>{c['function']['name']}</call>" for c in message.get("tool_calls", ()))
        text += f"[{message['role']}]{message['content']}{calls}<end>\n"
    return text + ("[assistant]" if follows else "")


def memory_of(**changes: Any) -> ToolCallCache:
    memory = ToolCallCache()
    kept = {"origin": prompt_hash(render([USER], True)), "ids": (1, 2, 3), "content": "", "calls": (("f", '{"a":1}'),)}
    memory.put("call_1", CachedReply(**kept | changes))
    return memory


def found(memory: ToolCallCache, messages: Any) -> Any:
    return cached_prompt(messages, render(messages, True), memory=memory, render=render, ends=["<end>"], marks=["<end>"])


def test_the_prompt_begins_with_the_remembered_tokens() -> None:
    messages = [USER, ASSISTANT, RESULT]
    assert found(memory_of(), messages) == ((1, 2, 3), "<end>\n[tool]5<end>\n[assistant]")
    several = {"name": "f", "arguments": '{"b": [true], "a": 1}'}
    messages[1] = {**ASSISTANT, "tool_calls": [{**CALL, "function": several}]}
    assert found(memory_of(calls=(("f", '{"a":1,"b":[ true ]}'),)), messages) is not None


def test_another_beginning_another_call_or_another_content_is_not_it() -> None:
    messages = [USER, ASSISTANT, RESULT]
    assert found(memory_of(origin="other"), messages) is None
    assert found(memory_of(calls=(("g", '{"a":1}'),)), messages) is None
    assert found(memory_of(calls=(("f", '{"a":2}'),)), messages) is None
    assert found(memory_of(calls=(("f", '{"a":1.0}'),)), messages) is None
    assert found(memory_of(calls=(("f", '{"a":true}'),)), messages) is None
    assert found(memory_of(content="x"), messages) is None
    assert found(memory_of(), [USER, {**ASSISTANT, "tool_calls": [{**CALL, "id": "call_2"}]}, RESULT]) is None
    assert found(ToolCallCache(), messages) is None


def test_a_template_that_writes_the_last_message_otherwise_is_seen_through() -> None:
    def moody(messages: Any, follows: bool) -> str:
        text = render(messages, follows)
        return text if follows else text.replace("[assistant]", "[assistant]<think></think>")

    messages = [USER, ASSISTANT, RESULT]
    text = moody(messages, True)
    assert cached_prompt(messages, text, memory=memory_of(), render=moody, ends=["<end>"], marks=["<end>"]) == (
        (1, 2, 3),
        "<end>\n[tool]5<end>\n[assistant]",
    )


def test_memory_is_bounded() -> None:
    memory = ToolCallCache(most_tokens=10)
    for number in range(5):
        memory.put(f"call_{number}", CachedReply("o", (0,) * 4, "", (("f", "{}"),)))
    assert list(memory._kept) == ["call_3", "call_4"]


def test_a_template_that_knows_tools_gets_them_with_arguments_as_objects() -> None:
    tool = Tool("f", "does f", '{"type": "object"}')
    messages, told = template_inputs([USER, ASSISTANT, RESULT], [tool], ToolSyntax("hermes", native=True))
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert told["tools"][0]["function"] == {"name": "f", "description": "does f", "parameters": {"type": "object"}}


def test_a_template_that_knows_none_has_them_explained() -> None:
    tool = Tool("f", "does f", '{"type": "object"}')
    spoken = [{"role": "system", "content": "Be brief."}, USER, ASSISTANT, RESULT, {**RESULT, "content": "6"}]
    messages, told = template_inputs(spoken, [tool], ToolSyntax("hermes", native=False))
    assert told == {}
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user"]
    assert messages[0]["content"].startswith("Be brief.")
    assert '"name": "f"' in messages[0]["content"]
    assert messages[2]["content"] == '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert messages[3]["content"] == "<tool_response>\n5\n</tool_response>\n<tool_response>\n6\n</tool_response>"
    assert template_inputs([USER], [], ToolSyntax("hermes", native=False)) == ([USER], {})
