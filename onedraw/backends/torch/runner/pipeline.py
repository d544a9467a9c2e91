"""A thread per stage: what is set going passes all of them in order, and while one thing is in a stage the next may be in the
stage before.

In: what each thread does first (take its processors), then steps, one per stage. Out: a Future of what the last step gives. A
stage takes up one thing at a time, in the order in which things were set going; a step that fails ends its thing alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch

Step = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class StageJob:
    steps: Sequence[Step]
    result: Future[Any] = field(default_factory=Future)


class Pipeline:
    """Owner: the backend. The threads hold nothing but their queues between jobs, so they do not keep it alive."""

    def __init__(self, openings: Sequence[Callable[[], None]]) -> None:
        self._queues: list[SimpleQueue[StageJob | None]] = [SimpleQueue() for _ in openings]
        behind = [*self._queues[1:], None]
        self._threads = [
            threading.Thread(target=_work, args=(number, [opening], own, ahead), name=f"onedraw-stage-{number}", daemon=True)
            for number, (opening, own, ahead) in enumerate(zip(openings, self._queues, behind, strict=True))
        ]
        for thread in self._threads:
            thread.start()

    def start(self, steps: Sequence[Step]) -> Future[Any]:
        """One step per stage. Returns at once."""
        assert len(steps) == len(self._queues)
        job = StageJob(steps)
        self._queues[0].put(job)
        return job.result

    def close(self) -> None:
        """What is under way is finished first."""
        for queue, thread in zip(self._queues, self._threads, strict=True):
            queue.put(None)
            if thread is not threading.current_thread():  # the last to hold the backend may be a stage
                thread.join()


class SameThread:
    """Where stages have no threads: one step after the other, before `start` returns. What a step raises is raised there."""

    def start(self, steps: Sequence[Step]) -> Future[Any]:
        result: Future[Any] = Future()
        for step in steps:
            found = step()
        result.set_result(found)
        return result


def device_locks(devices: Sequence[torch.device]) -> list[AbstractContextManager[Any]]:
    """Who launches work on a GPU has it alone: operations keep what goes from one kernel to the next in places of their own,
    and a thread that records must not meet another's launches. CPUs are left to their threads."""
    made = {device: threading.RLock() for device in devices}
    return [made[device] if device.type == "cuda" else nullcontext() for device in devices]


def _work(
    number: int, openings: list[Callable[[], None]], own: SimpleQueue[StageJob | None], ahead: SimpleQueue[StageJob | None] | None
) -> None:
    failed: BaseException | None = None
    try:
        openings.pop()()  # and let go of: it may hold threads of its own
    except BaseException as error:  # told to whoever comes through here
        failed = error
    while (job := own.get()) is not None:
        try:
            if failed is not None:
                raise failed
            found = job.steps[number]()
        except BaseException as error:
            job.result.set_exception(error)
        else:
            if ahead is None:
                job.result.set_result(found)
            else:
                ahead.put(job)
            del found
        del job
