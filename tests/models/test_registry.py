from __future__ import annotations

from typing import Any

import pytest

from onedraw.errors import CorruptFile, UnsupportedModel
from onedraw.models.registry import FAMILIES, find_family
from tests.support.memory_source import MemorySource


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_found_by_each_of_its_names(family: Any) -> None:
    for name in family.architectures:
        assert find_family(MemorySource({"architectures": [name], "model_type": family.model_types[0]})) is family
        assert find_family(MemorySource({"architectures": [name]})) is family
    assert find_family(MemorySource({"model_type": family.model_types[0]})) is family
    for name in family.gguf:
        assert find_family(MemorySource({"general.architecture": name}, "gguf")) is family


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"},
        {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"},
        {"architectures": ["LlamaForCausalLM"], "model_type": "gpt2"},
        {"model_type": "gpt2"},
    ],
)
def test_the_error_about_an_architecture_lists_the_supported_ones(config: dict[str, Any]) -> None:
    named = (config.get("architectures") or ["gpt2"])[0]
    with pytest.raises(UnsupportedModel, match=rf"{named}.* supported: LlamaForCausalLM, .*Qwen3ForCausalLM"):
        find_family(MemorySource(config))


def test_the_error_about_a_gguf_architecture_lists_the_supported_ones() -> None:
    with pytest.raises(UnsupportedModel, match=r"the architecture mamba .*supported: llama, qwen2, qwen3"):
        find_family(MemorySource({"general.architecture": "mamba"}, "gguf"))


def test_a_config_without_an_architecture_is_corrupt() -> None:
    with pytest.raises(CorruptFile, match="neither architectures nor a model_type"):
        find_family(MemorySource({}))
    with pytest.raises(CorruptFile, match=r"general\.architecture is missing"):
        find_family(MemorySource({}, "gguf"))
