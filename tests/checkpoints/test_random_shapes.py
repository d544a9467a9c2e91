"""`random:` models: named shapes, and the shape of any config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onedraw.checkpoints.random_weights import SHAPES, open_random
from onedraw.errors import CorruptFile, ModelNotFound, UnsupportedModel
from onedraw.models.registry import read_model_info

BILLIONS = {"llama3-8b": 8.03, "qwen3.6-27b": 26.9, "qwen3.6-35b-a3b": 34.7, "gemma4-31b": 30.7}


@pytest.mark.parametrize("name", SHAPES)
def test_a_named_shape_has_the_size_in_its_name(name: str) -> None:
    info = read_model_info(open_random(f"random:{name}"))
    assert info.spec.parameters / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


def test_a_config_file_can_give_the_shape(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SHAPES["llama3-8b"], "num_hidden_layers": 2, "vocab_size": 64, "hidden_size": 128}))
    assert len(read_model_info(open_random(f"random:{path}")).spec.layers) == 2


def test_an_unknown_shape_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="llama3-8b"):
        open_random("random:llama9")
    path = tmp_path / "config.json"
    path.write_text("[1]")
    with pytest.raises(CorruptFile, match="one JSON object"):
        open_random(f"random:{path}")
    path.write_text('{"architectures": ["UnknownForCausalLM"]}')
    with pytest.raises(UnsupportedModel, match="UnknownForCausalLM"):
        open_random(f"random:{path}")


@pytest.mark.parametrize(
    ("model", "fingerprint"),
    [
        ("random:llama3-8b", "662652701aa6faae"),
        ("random:qwen3.6-35b-a3b-q4_k_m", "3126b68511ae4fcb"),
        ("random:gemma4-31b-q8_0", "79c6ea7f64c572fb"),
    ],
)
def test_fingerprints_of_random_models_stay_the_same_across_versions(model: str, fingerprint: str) -> None:
    """Records and snapshots name them, so renaming a field of the spec must not change them."""
    assert open_random(model).fingerprint() == fingerprint
