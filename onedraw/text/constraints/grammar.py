"""Compile response formats into token constraints, with the library llguidance.

The input is a format and the syntax of the reply. The output is a Constraint, which returns the tokens that may follow any prefix
of the reply. Reasoning before the constrained part is free text. A format that cannot be compiled raises BadParameter; for a JSON
schema the error has the path of the unsupported keyword.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar, assert_never

import numpy as np

from onedraw.errors import BadParameter, Unsupported
from onedraw.limits import COMPILE_STACK, MAX_FORMAT_CHARACTERS, MAX_TOOL_CHARACTERS
from onedraw.text.constraints.base import BoundedNumbers, common_prefix, token_mask
from onedraw.text.constraints.check_process import first_line
from onedraw.text.constraints.checker import CheckedFormat, GrammarChecker, Refusal
from onedraw.text.constraints.format_limits import check_lark, schema_text
from onedraw.text.constraints.gbnf import Translation, translate
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

_GAP = r"gap: /[ \t\r\n]{0,8}/"  # the rule for white space between reasoning and answer
CACHED_RESULTS = 256  # formats whose compiled form, or whose error, is cached; the least recently used is dropped first
CACHED_CHARACTERS = 1 << 21  # characters of these formats together, since the memory of a compiled format grows with its text

ResultT = TypeVar("ResultT")


def structured_output_available() -> bool:
    """Whether the package llguidance is installed."""
    try:
        _llguidance()
    except Unsupported:
        return False
    return True


class GrammarConstraint:
    """Follows one reply with llguidance's matcher, which consumes new tokens, and rolls back to the common prefix when drafts
    change. Each request has a constraint of its own, since it has state."""

    def __init__(self, compiled: Any, vocab: int, param: str) -> None:
        self._compiled, self._matcher, self._vocab, self._param = compiled, compiled.deep_copy(), vocab, param
        self._tokens: list[int] = []
        self._failed: tuple[list[int], str] | None = None  # tokens after which the matcher failed, and the error

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> TokenMask | None:
        tokens = [*output, *drafts]
        # The error is kept, so that the same tokens always give the same error: a new matcher might get further before it fails.
        if self._failed is not None and tokens[: len(self._failed[0])] == self._failed[0]:
            raise BadParameter(self._param, self._failed[1])
        if any(token >= self._vocab for token in drafts):  # The model's vocabulary may be larger than the tokenizer's.
            return EMPTY_MASK
        common = self._roll_back(common_prefix(self._tokens, tokens))
        consumed = self._matcher.try_consume_tokens(tokens[common:])
        self._tokens = tokens[: common + consumed]
        if len(self._tokens) < len(tokens) and not self._matcher.is_error():
            return EMPTY_MASK  # The grammar rejects a draft, so that draft is not kept, and this mask is never used.
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)
        if self._matcher.is_error():  # The mask of a failed matcher allows only the end token and would end the reply silently.
            self._failed = tokens, f"cannot be followed any further: {first_line(self._matcher.get_error())}"
            raise BadParameter(self._param, self._failed[1])
        return bits

    def legal(self, output: Sequence[int]) -> int:
        known = next((i for i, token in enumerate(output) if token >= self._vocab), len(output))
        self.allowed(output[:known], ())
        return len(self._tokens)

    def _roll_back(self, common: int) -> int:
        """Roll the matcher back to the first `common` tokens and return how many stay consumed. If the grammar's rules have
        limits such as `max_tokens`, llguidance cannot roll back; then a new matcher starts with 0 tokens."""
        if common < len(self._tokens):
            self._matcher.rollback(len(self._tokens) - common)
        if not self._matcher.is_error():
            return common
        self._matcher, self._tokens = self._compiled.deep_copy(), []
        return 0


class GrammarCompiler:
    """Compiles formats for one tokenizer and caches the most recently used ones. It is thread-safe. The ConstraintFactory
    that made it closes it."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int], *, isolated: bool = True) -> None:
        """`isolated`: a helper process compiles each format first, so that a crash of the compiler cannot end this process."""
        eos_ids = [token for token in eos_ids if token < tokenizer.vocab_size]
        if not eos_ids:
            raise Unsupported(
                "structured output needs an end-of-sequence token, and this model's configuration names none", code="no_end_token"
            )
        self._tokenizer = tokenizer
        self._library = _llguidance()
        tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        special = [i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)]
        self._checker = GrammarChecker(tokens=tokens, special=special, eos_ids=eos_ids) if isolated else None
        if self._checker is not None:
            self._checker.start()  # now, so that the helper process reads the vocabulary while this process does
        self._vocabulary = _vocabulary(self._library, tokenizer, tokens=tokens, special=special, eos_ids=eos_ids)
        self._digits = token_mask([i for i, token in enumerate(tokens) if token[:1].isdigit()], tokenizer.vocab_size)
        self._results = ResultCache[Any](most=CACHED_RESULTS, weight=CACHED_CHARACTERS)

    def close(self) -> None:
        if self._checker is not None:
            self._checker.close()

    def constraint(self, format: ReplyFormat, syntax: ReplySyntax) -> Constraint:
        """Return a new constraint for one request whose reply has this syntax."""
        grammar = GrammarConstraint(self._compile(format, syntax), self._tokenizer.vocab_size, format.param)
        if isinstance(format, JsonFormat) or (isinstance(format, LarkFormat) and format.numbers):
            return BoundedNumbers(grammar, token_bytes=self._tokenizer.token_bytes, digits=self._digits)
        return grammar

    def check_schema(self, schema: Any, param: str, spend: Callable[[float], None] = lambda seconds: None) -> Any:
        """Return the schema if it can be compiled; else raise BadParameter with the path of the keyword that cannot be used.
        `spend` is called with the processor time that this took in the helper process."""
        text = schema_text(schema, param)
        exact, seconds = exact_numbers(schema, param), 0.0

        def check() -> Refusal | None:
            nonlocal seconds
            checked = self._check({"schema": exact})
            seconds = checked.seconds
            return checked.refusal

        refusal = self._results.get(("schema", _digest(text)), len(text), check)
        spend(seconds)
        if refusal is not None:
            raise BadParameter(param + refusal.path, refusal.reason)
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
        """Return a matcher at the start of the reply, from which the matchers of requests are copied."""
        text = _content(format)
        key = (type(format), _digest(text), syntax)
        compiled = self._results.get(key, len(text), lambda: self._check_and_compile(format, syntax))
        if isinstance(compiled, Refusal):
            raise BadParameter(format.param + compiled.path, compiled.reason)
        return compiled

    def _check_and_compile(self, format: ReplyFormat, syntax: ReplySyntax) -> Any:
        body, translation = self._body(format)
        grammar = json.dumps({"grammars": [{"lark_grammar": self._start(syntax)}, {"name": "body", **body}]})
        schema = {"schema": exact_numbers(json.loads(format.schema), format.param)} if isinstance(format, JsonFormat) else {}
        refusal = self._check({"grammar": grammar, **schema}).refusal
        if refusal is not None:
            return refusal if translation is None else replace(refusal, reason=translation.in_source(refusal.reason))
        matcher = _with_stack(lambda: self._library.LLMatcher(self._vocabulary, grammar, log_level=0))
        if matcher.is_error():
            return Refusal("", f"cannot be compiled: {first_line(matcher.get_error())}")
        matcher.compute_bitmask()  # The first mask takes longest to compute, and copies of the matcher inherit it.
        return matcher

    def _check(self, request: Mapping[str, Any]) -> CheckedFormat:
        return CheckedFormat(None) if self._checker is None else self._checker.check(request)

    def _body(self, format: ReplyFormat) -> tuple[dict[str, Any], Translation | None]:
        """Return the constrained part in llguidance's form, and the translation if the format has another notation."""
        match format:
            case JsonFormat(schema):
                return {"json_schema": bound_whitespace(exact_numbers(json.loads(schema), format.param))}, None
            case RegexFormat(pattern):
                return {"lark_grammar": f"start: /{self._library.regex_to_lark(pattern, '')}/"}, None
            case ChoiceFormat(texts):
                # All texts are alternatives of one terminal (a regular expression), because one rule for each text would exceed
                # the limits of llguidance's parser.
                return {"lark_grammar": "start: CHOICE\nCHOICE: " + " | ".join(lark_string(text) for text in texts)}, None
            case LarkFormat(lark, param, written):
                check_lark(lark, param, most=MAX_TOOL_CHARACTERS if written else MAX_FORMAT_CHARACTERS)
                return {"lark_grammar": lark}, None
            case GbnfFormat(gbnf, param):
                translation = translate(gbnf, param)
                return {"lark_grammar": translation.lark}, translation
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


def _content(format: ReplyFormat) -> str:
    """Return the text that identifies a format in the cache. The caller's name of the field is not part of it."""
    match format:
        case JsonFormat(text) | RegexFormat(text) | LarkFormat(text) | GbnfFormat(text):
            return text
        case ChoiceFormat(texts):
            return json.dumps(texts)
        case _:
            assert_never(format)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def lark_string(text: str) -> str:
    """Write a text as a quoted string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def bound_whitespace(schema: Any) -> Any:
    """Return a schema with a limit on the white space between JSON tokens, and with bounds of numbers that stay exact."""
    schema = exact_numbers(schema, "schema")
    if not isinstance(schema, dict):
        return schema
    given = schema.get("x-guidance")
    return {**schema, "x-guidance": {"whitespace_pattern": JSON_WHITESPACE, **(given if isinstance(given, dict) else {})}}


# ---------------------------------------------------------------------- cached results


@dataclass(frozen=True, slots=True)
class _Entry(Generic[ResultT]):
    weight: int
    result: Future[ResultT] = field(default_factory=Future)


class ResultCache(Generic[ResultT]):
    """Holds at most `most` results, whose weights add up to at most `weight` unless there is only one; the least recently used
    are dropped first. Several threads may use it: each result is computed only once, even if several ask for it at the same time.
    A computation that raises is not cached, so the next caller tries again."""

    def __init__(self, *, most: int, weight: int) -> None:
        self._most, self._weight = most, weight
        self._entries: OrderedDict[Hashable, _Entry[ResultT]] = OrderedDict()
        self._total = 0
        self._lock = threading.Lock()  # never held while a result is computed

    def get(self, key: Hashable, weight: int, make: Callable[[], ResultT]) -> ResultT:
        while True:
            with self._lock:
                found = self._entries.get(key)
                if found is None:
                    mine = self._entries[key] = _Entry(weight)
                    self._total += weight
                    break
                self._entries.move_to_end(key)
            if found.result.exception() is None:  # waits until another thread has computed it
                return found.result.result()
        try:
            made = make()
        except BaseException as error:
            with self._lock:
                self._remove(key, mine)
            mine.result.set_exception(error)
            raise
        mine.result.set_result(made)
        with self._lock:
            while len(self._entries) > self._most or (self._total > self._weight and len(self._entries) > 1):
                oldest = next(iter(self._entries))
                self._remove(oldest, self._entries[oldest])
        return made

    def _remove(self, key: Hashable, entry: _Entry[ResultT]) -> None:
        if self._entries.get(key) is entry:
            del self._entries[key]
            self._total -= entry.weight


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


def _vocabulary(
    library: Any, tokenizer: Tokenizer, *, tokens: Sequence[bytes], special: Sequence[int], eos_ids: Sequence[int]
) -> Any:
    """Wrap the tokenizer for llguidance, which calls it to tokenize text that the grammar determines. Such text is never encoded
    as special tokens, even where it looks like one."""

    class Wrapped:
        eos_token_id = eos_ids[0]
        bos_token_id = None

        def __call__(self, text: bytes | str) -> list[int]:
            return tokenizer.encode_plain(text if isinstance(text, str) else text.decode("utf-8", "replace"))

    wrapped: Any = Wrapped()
    wrapped.tokens, wrapped.special_token_ids = tokens, special
    return library.LLTokenizer(library.TokenizerWrapper(wrapped), n_vocab=len(tokens), eos_token=list(eos_ids))


_STACK_SIZE_LOCK = threading.Lock()


def _with_stack(call: Callable[[], ResultT]) -> ResultT:
    """Return the result of a call, which runs on a thread with twice the stack of the helper process, so that a format which
    compiled there compiles here too. The stack of the calling thread may be smaller."""
    result: Future[ResultT] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    with _STACK_SIZE_LOCK:
        before = threading.stack_size(2 * COMPILE_STACK)
        thread = threading.Thread(target=run)
        thread.start()
        threading.stack_size(before)
    thread.join()
    return result.result()
