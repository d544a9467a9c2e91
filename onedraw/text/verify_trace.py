"""Print how every draft was verified, for the flag `--trace-verify`.

A draft is a token that was proposed before it was sampled; it is kept if it equals the sampled token. There is one line per
draft: the request, the position, the draft, the token that was sampled at that position, and whether the draft was kept.
Printing does not influence sampling.
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
class DraftResult:
    position: int
    draft: int
    sampled: int | None  # None if nothing was sampled there: an earlier draft was rejected, or no token was allowed
    kept: bool


def draft_results(row: Row, outcome: RowOutcome) -> list[DraftResult]:
    """Return the results in the order of the drafts. The token at a draft's position is known if all its ancestors were kept."""
    results: list[DraftResult] = []
    depths: list[int] = []
    for index, draft in enumerate(row.drafts):
        depth = 0 if draft.parent < 0 else depths[draft.parent] + 1
        depths.append(depth)
        reached = draft.parent < 0 or draft.parent in outcome.kept
        sampled = outcome.sampled[depth].token if reached and depth < len(outcome.sampled) else None
        results.append(DraftResult(row.stop + depth, draft.token, sampled, index in outcome.kept))
    return results


def trace_lines(row: Row, outcome: RowOutcome, token_text: Callable[[int], str]) -> list[str]:
    def show(token: int) -> str:
        return f"{token} {json.dumps(token_text(token), ensure_ascii=False)}"

    lines = []
    for result in draft_results(row, outcome):
        sampled = "not reached" if result.sampled is None else f"sampled {show(result.sampled)}"
        verdict = "kept" if result.kept else "not kept"
        lines.append(f"verify {row.request_id} {result.position}: draft {show(result.draft)}, {sampled}, {verdict}")
    return lines


class VerifyTracer:
    """Writes the lines to stderr on the engine's thread, during each step. A closed stderr does not stop the engine."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, row: Row, outcome: RowOutcome) -> None:
        lines = trace_lines(row, outcome, self._token_text)
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write("".join(line + "\n" for line in lines))
            sys.stderr.flush()

    def _token_text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")
