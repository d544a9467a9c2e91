"""The self-check of the backends whose steps XLA or IREE compiled, at start: whether a row's results depend on other rows.

In: a backend. Out: a SelfCheck. A few sequences run through the backend: alone, in chunks, and together with others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onedraw.backends.base import Backend, Capacity, CheckResult, SelfCheck
from onedraw.types import History, Plan, Row, SampledToken, SamplingParams

CHECK_TOKENS = (140, 37, 5)  # lengths of the sequences; the first exceeds one block of keys, and two chunks
CHECK_PARAMS = SamplingParams(temperature=1.0, seed=7, checksums=True, max_tokens=2)


@dataclass(frozen=True, slots=True)
class CheckSequence:
    """A token sequence in a lane with its own pages. All tokens but the last are its prompt; the last one counts as generated."""

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
            params=CHECK_PARAMS,
            history=History(prompt, list(self.tokens[len(prompt) : stop])),
        )


def self_check(backend: Backend) -> SelfCheck:
    """Whether a row's results on this machine are independent of the other rows.

    The last token of a sequence is computed in a decode step and again in a mixed step. Tokens and checksums must be equal. The
    check leaves data in pages, lanes and counts, which is harmless, because requests write these before they read them.
    """
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
    """Up to three sequences, the longest first, as many as lanes and pages allow; none if context or pages hold fewer than three
    tokens."""
    found: list[CheckSequence] = []
    rng = np.random.default_rng(0)
    used = 0
    for lane, length in enumerate(CHECK_TOKENS[: capacity.lanes]):
        room = min(group.pages for group in capacity.groups) - used
        length = min(length, room * capacity.page_size, capacity.max_context)
        if length < 3:
            break
        count = -(-length // capacity.page_size)
        pages = (tuple(range(used, used + count)),) * len(capacity.groups)
        found.append(CheckSequence(lane, tuple(rng.integers(0, capacity.vocab, length).tolist()), pages))
        used += count
    return found
