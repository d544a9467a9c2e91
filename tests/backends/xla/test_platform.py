"""Devices of the xla backend, and errors without such a device or without jax."""

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


def test_without_jax_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    message = r'--backend xla needs jax, which is not installed: pip install "onedraw\[xla\]"'
    with pytest.raises(BadSetting, match=message):
        build_llm(Settings(backend="xla"))
    with pytest.raises(BadSetting, match=message):
        export_graphs(Settings(backend="xla"), tmp_path, print)


def test_devices_are_found_by_platform_and_number() -> None:
    pytest.importorskip("jax", reason='--backend xla needs jax: pip install "onedraw[xla]"')
    from onedraw.backends.xla.platform import find_devices, resolve_platform

    planned, found = find_devices("cpu", ["auto"])
    assert [device.name for device in planned] == ["cpu:0"]
    assert found[0].platform == "cpu"
    assert resolve_platform("tpu") == "tpu"
    with pytest.raises(BadSetting, match="--xla-platform tpu: jax finds no such device"):
        find_devices("tpu", ["auto"])
    with pytest.raises(BadSetting, match=r"--device cuda:0: with --xla-platform cpu a device is auto, cpu or cpu:0"):
        find_devices("cpu", ["cuda:0"])
    with pytest.raises(BadSetting, match="--device cpu:99: this platform has"):
        find_devices("cpu", ["cpu:99"])


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [("cpu", "auto", "f32"), ("cuda/sm90/80GiB", "auto", "bf16"), ("cuda/sm70/16GiB", "auto", "f32"), ("cpu", "bf16", "bf16")],
)
def test_weights_are_never_packed(device: str, dtype: str, expected: str) -> None:
    assert xla_settings(Settings(backend="xla", dtype=dtype), [parse_device(device)]).dtype == expected


@pytest.mark.parametrize(
    ("device", "dtype", "activation", "expected"),
    [
        ("cuda/sm70/16GiB", "bf16", "auto", "f32"),
        ("cuda/sm75/16GiB", "auto", "auto", "f32"),
        ("cuda/sm75/16GiB", "bf16", "bf16", "bf16"),
        ("cuda/sm90/80GiB", "auto", "auto", "bf16"),
        ("cuda/sm90/80GiB", "f32", "auto", "f32"),
    ],
)
def test_the_residual_stream_is_never_f16(device: str, dtype: str, activation: str, expected: str) -> None:
    settings = Settings(backend="xla", dtype=dtype, activation_dtype=activation)
    assert xla_settings(settings, [parse_device(device)]).activation_dtype == expected


def test_an_unwritable_compilation_cache_is_reported_and_not_an_error(tmp_path: Path) -> None:
    pytest.importorskip("jax", reason='--backend xla needs jax: pip install "onedraw[xla]"')
    from onedraw.backends.xla.platform import keep_compiled

    (tmp_path / "file").write_text("")
    assert keep_compiled(tmp_path / "file" / "xla").startswith("compiled programs are not cached: Not a directory: ")


def test_jax_platforms_without_a_device_is_named_in_the_error() -> None:
    """In a subprocess, because jax reads the variable only once."""
    pytest.importorskip("jax", reason='--backend xla needs jax: pip install "onedraw[xla]"')
    script = """
from onedraw.backends.xla.platform import find_devices, resolve_platform
from onedraw.errors import BadSetting
for call in (lambda: resolve_platform("auto"), lambda: find_devices("cpu", ["auto"])):
    try:
        call()
    except BadSetting as error:
        print(error)
"""
    environment = {**os.environ, "JAX_PLATFORMS": "tpu"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.count("JAX_PLATFORMS=tpu: jax finds no such device; unset JAX_PLATFORMS") == 2
