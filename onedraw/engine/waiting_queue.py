"""The queue of waiting sequences: one queue per request, requests in a ring per caller, callers in a ring.

In: sequences with their keys. Out: the order in which they are admitted. Within a request it is the order of arrival; with one
key for all sequences it is the order of arrival altogether.
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
    """Owner: the scheduler. The caller or request that was admitted last is the last in its ring."""

    def __init__(self) -> None:
        self._callers: OrderedDict[str, Requests] = OrderedDict()
        self.counts: Counter[str] = Counter()  # waiting sequences by caller; read by other threads

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
        """A preempted sequence: the first of its request. `last`: its turn is over, so the others go before its request."""
        key = sequence.key
        self._queue(key).appendleft(sequence)
        self.counts[key.caller] += 1
        self._callers[key.caller].move_to_end(key, last=last)
        self._callers.move_to_end(key.caller, last=last)

    def admit(self, sequence: Sequence) -> None:
        """Remove a sequence that is admitted. Its caller and its request had their turn."""
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
        requests[key].remove(sequence)  # fast for the first, as at admission
        self.counts[key.caller] -= 1
        if not requests[key]:
            del requests[key]
        if not requests:
            del self._callers[key.caller]
            del self.counts[key.caller]

    def candidates(self, running: List[TurnKey], most: int) -> list[Sequence]:
        """The next sequences to admit, one per request: those of callers that hold fewest rows first, then of requests that hold
        fewest, then in the order of the rings."""
        callers, requests = Counter(key.caller for key in running), Counter(running)
        found = []
        for place, (caller, waiting) in enumerate(self._callers.items()):
            for number, key in enumerate(nsmallest(most, waiting, key=requests.__getitem__)):
                found.append((callers[caller] + number, place, waiting[key][0]))
        return [sequence for *_, sequence in nsmallest(most, found, key=lambda entry: entry[:2])]

    def _queue(self, key: TurnKey) -> deque[Sequence]:
        requests = self._callers.setdefault(key.caller, OrderedDict())
        return requests.setdefault(key, deque())
