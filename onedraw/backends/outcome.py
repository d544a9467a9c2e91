"""What a row's choices amount to: kept drafts, then one new token. The same for every backend.

In: a row and the choice after its last known token and after each draft. Out: RowOutcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onedraw.sampling.law import NO_TOKEN
from onedraw.sampling.verify import kept
from onedraw.types import Choice, Logprobs, Row, RowOutcome


def row_outcome(row: Row, choices: Sequence[Choice | None], scored: tuple[Logprobs, ...] = ()) -> RowOutcome:
    """choices[0] stands after the last known token, choices[1 + i] after draft i; None: the law left no token there.

    Choices a mismatch makes unreachable may be missing at the end. No choices at all: a middle chunk.
    """
    if not choices:
        return RowOutcome(scored=scored)
    if not row.drafts:
        first = choices[0]
        return RowOutcome(scored=scored, barren=True) if first is None else RowOutcome((first,), scored)
    tokens = [NO_TOKEN if choice is None else choice.token for choice in choices]
    path = kept(row.drafts, tokens)
    reached = [choices[0], *(choices[1 + index] for index in path)]
    chosen = tuple(choice for choice in reached if choice is not None)
    barren = len(chosen) < len(reached)
    return RowOutcome(_told(row, chosen, kept=len(path)), scored, kept=path, barren=barren)


def _told(row: Row, chosen: tuple[Choice, ...], *, kept: int) -> tuple[Choice, ...]:
    """The choices, saying how they came: the first are kept drafts, the last stands where the other drafts went."""
    if not row.drafts or not chosen:
        return chosen
    told = [Choice(c.token, c.logprobs, c.checksum, kept=index < kept) for index, c in enumerate(chosen)]
    told[-1] = replace(told[-1], rejected=len(row.drafts) - kept)
    return tuple(told)
