"""The engine's counters as one frozen value, which any thread may read.

A row is the work of one sequence in one step. A checkpoint is the saved state after a prompt prefix, from which another prompt
can resume. A draft is kept if it equals the token that is sampled at its position.

The engine, scheduler, allocator and speculator count; `/metrics`, `onedraw bench` and `onedraw prove` read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest


@dataclass(frozen=True, slots=True)
class DraftStats:
    """Counters of the drafts from one source: a proposer on the host, or the drafter on the device."""

    source: str
    rows: int = 0  # rows that carried drafts of this source
    drafted: int = 0  # drafts that were verified
    kept: int = 0  # drafts that were kept, because they equalled the sampled token


@dataclass(frozen=True, slots=True)
class DraftingEstimates:
    """The present estimates of cost and acceptance, from which the number of drafts is computed. A cost is three durations in
    seconds: per step, plus per row in it, plus per token in it; or per call of the drafter, plus per row, plus per drafted
    token."""

    step_cost: tuple[float, float, float] = (0.0, 0.0, 0.0)  # the cost of a step without drafting
    drafter_cost: tuple[float, float, float] = (0.0, 0.0, 0.0)  # the cost of a call of the backend's drafter
    acceptance: tuple[tuple[str, float, float], ...] = ()  # (source, temperature, probability that a draft is kept)


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters since the start, except for `running`, `waiting`, `pages_*`, `checkpoints_used`, `checkpoints_total`,
    `drafting` and `replicas*`, which are gauges: they tell the present state."""

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0
    window_pages_freed: int = 0  # pages freed because a sliding window has moved beyond them
    checkpoints_used: int = 0
    checkpoints_total: int = 0
    checkpoints_saved: int = 0
    checkpoints_evicted: int = 0  # checkpoints removed to make room for others
    restores: int = 0  # rows that restored a checkpoint
    whole_prompts: int = 0  # rows that restored a checkpoint and had nothing left to compute
    page_copies: int = 0  # partly filled pages copied for a restored checkpoint
    snapshots_saved: int = 0  # checkpoints written to the disk
    snapshots_restored: int = 0  # prompts that resumed from a snapshot on disk
    prefix_queries: int = 0  # tokens looked up in the prefix cache
    prefix_hits: int = 0  # tokens found in the prefix cache
    prompt_tokens: int = 0  # prompt tokens computed; those computed again after preemption count again
    completion_tokens: int = 0
    given_tokens: int = 0  # tokens of replies that requests gave, so that they were not sampled
    forced_tokens: int = 0  # tokens of replies that requests forced, so that they were scored and not sampled
    preemptions: int = 0
    turn_preemptions: int = 0  # how many of `preemptions` gave the lane to another caller or request
    drafts: int = 0  # rows that carried drafts
    draft_trees: int = 0  # rows whose drafts branch
    draft_tokens: int = 0
    accepted_tokens: int = 0  # drafts kept by verification, including those after a stop id
    accepted_per_position: tuple[int, ...] = ()  # entry i: rows that kept more than i drafts
    drafted_by: tuple[DraftStats, ...] = ()
    propose_seconds: float = 0.0  # time spent in proposers and decisions on the host
    drafter_steps: int = 0  # generating steps after which the backend's own drafter drafted
    drafter_seconds: float = 0.0  # time that the backend's own drafter took after these steps
    probe_seconds: float = 0.0  # estimated time of probes: drafts that did not pay off before and were tried again
    drafting: DraftingEstimates = field(default_factory=DraftingEstimates)
    middle_chunks: int = 0  # rows of long prompts that stopped before the end of the prompt, so that nothing was sampled
    mixed_steps: int = 0  # steps with more than one row
    mixed_logprobs: int = 0  # steps in which some rows have logprobs and some have none
    mixed_constraints: int = 0  # steps in which some rows are constrained and some are not
    failed_steps: int = 0
    out_of_memory_steps: int = 0  # steps for which the device had no memory; their rows were preempted, or failed
    state_losses: int = 0  # how often the backend lost the state of all sequences, which were preempted then
    steps: int = 0
    overlapped_steps: int = 0  # steps submitted while another one, of other sequences, was in flight
    steps_ahead: int = 0  # steps submitted before the tokens of the previous one were known
    step_seconds: float = 0.0  # duration of all steps together, including the backend's own drafter

    replicas: int = 0  # engines that run; a gauge
    replicas_wanted: int = 0  # engines that there should be; a gauge
    replicas_lost: int = 0  # engines that died
    moved_requests: int = 0  # requests that were continued on another replica

    def since(self, earlier: Stats) -> Stats:
        """Return the counts since `earlier`. Gauges become differences as well; `drafting` stays as it is."""
        numbers = {name: getattr(self, name) - getattr(earlier, name) for name in _NUMBERS}
        pairs = zip_longest(self.accepted_per_position, earlier.accepted_per_position, fillvalue=0)
        before = {d.source: d for d in earlier.drafted_by}
        drafted_by = (_difference(d, before.get(d.source, DraftStats(d.source))) for d in self.drafted_by)
        kept = tuple(a - b for a, b in pairs)
        return Stats(**numbers, accepted_per_position=kept, drafted_by=tuple(drafted_by), drafting=self.drafting)


_NUMBERS = tuple(f.name for f in fields(Stats) if f.name not in ("accepted_per_position", "drafted_by", "drafting"))


def total(parts: Iterable[Stats]) -> Stats:
    """Return the sum over several engines. `drafting` is that of the engine with the most steps, since estimates have no sum."""
    parts = list(parts)
    if not parts:
        return Stats()
    sources: dict[str, DraftStats] = {}
    for one in (drafts for part in parts for drafts in part.drafted_by):
        seen = sources.get(one.source, DraftStats(one.source))
        sources[one.source] = DraftStats(one.source, seen.rows + one.rows, seen.drafted + one.drafted, seen.kept + one.kept)
    return Stats(
        **{name: sum(getattr(part, name) for part in parts) for name in _NUMBERS},
        accepted_per_position=tuple(map(sum, zip_longest(*(part.accepted_per_position for part in parts), fillvalue=0))),
        drafted_by=tuple(sources.values()),
        drafting=max(parts, key=lambda part: part.steps).drafting,
    )


def counters_only(stats: Stats) -> Stats:
    """Return the counts of an engine that has ended, which has no present state."""
    return replace(
        stats,
        running=0,
        waiting=0,
        pages_used=0,
        pages_total=0,
        checkpoints_used=0,
        checkpoints_total=0,
        replicas=0,
        replicas_wanted=0,
    )


def _difference(now: DraftStats, earlier: DraftStats) -> DraftStats:
    return replace(now, rows=now.rows - earlier.rows, drafted=now.drafted - earlier.drafted, kept=now.kept - earlier.kept)
