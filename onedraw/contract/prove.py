"""Prove for one model on one machine that no variation of how it runs changes a reply.

The plain run is one request after the other, without prefix cache or drafts. Each variation in `variations.py` is compared
with it, and the ProofTable says: same, different (with the first position), or not exercised. It never says "same" for a
variation that did not happen. Sampled tokens and the checksums of their scores are compared. A difference of 1e-7 in the
scores almost never changes a token, so comparing tokens alone would miss it.
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

from onedraw.contract.variations import Drive, Evidence, PlainRunFacts, Variation, requests, variations
from onedraw.errors import BadSetting, NoTokenLeft, OutOfMemory
from onedraw.llm.llm import LLM, idle_stats
from onedraw.llm.reply import ContentBlock, Reply, new_replies
from onedraw.llm.reply_stream import Generation, ReplyStream
from onedraw.models.registry import read_model_info
from onedraw.settings import Settings
from onedraw.text.constraints.grammar import structured_output_available

BuildLLM: TypeAlias = Callable[[Settings], LLM]
Progress: TypeAlias = Callable[[str], None]

NEW_TOKENS = 48  # tokens of each reply
QUICK_NEW_TOKENS = 12  # tokens of each reply with --quick
OTHER_CALLERS = 3  # In the variation "callers in turn", this many callers besides the first one send one request each.


@dataclass(frozen=True, slots=True)
class ProofRow:
    """The result of one variation. `request` and `position` locate the first difference."""

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
class ProofTable:
    model: str
    fingerprint: str
    requests: int
    tokens: int
    findings: tuple[ProofRow, ...]

    @property
    def holds(self) -> bool:
        return all(f.result != "different" for f in self.findings)


# ---------------------------------------------------------------------------------------------- the comparison


def prove(
    base: Settings,
    *,
    build: BuildLLM | None = None,
    quick: bool = False,
    page_bytes: int | None = None,
    notify: Progress = lambda text: None,
) -> ProofTable:
    """Compare every variation of a model with its plain run. Each variation builds its own LLM, and only one exists at a time.

    `build` is `build_llm` by default. `page_bytes` is how many bytes of --kv-memory one page takes; by default it is computed.
    """
    build = build or _default_build
    threads = base.threads or os.cpu_count() or 1
    plain_threads = None if base.backend == "xla" else threads  # The xla backend has no setting for the number of threads.
    plain_settings = replace(
        base,
        threads=plain_threads,
        prefix_cache=False,
        max_batch=1,
        draft=("none",),
        tree_budget=0,
        cache_budget=None,
        ahead="off",
    )
    new_tokens = QUICK_NEW_TOKENS if quick else NEW_TOKENS
    if not structured_output_available():
        notify("llguidance is not installed: no constrained replies")
    notify("the plain run")
    with build(plain_settings) as llm:
        card, generations = llm.card, requests(llm, new_tokens=new_tokens)
        kv_dtype = llm.service.capacity.kv_dtype
        plain, evidence = drive(llm, generations, "one by one", settings=plain_settings)
    findings: list[ProofRow] = []
    with TemporaryDirectory(prefix="onedraw-prove-") as folder:
        facts = PlainRunFacts(
            plain_settings,
            longest=max(len(a.prompt) for a in generations) + new_tokens,
            page_bytes=page_bytes or bytes_per_page(base, kv_dtype=kv_dtype),
            folder=Path(folder),
        )
        for variation in variations(base, threads=threads):
            notify(variation.name)
            given = {"max_batch": len(generations), "self_check": False, "ahead": base.ahead}
            settings = replace(plain_settings, **{**given, **variation.changes(facts)})
            found = _compare(variation, settings, generations, plain, evidence, build)
            findings += [] if found is None else [found]
    return ProofTable(
        model=card.name,
        fingerprint=card.fingerprint,
        requests=len(generations),
        tokens=sum(len(r.tokens) for r in plain),
        findings=tuple(findings),
    )


def _compare(
    variation: Variation,
    settings: Settings,
    generations: Sequence[Generation],
    plain: list[Reply],
    evidence: Evidence,
    build: BuildLLM,
) -> ProofRow | None:
    """Return one row of the table, or None if the variation does not apply to the model. If the LLM cannot be built, the row says
    why the variation was not exercised."""
    parts = [(i, given) for i, reply in enumerate(plain) for given in variation.given(i, reply)]
    predicting = [replace(generations[i], predicted=variation.predict(i, plain[i]), given=given) for i, given in parts]
    if variation.forces:
        predicting = [_forcing(one, plain[i]) for one, (i, _) in zip(predicting, parts, strict=True)]
    begun: list[Reply] = []
    try:
        if variation.warmed_up:
            with build(settings) as llm:
                drive(llm, predicting, variation.drive, settings=settings)
        with build(settings) as llm:
            if not variation.applies(llm):
                return None
            begun = [_beginning(llm, one, plain[i]) for one, (i, _) in zip(predicting, parts, strict=True)]
            replies, happened = drive(llm, predicting, variation.drive, settings=settings)
    except (BadSetting, OutOfMemory) as error:
        return ProofRow(variation.name, "not exercised", note=str(error))
    whole = [joined(first, rest) for first, rest in zip(begun, replies, strict=True)]
    numbers = [i for i, _ in parts]
    return judge(variation, plain, whole, exercised=variation.exercised(evidence, happened), numbers=numbers)


def _forcing(generation: Generation, plain: Reply) -> Generation:
    """Return a generation that scores the plain reply. Its seed is another one, which must not matter."""
    params = replace(generation.params, seed=generation.params.seed + 1)
    return replace(generation, params=params, forced=tuple(plain.token_ids))


def _beginning(llm: LLM, generation: Generation, plain: Reply) -> Reply:
    """Return the beginning of the plain reply whose tokens the generation is given (`continue_ids`), with its text."""
    (begun,) = new_replies([generation])
    for piece in ReplyStream(0, generation, llm.tokenizer).begun:
        begun.add(piece)
    begun.tokens = plain.tokens[: len(generation.given)]
    return begun


def joined(begun: Reply, rest: Reply) -> Reply:
    """Join the beginning and the rest of a reply into one reply, with the text in one block, to compare it with a plain reply."""
    text = ContentBlock(0, "content", text=begun.text + rest.text)
    return replace(rest, tokens=[*begun.tokens, *rest.tokens], blocks=[text])


def judge(
    variation: Variation,
    plain: Sequence[Reply],
    replies: Sequence[Reply],
    *,
    exercised: bool,
    numbers: Sequence[int] | None = None,
) -> ProofRow:
    """Compare replies with those of the plain run. A difference always counts; equality only counts if `exercised`. `numbers`
    has the index in `plain` of the reply to compare with; without it both are in the same order."""
    for number, found in zip(range(len(plain)) if numbers is None else numbers, replies, strict=True):
        expected = plain[number]
        position = first_difference(expected, found)
        if position is not None:
            return ProofRow(variation.name, "different", request=number, position=len(expected.prompt_ids) + position)
    return ProofRow(variation.name, "same" if exercised else "not exercised")


def first_difference(expected: Reply, found: Reply) -> int | None:
    """Return the index of the first token whose id, logprobs or checksum differ. If all common tokens are equal but the
    length, ending or text differs, it is the shorter length."""
    for index, (a, b) in enumerate(zip(expected.tokens, found.tokens)):
        if a != b:
            return index
    if (len(expected.tokens), expected.finish, expected.text) != (len(found.tokens), found.finish, found.text):
        return min(len(expected.tokens), len(found.tokens))
    return None


# ---------------------------------------------------------------------------------------------- running the requests


def drive(llm: LLM, generations: Sequence[Generation], how: Drive, *, settings: Settings) -> tuple[list[Reply], Evidence]:
    """Return the replies in the order of the generations, and the counters of the run. `how` says when requests are sent."""
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
        case "callers in turn":
            replies, pieces = asyncio.run(_callers_in_turn(llm, generations))
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
    return [_run_one(llm, generation) for generation in generations]


def _run_one(llm: LLM, generation: Generation) -> Reply:
    """Return one reply. If the sampling parameters leave no token to sample, the reply ends there without a finish reason, which
    is compared like any other ending."""
    (reply,) = new_replies([generation])
    with contextlib.suppress(NoTokenLeft):
        for piece in llm.pieces(llm.prepare(generation)):
            reply.add(piece)
    return reply


async def _at_once(llm: LLM, generations: Sequence[Generation]) -> tuple[list[Reply], int]:
    """Send all requests at the same time, in a shuffled order. The engine begins when it has all of them: otherwise a fast model
    could end one before the next arrives, and nothing would run in a batch."""
    order = list(range(len(generations)))
    random.Random(1).shuffle(order)
    llm.service.pause()
    tasks = [asyncio.ensure_future(_folded(llm, generations[number])) for number in order]
    await asyncio.sleep(0)  # Every task runs until it waits for its first event, so its request is submitted.
    llm.service.resume()
    answered = await asyncio.gather(*tasks)
    by_number = dict(zip(order, answered, strict=True))
    return [by_number[n][0] for n in range(len(generations))], sum(pieces for _, pieces in answered)


async def _callers_in_turn(llm: LLM, generations: Sequence[Generation]) -> tuple[list[Reply], int]:
    """Send most requests as one caller. Once the first piece of a reply has come, send the others, each as a caller of its own,
    so that they preempt running requests of the first caller."""
    running = asyncio.Event()
    others = range(len(generations) - OTHER_CALLERS, len(generations))

    async def answer(number: int) -> tuple[Reply, int]:
        if number in others:
            await running.wait()
            return await _folded(llm, generations[number], caller=f"caller {number}")
        try:
            return await _folded(llm, generations[number], caller="first", begun=running.set)
        finally:
            running.set()

    answered = await asyncio.gather(*(answer(number) for number in range(len(generations))))
    return [reply for reply, _ in answered], sum(pieces for _, pieces in answered)


async def _streamed(llm: LLM, generations: Sequence[Generation]) -> tuple[list[Reply], int]:
    answered = [await _folded(llm, generation) for generation in generations]
    return [reply for reply, _ in answered], sum(pieces for _, pieces in answered)


async def _folded(
    llm: LLM, generation: Generation, *, caller: str = "", begun: Callable[[], None] = lambda: None
) -> tuple[Reply, int]:
    """Return the reply and the number of its pieces. `begun` is called at every piece."""
    (reply,), count = new_replies([generation]), 0
    with contextlib.suppress(NoTokenLeft):
        async for piece in llm.apieces(llm.prepare(generation, caller=caller)):
            begun()
            reply.add(piece)
            count += 1
    return reply, count


def _default_build(settings: Settings) -> LLM:
    from onedraw.build.llm import build_llm

    return build_llm(settings, warm_up=False)  # A warm-up would take time and does not change the results.


def bytes_per_page(settings: Settings, *, kv_dtype: str) -> int:
    """Return how many bytes of --kv-memory one page takes."""
    from onedraw.build.checkpoint import find_checkpoint
    from onedraw.build.fit_devices import memory_plan_for

    if settings.backend == "fake":
        return 1
    with contextlib.closing(find_checkpoint(settings)) as checkpoint:
        plan = memory_plan_for(settings, read_model_info(checkpoint), dtype="f32", kv_dtype=kv_dtype or None)
        return sum(group.page_bytes for group in plan.groups)
