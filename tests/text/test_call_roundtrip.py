"""Grammar and parser agree in every dialect: what the grammar of a random tool allows, the parser reads back to the same
arguments, whole and streamed."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from onedraw.errors import BadParameter
from onedraw.sampling.adjustments import mask_to_bools
from onedraw.text.constraints.grammar import GrammarCompiler
from onedraw.text.constraints.response_format import LarkFormat
from onedraw.text.reply_parser import PLAIN_TEXT
from onedraw.text.tokenizer import Tokenizer
from onedraw.text.tools.call_stream import ToolCallParser
from onedraw.text.tools.dialects import CallableTools, Dialect, Tool
from onedraw.text.tools.grammar import ToolCallGrammar
from onedraw.text.tools.schema import parameter_types
from tests.support.collect_calls import collect_calls
from tests.text.test_call_grammar import DIALECTS, EOS, PLAIN_BYTES, WITH_MARKERS, RandomWriter

# Texts that end a value in some dialect, or nearly do.
ENDS = (
    *("</parameter>", "\n</parameter>", "</parameter>\n<parameter=b>\n", "</parameter></function>", "</parameter> </parameter>"),
    *("</arg_value>", "</arg_value>\n<arg_key>", "</arg_value><arg_key>b", "</tool_call>", '<|"|>', "<|", "\n", '"', "'", "\\"),
    *("}", "]", ",", ":", "True", "null", "{", "[1", '"a', "5", "\\/", "é🙂", "</param", "</arg_value"),
)
KEYS = ("a", "b", "a-b", "x y", "é", "a:b", "a=b", "c>d", "}", "True", '"q"')
TEXTS = st.lists(st.sampled_from([*ENDS, "x", " ", "ab"]), max_size=4).map("".join)
LEAVES = st.one_of(
    st.just({"type": "string"}),
    st.builds(lambda low: {"type": "string", "minLength": low, "maxLength": low + 9}, st.integers(0, 2)),
    st.just({"type": "string", "pattern": "^[ab]*$"}),
    st.builds(lambda low: {"type": "integer", "minimum": low, "maximum": low + 20}, st.integers(-30, 30)),
    st.just({"type": "number"}),
    st.just({"type": ["string", "null"]}),
    st.just({"type": ["integer", "string"]}),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda values: {"enum": values}, st.lists(TEXTS | st.integers(-5, 5) | st.none(), min_size=1, max_size=3)),
    st.builds(
        lambda value: {"const": value}, TEXTS | st.lists(TEXTS, max_size=2) | st.dictionaries(st.sampled_from(KEYS), TEXTS)
    ),
    st.sampled_from([{"$ref": "#/$defs/s"}, {"$ref": "#/$defs/node"}, {"$ref": "#/properties/first"}, {"$ref": "#"}]),
    st.just({"$ref": "#/$defs/s", "maxLength": 3}),
    st.just({"type": "object", "additionalProperties": {"type": "integer"}}),
    st.just({"type": "string", "anyOf": [{"maxLength": 1}, {"pattern": "^x"}]}),
    st.just({"allOf": [{"$ref": "#/$defs/s"}]}),
)


def _object(properties: dict[str, Any], needed: bool) -> dict[str, Any]:
    required = {"required": list(properties)[:1]} if needed else {}
    return {"type": "object", "properties": properties, "additionalProperties": False, **required}


PARTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda item: {"type": "array", "items": item}, inner),
        st.builds(_object, st.dictionaries(st.sampled_from(KEYS), inner, max_size=2), st.booleans()),
        st.builds(lambda one: {"anyOf": [one, {"type": "null"}]}, inner),
        st.builds(lambda item: {"type": "object", "additionalProperties": item}, inner),
    ),
    max_leaves=3,
)
NODE = {
    "type": "object",
    "properties": {"v": {"type": "string"}, "next": {"$ref": "#/$defs/node"}},
    "additionalProperties": False,
}


@st.composite
def schemas(draw: st.DrawFn) -> dict[str, Any]:
    first = draw(LEAVES.filter(lambda leaf: "#/properties" not in str(leaf) and leaf.get("$ref") != "#"))
    others = draw(st.dictionaries(st.sampled_from(KEYS), PARTS, max_size=2))
    return {**_object({"first": first, **others}, True), "$defs": {"s": {"type": "string"}, "node": NODE}}


def value_of(draw: st.DrawFn, schema: Any, root: Any, depth: int = 0) -> Any:
    """Draw a value that follows a schema."""
    if "$ref" in schema:
        target = root
        for step in schema["$ref"].removeprefix("#").split("/")[1:]:
            target = target[step]
        return draw(TEXTS)[:3] if "maxLength" in schema else value_of(draw, target, root, depth + 1)
    if "const" in schema or "enum" in schema:
        return draw(st.sampled_from(schema["enum"] if "enum" in schema else [schema["const"]]))
    if "anyOf" in schema:
        if "type" in schema:
            return draw(st.sampled_from(["", '"', "x</parameter>", "x\n"]))
        return value_of(draw, draw(st.sampled_from(schema["anyOf"])), root, depth + 1)
    if "allOf" in schema:
        return value_of(draw, schema["allOf"][0], root, depth + 1)
    kind = schema["type"] if isinstance(schema["type"], str) else draw(st.sampled_from(schema["type"]))
    match kind:
        case "string":
            if "pattern" in schema:
                return draw(st.sampled_from(["", "ab", "bbb"]))
            text = draw(TEXTS)
            return (text + "ab" if len(text) < schema.get("minLength", 0) else text)[: schema.get("maxLength", 99)]
        case "integer":
            return draw(st.integers(schema.get("minimum", -99), schema.get("maximum", 99)))
        case "number":
            return draw(st.sampled_from([0, -1, 0.5, 1e-7, 1e22, 123456.789]))
        case "boolean":
            return draw(st.booleans())
        case "null":
            return None
        case "array":
            return [value_of(draw, schema["items"], root, depth + 1) for _ in range(draw(st.integers(0, 2 if depth < 4 else 0)))]
        case _:
            properties, required = schema.get("properties", {}), schema.get("required", ())
            chosen = {key: part for key, part in properties.items() if key in required or (depth < 4 and draw(st.booleans()))}
            if schema.get("additionalProperties") and depth < 4:
                chosen |= dict.fromkeys(draw(st.sets(st.sampled_from("klm"), max_size=2)), schema["additionalProperties"])
            return {key: value_of(draw, part, root, depth + 1) for key, part in chosen.items()}


# Before and after texts that are written as special tokens, if the tokenizer has them. The others are plain text.
SPECIAL = "\0"
QUOTE = f'{SPECIAL}<|"|>{SPECIAL}'


def marked(opens: str, inside: str, closes: str) -> str:
    return f"{SPECIAL}{opens}{SPECIAL}{inside}{SPECIAL}{closes}{SPECIAL}"


def tokens_of(text: str, tokenizer: Tokenizer) -> list[int]:
    plain, special = tokenizer.encode_plain, lambda part: tokenizer.encode(part, add_special=False)
    return [token for n, part in enumerate(text.split(SPECIAL)) for token in (special if n % 2 else plain)(part)]


def gemma(value: Any) -> str:
    match value:
        case str():
            return f"{QUOTE}{value}{QUOTE}"
        case list():
            return f"[{','.join(map(gemma, value))}]"
        case dict():
            return "{" + ",".join(f"{key}:{gemma(item)}" for key, item in value.items()) + "}"
        case _:
            return json.dumps(value)


def python(value: Any) -> str:
    match value:
        case str():
            return json.dumps(value, ensure_ascii=False)
        case list():
            return f"[{', '.join(map(python, value))}]"
        case dict():
            return "{" + ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {python(item)}" for key, item in value.items()) + "}"
        case _:
            return repr(value) if value is None or isinstance(value, bool) else json.dumps(value)


def written(dialect: Dialect, schema: Any, arguments: dict[str, Any]) -> str:
    """Write a call as a model would."""
    as_json = json.dumps(arguments, ensure_ascii=False)
    types = parameter_types(schema)
    tagged = {
        key: value if types[key] == {"string"} else json.dumps(value, ensure_ascii=False) for key, value in arguments.items()
    }
    match dialect:
        case "hermes":
            return marked("<tool_call>", f'\n{{"name": "f", "arguments": {as_json}}}\n', "</tool_call>")
        case "llama":
            return f'{{"name": "f", "parameters": {as_json}}}'
        case "qwen_xml":
            parts = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in tagged.items())
            return marked("<tool_call>", f"\n<function=f>\n{parts}</function>\n", "</tool_call>")
        case "laguna":
            parts = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in tagged.items())
            return marked("<tool_call>", f"f\n{parts}", "</tool_call>")
        case "gemma":
            return marked("<|tool_call>", f"call:f{gemma(arguments)}", "<tool_call|>")
        case "pythonic":
            return f"[f({', '.join(f'{key}={python(value)}' for key, value in arguments.items())})]"


@cache
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, (EOS,))


def grammar(dialect: Dialect, tokenizer: Tokenizer, tool: Tool) -> str:
    grammars = compiler(tokenizer)
    one = ToolCallGrammar(dialect, tokenizer=tokenizer, lark_text=grammars.lark_text, check=grammars.check_schema)
    return one.write((tool,), required=True, parallel=False)


def refusal_or_lark(dialect: Dialect, tokenizer: Tokenizer, tool: Tool) -> str | None:
    try:
        return grammar(dialect, tokenizer, tool)
    except BadParameter:
        return None


def read(dialect: Dialect, tool: Tool, text: str, width: int) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser(CallableTools(dialect, (tool,)))
    events = [event for start in range(0, len(text), width) for event in parser.push(text[start : start + width])]
    return collect_calls([*events, *parser.finish()])


def unwritable(dialect: Dialect, text: str) -> bool:
    """Whether the text of a call contains what ends a value early, so that the grammar need not allow it."""
    inner = {"qwen_xml": ("</parameter>",), "laguna": ("</arg_value>",), "gemma": ('<|"|>',)}.get(dialect, ())
    return any(end in text for end in inner)


PROPERTY = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("tokenizer", [PLAIN_BYTES, WITH_MARKERS], ids=["spelled", "special"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_allowed_call_is_read_back_to_its_arguments(dialect: Dialect, tokenizer: Tokenizer) -> None:
    allowed_calls = 0

    @given(schemas(), st.data())
    @PROPERTY
    def check(schema: dict[str, Any], data: st.DataObject) -> None:
        nonlocal allowed_calls
        tool = Tool("f", parameters=json.dumps(schema), strict=True)
        lark = refusal_or_lark(dialect, tokenizer, tool)
        assume(lark is not None)
        assert lark is not None
        arguments = value_of(data.draw, schema, schema)
        text = written(dialect, schema, arguments)
        tokens = tokens_of(text, tokenizer)
        text = text.replace(SPECIAL, "")
        bits = compiler(tokenizer).constraint(LarkFormat(lark, "tools"), PLAIN_TEXT).allowed(tokens, [])
        assert bits is not None
        if not mask_to_bools(bits, tokenizer.vocab_size)[EOS]:
            assert any(unwritable(dialect, one) for one in _texts(arguments)), text
            return
        allowed_calls += 1
        for width in (1, 5, len(text)):
            content, calls = read(dialect, tool, text, width)
            assert (content, [(name, json.loads(found)) for name, found in calls]) == ("", [("f", arguments)])

    check()
    assert allowed_calls > 8


def _texts(value: Any) -> list[str]:
    match value:
        case str():
            return [value]
        case list():
            return [text for item in value for text in _texts(item)]
        case dict():
            return [text for item in value.items() for text in _texts(list(item))]
        case _:
            return []


@pytest.mark.parametrize("tokenizer", [PLAIN_BYTES, WITH_MARKERS], ids=["spelled", "special"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_random_call_to_a_random_tool_is_valid_and_the_same_streamed(dialect: Dialect, tokenizer: Tokenizer) -> None:
    rng = np.random.default_rng(5)
    complete = 0

    @given(schemas())
    @settings(PROPERTY, max_examples=12)
    def check(schema: dict[str, Any]) -> None:
        nonlocal complete
        tool = Tool("f", parameters=json.dumps(schema), strict=True)
        lark = refusal_or_lark(dialect, tokenizer, tool)
        assume(lark is not None)
        assert lark is not None
        text = RandomWriter(tokenizer, lark, int(rng.integers(1000)), grammars=compiler(tokenizer), most=400).write()
        if text is None:
            return
        complete += 1
        content, ((name, arguments),) = read(dialect, tool, text, len(text))
        assert (content, name) == ("", "f")
        jsonschema.validate(json.loads(arguments), schema)
        assert read(dialect, tool, text, 1) == (content, [(name, arguments)])

    check()
    assert complete > 2
