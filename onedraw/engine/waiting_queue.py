"""The queue of waiting sequences, which knows in which order they are to be admitted.

The sequences of one call (its choices) have the same key and wait in order of arrival. The keys of one caller are in a ring: the
key whose sequence was admitted last goes to the end. The callers are in such a ring too. If all sequences have the same key, the
order is that of arrival. Background sequences come after all others.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from collections.abc import Sequence as List
from heapq import nsmallest

from onedraw.engine.fairness import TurnKey
from onedraw.engine.sequence import Sequence

Requests = OrderedDict[TurnKey, deque[Sequence]]


class WaitingQueue:
    """Waiting sequences, in a ring of callers and, for each caller, a ring of requests. The scheduler owns it."""

    def __init__(self) -> None:
        self._callers: OrderedDict[str, Requests] = OrderedDict()
        self.counts: Counter[str] = Counter()  # number of waiting sequences of each caller; other threads copy it

    def __len__(self) -> int:
        return self.counts.total()

    def __bool__(self) -> bool:
        return bool(self._callers)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for requests in self._callers.values() for queue in requests.values() for sequence in queue)

    def add(self, sequence: Sequence) -> None:
        self._queue(sequence.key).append(sequence)
        self.counts[sequence.key.caller] += 1

    def put_back(self, sequence: Sequence, *, last: bool) -> None:
        """Add a preempted sequence as the first of its request. With `last` its turn is over, so its request and its caller go to
        the end of their rings; else they go to the front."""
        key = sequence.key
        self._queue(key).appendleft(sequence)
        self.counts[key.caller] += 1
        self._callers[key.caller].move_to_end(key, last=last)
        self._callers.move_to_end(key.caller, last=last)

    def admit(self, sequence: Sequence) -> None:
        """Remove a sequence that is admitted, and move its caller and its request to the end of their rings."""
        key = sequence.key
        self.remove(sequence)
        if key.caller in self._callers:
            self._callers.move_to_end(key.caller)
            if key in self._callers[key.caller]:
                self._callers[key.caller].move_to_end(key)

    def remove(self, sequence: Sequence) -> None:
        key = sequence.key
        assert self.counts[key.caller], "this sequence does not wait"
        requests = self._callers[key.caller]
        requests[key].remove(sequence)  # This is fast, since admission always removes the first entry of the deque.
        self.counts[key.caller] -= 1
        if not requests[key]:
            del requests[key]
        if not requests:
            del self._callers[key.caller]
            del self.counts[key.caller]

    def candidates(self, running: List[TurnKey], most: int) -> list[Sequence]:
        """Return the next sequences to admit, the best first: no more than `most`, and one per request. `running` has the key of
        every running sequence: of those that are not in the background, callers with the fewest of them go first, then requests
        with the fewest, then the order of the rings decides; then the same for those in the background."""
        callers, requests = Counter(key.share for key in running), Counter(running)
        found = []
        for place, waiting in enumerate(self._callers.values()):
            for number, key in enumerate(nsmallest(most, waiting, key=lambda key: (key.background, requests[key]))):
                found.append((key.background, callers[key.share] + number, place, waiting[key][0]))
        return [sequence for *_, sequence in nsmallest(most, found, key=lambda entry: entry[:3])]

    def _queue(self, key: TurnKey) -> deque[Sequence]:
        requests = self._callers.setdefault(key.caller, OrderedDict())
        return requests.setdefault(key, deque())
