"""Drafts from answers that are known already, with a lie planted so that a chosen number of them is kept: for benchmarks.

In: recorded answers by prompt. Out: chains in which the first `kept` drafts are the truth and the rest are not. What
speculation is worth at that many kept drafts per turn shows without a trained drafter.
"""

from __future__ import annotations

from onedraw.speculation.proposer import chain
from onedraw.types import Draft, History, Request

DEFAULT_LENGTH = 15  # drafts of a chain, where nobody said


class RecordedProposer:
    """Says nothing before it has heard the answers. Owner: the bench that made it."""

    name = "replay"

    def __init__(self, *, kept: int, length: int, vocab: int = 0) -> None:
        self._kept, self.length, self.vocab = kept, max(length, kept), vocab
        self.answers: dict[tuple[int, ...], tuple[int, ...]] = {}

    def propose(self, request: Request, history: History, room: int) -> tuple[Draft, ...]:
        answer = self.answers.get(request.prompt)
        if answer is None:
            return ()
        done = len(history.output)
        truth = answer[done : done + min(self.length, room)]
        return chain(tuple(t if i < self._kept else (t + 1) % self.vocab for i, t in enumerate(truth)))

    def forget(self, request_id: str) -> None:
        """Answers belong to prompts, not to requests."""
