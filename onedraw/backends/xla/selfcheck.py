"""Whether a row is computed from its row on this machine: measured before anything is served.

In: a backend whose programs are made. Out: findings. A few sequences go through the backend's own turns: alone and whole,
in parts, beside others, their last token in a turn of single tokens and in a mixed one. Tokens and checksums must agree.
Nothing of it stays: pages, lanes and counts are as free as before, and whoever gets them writes before reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onedraw.backends.base import Backend, Capacity, CheckResult, SelfCheck
from onedraw.types import History, Plan, Row, SampledToken, SamplingParams

LONGEST = 140  # past a block of keys and two chunks
PARAMS = SamplingParams(temperature=1.0, seed=7, checksums=True, max_tokens=2)


@dataclass(frozen=True, slots=True)
class Sample:
    """A text in a lane with pages of its own; its last token counts as generated."""

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
    samples = _samples(backend.capacity)
    if not samples:
        return SelfCheck(())
    first = samples[0]
    prompt, end = len(first.tokens) - 1, len(first.tokens)
    alone = [*_turn(backend, [first.row(0, prompt)]), *_turn(backend, [first.row(prompt, end)])]
    cuts = [cut for cut in (64, 128) if cut < prompt]
    for start, stop in zip([0, *cuts], [*cuts, prompt], strict=True):
        parts = _turn(backend, [first.row(start, stop)])
    findings = [CheckResult("a prompt in parts", parts == alone[:1])]
    if len(samples) > 1:
        together = _turn(backend, [sample.row(0, len(sample.tokens) - 1) for sample in samples])
        findings.append(CheckResult("a prompt beside others", together[:1] == alone[:1]))
        beside = [sample.row(0, len(sample.tokens) - 1) for sample in samples[1:]]
        mixed = _turn(backend, [first.row(prompt, end), *beside])
        findings.append(CheckResult("a token beside prompts", mixed[:1] == alone[1:]))
    return SelfCheck(tuple(findings))


def _turn(backend: Backend, rows: Sequence[Row]) -> list[tuple[SampledToken, ...]]:
    outcome = backend.collect(backend.submit(Plan(tuple(rows))))
    return [row.sampled for row in outcome.rows]


def _samples(capacity: Capacity) -> list[Sample]:
    """As many as there are lanes and pages for, up to three; the first is the longest; none where a context is too short."""
    found: list[Sample] = []
    rng = np.random.default_rng(0)
    used = 0
    for lane, length in enumerate((LONGEST, 37, 5)[: capacity.lanes]):
        room = min(group.pages for group in capacity.groups) - used
        length = min(length, room * capacity.page_size, capacity.max_context)
        if length < 3:
            break
        count = -(-length // capacity.page_size)
        pages = (tuple(range(used, used + count)),) * len(capacity.groups)
        found.append(Sample(lane, tuple(rng.integers(0, capacity.vocab, length).tolist()), pages))
        used += count
    return found
