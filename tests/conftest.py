"""What tests of several packages share."""

from __future__ import annotations

from pathlib import Path

import pytest

from onedraw.settings import default_cache_dir


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file, pulled into the cache when it is not there. For tests marked `weights`."""
    from onedraw.checkpoints.pull import resolve

    return Path(resolve("smollm2", default_cache_dir()))


@pytest.fixture(scope="session")
def tiny_tokenizer_path() -> Path:
    """A folder with a byte-level BPE tokenizer of 1,024 tokens and a ChatML template."""
    return Path(__file__).parent / "fixtures" / "tiny_tokenizer"
