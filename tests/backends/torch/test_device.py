"""Devices are listed from the machine; a device that does not exist is refused with the list of those that do."""

from __future__ import annotations

import pytest
import torch

from onedraw.backends.torch.device import find_devices, hardware_name, pick_ops
from onedraw.errors import BadSetting
from onedraw.settings import default_cache_dir

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


def test_one_cpu_has_no_memory_limit_and_a_cpu_of_a_split_has_its_free_memory() -> None:
    [alone] = find_devices(["cpu"])
    assert (alone.name, alone.memory) == ("cpu", None)
    pair = find_devices(["cpu", "cpu/2GiB"])
    assert pair[0].memory is None or pair[0].memory > 2**20
    assert (pair[1].name, pair[1].memory) == ("cpu", 2 * 2**30)


@without_cuda
def test_auto_is_the_cpu_if_there_is_no_accelerator() -> None:
    assert [device.name for device in find_devices(["auto"])] == ["cpu"]


@without_cuda
@pytest.mark.parametrize(
    ("name", "message"),
    [("cuda:0", "finds no CUDA device"), ("cuda/sm86/24GiB", "only described"), ("tpu", "is not a device"), ("hip", "finds no")],
)
def test_a_device_that_does_not_exist_is_refused(name: str, message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        find_devices([name])


def test_the_cpu_kernels_are_used_for_float32_products_only() -> None:
    assert pick_ops("cpu", "bf16", cache=default_cache_dir()).name == "cpu-torch"


def test_the_hardware_of_a_device_has_a_name() -> None:
    assert hardware_name(torch.device("cpu"))
