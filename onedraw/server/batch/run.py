"""Run the lines of a batch, some at a time.

The input is lines and a function that answers one line; the output is results in a ResultLog. The server and `onedraw batch` use
this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from onedraw.server.batch.lines import BatchLine, LineFault, LineResult
from onedraw.server.batch.results import ResultLog

POLL_SECONDS = 0.5  # A batch checks at least this often whether it must stop.


def lines_at_once(lanes: int) -> int:
    """Return how many lines of batches run at the same time: as many as there are lanes. More would wait in the engine's queue
    and take turns, which preempts rows for nothing, as the time at which a line ends does not matter."""
    return lanes


async def run_lines(
    lines: Iterable[BatchLine | LineFault],
    log: ResultLog,
    answer: Callable[[BatchLine], Awaitable[LineResult]],
    *,
    most: int,
    stopped: Callable[[], bool] = lambda: False,
    ended: Callable[[LineResult], None] = lambda result: None,
) -> bool:
    """Answer the lines that have no result yet. Return True when all have one, and False once `stopped` returns True; the lines
    that run at that time are cancelled. An exception of `answer` cancels them too, and is raised. `ended` is called after every
    result. Lines are read on a thread, since skipping those of an earlier run takes long in a large file."""
    left = (line for line in lines if isinstance(line, BatchLine) and line.number not in log)
    running: dict[asyncio.Task[LineResult], int] = {}

    async def collect() -> bool:
        done, _ = await asyncio.wait(running, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for task in sorted(done, key=running.__getitem__):
            log.add(running.pop(task), result := task.result())
            ended(result)
        return stopped()

    try:
        while (line := await asyncio.to_thread(next, left, None)) is not None:
            while len(running) >= most:
                if await collect():
                    return False
            if stopped():
                return False
            running[asyncio.ensure_future(answer(line))] = line.number
        while running:
            if await collect():
                return False
        return True
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
