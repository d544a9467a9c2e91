"""Split plans: the bytes of all stages add up to the memory plan, and errors name a context that fits."""

from __future__ import annotations

import pytest

from onedraw.backends.devices import parse_device
from onedraw.backends.memory_plan import MemoryPlan, memory_plan
from onedraw.backends.placement import SplitPlan, plan_or_advise, plan_split
from onedraw.errors import OutOfMemory
from onedraw.models.spec import ModelSpec
from tests.support.tiny_modern import NAMES, spec


def planned(model: ModelSpec, context: int = 512) -> MemoryPlan:
    return memory_plan(model, dtype="f32", max_context=context, max_batch=4, page_size=16, drafts=8)


def split_of(model: ModelSpec, *devices: str, split: str = "auto", context: int = 512) -> SplitPlan:
    given = [parse_device(device) for device in devices]
    return plan_split(model, planned(model, context), given, split=split, activation="f32", step_tokens=512)


@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_of_the_stages_add_up_to_those_of_one_device(name: str) -> None:
    model = spec(name)
    plan = planned(model)
    [whole] = split_of(model, "cpu").stages
    two = split_of(model, "cpu", "cpu").stages
    for field in ("weight_bytes", "page_bytes", "state_bytes"):
        assert sum(getattr(stage, field) for stage in two) == getattr(whole, field), field
    scratch = sum(group.page_bytes for group in plan.groups)  # one page per group for padding
    assert whole.page_bytes == plan.kv_bytes + scratch
    states = plan.lane_bytes * plan.max_batch + plan.draft_positions * plan.draft_bytes
    assert whole.state_bytes == states + plan.checkpoints * plan.checkpoint_bytes
    assert whole.staging_bytes == 0
    assert two[0].staging_bytes == two[1].staging_bytes > 0


def test_a_tied_head_is_counted_twice_on_different_devices() -> None:
    model = spec("gemma4_31b")
    apart, together = split_of(model, "cpu", "cuda/24GiB").stages, split_of(model, "cpu", "cpu").stages
    extra = sum(s.weight_bytes for s in apart) - sum(s.weight_bytes for s in together)
    assert extra == model.vocab * model.hidden * 4


def test_out_of_memory_names_the_longest_context_that_fits() -> None:
    model = spec("gemma4_31b")

    def make(context: int) -> SplitPlan:
        return split_of(model, "cuda/3MiB", "cuda/3MiB", context=context)

    with pytest.raises(OutOfMemory, match=r"too many.*--max-context (\d+) fits here") as error:
        plan_or_advise(make, 1024)
    longest = int(str(error.value).split("--max-context ")[-1].split()[0])
    assert plan_or_advise(make, longest).stages[0].stop < len(model.layers)
    with pytest.raises(OutOfMemory):
        make(longest + 64)


def test_out_of_memory_says_if_no_context_fits() -> None:
    with pytest.raises(OutOfMemory, match="no context fits"):
        plan_or_advise(lambda context: split_of(spec("qwen3_5"), "cuda/1MiB", "cpu", split="3,1", context=context), 256)
