"""Frozen settings of a running engine, and the only reader of environment variables.

In: flags (already typed) and the environment. Out: Settings. Only `cli` and `assemble` read it; everybody else
receives values. Each field is a serving flag: `max_context` is `--max-context`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from onedraw.errors import BadSetting

MOST_THREADS = 1024
MOST_LANES = 65_536  # sequences at once, far beyond what any machine runs
DTYPES = ("auto", "packed", "f32", "bf16", "f16")
ACTIVATION_DTYPES = ("auto", "f32", "bf16", "f16")
KV_DTYPES = ("auto", "f32", "bf16", "f16", "fp8", "int8")
CpuActivations = Literal["int8", "f32"]
Overlap = Literal["auto", "on", "off"]
BackendName = Literal["torch", "xla", "fake"]
XlaPlatform = Literal["auto", "cpu", "cuda", "tpu"]
DRAFT_WORDS = ("auto", "none", "ngram", "prediction", "mtp")  # what --draft knows beside paths


ENVIRONMENT: tuple[tuple[str, str, Callable[[str], Any]], ...] = (
    ("cache_dir", "ONEDRAW_CACHE", Path),
    ("activation_dtype", "ONEDRAW_ACTIVATION_DTYPE", str),
    ("kv_dtype", "ONEDRAW_KV_DTYPE", str),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run a model. None means: chosen from the model and the machine."""

    model: str = "smollm2"
    served_name: str | None = None
    backend: BackendName = "torch"
    xla_platform: XlaPlatform = "auto"  # what --backend xla computes on
    device: str = "auto"  # auto, cpu, cuda, cuda:0 …
    devices: str | None = None  # instead of device: several, as in cuda:0,cuda:1,cpu
    split: str = "auto"  # layers of each device: auto, 24,8 or 0.75,0.25
    overlap: Overlap = "auto"  # whether stages work on several turns at once
    ahead: Overlap = "auto"  # whether a turn is sent off before the tokens of the one before it are known
    dtype: str = "auto"  # weights and products
    cpu_activations: CpuActivations = "int8"  # what packed weights are multiplied with on a CPU
    activation_dtype: str = "auto"  # the residual stream, and what crosses between devices
    max_context: int | None = None  # tokens of one sequence, prompt and reply
    max_batch: int = 8  # sequences running at once
    turn_tokens: int = 512  # tokens computed in one turn
    page_size: int = 16  # positions per page
    kv_memory: int | None = None  # bytes of key/value pages
    kv_dtype: str = "auto"  # of keys and values in their pages
    state_dtype: str = "f32"  # of recurrent states
    draft_memory: int | None = None  # bytes of the rollback buffer of recurrent layers
    checkpoint_memory: int | None = None  # bytes of prompts' states and last logits
    threads: int | None = None  # CPU threads
    prefix_cache: bool = True
    queue_limit: int = 256  # requests waiting before new ones get 429
    draft: tuple[str, ...] = ("auto",)  # who guesses: auto, none, ngram, prediction, mtp, a path of a drafter or draft model
    draft_tokens: int | None = None  # drafts per row and turn; None: as many as pay off
    tree_budget: int = 0  # nodes of a draft tree; 0: a chain
    trace_verify: bool = False  # print every acceptance walk
    self_check: bool = True  # compare 1 row with 2, 5, 16 and 64 at start
    cache_dir: Path | None = None  # where pulled models and snapshots are kept
    cache_budget: int | None = None  # bytes of snapshots on disk; None: none are kept
    snapshot_dir: Path | None = None  # where they are kept; None: in the cache folder

    def __post_init__(self) -> None:
        if self.backend not in get_args(BackendName):
            raise BadSetting(f"--backend: {self.backend!r} is not one of {', '.join(get_args(BackendName))}")
        if self.xla_platform not in get_args(XlaPlatform):
            raise BadSetting(f"--xla-platform: {self.xla_platform!r} is not one of {', '.join(get_args(XlaPlatform))}")
        if self.dtype not in DTYPES:
            raise BadSetting(f"--dtype: {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.cpu_activations not in get_args(CpuActivations):
            raise BadSetting(f"--cpu-activations: {self.cpu_activations!r} is not one of int8, f32")
        if self.activation_dtype not in ACTIVATION_DTYPES:
            raise BadSetting(f"--activation-dtype: {self.activation_dtype!r} is not one of {', '.join(ACTIVATION_DTYPES)}")
        if self.kv_dtype not in KV_DTYPES:
            raise BadSetting(f"--kv-dtype: {self.kv_dtype!r} is not one of {', '.join(KV_DTYPES)}")
        if self.devices is not None and self.device != "auto":
            raise BadSetting("--devices and --device both say where the model runs; give one of them")
        if self.overlap not in get_args(Overlap):
            raise BadSetting(f"--overlap: {self.overlap!r} is not one of auto, on, off")
        if self.ahead not in get_args(Overlap):
            raise BadSetting(f"--ahead: {self.ahead!r} is not one of auto, on, off")
        if self.split != "auto" and self.devices is None:
            raise BadSetting("--split: says how layers are divided among --devices, which was not given")
        if self.overlap == "on" and self.backend != "xla" and len(self.device_names) < 2:
            raise BadSetting("--overlap on: several turns at once need several --devices, and one was given")
        if self.snapshot_dir is not None and self.cache_budget is None:
            raise BadSetting("--snapshot-dir: snapshots are kept where --cache-budget says how many bytes; give it too")
        if self.backend == "fake" and self.devices is not None:
            raise BadSetting("--devices: the fake backend runs on none")
        for name, low in (("max_batch", 1), ("turn_tokens", 1), ("page_size", 1), ("queue_limit", 1)):
            if getattr(self, name) < low:
                raise BadSetting(f"--{name.replace('_', '-')}: must be at least {low}, not {getattr(self, name)}")
        for name in ("max_context", "kv_memory", "threads", "draft_memory"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadSetting(f"--{name.replace('_', '-')}: must be at least 1, not {value}")
        if self.checkpoint_memory is not None and self.checkpoint_memory < 0:
            raise BadSetting(f"--checkpoint-memory: must be 0 (none) or more, not {self.checkpoint_memory}")
        if self.cache_budget is not None and self.cache_budget < 1:
            raise BadSetting(f"--cache-budget: must be at least 1 byte, not {self.cache_budget}; without it nothing is kept")
        if self.cache_budget is not None and (not self.prefix_cache or self.checkpoint_memory == 0):
            raise BadSetting("--cache-budget: snapshots are made of checkpoints, and those were switched off")
        if self.max_batch > MOST_LANES:
            raise BadSetting(f"--max-batch: must be at most {MOST_LANES}, not {self.max_batch}")
        if self.threads is not None and self.threads > MOST_THREADS:
            raise BadSetting(f"--threads: must be at most {MOST_THREADS}, not {self.threads}")
        if 64 % self.page_size:
            raise BadSetting(f"--page-size: must divide 64 (1, 2, 4, 8, 16, 32 or 64), not {self.page_size}")
        self._check_drafting()
        self._check_xla()

    def _check_xla(self) -> None:
        """What the xla backend does not honour is refused by name."""
        if self.backend != "xla":
            if self.xla_platform != "auto":
                raise BadSetting("--xla-platform: says what --backend xla computes on, and another backend was asked for")
            return
        if self.dtype in ("packed", "f16"):
            raise BadSetting(f"--dtype {self.dtype}: the xla backend computes in f32 or bf16")
        if self.activation_dtype == "f16":
            raise BadSetting("--activation-dtype f16: the xla backend computes in f32 or bf16")
        if self.kv_dtype != "auto":
            raise BadSetting("--kv-dtype: the xla backend keeps keys and values in the dtype of its products; leave it at auto")
        if self.threads is not None:
            raise BadSetting("--threads: XLA takes all processors it may use; start it under taskset to give it fewer")
        if self.overlap == "on":
            raise BadSetting("--overlap on: stages of the xla backend work on one turn at a time")
        if self.ahead == "on":
            raise BadSetting("--ahead on: the xla backend computes a turn before it takes the next")
        named = [entry for entry in self.draft if entry not in ("auto", "none", "ngram", "prediction")]
        if named:
            raise BadSetting(f"--draft {named[0]}: the xla backend runs no drafter; auto, none, ngram and prediction work there")

    def _check_drafting(self) -> None:
        for entry in self.draft:
            if entry not in DRAFT_WORDS and not entry.startswith("random:") and not (entry and Path(entry).exists()):
                raise BadSetting(
                    f"--draft: {entry!r} is neither {', '.join(DRAFT_WORDS)} nor the path of a drafter or draft model"
                )
        if not self.draft or ("none" in self.draft and len(set(self.draft)) > 1):
            raise BadSetting("--draft: none stands alone, and is what to say for no drafts at all")
        if self.draft_tokens is not None and self.draft_tokens < 1:
            raise BadSetting(f"--draft-tokens: must be at least 1, or auto, not {self.draft_tokens}; --draft none drafts nothing")
        if self.tree_budget < 0:
            raise BadSetting(f"--tree-budget: must be 0 (a chain) or more nodes, not {self.tree_budget}")

    def with_environment(self, environment: Mapping[str, str] = os.environ, *, given: Collection[str] = ()) -> Settings:
        """ONEDRAW_CACHE sets cache_dir, ONEDRAW_ACTIVATION_DTYPE activation_dtype and ONEDRAW_KV_DTYPE kv_dtype where no flag
        did: those that did are `given`."""
        found = self
        for name, variable, read in ENVIRONMENT:
            if name in given or getattr(self, name) not in (None, "auto") or not environment.get(variable):
                continue
            try:
                found = replace(found, **{name: read(environment[variable])})
            except BadSetting as error:
                raise BadSetting(f"{variable} is taken for a flag. {error}") from None
        return found

    @property
    def device_names(self) -> list[str]:
        return [self.device] if self.devices is None else [name.strip() for name in self.devices.split(",")]

    @classmethod
    def of(cls, **flags: Any) -> Settings:
        """Settings from keyword flags; None means default; an unknown name is an error that lists the known ones."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(flags) - known)
        if unknown:
            raise BadSetting(f"unknown setting {unknown[0]!r}; known: {', '.join(sorted(known))}")
        if isinstance(flags.get("draft"), str):
            flags["draft"] = (flags["draft"],)
        for name in ("cache_dir", "snapshot_dir"):
            if isinstance(flags.get(name), str):
                flags[name] = Path(flags[name])
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in flags.items() if v is not None}
        return cls(**given).with_environment(given=given)


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
    except (ValueError, OverflowError):
        raise BadSetting(f"not a size: {text!r}; write for example 512MiB or 2GiB") from None
