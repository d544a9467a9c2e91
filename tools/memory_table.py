"""Writes the memory table of docs/models.md: what `onedraw inspect` plans for a 27B model in four bits on eight sets of devices.

Run `python -m tools.memory_table` after a change of the memory plan; a test fails while the table is out of date.
"""

from __future__ import annotations

from pathlib import Path

from onedraw.backends.devices import parse_device
from onedraw.backends.memory_plan import human_bytes
from onedraw.backends.placement import StagePlan
from onedraw.build.fit_devices import longest_contexts, plan_devices, with_device_sizes
from onedraw.checkpoints.random_weights import open_random
from onedraw.models.registry import ModelInfo, read_model_info
from onedraw.settings import Settings

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
MODEL = "random:qwen3.6-27b-q4_k_m"
CONTEXT = 32768
DEVICES = (
    "cuda/sm86/24GiB",
    "cuda/sm86/24GiB,cpu/32GiB",
    "cuda/sm86/12GiB,cpu/32GiB",
    "cuda/sm75/22GiB,cuda/sm75/22GiB",
    "cuda/sm86/24GiB,cuda/sm75/22GiB",
    "cuda/sm61/24GiB,cuda/sm61/24GiB",
    "hip/gfx1100/24GiB",
    "cpu/32GiB",
)
HEAD = ("| `--devices` | layers | weights | keys and values | states | all of it |", "|---|---|---|---|---|---|")
BEGIN, END = "<!-- memory table -->", "<!-- end of the memory table -->"


def table() -> list[str]:
    """The lines of the table: for each set of devices, a line per device."""
    info = read_model_info(open_random(MODEL))
    return [*HEAD, *(line for names in DEVICES for line in _lines(info, names))]


def _lines(info: ModelInfo, names: str) -> list[str]:
    devices = [parse_device(name) for name in names.split(",")]
    given = Settings(model=MODEL, devices=names, max_context=CONTEXT, max_batch=1, draft=("none",))
    settings = with_device_sizes(given, info.spec, devices)
    plan, split = plan_devices(settings, info, devices)
    cells = [_cells(stage, plan.kv_dtype) for stage in split.stages]
    lines = ["| " + " | ".join([f"`{stage.device.name}`", *cell]) + " |" for stage, cell in zip(split.stages, cells, strict=True)]
    found = [fit for fit in longest_contexts(settings, info, devices, drafters={}) if fit.context]
    longest = ", ".join(f"{fit.context:,} in {fit.kv_dtype}" for fit in found)
    return [*lines, f"| *together* | *longest context of one sequence: {longest}* | | | | |"] if longest else lines


def _cells(stage: StagePlan, kv_dtype: str) -> list[str]:
    return [
        f"{stage.start}–{stage.stop - 1}",
        f"{human_bytes(stage.weight_bytes)} in {stage.dtype}",
        f"{human_bytes(stage.page_bytes)} in {kv_dtype}",
        human_bytes(stage.state_bytes),
        f"{human_bytes(stage.total_bytes)} of {human_bytes(stage.device.memory or 0)}",
    ]


def page(text: str) -> str:
    """The text of the page with a new table."""
    before, rest = text.split(BEGIN)
    return "\n".join([before + BEGIN, *table(), END]) + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
