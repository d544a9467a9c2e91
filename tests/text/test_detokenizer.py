"""The detokenized stream equals the decoding of all ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onedraw.text.detokenizer import Detokenizer
from onedraw.text.tokenizer import Tokenizer

FIXTURE = Path(__file__).parents[1] / "fixtures" / "tiny_tokenizer"
BYTE_LEVEL = Tokenizer.from_folder(FIXTURE)
SENTENCEPIECE = Tokenizer.from_gguf(
    {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [
            "<unk>",
            "<s>",
            "</s>",
            *(f"<0x{byte:02X}>" for byte in range(256)),
            "▁",
            "▁a",
            "b",
            "▁▁",
            "日",
        ],
        "tokenizer.ggml.scores": [0.0] * 264,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 5],
    }
)
# Tokens of single bytes make incomplete characters likely.
BYTE_IDS = [i for i in range(BYTE_LEVEL.vocab_size) if len(BYTE_LEVEL.token_bytes(i)) == 1]


def stream(tokenizer: Tokenizer, ids: list[int], **options: Any) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 5) | st.sampled_from(BYTE_IDS), max_size=40), st.booleans())
@settings(deadline=None, max_examples=500)
def test_the_stream_of_any_ids_equals_their_decoding(ids: list[int], skip: bool) -> None:
    assert "".join(stream(BYTE_LEVEL, ids, skip_special=skip)) == BYTE_LEVEL.decode(ids, skip_special=skip)


@given(st.lists(st.integers(0, 263) | st.integers(259, 263), max_size=40), st.booleans())
@settings(deadline=None, max_examples=500)
def test_the_sentencepiece_stream_of_any_ids_equals_their_decoding(ids: list[int], skip: bool) -> None:
    assert "".join(stream(SENTENCEPIECE, ids, skip_special=skip)) == SENTENCEPIECE.decode(ids, skip_special=skip)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
@settings(deadline=None)
def test_no_character_is_split(text: str) -> None:
    ids = BYTE_LEVEL.encode(text)
    pieces = stream(BYTE_LEVEL, ids, skip_special=False)
    assert "".join(pieces) == text
    for piece in pieces:
        assert "\ufffd" not in piece or "\ufffd" in text


def test_a_character_is_held_back_until_its_last_byte() -> None:
    by_byte = {BYTE_LEVEL.token_bytes(i): i for i in BYTE_IDS}
    ids = [by_byte[bytes([byte])] for byte in "a🙂b".encode()]
    assert stream(BYTE_LEVEL, ids) == ["a", "", "", "", "🙂", "b", ""]


def test_invalid_bytes_are_replaced_as_in_python() -> None:
    by_byte = {BYTE_LEVEL.token_bytes(i): i for i in BYTE_IDS}
    for broken in (b"\xf0\x9f\x99", b"\xf0\x9fa", b"\xff\xfe", b"\xed\xa0\x80", b"\xe2\x82\xe2\x82\xac", b"\xc0\xaf"):
        ids = [by_byte[bytes([byte])] for byte in broken]
        assert "".join(stream(BYTE_LEVEL, ids)) == broken.decode("utf-8", "replace")


def test_special_tokens_are_skipped_or_kept() -> None:
    assert "".join(stream(BYTE_LEVEL, [1, 2])) == ""
    assert "".join(stream(BYTE_LEVEL, [1, 2], skip_special=False)) == "<|im_start|><|im_end|>"


@pytest.mark.parametrize(("opening", "text"), [(True, "a b"), (False, " a b")])
def test_only_the_beginning_of_a_text_loses_its_space(opening: bool, text: str) -> None:
    ids = [1, 260, 259, 261]  # <s> ▁a ▁ b
    assert "".join(stream(SENTENCEPIECE, ids, opening=opening)) == text


@pytest.mark.weights
def test_smollm2_streams_of_any_ids_equal_their_decoding(smollm2_path: Path) -> None:
    from onedraw.checkpoints.gguf import GgufCheckpoint

    tokenizer = Tokenizer.from_gguf(GgufCheckpoint(smollm2_path).metadata)

    @given(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    @settings(deadline=None)
    def check(ids: list[int]) -> None:
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)

    check()
