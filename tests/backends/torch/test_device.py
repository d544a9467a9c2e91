"""Which devices there are is asked of the machine; what is not there is refused with what is."""

from __future__ import annotations

import pytest
import torch

from onedraw.backends.torch.device import find_devices, hardware_name, pick_ops
from onedraw.errors import BadSetting
from onedraw.settings import default_cache_dir

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


def test_one_cpu_takes_what_it_needs_and_a_part_of_a_split_what_is_free() -> None:
    [alone] = find_devices(["cpu"])
    assert (alone.name, alone.memory) == ("cpu", None)
    pair = find_devices(["cpu", "cpu/2GiB"])
    assert pair[0].memory is None or pair[0].memory > 2**20
    assert (pair[1].name, pair[1].memory) == ("cpu", 2 * 2**30)


@without_cuda
def test_auto_is_the_cpu_where_there_is_nothing_else() -> None:
    assert [device.name for device in find_devices(["auto"])] == ["cpu"]


@without_cuda
@pytest.mark.parametrize(
    ("name", "said"),
    [("cuda:0", "finds no CUDA device"), ("cuda/sm86/24GiB", "only described"), ("tpu", "is not a device"), ("hip", "finds no")],
)
def test_what_is_not_there_is_refused(name: str, said: str) -> None:
    with pytest.raises(BadSetting, match=said):
        find_devices([name])


def test_kernels_serve_float32_streams_alone() -> None:
    assert pick_ops("cpu", "f32", cache=default_cache_dir(), activation="bf16").name == "cpu-torch"
    assert pick_ops("cpu", "bf16", cache=default_cache_dir(), activation="f32").name == "cpu-torch"


def test_hardware_has_a_name() -> None:
    assert hardware_name(torch.device("cpu"))
