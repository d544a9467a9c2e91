"""Makes an xla backend from a model folder, for tests. Importing it skips the module if jax is not installed."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax", reason='--backend xla needs jax: pip install "onedraw[xla]"')

import jax

from onedraw.backends.xla.backend import XlaBackend, XlaStageDevice
from onedraw.backends.xla.platform import keep_compiled
from onedraw.checkpoints.open import open_checkpoint
from onedraw.models.registry import read_model_info

jax.config.update("jax_num_cpu_devices", 8)  # virtual devices for splits; must be set before jax lists its devices
COMPILED = tempfile.TemporaryDirectory()  # shared by all tests of a process
keep_compiled(Path(COMPILED.name))

SIZES: dict[str, Any] = {"lanes": 4, "pages": 200, "page_size": 8, "max_context": 400, "step_tokens": 192, "checkpoints": 12}


def xla_backend(path: Path, *, cuts: tuple[int, ...] = (), **changes: Any) -> XlaBackend:
    """On the CPU, in one stage or cut before the layers `cuts`, each stage on the next of jax's CPU devices."""
    info = read_model_info(open_checkpoint(path))
    devices = jax.devices("cpu")
    stops = (*cuts, None)
    stage_devices = [XlaStageDevice(devices[number % len(devices)], stop) for number, stop in enumerate(stops)]
    return XlaBackend(info.spec, info.weights, stage_devices=stage_devices, **{"warm": False, "check": False, **SIZES, **changes})
