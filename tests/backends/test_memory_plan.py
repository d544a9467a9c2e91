"""The memory plan: bytes of weights, pages, states and workspace before anything is allocated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onedraw.backends.memory_plan import (
    DEFAULT_KV_BYTES,
    DEQUANT_BYTES,
    GRAPH_BYTES,
    RUNTIME_RESERVE,
    PackedWeightBytes,
    activation_bytes,
    human_bytes,
    memory_plan,
    page_budget,
)
from onedraw.errors import BadSetting, OutOfMemory
from onedraw.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, RopeSpec


def a_spec(*, layers: int = 2, kv_heads: int = 2, head_dim: int = 8, max_context: int = 256) -> ModelSpec:
    mixer = AttentionSpec(heads=4, kv_heads=kv_heads, head_dim=head_dim, rope=RopeSpec(theta=1e4, dims=head_dim), scale=1.0)
    layer = LayerSpec(mixer=mixer, feed_forward=MlpSpec(width=64))
    return ModelSpec(family="llama", layers=(layer,) * layers, hidden=32, vocab=100, eps=1e-5, tied=True, max_context=max_context)


def a_plan(spec: ModelSpec, **changes: object):  # type: ignore[no-untyped-def]
    return memory_plan(spec, **{"dtype": "f32", "max_batch": 4, "page_size": 16, **changes})  # type: ignore[arg-type]


def test_a_page_has_keys_and_values_of_every_layer() -> None:
    # 2 (keys, values) × 16 positions × 2 heads × 8 wide × 4 bytes × 2 layers
    assert a_plan(a_spec()).groups[0].page_bytes == 2 * 16 * 2 * 8 * 4 * 2


def test_by_default_every_running_sequence_can_have_the_full_context() -> None:
    plan = a_plan(a_spec())
    assert plan.max_context == 256
    assert plan.pages == (4 * 16,)
    assert plan.full_sequences == 4


def test_pages_per_sequence_are_rounded_up() -> None:
    assert a_plan(a_spec(), max_context=17).groups[0].pages_per_sequence == 2


def test_half_width_weights_take_half_the_bytes() -> None:
    full, half = a_plan(a_spec(), dtype="f32"), a_plan(a_spec(), dtype="bf16")
    assert full.weight_bytes == 4 * a_spec().parameters
    assert half.weight_bytes * 2 == full.weight_bytes
    assert half.groups[0].page_bytes * 2 == full.groups[0].page_bytes


def test_the_total_is_weights_pages_and_checkpoints() -> None:
    plan = a_plan(a_spec())
    logits = 64 * 128 * 4  # checkpoints × padded vocabulary × bytes
    assert plan.total_bytes == plan.weight_bytes + plan.pages[0] * plan.groups[0].page_bytes + logits


def test_default_pages_take_at_most_a_gibibyte() -> None:
    wide = a_spec(layers=30, kv_heads=8, head_dim=128, max_context=2048)
    plan = a_plan(wide, max_batch=64, max_context=2048)
    assert plan.kv_bytes <= DEFAULT_KV_BYTES
    assert plan.pages[0] >= plan.groups[0].pages_per_sequence
    assert plan.full_sequences < 64


def test_an_explicit_context_gets_pages_for_at_least_one_sequence() -> None:
    wide = a_spec(layers=32, kv_heads=8, head_dim=128, max_context=131072)
    plan = a_plan(wide, max_context=131072)
    assert plan.pages == (plan.groups[0].pages_per_sequence,)
    assert plan.kv_bytes > DEFAULT_KV_BYTES


def test_the_default_context_is_shortened_to_fit_into_memory() -> None:
    wide = a_spec(layers=32, kv_heads=8, head_dim=128, max_context=131072)
    plan = a_plan(wide)
    assert 4096 <= plan.max_context < 131072
    assert plan.kv_bytes <= DEFAULT_KV_BYTES


def test_explicit_kv_memory_is_used_entirely() -> None:
    spec = a_spec()
    plan = a_plan(spec, kv_memory=100 * a_plan(spec).groups[0].page_bytes + 1)
    assert plan.pages == (100,)


def test_too_little_kv_memory_for_one_sequence_names_the_bytes_needed() -> None:
    spec = a_spec()
    page = a_plan(spec).groups[0].page_bytes
    with pytest.raises(OutOfMemory, match=rf"needs {16 * page} bytes .* gives {15 * page} "):
        a_plan(spec, max_context=256, kv_memory=15 * page)
    assert a_plan(spec, max_context=256, kv_memory=16 * page).pages == (16,)


def test_kv_memory_of_less_than_one_page_is_out_of_memory_for_any_context() -> None:
    with pytest.raises(OutOfMemory):
        a_plan(a_spec(), kv_memory=1)


def test_a_context_over_the_models_maximum_is_rejected() -> None:
    with pytest.raises(BadSetting, match="257 is over the 256 tokens"):
        a_plan(a_spec(), max_context=257)


def test_planning_needs_a_concrete_dtype() -> None:
    with pytest.raises(BadSetting, match="auto"):
        a_plan(a_spec(), dtype="auto")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (5 * 2**50, "5120.0 TiB")],
)
def test_human_bytes_uses_units_of_1024(count: int, text: str) -> None:
    assert human_bytes(count) == text


def test_pages_get_the_memory_left_by_weights_states_graphs_and_workspace() -> None:
    spec, memory = a_spec(), 8 * 2**30
    plan = a_plan(spec)
    room = page_budget(plan, spec, memory=memory, step_tokens=512)
    taken = plan.weight_bytes + plan.checkpoints * plan.checkpoint_bytes + activation_bytes(spec, "f32", 512) + GRAPH_BYTES
    taken += sum(group.page_bytes for group in plan.groups)  # one page per group for padding
    assert room == int(memory * (1 - RUNTIME_RESERVE)) - taken
    assert room - page_budget(plan, spec, memory=memory, step_tokens=512, drafter_bytes=1000) == 1000


def test_activations_include_every_used_expert_of_every_token() -> None:
    spec = a_spec(layers=1)
    few, more = (
        replace(spec, layers=(replace(spec.layers[0], feed_forward=MoeSpec(experts=16, used=used, width=64)),)) for used in (2, 6)
    )
    # for each of four more experts: gate and up (64 each), their product in two layouts (64 each), the output (32)
    assert activation_bytes(more, "bf16", 100) - activation_bytes(few, "bf16", 100) == 100 * 4 * (4 * 64 + 32) * 2


def test_packed_weights_reserve_a_dequantization_buffer_and_partial_sums() -> None:
    spec, given = a_spec(), {"memory": 8 * 2**30, "step_tokens": 512}
    plain = a_plan(spec)
    packed = a_plan(spec, weights=PackedWeightBytes(0, (plain.weight_bytes,), 0, parts=3 << 20))
    assert page_budget(plain, spec, **given) - page_budget(packed, spec, **given) == DEQUANT_BYTES + (3 << 20)


def test_a_device_filled_by_weights_has_no_memory_for_pages() -> None:
    assert page_budget(a_plan(a_spec()), a_spec(), memory=2**20, step_tokens=512) == 0
