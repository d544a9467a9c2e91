"""The least number of tokens of a text: it never exceeds the number of its tokens, and refuses what is far too long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from onedraw.text import least_tokens
from onedraw.text.fake_tokenizer import fake_tokenizer
from onedraw.text.tokenizer import Tokenizer

EVERY = 1 << 30
CORPUS = [
    "to be or not to be, that is the question   ",
    "aaaaaaaa bbbb",
    "e\u0301migre\u0301 \u00e9migr\u00e9 \ud55c\uad6d\uc5b4",
    "\n\n\n    x = [1, 22, 333]",
]
MARKED = [AddedToken("<mask>", lstrip=True), AddedToken("<end>", rstrip=True, normalized=True)]
PLAIN = [AddedToken("<|im_start|>"), AddedToken("\uff5cbegin\u2581of\uff5c")]
NORMALIZERS: dict[str, Any] = {
    "none": lambda: None,
    "nfc": normalizers.NFC,
    "nfkc": normalizers.NFKC,
    "lower": lambda: normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]),
    "strip": lambda: normalizers.Sequence([normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]),
}
WORDS = [
    *(
        "a",
        " ",
        "    ",
        "\n",
        "to be",
        "question",
        "e\u0301",
        "\u00e9",
        "\u0301",
        "\u1112\u1161\u11ab",
        "\ud55c",
        "\uad6d",
        "\ufb01",
    ),
    *(
        "\u2581",
        "\u00a0",
        "\u3000",
        "<mask>",
        "<end>",
        "<|im_start|>",
        "\uff5cbegin\u2581of\uff5c",
        "1",
        "\U0001f642",
        "\u2500" * 9,
        "\x00",
    ),
]
TEXTS = st.lists(st.sampled_from(WORDS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=30).map("".join)


def byte_level(normalizer: Any, added: list[AddedToken]) -> Backend:
    backend = Backend(models.BPE())
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS * 9, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    backend.add_tokens(added)
    return backend


def spaced(normalizer: Any, added: list[AddedToken], *, fallback: bool, kind: str) -> Backend:
    """SentencePiece, with bytes for what has no token, or without: then a run of unknown characters is one token."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if fallback else []
    model: Any = models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=fallback)
    trainer: Any = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", *bytes_], show_progress=False)
    if kind == "unigram":
        model = models.Unigram()
        trainer = trainers.UnigramTrainer(vocab_size=500, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    backend = Backend(model)
    steps = [step for step in (normalizer, normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")) if step is not None]
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.train_from_iterator(CORPUS * 9, trainer)
    backend.add_tokens(added)
    return backend


def wrapped(backend: Backend) -> Tokenizer:
    return Tokenizer(backend, bos_id=None, eos_id=None)


KINDS: dict[str, Any] = {
    "bytes": byte_level,
    "spaced": lambda n, a: spaced(n, a, fallback=True, kind="bpe"),
    "spaced, unknown": lambda n, a: spaced(n, a, fallback=False, kind="bpe"),
    "unigram": lambda n, a: spaced(n, a, fallback=False, kind="unigram"),
}


@pytest.mark.parametrize("added", [[], PLAIN, MARKED], ids=["no added", "added", "added with white space"])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_text_has_fewer_tokens(kind: str, normalizer: str, added: list[AddedToken], monkeypatch: pytest.MonkeyPatch) -> None:
    """So a text that fits is never refused, whatever its normalization and its special tokens do to it."""
    tokenizer = wrapped(KINDS[kind](NORMALIZERS[normalizer](), added))
    monkeypatch.setattr(least_tokens, "BLOCK", 999)

    @given(TEXTS)
    @settings(max_examples=12, deadline=None)
    def check(text: str) -> None:
        text = text * 99
        assert tokenizer.least_tokens(text, enough=EVERY) <= len(tokenizer.encode(text, add_special=False)), text

    check()


def test_no_text_has_fewer_tokens_with_the_tokenizers_we_ship(tiny_tokenizer_path: Path, strings: list[str]) -> None:
    for tokenizer in (Tokenizer.from_folder(tiny_tokenizer_path), fake_tokenizer()):
        for text in (*strings, "".join(strings)):
            assert tokenizer.least_tokens(text, enough=EVERY) <= len(tokenizer.encode(text, add_special=False))


@pytest.mark.parametrize("normalizer", ["none", "nfc"])
@pytest.mark.parametrize("kind", ["bytes", "spaced"])
@pytest.mark.parametrize("text", ["a", "to be ", "\u00e9", "\U0001f642", " "])
def test_a_long_text_has_many_tokens(kind: str, normalizer: str, text: str) -> None:
    """Or the number would refuse nothing."""
    tokenizer = wrapped(KINDS[kind](NORMALIZERS[normalizer](), PLAIN))
    longest = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
    text *= 1_000_000 // len(text)
    assert tokenizer.least_tokens(text, enough=EVERY) > len(text) // longest // 2


def test_of_single_bytes_it_is_the_number_of_tokens() -> None:
    tokenizer = fake_tokenizer()
    assert tokenizer.least_tokens("z" * 5000, enough=EVERY) in (4999, 5000)
    assert 100 <= tokenizer.least_tokens("z" * 10_000_000, enough=100) <= 2 * least_tokens.BLOCK


@pytest.mark.parametrize("token", ["\u0301x", "x\u0301", "\u1161"])
def test_a_token_that_joins_with_its_neighbours_makes_it_nothing(token: str) -> None:
    tokenizer = wrapped(byte_level(normalizers.NFC(), [AddedToken(token)]))
    assert tokenizer.least_tokens("a" * 10_000, enough=EVERY) == 0


def test_a_tokenizer_that_drops_text_makes_it_nothing() -> None:
    backend = byte_level(None, [])
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), backend.pre_tokenizer])
    assert wrapped(backend).least_tokens("a " * 10_000, enough=EVERY) == 0
