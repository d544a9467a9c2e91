"""How large a run will be: Settings, a described model and devices → the bytes of each, before one is allocated.

In: Settings, Described, devices, bytes of a drafter. Out: MemoryPlan and SplitPlan, or OutOfMemory with advice.
`inspect` prints what `assemble` allocates, because both ask here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from onedraw.backends.devices import Device
from onedraw.backends.memory_plan import (
    DEFAULT_KV_BYTES,
    DRAFTS_PER_LANE,
    RUNTIME_RESERVE,
    MemoryPlan,
    StepBytes,
    memory_plan,
    page_budget,
    step_bytes,
)
from onedraw.backends.packing import PACKED_DTYPES, matrix_kinds, plan_weight_storage, product_dtype
from onedraw.backends.precision import KV_QUANT_DTYPES, activation_precision, kv_precision
from onedraw.backends.stage_memory import SplitPlan, longest_context, plan_or_advise, plan_split
from onedraw.errors import BadSetting, OutOfMemory
from onedraw.models.model_info import ModelInfo
from onedraw.settings import Settings

DrafterBytes = Callable[[MemoryPlan], int]


def longest_draft(settings: Settings) -> int:
    """Drafts of a row that are worth a place in advance: those that were asked for, or as many as most guesses have."""
    return 0 if "none" in settings.draft else settings.draft_tokens or DRAFTS_PER_LANE


def plan_memory(
    settings: Settings,
    info: ModelInfo,
    *,
    dtype: str,
    kv_dtype: str | None = None,
    default_kv_bytes: int = DEFAULT_KV_BYTES,
) -> MemoryPlan:
    return memory_plan(
        info.spec,
        dtype=dtype,
        weights=plan_weight_storage(info.weights, dtype).weights if dtype in PACKED_DTYPES else None,
        max_context=settings.max_context,
        max_batch=settings.max_batch,
        page_size=settings.page_size,
        turn_tokens=settings.turn_tokens,
        kv_memory=settings.kv_memory,
        kv_dtype=kv_dtype or kv_precision(settings.kv_dtype, products=dtype),
        drafts=max(longest_draft(settings), settings.tree_budget, DRAFTS_PER_LANE) if longest_draft(settings) else 0,
        draft_memory=settings.draft_memory,
        checkpoint_memory=settings.checkpoint_memory if settings.prefix_cache else 0,
        default_kv_bytes=default_kv_bytes,
    )


ROOM_STEP = 64 << 20  # bytes that a search for room is content with


@dataclass(frozen=True, slots=True)
class DeviceFit:
    """What is asked of these devices, but for the context. `room`: bytes that pages may take where nobody said how many."""

    settings: Settings
    info: ModelInfo
    devices: tuple[Device, ...]
    dtype: str
    activation: str
    room: int

    def split(self, context: int, kv_dtype: str | None = None, *, drafter: DrafterBytes | None = None) -> SplitPlan:
        """The bytes of every device with this context, or OutOfMemory. Numbers of a turn and recorded turns have their share."""
        asked = replace(self.settings, max_context=context)
        sizes = plan_memory(asked, self.info, dtype=self.dtype, kv_dtype=kv_dtype, default_kv_bytes=self.room)
        scratch = step_memory(asked, self.info, sizes, self.devices).total
        return plan_split(
            self.info.spec,
            sizes,
            [without_scratch(device, scratch) for device in self.devices],
            split=asked.split,
            activation=self.activation,
            turn_tokens=asked.turn_tokens,
            beside=0 if drafter is None else drafter(sizes),
        )


def step_memory(settings: Settings, info: ModelInfo, plan: MemoryPlan, devices: Sequence[Device]) -> StepBytes:
    """What turns take on each of these devices beside what the plan has."""
    recorded = len(devices) == 1
    return step_bytes(info.spec, plan.dtype, turn_tokens=settings.turn_tokens, weights=plan.weights, recorded=recorded)


def without_scratch(device: Device, scratch: int) -> Device:
    """An accelerator with so much less memory; a CPU's is not counted so closely."""
    if device.memory is None or device.kind == "cpu":
        return device
    return replace(device, memory=max(device.memory - int(scratch / (1 - RUNTIME_RESERVE)), 0))


def plan_devices(
    settings: Settings,
    info: ModelInfo,
    devices: Sequence[Device],
    *,
    drafter: DrafterBytes | None = None,
    no_kernels: str = "",
) -> tuple[MemoryPlan, SplitPlan]:
    """Sizes for these devices and the bytes of each, or OutOfMemory that says what would fit. One device is a split of one.

    `no_kernels`: why these devices cannot multiply with packed weights here.
    """
    fitting, plan = _fitting(settings, info, devices, drafter=drafter, no_kernels=no_kernels)
    try:
        return plan, plan_or_advise(lambda context: fitting.split(context, drafter=drafter), plan.max_context)
    except OutOfMemory as error:
        others: dict[str, Callable[[int], SplitPlan]] = {}
        smaller = smaller_kv_dtypes(plan, devices)
        if smaller:
            how = f"with --kv-dtype {' or '.join(smaller)}"
            others[how] = lambda context: fitting.split(context, smaller[0], drafter=drafter)
        if drafter is not None:
            others["without a drafter (--draft none)"] = lambda context: fitting.split(context)
        longest = {how: longest_context(make, plan.max_context) for how, make in others.items()}
        told = [f"{context} {how}" for how, context in longest.items() if context]
        raise OutOfMemory(", ".join([str(error), *([" and ".join(told)] if told else [])])) from None


def _fitting(
    settings: Settings, info: ModelInfo, devices: Sequence[Device], *, drafter: DrafterBytes | None, no_kernels: str = ""
) -> tuple[DeviceFit, MemoryPlan]:
    dtype = product_dtype(
        devices,
        asked=settings.dtype,
        activations=settings.cpu_activations,
        stream=settings.activation_dtype,
        kinds=matrix_kinds(info.weights),
        no_kernels=no_kernels,
    )
    activation = activation_precision(devices, asked=settings.activation_dtype, products=settings.dtype)
    kv_precision(settings.kv_dtype, products=dtype, devices=devices)
    plan = plan_memory(settings, info, dtype=dtype)
    room = DEFAULT_KV_BYTES
    if len(devices) == 1 and devices[0].kind != "cpu" and devices[0].memory is not None:
        given = {"memory": devices[0].memory, "turn_tokens": settings.turn_tokens}
        for _ in range(2):  # a drafter has pages too, as many as the model: too many at first, then what fits
            room = page_budget(plan, info.spec, beside=0 if drafter is None else drafter(plan), **given)
            plan = plan_memory(settings, info, dtype=dtype, default_kv_bytes=room)
    fitting = DeviceFit(settings, info, tuple(devices), dtype, activation, room)
    if len(devices) > 1 and all(device.kind != "cpu" and device.memory is not None for device in devices):
        fitting = replace(fitting, room=_room_over(fitting, drafter))
        plan = plan_memory(settings, info, dtype=dtype, default_kv_bytes=fitting.room)
    return fitting, plan


def _room_over(fitting: DeviceFit, drafter: DrafterBytes | None) -> int:
    """Bytes for pages that all devices have room for together; where there is room for none, what everybody has."""

    def fits(room: int) -> bool:
        asked = replace(fitting, room=room)
        sizes = plan_memory(asked.settings, asked.info, dtype=asked.dtype, default_kv_bytes=room)
        try:
            asked.split(sizes.max_context, drafter=drafter)
        except OutOfMemory:
            return False
        return True

    low, high = fitting.room, sum(device.memory or 0 for device in fitting.devices)
    if not fits(low):
        low, high = 0, low
        if not fits(low):
            return high
    while high - low > ROOM_STEP:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """The longest context that has room under one choice."""

    kv_dtype: str
    drafter: str  # its name; empty: none
    context: int


def longest_contexts(
    settings: Settings, info: ModelInfo, devices: Sequence[Device], *, drafters: Mapping[str, DrafterBytes]
) -> tuple[ContextLimit, ...]:
    """How far one sequence longest_contexts on these devices: with keys and values as they are and smaller, without a drafter and
    with each of these."""
    fitting, plan = _fitting(replace(settings, max_batch=1, kv_memory=None), info, devices, drafter=None)
    fitting = replace(fitting, room=0)
    found = []
    for kv_dtype in (plan.kv_dtype, *smaller_kv_dtypes(plan, devices)[:1]):
        for name, size in {"": None, **drafters}.items():
            make = partial(fitting.split, kv_dtype=kv_dtype, drafter=size)
            found.append(ContextLimit(kv_dtype, name, longest_context(make, info.spec.max_context)))
    return tuple(found)


def smaller_kv_dtypes(plan: MemoryPlan, devices: Sequence[Device]) -> list[str]:
    """The dtypes of keys and values that these devices read and that take less than the plan's; they are of one size."""
    found = []
    for name in ("int8", "fp8") if plan.kv_dtype not in KV_QUANT_DTYPES else ():
        try:
            found.append(kv_precision(name, products=plan.dtype, devices=devices))
        except BadSetting:
            continue
    return found
