from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onedraw.build.drafters import BUILT_IN_DRAFTERS, find_built_in_drafter
from onedraw.checkpoints.open import open_checkpoint
from onedraw.models.dflash import check_drafter_fits, is_drafter, read_drafter_info
from onedraw.models.registry import read_model_info
from onedraw.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from tests.reference.dflash import Drafter, Target, draft_along
from tests.support.memory_source import MemorySource

MIXER = AttentionSpec(heads=9, kv_heads=3, head_dim=64, rope=RopeSpec(1e5, 64), scale=0.125)
SMOLLM2 = ModelSpec(
    family="llama", layers=(LayerSpec(MIXER, MlpSpec(1536)),) * 30, hidden=576, vocab=49152, eps=1e-5, tied=True, max_context=8192
)
NAMED = {"general.name": "Smollm2 135M 8k Lc100K Mix1 Ep2", "general.basename": "smollm2"}


def source(config: dict[str, Any], path: str = "somewhere/model.gguf") -> MemorySource:
    return MemorySource(config, "gguf" if path.endswith("gguf") else "safetensors", path=Path(path))


@pytest.mark.parametrize(
    ("config", "path"),
    [
        (NAMED, "models/a.gguf"),
        ({"general.basename": "smollm2"}, "models/a.gguf"),
        ({"_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct"}, "models/a"),
        ({}, "models/SmolLM2-135M-Instruct"),
        ({}, "smollm2/model.gguf"),
    ],
)
def test_the_default_model_has_a_drafter_under_any_of_its_names(config: dict[str, Any], path: str) -> None:
    found = find_built_in_drafter(SMOLLM2, source(config, path))
    assert found is not None
    assert found.is_file()


def test_another_shape_or_name_has_no_drafter() -> None:
    assert find_built_in_drafter(SMOLLM2, source({"general.name": "My own tiny llama"})) is None
    for changes in ({"hidden": 960}, {"vocab": 49280}, {"layers": SMOLLM2.layers[:24]}, {"family": "qwen3"}):
        assert find_built_in_drafter(replace(SMOLLM2, **changes), source(NAMED)) is None


@pytest.mark.parametrize("shipped", BUILT_IN_DRAFTERS, ids=lambda shipped: shipped.file)
def test_every_built_in_drafter_is_complete_and_fits_its_target(shipped: Any) -> None:
    path = find_built_in_drafter(SMOLLM2, source(NAMED))
    assert path is not None
    checkpoint = open_checkpoint(path)
    assert is_drafter(checkpoint)
    drafter = read_drafter_info(checkpoint)
    check_drafter_fits(drafter.spec, SMOLLM2)
    assert (drafter.spec.block, drafter.spec.mask_token, drafter.spec.target_layers) == (8, 16, (1, 8, 14, 20, 27))
    assert drafter.spec.causal_in_block == (False,) * 4
    assert path.stat().st_size < 13_000_000
    for index in range(4):
        assert all(np.isfinite(value).all() for value in drafter.weights.layer(index).values())


def test_the_package_data_includes_the_built_in_drafters() -> None:
    root = Path(__file__).parent.parent.parent
    carried = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["onedraw"]
    files = {file for pattern in carried for file in (root / "onedraw").glob(pattern)}
    assert {root / "onedraw" / "checkpoints" / "drafters" / shipped.file for shipped in BUILT_IN_DRAFTERS} <= files


# "Write a Python function that reverses a string." after the default system message, and the greedy answer of SmolLM2.
ANSWER = 40  # position of the first answer token
# fmt: off
TOKENS = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2,
    198, 1, 4093, 198, 19161, 253, 5905, 1517, 338, 10557, 266, 253, 4928, 30, 2, 198, 1, 520, 9531, 198, 3725,
    5367, 198, 1604, 8535, 79, 5931, 24, 4525, 79, 1321, 727, 472, 1003, 3007, 79, 1321, 43788, 33, 77, 198, 3725,
    198, 198, 1348, 1517, 2925, 36875, 288, 8535, 260, 3007, 4928, 30, 378, 2179, 43788, 33, 77, 80, 17227, 281,
    5905, 314, 253, 17061, 338, 6765, 253, 19275, 3784, 282, 260, 4928, 30, 2,
]
# fmt: on


@pytest.mark.weights
def test_drafts_of_the_built_in_drafter_are_accepted_by_the_default_model(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    info = read_model_info(checkpoint)
    path = find_built_in_drafter(info.spec, checkpoint)
    assert path is not None
    target, drafter = Target(info.weights), Drafter(read_drafter_info(open_checkpoint(path)).weights)
    right = draft_along(target, drafter, TOKENS, ANSWER)
    assert right.tokens_per_step > 2.8
    # The tokens are the target's for any features; wrong features only lower the number of accepted drafts.
    swapped = draft_along(
        target, drafter, TOKENS, ANSWER, spoil=lambda features: np.concatenate(np.split(features, 5, -1)[::-1], -1)
    )
    late = draft_along(target, drafter, TOKENS, ANSWER, spoil=lambda features: np.roll(features, 1, axis=0))
    assert swapped.tokens_per_step < 1.5
    assert late.tokens_per_step < right.tokens_per_step - 0.5
