"""Numbered slots with least-recently-used eviction for checkpoints, and the choice of prompt positions to checkpoint.

The allocator uses them on the engine's thread. Only numbers are handled here; the backend owns the memory of a slot.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

from onedraw.memory.prefix_cache import PrefixCheckpoint

MIN_INTERVAL = 8  # The regular checkpoints of a long prompt are at least this many chunks apart.
MAX_SHARE = 4  # The regular checkpoints of one prompt take at most 1 / MAX_SHARE of the slots.


class Slots:
    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))

    @property
    def available(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        return self._free.pop() if self._free else None

    def release(self, slot: int) -> None:
        if slot in self._free or not 0 <= slot < self.count:
            raise AssertionError(f"slot {slot} released twice")
        self._free.append(slot)


class CheckpointSlots:
    """Slots for checkpoints. A slot is free, taken (a planned row fills it), or in use by a checkpoint. A pinned checkpoint is
    going to be restored by a planned row, so it is not evicted."""

    def __init__(self, count: int, *, evict: Callable[[PrefixCheckpoint], None]) -> None:
        self._slots = Slots(count)
        self._used: OrderedDict[int, PrefixCheckpoint] = OrderedDict()  # least recently used first
        self._pins: dict[int, int] = {}  # slot → number of planned rows that restore its checkpoint
        self._evict = evict  # removes a checkpoint from the prefix cache and releases its slot
        self.evictions = 0

    @property
    def count(self) -> int:
        return self._slots.count

    @property
    def used(self) -> int:
        return len(self._used)

    def take(self) -> int | None:
        """Return a slot to fill, or None if planned rows are going to read or fill every slot."""
        if not self._slots.available:
            oldest = next((c for slot, c in self._used.items() if slot not in self._pins), None)
            if oldest is None:
                return None
            self._evict(oldest)
            self.evictions += 1
        return self._slots.take()

    def release(self, slot: int) -> None:
        """Free a slot that was taken but not filled, or whose checkpoint was removed."""
        if slot in self._pins:
            raise AssertionError(f"slot {slot} is released although a row is going to restore it")
        self._used.pop(slot, None)
        self._slots.release(slot)

    def add(self, checkpoint: PrefixCheckpoint) -> None:
        self._used[checkpoint.slot] = checkpoint

    def pinned(self, slot: int) -> bool:
        return slot in self._pins

    def pin(self, slot: int) -> None:
        self._used.move_to_end(slot)
        self._pins[slot] = self._pins.get(slot, 0) + 1

    def unpin(self, slot: int) -> None:
        self._pins[slot] -= 1
        if not self._pins[slot]:
            del self._pins[slot]

    def audit(self, *, pins: Mapping[int, int], taken: int, checkpoints: list[PrefixCheckpoint]) -> None:
        """Raise if the slots disagree with the leases that restore and fill them, or with the prefix cache."""
        if dict(pins) != self._pins:
            raise AssertionError(f"pinned checkpoints: {self._pins} counted, leases have {dict(pins)}")
        if {c.slot: c for c in checkpoints} != dict(self._used) or len(checkpoints) != len(self._used):
            raise AssertionError("the prefix cache and the slots have different checkpoints")
        if self._slots.available + taken + len(self._used) != self.count:
            raise AssertionError("a checkpoint slot is lost")


def checkpoint_positions(*, prompt: int, start: int, shared: int, chunk: int, recurrent: bool, slots: int) -> tuple[int, ...]:
    """Return the positions of a prompt worth a checkpoint, the most useful first. They affect speed only, never the answer.

    The prompt is resumed from `start`, and the cache has pages for its first `shared` positions.
    """
    positions = [prompt]
    if recurrent:
        positions += [prompt - prompt % chunk, shared - shared % chunk]
        positions += _regular_positions(prompt, chunk=chunk, most=slots // MAX_SHARE)
    useful = (position for position in dict.fromkeys(positions) if start < position <= prompt)
    return tuple(useful)[:slots]


def _regular_positions(prompt: int, *, chunk: int, most: int) -> range:
    """Return at most `most` positions at equal intervals, the latest first. Intervals are doubled until they fit, so that
    prompts of different lengths save at common positions."""
    interval = MIN_INTERVAL * chunk
    while most and prompt // interval > most:
        interval *= 2
    return range(prompt - prompt % interval, 0, -interval) if most else range(0)
