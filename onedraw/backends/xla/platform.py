"""jax configuration and devices: 64-bit integers, named devices, the compilation cache on disk.

In: a platform's name and a folder. Out: jax devices, or an error that names the available platforms. This module must be imported
before other modules use jax, because it sets jax's configuration.
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

# The sampling rule needs 64-bit integers (probability masses and checksums, see sampling/law.py).
jax.config.update("jax_enable_x64", True)

Array = jax.Array
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
# By default XLA may skip roundings to bf16 inside fused operations, and then results depend on its choice of fusions.
OPTIONS = {"xla_allow_excess_precision": False}


def resolve_platform(requested: str) -> str:
    """The platform's name: cpu, cuda or tpu. `auto` is resolved to jax's default platform."""
    if requested != "auto":
        return requested
    found = _default_devices()[0].platform
    return {"gpu": "cuda"}.get(found, found)


def find_devices(platform: str, names: Sequence[str]) -> tuple[list[Device], list[jax.Device]]:
    """Devices of a platform by name (`auto`, `cpu`, `cuda:1`): as Devices for planning, and as jax devices.

    A TPU is planned like a recent CUDA device, because both compute in bf16.
    """
    try:
        available = jax.devices({"cuda": "gpu"}.get(platform, platform))
    except (RuntimeError, AssertionError):
        kinds = sorted({device.platform for device in _default_devices()})
        raise BadSetting(
            f"--xla-platform {platform}: jax finds no such device, only {', '.join(kinds)}; "
            'for CUDA install "jax[cuda13]", for a TPU "jax[tpu]"'
        ) from None
    found = [available[_number(name, platform, len(available))] for name in names]
    return [_as_device(device, platform, available.index(device)) for device in found], found


def _default_devices() -> list[jax.Device]:
    """The devices of jax's default platform; BadSetting if JAX_PLATFORMS excludes them all."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError):
        platforms = os.environ.get("JAX_PLATFORMS")
        named = f"JAX_PLATFORMS={platforms}" if platforms else "--backend xla"
        raise BadSetting(
            f"{named}: jax finds no such device; unset JAX_PLATFORMS or set it to cpu; "
            'for CUDA install "jax[cuda13]", for a TPU "jax[tpu]"'
        ) from None


def _number(name: str, platform: str, count: int) -> int:
    base, _, number = name.partition(":")
    if base not in ("auto", platform) or (number and not (number.isascii() and number.isdecimal())):
        raise BadSetting(f"--device {name}: with --xla-platform {platform} a device is auto, {platform} or {platform}:0 …")
    if int(number or 0) >= count:
        raise BadSetting(f"--device {name}: this platform has {count} devices, counted from 0")
    return int(number or 0)


def _as_device(device: jax.Device, platform: str, number: int) -> Device:
    name = f"{platform}:{number}"
    if platform == "cpu":
        return Device(name, "cpu")
    stats = device.memory_stats() or {}
    free = stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None
    capability = str(getattr(device, "compute_capability", "8.0")).replace(".", "")
    return Device(name, "cuda", f"sm{capability}", free)


def keep_compiled(folder: Path) -> str:
    """Cache compiled programs in this folder for the next start, if it is writable. Returns a line for the log that says so or
    why not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return f"compiled programs are not cached: {error.strerror or error}: {folder}; use another --cache-dir"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return f"compiled programs are cached in {folder}"


def hardware_name(device: jax.Device) -> str:
    """The name of a device's chip, for fingerprints. jax calls every CPU `cpu`, so a CPU's model is read from the system."""
    if device.platform == "cpu":
        return f"cpu {cpu_model()} (vectors {cpu_features_digest()})"
    return f"{device.platform} {device.device_kind}"
