"""A cache of results in which each result is computed only once, even if several threads ask for it at the same time.

The least recently used results are dropped first. A computation that raises is not cached, so the next caller tries again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class _Entry(Generic[ResultT]):
    weight: int
    result: Future[ResultT] = field(default_factory=Future)


class ResultCache(Generic[ResultT]):
    """Holds at most `most` results, whose weights add up to at most `weight` unless there is only one. Several threads may use
    it."""

    def __init__(self, *, most: int, weight: int) -> None:
        self._most, self._weight = most, weight
        self._entries: OrderedDict[Hashable, _Entry[ResultT]] = OrderedDict()
        self._total = 0
        self._lock = threading.Lock()  # never held while a result is computed

    def get(self, key: Hashable, weight: int, make: Callable[[], ResultT]) -> ResultT:
        while True:
            with self._lock:
                found = self._entries.get(key)
                if found is None:
                    mine = self._entries[key] = _Entry(weight)
                    self._total += weight
                    break
                self._entries.move_to_end(key)
            if found.result.exception() is None:  # This waits until the thread that computes the result has finished.
                return found.result.result()
        try:
            made = make()
        except BaseException as error:
            with self._lock:
                self._remove(key, mine)
            mine.result.set_exception(error)
            raise
        mine.result.set_result(made)
        with self._lock:
            while len(self._entries) > self._most or (self._total > self._weight and len(self._entries) > 1):
                oldest = next(iter(self._entries))
                self._remove(oldest, self._entries[oldest])
        return made

    def _remove(self, key: Hashable, entry: _Entry[ResultT]) -> None:
        if self._entries.get(key) is entry:
            del self._entries[key]
            self._total -= entry.weight
