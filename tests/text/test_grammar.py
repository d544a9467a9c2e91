"""Response formats: the tokens allowed after any prefix of a reply, and the errors for formats that cannot be compiled."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest

from onedraw.errors import BadParameter, Unsupported
from onedraw.sampling.adjustments import mask_to_bools
from onedraw.text.constraints.base import LONGEST_NUMBER, AllOf, BoundedNumbers, combine, intersect, token_mask
from onedraw.text.constraints.grammar import GrammarCompiler
from onedraw.text.constraints.response_format import (
    ANY_OBJECT,
    ChoiceFormat,
    GbnfFormat,
    JsonFormat,
    LarkFormat,
    RegexFormat,
    ReplyFormat,
    grammar_format,
)
from onedraw.text.constraints.thinking_budget import single_token_mask
from onedraw.text.fake_tokenizer import fake_tokenizer
from onedraw.text.reasoning import ReasoningSyntax
from onedraw.text.reply_parser import PLAIN_TEXT, ReplySyntax
from onedraw.text.tokenizer import Tokenizer
from onedraw.types import Constraint, TokenMask

TOKENIZER = fake_tokenizer()
EOS = 256
COMPILER = GrammarCompiler(TOKENIZER, (EOS,))
THINK = ReasoningSyntax("<think>", "</think>", "\n</think>\n\n")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special=False)


def constraint(format: ReplyFormat, syntax: ReplySyntax = PLAIN_TEXT) -> Constraint:
    return COMPILER.constraint(format, syntax)


def allowed(constraint: Constraint, output: str, drafts: str = "") -> set[str]:
    bits = constraint.allowed(ids(output), ids(drafts))
    assert bits is not None
    tokens = np.flatnonzero(mask_to_bools(bits, TOKENIZER.vocab_size)).tolist()
    return {"END" if token == EOS else TOKENIZER.token_bytes(token).decode("latin-1") for token in tokens}


def test_a_choice_is_followed_to_its_end() -> None:
    grammar = constraint(ChoiceFormat(("yes", "yellow", 'n"o\n'), "guided_choice"))
    assert allowed(grammar, "") == {"y", "n"}
    assert allowed(grammar, "ye") == {"s", "l"}
    assert allowed(grammar, 'n"o') == {"\n"}
    assert allowed(grammar, "yes") == {"END"}


def test_a_choice_that_is_a_prefix_of_another_may_end_or_continue() -> None:
    grammar = constraint(ChoiceFormat(("yes", "yes, but"), "guided_choice"))
    assert allowed(grammar, "yes") == {"END", ","}
    assert allowed(grammar, "yes, but") == {"END"}


def test_a_format_may_have_thousands_of_choices() -> None:
    grammar = constraint(ChoiceFormat(tuple(f"c{i}" for i in range(5000)), "guided_choice"))
    assert allowed(grammar, "c499") == {"END", *"0123456789"}
    assert allowed(grammar, "c4999") == {"END"}


def test_text_of_a_format_that_looks_like_a_special_token_is_plain_text() -> None:
    marker = TOKENIZER.special_texts[0]
    for format, output in ((ChoiceFormat((f"a{marker}b",), "x"), "a"), (JsonFormat.of({"const": f"a{marker}b"}, "x"), '"a')):
        grammar = constraint(format)
        plain = TOKENIZER.encode_plain(output + marker)
        assert EOS not in plain
        for length in range(len(output), len(plain)):
            bits = grammar.allowed(plain[:length], ())
            assert bits is not None
            assert np.flatnonzero(mask_to_bools(bits, TOKENIZER.vocab_size)).tolist() == [plain[length]]


@pytest.mark.parametrize("rule", ["a[max_tokens=30]: /[a-z ]*/", 'a[stop="e"]: /[a-z ]*/'])
def test_rules_with_their_own_limits_allow_the_same_tokens_after_rejected_drafts(rule: str) -> None:
    """The matcher of such rules cannot roll back."""
    format = LarkFormat(f'start: a "x"\n{rule}', "guided_grammar")
    grammar, alone = constraint(format), constraint(format)
    output = "do this and"
    for length in range(len(output)):
        grammar.allowed(ids(output[:length]), ids("abc"))
        assert allowed(grammar, output[:length], "q") == allowed(constraint(format), output[:length], "q")
        assert allowed(grammar, output[:length]) == allowed(alone, output[:length])


@pytest.mark.parametrize(
    "format",
    [
        JsonFormat.of({"$ref": "#"}, "x"),
        RegexFormat(r"[^\s\S]", "x"),
        LarkFormat("start: start", "x"),
        GbnfFormat("root ::= root", "x"),
    ],
)
def test_a_format_that_no_text_matches_is_refused(format: ReplyFormat) -> None:
    with pytest.raises(BadParameter, match=r"no text matches it|cannot be"):
        constraint(format)


def test_a_format_that_the_empty_text_matches_may_end_at_once() -> None:
    assert "END" in allowed(constraint(RegexFormat("(a)?", "x")), "")


def test_a_regular_expression_matches_the_whole_reply() -> None:
    grammar = constraint(RegexFormat(r"[a-c]{2}/\d", "guided_regex"))
    assert allowed(grammar, "") == {"a", "b", "c"}
    assert allowed(grammar, "ab") == {"/"}
    assert {str(n) for n in range(10)} <= allowed(grammar, "ab/")


@pytest.mark.parametrize(
    "format",
    [
        GbnfFormat('root ::= "a" digit{1,2} | "b"\ndigit ::= [0-9]', "grammar"),
        LarkFormat('start: "a" DIGIT{1,2} | "b"\nDIGIT: /[0-9]/', "guided_grammar"),
    ],
)
def test_a_grammar_is_compiled_in_either_notation(format: ReplyFormat) -> None:
    grammar = constraint(format)
    assert allowed(grammar, "") == {"a", "b"}
    assert allowed(grammar, "b") == {"END"}
    assert "END" in allowed(grammar, "a1")
    assert "END" not in allowed(grammar, "a")
    assert type(grammar_format(getattr(format, "lark", "") or format.gbnf, "x")) is type(format)


def test_reasoning_before_the_constrained_part_is_free() -> None:
    format = ChoiceFormat(("yes",), "guided_choice")
    syntax = ReplySyntax(opening=True, reasoning=THINK, thinking="open")
    grammar = constraint(format, syntax)
    assert {"y", "<", "{"} <= allowed(grammar, "")
    assert "END" not in allowed(grammar, "hm")
    assert allowed(grammar, "hm</think>\n\n") == {"y", " ", "\t", "\r", "\n"}
    assert allowed(grammar, "hm</think>yes") == {"END"}
    assert allowed(constraint(format, ReplySyntax(reasoning=THINK, thinking="may")), "") == {"y", "<"}
    assert allowed(constraint(format, ReplySyntax(reasoning=THINK, thinking="over")), "") == {"y"}


def special_tokenizer() -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|channel>", "<channel|>"])
    return Tokenizer(backend, bos_id=None, eos_id=EOS)


def test_markers_that_are_special_tokens_are_matched_as_tokens() -> None:
    tokenizer = special_tokenizer()
    gemma = ReasoningSyntax("<|channel>thought\n", "<channel|>", "\n<channel|>", anywhere=True)
    grammar = GrammarCompiler(tokenizer, (EOS,)).constraint(
        ChoiceFormat(("yes",), "x"), ReplySyntax(reasoning=gemma, thinking="may")
    )

    def after(text: str) -> set[int]:
        bits = grammar.allowed(tokenizer.encode(text, add_special=False), [])
        assert bits is not None
        return set(np.flatnonzero(mask_to_bools(bits, tokenizer.vocab_size)).tolist())

    assert after("") == {257, *tokenizer.encode("y", add_special=False)}
    assert after("<|channel>") == set(tokenizer.encode("t", add_special=False))
    assert 258 in after("<|channel>thought\nhm")
    assert EOS not in after("<|channel>thought\nhm")
    assert EOS in after("<|channel>thought\nhm<channel|>yes")


def test_the_mask_depends_on_the_tokens_alone() -> None:
    """A matcher that was rolled back or branched gives the same mask as a new one."""
    rng = np.random.default_rng(3)
    grammar = constraint(JsonFormat.of(PERSON, "x"))
    truth = ids('{"name": "Ada \\u00e9", "age": 36, "tags": ["a", "b"]}')
    for _ in range(150):
        output = truth[: int(rng.integers(0, len(truth) + 1))]
        drafts = truth[len(output) : len(output) + int(rng.integers(0, 6))]
        if rng.random() < 0.4:
            drafts = [*drafts, int(rng.integers(0, 256))]
        found, expected = grammar.allowed(output, drafts), constraint(JsonFormat.of(PERSON, "x")).allowed(output, drafts)
        assert found is not None
        assert expected is not None
        assert found.tolist() == expected.tolist()


def test_no_token_is_allowed_after_a_draft_that_is_not_allowed() -> None:
    grammar = constraint(ChoiceFormat(("yes",), "x"))
    assert allowed(grammar, "y", "x") == set()
    assert allowed(grammar, "y", "xes") == set()
    assert allowed(grammar, "y", "e") == {"s"}


def random_value(schema: Any, rng: np.random.Generator) -> Any:
    """A value sampled at random from the allowed tokens, byte by byte."""
    grammar, output = constraint(JsonFormat.of(schema, "x")), []
    for _ in range(4000):
        bits = grammar.allowed(output, [])
        assert bits is not None
        choices = np.flatnonzero(mask_to_bools(bits, TOKENIZER.vocab_size))
        ascii_first = choices[(choices < 94) | (choices == EOS)]  # mostly the characters of JSON
        pick = int(rng.choice(ascii_first if len(ascii_first) and rng.random() < 0.98 else choices))
        if EOS in choices and rng.random() < 0.5:
            pick = EOS
        if pick == EOS:
            return json.loads(TOKENIZER.decode(output))
        output.append(pick)
    return None


def test_random_allowed_tokens_are_valid_json() -> None:
    rng = np.random.default_rng(0)
    schema = {
        "type": "object",
        "properties": {
            "n": {"type": "number"},
            "k": {"type": "integer", "minimum": 3, "maximum": 40},
            "c": {"enum": ["x", 1, None]},
        },
        "required": ["n", "k", "c"],
        "additionalProperties": False,
    }
    values = [random_value(schema, rng) for _ in range(15)]
    for value in values:
        jsonschema.validate(value, schema)


def test_numbers_and_white_space_are_limited() -> None:
    grammar = constraint(JsonFormat.of(PERSON, "x"))
    begun = '{"name": "a", "age": '
    assert "7" in allowed(grammar, begun + "1" * (LONGEST_NUMBER - 1))
    assert not {"7", "0"} & allowed(grammar, begun + "1" * LONGEST_NUMBER)
    assert "," in allowed(grammar, begun + "1" * LONGEST_NUMBER)
    assert " " in allowed(grammar, "{\n" + " " * 23)
    assert allowed(grammar, "{\n" + " " * 24) == {'"'}


@pytest.mark.parametrize("vocab", [64, 70, 96, 97])
def test_numbers_are_limited_for_any_vocabulary_size(vocab: int) -> None:
    """A grammar's mask may have a bit more than the vocabulary has tokens."""

    class AllowEverything:
        def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> TokenMask:
            return np.full(-(-(vocab + 1) // 32), 0xFFFFFFFF, dtype=np.uint32)

    grammar = BoundedNumbers(
        AllowEverything(), token_bytes=lambda token: b"%d" % (token % 10), digits=token_mask(range(10), vocab)
    )
    bits = grammar.allowed([1] * LONGEST_NUMBER, ())
    assert bits is not None
    assert np.flatnonzero(mask_to_bools(bits, vocab)).tolist() == list(range(10, vocab))


def test_a_grammar_that_requires_a_long_number_gets_it() -> None:
    grammar = constraint(LarkFormat(f'start: "{10**60}"', "x", numbers=True))
    assert allowed(grammar, "1" + "0" * 55) == {"0"}


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "objekt"}, ".type"),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, ".properties.a.uniqueItems"),
        ({"anyOf": [{"type": "string"}, {"type": "string", "pattern": "(?=a)b"}]}, ".anyOf[1].pattern"),
        ({"$defs": {"x": {"not": {}}}, "properties": {"a": {"$ref": "#/$defs/x"}}}, ".$defs.x.not"),
        ({"items": {"$ref": "#/$defs/none"}, "type": "array"}, ".items.$ref"),
        ({"type": "string", "format": "wish"}, ".format"),
    ],
)
def test_the_error_names_the_path_of_an_unsupported_keyword(schema: Any, path: str) -> None:
    with pytest.raises(BadParameter) as error:
        constraint(JsonFormat.of(schema, "schema"))
    assert error.value.param == "schema" + path


@pytest.mark.parametrize(
    ("format", "words"),
    [
        (RegexFormat("(?=a)b", "guided_regex"), "look-around"),
        (RegexFormat("[", "guided_regex"), "cannot be compiled"),
        (GbnfFormat("root ::= <[10]>", "grammar"), "cannot be translated"),
        (GbnfFormat("x ::= [0-9]", "grammar"), "cannot be translated"),
        (LarkFormat("start: nothing", "guided_grammar"), "nothing"),
    ],
)
def test_the_error_for_a_format_that_cannot_be_compiled_names_its_parameter(format: ReplyFormat, words: str) -> None:
    with pytest.raises(BadParameter, match=words) as error:
        constraint(format)
    assert error.value.param == format.param


def test_an_invalid_schema_and_an_empty_choice_are_refused() -> None:
    for wrong in ("{", "[]", 5):
        with pytest.raises(BadParameter):
            JsonFormat.of(wrong, "x")
    for texts in ((), ("",)):
        with pytest.raises(BadParameter):
            ChoiceFormat(texts, "x")


def test_a_model_without_an_end_token_has_no_structured_output() -> None:
    with pytest.raises(Unsupported, match="end-of-sequence token"):
        GrammarCompiler(TOKENIZER, ())


def test_combined_constraints_allow_the_tokens_that_all_allow() -> None:
    digits, grammar = constraint(RegexFormat("[0-9]", "x")), constraint(RegexFormat("[5-9a]", "x"))
    together = combine(digits, None, grammar)
    assert isinstance(together, AllOf)
    assert allowed(together, "") == {"5", "6", "7", "8", "9"}
    assert combine(None, grammar) is grammar
    assert combine(None) is None
    assert intersect(single_token_mask(3), single_token_mask(200)).tolist() == [0]
    assert np.flatnonzero(mask_to_bools(token_mask([1, 40], 64), 64)).tolist() == [1, 40]


def test_equal_formats_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    matcher = llguidance.LLMatcher
    monkeypatch.setattr(llguidance, "LLMatcher", lambda *args, **kwargs: made.append(args) or matcher(*args, **kwargs))
    compiler = GrammarCompiler(TOKENIZER, (EOS,))
    for _ in range(2):
        compiler.constraint(JsonFormat.of(ANY_OBJECT, "x"), PLAIN_TEXT)
    assert len(made) == 1
    compiler.constraint(JsonFormat.of(PERSON, "x"), PLAIN_TEXT)
    assert len(made) == 2


def test_without_llguidance_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(Unsupported, match=r"onedraw\[structured\]"):
        GrammarCompiler(TOKENIZER, (EOS,))


def test_an_end_token_outside_the_vocabulary_is_ignored() -> None:
    format = RegexFormat("[a-z]{5}", "x")
    grammar = GrammarCompiler(TOKENIZER, (EOS, 10**6)).constraint(format, PLAIN_TEXT)
    assert np.array_equal(grammar.allowed([], []), COMPILER.constraint(format, PLAIN_TEXT).allowed([], []))
    with pytest.raises(Unsupported, match="end-of-sequence token"):
        GrammarCompiler(TOKENIZER, (10**6,))
