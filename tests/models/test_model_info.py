from __future__ import annotations

import pytest

from onedraw.errors import CorruptFile
from onedraw.models.registry import eos_ids, generation_defaults
from tests.support.memory_source import MemorySource

QWEN = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05, "max_length": 9}


def test_sampling_defaults_apply_with_do_sample() -> None:
    found = generation_defaults(MemorySource(generation_config=QWEN))
    assert found == {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}


@pytest.mark.parametrize("sample", [False, None])
def test_without_do_sample_only_the_penalty_applies(sample: bool | None) -> None:
    assert generation_defaults(MemorySource(generation_config={**QWEN, "do_sample": sample})) == {"repetition_penalty": 1.05}
    assert generation_defaults(MemorySource()) == {}


def test_a_gguf_file_may_have_sampling_defaults() -> None:
    metadata = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.1}
    expected = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    assert generation_defaults(MemorySource(metadata, "gguf")) == expected


@pytest.mark.parametrize("value", ["0.7", True, float("nan"), [1]])
def test_a_default_that_is_not_a_number_is_corrupt(value: object) -> None:
    with pytest.raises(CorruptFile, match="the default temperature must be a number"):
        generation_defaults(MemorySource(generation_config={"do_sample": True, "temperature": value}))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("temperature", -1, r"the default temperature: must be in \[0, 100\], not -1"),
        ("top_p", 0, "the default top_p"),
        ("top_k", 50.9, "the default top_k must be a whole number, not 50.9"),
    ],
)
def test_a_default_outside_the_range_of_requests_is_corrupt(name: str, value: object, words: str) -> None:
    with pytest.raises(CorruptFile, match=words):
        generation_defaults(MemorySource(generation_config={"do_sample": True, name: value}))


def test_a_top_k_may_be_written_as_off_or_as_a_float() -> None:
    assert generation_defaults(MemorySource(generation_config={"do_sample": True, "top_k": -1})) == {"top_k": 0}
    assert generation_defaults(MemorySource(generation_config={"do_sample": True, "top_k": 50.0})) == {"top_k": 50}


def test_eos_comes_from_the_generation_config_then_the_config() -> None:
    assert eos_ids(MemorySource({"eos_token_id": 5}, generation_config={"eos_token_id": [7, 5, 7]})) == [7, 5]
    assert eos_ids(MemorySource({"eos_token_id": 5})) == [5]
    assert eos_ids(MemorySource()) == []
    with pytest.raises(CorruptFile, match="eos_token_id"):
        eos_ids(MemorySource({"eos_token_id": "</s>"}))


def test_eos_of_a_gguf_includes_the_end_of_turn_token() -> None:
    metadata = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 2}
    assert eos_ids(MemorySource(metadata, "gguf")) == [2, 9]


def test_eos_of_a_multimodal_model_may_be_in_text_config() -> None:
    assert eos_ids(MemorySource({"text_config": {"eos_token_id": [4, 5]}})) == [4, 5]
    assert eos_ids(MemorySource({"eos_token_id": 3, "text_config": {"eos_token_id": 4}})) == [3]


def test_gemma4_end_of_turn_tokens_are_eos_even_if_the_gguf_does_not_name_them() -> None:
    metadata = {"general.architecture": "gemma4", "tokenizer.ggml.eos_token_id": 1}
    metadata["tokenizer.ggml.tokens"] = ["<pad>", "<eos>", "a", "<turn|>", "<|tool_response>"]
    assert eos_ids(MemorySource(metadata, "gguf")) == [1, 3, 4]
    assert eos_ids(MemorySource({**metadata, "tokenizer.ggml.tokens": ["a", "<turn|>"]}, "gguf")) == [1]
    assert eos_ids(MemorySource({**metadata, "general.architecture": "llama"}, "gguf")) == [1]
