"""Tokenizers built from GGUF metadata, against the original, transformers' classes and a slow SentencePiece."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onedraw.errors import CorruptFile, ModelNotFound, UnsupportedModel
from onedraw.text.chat_template import ChatTemplate
from onedraw.text.gguf_tokenizer import PRE_TOKENIZERS
from onedraw.text.tokenizer import Tokenizer

# ---------------------------------------------------------------------- byte-level


def test_the_built_tokenizer_equals_the_original(
    tiny_metadata: dict[str, Any], tiny_tokenizer_path: Path, strings: list[str]
) -> None:
    built, original = Tokenizer.from_gguf(tiny_metadata), Tokenizer.from_folder(tiny_tokenizer_path)
    assert (built.bos_id, built.eos_id, built.vocab_size) == (original.bos_id, original.eos_id, original.vocab_size)
    for text in strings:
        assert built.encode(text) == original.encode(text), text


def test_without_a_named_pre_tokenizer_that_of_gpt2_is_used(tiny_metadata: dict[str, Any], strings: list[str]) -> None:
    unnamed = {key: value for key, value in tiny_metadata.items() if key != "tokenizer.ggml.pre"}
    first, second = Tokenizer.from_gguf(unnamed), Tokenizer.from_gguf(tiny_metadata)
    assert all(first.encode(text) == second.encode(text) for text in strings)


@pytest.mark.parametrize(
    ("pre", "class_name"),
    [
        ("qwen2", "Qwen2Tokenizer"),
        ("deepseek-r1-qwen", "Qwen2Tokenizer"),
        ("qwen35", "Qwen3_5Tokenizer"),
        ("gpt-2", "GPT2Tokenizer"),
    ],
)
def test_a_pre_tokenizer_equals_transformers_class_of_its_family(
    tiny_metadata: dict[str, Any], strings: list[str], pre: str, class_name: str
) -> None:
    import transformers

    tokenizer = Tokenizer.from_gguf({**tiny_metadata, "tokenizer.ggml.pre": pre})
    tokens = tiny_metadata["tokenizer.ggml.tokens"]
    expected = getattr(transformers, class_name)(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in tiny_metadata["tokenizer.ggml.merges"]],
        additional_special_tokens=tokens[:8],
    )
    for text in strings:
        assert tokenizer.encode(text) == expected.encode(text), text


def test_the_pre_tokenizers_differ_from_each_other(tiny_metadata: dict[str, Any], strings: list[str]) -> None:
    """A combining mark that merges with its letter separates qwen2 from qwen35; the fixture's merges separate the others."""
    tokens, merges = list(tiny_metadata["tokenizer.ggml.tokens"]), list(tiny_metadata["tokenizer.ggml.merges"])
    for left, right in (("Ì", "Ħ"), ("x", "ÌĦ")):  # U+0304 in two bytes, and x with it, which NFC does not compose
        tokens.append(left + right)
        merges.append(f"{left} {right}")
    metadata = {
        **tiny_metadata,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [*tiny_metadata["tokenizer.ggml.token_type"], 1, 1],
    }
    seen = set()
    for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2", "qwen35"):
        tokenizer = Tokenizer.from_gguf({**metadata, "tokenizer.ggml.pre": pre})
        seen.add(tuple(tuple(tokenizer.encode(text, add_special=False)) for text in [*strings, "x\u0304"]))
    assert len(seen) == 5


def test_smollm_splits_digits_first(tiny_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf({**tiny_metadata, "tokenizer.ggml.pre": "smollm"})
    digits = [tokenizer.encode(digit)[0] for digit in "123"]
    assert tokenizer.encode("123") == digits
    assert tokenizer.encode("  1") == [*tokenizer.encode("  "), digits[0]]


def test_llama3_groups_digits_by_three_matches_whole_words_and_adds_bos(tiny_metadata: dict[str, Any]) -> None:
    tokens = [*tiny_metadata["tokenizer.ggml.tokens"], "qzxqzx", "123", "1234"]
    metadata = {
        **tiny_metadata,
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*tiny_metadata["tokenizer.ggml.token_type"], 1, 1, 1],
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    word, three, _ = range(len(tokens) - 3, len(tokens))
    assert tokenizer.encode("qzxqzx") == [0, word]  # no merge produces it
    assert tokenizer.encode("123123", add_special=False) == [three, three]
    assert tokenizer.encode("1234", add_special=False)[0] == three
    without = Tokenizer.from_gguf({**metadata, "tokenizer.ggml.add_bos_token": False})
    assert without.encode("qzxqzx") == [word]
    plain = Tokenizer.from_gguf({**metadata, "tokenizer.ggml.pre": "qwen2"})
    assert len(plain.encode("qzxqzx")) > 1


def test_token_types_decide_which_tokens_are_special(tiny_metadata: dict[str, Any]) -> None:
    tokens = [*tiny_metadata["tokenizer.ggml.tokens"], "<tool>", "<|ctrl|>", "[PAD1026]", "[PAD9]"]
    types = [*tiny_metadata["tokenizer.ggml.token_type"], 4, 3, 4, 4]
    tokenizer = Tokenizer.from_gguf({**tiny_metadata, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types})
    assert tokenizer.encode("a<tool>")[-1] == 1024
    assert not tokenizer.is_special(1024)
    assert tokenizer.encode("<|ctrl|>") == [1025]
    assert tokenizer.is_special(1025)
    assert tokenizer.decode([1024, 1025]) == "<tool>"
    assert 1026 not in tokenizer.encode("[PAD1026]"), "a padding row is never encoded"
    assert tokenizer.encode("[PAD9]") == [1027], "a token that only looks like padding is encoded"


def test_bos_and_eos_are_special_whatever_their_type(tiny_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf({**tiny_metadata, "tokenizer.ggml.token_type": [1] * 1024})
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.is_special(2)
    assert not tokenizer.is_special(1)


def test_merges_may_begin_with_a_space() -> None:
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": ["<unk>", " ", "a", " a", "\n", "\n\n"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["  a", "\n \n"],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 0,
    }
    assert Tokenizer.from_gguf(metadata).encode("\n\n", add_special=False) == [5]


# ---------------------------------------------------------------------- errors


def test_the_error_for_an_unknown_pre_tokenizer_lists_the_supported_ones(tiny_metadata: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=r"'laguna'.*supported: .*qwen2.*smollm"):
        Tokenizer.from_gguf({**tiny_metadata, "tokenizer.ggml.pre": "laguna"})
    assert "laguna" not in PRE_TOKENIZERS


def test_the_error_for_an_unknown_kind_lists_the_supported_ones(tiny_metadata: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=r"'bert'.*gpt2, llama, gemma4"):
        Tokenizer.from_gguf({**tiny_metadata, "tokenizer.ggml.model": "bert"})


def test_a_file_without_a_vocabulary_is_refused() -> None:
    with pytest.raises(ModelNotFound, match=r"tokenizer\.ggml\.tokens"):
        Tokenizer.from_gguf({})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("merges", None, "no tokenizer.ggml.merges"),
        ("merges", ["ab"], "'ab' is not two tokens"),
        ("merges", ["no-such parts-here"], "do not match"),
        ("token_type", [1, 1], "2 entries for 1024"),
    ],
)
def test_a_damaged_vocabulary_is_refused(tiny_metadata: dict[str, Any], key: str, value: Any, words: str) -> None:
    with pytest.raises(CorruptFile, match=words):
        Tokenizer.from_gguf({**tiny_metadata, f"tokenizer.ggml.{key}": value})


# ---------------------------------------------------------------------- SentencePiece

WORDS = [
    "▁",
    "a",
    "b",
    "c",
    "é",
    "▁a",
    "ab",
    "bc",
    "abc",
    "▁ab",
    "▁▁",
    "aa",
    "aab",
    "▁abc",
    "ca",
    "cab",
    "▁b",
    "<",
    "s",
    ">",
    "<s",
]
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
# Distinct scores in an order that is not the order of ids.
SCORES = [0.0] * 259 + [-float((i * 8) % len(WORDS)) for i in range(len(WORDS))]
SPM: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": PIECES,
    "tokenizer.ggml.scores": SCORES,
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(WORDS)],
}
SPM_TOKENIZER = Tokenizer.from_gguf(SPM)


def slow_sentencepiece(text: str) -> list[int]:
    """Merge the adjacent pair of the best score, the leftmost of equals, until none can be merged; other characters become
    bytes."""
    ids = {piece: i for i, piece in enumerate(PIECES) if i >= 259}
    symbols = list(("▁" + text.replace(" ", "▁")) if text else "")
    while True:
        pairs = [(SCORES[ids[joined]], -i) for i in range(len(symbols) - 1) if (joined := symbols[i] + symbols[i + 1]) in ids]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [i for symbol in symbols for i in ([ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()])]


@given(st.text("aaabbc é ▁<s>/日\n", max_size=25).filter(lambda text: not any(special in text for special in ("<s>", "</s>"))))
@settings(deadline=None, max_examples=500)
def test_scores_give_the_merges_of_sentencepiece(text: str) -> None:
    assert SPM_TOKENIZER.encode(text, add_special=False) == slow_sentencepiece(text)


@given(st.text("ab c é日\n🙂", max_size=25))
@settings(deadline=None)
def test_a_sentencepiece_text_is_restored_from_its_ids(text: str) -> None:
    assert SPM_TOKENIZER.decode(SPM_TOKENIZER.encode(text)) == text


def test_sentencepiece_adds_bos_and_a_space_after_every_special_token() -> None:
    a = PIECES.index("▁a")
    assert SPM_TOKENIZER.encode("a") == [1, a]
    assert SPM_TOKENIZER.encode("a</s>a", add_special=False) == [a, 2, a]
    assert SPM_TOKENIZER.encode("") == [1]
    bare = Tokenizer.from_gguf({**SPM, "tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False})
    assert bare.encode("a") == [PIECES.index("a")]
    assert bare.decode(bare.encode(" a")) == " a"


def test_text_that_looks_like_a_byte_token_stays_text() -> None:
    ids = SPM_TOKENIZER.encode("<0x61>", add_special=False)
    assert PIECES.index("<0x61>") not in ids
    assert SPM_TOKENIZER.decode(ids) == "<0x61>"
    assert SPM_TOKENIZER.token_bytes(PIECES.index("<0x61>")) == b"a"


def test_a_wrong_number_of_scores_is_refused() -> None:
    with pytest.raises(CorruptFile, match="scores"):
        Tokenizer.from_gguf({**SPM, "tokenizer.ggml.scores": SCORES[:-1]})


def test_gemma4_merges_text_keeps_spaces_and_falls_back_to_bytes() -> None:
    metadata = {
        **SPM,
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.merges": ["▁ a", "▁ ▁"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("a a") == [1, PIECES.index("a"), PIECES.index("▁a")], "bos is added although the file says otherwise"
    assert tokenizer.encode("日", add_special=False) == [3 + byte for byte in "日".encode()]
    assert tokenizer.decode(tokenizer.encode(" a  日")) == " a  日"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.ggml.tokens", 7),
        ("tokenizer.ggml.tokens", "abc"),
        ("tokenizer.ggml.token_type", 1.5),
        ("tokenizer.ggml.merges", 3),
        ("tokenizer.ggml.bos_token_id", 1.5),
        ("tokenizer.ggml.eos_token_id", [1]),
        ("tokenizer.ggml.pre", 4),
        ("tokenizer.chat_template", ["a"]),
    ],
)
def test_the_error_for_a_value_of_the_wrong_type_names_its_key(key: str, value: object) -> None:
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.merges": [], key: value}
    for read in (Tokenizer.from_gguf, ChatTemplate.from_gguf):
        with pytest.raises(CorruptFile, match=key):
            read(metadata)


@pytest.mark.parametrize("name", ["tokens", "merges"])
def test_lists_of_other_values_than_strings_are_refused(tiny_metadata: dict[str, Any], name: str) -> None:
    key = f"tokenizer.ggml.{name}"
    with pytest.raises(CorruptFile, match=rf"{key} is not a list of strings"):
        Tokenizer.from_gguf({**tiny_metadata, key: [1] * len(tiny_metadata[key])})
