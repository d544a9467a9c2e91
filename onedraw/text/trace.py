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
    """The drafts in their order. A draft stands as deep as its ancestors are many; the choice at that depth is known if
    they were all kept."""
    steps: list[Step] = []
    depths = {-1: 0}  # depth of what follows a kept draft, or follows the last known token
    deep = [0] * len(row.drafts)
    for index, draft in enumerate(row.drafts):
        deep[index] = 0 if draft.parent < 0 else deep[draft.parent] + 1
        depth = depths.get(draft.parent, len(outcome.chosen))
        choice = outcome.chosen[depth].token if depth < len(outcome.chosen) else None
        # Of two equal siblings the first is kept.
        kept = choice == draft.token and depth + 1 not in depths.values()
        if kept:
            depths[index] = depth + 1
        steps.append(Step(row.stop + deep[index], draft.token, choice, kept))
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


class Tracer:
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
