"""GBNF grammars: the texts they match, and errors that name places of the caller's text."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from onedraw.errors import BadParameter
from onedraw.sampling.adjustments import mask_to_bools
from onedraw.text.constraints.gbnf import MAX_GROUPS, translate
from onedraw.text.constraints.grammar import GrammarCompiler
from onedraw.text.constraints.response_format import GbnfFormat
from onedraw.text.fake_tokenizer import fake_tokenizer
from onedraw.text.reply_parser import PLAIN_TEXT

TOKENIZER = fake_tokenizer()
EOS = 256
COMPILER = GrammarCompiler(TOKENIZER, (EOS,))


def matches(grammar: str, text: str) -> bool:
    """Whether the constraint allows every token of a text, and then its end."""
    constraint, ids = COMPILER.constraint(GbnfFormat(grammar, "x"), PLAIN_TEXT), TOKENIZER.encode_plain(text)
    for length, token in enumerate([*ids, EOS]):
        bits = constraint.allowed(ids[:length], ())
        assert bits is not None
        if not mask_to_bools(np.asarray(bits), TOKENIZER.vocab_size)[token]:
            return False
    return True


def texts(longest: int = 5) -> list[str]:
    return ["".join(letters) for length in range(longest + 1) for letters in itertools.product("ab", repeat=length)]


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ('root ::= ("a"*)?', "a*"),
        ('root ::= ("ab"+)*', "(ab)*"),
        ('root ::= ("a"{2}){2}', "a{4}"),
        ('root ::= "a"{2}{2}', "a{4}"),
        ('root ::= ("a"?)+ "b"', "a*b"),
        ('root ::= (("a" | "b"+)*)? "a"', "[ab]*a"),
        ('root ::= ("a" "b")* ("b")', "(ab)*b"),
        ('root ::= "a" *\nw ::= "b"', "a*"),
        ('root ::= w w\nw ::= ("b"{0,1})', "b?b?"),
        ('root ::= "a" ("b" | )', "ab?"),
        ('root ::=\n  "a" | # first\n  "b" (\n "a"\n | "b" )', "a|b[ab]"),
        ('root ::= Word-One\nWord-One ::= "a" start\nstart ::= "b" | Word-One', "a+b"),
        ("root ::= [^a] .", "b[ab]"),
        ("root ::= [a-a]{1,3}", "a{1,3}"),
    ],
)
def test_a_grammar_matches_the_texts_that_it_describes(grammar: str, pattern: str) -> None:
    for text in texts():
        assert matches(grammar, text) == bool(re.fullmatch(pattern, text)), text


EXPRESSIONS = st.recursive(
    st.sampled_from(['"a"', '"b"', "[ab]", '"a"{2}', '"b"?']),
    lambda inner: st.one_of(
        st.builds(lambda part, sign: f"({part}){sign}", inner, st.sampled_from(["", "*", "+", "?", "{2}", "{0,2}"])),
        st.lists(inner, min_size=1, max_size=3).map(" ".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({' | '.join(parts)})"),
    ),
    max_leaves=6,
)


@hypothesis_settings(max_examples=60)
@given(EXPRESSIONS)
def test_a_random_expression_matches_the_texts_of_its_regular_expression(expression: str) -> None:
    pattern = expression.replace('"', "").replace(" ", "")
    for text in texts(4):
        assert matches(f"root ::= {expression}", text) == bool(re.fullmatch(pattern, text)), text


@pytest.mark.parametrize(
    ("literal", "text"),
    [
        (r'"\u00e9"', "é"),
        (r'"\xe9"', "é"),
        (r'"\U0001F642"', "🙂"),
        (r'"é\n\t\r\\\"\[\]"', 'é\n\t\r\\"[]'),
        (r'"\x00\x1f/"', "\x00\x1f/"),
        (r"[\u00e0-\u00ff]", "é"),
        (r"[\]\\/^-]", "/"),
        (r"[\]\\/^-]", "-"),
        (r"[^\x00-\x1f]", "\\"),
        (".", "\n"),
    ],
)
def test_escapes_stand_for_their_character(literal: str, text: str) -> None:
    assert matches(f"root ::= {literal}", text)
    assert not matches(f"root ::= {literal}", "q" + text)


@pytest.mark.parametrize(
    ("grammar", "place"),
    [
        ('root ::= "a"\nx ::= ["a', "line 2, column 10"),
        ('# one\n\nroot ::= "a\\q"', "line 3, column 12"),
        ("root ::= a\n\nb ::= c\na ::= [0-9]", "line 3, column 7: the rule 'c'"),
        ('root ::= "a" )', "line 1, column 14"),
        ('root ::= ("a"', "line 1, column 14"),
        ('root = "a"', "line 1, column 6"),
        ("root ::= [z-a]", "line 1, column 11"),
        ("root ::= []", "line 1, column 10"),
        (r'root ::= "\ud800"', "line 1, column 11"),
        ('root ::= "a"{x}', "line 1, column 13"),
        ('root ::= "a"{1,9999999}', "line 1"),
        ('root ::= "a"****', "line 1, column 17"),
        ("root ::= <[7]>", "line 1, column 10"),
        ("root ::= " + "(" * (MAX_GROUPS + 1) + '"a"' + ")" * (MAX_GROUPS + 1), "line 1"),
        ('x ::= "a"', "no rule named root"),
        ('root ::= "b" x\n\n# a comment\nx ::=\n "a"{3,2} root', "line 4: range end"),
        ('root ::= x "b"\n\n\nx ::= "a"{3,2}', "line 4: range end"),
    ],
)
def test_an_error_names_the_place_in_the_callers_text(grammar: str, place: str) -> None:
    with pytest.raises(BadParameter, match=re.escape(place)) as error:
        COMPILER.constraint(GbnfFormat(grammar, "grammar"), PLAIN_TEXT)
    assert error.value.param == "grammar"


def test_a_chain_is_translated_in_work_that_grows_with_its_length() -> None:
    """Each rule is written once: the translation of a chain twice as long is about twice as long, and no rule is met twice."""

    def chain(length: int) -> str:
        rules = "\n".join(f'a{i} ::= a{i - 1} | "{i}"' for i in range(length, 0, -1))
        return f'root ::= a{length}\n{rules}\na0 ::= "x"'

    for length in (100, 400):
        translated = translate(chain(length), "x")
        assert len(translated.lark.split("\n")) == length + 2
        assert len(translated.lark) <= len(chain(length))


def test_rules_whose_names_differ_in_what_lark_cannot_write_stay_different() -> None:
    names = ["a-b", "a_b", "A-b", "é", "ü", "1", "start"]
    rules = "\n".join(f'{name} ::= "{number}"' for number, name in enumerate(names))
    grammar = f"root ::= {' '.join(names)}\n{rules}"
    assert matches(grammar, "".join(map(str, range(len(names)))))
