"""Grammars of tool calls: whatever tokens are sampled under them, the call is valid by the tool's schema."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from onedraw.errors import BadParameter, BadRequest
from onedraw.sampling.adjustments import mask_to_bools
from onedraw.text.constraints.grammar import GrammarCompiler
from onedraw.text.constraints.response_format import LarkFormat
from onedraw.text.reply_parser import PLAIN_TEXT
from onedraw.text.tokenizer import Tokenizer
from onedraw.text.tools.call_stream import ToolCallParser
from onedraw.text.tools.dialects import CallableTools, Dialect, Tool
from onedraw.text.tools.grammar import ToolCallGrammar
from tests.support.collect_calls import collect_calls

EOS = 256
DIALECTS: tuple[Dialect, ...] = ("hermes", "qwen_xml", "laguna", "gemma", "llama", "pythonic")
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F"], "type": "string"},
        "wind": {"type": "boolean"},
        "places": {"type": "array", "items": {"type": "number"}},
        "near": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/point"}]},
    },
    "required": ["city", "unit", "near"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
WEATHER = Tool("weather", "the weather", json.dumps(SCHEMA), strict=True, param="tools[0].function.parameters")
STOP = Tool("stop", "", '{"type": "object", "properties": {}, "additionalProperties": false}', strict=True, param="tools[1]")


def tokenizer_with(*special: str) -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", *special])
    return Tokenizer(backend, bos_id=None, eos_id=EOS)


PLAIN_BYTES = tokenizer_with()
WITH_MARKERS = tokenizer_with("<tool_call>", "</tool_call>", "<|tool_call>", "<tool_call|>", '<|"|>')


class RandomWriter:
    """Samples allowed tokens at random, and sometimes tries the text that ends a value in some dialect."""

    def __init__(
        self, tokenizer: Tokenizer, lark: str, seed: int, *, grammars: GrammarCompiler | None = None, most: int = 3000
    ) -> None:
        self.tokenizer = tokenizer
        self.most = most
        grammars = grammars or GrammarCompiler(tokenizer, (EOS,))
        self.constraint = grammars.constraint(LarkFormat(lark, "tools", numbers=True), PLAIN_TEXT)
        self.rng = np.random.default_rng(seed)

    def write(self) -> str | None:
        tokens: list[int] = []
        phrase: list[int] = []
        for _ in range(self.most):
            bits = self.constraint.allowed(tokens, [])
            assert bits is not None
            choices = np.flatnonzero(mask_to_bools(bits, self.tokenizer.vocab_size)).tolist()
            assert choices, self.tokenizer.decode(tokens, skip_special=False)
            if self.rng.random() < 0.2 and not phrase:
                ends = ("\n</parameter>", "</arg_value>", '<|"|>', '"', "}", "]", "<|end|>")
                phrase = self.tokenizer.encode(str(self.rng.choice(ends)), add_special=False)
            if phrase and phrase[0] in choices:
                pick = phrase.pop(0)
            else:
                phrase, pick = [], int(self.rng.choice(choices))
            if pick == EOS:
                return self.tokenizer.decode(tokens, skip_special=False)
            tokens.append(pick)
        return None


def lark(dialect: Dialect, tokenizer: Tokenizer, *tools: Tool, required: bool = True, parallel: bool = True, **more: Any) -> str:
    grammars = GrammarCompiler(tokenizer, (EOS,))
    grammar = ToolCallGrammar(dialect, tokenizer=tokenizer, lark_text=grammars.lark_text, check=grammars.check_schema)
    return grammar.write(tools, required=required, parallel=parallel, **more)


def calls_in(dialect: Dialect, text: str) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser(CallableTools(dialect, (WEATHER, STOP)))
    return collect_calls([*parser.push(text), *parser.finish()])


@pytest.mark.parametrize("tokenizer", [PLAIN_BYTES, WITH_MARKERS], ids=["spelled", "special"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_random_replies_that_must_call_are_valid_calls(dialect: Dialect, tokenizer: Tokenizer) -> None:
    writer = RandomWriter(tokenizer, lark(dialect, tokenizer, WEATHER, STOP), 1)
    written = [text for text in (writer.write() for _ in range(12)) if text is not None]
    assert len(written) >= 8
    names = set()
    for text in written:
        content, calls = calls_in(dialect, text)
        assert content == ""
        assert calls
        for name, arguments in calls:
            names.add(name)
            jsonschema.validate(json.loads(arguments), {"weather": WEATHER, "stop": STOP}[name].schema)
    assert names == {"weather", "stop"}


@pytest.mark.parametrize("tokenizer", [PLAIN_BYTES, WITH_MARKERS], ids=["spelled", "special"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_reply_that_may_call_is_free_text_until_a_call_begins(dialect: Dialect, tokenizer: Tokenizer) -> None:
    grammars = GrammarCompiler(tokenizer, (EOS,))
    source = lark(dialect, tokenizer, STOP, required=False)

    def fits(text: str) -> bool:
        tokens = [*tokenizer.encode(text, add_special=False)]
        bits = grammars.constraint(LarkFormat(source, "tools"), PLAIN_TEXT).allowed(tokens, [])
        return bits is not None and bool(mask_to_bools(bits, tokenizer.vocab_size)[EOS])

    good = {
        "hermes": '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
        "qwen_xml": "<tool_call>\n<function=stop>\n</function>\n</tool_call>",
        "laguna": "<tool_call>stop\n</tool_call>",
        "gemma": "<|tool_call>call:stop{}<tool_call|>",
        "llama": '{"name": "stop", "parameters": {}}',
        "pythonic": "[stop()]",
    }[dialect]
    assert fits("Plain text, with <b> and more.")
    assert fits("")
    assert fits(good)
    assert not fits(good.replace("stop", "halt"))
    if dialect in ("hermes", "qwen_xml", "laguna", "gemma"):
        assert fits(f"Let me see.\n{good}\n{good} done")
        once = lark(dialect, tokenizer, STOP, required=False, parallel=False)
        bits = grammars.constraint(LarkFormat(once, "tools"), PLAIN_TEXT).allowed(tokenizer.encode(good, add_special=False), [])
        assert bits is not None
        assert np.flatnonzero(mask_to_bools(bits, tokenizer.vocab_size)).tolist() == [EOS]


def test_content_without_calls_may_have_its_own_schema() -> None:
    source = lark("hermes", PLAIN_BYTES, STOP, required=False, content='{"enum": [1, 2]}')
    bits = GrammarCompiler(PLAIN_BYTES, (EOS,)).constraint(LarkFormat(source, "tools"), PLAIN_TEXT).allowed([], [])
    assert bits is not None
    allowed = {PLAIN_BYTES.decode([t]) for t in np.flatnonzero(mask_to_bools(bits, PLAIN_BYTES.vocab_size)).tolist()}
    assert allowed == {"1", "2", "<"}


@pytest.mark.parametrize("dialect", ["qwen_xml", "laguna", "gemma"])
def test_a_string_without_quotes_matches_its_length_and_pattern(dialect: Dialect) -> None:
    schema = {"type": "object", "properties": {"code": {"type": "string", "pattern": "^[a-c]+$", "minLength": 2, "maxLength": 4}}}
    tool = Tool("f", parameters=json.dumps({**schema, "required": ["code"]}), strict=True)
    writer = RandomWriter(WITH_MARKERS, lark(dialect, WITH_MARKERS, tool, parallel=False), 2)
    for _ in range(6):
        text = writer.write()
        assert text is not None
        ((_, arguments),) = calls_in(dialect, text)[1]
        jsonschema.validate(json.loads(arguments), schema)


@pytest.mark.parametrize(
    "part",
    [
        {"enum": ["cat", "dog"]},
        {"type": ["string"]},
        {"type": "string", "enum": ["a", 1]},
        {"enum": ["a", 1]},
        {"const": "x"},
        {"type": ["string", "null"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("dialect", ["qwen_xml", "laguna"])
def test_a_value_between_tags_is_parsed_as_it_was_written(dialect: Dialect, part: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"v": part}, "required": ["v"], "additionalProperties": False}
    tool = Tool("f", parameters=json.dumps(schema), strict=True)
    writer = RandomWriter(WITH_MARKERS, lark(dialect, WITH_MARKERS, tool, parallel=False), 3)
    for _ in range(6):
        text = writer.write()
        assert text is not None
        parser = ToolCallParser(CallableTools(dialect, (tool,)))
        ((_, arguments),) = collect_calls([*parser.push(text), *parser.finish()])[1]
        jsonschema.validate(json.loads(arguments), schema)


@pytest.mark.parametrize(
    ("dialect", "part", "path"),
    [
        ("qwen_xml", {"type": "string", "enum": ["a\n</parameter>\n</function>b"]}, ".properties.a.enum"),
        ("laguna", {"type": "string", "const": "</arg_value> <arg_key>"}, ".properties.a.const"),
        ("qwen_xml", {"type": "string", "enum": [1, 2]}, ".properties.a.enum"),
        ("gemma", {"enum": [{"a": 'x<|"|>'}]}, ".properties.a.enum"),
        ("gemma", {"const": {"a:b": 1}}, ".properties.a.const"),
        ("gemma", {"type": "object", "properties": {"}": {"type": "string"}}}, ".properties.a.properties.}"),
        ("gemma", {"$ref": "#/$defs/a", "properties": {}, "$defs": {}}, ".properties.a.$ref"),
        ("hermes", {"type": "array", "uniqueItems": True}, ".properties.a.uniqueItems"),
        ("qwen_xml", {"type": "string", "format": "date"}, ".properties.a.format"),
        ("gemma", {"type": "array", "items": {"type": "string"}, "minItems": 2}, ".properties.a.minItems"),
        ("pythonic", {"description": "anything"}, ".properties.a.type"),
        ("laguna", {"type": "string", "$ref": "#/$defs/a"}, ".properties.a.$ref"),
        ("qwen_xml", {"type": "string", "enum": ["long"], "maxLength": 2}, ".properties.a.enum"),
        ("gemma", {"type": "integer", "enum": ["text"]}, ".properties.a.enum"),
        ("gemma", {"type": "object", "properties": {"a:b": {"type": "string"}}}, ".properties.a.properties.a:b"),
        ("qwen_xml", {"type": "string", "enum": ["abc"], "pattern": "^(?<y>b)"}, ".properties.a.pattern"),
        ("gemma", {"type": "object", "required": ["b"]}, ".properties.a.required"),
    ],
)
def test_a_keyword_that_a_strict_tool_cannot_enforce_is_refused_by_its_path(dialect: Dialect, part: Any, path: str) -> None:
    tool = Tool("f", parameters=json.dumps({"type": "object", "properties": {"a": part}}), strict=True, param="tools[0].x")
    with pytest.raises(BadParameter) as error:
        lark(dialect, PLAIN_BYTES, tool)
    assert error.value.param == "tools[0].x" + path


@pytest.mark.parametrize(
    ("dialect", "schema", "path"),
    [
        ("qwen_xml", {"anyOf": [{"type": "object"}]}, ".anyOf"),
        ("laguna", {"type": "object", "required": ["b"]}, ".required"),
        ("pythonic", {"type": "object", "properties": {"a=b": {"type": "string"}}}, ".properties.a=b"),
        ("pythonic", {"type": "object", "properties": {")": {"type": "string"}}}, ".properties.)"),
        ("gemma", {"type": "object", "properties": {"": {"type": "string"}}}, ".properties."),
        ("qwen_xml", {"type": "object", "properties": {"a>b": {"type": "string"}}}, ".properties.a>b"),
        ("gemma", {"$ref": "#"}, ".$ref"),
    ],
)
def test_a_keyword_for_all_arguments_that_cannot_be_enforced_is_refused_by_its_path(
    dialect: Dialect, schema: Any, path: str
) -> None:
    tool = Tool("f", parameters=json.dumps(schema), strict=True, param="tools[0].x")
    with pytest.raises(BadParameter) as error:
        lark(dialect, PLAIN_BYTES, tool)
    assert error.value.param == "tools[0].x" + path


NOT_JSON: tuple[Dialect, ...] = ("qwen_xml", "laguna", "gemma", "pythonic")
TARGET = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}, "required": ["a"]}
ENFORCED: dict[str, dict[str, Any]] = {
    "a reference": {"$ref": "#/$defs/a~1b", "$defs": {"a/b": TARGET}},
    "allOf of one schema": {"allOf": [TARGET]},
    "several types": {"properties": {"a": {"type": ["string", "null"], "maxLength": 2}}, "required": ["a"]},
    "a slash in a pattern": {"properties": {"a": {"type": "string", "pattern": "^\\/[a-z]{1,3}/x$"}}, "required": ["a"]},
    "lists and objects as constants": {"properties": {"a": {"enum": [["x", 1], {"k": "v", "n": None}]}}, "required": ["a"]},
    "excluded constants": {"properties": {"a": {"type": "string", "enum": ["x", "long"], "maxLength": 2}}, "required": ["a"]},
    "whole floats": {"properties": {"a": {"type": "integer", "enum": [1.0, 2.5, 7], "maximum": 5}}, "required": ["a"]},
    "keywords that restrict nothing": {
        "properties": {"a": {"type": "string", "maxLength": 2, "x-order": 1, "readOnly": True, "$comment": "x", "example": "y"}},
        "required": ["a"],
        "$id": "x",
        "x-more": 1,
    },
}


@pytest.mark.parametrize("dialect", NOT_JSON)
@pytest.mark.parametrize("schema", ENFORCED.values(), ids=ENFORCED.keys())
def test_random_replies_match_a_strict_schema(dialect: Dialect, schema: dict[str, Any]) -> None:
    tool = Tool("f", parameters=json.dumps({"type": "object", **schema}), strict=True)
    writer = RandomWriter(PLAIN_BYTES, lark(dialect, PLAIN_BYTES, tool, parallel=False), 3)
    written = [text for text in (writer.write() for _ in range(6)) if text is not None]
    assert len(written) >= 4
    for text in written:
        parser = ToolCallParser(CallableTools(dialect, (tool,)))
        content, ((_, arguments),) = collect_calls([*parser.push(text), *parser.finish()])
        assert content == ""
        jsonschema.validate(json.loads(arguments), {"type": "object", **schema})


@pytest.mark.parametrize("dialect", NOT_JSON)
@pytest.mark.parametrize(
    "part",
    [
        {"type": "string", "anyOf": [{"maxLength": 2}]},
        {"type": "string", "format": "date"},
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        {"type": "string", "enum": ["a"], "pattern": "(?<x>b)"},
        {"not": {}},
        {"type": "string", "pattern": "^(?!x).*$"},
        {"type": "string", "minLength": 5, "maxLength": 2},
        {"type": "string", "minLength": None},
        {"type": "string", "format": "password"},
        {"type": "string", "enum": 5},
        {"type": "string", "pattern": 5},
        {"type": 5, "enum": ["a"]},
        {"anyOf": 5},
        {"anyOf": []},
        {"type": []},
        {"type": "object", "properties": [1], "required": True},
        True,
    ],
    ids=str,
)
def test_an_unsupported_parameter_of_a_tool_that_is_not_strict_may_be_anything_and_the_others_stay(
    dialect: Dialect, part: Any
) -> None:
    schema = {"type": "object", "properties": {"a": part, "b:=>": {}, "c": {"type": "integer"}}, "required": ["a", "c", "d"]}
    tool = Tool("f", parameters=json.dumps(schema))
    writer = RandomWriter(PLAIN_BYTES, lark(dialect, PLAIN_BYTES, tool, parallel=False), 4)
    written = [text for text in (writer.write() for _ in range(4)) if text is not None]
    assert written
    for text in written:
        parser = ToolCallParser(CallableTools(dialect, (tool,)))
        _, ((_, arguments),) = collect_calls([*parser.push(text), *parser.finish()])
        assert isinstance(json.loads(arguments)["c"], int)
        assert "a" in json.loads(arguments)


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        ("gemma", 'call:f{a:[<|"|>x<|"|>,<|"|>y<|"|>]}'),
        ("pythonic", 'f(a=["x", "y"])'),
        ("qwen_xml", '<function=f>\n<parameter=a>\n["x", "y"]\n</parameter>\n</function>'),
    ],
)
def test_an_unsupported_parameter_of_a_tool_that_is_not_strict_keeps_its_type(dialect: Dialect, text: str) -> None:
    part = {"type": "array", "items": {"type": "string"}, "minItems": 1, "uniqueItems": True}
    tool = Tool("f", parameters=json.dumps({"type": "object", "properties": {"a": part}, "required": ["a"]}))
    source = lark(dialect, PLAIN_BYTES, tool, parallel=False)
    opens = {"gemma": "<|tool_call>", "pythonic": "[", "qwen_xml": "<tool_call>\n"}[dialect]
    tokens = PLAIN_BYTES.encode(opens + text, add_special=False)
    bits = GrammarCompiler(PLAIN_BYTES, (EOS,)).constraint(LarkFormat(source, "tools"), PLAIN_TEXT).allowed(tokens, [])
    assert bits is not None
    assert mask_to_bools(bits, PLAIN_BYTES.vocab_size).any()


@pytest.mark.parametrize(
    "part",
    [
        {"enum": [1, 2, 3], "multipleOf": 2},
        {"enum": [[1], [1, 2]], "minItems": 2},
        {"enum": [{"x": 1}], "required": ["y"]},
    ],
    ids=str,
)
def test_a_keyword_beside_constants_is_enforced_or_refused(part: dict[str, Any]) -> None:
    tool = Tool("f", parameters=json.dumps({"type": "object", "properties": {"a": part}}), strict=True, param="x")
    with pytest.raises(BadParameter, match=r"x\.properties\.a"):
        lark("gemma", PLAIN_BYTES, tool)


def test_a_tool_that_is_not_strict_takes_any_object_if_its_schema_is_unsupported() -> None:
    tool = Tool("f", parameters='{"type": "object", "not": {}}')
    assert '"type": "object"' in lark("hermes", PLAIN_BYTES, tool)


@pytest.mark.parametrize("dialect", NOT_JSON)
def test_references_that_double_at_every_level_are_refused_in_a_moment(dialect: Dialect) -> None:
    chain = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(30)}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0", "maxLength": 3}}, "required": ["a"]}
    tool = Tool("f", parameters=json.dumps({**schema, "$defs": {**chain, "d30": {"type": "string"}}}), param="tools[0].x")
    with pytest.raises(BadRequest):
        lark(dialect, PLAIN_BYTES, tool)
