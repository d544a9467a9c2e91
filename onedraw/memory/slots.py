"""Lanes: numbered slots of per-sequence state, lent one at a time.

In: take, give back. Out: a lane number. Owner: the ledger.
"""

from __future__ import annotations


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
            raise AssertionError(f"lane {slot} given back twice")
        self._free.append(slot)
