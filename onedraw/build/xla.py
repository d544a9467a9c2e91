"""Build the xla backend from Settings, list the step shapes that it compiles (for `inspect`), export graphs, and serve exports.

jax is imported only when one of these functions runs, since most installations do not have it.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from onedraw import __version__
from onedraw.backends.base import require_state_dtype
from onedraw.backends.devices import Device, activation_precision, product_precision
from onedraw.backends.memory_plan import MemoryPlan
from onedraw.build.checkpoint import Progress, describe, find_checkpoint, read_text
from onedraw.build.fit_devices import memory_plan_for, plan_devices
from onedraw.errors import BadSetting, CorruptFile
from onedraw.models.registry import ModelInfo
from onedraw.settings import Settings

if TYPE_CHECKING:
    from onedraw.backends.xla.backend import XlaBackend
    from onedraw.backends.xla.iree import IreeBackend


def require_jax() -> None:
    if importlib.util.find_spec("jax") is None:
        raise BadSetting('--backend xla needs jax, which is not installed: pip install "onedraw[xla]"')


def xla_backend(settings: Settings, info: ModelInfo, notify: Progress, *, progress: Callable[[int, int], None]) -> XlaBackend:
    from onedraw.backends.xla.backend import DRAFTS, XlaBackend, XlaStageDevice
    from onedraw.backends.xla.platform import find_devices, keep_compiled, resolve_platform

    require_state_dtype(settings.state_dtype)
    platform = resolve_platform(settings.xla_platform)
    devices, found = find_devices(platform, settings.device_names)
    kept = keep_compiled(settings.cache_folder / "xla")
    settings = xla_settings(settings, devices)
    plan, split = plan_devices(settings, info, devices)
    drafts = 0 if "none" in settings.draft else DRAFTS
    by_name = dict(zip((device.name for device in devices), found, strict=True))
    begin = time.perf_counter()
    backend = XlaBackend(
        info.spec,
        info.weights,
        dtype=plan.dtype,
        activation=split.activation,
        stage_devices=[XlaStageDevice(by_name[stage.device.name], stage.stop) for stage in split.stages],
        lanes=settings.lanes,
        pages=plan.pages,
        page_size=settings.page_size,
        max_context=plan.max_context,
        step_tokens=settings.step_tokens,
        drafts=min(drafts, plan.draft_positions) if info.spec.recurrent else drafts,
        checkpoints=plan.checkpoints,
        check=settings.self_check,
        notify=notify,
        progress=progress,
    )
    notify(f"xla: ready after {time.perf_counter() - begin:.1f} s on {platform}; {kept}")
    return backend


def xla_settings(settings: Settings, devices: Sequence[Device]) -> Settings:
    """Return the settings with the dtypes that --backend xla uses on these devices: f32 or bf16, never packed weights."""
    found = product_precision(devices, requested=settings.dtype)
    dtype = "f32" if found == "f16" else found
    stream = activation_precision(devices, requested=settings.activation_dtype, products=dtype)
    return replace(settings, dtype=dtype, activation_dtype="f32" if stream == "f16" else stream)


def compiled_steps(settings: Settings, info: ModelInfo, plan: MemoryPlan, device: Device) -> list[str]:
    """Return the step shapes that --backend xla compiles with its last stage on this device."""
    from onedraw.backends.xla.inputs import compiled_shapes, product_rows

    shape = compiled_shapes(
        lanes=settings.lanes,
        page_size=settings.page_size,
        pages=plan.pages,
        windows=info.spec.windows,
        max_context=plan.max_context,
        step_tokens=settings.step_tokens,
        drafts=0,
        checkpoints=plan.checkpoints,
        rows=product_rows("cpu" if device.kind == "cpu" else "gpu", plan.dtype),
    )
    return [f"{shape.decode.tokens} single tokens", f"up to {shape.mixed.tokens} tokens of any rows"]


def export_graphs(settings: Settings, folder: Path, notify: Progress) -> Path:
    """Write a model as StableHLO graphs with the sizes of these settings, and return the path of the manifest, which lists
    them."""
    require_jax()
    from onedraw.backends.xla.export import export_model

    with closing(find_checkpoint(settings, notify)) as checkpoint:
        info = describe(settings, checkpoint)
        tokenizer, template = read_text(checkpoint)
        dtype = "f32" if settings.dtype == "auto" else settings.dtype
        plan = memory_plan_for(settings, info, dtype=dtype)
        path = export_model(
            info.spec,
            info.weights,
            folder,
            lanes=settings.lanes,
            page_size=settings.page_size,
            pages=plan.pages,
            max_context=plan.max_context,
            step_tokens=settings.step_tokens,
            dtype=dtype,
            version=__version__,
            about={"fingerprint": checkpoint.fingerprint(), "eos_ids": list(info.eos_ids), "defaults": info.defaults},
            notify=notify,
        )
        tokenizer.save(folder)
        if template is not None:
            template.save(folder)
        return path


# ---------------------------------------------------------------------- serving an export


@dataclass(frozen=True, slots=True)
class Export:
    """The properties of a model as the manifest of its export has them."""

    folder: Path
    family: str
    fingerprint: str
    eos_ids: tuple[int, ...]
    defaults: dict[str, float | int]


def find_export(settings: Settings) -> Export | None:
    """Return the export that the settings name, or None if they name a model. Settings that an export has decided already are
    refused."""
    from onedraw.backends.xla.iree import MANIFEST, read_manifest

    folder = Path(settings.model)
    if not (folder / MANIFEST).is_file():
        return None
    plain = Settings()
    for name in ("backend", "devices", "kv_memory", "kv_dtype", "state_dtype", "max_context", "cache_budget"):
        if getattr(settings, name) != getattr(plain, name):
            raise BadSetting(
                f"--{name.replace('_', '-')}: an export has its own sizes and device; give it to `onedraw export`, or omit it"
            )
    if settings.device not in ("auto", "cpu") or settings.dtype != "auto":
        raise BadSetting("--device, --dtype: an export runs on the CPU, in the dtype given to `onedraw export`; omit them")
    if not {"auto", "none"}.issuperset(settings.draft):
        raise BadSetting("--draft: an export returns the logits of one position per row, so drafts cannot be verified; omit it")
    manifest = read_manifest(folder)
    try:
        about = manifest["model"]
        return Export(folder, manifest["family"], about["fingerprint"], tuple(about["eos_ids"]), dict(about["defaults"]))
    except (KeyError, TypeError):
        raise CorruptFile(f"{folder / MANIFEST} is damaged; export the model again") from None


def iree_backend(export: Export, notify: Progress, *, check: bool) -> IreeBackend:
    from onedraw.backends.xla.iree import IreeBackend

    return IreeBackend(export.folder, check=check, notify=notify)
