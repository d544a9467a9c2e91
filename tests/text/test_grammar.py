"""Guides: what may follow any beginning of a reply, and what is said of a guide that cannot be compiled."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest

from onedraw.errors import BadParameter, Unsupported
from onedraw.sampling.adjustments import unpacked
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
GRAMMARS = GrammarCompiler(TOKENIZER, (EOS,))
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


def constraint(guide: ReplyFormat, reading: ReplySyntax = PLAIN_TEXT) -> Constraint:
    return GRAMMARS.constraint(guide, reading)


def allowed(held: Constraint, said: str, drafts: str = "") -> set[str]:
    bits = held.allowed(ids(said), ids(drafts))
    assert bits is not None
    tokens = np.flatnonzero(unpacked(bits, TOKENIZER.vocab_size)).tolist()
    return {"END" if token == EOS else TOKENIZER.token_bytes(token).decode("latin-1") for token in tokens}


def test_a_choice_is_spelled_to_its_end_and_then_ends() -> None:
    held = constraint(ChoiceFormat(("yes", "yellow", 'n"o\n'), "guided_choice"))
    assert allowed(held, "") == {"y", "n"}
    assert allowed(held, "ye") == {"s", "l"}
    assert allowed(held, 'n"o') == {"\n"}
    assert allowed(held, "yes") == {"END"}


def test_a_choice_that_begins_like_another_may_end_or_go_on() -> None:
    held = constraint(ChoiceFormat(("yes", "yes, but"), "guided_choice"))
    assert allowed(held, "yes") == {"END", ","}
    assert allowed(held, "yes, but") == {"END"}


def test_thousands_of_choices_are_held_to() -> None:
    held = constraint(ChoiceFormat(tuple(f"c{i}" for i in range(5000)), "guided_choice"))
    assert allowed(held, "c499") == {"END", *"0123456789"}
    assert allowed(held, "c4999") == {"END"}


def test_what_is_spelled_like_a_special_token_is_text_where_a_form_wants_it() -> None:
    marker = TOKENIZER.special_texts[0]
    for guide, said in ((ChoiceFormat((f"a{marker}b",), "x"), "a"), (JsonFormat.of({"const": f"a{marker}b"}, "x"), '"a')):
        held = constraint(guide)
        plain = TOKENIZER.encode_plain(said + marker)
        assert EOS not in plain
        for length in range(len(said), len(plain)):
            bits = held.allowed(plain[:length], ())
            assert bits is not None
            assert np.flatnonzero(unpacked(bits, TOKENIZER.vocab_size)).tolist() == [plain[length]]


@pytest.mark.parametrize("rule", ["a[max_tokens=30]: /[a-z ]*/", 'a[stop="e"]: /[a-z ]*/'])
def test_rules_with_limits_of_their_own_allow_the_same_behind_drafts_that_were_dropped(rule: str) -> None:
    """Their matcher cannot go back by itself."""
    guide = LarkFormat(f'start: a "x"\n{rule}', "guided_grammar")
    held, alone = constraint(guide), constraint(guide)
    said = "do this and"
    for length in range(len(said)):
        held.allowed(ids(said[:length]), ids("abc"))
        assert allowed(held, said[:length], "q") == allowed(constraint(guide), said[:length], "q")
        assert allowed(held, said[:length]) == allowed(alone, said[:length])


@pytest.mark.parametrize(
    "guide",
    [
        JsonFormat.of({"$ref": "#"}, "x"),
        RegexFormat(r"[^\s\S]", "x"),
        LarkFormat("start: start", "x"),
        GbnfFormat("root ::= root", "x"),
    ],
)
def test_a_form_that_no_text_has_is_refused(guide: ReplyFormat) -> None:
    with pytest.raises(BadParameter, match=r"no text matches it|cannot be"):
        constraint(guide)


def test_a_form_that_nothing_at_all_has_may_end_at_once() -> None:
    assert "END" in allowed(constraint(RegexFormat("(a)?", "x")), "")


def test_a_regular_expression_holds_from_first_to_last() -> None:
    held = constraint(RegexFormat(r"[a-c]{2}/\d", "guided_regex"))
    assert allowed(held, "") == {"a", "b", "c"}
    assert allowed(held, "ab") == {"/"}
    assert {str(n) for n in range(10)} <= allowed(held, "ab/")


@pytest.mark.parametrize(
    "guide",
    [
        GbnfFormat('root ::= "a" digit{1,2} | "b"\ndigit ::= [0-9]', "grammar"),
        LarkFormat('start: "a" DIGIT{1,2} | "b"\nDIGIT: /[0-9]/', "guided_grammar"),
    ],
)
def test_a_grammar_in_either_notation(guide: ReplyFormat) -> None:
    held = constraint(guide)
    assert allowed(held, "") == {"a", "b"}
    assert allowed(held, "b") == {"END"}
    assert "END" in allowed(held, "a1")
    assert "END" not in allowed(held, "a")
    assert type(grammar_format(getattr(guide, "lark", "") or guide.gbnf, "x")) is type(guide)


def test_thinking_stands_free_before_the_form() -> None:
    guide = ChoiceFormat(("yes",), "guided_choice")
    reading = ReplySyntax(opening=True, reasoning=THINK, thinking="open")
    held = constraint(guide, reading)
    assert {"y", "<", "{"} <= allowed(held, "")
    assert "END" not in allowed(held, "hm")
    assert allowed(held, "hm</think>\n\n") == {"y", " ", "\t", "\r", "\n"}
    assert allowed(held, "hm</think>yes") == {"END"}
    assert allowed(constraint(guide, ReplySyntax(reasoning=THINK, thinking="may")), "") == {"y", "<"}
    assert allowed(constraint(guide, ReplySyntax(reasoning=THINK, thinking="over")), "") == {"y"}


def special_tokenizer() -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|channel>", "<channel|>"])
    return Tokenizer(backend, bos_id=None, eos_id=EOS)


def test_markers_that_are_special_tokens_are_those_tokens_and_nothing_else() -> None:
    tokenizer = special_tokenizer()
    gemma = ReasoningSyntax("<|channel>thought\n", "<channel|>", "\n<channel|>", anywhere=True)
    held = GrammarCompiler(tokenizer, (EOS,)).constraint(
        ChoiceFormat(("yes",), "x"), ReplySyntax(reasoning=gemma, thinking="may")
    )

    def after(text: str) -> set[int]:
        bits = held.allowed(tokenizer.encode(text, add_special=False), [])
        assert bits is not None
        return set(np.flatnonzero(unpacked(bits, tokenizer.vocab_size)).tolist())

    assert after("") == {257, *tokenizer.encode("y", add_special=False)}
    assert after("<|channel>") == set(tokenizer.encode("t", add_special=False))
    assert 258 in after("<|channel>thought\nhm")
    assert EOS not in after("<|channel>thought\nhm")
    assert EOS in after("<|channel>thought\nhm<channel|>yes")


def test_any_beginning_has_the_same_set_however_it_was_reached() -> None:
    """Rolled back, branched or fresh: the set is a function of the tokens alone."""
    rng = np.random.default_rng(3)
    held = constraint(JsonFormat.of(PERSON, "x"))
    truth = ids('{"name": "Ada \\u00e9", "age": 36, "tags": ["a", "b"]}')
    for _ in range(150):
        output = truth[: int(rng.integers(0, len(truth) + 1))]
        drafts = truth[len(output) : len(output) + int(rng.integers(0, 6))]
        if rng.random() < 0.4:
            drafts = [*drafts, int(rng.integers(0, 256))]
        found, expected = held.allowed(output, drafts), constraint(JsonFormat.of(PERSON, "x")).allowed(output, drafts)
        assert found is not None
        assert expected is not None
        assert found.tolist() == expected.tolist()


def test_nothing_stands_behind_a_draft_that_may_not_stand_there() -> None:
    held = constraint(ChoiceFormat(("yes",), "x"))
    assert allowed(held, "y", "x") == set()
    assert allowed(held, "y", "xes") == set()
    assert allowed(held, "y", "e") == {"s"}


def random_value(schema: Any, rng: np.random.Generator) -> Any:
    """A reply drawn blindly from what is allowed, byte by byte."""
    held, said = constraint(JsonFormat.of(schema, "x")), []
    for _ in range(4000):
        bits = held.allowed(said, [])
        assert bits is not None
        choices = np.flatnonzero(unpacked(bits, TOKENIZER.vocab_size))
        ascii_first = choices[(choices < 94) | (choices == EOS)]  # mostly what JSON is made of
        pick = int(rng.choice(ascii_first if len(ascii_first) and rng.random() < 0.98 else choices))
        if EOS in choices and rng.random() < 0.5:
            pick = EOS
        if pick == EOS:
            return json.loads(TOKENIZER.decode(said))
        said.append(pick)
    return None


def test_even_a_blind_model_writes_valid_json() -> None:
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


def test_numbers_and_white_space_come_to_an_end() -> None:
    held = constraint(JsonFormat.of(PERSON, "x"))
    begun = '{"name": "a", "age": '
    assert "7" in allowed(held, begun + "1" * (LONGEST_NUMBER - 1))
    assert not {"7", "0"} & allowed(held, begun + "1" * LONGEST_NUMBER)
    assert "," in allowed(held, begun + "1" * LONGEST_NUMBER)
    assert " " in allowed(held, "{\n" + " " * 23)
    assert allowed(held, "{\n" + " " * 24) == {'"'}


@pytest.mark.parametrize("vocab", [64, 70, 96, 97])
def test_numbers_come_to_an_end_whatever_the_size_of_the_vocabulary(vocab: int) -> None:
    """A grammar's sets have room for one token more than there are."""

    class Anything:
        def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> TokenMask:
            return np.full(-(-(vocab + 1) // 32), 0xFFFFFFFF, dtype=np.uint32)

    held = BoundedNumbers(Anything(), token_bytes=lambda token: b"%d" % (token % 10), digits=token_mask(range(10), vocab))
    bits = held.allowed([1] * LONGEST_NUMBER, ())
    assert bits is not None
    assert np.flatnonzero(unpacked(bits, vocab)).tolist() == list(range(10, vocab))


def test_a_grammar_that_wants_a_long_number_has_it() -> None:
    held = constraint(JsonFormat.of({"const": 10**60}, "x"))
    assert allowed(held, "1" + "0" * 55) == {"0"}


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
def test_the_keyword_that_cannot_be_held_to_is_named_with_its_path(schema: Any, path: str) -> None:
    with pytest.raises(BadParameter) as refusal:
        constraint(JsonFormat.of(schema, "schema"))
    assert refusal.value.param == "schema" + path


@pytest.mark.parametrize(
    ("guide", "words"),
    [
        (RegexFormat("(?=a)b", "guided_regex"), "look-around"),
        (RegexFormat("[", "guided_regex"), "cannot be compiled"),
        (GbnfFormat("root ::= <[10]>", "grammar"), "cannot be translated"),
        (GbnfFormat("x ::= [0-9]", "grammar"), "cannot be translated"),
        (LarkFormat("start: nothing", "guided_grammar"), "nothing"),
    ],
)
def test_a_guide_that_cannot_be_compiled_is_refused_by_name(guide: ReplyFormat, words: str) -> None:
    with pytest.raises(BadParameter, match=words) as refusal:
        constraint(guide)
    assert refusal.value.param == guide.param


def test_what_is_no_schema_or_no_choice_is_refused() -> None:
    for wrong in ("{", "[]", 5):
        with pytest.raises(BadParameter):
            JsonFormat.of(wrong, "x")
    for texts in ((), ("",)):
        with pytest.raises(BadParameter):
            ChoiceFormat(texts, "x")


def test_a_model_without_an_end_cannot_be_held_to_a_form() -> None:
    with pytest.raises(Unsupported, match="end-of-sequence token"):
        GrammarCompiler(TOKENIZER, ())


def test_several_constraints_allow_what_all_of_them_allow() -> None:
    digits, held = constraint(RegexFormat("[0-9]", "x")), constraint(RegexFormat("[5-9a]", "x"))
    together = combine(digits, None, held)
    assert isinstance(together, AllOf)
    assert allowed(together, "") == {"5", "6", "7", "8", "9"}
    assert combine(None, held) is held
    assert combine(None) is None
    assert intersect(single_token_mask(3), single_token_mask(200)).tolist() == [0]
    assert np.flatnonzero(unpacked(token_mask([1, 40], 64), 64)).tolist() == [1, 40]


def test_an_equal_guide_is_compiled_once() -> None:
    for _ in range(2):
        constraint(JsonFormat.of(ANY_OBJECT, "x"))
    compiled = [guide for guide, _ in GRAMMARS._compiled if guide == JsonFormat.of(ANY_OBJECT, "x")]
    assert len(compiled) == 1


def test_without_the_library_the_refusal_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(Unsupported, match=r"onedraw\[structured\]"):
        GrammarCompiler(TOKENIZER, (EOS,))


def test_a_token_outside_the_vocabulary_ends_nothing() -> None:
    guide = RegexFormat("[a-z]{5}", "x")
    held = GrammarCompiler(TOKENIZER, (EOS, 10**6)).constraint(guide, PLAIN_TEXT)
    assert np.array_equal(held.allowed([], []), GRAMMARS.constraint(guide, PLAIN_TEXT).allowed([], []))
    with pytest.raises(Unsupported, match="end-of-sequence token"):
        GrammarCompiler(TOKENIZER, (10**6,))
