"""Which layers run on which device: contiguous ranges, cut where the model may be cut. Pure.

In: a spec, bytes, devices, and a wish (`auto`, `24,8`, `0.75,0.25`). Out: ranges, or an error that says what would do.
A layer that reads another's keys and values stays with it. Embeddings go with the first range, last norm and head with
the last. The same device may be named twice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from onedraw.backends.devices import Device
from onedraw.errors import BadSetting, OutOfMemory
from onedraw.models.spec import AttentionSpec, LayerSpec

Ranges = tuple[range, ...]


@dataclass(frozen=True, slots=True)
class StageLoads:
    """Bytes: of every layer with all it keeps, and of what comes with the first range, the last, and each boundary."""

    layers: tuple[int, ...]
    first: int = 0
    last: int = 0
    boundary: int = 0  # on both of its sides

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


def place_layers(loads: StageLoads, devices: Sequence[Device], *, cuts: Sequence[int], split: str = "auto") -> Ranges:
    """One range per device. What does not fit into a device's memory is refused."""
    total, count = len(loads.layers), len(devices)
    if count - 1 > len(cuts):
        most = f"at most {len(cuts) + 1}" if len(cuts) else "only one"
        raise BadSetting(f"--devices: {count} devices, but this model's {total} layers can be cut into {most}; name fewer")
    if split == "auto":
        ranges = _fastest(loads, devices, cuts)
    else:
        ranges = _ranges(_explicit(split, total, count, cuts), total)
    check_fit(loads, ranges, devices)
    return ranges


def check_fit(loads: StageLoads, ranges: Ranges, devices: Sequence[Device]) -> None:
    """A device that is named twice holds both of its ranges."""
    rooms: dict[object, list[tuple[Device, range]]] = {}
    for index, (device, layers) in enumerate(zip(devices, ranges, strict=True)):
        key = index if device.hypothetical else device.memory_pool  # a description named twice is two devices alike
        rooms.setdefault(key, []).append((device, layers))
    for held in rooms.values():
        device, needed = held[0][0], sum(loads.of(layers) for _, layers in held)
        if device.memory is not None and needed > device.memory:
            parts = ", ".join(f"{layers.start}–{layers.stop - 1}" for _, layers in held)
            raise OutOfMemory(
                f"layers {parts} need {needed} bytes and {device.name} has {device.memory}: {needed - device.memory} too many. "
                f"Lower --max-context, --max-batch or --kv-memory, use a smaller --dtype, another --split, or more devices"
            )


# ---------------------------------------------------------------------- auto


def _weight(device: Device, devices: Sequence[Device]) -> float:
    """Its memory, shared among the ranges it holds; of which nobody knows, as much as the largest that is known."""
    known = [d.memory for d in devices if d.memory is not None]
    memory = device.memory if device.memory is not None else max(known, default=1)
    times = 1 if device.hypothetical else sum(d.memory_pool == device.memory_pool for d in devices)
    return max(memory, 1) / times


def _fastest(loads: StageLoads, devices: Sequence[Device], cuts: Sequence[int]) -> Ranges:
    """Of the ranges that fit, those with the least on a CPU beside an accelerator, and then those whose fullest device is
    least full; among equals the earliest cuts. Where none fits, the least overfull, for the error's sake."""
    total = len(loads.layers)
    weights = [_weight(device, devices) for device in devices]
    mixed = len({device.kind == "cpu" for device in devices}) > 1
    for strict in (True, False):
        best: dict[int, tuple[int, float, tuple[int, ...]]] = {0: (0, 0.0, ())}  # layers placed → slow bytes, fullest, cuts
        for index, (device, weight) in enumerate(zip(devices, weights, strict=True)):
            last = index == len(devices) - 1
            reached: dict[int, tuple[int, float, tuple[int, ...]]] = {}
            for start, (slow, fullest, before) in best.items():
                for stop in [total] if last else [cut for cut in cuts if cut > start]:
                    size = loads.of(range(start, stop))
                    if strict and device.memory is not None and size > weight:
                        continue
                    slower = slow + (size if strict and mixed and device.kind == "cpu" else 0)
                    found = (slower, max(fullest, size / weight), (*before, stop))
                    if start < stop and (stop not in reached or found < reached[stop]):
                        reached[stop] = found
            best = reached
        if total in best:
            break
    return _ranges(best[total][2][:-1], total)


# ---------------------------------------------------------------------- said by hand


def _explicit(split: str, total: int, count: int, cuts: Sequence[int]) -> tuple[int, ...]:
    """Whole numbers are layers per device, and stand or fall; shares are rounded to where the model may be cut."""
    parts = [part.strip() for part in split.split(",")]
    if len(parts) != count:
        raise BadSetting(f"--split: {len(parts)} parts for {count} devices; write one part per device, or auto")
    if all(part.isascii() and part.isdecimal() for part in parts):
        return _counted([int(part) for part in parts], total, cuts)
    try:
        shares = [float(part) for part in parts]
    except ValueError:
        raise BadSetting(f"--split: {split!r} is neither auto, layers (24,8) nor shares (0.75,0.25)") from None
    if not all(0 < share <= 1 for share in shares) or not math.isclose(sum(shares), 1.0, abs_tol=0.01):
        raise BadSetting(f"--split: shares lie between 0 and 1 and add up to 1, {split!r} does not; for layers write 24,8")
    sums = [sum(shares[: i + 1]) for i in range(count - 1)]
    return nearest_cuts([share * total for share in sums], cuts)


def _counted(counts: list[int], total: int, cuts: Sequence[int]) -> tuple[int, ...]:
    asked = tuple(sum(counts[: i + 1]) for i in range(len(counts) - 1))
    legal = nearest_cuts(asked, cuts)
    if sum(counts) != total or 0 in counts:
        raise BadSetting(
            f"--split: {','.join(map(str, counts))} does not place {total} layers, at least one per device; "
            f"the nearest that does is {_written(legal, total)}"
        )
    if asked != legal:
        wrong = next(cut for cut in asked if cut not in cuts)
        raise BadSetting(
            f"--split: layers behind {wrong} read keys and values of layers before it, so no cut goes there; "
            f"the nearest legal split is {_written(legal, total)}"
        )
    return asked


def nearest_cuts(asked: Sequence[float], cuts: Sequence[int]) -> tuple[int, ...]:
    """Legal cuts, one behind the other, whose distances from the asked ones add up to the least."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for wish in asked:
        reached: dict[int, tuple[float, tuple[int, ...]]] = {}
        for last, (distance, before) in best.items():
            for cut in cuts:
                found = (distance + abs(cut - wish), (*before, cut))
                if cut > last and (cut not in reached or found < reached[cut]):
                    reached[cut] = found
        best = reached
    return min(best.values())[1]


def _written(cuts: tuple[int, ...], total: int) -> str:
    return ",".join(str(len(layers)) for layers in _ranges(cuts, total))


def _ranges(cuts: tuple[int, ...], total: int) -> Ranges:
    edges = (0, *cuts, total)
    return tuple(range(start, stop) for start, stop in itertools.pairwise(edges))
