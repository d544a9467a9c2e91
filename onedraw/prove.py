"""The contract's table for one model on one machine: every variation against the plain run.

In: Settings. Out: a Table of rows: same, different (and where first), or not exercised; never "same" for what did not
happen. The plain run is alone, one request after the other, cold, without drafts. Compared are the chosen tokens and the
checksum of the scores behind each of them: a difference of 1e-7 almost never flips a token, so tokens alone would let it
pass. Each way to be fast adds its Variation here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, assert_never

from onedraw.door import Ask, Door, Reply
from onedraw.engine.stats import Drafted, Stats
from onedraw.errors import Barren
from onedraw.models.loading import describe
from onedraw.settings import DRAFT_WORDS, Settings
from onedraw.speculation.speculator import DEVICE
from onedraw.wishes import GUIDED, Wishes, settle

Opener: TypeAlias = Callable[[Settings], Door]
Tell: TypeAlias = Callable[[str], None]
Drive: TypeAlias = Literal["one by one", "at once", "streamed", "twice"]

NEW_TOKENS = 48
QUICK_NEW_TOKENS = 12
SMALL_TURN = 16
TREE_BUDGET, WHOLE_TREE = 16, 64  # nodes of a proved tree, and more than its depth
DRAFT_TOKENS = 4  # guesses per row where no number was asked for: drafts that do not pay off are proved too
SETTLE_SECONDS = 10.0  # the counters follow the last event within one turn


@dataclass(frozen=True, slots=True)
class Facts:
    """What variations are shaped by: known once the plain run has run."""

    settings: Settings  # of the plain run
    longest: int  # tokens of the longest request, prompt and reply
    page_bytes: int  # of one page over all layers


@dataclass(frozen=True, slots=True)
class Evidence:
    """What happened during a drive: counters after minus counters before, and what was seen on the way."""

    counted: Stats
    replies: int
    pieces: int
    cached: int  # prompt tokens the replies say came from the prefix cache
    settings: Settings
    device: str

    def drafted(self, source: str | None = None) -> Drafted:
        """What came of one source's guesses, or of all of them."""
        chosen = [d for d in self.counted.drafted_by if source in (None, d.source)]
        return Drafted(source or "", sum(d.rows for d in chosen), sum(d.drafted for d in chosen), sum(d.kept for d in chosen))


@dataclass(frozen=True, slots=True)
class Variation:
    """One way to run that must not matter."""

    name: str
    changes: Callable[[Facts], Mapping[str, Any]]  # to the plain settings
    drive: Drive
    exercised: Callable[[Evidence, Evidence], bool]  # (plain, this): did it happen?
    applies: Callable[[Door], bool] = lambda door: True  # without it the row is left out
    predict: Callable[[int, Reply], tuple[int, ...]] = lambda number, plain: ()  # what request `number` is said to become


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
        return self.result


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


def variations(base: Settings, *, threads: int) -> tuple[Variation, ...]:
    """The rows. Every one opens a model anew, so each is also "after a restart". `threads`: of the plain run."""
    return (
        Variation("alone again, after a restart", lambda facts: {}, "one by one", lambda plain, now: now.counted.turns > 0),
        Variation("streamed", lambda facts: {}, "streamed", lambda plain, now: now.pieces > now.replies),
        Variation("batched, at once, random order", lambda facts: {}, "at once", lambda plain, now: now.counted.mixed_turns > 0),
        Variation(
            "small turns",
            lambda facts: {"turn_tokens": SMALL_TURN},
            "at once",
            lambda plain, now: now.counted.middle_chunks > plain.counted.middle_chunks,
        ),
        Variation("preempted, few pages", _few_pages, "at once", lambda plain, now: now.counted.preemptions > 0),
        Variation("prefix cache hit", lambda facts: {"prefix_cache": True}, "twice", lambda plain, now: now.cached > 0),
        Variation(
            "batched, small turns, few pages, prefix cache",
            lambda facts: {**_few_pages(facts), "turn_tokens": SMALL_TURN, "prefix_cache": True},
            "at once",
            lambda plain, now: now.counted.mixed_turns > 0 and now.counted.preemptions > 0 and now.counted.middle_chunks > 0,
        ),
        *(
            Variation(f"{count} thread{'s' * (count > 1)}", _threads(count), "one by one", _other_threads)
            for count in (1, 2)
            if count != threads
        ),
        *drafting(base),
    )


def drafting(base: Settings) -> tuple[Variation, ...]:
    """A row for everybody who may guess under --draft, and one for all of them in a crowd."""
    if base.draft == ("none",):
        return ()
    everybody = "auto" in base.draft
    rows: list[Variation] = []
    if everybody or "ngram" in base.draft:
        rows.append(Variation("drafts: ngram", _draft(base, "ngram"), "one by one", _kept_and_rejected("ngram")))
    if everybody or "prediction" in base.draft:
        said, unsaid = _draft(base, "prediction"), _scrambled
        rows += [
            Variation("drafts: prediction, right", said, "one by one", lambda p, now: now.drafted().kept > 0, predict=_right),
            Variation("drafts: prediction, wrong", said, "one by one", _rejected, predict=unsaid),
            Variation(
                "drafts: held to a form",
                said,
                "at once",
                lambda plain, now: _both(now.drafted()) and now.counted.mixed_turns > 0,
                predict=_formal,
            ),
        ]
    if everybody:
        rows += _drafter(base, "built-in drafter", "auto")
    for path in (entry for entry in base.draft if entry not in DRAFT_WORDS):
        rows += _drafter(base, Path(path).name, path)
    crowd = _draft(base, *base.draft)
    rows.append(
        Variation(
            "drafts, batched, few pages",
            lambda facts: {**crowd(facts), **_few_pages(facts)},
            "at once",
            lambda plain, now: now.counted.preemptions > 0 and now.counted.mixed_turns > 0 and _both(now.drafted()),
            predict=lambda number, reply: (_right if number % 2 else _scrambled)(number, reply),
        )
    )
    return tuple(rows)


def _drafter(base: Settings, name: str, who: str) -> tuple[Variation, Variation]:
    """A drafter that the backend runs, as a chain and as a tree, which is taken whole."""
    chain, there = _kept_and_rejected(DEVICE), lambda door: bool(door.service.capacity.drafter)
    tree = {"draft": (who,), "draft_tokens": WHOLE_TREE, "tree_budget": base.tree_budget or TREE_BUDGET}
    return (
        Variation(f"drafts: {name}", _draft(base, who), "one by one", chain, applies=there),
        Variation(
            f"drafts: {name}, as a tree",
            lambda facts: tree,
            "one by one",
            lambda plain, now: now.counted.draft_trees > 0 and chain(plain, now),
            applies=there,
        ),
    )


def _draft(base: Settings, *who: str) -> Callable[[Facts], Mapping[str, Any]]:
    return lambda facts: {"draft": who, "draft_tokens": base.draft_tokens or DRAFT_TOKENS}


def _both(drafted: Drafted) -> bool:
    return 0 < drafted.kept < drafted.drafted


def _kept_and_rejected(source: str) -> Callable[[Evidence, Evidence], bool]:
    return lambda plain, now: _both(now.drafted(source))


def _rejected(plain: Evidence, now: Evidence) -> bool:
    return now.drafted().kept < now.drafted().drafted


def _right(number: int, reply: Reply) -> tuple[int, ...]:
    return tuple(reply.token_ids)


def _scrambled(number: int, reply: Reply) -> tuple[int, ...]:
    """The answer's own tokens in another order: here and there still right."""
    tokens = reply.token_ids
    random.Random(number).shuffle(tokens)
    return tuple(tokens)


def _formal(number: int, reply: Reply) -> tuple[int, ...]:
    """Only replies that are held to a form are predicted, and wrong from the middle on: drafts that break the form."""
    if not _held(PROMPTS[number][1]):
        return ()
    half = len(reply.token_ids) // 2
    return (*reply.token_ids[:half], *_scrambled(number, reply))


def _few_pages(facts: Facts) -> Mapping[str, Any]:
    """Pages for the longest request and two more: several at once cannot all stay."""
    pages = -(-facts.longest // facts.settings.page_size) + 2
    return {"max_context": facts.longest, "kv_memory": pages * facts.page_bytes}


def _threads(count: int) -> Callable[[Facts], Mapping[str, Any]]:
    return lambda facts: {"threads": count}


def _other_threads(plain: Evidence, now: Evidence) -> bool:
    """Threads matter where a CPU computes, and only another number of them is a variation."""
    return now.device.startswith("cpu") and now.settings.backend != "fake" and now.settings.threads != plain.settings.threads


# ---------------------------------------------------------------------------------------------- the requests

NOTICE = (
    "The lighthouse stood at the end of a long stone pier. Every evening the keeper climbed its two hundred steps, trimmed the "
    "wick, wound the clockwork that turned the lens, and wrote the weather into a book with a blue cover: wind, swell, "
    "visibility, the ships that had passed and the ships that had not. "
)
LIGHTHOUSE: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "steps": {"type": "integer"},
        "lens": {"enum": ["first order", "second order", "third order"]},
        "ships": {"type": "array", "items": {"type": "object", "properties": {"passed": {"type": "boolean"}}}},
    },
    "required": ["name", "steps", "lens", "ships"],
    "additionalProperties": False,
}
PROMPTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("The capital of France is", {"temperature": 0.0}),
    (NOTICE + "On the last night of the year", {"temperature": 0.7, "top_p": 0.9}),
    ("Write a list of things to pack for a week in the mountains:\n-", {"frequency_penalty": 0.6, "presence_penalty": 0.4}),
    (NOTICE + "In spring a letter came, and", {"min_p": 0.05, "logit_bias": {5: 1.5, 7: -4.0}}),
    ("def fibonacci(n: int) -> int:\n", {"temperature": 0.9, "repetition_penalty": 1.2, "top_k": 40}),
    (NOTICE * 4 + "Years later", {"temperature": 1.0}),
    ("One, two, three, one, two, three, one, two,", {"temperature": 1.3, "dry_multiplier": 0.8, "logprobs": 3}),
    ("Q: Why is the sky blue?\nA:", {"temperature": 0.0, "repetition_penalty": 1.1}),
    ("The chorus sings: la la la la la la la la la", {"temperature": 0.8, "frequency_penalty": -2.0}),  # repeats itself
    ("A lighthouse as JSON:\n", {"temperature": 1.0, "guided_json": LIGHTHOUSE}),
    ("Its log, one line per day:\n", {"temperature": 1.2, "guided_regex": r"([a-z]{3,9}, [0-9]{1,2} knots\n){4,9}"}),
)


def _held(wishes: Mapping[str, Any]) -> bool:
    """Whether a reply is held to a form."""
    return any(name in wishes for name in GUIDED)


def requests(door: Door, *, new_tokens: int) -> list[Ask]:
    """Prompts of differing length, some with a common beginning, under differing laws; each with its own seed."""
    room = max(door.card.max_context - new_tokens, 1)
    asks = []
    for number, (text, wishes) in enumerate(PROMPTS):
        # A form ends where it ends; all other replies have the whole length.
        whole = {"temperature": 1.0, "max_tokens": new_tokens, "ignore_eos": not _held(wishes)}
        settled = Wishes.of(**{**whole, **wishes}, checksums=True, seed=1000 + number)
        asks.append(settle(settled, door=door, prompt=door.encode(text)[:room], label="prove"))
    return asks


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
    plain_settings = replace(base, threads=threads, prefix_cache=False, max_batch=1, draft=("none",), tree_budget=0)
    new_tokens = QUICK_NEW_TOKENS if quick else NEW_TOKENS
    tell("the plain run")
    with open_one(plain_settings) as door:
        card, asks = door.card, requests(door, new_tokens=new_tokens)
        plain, evidence = drive(door, asks, "one by one", settings=plain_settings)
        facts = Facts(
            plain_settings,
            longest=max(len(a.prompt) for a in asks) + new_tokens,
            page_bytes=page_bytes or bytes_per_page(base, dtype=card.dtype),
        )
    findings = []
    for variation in variations(base, threads=threads):
        tell(variation.name)
        settings = replace(plain_settings, **{"max_batch": len(asks), "self_check": False, **variation.changes(facts)})
        predicting = [replace(a, predicted=variation.predict(i, plain[i])) for i, a in enumerate(asks)]
        with open_one(settings) as door:
            if not variation.applies(door):
                continue
            replies, happened = drive(door, predicting, variation.drive, settings=settings)
        findings.append(judge(variation, plain, replies, exercised=variation.exercised(evidence, happened)))
    return Table(
        model=card.name,
        fingerprint=card.fingerprint,
        requests=len(asks),
        tokens=sum(len(r.choices) for r in plain),
        findings=tuple(findings),
    )


def judge(variation: Variation, plain: Sequence[Reply], replies: Sequence[Reply], *, exercised: bool) -> Finding:
    """A difference counts whether or not the variation happened as meant; equality only if it did."""
    for number, (expected, found) in enumerate(zip(plain, replies, strict=True)):
        position = first_difference(expected, found)
        if position is not None:
            return Finding(variation.name, "different", request=number, position=len(expected.prompt_ids) + position)
    return Finding(variation.name, "same" if exercised else "not exercised")


def first_difference(expected: Reply, found: Reply) -> int | None:
    """Index of the first chosen token whose id, logprobs or checksum differ; past the end when only the ending does."""
    for index, (a, b) in enumerate(zip(expected.choices, found.choices)):
        if a != b:
            return index
    if (len(expected.choices), expected.finish, expected.text) != (len(found.choices), found.finish, found.text):
        return min(len(expected.choices), len(found.choices))
    return None


# ---------------------------------------------------------------------------------------------- driving


def drive(door: Door, asks: Sequence[Ask], how: Drive, *, settings: Settings) -> tuple[list[Reply], Evidence]:
    """Replies in the order of the asks, and what happened meanwhile."""
    if how == "twice":
        _one_by_one(door, asks)
    before = settled_stats(door)
    match how:
        case "one by one" | "twice":
            replies, pieces = _one_by_one(door, asks), 0
        case "at once":
            replies, pieces = asyncio.run(_at_once(door, asks))
        case "streamed":
            replies, pieces = asyncio.run(_streamed(door, asks))
        case _:
            assert_never(how)
    evidence = Evidence(
        counted=settled_stats(door).since(before),
        replies=len(replies),
        pieces=pieces,
        cached=sum(r.usage.cached for r in replies),
        settings=settings,
        device=door.card.device,
    )
    return replies, evidence


def _one_by_one(door: Door, asks: Sequence[Ask]) -> list[Reply]:
    return [_told(door, ask) for ask in asks]


def _told(door: Door, ask: Ask) -> Reply:
    """A reply that ran out of tokens to choose ends there, without a finish: a difference like any other."""
    (reply,) = door.replies(ask)
    with contextlib.suppress(Barren):
        for piece in door.stream(ask):
            reply.add(piece)
    return reply


async def _at_once(door: Door, asks: Sequence[Ask]) -> tuple[list[Reply], int]:
    """All of them in one moment, in an order that has nothing to do with their numbers."""
    order = list(range(len(asks)))
    random.Random(1).shuffle(order)
    answered = await asyncio.gather(*(_folded(door, asks[number]) for number in order))
    by_number = dict(zip(order, answered, strict=True))
    return [by_number[n][0] for n in range(len(asks))], sum(pieces for _, pieces in answered)


async def _streamed(door: Door, asks: Sequence[Ask]) -> tuple[list[Reply], int]:
    answered = [await _folded(door, ask) for ask in asks]
    return [reply for reply, _ in answered], sum(pieces for _, pieces in answered)


async def _folded(door: Door, ask: Ask) -> tuple[Reply, int]:
    (reply,), count = door.replies(ask), 0
    with contextlib.suppress(Barren):
        async for piece in door.astream(ask):
            reply.add(piece)
            count += 1
    return reply, count


def settled_stats(door: Door) -> Stats:
    """The counters once the engine is idle: they are published after a turn's events, not before."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while (stats := door.service.stats()).running or stats.waiting:
        if time.monotonic() > deadline:
            break
        time.sleep(0.001)
    return stats


def _default_opener(settings: Settings) -> Door:
    from onedraw.assemble import open_door

    return open_door(settings)


def bytes_per_page(settings: Settings, *, dtype: str) -> int:
    """What one page takes of --kv-memory."""
    from onedraw.assemble import find_checkpoint, plan_memory

    if settings.backend == "fake":
        return 1
    checkpoint = find_checkpoint(settings)
    try:
        return sum(group.page_bytes for group in plan_memory(settings, describe(checkpoint), dtype=dtype).groups)
    finally:
        checkpoint.close()
