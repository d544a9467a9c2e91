"""Compile response formats into token constraints, with the library llguidance.

The input is a format and the syntax of the reply. The output is a Constraint, which returns the tokens that may follow any prefix
of the reply. Reasoning before the constrained part is free text. A format that cannot be compiled raises BadParameter; for a JSON
schema the error has the path of the unsupported keyword.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import numpy as np

from onedraw.errors import BadParameter, Unsupported
from onedraw.text.constraints.base import BoundedNumbers, common_prefix, token_mask
from onedraw.text.constraints.numbers import exact_numbers
from onedraw.text.constraints.response_format import (
    JSON_WHITESPACE,
    ChoiceFormat,
    GbnfFormat,
    JsonFormat,
    LarkFormat,
    RegexFormat,
    ReplyFormat,
)
from onedraw.text.reasoning import ReasoningSyntax
from onedraw.text.reply_parser import ReplySyntax
from onedraw.text.tokenizer import Tokenizer
from onedraw.types import EMPTY_MASK, Constraint, TokenMask

CACHED_GRAMMARS = 64  # compiled formats that are kept; the least recently used is dropped
_GAP = r"gap: /[ \t\r\n]{0,8}/"  # the rule for white space between reasoning and answer


def structured_output_available() -> bool:
    """Whether the package llguidance is installed."""
    try:
        _llguidance()
    except Unsupported:
        return False
    return True


class GrammarConstraint:
    """Follows one reply with llguidance's matcher, which consumes new tokens, and rolls back to the common prefix when drafts
    change. Each request has one of its own."""

    def __init__(self, compiled: Any, vocab: int, param: str) -> None:
        self._compiled, self._matcher, self._vocab, self._param = compiled, compiled.deep_copy(), vocab, param
        self._tokens: list[int] = []

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> TokenMask | None:
        tokens = [*output, *drafts]
        if any(token >= self._vocab for token in drafts):  # The model's head can have more rows than the tokenizer has tokens.
            return EMPTY_MASK
        common = self._roll_back(common_prefix(self._tokens, tokens))
        consumed = self._matcher.try_consume_tokens(tokens[common:])
        self._tokens = tokens[: common + consumed]
        if len(self._tokens) < len(tokens) and not self._matcher.is_error():
            return EMPTY_MASK  # The grammar rejects a draft, so verification never reaches the positions after it.
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)
        if self._matcher.is_error():  # In this state the mask would allow the end token alone and cut the reply off silently.
            raise BadParameter(self._param, f"cannot be followed any further: {_first_line(self._matcher.get_error())}")
        return bits

    def _roll_back(self, common: int) -> int:
        """Roll the matcher back to the first `common` tokens and return how many stay consumed. A matcher of a grammar whose
        rules have limits cannot roll back; it starts again with 0."""
        if common < len(self._tokens):
            self._matcher.rollback(len(self._tokens) - common)
        if not self._matcher.is_error():
            return common
        self._matcher, self._tokens = self._compiled.deep_copy(), []
        return 0


class GrammarCompiler:
    """Compiles formats for one tokenizer and caches the most recently used ones. It is thread-safe."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> None:
        eos_ids = [token for token in eos_ids if token < tokenizer.vocab_size]
        if not eos_ids:
            raise Unsupported(
                "structured output needs an end-of-sequence token, and this model's configuration names none", code="no_end_token"
            )
        self._tokenizer, self._eos_ids = tokenizer, tuple(eos_ids)
        self._library = _llguidance()
        self._vocabulary = _vocabulary(self._library, tokenizer, eos_ids)
        digits = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i)[:1].isdigit()]
        self._digits = token_mask(digits, tokenizer.vocab_size)
        self._compiled: OrderedDict[tuple[ReplyFormat, ReplySyntax], Any] = OrderedDict()
        self._lock = threading.Lock()

    def constraint(self, format: ReplyFormat, syntax: ReplySyntax) -> Constraint:
        """Return a new constraint for one request whose reply has this syntax."""
        with self._lock:
            compiled = self._compiled.get((format, syntax))
            if compiled is None:
                compiled = self._compiled[format, syntax] = self._compile(format, syntax)
                if len(self._compiled) > CACHED_GRAMMARS:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end((format, syntax))
        grammar = GrammarConstraint(compiled, self._tokenizer.vocab_size, format.param)
        if isinstance(format, JsonFormat) or (isinstance(format, LarkFormat) and format.numbers):
            return BoundedNumbers(grammar, token_bytes=self._tokenizer.token_bytes, digits=self._digits)
        return grammar

    def check_schema(self, schema: Any, param: str) -> Any:
        """Return the schema if it can be compiled; else raise BadParameter with the path of the keyword that cannot be used."""
        exact = exact_numbers(schema, param)
        if self._schema_error(exact):
            found = find_schema_error(exact, self._schema_error)
            assert found is not None
            raise BadParameter(f"{param}{found.path}", found.reason)
        return schema

    def lark_text(self, text: str) -> str:
        """Write a text in Lark's notation: special tokens by their ids, all other text as quoted strings."""
        parts: list[str] = []
        plain: list[int] = []
        for token in self._tokenizer.encode(text, add_special=False):
            if self._tokenizer.is_special(token):
                parts += [lark_string(self._tokenizer.decode(plain))] if plain else []
                parts.append(f"<[{token}]>")
                plain = []
            else:
                plain.append(token)
        parts += [lark_string(self._tokenizer.decode(plain))] if plain else []
        return " ".join(parts)

    def _compile(self, format: ReplyFormat, syntax: ReplySyntax) -> Any:
        start = {"lark_grammar": self._start(syntax)}
        body = {"name": "body", **self._body(format)}
        matcher = self._matcher({"grammars": [start, body]})
        if not matcher.is_error():
            self._require_nonempty(matcher, format.param)
            return matcher
        error = matcher.get_error()
        if isinstance(format, JsonFormat):
            self.check_schema(json.loads(format.schema), format.param)
        raise BadParameter(format.param, f"cannot be compiled: {_first_line(error)}")

    def _require_nonempty(self, matcher: Any, param: str) -> None:
        """Refuse a format that matches no text at all: the grammar is not complete at its start and allows no token there."""
        first = matcher.deep_copy()
        bits = np.unpackbits(np.frombuffer(first.compute_bitmask(), dtype=np.uint8), bitorder="little")
        if first.is_error():
            error = _first_line(first.get_error())
            raise BadParameter(param, "no text matches it" if "NoExtension" in error else f"cannot be followed: {error}")
        bits[list(self._eos_ids)] = 0
        if not first.is_accepting() and not bits.any():
            raise BadParameter(param, "no text matches it")

    def _matcher(self, grammar: dict[str, Any]) -> Any:
        return self._library.LLMatcher(self._vocabulary, json.dumps(grammar), log_level=0)

    def _schema_error(self, schema: Any) -> str:
        """Return why a schema cannot be compiled; empty if it can."""
        matcher = self._matcher({"grammars": [{"json_schema": schema}]})
        return _first_line(matcher.get_error()) if matcher.is_error() else ""

    def _body(self, format: ReplyFormat) -> dict[str, Any]:
        match format:
            case JsonFormat(schema):
                return {"json_schema": bound_whitespace(exact_numbers(json.loads(schema), format.param))}
            case RegexFormat(pattern):
                return {"lark_grammar": f"start: /{self._library.regex_to_lark(pattern, '')}/"}
            case ChoiceFormat(texts):
                # All texts are alternatives of one terminal, since one rule for each would exceed the parser's limits.
                return {"lark_grammar": "start: CHOICE\nCHOICE: " + " | ".join(lark_string(text) for text in texts)}
            case LarkFormat(lark):
                return {"lark_grammar": lark}
            case GbnfFormat(gbnf, param):
                return {"lark_grammar": _gbnf_to_lark(gbnf, param)}
            case _:
                assert_never(format)

    def _start(self, syntax: ReplySyntax) -> str:
        """Write the first rule: reasoning, which the prompt or the model may have begun, and then the constrained body."""
        if syntax.reasoning is None or syntax.thinking == "over":
            return "start: @body"
        thought = self._thought(syntax.reasoning)
        if syntax.thinking == "open":
            return f"start: thought gap @body\n{_GAP}\n{thought}"
        return f"start: (opens thought gap)? @body\nopens: {self.lark_text(syntax.reasoning.opens)}\n{_GAP}\n{thought}"

    def _thought(self, reasoning: ReasoningSyntax) -> str:
        (first, *rest) = self._tokenizer.encode(reasoning.closes, add_special=False)
        if not rest and self._tokenizer.is_special(first):
            return f"thought: /(.|\\n)*/ <[{first}]>"
        return f"thought[suffix={lark_string(reasoning.closes)}]: /(.|\\n)*/"


def lark_string(text: str) -> str:
    """Write a text as a quoted string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def bound_whitespace(schema: Any) -> Any:
    """Return a schema with a limit on the white space between JSON tokens."""
    if not isinstance(schema, dict):
        return schema
    given = schema.get("x-guidance")
    return {**schema, "x-guidance": {"whitespace_pattern": JSON_WHITESPACE, **(given if isinstance(given, dict) else {})}}


# ---------------------------------------------------------------------- finding the keyword that cannot be compiled

_SchemaCheck = Callable[[Any], str]  # returns why a schema cannot be compiled; empty if it can

# Keywords that contain subschemas: in an object by name, in a list, and directly.
_SCHEMA_MAPS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
_DEFINITIONS = ("$defs", "definitions")  # Subschemas may refer to these, so they are added when one is checked alone.


@dataclass(frozen=True, slots=True)
class SchemaError:
    path: str  # such as ".properties.a.pattern"
    reason: str


def find_schema_error(schema: Any, check: _SchemaCheck) -> SchemaError | None:
    """Return the innermost part of a schema that cannot be compiled; None if the whole schema can."""
    definitions = {name: schema[name] for name in _DEFINITIONS if isinstance(schema, dict) and name in schema}
    return _search(schema, "", lambda part: check({**definitions, **part} if isinstance(part, dict) else part))


def _search(schema: Any, path: str, check: _SchemaCheck) -> SchemaError | None:
    reason = check(schema)
    if not reason:
        return None
    if not isinstance(schema, dict):
        return SchemaError(path, reason)
    if unsupported := _unsupported_keyword(reason, schema):
        return SchemaError(f"{path}.{unsupported}", f"is not supported ({reason})")
    for step, part in _subschemas(schema):
        found = _search(part, path + step, check)
        if found is not None:
            return found
    for keyword in schema:
        if keyword not in _DEFINITIONS and not check({name: value for name, value in schema.items() if name != keyword}):
            return SchemaError(f"{path}.{keyword}", reason)
    return SchemaError(path, reason)


def _unsupported_keyword(reason: str, schema: Mapping[str, Any]) -> str | None:
    """Return the keyword that llguidance's message quotes, if the schema itself and not one of its parts has it."""
    if not reason.startswith("Unimplemented keys"):
        return None
    return next((name for name in re.findall(r'"([^"]+)"', reason) if name in schema), None)


def _subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword in _SCHEMA_MAPS:
        if isinstance(schema.get(keyword), dict):
            yield from ((f".{keyword}.{name}", part) for name, part in schema[keyword].items())
    for keyword in _SCHEMA_LISTS:
        if isinstance(schema.get(keyword), list):
            yield from ((f".{keyword}[{number}]", part) for number, part in enumerate(schema[keyword]))
    for keyword in _SCHEMAS:
        if isinstance(schema.get(keyword), dict):
            yield f".{keyword}", schema[keyword]


# ---------------------------------------------------------------------- llguidance


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise Unsupported(
            "structured output needs the package llguidance; install it: pip install 'onedraw[structured]'",
            code="structured_output_unavailable",
        ) from None
    return llguidance


def _vocabulary(library: Any, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> Any:
    """Wrap the tokenizer for llguidance, which calls it to tokenize text that the grammar determines. Such text is never encoded
    as special tokens, even where it looks like one."""

    class Wrapped:
        eos_token_id = eos_ids[0]
        bos_token_id = None
        tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]  # noqa: RUF012  the library only reads it
        special_token_ids = [i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)]  # noqa: RUF012

        def __call__(self, text: bytes | str) -> list[int]:
            return tokenizer.encode_plain(text if isinstance(text, str) else text.decode("utf-8", "replace"))

    return library.LLTokenizer(library.TokenizerWrapper(Wrapped()), n_vocab=tokenizer.vocab_size, eos_token=list(eos_ids))


def _gbnf_to_lark(source: str, param: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(source))
    except Exception as error:  # The translator raises plain exceptions as well as its own.
        raise BadParameter(param, f"this GBNF cannot be translated: {error}") from None


def _first_line(error: str) -> str:
    """Return the first line of llguidance's message that begins with "error:"; if none does, its first line."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or ["no reason given"])[0].removeprefix("error: ")
