"""Fit a model to devices: choose dtypes, KV memory and layer placement from Settings, before anything is allocated.

The input is Settings, a model's description, the devices, and the bytes of a drafter. The output is a MemoryPlan (sizes) and a
SplitPlan (the layers and bytes of each device), or OutOfMemory, which names settings that fit. `onedraw inspect` and
`build/llm.py` both call `plan_devices`, so `inspect` shows what a start allocates. The arithmetic is in `backends/memory_plan.py`
and `backends/placement.py`. The workspace of a step is the memory that it needs besides weights and state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from onedraw.backends.devices import Device, activation_precision, float_dtype, kv_precision
from onedraw.backends.memory_plan import (
    DEFAULT_KV_BYTES,
    DRAFTS_PER_LANE,
    RUNTIME_RESERVE,
    MemoryPlan,
    StepBytes,
    check_heads,
    human_bytes,
    memory_plan,
    page_budget,
    step_bytes,
)
from onedraw.backends.packing import PACKED_DTYPES, matrix_kinds, plan_weight_storage, product_dtypes
from onedraw.backends.placement import SplitPlan, StoredWeights, longest_context, plan_or_advise, plan_split
from onedraw.errors import BadSetting, OutOfMemory
from onedraw.models.registry import ModelInfo
from onedraw.models.spec import KV_BITS, ModelSpec
from onedraw.settings import DEFAULT_LANES, Settings

DrafterBytes = Callable[[MemoryPlan], int]


LARGE_MEMORY = 40 << 30  # An accelerator with at least this much memory gets the larger of the sizes below.
# The defaults on accelerators: --turn-tokens (step tokens) and --max-batch (lanes), each with large memory and with less.
LARGE_STEP_TOKENS, STEP_TOKENS = 8192, 1024
LARGE_LANES, LANES = 64, 16
LANE_SHARE = 16  # Recurrent states of all lanes take at most one part in this many of an accelerator's memory by default.


def with_device_sizes(settings: Settings, spec: ModelSpec, devices: Sequence[Device]) -> Settings:
    """Return the settings with --turn-tokens and --max-batch for these devices, where they were not given. If one is a CPU, or
    has unknown memory, the settings stay as they are: their small defaults give a CPU, or a split with one, its full speed."""
    if any(device.kind == "cpu" or device.memory is None for device in devices):
        return settings
    memory = min(device.memory or 0 for device in devices)
    large = memory >= LARGE_MEMORY
    lane_bytes = sum(spec.lane_bytes(index) for index in range(len(spec.layers)))
    lanes = LARGE_LANES if large else LANES
    while lanes > DEFAULT_LANES and lanes * lane_bytes * LANE_SHARE > memory * len(devices):
        lanes //= 2
    return replace(
        settings,
        turn_tokens=settings.turn_tokens or (LARGE_STEP_TOKENS if large else STEP_TOKENS),
        max_batch=settings.max_batch or lanes,
    )


def longest_draft(settings: Settings) -> int:
    """Return the number of drafts of one sequence in one step for which memory is allocated: 0 with --draft none, else
    --draft-tokens or DRAFTS_PER_LANE."""
    return 0 if "none" in settings.draft else settings.draft_tokens or DRAFTS_PER_LANE


def memory_plan_for(
    settings: Settings,
    info: ModelInfo,
    *,
    dtype: str,
    kv_dtype: str | None = None,
    default_kv_bytes: int = DEFAULT_KV_BYTES,
) -> MemoryPlan:
    """Call `memory_plan` with the sizes that the settings give. `dtype` is that of products on the last device."""
    return memory_plan(
        info.spec,
        dtype=dtype,
        weights=stored_weights(info, dtype).packed,
        max_context=settings.max_context,
        max_batch=settings.lanes,
        page_size=settings.page_size,
        step_tokens=settings.step_tokens,
        kv_memory=settings.kv_memory,
        kv_dtype=kv_dtype or kv_precision(settings.kv_dtype, products=dtype),
        drafts=max(longest_draft(settings), settings.tree_budget, DRAFTS_PER_LANE) if longest_draft(settings) else 0,
        draft_memory=settings.draft_memory,
        checkpoint_memory=settings.checkpoint_memory if settings.prefix_cache else 0,
        default_kv_bytes=default_kv_bytes,
    )


KV_SEARCH_STEP = 64 << 20  # The search for the largest KV memory that fits ends when it is exact to this many bytes.


@dataclass(frozen=True, slots=True)
class DeviceFit:
    """Computes how a model fits on devices, for any context length. `kv_bytes` is the memory for KV pages if --kv-memory is not
    given."""

    settings: Settings
    info: ModelInfo
    devices: tuple[Device, ...]
    stored: tuple[StoredWeights, ...]  # the form of the weights on each device
    kv_dtype: str
    activation: str
    kv_bytes: int

    def plan(self, settings: Settings, kv_dtype: str | None = None) -> MemoryPlan:
        """Return the sizes with these settings, which differ from the fit's in the context length."""
        dtype, kv_dtype = self.stored[-1].dtype, kv_dtype or self.kv_dtype
        return memory_plan_for(settings, self.info, dtype=dtype, kv_dtype=kv_dtype, default_kv_bytes=self.kv_bytes)

    def split(self, context: int, kv_dtype: str | None = None, *, drafter: DrafterBytes | None = None) -> SplitPlan:
        """Return the layers and bytes of every device with this context length, or raise OutOfMemory. The workspace of a step is
        subtracted from the memory of each device first."""
        adjusted = replace(self.settings, max_context=context)
        sizes = self.plan(adjusted, kv_dtype)
        scratch = [step_memory(adjusted, self.info, one, self.devices).total for one in self.stored]
        return plan_split(
            self.info.spec,
            sizes,
            [without_scratch(device, size) for device, size in zip(self.devices, scratch, strict=True)],
            stored=self.stored,
            split=adjusted.split,
            activation=self.activation,
            step_tokens=adjusted.step_tokens,
            drafter_bytes=0 if drafter is None else drafter(sizes),
        )


def step_memory(settings: Settings, info: ModelInfo, stored: StoredWeights, devices: Sequence[Device]) -> StepBytes:
    """Return the workspace of a step on each of these devices, with weights in the form `stored`. The memory plan does not
    contain it."""
    recorded = len(devices) == 1  # Memory of CUDA graphs is planned for a single device only.
    return step_bytes(info.spec, stored.dtype, step_tokens=settings.step_tokens, weights=stored.packed, recorded=recorded)


def stored_weights(info: ModelInfo, dtype: str) -> StoredWeights:
    """Return the form of a model's weights with this dtype of products."""
    return StoredWeights(dtype, plan_weight_storage(info.weights, dtype).weights if dtype in PACKED_DTYPES else None)


def without_scratch(device: Device, scratch: int) -> Device:
    """Return the device with so much less memory that `scratch` bytes less are left after the runtime's reserve. A CPU is
    returned unchanged, because its memory is not planned so exactly."""
    if device.memory is None or device.kind == "cpu":
        return device
    return replace(device, memory=max(device.memory - int(scratch / (1 - RUNTIME_RESERVE)), 0))


def plan_devices(
    settings: Settings,
    info: ModelInfo,
    devices: Sequence[Device],
    *,
    drafter: DrafterBytes | None = None,
    no_kernels: Mapping[str, str] | None = None,
) -> tuple[MemoryPlan, SplitPlan]:
    """Return the sizes for these devices and the bytes of each, or raise OutOfMemory, which names settings that fit. A single
    device is a split with one part.

    `no_kernels`: why kernels for packed weights cannot run here, by the kind that `packed_kernels` names; kinds that can run are
    left out.
    """
    fit, plan = _fit(settings, info, devices, drafter=drafter, no_kernels=no_kernels)
    try:
        split = plan_or_advise(lambda context: fit.split(context, drafter=drafter), plan.max_context)
        if len({stage.dtype for stage in split.stages}) > 1:  # then a layer's bytes depend on its device
            extra = 0 if drafter is None else drafter(plan)
            plan = replace(plan, weight_bytes=sum(stage.weight_bytes for stage in split.stages) - extra)
        return plan, split
    except OutOfMemory as error:
        if settings.kv_memory is not None and _fits_without_kv_memory(settings, info, devices, drafter, no_kernels):
            raise OutOfMemory(
                f"--kv-memory {human_bytes(settings.kv_memory)} does not fit here; lower or omit it. In detail: {error}"
            ) from None
        others: dict[str, Callable[[int], SplitPlan]] = {}
        for names in smaller_kv_dtypes(plan, info.spec, devices):
            others[f"with --kv-dtype {' or '.join(names)}"] = partial(fit.split, kv_dtype=names[0], drafter=drafter)
        if drafter is not None:
            others["without a drafter (--draft none)"] = lambda context: fit.split(context)
        longest = {how: longest_context(make, plan.max_context) for how, make in others.items()}
        advice = [f"{context} {how}" for how, context in longest.items() if context]
        raise OutOfMemory(", ".join([str(error), *([" and ".join(advice)] if advice else [])])) from None


def _fits_without_kv_memory(
    settings: Settings,
    info: ModelInfo,
    devices: Sequence[Device],
    drafter: DrafterBytes | None,
    no_kernels: Mapping[str, str] | None,
) -> bool:
    try:
        plan_devices(replace(settings, kv_memory=None), info, devices, drafter=drafter, no_kernels=no_kernels)
    except OutOfMemory:
        return False
    return True


def require_host_memory(settings: Settings, plan: MemoryPlan, available: int | None) -> None:
    """Refuse a --kv-memory that is larger than the host memory that is available, if that is known."""
    if settings.kv_memory is not None and available is not None and settings.kv_memory > available:
        raise OutOfMemory(
            f"--kv-memory gives {human_bytes(settings.kv_memory)} and {human_bytes(available)} of this machine's memory are "
            f"available; lower --kv-memory. One sequence of {plan.max_context} tokens needs {human_bytes(plan.sequence_bytes)}"
        )


def reduced_context(settings: Settings, spec_context: int, context: int) -> str:
    """Return a line that says how far --kv-memory has reduced a context length that was not given; empty if it has not."""
    if settings.kv_memory is None or settings.max_context is not None or context >= spec_context:
        return ""
    return (
        f"--kv-memory {human_bytes(settings.kv_memory)} holds one sequence of {context} tokens, so that is the context and not "
        f"the model's {spec_context}; raise --kv-memory for longer ones"
    )


def _fit(
    settings: Settings,
    info: ModelInfo,
    devices: Sequence[Device],
    *,
    drafter: DrafterBytes | None,
    no_kernels: Mapping[str, str] | None = None,
) -> tuple[DeviceFit, MemoryPlan]:
    """Choose dtypes and KV memory for these devices. Return them as a DeviceFit, and the sizes that they give."""
    dtypes = product_dtypes(
        devices,
        requested=settings.dtype,
        activations=settings.cpu_activations,
        stream=settings.activation_dtype,
        kinds=matrix_kinds(info.weights),
        no_kernels=no_kernels or {},
    )
    activation = activation_precision(devices, requested=settings.activation_dtype, products=settings.dtype)
    # Kernels with float32 products read keys and values of any dtype, others only those of their own dtype, or quantized ones.
    narrow = [dtype for dtype in dtypes if float_dtype(dtype) != "f32"]
    kv_dtype = kv_precision(settings.kv_dtype, products=(narrow or dtypes)[0], devices=devices)
    forms = {dtype: stored_weights(info, dtype) for dtype in dict.fromkeys(dtypes)}
    stored = tuple(forms[dtype] for dtype in dtypes)
    fit = DeviceFit(settings, info, tuple(devices), stored, kv_dtype, activation, DEFAULT_KV_BYTES)
    plan = fit.plan(settings)
    if len(devices) == 1 and devices[0].kind != "cpu" and devices[0].memory is not None:
        given = {"memory": devices[0].memory, "step_tokens": settings.step_tokens}
        for _ in range(2):  # twice, because a drafter's bytes depend on the number of the model's pages, which changes here
            kv_bytes = page_budget(plan, info.spec, drafter_bytes=0 if drafter is None else drafter(plan), **given)
            fit = replace(fit, kv_bytes=kv_bytes)
            plan = fit.plan(settings)
    if len(devices) > 1 and all(device.kind != "cpu" and device.memory is not None for device in devices):
        fit = replace(fit, kv_bytes=_largest_kv_bytes(fit, drafter))
        plan = fit.plan(settings)
    return fit, plan


def _largest_kv_bytes(fit: DeviceFit, drafter: DrafterBytes | None) -> int:
    """Return the largest KV memory that fits on all devices together, or the default if the model does not fit even without
    any."""

    def fits(kv_bytes: int) -> bool:
        candidate = replace(fit, kv_bytes=kv_bytes)
        try:
            candidate.split(candidate.plan(candidate.settings).max_context, drafter=drafter)
        except OutOfMemory:
            return False
        return True

    low, high = fit.kv_bytes, sum(device.memory or 0 for device in fit.devices)
    if not fits(low):
        low, high = 0, low
        if not fits(low):
            return high
    while high - low > KV_SEARCH_STEP:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """The longest context that fits with one KV dtype and one drafter. `inspect --json` prints the field names as keys."""

    kv_dtype: str
    drafter: str  # the drafter's name; empty if there is none
    context: int


def longest_contexts(
    settings: Settings, info: ModelInfo, devices: Sequence[Device], *, drafters: Mapping[str, DrafterBytes]
) -> tuple[ContextLimit, ...]:
    """Return the longest context of a single sequence on these devices: with the planned and each smaller KV dtype, without a
    drafter and with each of `drafters`."""
    fit, plan = _fit(replace(settings, max_batch=1, kv_memory=None), info, devices, drafter=None)
    fit = replace(fit, kv_bytes=0)
    found = []
    for kv_dtype in (plan.kv_dtype, *(names[0] for names in smaller_kv_dtypes(plan, info.spec, devices))):
        for name, size in {"": None, **drafters}.items():
            make = partial(fit.split, kv_dtype=kv_dtype, drafter=size)
            found.append(ContextLimit(kv_dtype, name, longest_context(make, info.spec.max_context)))
    return tuple(found)


def smaller_kv_dtypes(plan: MemoryPlan, spec: ModelSpec, devices: Sequence[Device]) -> list[list[str]]:
    """Return the KV dtypes that model and devices support and that are smaller than the plan's: a list for each size, the largest
    size first."""
    found: dict[int, list[str]] = {}
    for name in ("int8", "fp8", "int4"):
        try:
            check_heads(spec, name)
            kv_precision(name, products=plan.dtype, devices=devices)
        except BadSetting:
            continue
        if KV_BITS[name] < KV_BITS[plan.kv_dtype]:
            found.setdefault(KV_BITS[name], []).append(name)
    return list(found.values())
