"""Guides compiled to constraints, through llguidance: the set of tokens that may follow any beginning of a reply.

In: a guide and how the reply is read. Out: a Constraint. Thinking, where the model may think, stands before the guided part
and is free. The matcher follows history and drafts, and rolls back to where another draft or another branch parts. A
guide that cannot be compiled is a BadParameter, with the path of the keyword that is to blame.
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
from onedraw.text.constraints.response_format import (
    WHITESPACE,
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

# -------------------- Which keyword of a JSON schema is to blame that it cannot be compiled.


Judge = Callable[[Any], str]  # what is wrong with a schema; empty: nothing

_MAPS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
_SHARED = ("$defs", "definitions")  # what a part needs of the whole, to be judged by itself


@dataclass(frozen=True, slots=True)
class Blame:
    path: str  # ".properties.a.pattern"
    reason: str


def find_blame(schema: Any, judge: Judge) -> Blame | None:
    """None where no single keyword can be named."""
    shared = {name: schema[name] for name in _SHARED if isinstance(schema, dict) and name in schema}
    return _search(schema, "", lambda part: judge(_beside(part, shared)))


def _beside(part: Any, shared: Mapping[str, Any]) -> Any:
    return {**shared, **part} if isinstance(part, dict) else part


def _search(schema: Any, path: str, judge: Judge) -> Blame | None:
    reason = judge(schema)
    if not reason:
        return None
    if not isinstance(schema, dict):
        return Blame(path, reason)
    if named := _named_keys(reason, schema):
        return Blame(f"{path}.{named}", f"is not supported ({reason})")
    for step, part in _parts(schema):
        found = _search(part, path + step, judge)
        if found is not None:
            return found
    for keyword in schema:
        if keyword not in _SHARED and not judge({name: value for name, value in schema.items() if name != keyword}):
            return Blame(f"{path}.{keyword}", reason)
    return Blame(path, reason)


def _named_keys(reason: str, schema: Mapping[str, Any]) -> str | None:
    """The keyword a reason names, where it stands at this very place."""
    if not reason.startswith("Unimplemented keys"):
        return None
    return next((name for name in re.findall(r'"([^"]+)"', reason) if name in schema), None)


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword in _MAPS:
        if isinstance(schema.get(keyword), dict):
            yield from ((f".{keyword}.{name}", part) for name, part in schema[keyword].items())
    for keyword in _LISTS:
        if isinstance(schema.get(keyword), list):
            yield from ((f".{keyword}[{number}]", part) for number, part in enumerate(schema[keyword]))
    for keyword in _SINGLES:
        if isinstance(schema.get(keyword), dict):
            yield f".{keyword}", schema[keyword]


# -------------------- Guides compiled to constraints, through llguidance: the set of tokens that may follow any


REMEMBERED = 64  # compiled grammars
_GAP = r"gap: /[ \t\r\n]{0,8}/"  # what models put between their thinking and their answer


class GrammarConstraint:
    """A matcher that follows a reply. Owner: one request."""

    def __init__(self, pristine: Any, vocab: int, param: str) -> None:
        self._pristine, self._matcher, self._vocab, self._param = pristine, pristine.deep_copy(), vocab, param
        self._tokens: list[int] = []

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> TokenMask | None:
        tokens = [*output, *drafts]
        if any(token >= self._vocab for token in drafts):  # a row of the model's head that stands for no token
            return EMPTY_MASK
        common = self._back_to(common_prefix(self._tokens, tokens))
        fitting = self._matcher.try_consume_tokens(tokens[common:])
        self._tokens = tokens[: common + fitting]
        if len(self._tokens) < len(tokens) and not self._matcher.is_error():
            return EMPTY_MASK  # a draft that may not stand there: nothing behind it is ever reached
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)
        if self._matcher.is_error():  # it says no more than that a reply may end
            raise BadParameter(self._param, f"cannot be followed any further: {_first_line(self._matcher.get_error())}")
        return bits

    def _back_to(self, common: int) -> int:
        """Goes back to so many tokens, or, where the matcher cannot (rules with limits of their own), to the first."""
        if common < len(self._tokens):
            self._matcher.rollback(len(self._tokens) - common)
        if not self._matcher.is_error():
            return common
        self._matcher, self._tokens = self._pristine.deep_copy(), []
        return 0


class GrammarCompiler:
    """Compiles guides for one tokenizer and remembers the last ones. May be used from several threads."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> None:
        eos_ids = [token for token in eos_ids if token < tokenizer.vocab_size]
        if not eos_ids:
            raise Unsupported(
                "this model names no token that ends a reply, so no reply can be held to a form", code="no_end_token"
            )
        self._tokenizer, self._ends = tokenizer, tuple(eos_ids)
        self._library = _library()
        self._vocabulary = _vocabulary(self._library, tokenizer, eos_ids)
        members = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i)[:1].isdigit()]
        self._digits = token_mask(members, tokenizer.vocab_size)
        self._compiled: OrderedDict[tuple[ReplyFormat, ReplySyntax], Any] = OrderedDict()
        self._lock = threading.Lock()

    def constraint(self, guide: ReplyFormat, reading: ReplySyntax) -> Constraint:
        """A constraint of its own for one request, whose reply is read in this way."""
        with self._lock:
            pristine = self._compiled.get((guide, reading))
            if pristine is None:
                pristine = self._compiled[guide, reading] = self._compile(guide, reading)
                if len(self._compiled) > REMEMBERED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end((guide, reading))
        grammar = GrammarConstraint(pristine, self._tokenizer.vocab_size, guide.param)
        if isinstance(guide, JsonFormat) or (isinstance(guide, LarkFormat) and guide.numbers):
            return BoundedNumbers(grammar, token_bytes=self._tokenizer.token_bytes, digits=self._digits)
        return grammar

    def _compile(self, guide: ReplyFormat, reading: ReplySyntax) -> Any:
        opening = {"lark_grammar": self._opening(reading)}
        body = {"name": "body", **self._body(guide)}
        matcher = self._matcher({"grammars": [opening, body]})
        if not matcher.is_error():
            self._require_text(matcher, guide.param)
            return matcher
        error = matcher.get_error()
        if isinstance(guide, JsonFormat):
            self.check_schema(json.loads(guide.schema), guide.param)
        raise BadParameter(guide.param, f"cannot be compiled: {_first_line(error)}")

    def _require_text(self, matcher: Any, param: str) -> None:
        """Refuse a form that nothing has: where a reply may only end at once, and nothing is not of that form either."""
        first = matcher.deep_copy()
        bits = np.unpackbits(np.frombuffer(first.compute_bitmask(), dtype=np.uint8), bitorder="little")
        if first.is_error():
            error = _first_line(first.get_error())
            raise BadParameter(param, "no text is of this form" if "NoExtension" in error else f"cannot be followed: {error}")
        bits[list(self._ends)] = 0
        if not first.is_accepting() and not bits.any():
            raise BadParameter(param, "no text is of this form")

    def _matcher(self, grammar: dict[str, Any]) -> Any:
        return self._library.LLMatcher(self._vocabulary, json.dumps(grammar), log_level=0)

    def check_schema(self, schema: Any, param: str) -> Any:
        """The schema, if it can be held to; else BadParameter with the path of the keyword that is to blame."""
        if self._schema_error(schema):
            blame = find_blame(schema, self._schema_error)
            assert blame is not None
            raise BadParameter(f"{param}{blame.path}", blame.reason)
        return schema

    def _schema_error(self, schema: Any) -> str:
        """What is wrong with a schema, or nothing."""
        matcher = self._matcher({"grammars": [{"json_schema": schema}]})
        return _first_line(matcher.get_error()) if matcher.is_error() else ""

    def _body(self, guide: ReplyFormat) -> dict[str, Any]:
        match guide:
            case JsonFormat(schema):
                return {"json_schema": bound_whitespace(json.loads(schema))}
            case RegexFormat(pattern):
                return {"lark_grammar": f"start: /{self._library.regex_to_lark(pattern, '')}/"}
            case ChoiceFormat(texts):
                # One word of many shapes: as many rules would be more than a parser follows at once.
                return {"lark_grammar": "start: CHOICE\nCHOICE: " + " | ".join(literal(text) for text in texts)}
            case LarkFormat(lark):
                return {"lark_grammar": lark}
            case GbnfFormat(gbnf, param):
                return {"lark_grammar": _lark_of(gbnf, param)}
            case _:
                assert_never(guide)

    def _opening(self, reading: ReplySyntax) -> str:
        """What may stand before the guided part: thinking, begun by the prompt or by the model."""
        if reading.reasoning is None or reading.thinking == "over":
            return "start: @body"
        thought = self._thought(reading.reasoning)
        if reading.thinking == "open":
            return f"start: thought gap @body\n{_GAP}\n{thought}"
        return f"start: (opens thought gap)? @body\nopens: {self.lark_text(reading.reasoning.opens)}\n{_GAP}\n{thought}"

    def _thought(self, reasoning: ReasoningSyntax) -> str:
        (first, *rest) = self._tokenizer.encode(reasoning.closes, add_special=False)
        if not rest and self._tokenizer.is_special(first):
            return f"thought: /(.|\\n)*/ <[{first}]>"
        return f"thought[suffix={literal(reasoning.closes)}]: /(.|\\n)*/"

    def lark_text(self, text: str) -> str:
        """A text as a Lark grammar writes it: special tokens by their number, the rest between quotes."""
        parts: list[str] = []
        plain: list[int] = []
        for token in self._tokenizer.encode(text, add_special=False):
            if self._tokenizer.is_special(token):
                parts += [literal(self._tokenizer.decode(plain))] if plain else []
                parts.append(f"<[{token}]>")
                plain = []
            else:
                plain.append(token)
        parts += [literal(self._tokenizer.decode(plain))] if plain else []
        return " ".join(parts)


def literal(text: str) -> str:
    """A text between quotes, as Lark reads it."""
    return json.dumps(text, ensure_ascii=False)


def bound_whitespace(schema: Any) -> Any:
    """A schema whose white space is bounded."""
    if not isinstance(schema, dict):
        return schema
    given = schema.get("x-guidance")
    return {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE, **(given if isinstance(given, dict) else {})}}


def structured_output_available() -> bool:
    """Whether replies can be held to a form here."""
    try:
        _library()
    except Unsupported:
        return False
    return True


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise Unsupported(
            "holding a reply to a form needs the package llguidance; install it: pip install 'onedraw[structured]'",
            code="structured_output_unavailable",
        ) from None
    return llguidance


def _vocabulary(library: Any, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> Any:
    """The tokenizer as the library knows one. It asks how a text is written that a form leaves no choice about: in plain tokens,
    since what is spelled like a special token is none there."""

    class Wrapped:
        eos_token_id = eos_ids[0]
        bos_token_id = None
        tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]  # noqa: RUF012  read once, by the library
        special_token_ids = [i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)]  # noqa: RUF012

        def __call__(self, text: bytes | str) -> list[int]:
            return tokenizer.encode_plain(text if isinstance(text, str) else text.decode("utf-8", "replace"))

    return library.LLTokenizer(library.TokenizerWrapper(Wrapped()), n_vocab=tokenizer.vocab_size, eos_token=list(eos_ids))


def _lark_of(source: str, param: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(source))
    except Exception as error:  # the translator raises plain exceptions as well as its own
        raise BadParameter(param, f"this GBNF cannot be translated: {error}") from None


def _first_line(error: str) -> str:
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("error:")]
    return (told or lines or ["no reason given"])[0].removeprefix("error: ")
