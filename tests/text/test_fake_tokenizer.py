"""Tokenizers of models without a checkpoint."""

from __future__ import annotations

import pytest

from onedraw.text.constraints.grammar import GrammarCompiler
from onedraw.text.constraints.response_format import RegexFormat
from onedraw.text.fake_tokenizer import END, fake_tokenizer, synthetic_tokenizer
from onedraw.text.reply_parser import PLAIN_TEXT


@pytest.mark.parametrize("size", [260, 5000, 128_256])
def test_a_synthetic_tokenizer_has_the_size_that_is_asked_for_and_gives_every_text_back(size: int) -> None:
    tokenizer = synthetic_tokenizer(size)
    text = 'Return the tokens of the request, {"name": "été", "steps": 200}\n\tdef generate():'  # mostly words of the package
    ids = tokenizer.encode(text, add_special=False)
    assert tokenizer.vocab_size == size
    assert tokenizer.decode(ids) == text
    assert len({tokenizer.token_bytes(token) for token in range(size)}) == size
    assert tokenizer.eos_id == fake_tokenizer().eos_id == tokenizer.encode(END, add_special=False)[0]
    if size == 128_256:
        assert len(ids) < len(text.encode()) / 2


def test_a_synthetic_tokenizer_is_the_same_every_time() -> None:
    text = "the keeper of the lighthouse"
    first, second = (synthetic_tokenizer(3000).encode(text) for _ in range(2))
    assert first == second


def test_a_grammar_allows_tokens_of_several_characters() -> None:
    tokenizer = synthetic_tokenizer(5000)
    constraint = GrammarCompiler(tokenizer, (256,)).constraint(RegexFormat("(return|retry)+", "x"), PLAIN_TEXT)
    mask = constraint.allowed((), ())
    assert mask is not None
    allowed = [token for token in range(5000) if mask[token // 32] >> (token % 32) & 1]
    assert {tokenizer.token_bytes(token) for token in allowed} >= {b"ret", b"return"}
