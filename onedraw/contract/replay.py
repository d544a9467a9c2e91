"""Run recorded requests again and report which tokens differ.

The LLM may have any drafter, batch size or memory. The ReplayReport has one verdict per record. "same" means that every token and
the ending are equal, and the checksums if they were recorded. A request that could not run is never "same".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from onedraw.contract.record import Record
from onedraw.engine.stats import Stats
from onedraw.errors import OnedrawError
from onedraw.llm.llm import LLM, idle_stats
from onedraw.llm.reply import Reply
from onedraw.llm.reply_stream import Generation

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one record. `index` is the first token of the reply that differs, counted from 0; if only the ending
    differs it is the shorter length. `recorded` and `found` are the tokens at `index`."""

    where: str  # file and line of the record
    id: str
    seed: int | None
    tokens: int  # number of tokens in the recorded reply
    result: Literal["same", "different", "not run"]
    index: int | None = None
    recorded: int | None = None
    found: int | None = None
    note: str = ""  # what differs, or why the request could not be run


@dataclass(frozen=True, slots=True)
class ReplayReport:
    model: str
    fingerprint: str
    recorded_by: tuple[str, ...]  # the different fingerprints (version, weights, device, dtype) in the records
    verdicts: tuple[Verdict, ...]
    counted: Stats  # how much the engine's counters grew during the replay

    def of(self, result: Literal["same", "different", "not run"]) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.result == result]

    @property
    def holds(self) -> bool:
        return all(verdict.result == "same" for verdict in self.verdicts)


def replay(records: Sequence[Record], llm: LLM, *, notify: Progress = lambda text: None) -> ReplayReport:
    """Run the records again, in order, as many at the same time as the LLM accepts."""
    before = idle_stats(llm)
    verdicts = asyncio.run(_all(records, llm, notify))
    return ReplayReport(
        model=llm.card.name,
        fingerprint=llm.card.fingerprint,
        recorded_by=tuple(sorted({record.fingerprint for record in records})),
        verdicts=tuple(verdicts),
        counted=idle_stats(llm).since(before),
    )


async def _all(records: Sequence[Record], llm: LLM, notify: Progress) -> list[Verdict]:
    slots = asyncio.Semaphore(min(llm.service.max_requests, 2 * llm.service.capacity.lanes))
    done = 0

    async def one(record: Record) -> Verdict:
        nonlocal done
        async with slots:
            verdict = await _again(record, llm)
        done += 1
        notify(f"replayed {done} of {len(records)}")
        return verdict

    return list(await asyncio.gather(*(one(record) for record in records)))


async def _again(record: Record, llm: LLM) -> Verdict:
    if record.generation is None:
        return _verdict(record, "not run", note=record.unwritten or "its request was not recorded")
    params = replace(record.generation.params, checksums=record.checksums is not None)
    generation = replace(record.generation, params=params, label="replay")
    try:
        (reply,) = await llm.arun(generation)
    except OnedrawError as error:
        return _verdict(record, "not run", note=str(error))
    return judge(record, reply)


def judge(record: Record, reply: Reply) -> Verdict:
    """Compare a reply with its record, and return the verdict with the first difference."""
    found = reply.token_ids
    for index, (then, now) in enumerate(zip(record.reply, found)):
        if then != now:
            return _verdict(record, "different", index=index, recorded=then, found=now, note="another token")
        if record.checksums is not None and record.checksums[index] != reply.tokens[index].checksum:
            return _verdict(record, "different", index=index, recorded=then, found=now, note="the same token with other scores")
    if (len(record.reply), record.finish) != (len(found), reply.finish):
        end = min(len(record.reply), len(found))
        longer = {"recorded": record.reply[end]} if len(record.reply) > end else {"found": found[end]} if len(found) > end else {}
        note = f"ended by {record.finish} after {len(record.reply)}, now by {reply.finish} after {len(found)}"
        return _verdict(record, "different", index=end, note=note, **longer)
    return _verdict(record, "same")


def _verdict(
    record: Record,
    result: Literal["same", "different", "not run"],
    *,
    index: int | None = None,
    recorded: int | None = None,
    found: int | None = None,
    note: str = "",
) -> Verdict:
    generation: Generation | None = record.generation
    return Verdict(
        where=record.where,
        id=record.id,
        seed=None if generation is None else generation.params.seed,
        tokens=len(record.reply),
        result=result,
        index=index,
        recorded=recorded,
        found=found,
        note=note,
    )
