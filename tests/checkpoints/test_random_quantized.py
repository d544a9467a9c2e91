"""Random quantized models: the types of a quantization mixture, and tensors that are read like those of a GGUF file."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from onedraw.backends.packing import plan_weight_storage
from onedraw.checkpoints.random_weights import MIXTURES, RandomQuantTensor, mixture_kind, named_mixture, open_random, shape_config
from onedraw.errors import ModelNotFound
from onedraw.models.registry import read_model_info


def test_rows_have_the_same_values_however_they_are_read() -> None:
    tensor = RandomQuantTensor("w", (40, 512), "Q4_K", 0, 0.05)
    whole = tensor.float32()
    assert whole.shape == (40, 512)
    assert 0.02 < float(whole.std()) < 0.1
    raw = tensor.packed()
    assert raw.shape == (40, 2 * 144)
    assert not raw.flags.owndata
    assert np.array_equal(raw[1, :144], raw[0, 144:])  # each row starts one block after the previous row
    order = np.array([7, 0, 39])
    assert np.array_equal(tensor.take_rows(order).float32(), whole[order])
    assert np.array_equal(tensor.reshaped((8, 5, 512)).float32(), whole.reshape(8, 5, 512))
    assert not np.array_equal(RandomQuantTensor("other", (40, 512), "Q4_K", 0, 0.05).packed(), raw)


def test_a_mixture_gives_more_bits_to_sensitive_weights() -> None:
    def kind(layer: int | None, weight: str, shape: tuple[int, ...] = (512, 5120), tied: bool = False) -> str:
        return mixture_kind("q4_k_m", layer, weight, shape, layers=64, tied=tied)

    assert [kind(layer, "v") for layer in (0, 8, 9, 10, 60)] == ["Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K"]
    assert kind(9, "q") == "Q4_K"
    assert kind(9, "delta_qkv") == "Q5_K"
    assert kind(None, "head") == kind(None, "embed", tied=True) == "Q6_K"
    assert kind(None, "embed") == "Q4_K"
    assert kind(0, "down", (512, 2080)) == "Q8_0"  # not a multiple of 256
    assert kind(0, "attn_norm", (5120,)) == kind(0, "router") == kind(0, "q", (64, 40)) == "F32"
    assert mixture_kind("q5_0", 0, "q", (64, 64), layers=4, tied=True) == "Q5_0"


def test_the_mixture_is_the_suffix_of_the_name() -> None:
    assert named_mixture("random:qwen3.6-27b-q4_k_m") == ("qwen3.6-27b", "q4_k_m")
    assert named_mixture("random:llama3-8b-q4_k") == ("llama3-8b", "q4_k")
    assert named_mixture("random:llama3-8b") == ("llama3-8b", "")
    assert shape_config("random:llama3-8b-q8_0") == shape_config("random:llama3-8b")
    with pytest.raises(ModelNotFound, match=r"append a quantization .* -q4_k_m"):
        shape_config("random:unheard-q4_k_m")
    assert len(set(MIXTURES)) == len(MIXTURES)


def test_a_27b_model_in_four_bits_takes_sixteen_gigabytes_without_generating_weights() -> None:
    info = read_model_info(open_random("random:qwen3.6-27b-q4_k_m"))
    holding = plan_weight_storage(info.weights, "packed-bf16")
    assert 15.5e9 < holding.weights.total < 17.5e9
    kinds = Counter(dict(holding.kept))
    assert kinds["Q4_K"] > 300
    assert kinds["Q5_K"] == 48
    assert kinds["Q6_K"] > 24
    assert not holding.converted
