"""jax as this backend uses it: 64-bit integers for the law, named devices, compiled programs kept on disk.

In: a platform's name and a folder. Out: jax devices, or an error that says what there is. jax is imported here first.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile

import jax
import jax.numpy as jnp

from onedraw.backends.devices import Device, cpu_features_digest, cpu_model
from onedraw.errors import BadSetting

# Masses, checksums and ranked tokens are 64-bit integers (see sampling/law.py).
jax.config.update("jax_enable_x64", True)

Array = jax.Array
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
# Where a number is rounded to bf16 it is rounded, whatever the compiler joins: else bits follow what it chose to join.
OPTIONS = {"xla_allow_excess_precision": False}


def resolve_platform(asked: str) -> str:
    """cpu, cuda or tpu; auto is what jax would take by itself."""
    if asked != "auto":
        return asked
    found = _default_devices()[0].platform
    return {"gpu": "cuda"}.get(found, found)


def find_devices(platform: str, names: Sequence[str]) -> tuple[list[Device], list[jax.Device]]:
    """Devices of a platform by their numbers (`auto`, `cpu`, `cuda:1`): what a plan knows of them, and jax's own.

    A TPU is planned like a recent CUDA device: both compute in bf16.
    """
    try:
        there = jax.devices({"cuda": "gpu"}.get(platform, platform))
    except (RuntimeError, AssertionError):
        kinds = sorted({device.platform for device in _default_devices()})
        raise BadSetting(
            f"--xla-platform {platform}: this jax finds no such device, only {', '.join(kinds)}; "
            'for CUDA install "jax[cuda13]", for a TPU "jax[tpu]"'
        ) from None
    found = [there[_number(name, platform, len(there))] for name in names]
    return [_planned(device, platform, there.index(device)) for device in found], found


def _default_devices() -> list[jax.Device]:
    """What jax takes by itself, which JAX_PLATFORMS may narrow to nothing."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError):
        asked = os.environ.get("JAX_PLATFORMS")
        named = f"JAX_PLATFORMS={asked}" if asked else "--backend xla"
        raise BadSetting(
            f"{named}: this jax finds no such device; leave JAX_PLATFORMS out or set it to cpu; "
            'for CUDA install "jax[cuda13]", for a TPU "jax[tpu]"'
        ) from None


def _number(name: str, platform: str, count: int) -> int:
    base, _, number = name.partition(":")
    if base not in ("auto", platform) or (number and not (number.isascii() and number.isdecimal())):
        raise BadSetting(f"--device {name}: with --xla-platform {platform} a device is auto, {platform} or {platform}:0 …")
    if int(number or 0) >= count:
        raise BadSetting(f"--device {name}: this platform has {count} of them, counted from 0")
    return int(number or 0)


def _planned(device: jax.Device, platform: str, number: int) -> Device:
    name = f"{platform}:{number}"
    if platform == "cpu":
        return Device(name, "cpu")
    stats = device.memory_stats() or {}
    free = stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None
    capability = str(getattr(device, "compute_capability", "8.0")).replace(".", "")
    return Device(name, "cuda", f"sm{capability}", free)


def keep_compiled(folder: Path) -> str:
    """Programs compiled from now on are kept in a folder and found there by the next start. Says so, or why they are not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return f"programs are not kept: {error.strerror or error}: {folder}; --cache-dir names another place"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return f"compiled programs are kept in {folder}"


def hardware_name(device: jax.Device) -> str:
    """The kind of chip behind a device. jax calls every CPU `cpu`, so the system is asked which one it is."""
    if device.platform == "cpu":
        return f"cpu {cpu_model()} (vectors {cpu_features_digest()})"
    return f"{device.platform} {device.device_kind}"
