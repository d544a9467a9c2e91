"""The self-check at start: whether a row's results on this machine are independent of the other rows.

In: a backend with compiled programs. Out: SelfCheck. A few sequences run through the backend: alone, in chunks, and beside
others, with their last token in a decode step and in a mixed step. Tokens and checksums must be equal. Nothing remains
allocated: pages, lanes and counts are written before they are read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onedraw.backends.base import Backend, Capacity, CheckResult, SelfCheck
from onedraw.types import History, Plan, Row, SampledToken, SamplingParams

LONGEST = 140  # more than one block of keys and two chunks
PARAMS = SamplingParams(temperature=1.0, seed=7, checksums=True, max_tokens=2)


@dataclass(frozen=True, slots=True)
class CheckSequence:
    """A token sequence in a lane with its own pages; its last token counts as generated."""

    lane: int
    tokens: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]

    def row(self, start: int, stop: int) -> Row:
        prompt = self.tokens[:-1]
        return Row(
            request_id=f"self-check {self.lane}",
            lane=self.lane,
            pages=self.pages,
            start=start,
            tokens=self.tokens[start:stop],
            drafts=(),
            prompt_stop=len(prompt),
            samples=stop >= len(prompt),
            params=PARAMS,
            history=History(prompt, list(self.tokens[len(prompt) : stop])),
        )


def self_check(backend: Backend) -> SelfCheck:
    sequences = _sequences(backend.capacity)
    if not sequences:
        return SelfCheck(())
    first = sequences[0]
    prompt, end = len(first.tokens) - 1, len(first.tokens)
    alone = [*_step(backend, [first.row(0, prompt)]), *_step(backend, [first.row(prompt, end)])]
    cuts = [cut for cut in (64, 128) if cut < prompt]
    for start, stop in zip([0, *cuts], [*cuts, prompt], strict=True):
        parts = _step(backend, [first.row(start, stop)])
    results = [CheckResult("a prompt alone and in chunks", parts == alone[:1])]
    if len(sequences) > 1:
        together = _step(backend, [sequence.row(0, len(sequence.tokens) - 1) for sequence in sequences])
        results.append(CheckResult("a prompt alone and in a batch", together[:1] == alone[:1]))
        beside = [sequence.row(0, len(sequence.tokens) - 1) for sequence in sequences[1:]]
        mixed = _step(backend, [first.row(prompt, end), *beside])
        results.append(CheckResult("a decode token alone and beside prompts", mixed[:1] == alone[1:]))
    return SelfCheck(tuple(results))


def _step(backend: Backend, rows: Sequence[Row]) -> list[tuple[SampledToken, ...]]:
    outcome = backend.collect(backend.submit(Plan(tuple(rows))))
    return [row.sampled for row in outcome.rows]


def _sequences(capacity: Capacity) -> list[CheckSequence]:
    """Up to three sequences, as lanes and pages allow, the longest first; none if the context is too short."""
    found: list[CheckSequence] = []
    rng = np.random.default_rng(0)
    used = 0
    for lane, length in enumerate((LONGEST, 37, 5)[: capacity.lanes]):
        room = min(group.pages for group in capacity.groups) - used
        length = min(length, room * capacity.page_size, capacity.max_context)
        if length < 3:
            break
        count = -(-length // capacity.page_size)
        pages = (tuple(range(used, used + count)),) * len(capacity.groups)
        found.append(CheckSequence(lane, tuple(rng.integers(0, capacity.vocab, length).tolist()), pages))
        used += count
    return found
