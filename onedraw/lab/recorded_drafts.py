"""A proposer that drafts recorded answers with deliberate errors, so that a given number of drafts is accepted: for benchmarks.

It measures speculative decoding at a fixed acceptance, without a trained drafter.
"""

from __future__ import annotations

from onedraw.speculation.proposers import NO_PROPOSAL, Proposal, chain
from onedraw.types import History, Request

DEFAULT_LENGTH = 15  # drafts per chain by default


class RecordedProposer:
    """Drafts the recorded answer of a prompt; only the first `kept` drafts of a chain are right. It drafts nothing until the
    benchmark, which owns it, has set `answers`; `vocab` must be set by then."""

    name = "replay"

    def __init__(self, *, kept: int, length: int, vocab: int = 0) -> None:
        self._kept, self.length, self.vocab = kept, max(length, kept), vocab
        self.answers: dict[tuple[int, ...], tuple[int, ...]] = {}

    def propose(self, request: Request, history: History, room: int) -> Proposal:
        answer = self.answers.get(request.prompt)
        if answer is None:
            return NO_PROPOSAL
        done = len(history.output)
        expected = answer[done : done + min(self.length, room)]
        drafts = chain(tuple(t if i < self._kept else (t + 1) % self.vocab for i, t in enumerate(expected)))
        return Proposal(drafts, self.name)

    def forget(self, request_id: str) -> None:
        """Do nothing: answers are stored by prompt, so there is no state of a request to drop."""
