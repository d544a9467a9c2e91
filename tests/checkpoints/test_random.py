from __future__ import annotations

import numpy as np

from onedraw.checkpoints.random import RandomCheckpoint, random_weights
from onedraw.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from tests.models.forward import logits

MIXER = AttentionSpec(heads=4, kv_heads=2, head_dim=16, rope=RopeSpec(1e4, 16), scale=0.25, qkv_bias=True, qk_norm=True)
SPEC = ModelSpec(
    family="llama",
    layers=(LayerSpec(MIXER, MlpSpec(128)),) * 3,
    hidden=64,
    vocab=200,
    eps=1e-5,
    tied=False,
    max_context=128,
)


def test_weights_depend_on_seed_and_name_alone() -> None:
    first, again, other = random_weights(SPEC, 1), random_weights(SPEC, 1), random_weights(SPEC, 2)
    late = again.layer(2)  # read before the others
    for name, value in first.layer(2).items():
        np.testing.assert_array_equal(value, late[name])
        assert not np.array_equal(value, other.layer(2)[name])
        assert not np.array_equal(value, first.layer(1)[name])
    np.testing.assert_array_equal(first.outer()["embed"], again.outer()["embed"])


def test_a_random_model_computes_numbers_of_a_sane_size() -> None:
    found = logits(random_weights(SPEC), list(range(20)))
    assert 0.1 < found.std() < 10
    assert len(set(found.argmax(-1).tolist())) > 5


def test_rows_of_a_random_tensor_can_be_taken() -> None:
    tensor = RandomCheckpoint(SPEC).tensors["layers.0.q"]
    order = np.random.default_rng(0).permutation(64)
    twice = tensor.take_rows(order).take_rows(order)
    np.testing.assert_array_equal(twice.float32(), tensor.float32()[order][order])


def test_the_fingerprint_follows_seed_and_shape() -> None:
    assert RandomCheckpoint(SPEC, 1).fingerprint() == RandomCheckpoint(SPEC, 1).fingerprint()
    assert RandomCheckpoint(SPEC, 1).fingerprint() != RandomCheckpoint(SPEC, 2).fingerprint()
