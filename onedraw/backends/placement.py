"""Placement: which layers run on which device, and the bytes of every pipeline stage. Nothing is allocated here.

In: a spec, its MemoryPlan, devices, and `--split` (`auto`, `24,8` or `0.75,0.25`). Out: a SplitPlan with one contiguous range
of layers per device, or an error that names a split or a context that works. One device is a split with one range.
A layer that reads the keys and values of another layer is on the same device as that layer. The embedding is on the first device,
the last norm and the head are on the last. A device may be named twice. A split is the division of the layers among devices, a
cut the layer before which one device's layers end, and a boundary the place where activations cross from one device to the next.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from onedraw.backends.devices import Device
from onedraw.backends.memory_plan import RUNTIME_RESERVE, MemoryPlan, PackedWeightBytes, padded_vocab
from onedraw.errors import BadSetting, OutOfMemory
from onedraw.models.spec import DTYPE_BYTES, STATE_BYTES, AttentionSpec, DeltaSpec, LayerSpec, ModelSpec

CHUNK = 64  # most prompt positions that a recurrent layer of any backend computes at once
MAX_BOUNDARY_BYTES = 64 * 2**20  # most bytes of the buffers of one boundary between stages
MIN_STAGING_ROWS = 256  # fewest rows (tokens) of a staging buffer: the torch backend's self-check runs this many at once
ROW_MULTIPLE = 64  # staging buffers have a multiple of this many rows: matrix products pad rows to blocks of up to 64

Ranges = tuple[range, ...]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One device's layers and their bytes. Field names are keys of `inspect --json`."""

    device: Device
    start: int
    stop: int  # the device has layers [start, stop)
    weight_bytes: int
    page_bytes: int
    state_bytes: int  # bytes of lanes (recurrent states), rollback buffer and checkpoints
    staging_bytes: int
    dtype: str = ""  # of weights and products

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.page_bytes + self.state_bytes + self.staging_bytes


@dataclass(frozen=True, slots=True)
class StagingPlan:
    """Buffers for the activations that cross from one stage to the next."""

    rows: int  # tokens that a buffer holds
    boundaries: tuple[int, ...]  # bytes of each boundary, in order

    @property
    def total_bytes(self) -> int:
        return sum(self.boundaries)


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
    step_tokens: int,
    drafter_bytes: int = 0,
    stored: Sequence[StoredWeights] = (),
) -> SplitPlan:
    """Divide the layers among devices. A drafter is on the last device. `stored`: the form of the weights on each device; if
    empty, every device stores them as `plan` says."""
    stored = stored or (StoredWeights(plan.dtype, plan.weights),) * len(devices)
    devices = [_without_reserve(device) for device in devices]
    tokens = max(step_tokens, plan.max_batch) + CHUNK  # a prompt may add one chunk to the rows of a step
    widest = min(1, len(spec.layers) - 1)
    rows = staging_plan(spec, (widest,) * (len(devices) - 1), tokens=tokens, dtype=activation).rows
    boundary = rows * row_bytes(spec.hidden, activation, inputs=layer_inputs_after(spec, widest)) if len(devices) > 1 else 0
    layers_of = range(len(spec.layers))
    state_bytes = [_state_bytes(spec, plan, index) for index in layers_of]  # of each layer: (pages, states)
    layer_weights = [[one.layer_bytes(spec, index) for index in layers_of] for one in stored]
    # Two hypothetical devices with the same description are two devices.
    one_pool = len({d.memory_pool for d in devices}) == 1 and not (len(devices) > 1 and devices[0].hypothetical)
    first = stored[0].first_bytes(spec, copy_tied_head=not one_pool)
    last = stored[-1].last_bytes(spec, copy_tied_head=not one_pool)
    logits = plan.checkpoints * padded_vocab(spec) * STATE_BYTES
    # If the first device is on another node, the embedding is in the engine's process, which has the last stage. A tied head is
    # then the same tensor.
    if devices[0].node:
        first, last = 0, stored[-1].first_bytes(spec, copy_tied_head=False) + stored[-1].last_bytes(spec, copy_tied_head=False)
    loads = [
        StageLoads(
            tuple(size + sum(states) for size, states in zip(weights, state_bytes, strict=True)),
            first,
            last + logits + drafter_bytes,
            boundary,
        )
        for weights in layer_weights
    ]
    ranges = place_layers(loads, devices, cuts=legal_cuts(spec.layers), split=split)
    staging = staging_plan(spec, tuple(layers.start for layers in ranges[1:]), tokens=tokens, dtype=activation)
    if staging.boundaries and staging.rows < plan.max_batch + CHUNK:
        raise OutOfMemory(
            f"the buffer between two devices has {staging.rows} rows, too few for {plan.max_batch} sequences; lower --max-batch"
        )
    stages = []
    for index, (device, layers) in enumerate(zip(devices, ranges, strict=True)):
        weights = sum(layer_weights[index][layers.start : layers.stop])
        pages, states = (sum(part) for part in zip(*state_bytes[layers.start : layers.stop], strict=True))
        is_last = index == len(ranges) - 1
        weights += (first if index == 0 else 0) + (last + drafter_bytes if is_last else 0)
        staged = sum(staging.boundaries[max(index - 1, 0) : index + 1])
        states += logits if is_last else 0
        dtype = stored[index].dtype
        stages.append(StagePlan(device, layers.start, layers.stop, weights, pages, states, staged, dtype))
    return SplitPlan(tuple(stages), staging, activation)


def plan_or_advise(make: Callable[[int], SplitPlan], context: int) -> SplitPlan:
    """The plan for this context, or OutOfMemory that names the longest context that fits."""
    try:
        return make(context)
    except OutOfMemory as error:
        longest = longest_context(make, context)
        advice = f"--max-context {longest} fits here" if longest else "no context fits here"
        raise OutOfMemory(f"{error}. {advice}") from None


def longest_context(make: Callable[[int], SplitPlan], most: int) -> int:
    """The longest context that fits: `most`, or a multiple of 64 tokens; 0 if none fits."""
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


def _without_reserve(device: Device) -> Device:
    if device.memory is None or device.kind == "cpu":
        return device
    return replace(device, memory=int(device.memory * (1 - RUNTIME_RESERVE)))


def _state_bytes(spec: ModelSpec, plan: MemoryPlan, index: int) -> tuple[int, int]:
    """Bytes of the pages and states of one layer."""
    group, mixer = spec.group(index), spec.layers[index].mixer
    pages = 0 if group is None else (plan.pages[group] + 1) * spec.page_bytes(index, plan.page_size, plan.kv_dtype)
    states = spec.lane_bytes(index) * (plan.max_batch + plan.checkpoints)
    rollback = plan.draft_positions * mixer.draft_bytes if isinstance(mixer, DeltaSpec) else 0
    return pages, states + rollback


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The form in which a device stores weights, and its bytes. A tied head is stored twice if embedding and head are on devices
    that do not share their memory. The table of per-layer inputs is not counted, since it is read from the mapped checkpoint."""

    dtype: str  # of products
    packed: PackedWeightBytes | None  # None if the weights are not packed; then their bytes follow from `dtype`

    def layer_bytes(self, spec: ModelSpec, index: int) -> int:
        return spec.weight_bytes(index, self.dtype) if self.packed is None else self.packed.layers[index]

    def first_bytes(self, spec: ModelSpec, *, copy_tied_head: bool) -> int:
        """Bytes of the weights outside the layers on the first device."""
        if self.packed is not None:
            return self.packed.first + (self.packed.tied_embed if copy_tied_head else 0)
        shapes = self._outer_bytes(spec)
        return sum(shapes.get(name, 0) for name in ("embed", "inputs_project", "inputs_project_norm"))

    def last_bytes(self, spec: ModelSpec, *, copy_tied_head: bool) -> int:
        """Bytes of the weights outside the layers on the last device."""
        if self.packed is not None:
            return self.packed.last
        shapes = self._outer_bytes(spec)
        return shapes["norm"] + ((shapes["embed"] if copy_tied_head else 0) if spec.tied else shapes["head"])

    def _outer_bytes(self, spec: ModelSpec) -> dict[str, int]:
        return {name: math.prod(shape) * DTYPE_BYTES[self.dtype] for name, shape in spec.outer_shapes().items()}


# ---------------------------------------------------------------------- staging buffers between devices


def staging_plan(spec: ModelSpec, cuts: tuple[int, ...], *, tokens: int, dtype: str) -> StagingPlan:
    """Buffers for steps of up to `tokens` tokens, or fewer if those would take more than MAX_BOUNDARY_BYTES."""
    sizes = [row_bytes(spec.hidden, dtype, inputs=layer_inputs_after(spec, cut)) for cut in cuts]
    wanted = -(-max(tokens, MIN_STAGING_ROWS) // ROW_MULTIPLE) * ROW_MULTIPLE
    rows = min([wanted, *(MAX_BOUNDARY_BYTES // size // ROW_MULTIPLE * ROW_MULTIPLE for size in sizes)])
    if rows < MIN_STAGING_ROWS:
        raise OutOfMemory(
            f"one row between two devices takes {max(sizes)} bytes, so {MAX_BOUNDARY_BYTES} bytes hold only {rows} rows; "
            "use one device"
        )
    return StagingPlan(rows, tuple(rows * size for size in sizes))


def row_bytes(hidden: int, dtype: str, *, inputs: int = 0) -> int:
    """Bytes of one row at a boundary; `inputs`: values of per-layer inputs that cross with it."""
    return (2 * hidden + inputs) * DTYPE_BYTES[dtype]


def layer_inputs_after(spec: ModelSpec, cut: int) -> int:
    """Values per row of the per-layer inputs of all layers from `cut` on."""
    return (len(spec.layers) - cut) * spec.inputs


def max_step_tokens(rows: int, *, chunk: int) -> int:
    """The token budget that keeps a step within this many rows: a prompt may exceed the budget by one chunk."""
    return rows - chunk


# ---------------------------------------------------------------------- layers to devices


@dataclass(frozen=True, slots=True)
class StageLoads:
    """Bytes of every layer with its pages and states, of the weights outside the layers, and of one boundary."""

    layers: tuple[int, ...]
    first: int = 0  # weights outside the layers that are placed with the first layer
    last: int = 0  # weights outside the layers that are placed with the last layer
    boundary: int = 0  # bytes of a boundary's buffers on each of the two devices it connects

    def of(self, layers: range) -> int:
        edges = (layers.start > 0) + (layers.stop < len(self.layers))
        outer = (self.first if layers.start == 0 else 0) + (self.last if layers.stop == len(self.layers) else 0)
        return sum(self.layers[layers.start : layers.stop]) + outer + edges * self.boundary


def legal_cuts(layers: Sequence[LayerSpec]) -> tuple[int, ...]:
    """Layers before which the model may be cut: no layer from there on reads keys and values of a layer before it."""
    sources = [m.reuses if isinstance(m := layer.mixer, AttentionSpec) else None for layer in layers]
    found, earliest = [], len(layers)
    for cut in range(len(layers) - 1, 0, -1):
        source = sources[cut]
        earliest = min(earliest, cut if source is None else source)
        if earliest >= cut:
            found.append(cut)
    return tuple(reversed(found))


def place_layers(
    loads: StageLoads | Sequence[StageLoads], devices: Sequence[Device], *, cuts: Sequence[int], split: str = "auto"
) -> Ranges:
    """One range per device, or an error if the layers do not fit into a device's memory. `loads`: the same for all devices, or
    one per device."""
    loads = [loads] * len(devices) if isinstance(loads, StageLoads) else loads
    total, count = len(loads[0].layers), len(devices)
    if count - 1 > len(cuts):
        most = f"at most {len(cuts) + 1} parts" if len(cuts) else "only one part"
        raise BadSetting(
            f"--devices: {count} devices, but this model's {total} layers can be cut into {most}; name fewer devices"
        )
    if split == "auto":
        ranges = _auto_split(loads, devices, cuts)
    else:
        ranges = _ranges(_explicit_cuts(split, total, count, cuts), total)
    check_memory(loads, ranges, devices)
    return ranges


def check_memory(loads: Sequence[StageLoads], ranges: Ranges, devices: Sequence[Device]) -> None:
    """Raise OutOfMemory if the layers of some device do not fit; layers in the same memory are added up."""
    pools: dict[object, list[tuple[Device, range, int]]] = {}
    for index, (device, layers) in enumerate(zip(devices, ranges, strict=True)):
        key = index if device.hypothetical else device.memory_pool  # hypothetical devices share no memory
        pools.setdefault(key, []).append((device, layers, loads[index].of(layers)))
    for members in pools.values():
        device, needed = members[0][0], sum(size for _, _, size in members)
        if device.memory is not None and needed > device.memory:
            parts = ", ".join(f"{layers.start}–{layers.stop - 1}" for _, layers, _ in members)
            raise OutOfMemory(
                f"layers {parts} need {needed} bytes and {device.name} has {device.memory}: {needed - device.memory} too many. "
                f"Lower --max-context, --max-batch or --kv-memory, use a smaller --dtype, another --split, or more devices"
            )


def _auto_split(loads: Sequence[StageLoads], devices: Sequence[Device], cuts: Sequence[int]) -> Ranges:
    """Of the splits that fit: the fewest bytes on a CPU beside an accelerator, then the lowest maximum utilization of a device,
    then the earliest cuts. If none fits, the one with the lowest maximum utilization, for the error message."""
    total = len(loads[0].layers)
    shares = [_memory_share(device, devices) for device in devices]
    mixed = len({device.kind == "cpu" for device in devices}) > 1
    for strict in (True, False):
        best: dict[int, tuple[int, float, tuple[int, ...]]] = {0: (0, 0.0, ())}  # by layers placed: CPU bytes, utilization, cuts
        for index, (device, share) in enumerate(zip(devices, shares, strict=True)):
            last = index == len(devices) - 1
            reached: dict[int, tuple[int, float, tuple[int, ...]]] = {}
            for start, (on_cpu, utilization, before) in best.items():
                for stop in [total] if last else [cut for cut in cuts if cut > start]:
                    size = loads[index].of(range(start, stop))
                    if strict and device.memory is not None and size > share:
                        continue
                    with_cpu = on_cpu + (size if strict and mixed and device.kind == "cpu" else 0)
                    found = (with_cpu, max(utilization, size / share), (*before, stop))
                    if start < stop and (stop not in reached or found < reached[stop]):
                        reached[stop] = found
            best = reached
        if total in best:
            break
    return _ranges(best[total][2][:-1], total)


def _memory_share(device: Device, devices: Sequence[Device]) -> float:
    """A device's memory divided by the number of devices that share it; unknown memory counts as the largest known one."""
    known = [d.memory for d in devices if d.memory is not None]
    memory = device.memory if device.memory is not None else max(known, default=1)
    times = 1 if device.hypothetical else sum(d.memory_pool == device.memory_pool for d in devices)
    return max(memory, 1) / times


def _explicit_cuts(split: str, total: int, count: int, cuts: Sequence[int]) -> tuple[int, ...]:
    """Whole numbers are layers per device, whose cuts must be legal; shares are rounded to the nearest legal cuts."""
    parts = [part.strip() for part in split.split(",")]
    if len(parts) != count:
        raise BadSetting(f"--split: {len(parts)} parts for {count} devices; write one part per device, or auto")
    if all(part.isascii() and part.isdecimal() for part in parts):
        return _cuts_of_counts([int(part) for part in parts], total, cuts)
    try:
        shares = [float(part) for part in parts]
    except ValueError:
        raise BadSetting(f"--split: {split!r} is neither auto, layers (24,8) nor shares (0.75,0.25)") from None
    if not all(0 < share <= 1 for share in shares) or not math.isclose(sum(shares), 1.0, abs_tol=0.01):
        raise BadSetting(f"--split: shares must be between 0 and 1 and add up to 1, {split!r} does not; for layers write 24,8")
    sums = [sum(shares[: i + 1]) for i in range(count - 1)]
    return nearest_cuts([share * total for share in sums], cuts)


def _cuts_of_counts(counts: list[int], total: int, cuts: Sequence[int]) -> tuple[int, ...]:
    wanted = tuple(sum(counts[: i + 1]) for i in range(len(counts) - 1))
    legal = nearest_cuts(wanted, cuts)
    if sum(counts) != total or 0 in counts:
        raise BadSetting(
            f"--split: {','.join(map(str, counts))} does not place {total} layers, at least one per device; "
            f"the nearest that does is {_as_split(legal, total)}"
        )
    if wanted != legal:
        wrong = next(cut for cut in wanted if cut not in cuts)
        raise BadSetting(
            f"--split: layers after {wrong} read keys and values of layers before it, so the model cannot be cut there; "
            f"the nearest legal split is {_as_split(legal, total)}"
        )
    return wanted


def nearest_cuts(wanted: Sequence[float], cuts: Sequence[int]) -> tuple[int, ...]:
    """Increasing legal cuts with the smallest sum of distances from the wanted ones."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for target in wanted:
        reached: dict[int, tuple[float, tuple[int, ...]]] = {}
        for last, (distance, before) in best.items():
            for cut in cuts:
                found = (distance + abs(cut - target), (*before, cut))
                if cut > last and (cut not in reached or found < reached[cut]):
                    reached[cut] = found
        best = reached
    return min(best.values())[1]


def _as_split(cuts: tuple[int, ...], total: int) -> str:
    return ",".join(str(len(layers)) for layers in _ranges(cuts, total))


def _ranges(cuts: tuple[int, ...], total: int) -> Ranges:
    edges = (0, *cuts, total)
    return tuple(range(start, stop) for start, stop in itertools.pairwise(edges))
