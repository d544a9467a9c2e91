"""Settings of a running model, and the only reader of environment variables.

Flags, which the command line has parsed, and the environment become frozen Settings. Packages that run a
whole model (such as `cli`, `build` and `training`) read Settings; the engine and the backends receive single values. Each field
is a flag: `max_context` is `--max-context`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from onedraw.errors import BadSetting

MAX_THREADS = 1024
MAX_LANES = 65_536  # the limit on --max-batch, far beyond what any machine can run
DTYPES = ("auto", "packed", "f32", "bf16", "f16")
ACTIVATION_DTYPES = ("auto", "f32", "bf16", "f16")
KV_DTYPES = ("auto", "f32", "bf16", "f16", "fp8", "int8", "int4")
CpuActivations = Literal["int8", "f32"]
SchedulingPolicy = Literal["fair", "fcfs"]
Overlap = Literal["auto", "on", "off"]
BackendName = Literal["torch", "xla", "fake"]
XlaPlatform = Literal["auto", "cpu", "cuda", "tpu"]
DRAFT_WORDS = ("auto", "none", "ngram", "prediction", "mtp")  # the values of --draft that name no file
HUB_ID = r"[\w-][\w.-]*/[\w-][\w.-]*(?<!\.gguf)"  # owner/name of a repository on the hub

# The defaults of --max-batch (DEFAULT_LANES) and --turn-tokens (DEFAULT_STEP_TOKENS) on CPUs and with the xla and fake backends.
# `build/fit_devices.py` has those for GPUs.
DEFAULT_LANES, DEFAULT_STEP_TOKENS = 8, 512

ENVIRONMENT: tuple[tuple[str, str, Callable[[str], Any]], ...] = (  # (setting, environment variable, parser of its value)
    ("cache_dir", "ONEDRAW_CACHE", Path),
    ("activation_dtype", "ONEDRAW_ACTIVATION_DTYPE", str),
    ("kv_dtype", "ONEDRAW_KV_DTYPE", str),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings with which a model is run. None means that the value follows from the model and the machine,
    if the field's comment says nothing else. `onedraw serve --help` and docs/cli.md explain each setting."""

    model: str = "smollm2"
    served_name: str | None = None
    backend: BackendName = "torch"
    xla_platform: XlaPlatform = "auto"
    device: str = "auto"  # auto, cpu, cuda, cuda:0 …
    devices: str | None = None  # the devices of a split, instead of `device`: cuda:0,cuda:1,cpu
    split: str = "auto"  # the division of layers among devices: auto, numbers (24,8) or shares (0.75,0.25)
    overlap: Overlap = "auto"  # whether the stages of a split work on different steps at the same time
    ahead: Overlap = "auto"  # async scheduling: whether a step is submitted before the previous step's tokens are known
    dtype: str = "auto"  # dtype of weights and matrix products
    cpu_activations: CpuActivations = "int8"  # dtype of activations in products with packed (quantized) weights on a CPU
    activation_dtype: str = "auto"  # dtype of the residual stream, also where it passes from device to device
    max_context: int | None = None  # most tokens of one sequence, prompt and reply together
    max_batch: int | None = None  # most sequences that run at once
    turn_tokens: int | None = None  # most tokens that one engine step computes
    step_seconds: float = 0.1  # how long a step may compute prompts while replies are generated; 0 means no limit
    page_size: int = 16  # positions per KV page
    kv_memory: int | None = None  # bytes of all KV pages
    kv_dtype: str = "auto"  # dtype of the KV cache
    state_dtype: str = "f32"  # dtype of recurrent state
    draft_memory: int | None = None  # bytes of the buffer from which recurrent layers undo rejected drafts
    checkpoint_memory: int | None = None  # bytes of checkpoints: recurrent state and last logits after prompt prefixes
    threads: int | None = None  # number of CPU threads that compute
    prefix_cache: bool = True  # whether prompts share the KV pages of common prefixes
    scheduling_policy: SchedulingPolicy = "fair"  # whether callers take turns, or the order of arrival decides
    queue_limit: int = 256  # requests that may wait before new ones are refused with 429
    # Drafters: auto, none, ngram, prediction, mtp, or the path or hub id of a drafter or draft model.
    draft: tuple[str, ...] = ("auto",)
    draft_tokens: int | None = None  # drafts per row and step; None adapts them to how many are kept
    tree_budget: int = 0  # nodes of a draft tree; 0 means that drafts form a chain
    trace_verify: bool = False  # whether to print how every draft was verified
    self_check: bool = True  # whether to check at start that a row alone and in batches of 2, 5, 16 and 64 has equal results
    cache_dir: Path | None = None  # folder for downloaded models and compiled kernels
    cache_budget: int | None = None  # most bytes of prompt snapshots on disk; None means no snapshots
    snapshot_dir: Path | None = None  # folder for snapshots; None means `snapshots` in the cache folder

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
            raise BadSetting("--devices and --device exclude each other; give one of them")
        if self.overlap not in get_args(Overlap):
            raise BadSetting(f"--overlap: {self.overlap!r} is not one of auto, on, off")
        if self.scheduling_policy not in get_args(SchedulingPolicy):
            raise BadSetting(f"--scheduling-policy: {self.scheduling_policy!r} is not one of fair, fcfs")
        if self.ahead not in get_args(Overlap):
            raise BadSetting(f"--ahead: {self.ahead!r} is not one of auto, on, off")
        if self.split != "auto" and self.devices is None:
            raise BadSetting("--split: needs --devices, among which it divides the layers")
        if self.overlap == "on" and self.backend != "xla" and len(self.device_names) < 2:
            raise BadSetting("--overlap on: needs several --devices")
        if self.snapshot_dir is not None and self.cache_budget is None:
            raise BadSetting("--snapshot-dir: needs --cache-budget, the maximum size of all snapshots")
        if self.backend == "fake" and self.devices is not None:
            raise BadSetting("--devices: the fake backend uses no device")
        for name in (
            "max_context",
            "max_batch",
            "turn_tokens",
            "page_size",
            "queue_limit",
            "kv_memory",
            "threads",
            "draft_memory",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadSetting(f"--{name.replace('_', '-')}: must be at least 1, not {value}")
        if self.checkpoint_memory is not None and self.checkpoint_memory < 0:
            raise BadSetting(f"--checkpoint-memory: must be 0 (none) or more, not {self.checkpoint_memory}")
        if self.cache_budget is not None and self.cache_budget < 1:
            raise BadSetting(f"--cache-budget: must be at least 1 byte, not {self.cache_budget}; omit it to keep no snapshots")
        if self.cache_budget is not None and (not self.prefix_cache or self.checkpoint_memory == 0):
            raise BadSetting("--cache-budget: snapshots need the prefix cache and a --checkpoint-memory above 0")
        if not 0.0 <= self.step_seconds < float("inf"):
            raise BadSetting(f"--step-seconds: must be 0 (no limit) or more, not {self.step_seconds}")
        if self.lanes > MAX_LANES:
            raise BadSetting(f"--max-batch: must be at most {MAX_LANES}, not {self.max_batch}")
        if self.threads is not None and self.threads > MAX_THREADS:
            raise BadSetting(f"--threads: must be at most {MAX_THREADS}, not {self.threads}")
        if 64 % self.page_size:
            raise BadSetting(f"--page-size: must divide 64 (1, 2, 4, 8, 16, 32 or 64), not {self.page_size}")
        self._check_drafting()
        self._check_xla()

    def _check_xla(self) -> None:
        """Refuse settings that the xla backend does not support."""
        if self.backend != "xla":
            if self.xla_platform != "auto":
                raise BadSetting("--xla-platform: needs --backend xla")
            return
        if self.dtype in ("packed", "f16"):
            raise BadSetting(f"--dtype {self.dtype}: the xla backend computes in f32 or bf16")
        if self.activation_dtype == "f16":
            raise BadSetting("--activation-dtype f16: the xla backend computes in f32 or bf16")
        if self.kv_dtype != "auto":
            raise BadSetting("--kv-dtype: the xla backend stores keys and values in the dtype of --dtype; leave it at auto")
        if self.threads is not None:
            raise BadSetting("--threads: XLA uses all available cores; limit them with taskset")
        if self.overlap == "on":
            raise BadSetting("--overlap on: the xla backend runs one step at a time")
        if self.ahead == "on":
            raise BadSetting("--ahead on: the xla backend does not support async scheduling")
        named = [entry for entry in self.draft if entry not in ("auto", "none", "ngram", "prediction")]
        if named:
            raise BadSetting(f"--draft {named[0]}: the xla backend runs no device drafters; use auto, none, ngram or prediction")

    def _check_drafting(self) -> None:
        for entry in self.draft:
            named = entry in DRAFT_WORDS or entry.startswith("random:") or re.fullmatch(HUB_ID, entry)
            if not named and not (entry and Path(entry).exists()):
                raise BadSetting(
                    f"--draft: {entry!r} is neither {', '.join(DRAFT_WORDS)} nor the path or hub id (owner/name) of a drafter or "
                    "draft model"
                )
        if not self.draft or ("none" in self.draft and len(set(self.draft)) > 1):
            raise BadSetting("--draft: give at least one value; none (no speculative decoding) cannot be combined with others")
        if self.draft_tokens is not None and self.draft_tokens < 1:
            raise BadSetting(
                f"--draft-tokens: must be at least 1, or auto, not {self.draft_tokens}; --draft none turns drafting off"
            )
        if self.tree_budget < 0:
            raise BadSetting(f"--tree-budget: must be 0 (a chain) or more nodes, not {self.tree_budget}")

    def with_environment(self, environment: Mapping[str, str] = os.environ, *, given: Collection[str] = ()) -> Settings:
        """Fill settings that are None or "auto" from the variables in ENVIRONMENT, except those that flags have set (`given`)."""
        found = self
        for name, variable, read in ENVIRONMENT:
            if name in given or getattr(self, name) not in (None, "auto") or not environment.get(variable):
                continue
            try:
                found = replace(found, **{name: read(environment[variable])})
            except BadSetting as error:
                raise BadSetting(f"environment variable {variable}: {error}") from None
        return found

    @property
    def lanes(self) -> int:
        """Return the most sequences that run at once."""
        return DEFAULT_LANES if self.max_batch is None else self.max_batch

    @property
    def step_tokens(self) -> int:
        """Return the most tokens that one engine step computes."""
        return DEFAULT_STEP_TOKENS if self.turn_tokens is None else self.turn_tokens

    @property
    def cache_folder(self) -> Path:
        """The folder for downloads, compiled kernels and snapshots."""
        return self.cache_dir or default_cache_dir()

    @property
    def snapshot_folder(self) -> Path:
        return self.snapshot_dir or self.cache_folder / "snapshots"

    @property
    def device_names(self) -> list[str]:
        return [self.device] if self.devices is None else [name.strip() for name in self.devices.split(",")]

    @classmethod
    def of(cls, **flags: Any) -> Settings:
        """Build Settings from keywords, in which None means the default, and the environment. An unknown keyword raises
        BadSetting, which lists the known ones."""
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


def default_cache_dir() -> Path:
    """Return the user's cache folder: ONEDRAW_CACHE, else XDG_CACHE_HOME/onedraw, else ~/.cache/onedraw."""
    if os.environ.get("ONEDRAW_CACHE"):
        return Path(os.environ["ONEDRAW_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onedraw"


def api_key() -> str | None:
    """Return the API key in ONEDRAW_API_KEY. Unlike one on the command line, it is not in the system's list of processes."""
    return os.environ.get("ONEDRAW_API_KEY") or None


def ray_address() -> str | None:
    """Return the address of the Ray cluster that RAY_ADDRESS names, if it names one."""
    return os.environ.get("RAY_ADDRESS") or None


def update_token() -> str | None:
    """Return the update token in ONEDRAW_UPDATE_TOKEN. Unlike a flag, it is not in the system's list of processes."""
    return os.environ.get("ONEDRAW_UPDATE_TOKEN") or None


def otlp_traces_endpoint(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the URL to which OpenTelemetry's variables say that traces are sent; None if they name none or turn traces off."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    base = environment.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").rstrip("/")
    return environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or (f"{base}/v1/traces" if base else None)


def size_in_bytes(text: str) -> int:
    """Parse a size such as '512MiB', '2G', '1.5 GiB' or '4096'. K, M, G and T are powers of 1024."""
    units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    cleaned = text.strip().upper().removesuffix("IB").removesuffix("B").strip()
    unit = cleaned[-1:] if cleaned[-1:] in units and cleaned[-1:] else ""
    try:
        return int(float(cleaned.removesuffix(unit)) * units[unit])
    except (ValueError, OverflowError):
        raise BadSetting(f"not a size: {text!r}; write for example 512MiB or 2GiB") from None
