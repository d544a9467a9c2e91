"""Numbered slots: lanes, lent one at a time, and the slots of checkpoints, the least recently used one given up first.

In: take, give back, keep, pin. Out: slot numbers. Owner: the allocator.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

from onedraw.memory.prefix_cache import Checkpoint


class Slots:
    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))

    @property
    def available(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        if slot in self._free or not 0 <= slot < self.count:
            raise AssertionError(f"slot {slot} given back twice")
        self._free.append(slot)


class CheckpointSlots:
    """A slot is free, taken (a row is about to fill it), or kept with its checkpoint. A pinned one is still to be restored
    by somebody and is not given up."""

    def __init__(self, count: int, *, give_up: Callable[[Checkpoint], None]) -> None:
        self._slots = Slots(count)
        self._kept: OrderedDict[int, Checkpoint] = OrderedDict()  # least recently used first
        self._pins: dict[int, int] = {}
        self._give_up = give_up  # told when a kept slot is taken for another checkpoint; it removes the old one
        self.evictions = 0

    @property
    def count(self) -> int:
        return self._slots.count

    @property
    def kept(self) -> int:
        return len(self._kept)

    def take(self) -> int | None:
        """A slot to fill, or None where all are about to be read or written."""
        if not self._slots.available:
            oldest = next((c for slot, c in self._kept.items() if slot not in self._pins), None)
            if oldest is None:
                return None
            self._give_up(oldest)
            self.evictions += 1
        return self._slots.take()

    def give_back(self, slot: int) -> None:
        """A slot that was taken and not filled, or whose checkpoint is removed."""
        if slot in self._pins:
            raise AssertionError(f"slot {slot} is given back while a row is about to restore it")
        self._kept.pop(slot, None)
        self._slots.give_back(slot)

    def keep(self, checkpoint: Checkpoint) -> None:
        self._kept[checkpoint.slot] = checkpoint

    def pinned(self, slot: int) -> bool:
        return slot in self._pins

    def pin(self, slot: int) -> None:
        self._kept.move_to_end(slot)
        self._pins[slot] = self._pins.get(slot, 0) + 1

    def unpin(self, slot: int) -> None:
        self._pins[slot] -= 1
        if not self._pins[slot]:
            del self._pins[slot]

    def audit(self, *, pins: Mapping[int, int], taken: int, checkpoints: list[Checkpoint]) -> None:
        """Raise if the books disagree with what leases restore and fill, or with the index."""
        if dict(pins) != self._pins:
            raise AssertionError(f"checkpoints to be restored: {self._pins} on the books, {dict(pins)} leases")
        if {c.slot: c for c in checkpoints} != dict(self._kept) or len(checkpoints) != len(self._kept):
            raise AssertionError("the index and the slots know different checkpoints")
        if self._slots.available + taken + len(self._kept) != self.count:
            raise AssertionError("a checkpoint's slot is lost")
