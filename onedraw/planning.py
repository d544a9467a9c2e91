"""How large a run will be: Settings, a described model and devices → the bytes of each, before one is allocated.

In: Settings, Described, devices, what a drafter takes beside the model. Out: MemoryPlan and SplitPlan, or NoRoom with advice.
`inspect` prints what `assemble` allocates, because both ask here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from onedraw.backends.devices import Device
from onedraw.backends.packing import PACKED_DTYPES, hold, matrix_kinds, product_dtype
from onedraw.backends.plan import DEFAULT_KV_BYTES, DRAFTS_PER_LANE, MemoryPlan, memory_plan, room_for_pages
from onedraw.backends.precision import KV_CODES, activation_precision, kv_precision
from onedraw.backends.split import SplitPlan, longest_context, plan_split, with_advice
from onedraw.errors import BadSetting, NoRoom
from onedraw.models.loading import Described
from onedraw.settings import Settings

DrafterBytes = Callable[[MemoryPlan], int]


def plan_memory(
    settings: Settings,
    described: Described,
    *,
    dtype: str,
    kv_dtype: str | None = None,
    default_kv_bytes: int = DEFAULT_KV_BYTES,
) -> MemoryPlan:
    return memory_plan(
        described.spec,
        dtype=dtype,
        weights=hold(described.weights, dtype).weights if dtype in PACKED_DTYPES else None,
        max_context=settings.max_context,
        max_batch=settings.max_batch,
        page_size=settings.page_size,
        turn_tokens=settings.turn_tokens,
        kv_memory=settings.kv_memory,
        kv_dtype=kv_dtype or kv_precision(settings.kv_dtype, products=dtype),
        drafts=0 if "none" in settings.draft else max(settings.draft_tokens or 0, settings.tree_budget, DRAFTS_PER_LANE),
        draft_memory=settings.draft_memory,
        checkpoint_memory=settings.checkpoint_memory if settings.prefix_cache else 0,
        default_kv_bytes=default_kv_bytes,
    )


def plan_devices(
    settings: Settings,
    described: Described,
    devices: Sequence[Device],
    *,
    drafter: DrafterBytes | None = None,
    no_kernels: str = "",
) -> tuple[MemoryPlan, SplitPlan]:
    """Sizes for these devices and the bytes of each, or NoRoom that says what would fit. One device is a split of one.

    `no_kernels`: why a CPU cannot multiply with packed weights here.
    """
    dtype = product_dtype(
        devices,
        asked=settings.dtype,
        activations=settings.cpu_activations,
        stream=settings.activation_dtype,
        kinds=matrix_kinds(described.weights),
        no_kernels=no_kernels,
    )
    activation = activation_precision(devices, asked=settings.activation_dtype, products=settings.dtype)
    kv_precision(settings.kv_dtype, products=dtype, devices=devices)
    plan = plan_memory(settings, described, dtype=dtype)
    room = DEFAULT_KV_BYTES
    if len(devices) == 1 and devices[0].kind != "cpu" and devices[0].memory is not None:
        given = {"memory": devices[0].memory, "turn_tokens": settings.turn_tokens}
        for _ in range(2):  # a drafter has pages too, as many as the model: too many at first, then what fits
            room = room_for_pages(plan, described.spec, beside=0 if drafter is None else drafter(plan), **given)
            plan = plan_memory(settings, described, dtype=dtype, default_kv_bytes=room)

    def split(context: int, kv_dtype: str | None = None, beside: DrafterBytes | None = drafter) -> SplitPlan:
        asked = replace(settings, max_context=context)
        sizes = plan_memory(asked, described, dtype=dtype, kv_dtype=kv_dtype, default_kv_bytes=room)
        return plan_split(
            described.spec,
            sizes,
            devices,
            split=settings.split,
            activation=activation,
            turn_tokens=settings.turn_tokens,
            beside=0 if beside is None else beside(sizes),
        )

    try:
        return plan, with_advice(split, plan.max_context)
    except NoRoom as error:
        others: dict[str, Callable[[int], SplitPlan]] = {}
        smaller = smaller_kv(plan, devices)
        if smaller:
            others[f"with --kv-dtype {' or '.join(smaller)}"] = lambda context: split(context, smaller[0])
        if drafter is not None:
            others["without a drafter (--draft none)"] = lambda context: split(context, beside=None)
        told = [f"{longest_context(make, plan.max_context)} {how}" for how, make in others.items()]
        raise NoRoom(", ".join([str(error), *([" and ".join(told)] if told else [])])) from None


def smaller_kv(plan: MemoryPlan, devices: Sequence[Device]) -> list[str]:
    """The dtypes of keys and values that these devices read and that take less than the plan's; they are of one size."""
    found = []
    for name in ("int8", "fp8") if plan.kv_dtype not in KV_CODES else ():
        try:
            found.append(kv_precision(name, products=plan.dtype, devices=devices))
        except BadSetting:
            continue
    return found
