"""A backend allocates what the memory plan says."""

from __future__ import annotations

import pytest

from onedraw.backends.memory_plan import memory_plan
from onedraw.backends.torch.backend import TorchBackend
from onedraw.backends.torch.state.model_state import ModelState
from onedraw.checkpoints.random_weights import random_weights
from onedraw.errors import OutOfMemory
from onedraw.models.spec import DeltaSpec
from tests.models.test_modern_families import spec_of
from tests.support import tiny_modern
from tests.support.released_configs import CONFIGS

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "kv"),
    [
        ("qwen3_5_odd", "f32"),
        ("qwen3_5_moe", "bf16"),
        ("gemma4_e2b", "f32"),
        ("gemma4_e2b", "int8"),
        ("laguna", "fp8"),
        ("qwen3_5_odd", "int4"),
    ],
)
def test_the_backend_allocates_the_planned_bytes(name: str, kv: str) -> None:
    spec = tiny_modern.spec(name)
    plan = memory_plan(spec, dtype="f32", kv_dtype=kv, max_context=1000, max_batch=3, page_size=8, step_tokens=64, drafts=16)
    backend = TorchBackend(
        spec,
        random_weights(spec),
        dtype="f32",
        kv_dtype=kv,
        device="cpu",
        lanes=plan.max_batch,
        pages=plan.pages,
        page_size=8,
        max_context=1000,
        drafts=plan.draft_positions,
        checkpoints=plan.checkpoints,
        check=False,
    )
    [state] = backend.states
    assert isinstance(state, ModelState)

    def lane_bytes(*names: str) -> int:
        return sum(getattr(store, name).nbytes for store in state.lanes for name in names)

    pages = sum(part.nbytes for _, store in state.attending for part in store.parts().values())
    kept = backend.checkpoint_logits.rows.nbytes + lane_bytes("saved_states", "saved_windows")
    assert pages == pytest.approx(plan.kv_bytes, rel=0.01)  # one padding page per group is added
    assert lane_bytes("states", "windows") == plan.lane_bytes * 3
    assert lane_bytes("decays", "keys", "changes", "fed") == plan.draft_positions * plan.draft_bytes
    assert kept == plan.checkpoints * plan.checkpoint_bytes


def test_sixteen_drafts_in_eight_lanes_of_the_27b_fit_into_a_gibibyte() -> None:
    spec = spec_of(CONFIGS["Qwen3.6-27B"])
    plan = memory_plan(spec, dtype="bf16", max_context=8192, max_batch=8, page_size=16, drafts=16)
    assert plan.draft_positions == 16 * 8
    assert plan.draft_positions * plan.draft_bytes < GIB
    assert plan.lane_bytes > 144 * 2**20  # 16 full states for each of 8 lanes would take 18 GiB
    assert 16 * 8 * sum(m.state_bytes for layer in spec.layers if isinstance(m := layer.mixer, DeltaSpec)) > 18 * GIB


def test_the_rollback_buffer_limits_the_drafts_of_a_step() -> None:
    spec = tiny_modern.spec("qwen3_5")
    sizes = {"dtype": "f32", "max_context": 256, "max_batch": 4, "page_size": 16, "drafts": 16}
    assert memory_plan(spec, **sizes, draft_memory=10 * spec.draft_bytes()).draft_positions == 10  # type: ignore[arg-type]
    assert memory_plan(spec, **{**sizes, "drafts": 0}).draft_positions == 0  # type: ignore[arg-type]
    with pytest.raises(OutOfMemory, match="--draft none"):
        memory_plan(spec, **sizes, draft_memory=spec.draft_bytes() - 1)  # type: ignore[arg-type]


def test_a_model_without_recurrent_layers_needs_no_rollback_buffer() -> None:
    plan = memory_plan(tiny_modern.spec("laguna"), dtype="f32", max_context=256, max_batch=4, page_size=16, drafts=16)
    assert (plan.draft_positions, plan.lane_bytes) == (0, 0)


def test_a_sliding_group_has_pages_for_its_window_and_one_step() -> None:
    spec = spec_of(CONFIGS["Gemma 4 31B"])
    plan = memory_plan(spec, dtype="bf16", max_context=131072, max_batch=1, page_size=16, step_tokens=512)
    full, sliding = plan.groups
    assert (full.window, sliding.window) == (None, 1024)
    assert full.pages == 131072 // 16
    assert sliding.pages == (1024 + 512 + 64) // 16 + 1
