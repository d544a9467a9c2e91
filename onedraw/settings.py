"""Frozen settings of a running engine, and the only reader of environment variables.

In: flags (already typed) and the environment. Out: Settings. Only `cli` and `assemble` read it; everybody else
receives values. Each field is a serving flag: `max_context` is `--max-context`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from onedraw.errors import BadSetting

DTYPES = ("auto", "f32", "bf16", "f16")


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run a model. None means: chosen from the model and the machine."""

    model: str = "smollm2"
    served_name: str | None = None
    backend: Literal["torch", "fake"] = "torch"
    device: str = "auto"  # auto, cpu, cuda, cuda:0 …
    dtype: str = "auto"  # weights and products
    max_context: int | None = None  # tokens of one sequence, prompt and reply
    max_batch: int = 8  # sequences running at once
    turn_tokens: int = 512  # tokens computed in one turn
    page_size: int = 16  # positions per page
    kv_memory: int | None = None  # bytes of key/value pages
    threads: int | None = None  # CPU threads
    prefix_cache: bool = True
    queue_limit: int = 256  # requests waiting before new ones get 429
    self_check: bool = True  # compare 1 row with 2, 5, 16 and 64 at start
    cache_dir: Path | None = None  # where pulled models are kept

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise BadSetting(f"--dtype: {self.dtype!r} is not one of {', '.join(DTYPES)}")
        for name, low in (("max_batch", 1), ("turn_tokens", 1), ("page_size", 1), ("queue_limit", 1)):
            if getattr(self, name) < low:
                raise BadSetting(f"--{name.replace('_', '-')}: must be at least {low}, not {getattr(self, name)}")
        for name in ("max_context", "kv_memory", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadSetting(f"--{name.replace('_', '-')}: must be at least 1, not {value}")
        if 64 % self.page_size:
            raise BadSetting(f"--page-size: must divide 64 (1, 2, 4, 8, 16, 32 or 64), not {self.page_size}")

    def with_environment(self, environment: Mapping[str, str] = os.environ) -> Settings:
        """ONEDRAW_CACHE sets cache_dir where no flag did."""
        if self.cache_dir is None and environment.get("ONEDRAW_CACHE"):
            return replace(self, cache_dir=Path(environment["ONEDRAW_CACHE"]))
        return self

    @classmethod
    def of(cls, **flags: Any) -> Settings:
        """Settings from keyword flags; None means default; an unknown name is an error that lists the known ones."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(flags) - known)
        if unknown:
            raise BadSetting(f"unknown setting {unknown[0]!r}; known: {', '.join(sorted(known))}")
        return cls(**{k: v for k, v in flags.items() if v is not None}).with_environment()


def default_cache_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """The user's cache folder: ONEDRAW_CACHE, else XDG_CACHE_HOME/onedraw, else ~/.cache/onedraw."""
    if environment.get("ONEDRAW_CACHE"):
        return Path(environment["ONEDRAW_CACHE"])
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onedraw"


def size_in_bytes(text: str) -> int:
    """'512MiB', '2G', '1.5 GiB', '4096' → bytes. K, M, G and T are powers of 1024."""
    units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    cleaned = text.strip().upper().removesuffix("IB").removesuffix("B").strip()
    unit = cleaned[-1:] if cleaned[-1:] in units and cleaned[-1:] else ""
    try:
        return int(float(cleaned.removesuffix(unit)) * units[unit])
    except ValueError:
        raise BadSetting(f"not a size: {text!r}; write for example 512MiB or 2GiB") from None
