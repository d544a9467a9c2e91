"""The engine's counters as one frozen value that any thread may read.

In: counts of the engine, scheduler, allocator and speculator. Out: Stats, read by `/metrics`, `bench` and `prove`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import zip_longest


@dataclass(frozen=True, slots=True)
class DraftStats:
    """Counters of one source of drafts."""

    source: str
    rows: int = 0  # rows that carried its drafts
    drafted: int = 0
    kept: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0
    window_pages_freed: int = 0  # pages that a sliding window has passed
    checkpoints_used: int = 0
    checkpoints_total: int = 0
    checkpoints_saved: int = 0
    checkpoints_evicted: int = 0  # to make room for another one
    restores: int = 0  # rows that restored a checkpoint
    whole_prompts: int = 0  # of them, rows with nothing left to compute
    page_copies: int = 0
    snapshots_saved: int = 0  # checkpoints written to the disk
    snapshots_restored: int = 0  # prompts that resumed from one
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found
    prompt_tokens: int = 0  # prompt tokens computed; recomputation counts again
    completion_tokens: int = 0
    preemptions: int = 0
    drafts: int = 0  # rows that carried drafts
    draft_trees: int = 0  # rows whose drafts branch
    draft_tokens: int = 0
    accepted_tokens: int = 0  # drafts kept by verification, also those after a stop id
    accepted_per_position: tuple[int, ...] = ()  # rows that kept a draft at depth 1, 2, …
    drafted_by: tuple[DraftStats, ...] = ()
    propose_seconds: float = 0.0  # spent in proposers on the host
    middle_chunks: int = 0  # rows that did not reach the end of the known tokens
    mixed_steps: int = 0  # steps with more than one row
    failed_steps: int = 0
    steps: int = 0
    overlapped_steps: int = 0  # submitted while another step was in flight
    steps_ahead: int = 0  # submitted before the tokens of the step in flight were known
    step_seconds: float = 0.0

    def since(self, earlier: Stats) -> Stats:
        """Counts since `earlier`; `running` and the other gauges become differences too."""
        composite = ("accepted_per_position", "drafted_by")
        numbers = {f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(Stats) if f.name not in composite}
        pairs = zip_longest(self.accepted_per_position, earlier.accepted_per_position, fillvalue=0)
        before = {d.source: d for d in earlier.drafted_by}
        drafted_by = (_difference(d, before.get(d.source, DraftStats(d.source))) for d in self.drafted_by)
        return Stats(**numbers, accepted_per_position=tuple(a - b for a, b in pairs), drafted_by=tuple(drafted_by))


def _difference(now: DraftStats, earlier: DraftStats) -> DraftStats:
    return replace(now, rows=now.rows - earlier.rows, drafted=now.drafted - earlier.drafted, kept=now.kept - earlier.kept)
