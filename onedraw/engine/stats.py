"""What the engine has counted so far, as one frozen value that any thread may hold.

In: the engine's own books. Out: Stats, read by `/metrics`, `bench` and `prove`. Counters only grow.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import zip_longest


@dataclass(frozen=True, slots=True)
class DraftStats:
    """What came of one source's guesses."""

    source: str
    rows: int = 0  # that carried its drafts
    drafted: int = 0
    kept: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0
    pages_let_go: int = 0  # that a sliding window had passed
    checkpoints_used: int = 0
    checkpoints_total: int = 0
    checkpoints_saved: int = 0
    checkpoints_evicted: int = 0  # for another one
    restores: int = 0  # rows that began with a checkpoint
    whole_prompts: int = 0  # of them, rows that had nothing left to compute
    page_copies: int = 0
    snapshots_saved: int = 0  # checkpoints written to the disk
    snapshots_restored: int = 0  # prompts that began with one
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found
    prompt_tokens: int = 0  # computed as prompt, recomputation counts again
    completion_tokens: int = 0
    preemptions: int = 0
    drafts: int = 0  # rows that carried drafts
    draft_trees: int = 0  # rows whose drafts were no mere chain
    draft_tokens: int = 0
    accepted_tokens: int = 0  # as verification kept them, also behind a stop id
    accepted_per_position: tuple[int, ...] = ()  # how often the first draft of a row was kept, the second …
    drafted_by: tuple[DraftStats, ...] = ()
    propose_seconds: float = 0.0  # time of the proposers on the host
    middle_chunks: int = 0  # rows that did not reach the end of the known tokens
    mixed_steps: int = 0  # turns with more than one row
    failed_steps: int = 0
    steps: int = 0
    overlapped_steps: int = 0  # sent off while another was under way
    steps_ahead: int = 0  # sent off behind one that was under way, before its tokens were known
    step_seconds: float = 0.0

    def since(self, earlier: Stats) -> Stats:
        """What was counted after `earlier`; `running` and the like become differences too."""
        apart = ("accepted_per_position", "drafted_by")
        numbers = {f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(Stats) if f.name not in apart}
        pairs = zip_longest(self.accepted_per_position, earlier.accepted_per_position, fillvalue=0)
        before = {d.source: d for d in earlier.drafted_by}
        drafted_by = (_less(d, before.get(d.source, DraftStats(d.source))) for d in self.drafted_by)
        return Stats(**numbers, accepted_per_position=tuple(a - b for a, b in pairs), drafted_by=tuple(drafted_by))


def _less(now: DraftStats, earlier: DraftStats) -> DraftStats:
    return replace(now, rows=now.rows - earlier.rows, drafted=now.drafted - earlier.drafted, kept=now.kept - earlier.kept)
