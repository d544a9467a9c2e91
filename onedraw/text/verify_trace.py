"""What became of every draft, in words: the acceptance walks that `--trace-verify` prints.

In: a row that carried drafts, its outcome, and how a token is spelled. Out: one line per draft: request, position, the
draft, what was chosen there, and whether the draft was kept. Nothing here takes part in choosing.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

from onedraw.text.tokenizer import Tokenizer
from onedraw.types import Row, RowOutcome


@dataclass(frozen=True, slots=True)
class Step:
    """One draft. `choice` is None where none was made: behind a draft that was not kept, or where the law left no token."""

    position: int
    draft: int
    choice: int | None
    kept: bool


def walk(row: Row, outcome: RowOutcome) -> list[Step]:
    """The drafts in their order. A draft stands as deep as it has ancestors; what was chosen there is known if all of
    them were kept."""
    steps: list[Step] = []
    depths: list[int] = []
    for index, draft in enumerate(row.drafts):
        depths.append(0 if draft.parent < 0 else depths[draft.parent] + 1)
        reached = draft.parent < 0 or draft.parent in outcome.kept
        choice = outcome.sampled[depths[index]].token if reached and depths[index] < len(outcome.sampled) else None
        steps.append(Step(row.stop + depths[index], draft.token, choice, index in outcome.kept))
    return steps


def lines(row: Row, outcome: RowOutcome, spell: Callable[[int], str]) -> list[str]:
    def named(token: int) -> str:
        return f"{token} {json.dumps(spell(token), ensure_ascii=False)}"

    told = []
    for step in walk(row, outcome):
        choice = "not reached" if step.choice is None else f"choice {named(step.choice)}"
        verdict = "kept" if step.kept else "not kept"
        told.append(f"verify {row.request_id} {step.position}: draft {named(step.draft)}, {choice}, {verdict}")
    return told


class VerifyTracer:
    """Prints the walks to stderr as they happen, on the engine's thread. A stream that is gone stops no reply."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, row: Row, outcome: RowOutcome) -> None:
        told = lines(row, outcome, self._spell)
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write("".join(line + "\n" for line in told))
            sys.stderr.flush()

    def _spell(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")
