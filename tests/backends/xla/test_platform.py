"""Which devices the xla backend takes, and what is said where there are none, or no jax at all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from onedraw.assemble import export_graphs, open_door, xla_settings
from onedraw.backends.devices import parse_device
from onedraw.errors import BadSetting
from onedraw.settings import Settings


def test_without_jax_the_flag_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    said = r'--backend xla needs jax, which is not installed here: pip install "onedraw\[xla\]"'
    with pytest.raises(BadSetting, match=said):
        open_door(Settings(backend="xla"))
    with pytest.raises(BadSetting, match=said):
        export_graphs(Settings(backend="xla"), tmp_path, print)


def test_devices_are_named_by_their_platform() -> None:
    pytest.importorskip("jax", reason='--backend xla needs jax: pip install "onedraw[xla]"')
    from onedraw.backends.xla.platform import find_devices, resolve_platform

    planned, found = find_devices("cpu", ["auto"])
    assert [device.name for device in planned] == ["cpu:0"]
    assert found[0].platform == "cpu"
    assert resolve_platform("tpu") == "tpu"
    with pytest.raises(BadSetting, match="--xla-platform tpu: this jax finds no such device"):
        find_devices("tpu", ["auto"])
    with pytest.raises(BadSetting, match=r"--device cuda:0: with --xla-platform cpu a device is auto, cpu or cpu:0"):
        find_devices("cpu", ["cuda:0"])
    with pytest.raises(BadSetting, match="--device cpu:99: this platform has"):
        find_devices("cpu", ["cpu:99"])


@pytest.mark.parametrize(
    ("device", "asked", "taken"),
    [("cpu", "auto", "f32"), ("cuda/sm90/80GiB", "auto", "bf16"), ("cuda/sm70/16GiB", "auto", "f32"), ("cpu", "bf16", "bf16")],
)
def test_weights_are_never_packed_there(device: str, asked: str, taken: str) -> None:
    assert xla_settings(Settings(backend="xla", dtype=asked), [parse_device(device)]).dtype == taken
