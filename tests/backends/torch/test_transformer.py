"""Weights on a device: joined, padded, and independent of the loader's buffer."""

from __future__ import annotations

import numpy as np
import torch

from onedraw.backends.torch.model.transformer import Transformer
from onedraw.backends.torch.model.weight_loader import LANE, WeightLoader
from onedraw.backends.torch.ops.plain.ops import TorchOps
from onedraw.backends.torch.runner.pipeline import StageDevice
from onedraw.checkpoints.random_weights import random_weights
from onedraw.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec

CPU = torch.device("cpu")
LAYER = LayerSpec(
    AttentionSpec(heads=4, kv_heads=2, head_dim=16, rope=RopeSpec(1e4, 16), scale=0.25, qkv_bias=True), MlpSpec(100)
)
SPEC = ModelSpec(family="llama", layers=(LAYER, LAYER), hidden=48, vocab=101, eps=1e-5, tied=False, max_context=64)
WEIGHTS = random_weights(SPEC, seed=3)


def loader() -> WeightLoader:
    return WeightLoader(WEIGHTS, ops=TorchOps(CPU), dtype=torch.float32, device=CPU)


def test_matrices_are_joined_by_rows_each_padded_with_zeros() -> None:
    gate, up = WEIGHTS.read(1, "gate"), WEIGHTS.read(1, "up")
    padding = np.zeros((28, 48), np.float32)
    expected = np.concatenate([gate, padding, up, padding])
    np.testing.assert_array_equal(loader().passing(1, "gate", "up", pad=LANE).numpy(), expected)


def test_columns_are_padded_with_zeros() -> None:
    down = loader().passing(0, "down", pad_columns=LANE).numpy()
    assert down.shape == (48, 128)
    np.testing.assert_array_equal(down[:, :100], WEIGHTS.read(0, "down"))
    assert not down[:, 100:].any()


def test_padding_is_zero_whatever_the_buffer_held_before() -> None:
    used = loader()
    used.passing(None, "head").fill_(7.0)
    np.testing.assert_array_equal(used.passing(1, "gate", pad=LANE).numpy()[100:], np.zeros((28, 48), np.float32))


def test_kept_weights_do_not_share_the_buffer() -> None:
    used = loader()
    bias = used.kept(0, "q_bias", "k_bias", "v_bias")
    before = bias.clone()
    used.passing(None, "head").fill_(7.0)
    assert torch.equal(bias, before)


def test_a_model_in_float32_keeps_nothing_of_the_buffer() -> None:
    """A product packs a copy: one that kept the tensor itself would be overwritten by the next matrix."""
    model = Transformer(SPEC, WEIGHTS, dtype=torch.float32, stage_devices=[StageDevice(CPU, TorchOps(CPU))], max_context=64)
    x = torch.randn(4, 48, generator=torch.Generator().manual_seed(1))
    for index, layer in enumerate(model.layers):
        expected = x @ torch.from_numpy(WEIGHTS.read(index, "q")).T + torch.from_numpy(WEIGHTS.read(index, "q_bias"))
        assert torch.allclose(layer.mixer.qkv(x)[:, : expected.shape[1]], expected, atol=1e-5)
    assert torch.allclose(model.head(x)[:, :101], x @ torch.from_numpy(WEIGHTS.read(None, "head")).T, atol=1e-5)
