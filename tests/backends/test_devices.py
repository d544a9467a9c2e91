"""Device names, hypothetical devices, and the name of the CPU in fingerprints."""

from __future__ import annotations

from pathlib import Path

import pytest

from onedraw.backends import devices
from onedraw.backends.devices import Device, can_overlap, compute_capability, cpu_features_digest, cpu_model, parse_device
from onedraw.errors import BadSetting


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("cpu", Device("cpu", "cpu")),
        ("cuda", Device("cuda", "cuda")),
        ("cuda:1", Device("cuda:1", "cuda")),
        ("cpu:2", Device("cpu:2", "cpu", cores=(2,))),
        ("cpu:4-7", Device("cpu:4-7", "cpu", cores=(4, 5, 6, 7))),
        ("cuda/sm86/24GiB", Device("cuda/sm86/24GiB", "cuda", "sm86", 24 * 2**30)),
        ("cuda/24GiB", Device("cuda/24GiB", "cuda", "", 24 * 2**30)),
        ("hip/gfx90a/64GiB", Device("hip/gfx90a/64GiB", "hip", "gfx90a", 64 * 2**30)),
        (" cpu/1.5GiB ", Device("cpu/1.5GiB", "cpu", "", 3 * 2**29)),
    ],
)
def test_a_device_is_parsed_from_its_name(text: str, device: Device) -> None:
    assert parse_device(text) == device
    assert device.hypothetical == ("/" in text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tpu",
        "cuda:x",
        "cuda:0-1",
        "cpu:x",
        "cpu:3-",
        "cpu:4-3",
        "cpu:0-9999999999",
        "cuda:²",
        "cpu:0/8GiB",
        "cuda/24",
        "cpu/sm86",
        "cuda/sm86/sm90",
        "cuda:0/24GiB",
        "cuda/24GiB/8GiB",
    ],
)
def test_an_invalid_device_is_rejected_with_an_example(text: str) -> None:
    with pytest.raises(BadSetting, match="cuda/sm86/24GiB"):
        parse_device(text)


def test_the_last_digit_of_an_architecture_is_the_minor_version() -> None:
    assert [compute_capability(a) for a in ("sm60", "sm86", "sm90a", "sm120", "", "gfx90a")] == [
        (6, 0),
        (8, 6),
        (9, 0),
        (12, 0),
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("cuda:0 cuda:1", True),
        ("cpu:0 cpu:1", True),
        ("cpu:0-3 cpu:4-7 cpu:8", True),
        ("cuda:0", False),
        ("cuda:0 cuda:0", False),
        ("cpu cpu", False),
        ("cpu:0-3 cpu:3-7", False),
        ("cpu:0 cpu", False),
        ("cuda:0 cpu", False),
        ("cuda:0 cpu:0-3", False),
    ],
)
def test_devices_of_one_kind_that_share_no_cores_can_overlap(names: str, expected: bool) -> None:
    assert can_overlap([parse_device(name) for name in names.split()]) == expected


def test_the_cores_of_this_machine_share_one_memory_pool() -> None:
    pools = [parse_device(name).memory_pool for name in ("cpu", "cpu:0", "cpu:1-2", "cuda:0", "cpu/8GiB")]
    assert pools == ["cpu", "cpu", "cpu", "cuda:0", "cpu/8GiB"]


CPUINFO = "processor\t: 0\nmodel name\t: Some Chip 9\ncpu MHz\t: {mhz}\nflags\t\t: fpu {flags} avx2 fma\n"


def test_a_cpu_is_identified_by_its_model_and_its_vector_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(devices, "CPUINFO", file)
    found = []
    for mhz, flags in (("2000", "sse2"), ("3000", "tsc sse2"), ("2000", "sse2 avx512f")):
        file.write_text(CPUINFO.format(mhz=mhz, flags=flags))
        assert cpu_model() == "Some Chip 9"
        found.append(cpu_features_digest())
    assert found[0] == found[1] != found[2]


def test_without_cpuinfo_the_architecture_is_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "CPUINFO", tmp_path / "missing")
    assert cpu_model()
    assert len(cpu_features_digest()) == 8


def test_a_device_of_a_ray_node_keeps_its_node_and_its_name_there() -> None:
    gpu, cpu = parse_device("ray:node-7.example/cuda:1"), parse_device(" ray:0/cpu:0-3 ")
    assert (gpu.node, gpu.local_name, gpu.kind, gpu.hypothetical) == ("node-7.example", "cuda:1", "cuda", False)
    assert (cpu.node, cpu.local_name, cpu.cores, cpu.memory_pool) == ("0", "cpu:0-3", (0, 1, 2, 3), "ray:0/cpu")
    for wrong in ("ray:", "ray:0", "ray:/cpu", "ray:0/", "ray:0/ray:1/cpu", "ray:0/cuda/sm86/24GiB", "ray:0/tpu"):
        with pytest.raises(BadSetting, match="--devices"):
            parse_device(wrong)


def test_cpus_of_different_nodes_run_in_parallel_and_stages_on_one_node_do_not() -> None:
    named = lambda *names: [parse_device(name) for name in names]  # noqa: E731
    assert can_overlap(named("ray:0/cpu", "ray:1/cpu", "cpu"))
    assert can_overlap(named("ray:0/cpu:0", "ray:1/cpu:0"))
    assert not can_overlap(named("ray:0/cpu", "ray:0/cpu", "cpu"))
    assert not can_overlap(named("ray:0/cpu:0", "ray:0/cpu:0-1"))
    assert not can_overlap(named("ray:0/cuda:0", "cpu"))
