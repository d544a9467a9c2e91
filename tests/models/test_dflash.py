from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onedraw.checkpoints.drafter_writer import convert_drafter as convert
from onedraw.checkpoints.open import open_checkpoint
from onedraw.errors import CorruptFile, ModelError, UnsupportedModel
from onedraw.models.dflash import (
    DrafterInfo,
    check_drafter_fits,
    default_target_layers,
    is_drafter,
    read_drafter_info,
    read_drafter_spec,
)
from onedraw.models.registry import read_model_info
from onedraw.models.spec import AttentionSpec, DrafterSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from tests.support import drafter_files
from tests.support import tiny_drafters as tiny
from tests.support.memory_source import MemorySource

FIXTURES = Path(__file__).parent.parent / "fixtures"
GGUF = FIXTURES / "gguf"
TRAINED = FIXTURES / "trained"


def info(path: Path) -> DrafterInfo:
    return read_drafter_info(open_checkpoint(path))


def zlab(folder: Path, **changes: Any) -> DrafterSpec:
    return info(tiny.write_zlab(folder, **changes)).spec


def every_weight(drafter: DrafterInfo) -> dict[str, np.ndarray]:
    read = dict(drafter.weights.outer())
    for index in range(len(drafter.spec.layers)):
        read |= {f"{index}.{name}": value for name, value in drafter.weights.layer(index).items()}
    return read


# ------------------------------------------------------------------ what is read


def test_a_zlab_folder_is_read_completely(tmp_path: Path) -> None:
    spec = zlab(tmp_path)
    mixer = AttentionSpec(heads=4, kv_heads=2, head_dim=16, rope=RopeSpec(10000.0, 16), scale=0.25, qk_norm=True)
    assert spec == DrafterSpec(
        layout="z-lab",
        layers=(LayerSpec(mixer, MlpSpec(96)),) * 2,
        causal_in_block=(False, False),
        hidden=64,
        target_hidden=64,
        vocab=512,
        draft_vocab=512,
        eps=1e-6,
        block=6,
        mask_token=5,
        target_layers=(0, 2),
        max_context=1024,
        target_depth=3,
    )


def test_every_layout_gives_the_same_layers(tmp_path: Path) -> None:
    bodies = [info(tiny.write_zlab(tmp_path / "zlab"))]
    bodies += [info(tiny.write(tmp_path / "speculators", tiny.speculators_config(), tiny.tensors()))]
    convert(tmp_path / "zlab", tmp_path / "converted.gguf", kind="F32")
    bodies += [info(tmp_path / "converted.gguf")]
    first = every_weight(bodies[0])
    np.testing.assert_array_equal(first["fc"], tiny.tensors()["fc.weight"])
    np.testing.assert_array_equal(first["1.k_norm"], tiny.tensors()["layers.1.self_attn.k_norm.weight"])
    assert [body.spec.layout for body in bodies] == ["z-lab", "speculators", "gguf"]
    for body in bodies:
        assert replace(body.spec, layout="z-lab", target_depth=3, eps=1e-6) == bodies[0].spec
        for name, value in every_weight(body).items():
            np.testing.assert_array_equal(value, first[name], err_msg=name)


def test_parameters_count_every_weight(tmp_path: Path) -> None:
    for path in (tiny.write_zlab(tmp_path / "a"), tiny.write_speculators(tmp_path / "b", draft_vocab=tiny.DRAFT_VOCAB)):
        drafter = info(path)
        assert drafter.spec.parameters == sum(value.size for value in every_weight(drafter).values())


def test_a_gguf_of_llama_cpp_counts_layers_one_higher() -> None:
    spec = info(GGUF / "dflash_qwen3.gguf").spec
    assert open_checkpoint(GGUF / "dflash_qwen3.gguf").config["dflash.target_layers"] == [2, 4]
    assert spec.target_layers == (1, 3)
    assert (spec.block, spec.mask_token, spec.vocab, spec.hidden, spec.target_hidden) == (8, 7, 1024, 64, 64)
    assert spec.causal_in_block == (False, False)
    assert [layer.mixer.window for layer in spec.layers] == [None, None]


def test_sliding_layers_are_causal_in_the_block_and_full_ones_are_not(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    stack = {"layer_types": kinds, "sliding_window": 24, "use_sliding_window": True}
    specs = [
        info(GGUF / "dflash_qwen3_swa.gguf").spec,
        zlab(tmp_path / "a", **stack),
        info(tiny.write_speculators(tmp_path / "b", stack=stack)).spec,
    ]
    for spec in specs:
        assert [layer.mixer.window for layer in spec.layers] == [24, None]
        assert spec.causal_in_block == (True, False)
    other = info(tiny.write_speculators(tmp_path / "c", stack=stack, sliding_window_non_causal=True)).spec
    assert other.causal_in_block == (False, False)
    assert [layer.mixer.window for layer in other.layers] == [24, None]


def test_a_causality_setting_applies_to_every_layer(tmp_path: Path) -> None:
    inner = {"mask_token_id": tiny.MASK, "target_layer_ids": [0, 2]}
    assert zlab(tmp_path / "a", is_causal=True).causal_in_block == (True, True)
    assert zlab(tmp_path / "b", dflash_config={**inner, "causal": True}).causal_in_block == (True, True)
    assert zlab(tmp_path / "c", is_causal=False, dflash_config={**inner, "causal": True}).causal_in_block == (False, False)
    with pytest.raises(CorruptFile, match="is_causal must be true or false"):
        zlab(tmp_path / "d", is_causal="never")


def test_a_window_for_all_layers_overrides_their_types(tmp_path: Path) -> None:
    inner = {"mask_token_id": tiny.MASK, "target_layer_ids": [0, 2], "use_swa": True, "swa_window_size": 9}
    spec = zlab(tmp_path, dflash_config=inner)
    assert [layer.mixer.window for layer in spec.layers] == [9, 9]
    assert spec.causal_in_block == (True, True)
    with pytest.raises(CorruptFile, match="use_swa is set, but neither"):
        zlab(tmp_path / "b", dflash_config={**inner, "swa_window_size": None})


def test_without_layer_types_qwen3s_rule_applies(tmp_path: Path) -> None:
    spec = zlab(tmp_path / "a", layer_types=None, use_sliding_window=True, sliding_window=7, max_window_layers=1)
    assert [layer.mixer.window for layer in spec.layers] == [None, 7]
    spec = zlab(tmp_path / "b", layer_types=None, use_sliding_window=False, sliding_window=7, max_window_layers=1)
    assert [layer.mixer.window for layer in spec.layers] == [None, None]


@pytest.mark.parametrize(
    "moved",
    [
        {"block_size": None, "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 2], "block_size": 6}},
        {"target_layer_ids": [0, 2], "dflash_config": {"mask_token_id": 5}},
        {"mask_token_id": 5, "dflash_config": {"target_layer_ids": [0, 2]}},
        {"num_target_layers": None, "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 2], "num_target_layers": 3}},
        {"dflash_config": None, "mask_token_id": 5, "target_layer_ids": [0, 2]},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ],
)
def test_keys_may_be_at_the_top_or_in_dflash_config(tmp_path: Path, moved: dict[str, Any]) -> None:
    assert zlab(tmp_path / "moved", **moved) == zlab(tmp_path / "plain")


def test_the_block_size_is_sixteen_by_default(tmp_path: Path) -> None:
    assert zlab(tmp_path, block_size=None).block == 16


def test_target_layers_are_spread_evenly_by_default(tmp_path: Path) -> None:
    assert default_target_layers(1, 30) == (15,)
    assert default_target_layers(5, 36) == (1, 9, 17, 25, 33)
    assert default_target_layers(5, 64) == (1, 16, 31, 46, 61)
    spec = zlab(tmp_path, num_target_layers=28, dflash_config={"mask_token_id": 5})
    assert spec.target_layers == default_target_layers(2, 28) == (1, 25)


def test_a_reduced_vocabulary_is_mapped_to_the_targets_ids(tmp_path: Path) -> None:
    drafter = info(tiny.write_speculators(tmp_path / "folder", draft_vocab=tiny.DRAFT_VOCAB))
    spec, stored = drafter.spec, tiny.own_tensors(tiny.DRAFT_VOCAB)
    assert (spec.own_embedding, spec.own_head, spec.mapped) == (True, True, True)
    assert (spec.vocab, spec.draft_vocab) == (tiny.VOCAB, tiny.DRAFT_VOCAB)
    ids = drafter.weights.target_ids()
    assert ids is not None
    assert ids.dtype == np.int64
    np.testing.assert_array_equal(np.flatnonzero(stored["t2d"]), ids)
    np.testing.assert_array_equal(drafter.weights.outer()["head"], stored["lm_head.weight"])
    np.testing.assert_array_equal(drafter.weights.outer()["embed"], stored["embed_tokens.weight"])
    # GGUF stores the target ids themselves, not differences.
    convert(tmp_path / "folder", tmp_path / "converted.gguf", kind="F32")
    converted = info(tmp_path / "converted.gguf")
    np.testing.assert_array_equal(converted.weights.target_ids(), ids)
    assert replace(converted.spec, layout="speculators", eps=1e-6) == spec


def test_a_map_with_ids_outside_the_vocabulary_is_corrupt(tmp_path: Path) -> None:
    stored = tiny.tensors() | tiny.own_tensors(tiny.DRAFT_VOCAB)
    stored["d2t"][-1] = tiny.VOCAB
    folder = tiny.write(tmp_path, tiny.speculators_config(draft_vocab=tiny.DRAFT_VOCAB), stored)
    with pytest.raises(
        CorruptFile, match=rf"d2t has token id {tiny.VOCAB + tiny.DRAFT_VOCAB - 1}, outside the vocabulary of {tiny.VOCAB}"
    ):
        info(folder).weights.target_ids()


def test_a_drafter_without_a_map_uses_the_targets_ids(tmp_path: Path) -> None:
    drafter = info(tiny.write_speculators(tmp_path))
    assert drafter.spec.own_head
    assert drafter.weights.target_ids() is None


def test_a_speculators_config_may_name_zlabs_architecture(tmp_path: Path) -> None:
    assert info(tiny.write_speculators(tmp_path, architectures=["DFlashDraftModel"])).spec.layout == "speculators"


# ------------------------------------------------------------------ what is a drafter


def test_a_drafter_is_distinguished_from_a_model(tmp_path: Path) -> None:
    yes = [GGUF / "dflash_qwen3.gguf", TRAINED / "trained_dflash_qwen3", tiny.write_zlab(tmp_path / "a")]
    yes += [tiny.write_speculators(tmp_path / "b"), tiny.write_zlab(tmp_path / "c", architectures=["DFlash2DraftModel"])]
    no = [GGUF / "qwen3.gguf", TRAINED / "trained_qwen3"]
    assert [is_drafter(open_checkpoint(path)) for path in yes] == [True] * len(yes)
    assert [is_drafter(open_checkpoint(path)) for path in no] == [False] * len(no)


# ------------------------------------------------------------------ what is refused


def with_tensor(config: dict[str, Any], name: str) -> Callable[[Path], Path]:
    return lambda folder: tiny.write(folder, config, tiny.tensors() | {name: np.zeros((4, 4), np.float32)})


ZLAB, SPECULATORS = tiny.zlab_config, tiny.speculators_config
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "DSpark": (
        lambda folder: tiny.write_zlab(folder, architectures=["DSparkDraftModel"]),
        "DSparkDraftModel .*Markov head.*supported: DFlashDr",
    ),
    "Laguna with experts": (
        lambda folder: tiny.write_zlab(folder, architectures=["DFlashLagunaForCausalLM"], num_experts=8),
        "num_experts = 8 is not supported",
    ),
    "a model": (
        lambda folder: tiny.write_zlab(folder, architectures=["Qwen3ForCausalLM"]),
        "Qwen3ForCausalLM is not supported as a d",
    ),
    "speculators of another type": (
        lambda folder: tiny.write_speculators(folder, speculators_model_type="eagle3"),
        "speculators_model_type eagle3 .*supported: DFlashDraftModel",
    ),
    "speculators dspark": (
        lambda folder: tiny.write_speculators(folder, speculators_model_type="dspark"),
        r"DSpark.*supported: DFlash",
    ),
    "a Markov head": (with_tensor(ZLAB(), "markov_head.w1.weight"), r"markov_head\.w1\.weight \(DSpark.*supported drafters"),
    "a confidence head": (with_tensor(ZLAB(), "confidence_head.weight"), r"confidence_head\.weight \(DSpark"),
    "feature norms without Laguna": (with_tensor(ZLAB(), "aux_hidden_norms.0.weight"), r"aux_hidden_norms\.0\.weight is unexp"),
    "a selector without DFlash2": (
        with_tensor(ZLAB(), "candidate_selector.hidden_projection.weight"),
        "selector.* is unexpected",
    ),
    "an unknown tensor": (
        with_tensor(ZLAB(), "layers.0.extra.weight"),
        r"tensor layers\.0\.extra\.weight is unexpected: .* DFlash drafter",
    ),
    "the anchor's slot": (
        lambda folder: tiny.write_speculators(folder, sample_from_anchor=True),
        "sample_from_anchor = True is not sup",
    ),
    "no features": (
        lambda folder: tiny.write_zlab(folder, dflash_config={"mask_token_id": 5, "use_aux_hidden_state": False}),
        "dflash_config: use_aux_hidden_state = False",
    ),
    "sinks": (
        lambda folder: tiny.write_zlab(folder, dflash_config={"mask_token_id": 5, "attention_sink_bias": True}),
        "attention_sink_bias = True",
    ),
    "another rope layout": (
        lambda folder: tiny.write_zlab(folder, is_neox_style=False),
        "is_neox_style = False is not supported",
    ),
    "scaled logits of speculators": (
        lambda folder: tiny.write_speculators(folder, logit_scale=0.5),
        "logit_scale = 0.5 is not supported",
    ),
    "scaled embeddings": (
        lambda folder: tiny.write_zlab(
            folder, dflash_config={"mask_token_id": 5, "target_layer_ids": [0, 2], "input_embedding_scale": 2.0}
        ),
        "input_embedding_scale = 2.0 is not supported",
    ),
    "biases": (lambda folder: tiny.write_zlab(folder, attention_bias=True), "attention_bias = True is not supported"),
    "an unknown key": (
        lambda folder: tiny.write_zlab(folder, hc_mult=4),
        "hc_mult = 4 is not supported: its effect on the model is unknown",
    ),
    "an unknown inner key": (
        lambda folder: tiny.write_zlab(folder, dflash_config={"mask_token_id": 5, "target_layer_ids": [0, 2], "twist": 3}),
        "dflash_config: twist = 3 is not supported",
    ),
    "an unknown layer type": (
        lambda folder: tiny.write_zlab(folder, layer_types=["linear_attention", "full_attention"]),
        "layer_types: 'linear_attention' is not supported",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_variants_of_dflash_are_refused_by_name(tmp_path: Path, name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(UnsupportedModel, match=message):
        info(make(tmp_path))


def test_a_pickled_mask_embedding_is_refused(tmp_path: Path) -> None:
    tiny.write_zlab(tmp_path)
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match=r"mask_embedding\.pt is a pickle"):
        info(tmp_path)


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "two block sizes": (
        {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 2], "block_size": 8}},
        "block_size is 6, but .*is 8",
    ),
    "two lists of layers": ({"target_layer_ids": [1, 2]}, "contradict each other"),
    "a block of one": ({"block_size": 1}, "block_size must be a whole number from 2"),
    "a block for which no memory is large enough": ({"block_size": 10**9}, "block_size must be a whole number from 2 to 1024"),
    "no mask": ({"dflash_config": {"target_layer_ids": [0, 2]}}, "mask_token_id is missing"),
    "a mask outside": ({"dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 512}}, "mask token 512 is outside .* 512"),
    "no layers": (
        {"num_target_layers": None, "dflash_config": {"mask_token_id": 5}},
        "target_layer_ids and num_target_layers are both",
    ),
    "a layer below zero": ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": [-1, 2]}}, r"not \[-1, 2\]"),
    "no theta": ({"rope_theta": None}, "rope_theta is missing"),
    "sliding without a window": ({"layer_types": ["sliding_attention"] * 2}, "no sliding_window is set"),
    "too few layer types": ({"layer_types": ["full_attention"]}, "layer_types must list 2 layers"),
    "uneven heads": ({"num_key_value_heads": 3}, "4 query heads are not a multiple of 3"),
    "a vocabulary without a map": (
        {"draft_vocab_size": 96},
        "draft vocabulary of 96 tokens for a target of 512 needs a head and d2t tensor",
    ),
    "another number of features": (
        {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 1, 2]}},
        r"tensor fc.weight has shape \[64, 128\], the model needs \[64, 192\]",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_inconsistent_config_is_corrupt(tmp_path: Path, name: str) -> None:
    changes, message = BROKEN[name]
    with pytest.raises(CorruptFile, match=message):
        zlab(tmp_path, **changes)


def test_speculators_must_list_target_layers_counted_from_one(tmp_path: Path) -> None:
    with pytest.raises(CorruptFile, match="aux_hidden_state_layer_ids is missing"):
        info(tiny.write_speculators(tmp_path / "a", aux_hidden_state_layer_ids=None))
    with pytest.raises(CorruptFile, match=r"aux_hidden_state_layer_ids must be a list of layers counted from 1, not \[0, 2\]"):
        info(tiny.write_speculators(tmp_path / "b", aux_hidden_state_layer_ids=[0, 2]))


def gguf_source(**changes: Any) -> MemorySource:
    checkpoint = open_checkpoint(GGUF / "dflash_qwen3_swa.gguf")
    config = dict(checkpoint.config) | {f"dflash.{name}": value for name, value in changes.items()}
    return MemorySource(config, "gguf", dict(checkpoint.tensors), path=checkpoint.path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sample_from_anchor": True}, "dflash.sample_from_anchor = True is not supported"),
        ({"decoder_arch": "other"}, "dflash.decoder_arch = 'other' is not supported"),
        ({"domino.enabled": 1}, r"dflash.domino.enabled \(Domino"),
        ({"block_size": None}, "dflash.block_size is missing"),
        ({"target_layers": None}, "dflash.target_layers must be a list of layers counted from 1"),
        ({"target_layers": [0, 4]}, r"counted from 1, not \[0, 4\]"),
        ({"rope.freq_base": None}, "dflash.rope.freq_base is missing"),
        ({"attention.sliding_window_pattern": [True]}, "sliding_window_pattern must be a list of 2 booleans"),
        ({"attention.sliding_window": None}, "has sliding layers, but no sliding_window is set"),
    ],
)
def test_the_error_about_a_gguf_file_names_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_drafter_info(gguf_source(**changes))


def test_other_gguf_drafters_are_refused_by_name() -> None:
    source = gguf_source()
    for name, value in (
        ("markov_w1.weight", "DSpark"),
        ("conf_proj.weight", "DSpark"),
        ("dflash.dspark.markov.w1", "DSpark"),
        ("dflash.domino.gru.weight_ih", "Domino"),
    ):
        made = replace(source, tensors=source.tensors | {name: source.tensors["fc.weight"]})
        with pytest.raises(UnsupportedModel, match=rf"{name}.*{value}.*supported drafters: "):
            read_drafter_info(made)
    other = replace(source, config={"general.architecture": "eagle3-dflash"})
    assert is_drafter(other)
    with pytest.raises(UnsupportedModel, match=r"eagle3-dflash is not supported as a drafter; supported: .*qwen35-dflash-draft"):
        read_drafter_info(other)


# ------------------------------------------------------------------ files of Lucebox


def lucebox_source(tmp_path: Path, arch: str = "qwen35-dflash-draft", **changes: Any) -> MemorySource:
    checkpoint = open_checkpoint(drafter_files.write_lucebox(TRAINED / "trained_dflash_qwen3", tmp_path / "d.gguf", arch=arch))
    config = dict(checkpoint.config) | {f"{arch}.{name}": value for name, value in changes.items()}
    return MemorySource(config, "gguf", dict(checkpoint.tensors), path=checkpoint.path)


def test_layers_with_features_follow_from_the_targets_depth_if_a_lucebox_file_lists_none(tmp_path: Path) -> None:
    source = lucebox_source(tmp_path, **{"dflash.target_layer_ids": None})
    assert read_drafter_info(source, 64).spec.target_layers == (1, 63)
    with pytest.raises(CorruptFile, match=r"dflash\.target_layer_ids is missing"):
        read_drafter_info(source)
    assert read_drafter_info(lucebox_source(tmp_path)).spec.target_layers == (1, 3)
    five = replace(source, config={**source.config, "qwen35-dflash-draft.dflash.n_target_layers": 5})
    assert read_drafter_spec(five, "gguf-draft", 64).target_layers == (1, 16, 31, 46, 61)
    with pytest.raises(CorruptFile, match=r"lists 2 layers, dflash\.n_target_layers is 3"):
        read_drafter_info(lucebox_source(tmp_path, **{"dflash.n_target_layers": 3}))


def test_mask_token_and_block_of_a_lucebox_file_have_defaults(tmp_path: Path) -> None:
    bare = {"dflash.mask_token_id": None, "dflash.block_size": None}
    spec = read_drafter_info(lucebox_source(tmp_path, "gemma4-dflash-draft", **bare)).spec
    assert (spec.mask_token, spec.block, spec.softcap) == (4, 16, 30.0)
    with pytest.raises(CorruptFile, match="mask token 248070 is outside the vocabulary of 1024"):
        read_drafter_info(lucebox_source(tmp_path, **bare))
    with pytest.raises(CorruptFile, match="mask_token_id is missing"):
        read_drafter_info(lucebox_source(tmp_path, "dflash-draft", **bare))


def test_windows_of_a_lucebox_file_follow_its_pattern_or_for_gemma_4_the_rule(tmp_path: Path) -> None:
    slides = {"attention.sliding_window": 9, "attention.sliding_window_pattern": [True, False]}
    spec = read_drafter_info(lucebox_source(tmp_path, **slides)).spec
    assert [layer.attention.window for layer in spec.layers] == [9, None]
    assert spec.causal_in_block == (True, False)
    without = read_drafter_info(lucebox_source(tmp_path, **{"attention.sliding_window": 9})).spec
    assert [layer.attention.window for layer in without.layers] == [None, None]
    gemma = read_drafter_info(lucebox_source(tmp_path, "gemma4-dflash-draft")).spec
    assert [layer.attention.window for layer in gemma.layers] == [2048, None]


def test_logits_of_a_drafter_may_be_scaled_and_capped(tmp_path: Path) -> None:
    inner = {"mask_token_id": 5, "target_layer_ids": [0, 2], "output_multiplier": 0.5, "final_logit_softcapping": 20.0}
    spec = zlab(tmp_path, logit_scale=0.5, dflash_config=inner)
    assert (spec.logit_scale, spec.softcap) == (0.25, 20.0)
    assert zlab(tmp_path / "b", final_logit_softcapping=30.0).softcap == 30.0


# ------------------------------------------------------------------ fit

MIXER = AttentionSpec(heads=4, kv_heads=2, head_dim=16, rope=RopeSpec(1e4, 16), scale=0.25)
TARGET = ModelSpec(
    family="made", layers=(LayerSpec(MIXER, MlpSpec(96)),) * 3, hidden=64, vocab=512, eps=1e-6, tied=True, max_context=64
)


@pytest.fixture
def fitting(tmp_path: Path) -> DrafterSpec:
    return zlab(tmp_path)


def test_a_drafter_fits_its_target(fitting: DrafterSpec) -> None:
    check_drafter_fits(fitting, TARGET)
    check_drafter_fits(replace(fitting, target_depth=None), TARGET)


@pytest.mark.parametrize(
    ("drafter", "target", "numbers"),
    [
        ({}, {"vocab": 513}, "512 tokens, the target's has 513"),
        ({}, {"hidden": 32}, "size 64, the target's have 32"),
        ({"hidden": 48}, {}, "hidden size is 48, the target's embedding and head have 64"),
        ({"own_embedding": True, "hidden": 48}, {}, "hidden size is 48, the target's embedding and head have 64"),
        ({}, {"layers": TARGET.layers * 2}, "a target of 3 layers, the target has 6"),
        ({"target_depth": None}, {"layers": TARGET.layers[:2]}, "after layer 2, the target's last layer is 1"),
        ({"block": 1}, {}, "a block of 1 drafts nothing, at least 2"),
        ({"mask_token": 512}, {}, "mask token is 512, the target's last token is 511"),
    ],
)
def test_the_error_about_an_unfit_drafter_names_both_sizes(
    fitting: DrafterSpec, drafter: dict[str, Any], target: dict[str, Any], numbers: str
) -> None:
    with pytest.raises(UnsupportedModel, match=f"does not fit the target: .*{numbers}"):
        check_drafter_fits(replace(fitting, **drafter), replace(TARGET, **target))


def test_a_drafter_with_its_own_embedding_and_head_may_be_of_another_size(fitting: DrafterSpec) -> None:
    check_drafter_fits(replace(fitting, hidden=48, own_embedding=True, own_head=True), TARGET)


def test_the_trained_pair_fits() -> None:
    check_drafter_fits(
        info(TRAINED / "trained_dflash_qwen3").spec, read_model_info(open_checkpoint(TRAINED / "trained_qwen3")).spec
    )
    assert json.loads((TRAINED / "trained_dflash_qwen3" / "config.json").read_text())["num_target_layers"] == 6
