"""Writes the tiny checkpoints of the device tests to build/tiny: `python -m tests.device.make_families`."""

from __future__ import annotations

from pathlib import Path

from tests.device.test_families import NAMES
from tests.support import tiny

if __name__ == "__main__":
    for name in NAMES:
        tiny.write_safetensors(name, Path("build/tiny") / name)
