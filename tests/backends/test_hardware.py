"""The name of a processor follows its model and its vector instructions, and nothing that changes between two starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from onedraw.backends import devices as hardware
from onedraw.backends.devices import cpu_features_digest, cpu_model

SAID = "processor\t: 0\nmodel name\t: Some Chip 9\ncpu MHz\t: {mhz}\nflags\t\t: fpu {flags} avx2 fma\n"


def test_a_processor_is_named_by_its_model_and_its_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(hardware, "CPUINFO", file)
    found = []
    for mhz, flags in (("2000", "sse2"), ("3000", "tsc sse2"), ("2000", "sse2 avx512f")):
        file.write_text(SAID.format(mhz=mhz, flags=flags))
        assert cpu_model() == "Some Chip 9"
        found.append(cpu_features_digest())
    assert found[0] == found[1] != found[2]


def test_where_the_system_does_not_say_the_architecture_is_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "missing")
    assert cpu_model()
    assert len(cpu_features_digest()) == 8
