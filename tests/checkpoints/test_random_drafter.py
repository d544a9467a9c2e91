"""Random drafters of a known shape: they have a valid config, fit their target, and draft."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from onedraw.backends.devices import parse_device
from onedraw.backends.packing import gpu_packed_savings
from onedraw.build.drafters import drafter_bytes
from onedraw.build.fit_devices import memory_plan_for, plan_devices
from onedraw.build.llm import build_llm
from onedraw.checkpoints.random_weights import DRAFTER_SHAPES, SHAPES, open_random, open_random_drafter
from onedraw.errors import ModelNotFound, OutOfMemory
from onedraw.llm.llm import idle_stats
from onedraw.llm.request_options import RequestOptions, make_generation
from onedraw.models.dflash import check_drafter_fits, read_drafter_info
from onedraw.models.registry import read_model_info
from onedraw.settings import Settings

SMALL = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}


def test_the_drafter_of_qwen_fits_qwen_and_has_its_size() -> None:
    info = read_drafter_info(open_random_drafter("random:qwen3.6-27b-dflash"))
    check_drafter_fits(info.spec, read_model_info(open_random("random:qwen3.6-27b")).spec)
    assert info.spec.parameters / 1e9 == pytest.approx(1.73, rel=0.01)
    assert [layer.attention.window for layer in info.spec.layers] == [2048] * 4 + [None]


def test_a_quantized_drafter_saves_most_of_its_bytes() -> None:
    packed = open_random_drafter("random:qwen3.6-27b-dflash-q4_k_m")
    parameters = read_drafter_info(packed).spec.parameters
    assert 0.6 * 2 * parameters < gpu_packed_savings(packed.tensors.values()) < 0.75 * 2 * parameters
    assert packed.fingerprint() != open_random_drafter("random:qwen3.6-27b-dflash").fingerprint()


def test_an_unknown_drafter_shape_is_refused_by_name() -> None:
    with pytest.raises(ModelNotFound, match=r"qwen3\.6-27b-dflash"):
        open_random_drafter("random:llama3-8b")


def test_random_drafts_change_no_token(tmp_path: Path) -> None:
    target: dict[str, Any] = {**SHAPES["llama3-8b"], **SMALL, "num_hidden_layers": 4}
    drafter: dict[str, Any] = {**DRAFTER_SHAPES["qwen3.6-27b-dflash"], **SMALL, "head_dim": 32, "num_target_layers": 4}
    drafter |= {"dflash_config": {"block_size": 8, "mask_token_id": 500, "target_layer_ids": [0, 2]}}
    (tmp_path / "target.json").write_text(json.dumps(target))
    (tmp_path / "drafter.json").write_text(json.dumps(drafter))
    replies, drafted = [], 0
    for draft in ("none", f"random:{tmp_path / 'drafter.json'}-q4_k_m"):
        given: dict[str, Any] = {"draft": draft, "dtype": "f32", "max_context": 256, "self_check": False, "draft_tokens": 5}
        with build_llm(Settings.of(model=f"random:{tmp_path / 'target.json'}", **given)) as llm:
            options = RequestOptions(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
            [reply] = llm.run(make_generation(options, llm=llm, prompt=(5, 6, 7), label="test"))
            replies.append(reply.token_ids)
            drafted = idle_stats(llm).draft_tokens
    assert replies[0] == replies[1]
    assert drafted > 20


@pytest.mark.parametrize(("kv_dtype", "lanes"), [("bf16", 1), ("int8", 1), ("int4", 1), ("int4", 8)])
def test_keys_and_values_of_a_drafter_take_a_small_part_of_a_long_context(kv_dtype: str, lanes: int) -> None:
    checkpoint = open_random("random:qwen3.6-27b-q4_k_m")
    info = read_model_info(checkpoint)
    size = drafter_bytes(Path("random:qwen3.6-27b-dflash-q4_k_m"), info, checkpoint)
    assert size is not None
    settings = Settings(max_context=131_072, max_batch=lanes, kv_memory=9 * 2**30 if kv_dtype == "bf16" else 5 * 2**30)
    if kv_dtype == "int4":
        settings = dataclasses.replace(settings, kv_memory=2_164 * 2**20)
    plan = memory_plan_for(settings, info, dtype="packed-bf16", kv_dtype=kv_dtype)
    empty = dataclasses.replace(plan, groups=tuple(dataclasses.replace(group, pages=0) for group in plan.groups))
    assert 0 < size(plan) - size(empty) < 0.06 * plan.kv_bytes


@pytest.mark.parametrize(("drafter", "fits"), [("-q4_k_m", True), ("-q8_0", True), ("", False)])
def test_a_24_gigabyte_gpu_fits_a_quantized_drafter_with_a_quantized_model(drafter: str, fits: bool) -> None:
    context = 49_152
    checkpoint = open_random("random:qwen3.6-27b-q4_k_m")
    info, path = read_model_info(checkpoint), Path(f"random:qwen3.6-27b-dflash{drafter}")
    settings = Settings(model="random:qwen3.6-27b-q4_k_m", max_context=context, max_batch=1, checkpoint_memory=0)
    size, device = drafter_bytes(path, info, checkpoint), parse_device("cuda/sm86/24GiB")
    if fits:
        plan, split = plan_devices(settings, info, [device], drafter=size)
        assert plan.max_context == context
        assert split.stages[0].weight_bytes > plan.weight_bytes + 10**9  # includes the drafter
    else:
        with pytest.raises(OutOfMemory, match="without a drafter"):
            plan_devices(settings, info, [device], drafter=size)
