"""A memory plan divided among devices: which layers lie where, and the bytes of each stage. Pure arithmetic.

In: a spec, its MemoryPlan, devices, a wish. Out: a SplitPlan, or OutOfMemory. `inspect` prints it and the backend is made by it.
One device is a split of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from onedraw.backends.devices import Device
from onedraw.backends.memory_plan import (
    RUNTIME_RESERVE,
    MemoryPlan,
    StagingPlan,
    layer_inputs_after,
    padded_vocab,
    row_bytes,
    staging_plan,
)
from onedraw.backends.placement import StageLoads, legal_cuts, place_layers
from onedraw.errors import OutOfMemory
from onedraw.models.spec import DTYPE_BYTES, STATE_BYTES, DeltaSpec, ModelSpec

CHUNK = 64  # prompt positions of a recurrent layer that are computed at once, the most that any backend asks for


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What one device holds."""

    device: Device
    start: int
    stop: int  # layers [start, stop)
    weight_bytes: int
    page_bytes: int
    state_bytes: int  # lanes, rollback buffer and checkpoints
    staging_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.page_bytes + self.state_bytes + self.staging_bytes


@dataclass(frozen=True, slots=True)
class SplitPlan:
    stages: tuple[StagePlan, ...]
    staging: StagingPlan
    activation: str  # dtype of the residual stream


def plan_split(
    spec: ModelSpec,
    plan: MemoryPlan,
    devices: Sequence[Device],
    *,
    split: str,
    activation: str,
    turn_tokens: int,
    beside: int = 0,
) -> SplitPlan:
    """`beside`: bytes of a drafter, which lives with the last stage."""
    devices = [_usable(device) for device in devices]
    tokens = max(turn_tokens, plan.max_batch) + CHUNK  # a prompt moves by one chunk beside whatever else runs
    widest = min(1, len(spec.layers) - 1)
    rows = staging_plan(spec, (widest,) * (len(devices) - 1), tokens=tokens, dtype=activation).rows
    boundary = rows * row_bytes(spec.hidden, activation, inputs=layer_inputs_after(spec, widest)) if len(devices) > 1 else 0
    figures = [_layer(spec, plan, index) for index in range(len(spec.layers))]
    one = len({d.memory_pool for d in devices}) == 1 and not (
        len(devices) > 1 and devices[0].hypothetical
    )  # two descriptions are two
    first, last = _outer(spec, plan, apart=not one)
    logits = plan.checkpoints * padded_vocab(spec) * STATE_BYTES
    loads = StageLoads(tuple(map(sum, figures)), first, last + logits + beside, boundary)
    ranges = place_layers(loads, devices, cuts=legal_cuts(spec.layers), split=split)
    staging = staging_plan(spec, tuple(layers.start for layers in ranges[1:]), tokens=tokens, dtype=activation)
    if staging.boundaries and staging.rows < plan.max_batch + CHUNK:
        raise OutOfMemory(
            f"a boundary between devices holds {staging.rows} rows, too few for {plan.max_batch}; lower --max-batch"
        )
    stages = []
    for index, (device, layers) in enumerate(zip(devices, ranges, strict=True)):
        weights, pages, states = (sum(part) for part in zip(*figures[layers.start : layers.stop], strict=True))
        ends = index == len(ranges) - 1
        weights += (first if index == 0 else 0) + (last + beside if ends else 0)
        crossing = sum(staging.boundaries[max(index - 1, 0) : index + 1])
        stages.append(StagePlan(device, layers.start, layers.stop, weights, pages, states + (logits if ends else 0), crossing))
    return SplitPlan(tuple(stages), staging, activation)


def plan_or_advise(make: Callable[[int], SplitPlan], context: int) -> SplitPlan:
    """The plan for this context, or OutOfMemory that names the longest context that has room."""
    try:
        return make(context)
    except OutOfMemory as error:
        longest = longest_context(make, context)
        advice = f"--max-context {longest} has room here" if longest else "no context has room here"
        raise OutOfMemory(f"{error}. {advice}") from None


def longest_context(make: Callable[[int], SplitPlan], most: int) -> int:
    """The longest context that has room, in steps of 64 tokens; 0 where none has."""
    if _fits(make, most):
        return most
    low, high = 0, most // 64
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _fits(make, middle * 64) else (low, middle - 1)
    return low * 64


def _fits(make: Callable[[int], SplitPlan], context: int) -> bool:
    try:
        make(context)
    except OutOfMemory:
        return False
    return True


def _usable(device: Device) -> Device:
    if device.memory is None or device.kind == "cpu":
        return device
    return replace(device, memory=int(device.memory * (1 - RUNTIME_RESERVE)))


def _layer(spec: ModelSpec, plan: MemoryPlan, index: int) -> tuple[int, int, int]:
    """Weights, pages, states."""
    group, mixer = spec.group(index), spec.layers[index].mixer
    pages = 0 if group is None else (plan.pages[group] + 1) * spec.page_bytes(index, plan.page_size, plan.kv_dtype)
    states = spec.lane_bytes(index) * (plan.max_batch + plan.checkpoints)
    rollback = plan.draft_positions * mixer.draft_bytes if isinstance(mixer, DeltaSpec) else 0
    weights = spec.weight_bytes(index, plan.dtype) if plan.weights is None else plan.weights.layers[index]
    return weights, pages, states + rollback


def _outer(spec: ModelSpec, plan: MemoryPlan, *, apart: bool) -> tuple[int, int]:
    """Bytes with the first layer and with the last. A tied head is there twice where embedding and head are apart.

    The table of the layers' own inputs stays where the checkpoint lies.
    """
    if plan.weights is not None:  # of devices that share their memory, so nothing is there twice
        return plan.weights.first, plan.weights.last
    size = DTYPE_BYTES[plan.dtype]
    shapes = {name: math.prod(shape) * size for name, shape in spec.outer_shapes().items()}
    first = sum(shapes.get(name, 0) for name in ("embed", "inputs_project", "inputs_project_norm"))
    head = (shapes["embed"] if apart else 0) if spec.tied else shapes["head"]
    return first, shapes["norm"] + head
