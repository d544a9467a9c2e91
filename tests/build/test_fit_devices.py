"""fit_devices: what --kv-memory causes is said with its numbers."""

from __future__ import annotations

import re

import pytest

from onedraw.backends.devices import parse_device
from onedraw.build.fit_devices import plan_devices, reduced_context, require_host_memory, with_device_sizes
from onedraw.build.llm import build_llm
from onedraw.checkpoints.random_weights import open_random
from onedraw.errors import OutOfMemory
from onedraw.models.registry import read_model_info
from onedraw.settings import Settings
from tests.support import tiny

INFO = read_model_info(open_random("random:llama3-8b"))


def test_kv_memory_over_the_machines_is_refused_with_both_numbers() -> None:
    settings = Settings(model="random:llama3-8b", kv_memory=900 * 2**30)
    plan, _ = plan_devices(settings, INFO, [parse_device("cpu")])
    with pytest.raises(OutOfMemory, match=r"--kv-memory gives 900.0 GiB and 16.0 GiB of this machine's memory are available"):
        require_host_memory(settings, plan, 16 * 2**30)
    require_host_memory(settings, plan, None)
    require_host_memory(settings, plan, 901 * 2**30)


def test_a_start_with_more_kv_memory_than_any_machine_has_is_refused(tmp_path) -> None:
    folder = tiny.write_safetensors("llama", tmp_path / "tiny")
    with pytest.raises(OutOfMemory, match=r"--kv-memory gives 4096.0 TiB and"):
        build_llm(Settings(model=str(folder), device="cpu", kv_memory=4096 * 2**40))


def test_kv_memory_that_shortens_the_context_is_said_with_the_numbers() -> None:
    settings = Settings(kv_memory=2**20)
    assert reduced_context(settings, 8192, 32).startswith(
        "--kv-memory 1.0 MiB holds one sequence of 32 tokens, so that is the context and not the model's 8192"
    )
    assert reduced_context(Settings(kv_memory=2**20, max_context=32), 8192, 32) == ""
    assert reduced_context(Settings(), 8192, 4096) == ""


def test_kv_memory_over_a_devices_is_named_as_the_cause() -> None:
    with pytest.raises(OutOfMemory, match=re.escape("--kv-memory 900.0 GiB does not fit here; lower or omit it")):
        plan_devices(Settings(kv_memory=900 * 2**30, max_context=4096), INFO, [parse_device("cuda/sm90/80GiB")])


@pytest.mark.parametrize(
    ("devices", "tokens", "lanes"),
    [
        (("cpu",), 512, 8),
        (("cuda/sm90/139GiB",), 8192, 64),
        (("cuda/sm86/24GiB",), 1024, 16),
        (("cuda/sm90/80GiB", "cpu"), 512, 8),
    ],
)
def test_steps_and_lanes_follow_the_devices_memory(devices: tuple[str, ...], tokens: int, lanes: int) -> None:
    found = [parse_device(name) for name in devices]
    settings = with_device_sizes(Settings(), INFO.spec, found)
    assert (settings.step_tokens, settings.lanes) == (tokens, lanes)
    given = with_device_sizes(Settings(max_batch=3, turn_tokens=100), INFO.spec, found)
    assert (given.step_tokens, given.lanes) == (100, 3)


def test_large_recurrent_states_take_a_small_part_of_the_memory() -> None:
    spec = read_model_info(open_random("random:qwen3.6-27b-q4_k_m")).spec
    [device] = [parse_device("cuda/sm86/24GiB")]
    settings = with_device_sizes(Settings(), spec, [device])
    assert settings.lanes == 8  # a lane has 0.15 GiB of states
    assert with_device_sizes(Settings(), spec, [parse_device("cuda/sm90/139GiB")]).lanes == 32
