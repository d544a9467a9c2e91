"""The Python API: `onedraw.load(model, …)` returns a running LLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onedraw.llm.llm import LLM
from onedraw.settings import Settings


def load(model: str = "smollm2", *, progress: Callable[[str], None] | None = None, **settings: Any) -> LLM:
    """Load a model and start its engine. Settings are named as the flags of `onedraw serve`: max_context=4096, dtype="f32" …"""
    from onedraw.build.llm import build_llm

    return build_llm(Settings.of(model=model, **settings), progress)
