"""The rows of the contract's table: ways to run a model that must not matter, and how to tell that they happened.

In: the settings to prove, facts of the plain run, what a drive counted. Out: Variations, which `prove.py` runs and judges.
Each way to be fast adds its row here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from onedraw.engine.stats import DraftStats, Stats
from onedraw.llm.generation import Generation
from onedraw.llm.llm import LLM
from onedraw.llm.options import GUIDED, RequestOptions, make_generation
from onedraw.llm.reply import Reply
from onedraw.settings import DRAFT_WORDS, Settings
from onedraw.speculation.speculator import DEVICE
from onedraw.text.constraints.grammar import structured_output_available

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
    ("The drum goes", {"temperature": 1.0, "logit_bias": {5: 60.0, 6: 60.0, 7: 60.0}}),  # three tokens in every order
    ("A lighthouse as JSON:\n", {"temperature": 1.0, "guided_json": LIGHTHOUSE}),
    ("Its log, one line per day:\n", {"temperature": 1.2, "guided_regex": r"([a-z]{3,9}, [0-9]{1,2} knots\n){4,9}"}),
)


def held(options: Mapping[str, Any]) -> bool:
    """Whether a reply is held to a form."""
    return any(name in options for name in GUIDED)


def requests(llm: LLM, *, new_tokens: int) -> list[Generation]:
    """Prompts of differing length, some with a common beginning, under differing laws; each with its own seed. Those that are
    held to a form come last, and only where what holds them is installed."""
    room = max(llm.card.max_context - new_tokens, 1)
    generations = []
    for number, (text, options) in enumerate(PROMPTS):
        if held(options) and not structured_output_available():
            continue
        # A form ends where it ends; all other replies have the whole length.
        whole = {"temperature": 1.0, "max_tokens": new_tokens, "ignore_eos": not held(options)}
        settled = RequestOptions.of(**{**whole, **options}, checksums=True, seed=1000 + number)
        generations.append(make_generation(settled, llm=llm, prompt=llm.encode(text)[:room], label="prove"))
    return generations


# "after a part": every request after the first three quarters of its prompt; "each twice": every request and the same again.
Drive: TypeAlias = Literal["one by one", "at once", "streamed", "each twice", "after a part"]

SMALL_TURN = 16
RUN_AHEAD = ("model", "mtp")  # drafters that guess token by token: their drafts are chains
TREE_BUDGET, WHOLE_TREE = 16, 64  # nodes of a proved tree, and more than its depth
SNAPSHOT_BYTES = 2**30
DRAFT_TOKENS = 4  # guesses per row where no number was asked for: drafts that do not pay off are proved too


@dataclass(frozen=True, slots=True)
class Facts:
    """What variations are shaped by: known once the plain run has run."""

    settings: Settings  # of the plain run
    longest: int  # tokens of the longest request, prompt and reply
    page_bytes: int  # of one page over all layers
    folder: Path  # an empty one, for what a variation leaves on the disk


@dataclass(frozen=True, slots=True)
class Evidence:
    """What happened during a drive: counters after minus counters before, and what was seen on the way."""

    counted: Stats
    replies: int
    pieces: int
    cached: int  # prompt tokens the replies say came from the prefix cache
    settings: Settings
    device: str
    stages: int = 1  # parts that the layers lie in

    def drafted(self, source: str | None = None) -> DraftStats:
        """What came of one source's guesses, or of all of them."""
        chosen = [d for d in self.counted.drafted_by if source in (None, d.source)]
        return DraftStats(source or "", sum(d.rows for d in chosen), sum(d.drafted for d in chosen), sum(d.kept for d in chosen))


@dataclass(frozen=True, slots=True)
class Variation:
    """One way to run that must not matter."""

    name: str
    changes: Callable[[Facts], Mapping[str, Any]]  # to the plain settings
    drive: Drive
    exercised: Callable[[Evidence, Evidence], bool]  # (plain, this): did it happen?
    applies: Callable[[LLM], bool] = lambda llm: True  # without it the row is left out
    predict: Callable[[int, Reply], tuple[int, ...]] = lambda number, plain: ()  # what request `number` is said to become
    rehearsed: bool = False  # all of it once before, behind a door that is closed again


def variations(base: Settings, *, threads: int) -> tuple[Variation, ...]:
    """The rows. Every one opens a model anew, so each is also "after a restart". `threads`: of the plain run."""
    return (
        Variation("alone again, after a restart", lambda facts: {}, "one by one", lambda plain, now: now.counted.steps > 0),
        Variation("streamed", lambda facts: {}, "streamed", lambda plain, now: now.pieces > now.replies),
        Variation("batched, at once, random order", lambda facts: {}, "at once", lambda plain, now: now.counted.mixed_steps > 0),
        Variation(
            "small turns",
            lambda facts: {"turn_tokens": SMALL_TURN},
            "at once",
            lambda plain, now: now.counted.middle_chunks > plain.counted.middle_chunks,
        ),
        Variation("preempted, few pages", _few_pages, "at once", lambda plain, now: now.counted.preemptions > 0),
        Variation("prefix cache hit", lambda facts: {"prefix_cache": True}, "after a part", lambda plain, now: now.cached > 0),
        Variation(
            "the same prompt again, from its last logits",
            lambda facts: {"prefix_cache": True},
            "each twice",
            lambda plain, now: now.counted.whole_prompts > 0,
            applies=lambda llm: llm.service.capacity.checkpoints > 0,
        ),
        Variation(
            "batched, small turns, few pages, prefix cache",
            lambda facts: {**_few_pages(facts), "turn_tokens": SMALL_TURN, "prefix_cache": True},
            "at once",
            lambda plain, now: now.counted.mixed_steps > 0 and now.counted.middle_chunks > 0,
        ),
        Variation(
            "restored from disk, after a restart",
            lambda facts: {"prefix_cache": True, "cache_budget": SNAPSHOT_BYTES, "snapshot_dir": facts.folder},
            "one by one",
            lambda plain, now: now.counted.snapshots_restored > 0,
            rehearsed=True,
        ),
        *ahead(base),
        *splits(base),
        *(
            Variation(f"{count} thread{'s' * (count > 1)}", _threads(count), "one by one", _other_threads)
            for count in (1, 2)
            if count != threads and base.backend != "xla"
        ),
        *drafting(base),
    )


def ahead(base: Settings) -> tuple[Variation, ...]:
    """Turns sent off before the tokens of those before them are known, where the backend can."""
    row = Variation(
        "turns sent off ahead",
        lambda facts: {"ahead": "on"},
        "one by one",
        lambda plain, now: now.counted.steps_ahead > 0,
        applies=lambda llm: llm.service.capacity.async_scheduling,
    )
    return () if base.backend == "xla" else (row,)


def splits(base: Settings) -> tuple[Variation, ...]:
    """Layers in two stages on the same device, one after the other and both at work; of a split, its stages at work at once."""
    twice: Mapping[str, Any] = {} if base.devices else {"device": "auto", "devices": f"{base.device},{base.device}"}
    halves = Variation(
        "split in two",
        lambda facts: {**twice, "overlap": "off"},
        "one by one",
        lambda plain, now: now.stages > plain.stages,
        applies=_is_split,
    )
    together = Variation(
        "split in two, both at work" if twice else "split, all stages at work",
        lambda facts: {**twice, "overlap": "on"},
        "at once",
        lambda plain, now: now.counted.overlapped_steps > 0,
        applies=_is_split,
    )
    if base.backend == "fake" or (base.devices and len(base.device_names) < 2):  # has no layers, or no second stage
        return ()
    if base.backend == "xla":  # its stages work on one turn at a time
        return (halves,) if twice else ()
    return (halves, together) if twice else (together,)


def _is_split(llm: LLM) -> bool:
    return llm.service.capacity.stages > 1


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
                lambda plain, now: _both(now.drafted()) and now.counted.mixed_steps > 0,
                predict=_formal,
            ),
        ]
    if everybody:
        rows += _drafter(base, "built-in drafter", "auto")
    for who in (entry for entry in base.draft if entry == "mtp" or entry not in DRAFT_WORDS):
        rows += _drafter(base, Path(who).name, who)
    crowd = _draft(base, *base.draft)
    rows.append(
        Variation(
            "drafts, batched, few pages",
            lambda facts: {**crowd(facts), **_few_pages(facts)},
            "at once",
            lambda plain, now: now.counted.preemptions > 0 and now.counted.mixed_steps > 0 and _both(now.drafted()),
            predict=lambda number, reply: (_right if number % 2 else _scrambled)(number, reply),
        )
    )
    return tuple(rows)


def _drafter(base: Settings, name: str, who: str) -> tuple[Variation, Variation]:
    """A drafter that the backend runs, as a chain and as a tree, which is taken whole."""
    chain = _kept_and_rejected(DEVICE)
    tree = {"draft": (who,), "draft_tokens": WHOLE_TREE, "tree_budget": base.tree_budget or TREE_BUDGET}
    return (
        Variation(f"drafts: {name}", _draft(base, who), "one by one", chain, applies=_drafts),
        Variation(
            f"drafts: {name}, as a tree",
            lambda facts: tree,
            "one by one",
            lambda plain, now: now.counted.draft_trees > 0 and chain(plain, now),
            applies=lambda llm: _drafts(llm) and llm.service.capacity.drafter not in RUN_AHEAD,
        ),
    )


def _drafts(llm: LLM) -> bool:
    return bool(llm.service.capacity.drafter)


def _draft(base: Settings, *who: str) -> Callable[[Facts], Mapping[str, Any]]:
    return lambda facts: {"draft": who, "draft_tokens": base.draft_tokens or DRAFT_TOKENS}


def _both(drafted: DraftStats) -> bool:
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
    if not held(PROMPTS[number][1]):
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
