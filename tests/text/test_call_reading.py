"""Tool calls in every dialect, however the text is cut; and what is no call stays text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onedraw.text.tools.call_parsers import CallArguments
from onedraw.text.tools.call_stream import ToolCallParser
from onedraw.text.tools.dialects import CallableTools, Dialect, Tool, ToolSyntax, detect_tool_syntax
from onedraw.text.tools.prompt import template_inputs
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

SPELLED: dict[Dialect, str] = {
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


def read(dialect: Dialect, text: str, width: int = 1000) -> tuple[str, list[tuple[str, str]], int]:
    """Content, calls with their arguments, and how many came to an end."""
    reader = ToolCallParser(CallableTools(dialect, (WEATHER,)))
    events = [event for start in range(0, len(text), width) for event in reader.push(text[start : start + width])]
    return *collect_calls([*events, *reader.finish()]), reader.completed


@pytest.mark.parametrize("dialect", SPELLED)
@pytest.mark.parametrize("width", [1, 2, 3, 7, 1000])
def test_a_call_is_read_however_it_is_cut(dialect: Dialect, width: int) -> None:
    content, calls, ended = read(dialect, SPELLED[dialect], width)
    ((name, arguments),) = calls
    assert (content, name, ended) == ("", "weather", 1)
    assert json.loads(arguments) == ARGUMENTS


@pytest.mark.parametrize("dialect", MARKED)
@pytest.mark.parametrize("width", [1, 5, 1000])
def test_text_stands_before_between_and_behind_calls(dialect: Dialect, width: int) -> None:
    call = SPELLED[dialect]
    content, calls, ended = read(dialect, f"Let me < see.\n\n{call}\n{call}\n done ", width)
    assert content == "Let me < see.done "
    assert len(calls) == ended == 2


@pytest.mark.parametrize("dialect", SPELLED)
def test_arguments_come_piece_by_piece(dialect: Dialect) -> None:
    reader = ToolCallParser(CallableTools(dialect, (WEATHER,)))
    pieces = [e for character in SPELLED[dialect] for e in reader.push(character) if isinstance(e, CallArguments)]
    assert len(pieces) > (20 if dialect in ("hermes", "llama") else 4)


@pytest.mark.parametrize("dialect", SPELLED)
def test_text_that_is_no_call_is_not_lost(dialect: Dialect) -> None:
    for text in ("plain text", "", " a < b", "1 < 2 > 0 {x} [y] ", '{"answer": 5}', "[1, 2]", "<tool_ca"):
        assert read(dialect, text, 3)[:2] == (text, [])


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        ("hermes", "<tool_call>\nno json\n</tool_call>"),
        ("hermes", '<tool_call>\n{"title": "x"}\n</tool_call>'),
        ("qwen_xml", "<tool_call>\n<fun>\n</tool_call>"),
        ("gemma", "<|tool_call>cal<tool_call|>"),
        ("llama", '{"name": 5}'),
        ("pythonic", "[see (1)(2)]"),
    ],
)
def test_what_is_no_call_between_the_markers_is_text(dialect: Dialect, text: str) -> None:
    content, calls, ended = read(dialect, text, 4)
    assert (content, ended) == (text, 0) or dialect == "pythonic"
    assert calls == [] or dialect == "pythonic"


def test_a_call_that_is_cut_off_keeps_what_came() -> None:
    content, calls, ended = read("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Par')
    assert (content, calls, ended) == ("", [("weather", '{"city": "Par')], 0)


@pytest.mark.parametrize("width", [1, 7, 1000])
@pytest.mark.parametrize("dialect", ["hermes", "qwen_xml", "gemma"])
def test_what_comes_behind_a_call_that_nobody_closed_is_not_lost(dialect: Dialect, width: int) -> None:
    whole = SPELLED[dialect]
    opened = whole[: whole.rindex("<")].rstrip()
    ((name, _),) = read(dialect, whole)[1]
    content, calls, ended = read(dialect, f"{opened}\n{whole} Well, \n{opened} It is 42.", width)
    assert ([name for name, _ in calls], ended, content) == ([name] * 3, 3, "Well,It is 42.")
    assert read(dialect, whole[:-3], width) == read(dialect, whole, width), "the marker was cut off"


@pytest.mark.parametrize("width", [1, 7, 1000])
def test_another_call_of_laguna_ends_the_one_before_it(width: int) -> None:
    one = "<tool_call>weather\n<arg_key>days</arg_key>\n<arg_value>1</arg_value>\n"
    text = f"{one}{one}</tool_call>\n<tool_call>weather\n{one}</tool_call>Well."
    content, calls, ended = read("laguna", text, width)
    assert (content, ended) == ("Well.", 4)
    assert [arguments for _, arguments in calls] == ['{"days": 1}', '{"days": 1}', "{}", '{"days": 1}']


@pytest.mark.parametrize("value", ["['5\" nail']", '[5" nails]', '["5""]'])
def test_an_odd_quote_ends_with_its_value(value: str) -> None:
    call = f"<function=weather>\n<parameter=where>\n{value}\n</parameter>\n<parameter=city>\nRio\n</parameter>\n</function>"
    content, ((_, arguments),), ended = read("qwen_xml", f"<tool_call>\n{call}\n</tool_call>\nDone.")
    assert (content, ended) == ("Done.", 1)
    assert arguments.endswith(', "city": "Rio"}')


def test_a_stray_brace_behind_a_call_is_nothing() -> None:
    assert read("hermes", '<tool_call>{"name": "weather", "arguments": {}}}\n</tool_call>Well.')[::2] == ("Well.", 1)


@pytest.mark.parametrize("name", ["a/b", "a:b", "2fa", "a-b.c"])
def test_a_tool_is_called_by_its_name_in_python_too(name: str) -> None:
    reader = ToolCallParser(CallableTools("pythonic", (Tool(name),)))
    assert collect_calls([*reader.push(f"[{name}(a=9)]"), *reader.finish()]) == ("", [(name, '{"a": 9}')])
    assert read("pythonic", "[a/b(a=9)]")[0] == "[a/b(a=9)]", "nobody's name"


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
def test_half_of_a_character_becomes_one_that_can_be_said(dialect: Dialect, text: str) -> None:
    content, ((name, arguments),), _ = read(dialect, text)
    assert "\ufffd" in (name + arguments)
    assert (content + name + arguments).encode()


@pytest.mark.parametrize("text", ["a </parameter> b", '\\" </parameter>', "</parameter>"])
def test_a_text_inside_of_an_object_may_hold_what_ends_values(text: str) -> None:
    said = json.dumps({"a": [1, text]})
    call = f"<tool_call>\n<function=weather>\n<parameter=where>\n{said}\n</parameter>\n</function>\n</tool_call>"
    ((_, arguments),) = read("qwen_xml", call, 3)[1]
    assert json.loads(arguments) == {"where": {"a": [1, text]}}


def test_a_value_that_is_nested_too_deeply_is_a_text() -> None:
    text = "<tool_call><function=f><parameter=a>" + 100_000 * "[" + "</parameter></function></tool_call>"
    ((_, arguments),) = read("qwen_xml", text)[1]
    assert json.loads(arguments) == {"a": 100_000 * "["}


def test_a_name_may_come_behind_its_arguments() -> None:
    text = '<tool_call>{"arguments": {"a": 1}, "name": "weather"}</tool_call>'
    assert read("hermes", text, 2)[1] == [("weather", '{"a": 1}')]


def test_arguments_may_be_a_text_or_missing() -> None:
    assert read("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>')[1] == [("f", '{"a": 1}')]
    assert read("hermes", '<tool_call>{"name": "f"}</tool_call>')[1] == [("f", "{}")]
    assert read("laguna", "<tool_call>f</tool_call>")[1] == [("f", "{}")]
    assert read("qwen_xml", "<tool_call>\n<function=f>\n</function>\n</tool_call>")[1] == [("f", "{}")]
    assert read("gemma", "<|tool_call>call:f{}<tool_call|>")[1] == [("f", "{}")]
    assert read("pythonic", "[f(), g(a=1)]")[1] == [("f", "{}"), ("g", '{"a": 1}')]


@given(st.text(max_size=20), st.integers(1, 6))
@settings(max_examples=200)
def test_any_text_survives_tags(value: str, width: int) -> None:
    if "</parameter>" in value or "\r" in value:
        return
    text = f"<tool_call>\n<function=weather>\n<parameter=city>\n{value}\n</parameter>\n</function>\n</tool_call>"
    assert json.loads(read("qwen_xml", text, width)[1][0][1]) == {"city": value}


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
def test_the_template_tells_the_dialect(source: str, dialect: Dialect, native: bool) -> None:
    syntax = detect_tool_syntax(source)
    assert (syntax.dialect, syntax.native) == (dialect, native)


@pytest.mark.parametrize("arguments", ["", '{"city": "Par', "[" * 100_000, "5"])
def test_a_template_that_walks_over_arguments_gets_an_object_of_a_call_that_was_cut_off(arguments: str) -> None:
    said = [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "w", "arguments": arguments}}]}]
    (message,), _ = template_inputs(said, [], ToolSyntax("qwen_xml", native=True))
    assert message["tool_calls"][0]["function"]["arguments"] == {}
    (message,), _ = template_inputs(said, [], ToolSyntax("hermes", native=True))
    assert message["tool_calls"][0]["function"]["arguments"] == arguments
