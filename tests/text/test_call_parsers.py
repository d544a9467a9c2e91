"""Tool calls are parsed in every dialect, whatever the chunks of text are; text that is not a call stays content."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onedraw.text.tools.call_parsers import CallArguments
from onedraw.text.tools.call_stream import ToolCallParser
from onedraw.text.tools.dialects import CallableTools, Dialect, Tool, ToolSyntax, detect_tool_syntax, template_inputs
from tests.support.collect_calls import collect_calls

WEATHER = Tool(
    "weather",
    parameters=json.dumps(
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "units": {"type": ["string", "null"]},
                "where": {"type": "object"},
            },
        }
    ),
)
CITY = 'São "P" \\ {}</x>'
ARGUMENTS = {"city": CITY, "days": 3, "units": None, "where": {"a": [1, "b"], "c": True}}

CALLS: dict[Dialect, str] = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>',
    "qwen_xml": (
        f"<tool_call>\n<function=weather>\n<parameter=city>\n{CITY}\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        '<parameter=units>\nnull\n</parameter>\n<parameter=where>\n{"a": [1, "b"], "c": true}\n</parameter>\n'
        "</function>\n</tool_call>"
    ),
    "laguna": (
        f"<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{CITY}</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n<arg_key>units</arg_key>\n<arg_value>null</arg_value>\n<arg_key>where</arg_key>\n"
        '<arg_value>{"a": [1, "b"], "c": true}</arg_value>\n</tool_call>'
    ),
    "gemma": (
        f'<|tool_call>call:weather{{city:<|"|>{CITY}<|"|>,days:3,units:null,where:{{a:[1,<|"|>b<|"|>],c:true}}}}<tool_call|>'
    ),
    "llama": f'{{"name": "weather", "parameters": {json.dumps(ARGUMENTS)}}}',
    "pythonic": f"[weather(city={CITY!r}, days=3, units=None, where={{'a': [1, 'b'], 'c': True}})]",
}
MARKED = ("hermes", "qwen_xml", "laguna", "gemma")


def parse(dialect: Dialect, text: str, width: int = 1000) -> tuple[str, list[tuple[str, str]], int]:
    """Content, calls with their arguments, and how many calls are complete."""
    parser = ToolCallParser(CallableTools(dialect, (WEATHER,)))
    events = [event for start in range(0, len(text), width) for event in parser.push(text[start : start + width])]
    return *collect_calls([*events, *parser.finish()]), parser.completed


@pytest.mark.parametrize("dialect", CALLS)
@pytest.mark.parametrize("width", [1, 2, 3, 7, 1000])
def test_the_chunks_of_text_do_not_change_a_call(dialect: Dialect, width: int) -> None:
    content, calls, completed = parse(dialect, CALLS[dialect], width)
    ((name, arguments),) = calls
    assert (content, name, completed) == ("", "weather", 1)
    assert json.loads(arguments) == ARGUMENTS


@pytest.mark.parametrize("dialect", MARKED)
@pytest.mark.parametrize("width", [1, 5, 1000])
def test_content_may_come_before_between_and_after_calls(dialect: Dialect, width: int) -> None:
    call = CALLS[dialect]
    content, calls, completed = parse(dialect, f"Let me < see.\n\n{call}\n{call}\n done ", width)
    assert content == "Let me < see.done "
    assert len(calls) == completed == 2


@pytest.mark.parametrize("dialect", CALLS)
def test_arguments_are_streamed(dialect: Dialect) -> None:
    parser = ToolCallParser(CallableTools(dialect, (WEATHER,)))
    pieces = [e for character in CALLS[dialect] for e in parser.push(character) if isinstance(e, CallArguments)]
    assert len(pieces) > (20 if dialect in ("hermes", "llama") else 4)


@pytest.mark.parametrize("dialect", CALLS)
def test_text_that_is_not_a_call_is_content(dialect: Dialect) -> None:
    for text in ("plain text", "", " a < b", "1 < 2 > 0 {x} [y] ", '{"answer": 5}', "[1, 2]", "<tool_ca"):
        assert parse(dialect, text, 3)[:2] == (text, [])


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        ("hermes", "<tool_call>\nno json\n</tool_call>"),
        ("hermes", '<tool_call>\n{"title": "x"}\n</tool_call>'),
        ("qwen_xml", "<tool_call>\n<fun>\n</tool_call>"),
        ("gemma", "<|tool_call>cal<tool_call|>"),
        ("llama", '{"name": 5}'),
        ("pythonic", "[see this (1)(2)]"),
    ],
)
def test_markers_around_text_that_is_not_a_call_are_content(dialect: Dialect, text: str) -> None:
    content, calls, completed = parse(dialect, text, 4)
    assert (content, calls, completed) == (text, [], 0)


def test_a_pythonic_call_that_turns_out_invalid_after_its_name_is_cut_off() -> None:
    assert parse("pythonic", "[see (1)(2)]", 4) == ("", [("see", "{")], 0)


def test_a_truncated_call_keeps_the_arguments_so_far() -> None:
    content, calls, completed = parse("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Par')
    assert (content, calls, completed) == ("", [("weather", '{"city": "Par')], 0)


@pytest.mark.parametrize("width", [1, 7, 1000])
@pytest.mark.parametrize("dialect", ["hermes", "qwen_xml", "gemma"])
def test_text_after_an_unclosed_call_is_content(dialect: Dialect, width: int) -> None:
    complete = CALLS[dialect]
    unclosed = complete[: complete.rindex("<")].rstrip()
    ((name, _),) = parse(dialect, complete)[1]
    content, calls, completed = parse(dialect, f"{unclosed}\n{complete} Well, \n{unclosed} It is 42.", width)
    assert ([name for name, _ in calls], completed, content) == ([name] * 3, 3, "Well,It is 42.")
    assert parse(dialect, complete[:-3], width) == parse(dialect, complete, width), "the closing marker is truncated"


@pytest.mark.parametrize("width", [1, 7, 1000])
def test_the_next_call_ends_an_unclosed_one_in_laguna(width: int) -> None:
    one = "<tool_call>weather\n<arg_key>days</arg_key>\n<arg_value>1</arg_value>\n"
    text = f"{one}{one}</tool_call>\n<tool_call>weather\n{one}</tool_call>Well."
    content, calls, completed = parse("laguna", text, width)
    assert (content, completed) == ("Well.", 4)
    assert [arguments for _, arguments in calls] == ['{"days": 1}', '{"days": 1}', "{}", '{"days": 1}']


@pytest.mark.parametrize("value", ["['5\" nail']", '[5" nails]', '["5""]'])
def test_an_unbalanced_quote_does_not_reach_past_its_value(value: str) -> None:
    call = f"<function=weather>\n<parameter=where>\n{value}\n</parameter>\n<parameter=city>\nRio\n</parameter>\n</function>"
    content, ((_, arguments),), completed = parse("qwen_xml", f"<tool_call>\n{call}\n</tool_call>\nDone.")
    assert (content, completed) == ("Done.", 1)
    assert arguments.endswith(', "city": "Rio"}')


def test_an_extra_brace_after_a_call_is_ignored() -> None:
    assert parse("hermes", '<tool_call>{"name": "weather", "arguments": {}}}\n</tool_call>Well.')[::2] == ("Well.", 1)


@pytest.mark.parametrize("name", ["a/b", "a:b", "2fa", "a-b.c"])
def test_a_pythonic_call_may_name_a_tool_that_is_not_an_identifier(name: str) -> None:
    parser = ToolCallParser(CallableTools("pythonic", (Tool(name),)))
    assert collect_calls([*parser.push(f"[{name}(a=9)]"), *parser.finish()]) == ("", [(name, '{"a": 9}')])
    assert parse("pythonic", "[a/b(a=9)]")[0] == "[a/b(a=9)]", "not the name of a tool"


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        ("hermes", r'<tool_call>{"name": "f\ud83d", "arguments": {}}</tool_call>'),
        ("hermes", r'<tool_call>{"name": "f", "arguments": "{\"a\": \"\ud83d\"}"}</tool_call>'),
        ("qwen_xml", r'<tool_call><function=f><parameter=a>"\ud83d"</parameter></function></tool_call>'),
        ("gemma", r'<|tool_call>call:f{a:"\ud83d"}<tool_call|>'),
        ("pythonic", r'[f(a=["\ud83d"])]'),
    ],
)
def test_a_lone_surrogate_becomes_the_replacement_character(dialect: Dialect, text: str) -> None:
    content, ((name, arguments),), _ = parse(dialect, text)
    assert "\ufffd" in (name + arguments)
    assert (content + name + arguments).encode()


@pytest.mark.parametrize("text", ["a </parameter> b", '\\" </parameter>', "</parameter>"])
def test_a_string_inside_an_object_may_contain_the_closing_tag(text: str) -> None:
    value = json.dumps({"a": [1, text]})
    call = f"<tool_call>\n<function=weather>\n<parameter=where>\n{value}\n</parameter>\n</function>\n</tool_call>"
    ((_, arguments),) = parse("qwen_xml", call, 3)[1]
    assert json.loads(arguments) == {"where": {"a": [1, text]}}


def test_a_value_that_is_nested_too_deeply_becomes_a_string() -> None:
    text = "<tool_call><function=f><parameter=a>" + 100_000 * "[" + "</parameter></function></tool_call>"
    ((_, arguments),) = parse("qwen_xml", text)[1]
    assert json.loads(arguments) == {"a": 100_000 * "["}


def test_the_name_may_come_after_the_arguments() -> None:
    text = '<tool_call>{"arguments": {"a": 1}, "name": "weather"}</tool_call>'
    assert parse("hermes", text, 2)[1] == [("weather", '{"a": 1}')]


def test_arguments_may_be_a_json_string_or_missing() -> None:
    assert parse("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>')[1] == [("f", '{"a": 1}')]
    assert parse("hermes", '<tool_call>{"name": "f"}</tool_call>')[1] == [("f", "{}")]
    assert parse("laguna", "<tool_call>f</tool_call>")[1] == [("f", "{}")]
    assert parse("qwen_xml", "<tool_call>\n<function=f>\n</function>\n</tool_call>")[1] == [("f", "{}")]
    assert parse("gemma", "<|tool_call>call:f{}<tool_call|>")[1] == [("f", "{}")]
    assert parse("pythonic", "[f(), g(a=1)]")[1] == [("f", "{}"), ("g", '{"a": 1}')]


@given(st.text(max_size=20), st.integers(1, 6))
@settings(max_examples=200)
def test_any_string_between_tags_is_unchanged(value: str, width: int) -> None:
    if "</parameter>" in value or "\r" in value:
        return
    text = f"<tool_call>\n<function=weather>\n<parameter=city>\n{value}\n</parameter>\n</function>\n</tool_call>"
    assert json.loads(parse("qwen_xml", text, width)[1][0][1]) == {"city": value}


@pytest.mark.parametrize(
    ("source", "dialect", "native"),
    [
        ("{{ tools }} <|tool_call>call: ", "gemma", True),
        ("{{ tools }} <tool_call> <arg_key> <arg_value>", "laguna", True),
        ("{{ tools }} <tool_call> <function= <parameter=", "qwen_xml", True),
        ('{{ tools }} <tool_call> {"name": , "arguments": }', "hermes", True),
        ('{{ tools }} ipython "parameters": ', "llama", True),
        ("{{ tools }} [func_name1(params_name1=params_value1", "pythonic", True),
        ("{{ tools }} [TOOL_CALLS]", "hermes", False),
        ("{{ messages }}", "hermes", False),
    ],
)
def test_the_dialect_is_detected_from_the_template(source: str, dialect: Dialect, native: bool) -> None:
    syntax = detect_tool_syntax(source)
    assert (syntax.dialect, syntax.native) == (dialect, native)


@pytest.mark.parametrize("arguments", ["", '{"city": "Par', "[" * 100_000, "5"])
def test_a_template_that_iterates_over_arguments_gets_an_object_for_a_truncated_call(arguments: str) -> None:
    messages = [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "w", "arguments": arguments}}]}]
    (message,), _ = template_inputs(messages, [], ToolSyntax("qwen_xml", native=True))
    assert message["tool_calls"][0]["function"]["arguments"] == {}
    (message,), _ = template_inputs(messages, [], ToolSyntax("hermes", native=True))
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


def test_white_space_that_a_call_may_follow_is_held_in_work_that_grows_with_its_length() -> None:
    """Regression: each character copied all white space before it, so a model that was made to write white space silenced the
    server. The process has a minute of processor time and needs about two seconds."""
    script = """
import resource
from onedraw.text.tools.call_stream import Content, ToolCallParser
from onedraw.text.tools.dialects import CallableTools, Tool
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
for dialect in ("hermes", "pythonic"):
    parser = ToolCallParser(CallableTools(dialect, (Tool("f"),)))
    assert not parser.push(" " * 400_000)
    assert parser.push("<x") == [Content(" " * 400_000 + "<x")]
"""
    assert subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2]).returncode == 0
