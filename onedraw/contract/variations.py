"""The variations of `onedraw prove`: ways to run a model that must not change a token, and how to tell that they happened.

`prove.py` runs each Variation and compares the replies with those of the plain run, which is one request after the other without
prefix cache or drafts. A variation is exercised if what it varies really happened. Every new optimization adds a variation here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from onedraw.backends.devices import RAY
from onedraw.engine.stats import DraftStats, Stats
from onedraw.llm.llm import LLM
from onedraw.llm.reply import Reply
from onedraw.llm.reply_stream import Generation
from onedraw.llm.request_options import GUIDED, NEUTRAL_SAMPLING, RequestOptions, make_generation
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
    (
        "One, two, three, one, two, three, one, two,",
        {"temperature": 1.3, "dry_multiplier": 0.8, "logprobs": 3, "logprob_token_ids": [5, 9]},
    ),
    (
        "Q: Why is the sky blue?\nA:",
        {"temperature": 0.0, "repetition_penalty": 1.1, "logprobs": 5, "logprobs_mode": "processed", "logprob_token_ids": [7]},
    ),
    # The negative penalty makes the reply repeat itself.
    ("The chorus sings: la la la la la la la la la", {"temperature": 0.8, "frequency_penalty": -2.0}),
    # The bias leaves only three tokens, so that the reply repeats and drafts are kept.
    ("The drum goes", {"temperature": 1.0, "logit_bias": {5: 60.0, 6: 60.0, 7: 60.0}}),
    ("A lighthouse as JSON:\n", {"temperature": 1.0, "guided_json": LIGHTHOUSE, "logprobs": 2}),
    ("Its log, one line per day:\n", {"temperature": 1.2, "guided_regex": r"([a-z]{3,9}, [0-9]{1,2} knots\n){4,9}"}),
)


def constrained(options: Mapping[str, Any]) -> bool:
    """Whether a prompt has a response format."""
    return any(name in options for name in GUIDED)


def requests(llm: LLM, *, new_tokens: int) -> list[Generation]:
    """Return the requests: prompts of different lengths, some with a common prefix, each with its own sampling parameters and
    seed. Those with a response format come last, and only if llguidance is installed."""
    room = max(llm.card.max_context - new_tokens, 1)
    generations = []
    for number, (text, options) in enumerate(PROMPTS):
        if constrained(options) and not structured_output_available():
            continue
        # A response format ends its reply. The others ignore the end token, so that they all have the full length.
        whole = {**NEUTRAL_SAMPLING, "max_tokens": new_tokens, "ignore_eos": not constrained(options)}
        request = RequestOptions.of(**{**whole, **options}, checksums=True, seed=1000 + number)
        generations.append(make_generation(request, llm=llm, prompt=llm.encode(text)[:room], label="prove"))
    return generations


# The order in which requests are sent. "after a part": before each request comes one with three quarters of its prompt, which
# fills the prefix cache. "each twice": each request is sent twice in a row. "callers in turn": the last requests are sent by
# callers of their own while replies to the first caller are generated, so that those are preempted.
Drive: TypeAlias = Literal["one by one", "at once", "streamed", "each twice", "after a part", "callers in turn"]

CUTS = 3  # places in which each reply is cut
SMALL_STEP = 16  # the most tokens that a step computes in the variation "small steps"
RUN_AHEAD = ("model", "mtp")  # drafters that draft token by token, so that their drafts are chains and never trees
# TREE_BUDGET: the number of nodes of a draft tree. WHOLE_TREE: a forced draft length that is larger than the depth of any tree.
TREE_BUDGET, WHOLE_TREE = 16, 64
SNAPSHOT_BYTES = 2**30  # the value of --cache-budget in variations with snapshots on disk
DRAFT_TOKENS = 4  # Rows carry this many drafts unless --draft-tokens is given, even if drafting does not pay off.


@dataclass(frozen=True, slots=True)
class PlainRunFacts:
    """Sizes known after the plain run, on which the settings of variations depend."""

    settings: Settings  # the settings of the plain run
    longest: int  # number of tokens of the longest request, prompt and reply together
    page_bytes: int  # bytes of one KV page (a fixed number of positions) in all layers together
    folder: Path  # an empty folder, in which variations may write files such as snapshots


@dataclass(frozen=True, slots=True)
class Evidence:
    """What happened during a run: how much the engine's counters grew, and what the replies reported."""

    counted: Stats
    replies: int
    pieces: int
    cached: int  # prompt tokens from the prefix cache, as the replies report them
    settings: Settings
    device: str
    stages: int = 1  # number of pipeline stages

    def drafted(self, source: str | None = None) -> DraftStats:
        """Return the counters of one source of drafts, or of all sources together."""
        stats = [d for d in self.counted.drafted_by if source in (None, d.source)]
        return DraftStats(source or "", sum(d.rows for d in stats), sum(d.drafted for d in stats), sum(d.kept for d in stats))


@dataclass(frozen=True, slots=True)
class Variation:
    """A way to run the model that must not change a token, and how to tell that it happened."""

    name: str
    changes: Callable[[PlainRunFacts], Mapping[str, Any]]  # returns the settings that differ from the plain run
    drive: Drive
    exercised: Callable[[Evidence, Evidence], bool]  # tells from the plain run and this one whether the variation happened
    applies: Callable[[LLM], bool] = lambda llm: True  # whether the variation makes sense for this model
    predict: Callable[[int, Reply], tuple[int, ...]] = lambda number, plain: ()  # returns the predicted output of a request
    # (index of a request, its plain reply) → beginnings of the reply; the request is sent once for each, to be continued after it
    given: Callable[[int, Reply], tuple[tuple[int, ...], ...]] = lambda number, plain: ((),)
    forces: bool = False  # whether each request forces its plain reply and has another seed, so that it is scored
    warmed_up: bool = False  # whether to run all requests in another LLM first and close it, so that snapshots are on disk


def variations(base: Settings, *, threads: int) -> tuple[Variation, ...]:
    """Return all variations. Each loads the model anew, so each also tests a restart. `threads` is the plain run's number."""
    return (
        Variation("alone again, after a restart", lambda facts: {}, "one by one", lambda plain, now: now.counted.steps > 0),
        Variation("streamed", lambda facts: {}, "streamed", lambda plain, now: now.pieces > now.replies),
        Variation("batched, at once, random order", lambda facts: {}, "at once", lambda plain, now: now.counted.mixed_steps > 0),
        Variation(
            "logprobs and constraints beside plain rows",
            lambda facts: {} if base.backend == "xla" else {"ahead": "on"},
            "at once",
            lambda plain, now: now.counted.mixed_logprobs > 0 and now.counted.mixed_constraints > 0,
        ),
        Variation(
            "small steps",
            lambda facts: {"turn_tokens": SMALL_STEP},
            "at once",
            lambda plain, now: now.counted.middle_chunks > plain.counted.middle_chunks,
        ),
        Variation("preempted, few pages", _few_pages, "at once", lambda plain, now: now.counted.preemptions > 0),
        Variation(
            "continued after a cut", lambda facts: {}, "at once", lambda plain, now: now.counted.given_tokens > 0, given=_cut
        ),
        Variation(
            "continued after a cut, few pages, prefix cache",
            lambda facts: {**_few_pages(facts), "prefix_cache": True},
            "at once",
            lambda plain, now: now.counted.given_tokens > 0 and now.counted.preemptions > 0,
            given=_cut,
        ),
        Variation("scored, not sampled", lambda facts: {}, "at once", lambda p, now: now.counted.forced_tokens > 0, forces=True),
        Variation("prefix cache hit", lambda facts: {"prefix_cache": True}, "after a part", lambda plain, now: now.cached > 0),
        Variation(
            "the same prompt again, from its last logits",
            lambda facts: {"prefix_cache": True},
            "each twice",
            lambda plain, now: now.counted.whole_prompts > 0,
            applies=lambda llm: llm.service.capacity.checkpoints > 0,
        ),
        Variation(
            "batched, small steps, few pages, prefix cache",
            lambda facts: {**_few_pages(facts), "turn_tokens": SMALL_STEP, "prefix_cache": True},
            "at once",
            lambda plain, now: now.counted.mixed_steps > 0 and now.counted.middle_chunks > 0,
        ),
        Variation(
            "restored from disk, after a restart",
            lambda facts: {"prefix_cache": True, "cache_budget": SNAPSHOT_BYTES, "snapshot_dir": facts.folder},
            "one by one",
            lambda plain, now: now.counted.snapshots_restored > 0,
            warmed_up=True,
        ),
        Variation(
            "preempted for other callers",
            lambda facts: {"max_batch": 2},
            "callers in turn",
            lambda plain, now: now.counted.turn_preemptions > 0,
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
    """Return variations in which a step is submitted before the tokens of the previous one are known (async scheduling)."""
    row = Variation(
        "steps scheduled ahead",
        lambda facts: {"ahead": "on"},
        "one by one",
        lambda plain, now: now.counted.steps_ahead > 0,
        applies=lambda llm: llm.service.capacity.async_scheduling,
    )
    return () if base.backend == "xla" else (row,)


def splits(base: Settings) -> tuple[Variation, ...]:
    """Return variations with the layers in two stages on the same device, without and with overlap. If the settings name several
    devices, the plain run is split already, and only the overlap varies. If some of them are on nodes of a Ray cluster, a
    further variation has all layers in this process."""
    twice: Mapping[str, Any] = {} if base.devices else {"device": "auto", "devices": f"{base.device},{base.device}"}
    halves = Variation(
        "split in two",
        lambda facts: {**twice, "overlap": "off"},
        "one by one",
        lambda plain, now: now.stages > plain.stages,
        applies=_is_split,
    )
    together = Variation(
        "split in two, overlapped" if twice else "split, stages overlapped",
        lambda facts: {**twice, "overlap": "on"},
        "at once",
        lambda plain, now: now.counted.overlapped_steps > 0,
        applies=_is_split,
    )
    if any(name.startswith(RAY) for name in base.device_names):
        here = Variation(
            "all layers in this process",
            lambda facts: {"devices": None, "device": base.device_names[-1], "split": "auto", "overlap": "auto"},
            "at once",
            lambda plain, now: now.stages < plain.stages,
        )
        return here, together
    # The fake backend has no layers to split, and a single named device leaves nothing to split them over.
    if base.backend == "fake" or (base.devices and len(base.device_names) < 2):
        return ()
    if base.backend == "xla":  # The xla backend runs stages one after the other, so there is no variation with overlap.
        return (halves,) if twice else ()
    return (halves, together) if twice else (together,)


def _is_split(llm: LLM) -> bool:
    return llm.service.capacity.stages > 1


def drafting(base: Settings) -> tuple[Variation, ...]:
    """Return variations for each source of drafts in --draft, and two with all sources: continued after a cut, and in a batch
    with few pages."""
    if base.draft == ("none",):
        return ()
    all_sources = "auto" in base.draft
    rows: list[Variation] = []
    if all_sources or "ngram" in base.draft:
        rows.append(Variation("drafts: ngram", _draft(base, "ngram"), "one by one", _kept_and_rejected("ngram")))
    if all_sources or "prediction" in base.draft:
        given = _draft(base, "prediction")
        rows += [
            Variation("drafts: prediction, right", given, "one by one", lambda p, now: now.drafted().kept > 0, predict=_right),
            Variation("drafts: prediction, wrong", given, "one by one", _rejected, predict=_scrambled),
            Variation(
                "drafts: constrained output",
                given,
                "at once",
                lambda plain, now: _both(now.drafted()) and now.counted.mixed_steps > 0,
                predict=_half_right,
            ),
        ]
    if all_sources:
        rows += _drafter(base, "built-in drafter", "auto")
    for who in (entry for entry in base.draft if entry == "mtp" or entry not in DRAFT_WORDS):
        rows += _drafter(base, Path(who).name, who)
    all_drafts = _draft(base, *base.draft)
    rows.append(
        Variation(
            "drafts, continued after a cut",
            all_drafts,
            "at once",
            lambda plain, now: now.counted.given_tokens > 0 and _both(now.drafted()),
            predict=lambda number, reply: (_right if number % 2 else _scrambled)(number, reply),
            given=_cut,
        )
    )
    rows.append(
        Variation(
            "drafts, batched, few pages",
            lambda facts: {**all_drafts(facts), **_few_pages(facts)},
            "at once",
            lambda plain, now: now.counted.preemptions > 0 and now.counted.mixed_steps > 0 and _both(now.drafted()),
            predict=lambda number, reply: (_right if number % 2 else _scrambled)(number, reply),
        )
    )
    return tuple(rows)


def _drafter(base: Settings, name: str, who: str) -> tuple[Variation, Variation]:
    """Return the variations of a drafter that runs on the device: with drafts as a chain, and as a tree."""
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


def _draft(base: Settings, *who: str) -> Callable[[PlainRunFacts], Mapping[str, Any]]:
    return lambda facts: {"draft": who, "draft_tokens": base.draft_tokens or DRAFT_TOKENS}


def _both(drafted: DraftStats) -> bool:
    """Whether some drafts were kept and some rejected."""
    return 0 < drafted.kept < drafted.drafted


def _kept_and_rejected(source: str) -> Callable[[Evidence, Evidence], bool]:
    return lambda plain, now: _both(now.drafted(source))


def _rejected(plain: Evidence, now: Evidence) -> bool:
    return now.drafted().kept < now.drafted().drafted


def _right(number: int, reply: Reply) -> tuple[int, ...]:
    return tuple(reply.token_ids)


def _scrambled(number: int, reply: Reply) -> tuple[int, ...]:
    """Return the reply's own tokens in a random order as its prediction, so that some drafts are right and others are
    rejected."""
    tokens = reply.token_ids
    random.Random(number).shuffle(tokens)
    return tuple(tokens)


def _half_right(number: int, reply: Reply) -> tuple[int, ...]:
    """Return a prediction for constrained replies, wrong from the middle on, so that drafts violate the response format."""
    if not constrained(PROMPTS[number][1]):
        return ()
    half = len(reply.token_ids) // 2
    return (*reply.token_ids[:half], *_scrambled(number, reply))


def _cut(number: int, reply: Reply) -> tuple[tuple[int, ...], ...]:
    """Cut a reply in CUTS places. They differ from request to request, so that together they are all places of a reply."""
    tokens = tuple(reply.token_ids)
    return tuple(tokens[: (number + len(tokens) * part // CUTS) % len(tokens) + 1] for part in range(CUTS)) if tokens else ((),)


def _few_pages(facts: PlainRunFacts) -> Mapping[str, Any]:
    """Return settings with so few KV pages (those of the longest request and two more) that a batch causes preemption."""
    pages = -(-facts.longest // facts.settings.page_size) + 2
    return {"max_context": facts.longest, "kv_memory": pages * facts.page_bytes}


def _threads(count: int) -> Callable[[PlainRunFacts], Mapping[str, Any]]:
    return lambda facts: {"threads": count}


def _other_threads(plain: Evidence, now: Evidence) -> bool:
    """Whether this run computed on a CPU with another number of threads than the plain run."""
    return now.device.startswith("cpu") and now.settings.backend != "fake" and now.settings.threads != plain.settings.threads
