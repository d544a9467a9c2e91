"""What tests of several packages share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from onedraw.settings import default_cache_dir

# A busy machine is no finding. What is drawn is the same every time, so that a change is judged by what it changes; `make
# test-long` draws anew, and what it finds is written down as an example of its own.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeating", PATIENT, derandomize=True)
settings.register_profile("searching", PATIENT, derandomize=False)
settings.load_profile("repeating")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file, pulled into the cache when it is not there. For tests marked `weights`."""
    from onedraw.checkpoints.download import resolve_model

    return Path(resolve_model("smollm2", default_cache_dir()))


@pytest.fixture(scope="session")
def tiny_tokenizer_path() -> Path:
    """A folder with a byte-level BPE tokenizer of 1,024 tokens and a ChatML template."""
    return Path(__file__).parent / "fixtures" / "tiny_tokenizer"


@pytest.fixture
def snapshot_warnings() -> Iterator[list[str]]:
    """What is said about snapshots on disk, whatever the command line did to the loggers above."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    listener, logger = Listener(logging.WARNING), logging.getLogger("onedraw.snapshots")
    before = logger.level, logger.disabled
    logger.setLevel(logging.WARNING)  # a server of another test may have made the loggers above silent
    logger.disabled = False
    logger.addHandler(listener)
    yield said
    logger.removeHandler(listener)
    logger.setLevel(before[0])
    logger.disabled = before[1]
