from __future__ import annotations

import numpy as np
import pytest

from onedraw.checkpoints import random_weights as random
from onedraw.checkpoints.random_weights import POOL, RandomTensor, random_checkpoint, random_weights
from onedraw.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from onedraw.models.weight_names import weight_shapes
from tests.reference.forward import logits
from tests.support import tiny_modern

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


def test_weights_depend_only_on_seed_and_name() -> None:
    first, again, other = random_weights(SPEC, 1), random_weights(SPEC, 1), random_weights(SPEC, 2)
    late = again.layer(2)  # read before the others
    for name, value in first.layer(2).items():
        np.testing.assert_array_equal(value, late[name])
        assert not np.array_equal(value, other.layer(2)[name])
        assert not np.array_equal(value, first.layer(1)[name])
    np.testing.assert_array_equal(first.outer()["embed"], again.outer()["embed"])


def test_logits_of_a_random_model_have_a_reasonable_magnitude() -> None:
    found = logits(random_weights(SPEC), list(range(20)))
    assert 0.1 < found.std() < 10
    assert len(set(found.argmax(-1).tolist())) > 5


@pytest.mark.parametrize("name", tiny_modern.NAMES)
def test_random_weights_of_every_family_have_a_reasonable_magnitude(name: str) -> None:
    spec = tiny_modern.spec(name)
    weights = random_weights(spec)
    assert sum(weights.tensor(*where).float32().size for where in weight_shapes(spec)) == spec.parameters
    found = logits(weights, list(range(20)))
    assert 0.1 < found.std() < 10
    assert len(set(found.argmax(-1).tolist())) > 5
    for layer in range(len(spec.layers)):
        read = weights.layer(layer)
        if "decay" in read:
            assert -10 < read["decay"].min() <= read["decay"].max() < -0.04
        if "layer_scale" in read:
            assert 0.3 < read["layer_scale"].item() < 1.3


def test_rows_of_a_random_tensor_can_be_selected() -> None:
    tensor = random_checkpoint(SPEC).tensors["layers.0.q"]
    order = np.random.default_rng(0).permutation(64)
    twice = tensor.take_rows(order).take_rows(order)
    np.testing.assert_array_equal(twice.float32(), tensor.float32()[order][order])
    some = tensor.take_rows(np.array([9, 9, 3]))
    assert some.shape == (3, 64)
    np.testing.assert_array_equal(some.float32(), tensor.float32()[[9, 9, 3]])
    np.testing.assert_array_equal(tensor.reshaped((4, 16, 64)).float32(), tensor.float32().reshape(4, 16, 64))
    folded = tensor.take_rows(order).reshaped((4, 16, 64))
    np.testing.assert_array_equal(folded.float32(), tensor.float32()[order].reshape(4, 16, 64))


def test_a_large_tensor_repeats_its_numbers_and_reads_single_rows_cheaply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "POOL", 97)
    random._pool.cache_clear()
    tensor = RandomTensor("large", (30, 10), seed=1, std=2.0, mean=1.0)
    whole = tensor.float32()
    np.testing.assert_array_equal(whole.reshape(-1)[97:194], whole.reshape(-1)[:97])
    assert len(np.unique(whole)) == 97
    order = np.array([29, 9, 0])  # row 9 wraps around the end of the pool
    np.testing.assert_array_equal(tensor.take_rows(order).float32(), whole[order])
    random._pool.cache_clear()
    monkeypatch.undo()
    table = RandomTensor("table", (262_144, 42 * 256), seed=1, std=0.1)  # 11 GB if it were generated completely
    rows = table.take_rows(np.array([0, 262_143])).float32()
    assert rows.shape == (2, 42 * 256)
    assert not np.array_equal(rows[0], rows[1])
    assert POOL < 2**23


def test_the_fingerprint_changes_with_seed_and_shape() -> None:
    assert random_checkpoint(SPEC, 1).fingerprint() == random_checkpoint(SPEC, 1).fingerprint()
    assert random_checkpoint(SPEC, 1).fingerprint() != random_checkpoint(SPEC, 2).fingerprint()
