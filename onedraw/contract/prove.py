"""The contract's table for one model on one machine: every variation against the plain run.

In: Settings. Out: a Table of rows: same, different (and where first), or not exercised; never "same" for what did not
happen. The plain run is alone, one request after the other, cold, without drafts. Compared are the chosen tokens and the
checksum of the scores behind each of them: a difference of 1e-7 almost never flips a token, so tokens alone would let it
pass. Each way to be fast has its row in `variations.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, TypeAlias, assert_never

from onedraw.contract.variations import Drive, Evidence, Facts, Variation, requests, variations
from onedraw.errors import BadSetting, NoTokenLeft, OutOfMemory
from onedraw.llm.generation import Generation
from onedraw.llm.llm import LLM, idle_stats
from onedraw.llm.reply import Reply, new_replies
from onedraw.models.model_info import read_model_info
from onedraw.settings import Settings
from onedraw.text.constraints.grammar import structured_output_available

# -------------------- The contract's table for one model on one machine: every variation against the plain run.


Opener: TypeAlias = Callable[[Settings], LLM]
Tell: TypeAlias = Callable[[str], None]

NEW_TOKENS = 48
QUICK_NEW_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the table. `request` and `position` say where the first difference is."""

    name: str
    result: Literal["same", "different", "not exercised"]
    request: int | None = None
    position: int | None = None
    note: str = ""

    def __str__(self) -> str:
        if self.result == "different":
            return f"different (first at request {self.request}, position {self.position})"
        return self.result + (f" ({self.note})" if self.note else "")


@dataclass(frozen=True, slots=True)
class Table:
    model: str
    fingerprint: str
    requests: int
    tokens: int
    findings: tuple[Finding, ...]

    @property
    def holds(self) -> bool:
        return all(f.result != "different" for f in self.findings)


# ---------------------------------------------------------------------------------------------- the comparison


def prove(
    base: Settings,
    *,
    opener: Opener | None = None,
    quick: bool = False,
    page_bytes: int | None = None,
    tell: Tell = lambda text: None,
) -> Table:
    """Run every variation of a model against its plain run. Each opens its own door, one at a time.

    `opener` opens one, by default `assemble.open_door`; `page_bytes` is what one page weighs in kv_memory.
    """
    open_one = opener or _default_opener
    threads = base.threads or os.cpu_count() or 1
    told = None if base.backend == "xla" else threads  # XLA has no such setting
    plain_settings = replace(
        base, threads=told, prefix_cache=False, max_batch=1, draft=("none",), tree_budget=0, cache_budget=None, ahead="off"
    )
    new_tokens = QUICK_NEW_TOKENS if quick else NEW_TOKENS
    if not structured_output_available():
        tell("llguidance is not installed: no reply is held to a form")
    tell("the plain run")
    with open_one(plain_settings) as llm:
        card, generations = llm.card, requests(llm, new_tokens=new_tokens)
        plain, evidence = drive(llm, generations, "one by one", settings=plain_settings)
    findings: list[Finding] = []
    with TemporaryDirectory(prefix="onedraw-prove-") as folder:
        facts = Facts(
            plain_settings,
            longest=max(len(a.prompt) for a in generations) + new_tokens,
            page_bytes=page_bytes or bytes_per_page(base, dtype=card.dtype),
            folder=Path(folder),
        )
        for variation in variations(base, threads=threads):
            tell(variation.name)
            given = {"max_batch": len(generations), "self_check": False, "ahead": base.ahead}
            settings = replace(plain_settings, **{**given, **variation.changes(facts)})
            found = _vary(variation, settings, generations, plain, evidence, open_one)
            findings += [] if found is None else [found]
    return Table(
        model=card.name,
        fingerprint=card.fingerprint,
        requests=len(generations),
        tokens=sum(len(r.tokens) for r in plain),
        findings=tuple(findings),
    )


def _vary(
    variation: Variation,
    settings: Settings,
    generations: Sequence[Generation],
    plain: list[Reply],
    evidence: Evidence,
    open_one: Opener,
) -> Finding | None:
    """One row, or None where it does not apply. What cannot be opened that way here was not exercised, and says why."""
    predicting = [replace(a, predicted=variation.predict(i, plain[i])) for i, a in enumerate(generations)]
    try:
        if variation.rehearsed:
            with open_one(settings) as llm:
                drive(llm, predicting, variation.drive, settings=settings)
        with open_one(settings) as llm:
            if not variation.applies(llm):
                return None
            replies, happened = drive(llm, predicting, variation.drive, settings=settings)
    except (BadSetting, OutOfMemory) as error:
        return Finding(variation.name, "not exercised", note=str(error))
    return judge(variation, plain, replies, exercised=variation.exercised(evidence, happened))


def judge(variation: Variation, plain: Sequence[Reply], replies: Sequence[Reply], *, exercised: bool) -> Finding:
    """A difference counts whether or not the variation happened as meant; equality only if it did."""
    for number, (expected, found) in enumerate(zip(plain, replies, strict=True)):
        position = first_difference(expected, found)
        if position is not None:
            return Finding(variation.name, "different", request=number, position=len(expected.prompt_ids) + position)
    return Finding(variation.name, "same" if exercised else "not exercised")


def first_difference(expected: Reply, found: Reply) -> int | None:
    """Index of the first chosen token whose id, logprobs or checksum differ; past the end when only the ending does."""
    for index, (a, b) in enumerate(zip(expected.tokens, found.tokens)):
        if a != b:
            return index
    if (len(expected.tokens), expected.finish, expected.text) != (len(found.tokens), found.finish, found.text):
        return min(len(expected.tokens), len(found.tokens))
    return None


# ---------------------------------------------------------------------------------------------- driving


def drive(llm: LLM, generations: Sequence[Generation], how: Drive, *, settings: Settings) -> tuple[list[Reply], Evidence]:
    """Replies in the order of the asks, and what happened meanwhile."""
    if how == "after a part":
        _one_by_one(
            llm,
            [
                replace(generation, prompt=generation.prompt[: max(len(generation.prompt) * 3 // 4, 1)])
                for generation in generations
            ],
        )
    before = idle_stats(llm)
    match how:
        case "one by one" | "after a part":
            replies, pieces = _one_by_one(llm, generations), 0
        case "each twice":
            replies, pieces = [_one_by_one(llm, (generation, generation))[1] for generation in generations], 0
        case "at once":
            replies, pieces = asyncio.run(_at_once(llm, generations))
        case "streamed":
            replies, pieces = asyncio.run(_streamed(llm, generations))
        case _:
            assert_never(how)
    evidence = Evidence(
        counted=idle_stats(llm).since(before),
        replies=len(replies),
        pieces=pieces,
        cached=sum(r.usage.cached for r in replies),
        settings=settings,
        device=llm.card.device,
        stages=llm.service.capacity.stages,
    )
    return replies, evidence


def _one_by_one(llm: LLM, generations: Sequence[Generation]) -> list[Reply]:
    return [_told(llm, generation) for generation in generations]


def _told(llm: LLM, generation: Generation) -> Reply:
    """A reply that ran out of tokens to choose ends there, without a finish: a difference like any other."""
    (reply,) = new_replies([generation])
    with contextlib.suppress(NoTokenLeft):
        for piece in llm.pieces(llm.prepare(generation)):
            reply.add(piece)
    return reply


async def _at_once(llm: LLM, generations: Sequence[Generation]) -> tuple[list[Reply], int]:
    """All of them in one moment, in an order that has nothing to do with their numbers."""
    order = list(range(len(generations)))
    random.Random(1).shuffle(order)
    answered = await asyncio.gather(*(_folded(llm, generations[number]) for number in order))
    by_number = dict(zip(order, answered, strict=True))
    return [by_number[n][0] for n in range(len(generations))], sum(pieces for _, pieces in answered)


async def _streamed(llm: LLM, generations: Sequence[Generation]) -> tuple[list[Reply], int]:
    answered = [await _folded(llm, generation) for generation in generations]
    return [reply for reply, _ in answered], sum(pieces for _, pieces in answered)


async def _folded(llm: LLM, generation: Generation) -> tuple[Reply, int]:
    (reply,), count = new_replies([generation]), 0
    with contextlib.suppress(NoTokenLeft):
        async for piece in llm.apieces(llm.prepare(generation)):
            reply.add(piece)
            count += 1
    return reply, count


def _default_opener(settings: Settings) -> LLM:
    from onedraw.build.llm import build_llm

    return build_llm(settings, warm_up=False)  # recorded when they come, turns have the same bits


def bytes_per_page(settings: Settings, *, dtype: str) -> int:
    """What one page takes of --kv-memory."""
    from onedraw.build.checkpoint import find_checkpoint
    from onedraw.build.fit_devices import plan_memory

    if settings.backend == "fake":
        return 1
    checkpoint = find_checkpoint(settings)
    try:
        return sum(group.page_bytes for group in plan_memory(settings, read_model_info(checkpoint), dtype=dtype).groups)
    finally:
        checkpoint.close()
