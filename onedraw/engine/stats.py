"""What the engine has counted so far, as one frozen value that any thread may hold.

In: the engine's own books. Out: Stats, read by `/metrics`, `bench` and `prove`. Counters only grow.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stats:
    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found
    prompt_tokens: int = 0  # computed as prompt, recomputation counts again
    completion_tokens: int = 0
    preemptions: int = 0
    drafts: int = 0  # rows that carried drafts
    draft_tokens: int = 0
    accepted_tokens: int = 0
    middle_chunks: int = 0  # rows that did not reach the end of the known tokens
    mixed_turns: int = 0  # turns with more than one row
    failed_turns: int = 0
    turns: int = 0
    turn_seconds: float = 0.0
