"""Fixtures shared by tests of several packages, and hypothesis profiles."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from onedraw.settings import default_cache_dir

# No deadlines: the machine may be busy. By default examples are the same in every run, so that a failure comes from the change
# under test; `make test-long` draws new examples, and each failure it finds is added as an explicit example.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeating", PATIENT, derandomize=True)
settings.register_profile("searching", PATIENT, derandomize=False)
settings.load_profile("repeating")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file, downloaded into the cache if missing. For tests marked `weights`."""
    from onedraw.checkpoints.download import resolve_model

    return Path(resolve_model("smollm2", default_cache_dir()))


@pytest.fixture(scope="session")
def tiny_tokenizer_path() -> Path:
    """A folder with a byte-level BPE tokenizer of 1,024 tokens and a ChatML template."""
    return Path(__file__).parent / "fixtures" / "tiny_tokenizer"


@pytest.fixture
def snapshot_warnings() -> Iterator[list[str]]:
    """Warnings about snapshots on disk, even if the command line silenced parent loggers."""
    messages: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    listener, logger = Listener(logging.WARNING), logging.getLogger("onedraw.snapshots")
    before = logger.level, logger.disabled
    logger.setLevel(logging.WARNING)  # a server of another test may have silenced parent loggers
    logger.disabled = False
    logger.addHandler(listener)
    yield messages
    logger.removeHandler(listener)
    logger.setLevel(before[0])
    logger.disabled = before[1]
