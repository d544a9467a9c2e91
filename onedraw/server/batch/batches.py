"""The batches of a server: their states, and one worker for each caller that runs that caller's batches one after the other.

A batch goes from `validating` to `in_progress` and `finalizing`, and ends as `completed`, `failed`, `expired` or `cancelled`.
Each step is on disk before the next begins, and can be done again after a crash. A batch whose model is not the served one waits
until a server of that model (with the batch's fingerprint) uses the folder, or until the batch expires. Everything here runs on
the event loop, except access to the disk, which runs on threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator
from functools import partial
from typing import Any

from onedraw.errors import EngineLost, ShuttingDown
from onedraw.server.batch.lines import (
    BatchLine,
    LineFault,
    LineIdentity,
    LineResult,
    ModelChanged,
    check_lines,
    digits,
    read_lines,
    unfinished_line,
)
from onedraw.server.batch.results import ResultLog
from onedraw.server.batch.run import lines_at_once, run_lines
from onedraw.server.batch.store import Batch, BatchStore, Status

log = logging.getLogger("onedraw.server.batch")

SWEEP_SECONDS = 60.0  # time between two searches for expired files and batches
WHY: dict[Status, tuple[str, str]] = {  # status of a batch that ended early → code and message of the lines that were not run
    "expired": ("batch_expired", "this line was not run before the batch expired"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this line was run"),
    "failed": ("batch_failed", "the batch failed before this line was run"),
}
INPUT_LOST = LineFault(
    "input_file_lost",
    "the server's disk has lost the input file, so its other lines cannot be run or named; upload it again",
    param="input_file_id",
)

Answer = Callable[[BatchLine, LineIdentity, str | None], Awaitable[LineResult]]


class Batches:
    """Runs the batches of a store. `answer(line, identity, owner)` answers one line for the caller `owner`. A line's body has at
    most `longest` bytes."""

    def __init__(
        self,
        store: BatchStore,
        answer: Answer,
        *,
        lanes: int,
        longest: int,
        fingerprint: Callable[[], str],
        clock: Callable[[], float],
    ) -> None:
        self.store = store
        self._answer = answer
        self._most = lines_at_once(lanes)
        self._turns = asyncio.Semaphore(self._most)  # All callers share it. The line that has waited longest runs next.
        self._longest = longest
        self._fingerprint = fingerprint
        self._clock = clock
        self._workers: dict[str | None, asyncio.Task[None]] = {}
        self._logs: dict[str, ResultLog] = {}  # by id, the results of the batches that run
        self._sweeper: asyncio.Task[None] | None = None
        self._stopping = False
        self._changing = asyncio.Lock()  # held while a batch is read, changed and saved

    def start(self) -> None:
        """Continue the batches that an earlier process has left."""
        self._sweeper = asyncio.ensure_future(self._sweep())
        for owner in {batch.owner for batch in self.store.running()}:
            self._wake(owner)

    async def stop(self) -> None:
        """Stop all workers. Lines that run are cancelled; the next server process runs them again."""
        self._stopping = True
        tasks = [*self._workers.values(), *([self._sweeper] if self._sweeper else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.store.close()

    async def create(self, batch: Batch) -> Batch:
        await asyncio.to_thread(self.store.add_batch, batch)
        self._wake(batch.owner)
        return batch

    async def cancel(self, batch_id: str, owner: str | None) -> Batch:
        batch = self.store.batch(batch_id, owner)
        batch = await self._change(batch, "cancelling", only=("validating", "in_progress"))
        self._wake(owner)
        return batch

    def counts(self, batch: Batch) -> tuple[int, int]:
        """Return how many lines of a batch have succeeded and failed so far."""
        running = self._logs.get(batch.id)
        return (batch.completed, batch.failed) if running is None else (running.completed, running.failed)

    # ------------------------------------------------------------------ workers

    def _wake(self, owner: str | None) -> None:
        if not self._stopping and (owner not in self._workers or self._workers[owner].done()):
            self._workers[owner] = asyncio.ensure_future(self._work(owner))

    async def _sweep(self) -> None:
        while True:
            await asyncio.to_thread(self.store.sweep)
            for owner in {batch.owner for batch in self.store.running()}:
                self._wake(owner)
            await asyncio.sleep(SWEEP_SECONDS)

    async def _work(self, owner: str | None) -> None:
        stopped: set[str] = set()  # ids of batches that cannot go on now, so that they do not keep the others waiting
        while (batch := self._next(owner, but=stopped)) is not None:
            try:
                await self._advance(batch)
            except (ShuttingDown, EngineLost):
                return
            except ModelChanged:
                await self._change(batch, "in_progress", only=("finalizing",))
                log.warning("batch %s waits for a server with its model: %s", batch.id, batch.fingerprint)
            except Exception as error:  # a failure of the disk, or a bug
                log.error("batch %s stopped, and is continued in %g s", batch.id, SWEEP_SECONDS, exc_info=error)
                stopped.add(batch.id)

    def _next(self, owner: str | None, *, but: Collection[str]) -> Batch | None:
        """Return the oldest batch of a caller that can make progress and has none of these ids."""
        for batch in self.store.batches(owner):
            if batch.id in but or batch.ended:
                continue
            if batch.status != "in_progress" or self._runs_here(batch) or self._late(batch):
                return batch
        return None

    def _runs_here(self, batch: Batch) -> bool:
        return batch.fingerprint == self._fingerprint()

    def _late(self, batch: Batch) -> bool:
        return batch.expires_at <= self._clock()

    def _now(self, batch: Batch) -> Batch:
        """Return the batch as it is stored now, which may have been cancelled meanwhile."""
        return self.store.batch(batch.id, batch.owner)

    # ------------------------------------------------------------------ one batch

    async def _advance(self, batch: Batch) -> None:
        """Do the next step of a batch."""
        if batch.status != "cancelling" and await asyncio.to_thread(self._lost, batch):
            log.error("batch %s failed: its input file %s is not in the folder", batch.id, batch.input_file_id)
            await self._end(batch, "failed", (INPUT_LOST,))
            return
        match batch.status:
            case "validating":
                await self._validate(batch)
            case "in_progress" | "finalizing":  # Also if finalizing: lines whose results a crash has lost run again.
                await self._run(batch)
            case "cancelling":
                await self._end(batch, "cancelled")
            case _:
                raise AssertionError(batch.status)

    async def _validate(self, batch: Batch) -> None:
        path = self.store.content(batch.input_file_id)
        total, faults = await asyncio.to_thread(partial(check_lines, path, longest=self._longest, endpoint=batch.endpoint))
        if faults:
            await self._change(batch, "failed", only=("validating",), errors=tuple(faults))
        else:
            await self._change(batch, "in_progress", only=("validating",), total=total)

    async def _run(self, batch: Batch) -> None:
        answer, identity = self._answer, batch.identity

        async def answered(line: BatchLine) -> LineResult:
            async with self._turns:
                return await answer(line, identity.line(line.number), batch.owner)

        def stopped() -> bool:
            return self._now(batch).status == "cancelling" or self._late(batch) or self.store.full(batch.owner)

        with await asyncio.to_thread(partial(ResultLog, self.store.results(batch), title=batch.id)) as results:
            self._logs[batch.id] = results
            try:
                whole = await run_lines(
                    self._lines(batch),
                    results,
                    answered,
                    most=self._most,
                    stopped=stopped,
                    ended=lambda result: self.store.count_results(batch, results.size),
                )
            finally:
                del self._logs[batch.id]
        if whole:
            now = await self._change(batch, "finalizing", only=("in_progress", "finalizing"))
            if now.status == "finalizing":
                await self._end(now, "completed")
            return
        now = self._now(batch)
        if now.status == "cancelling":
            return
        if self._late(batch):
            await self._end(now, "expired")
        else:
            fault = LineFault("batch_storage_full", "the results do not fit into the server's --batch-disk; delete files first")
            await self._end(now, "failed", (fault,))

    async def _end(self, batch: Batch, status: Status, faults: tuple[LineFault, ...] = ()) -> None:
        changes = await asyncio.to_thread(partial(self._write_files, batch, status))
        await self._change(batch, status, errors=faults, **changes)

    def _write_files(self, batch: Batch, status: Status) -> dict[str, Any]:
        """Write the files of a batch and return their ids and the counts. Every line is in exactly one of them, except those
        without a result if the input file is lost."""
        code, message = WHY.get(status, ("", ""))
        with ResultLog(self.store.results(batch), title=batch.id) as results:
            left: dict[int, bytes] = {}
            for line in self._lines(batch) if len(results) < batch.total and not self._lost(batch) else ():
                if isinstance(line, BatchLine) and line.number not in results:
                    made = unfinished_line(line, batch.identity.line(line.number), code=code, message=message)
                    left[line.number] = made.text
            failed = sorted([*results.results(ok=False), *left.items()])
            ids: dict[str, str | None] = {"output": None, "error": None}
            for kind, texts in (("output", results.results(ok=True)), ("error", iter(failed))):
                if results.completed if kind == "output" else failed:
                    ids[kind] = f"file-{digits(batch.id, kind)}"
                    parts: Iterator[bytes] = (text + b"\n" for _, text in texts)
                    self.store.add_output(str(ids[kind]), parts, batch=batch, filename=f"{batch.id}_{kind}.jsonl")
            counted = {"completed": results.completed, "failed": len(failed)}
        return {**counted, "output_file_id": ids["output"], "error_file_id": ids["error"]}

    def _lost(self, batch: Batch) -> bool:
        """Whether the disk has lost the input file of a batch: as long as a batch needs its file, nobody can delete it here."""
        return not self.store.content(batch.input_file_id).exists()

    def _lines(self, batch: Batch) -> Iterator[BatchLine | LineFault]:
        return read_lines(self.store.content(batch.input_file_id), longest=self._longest, endpoint=batch.endpoint)

    async def _change(self, batch: Batch, status: Status, *, only: Collection[str] | None = None, **changes: object) -> Batch:
        """Give a batch another status if its status is one of `only` (None: any), and return it as it is stored after that."""
        async with self._changing:
            now = self._now(batch)
            if only is None or now.status in only:
                now = now.at(status, self._clock(), **changes)
                await asyncio.to_thread(self.store.save_batch, now)
            return now
