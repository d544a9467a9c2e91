"""Which devices the xla backend takes, and what is said where there are none, or no jax at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onedraw.backends.devices import parse_device
from onedraw.build.llm import build_llm
from onedraw.build.xla import export_graphs, xla_settings
from onedraw.errors import BadSetting
from onedraw.settings import Settings


def test_without_jax_the_flag_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    said = r'--backend xla needs jax, which is not installed: pip install "onedraw\[xla\]"'
    with pytest.raises(BadSetting, match=said):
        build_llm(Settings(backend="xla"))
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


@pytest.mark.parametrize(
    ("device", "dtype", "asked", "taken"),
    [
        ("cuda/sm70/16GiB", "bf16", "auto", "f32"),
        ("cuda/sm75/16GiB", "auto", "auto", "f32"),
        ("cuda/sm75/16GiB", "bf16", "bf16", "bf16"),
        ("cuda/sm90/80GiB", "auto", "auto", "bf16"),
        ("cuda/sm90/80GiB", "f32", "auto", "f32"),
    ],
)
def test_the_residual_stream_is_never_f16_there(device: str, dtype: str, asked: str, taken: str) -> None:
    settings = Settings(backend="xla", dtype=dtype, activation_dtype=asked)
    assert xla_settings(settings, [parse_device(device)]).activation_dtype == taken


def test_a_cache_that_cannot_be_written_is_said_and_no_reason_to_stop(tmp_path: Path) -> None:
    pytest.importorskip("jax", reason='--backend xla needs jax: pip install "onedraw[xla]"')
    from onedraw.backends.xla.platform import keep_compiled

    (tmp_path / "file").write_text("")
    assert keep_compiled(tmp_path / "file" / "xla").startswith("programs are not kept: Not a directory: ")


def test_a_platform_that_jax_was_told_of_and_does_not_find_is_named() -> None:
    """In a process of its own: jax reads the variable once."""
    pytest.importorskip("jax", reason='--backend xla needs jax: pip install "onedraw[xla]"')
    tried = """
from onedraw.backends.xla.platform import find_devices, resolve_platform
from onedraw.errors import BadSetting
for call in (lambda: resolve_platform("auto"), lambda: find_devices("cpu", ["auto"])):
    try:
        call()
    except BadSetting as error:
        print(error)
"""
    environment = {**os.environ, "JAX_PLATFORMS": "tpu"}
    done = subprocess.run([sys.executable, "-c", tried], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.count("JAX_PLATFORMS=tpu: this jax finds no such device; leave JAX_PLATFORMS out") == 2
