"""One request being generated: its known tokens, how far they are computed, and its lease.

In: row outcomes. Out: newly sampled tokens, and whether the request is finished. Owner: the engine thread.

    known    = len(history)                 prompt and everything sampled so far
    computed <= known                       positions whose state is committed
    row      = [computed, computed + n) and drafts, drafts only if the row reaches `known`
    after    : computed += n + kept;  known += len(sampled) = kept + 1, or 0 for a middle chunk
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field

from onedraw.memory.allocator import Lease
from onedraw.types import (
    PENDING_TOKEN,
    Constraint,
    Draft,
    Finish,
    History,
    Logprobs,
    Request,
    Row,
    RowOutcome,
    SampledToken,
    Usage,
)


@dataclass(slots=True, eq=False)
class Sequence:
    request: Request
    constraint: InitVar[Constraint | None] = None
    history: History = field(init=False)
    computed: int = 0
    lease: Lease | None = None
    cached: int = 0  # prompt positions that came from the prefix cache when first admitted
    admitted: bool = False
    kept: int = 0
    rejected: int = 0
    scored: list[Logprobs] = field(default_factory=list)
    next_drafts: tuple[Draft, ...] = ()  # made by the backend's drafter, for the next row
    looked_up: bool = False  # in the disk snapshots, before the first admission
    ended: bool = False  # no longer reported to its sink; a row may still be in flight
    logprobs_sent: bool = False  # the prompt's logprobs; not computed again after preemption

    def __post_init__(self, constraint: Constraint | None) -> None:
        self.history = History(self.request.prompt, constraint=constraint)

    @property
    def known(self) -> int:
        return len(self.history)

    @property
    def remaining(self) -> int:
        """Known tokens still to compute; 1 while generating, 0 if a checkpoint covers the whole prompt."""
        return self.known - self.computed

    @property
    def room(self) -> int:
        """Tokens that may still be sampled."""
        return self.request.params.max_tokens - len(self.history.output)

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt=len(self.request.prompt),
            completion=len(self.history.output),
            cached=self.cached,
            kept=self.kept,
            rejected=self.rejected,
        )

    @property
    def bypasses_cache(self) -> bool:
        """Prompt logprobs need the logits of every prompt position, so every position is computed."""
        return self.request.params.prompt_logprobs is not None

    def begin(self, lease: Lease) -> None:
        self.lease = lease
        self.computed = lease.cached
        self.scored.clear()
        if not self.admitted:
            self.admitted = True
            self.cached = min(lease.cached, len(self.request.prompt))

    @property
    def saves(self) -> bool:
        """Whether the next row may save a checkpoint. Such a row carries no drafts, so its state covers known tokens only."""
        return self.lease is not None and bool(self.lease.save_positions)

    def rewind(self) -> None:
        """Preemption: release the lease and compute again later. The tokens stay."""
        assert self.lease is not None
        self.lease.release()
        self.lease, self.computed, self.next_drafts = None, 0, ()

    def row(self, *, length: int, drafts: tuple[Draft, ...]) -> Row:
        assert self.lease is not None
        stop = self.computed + length
        samples = stop == self.known and self.room > 0
        restore = self.lease.restore
        return Row(
            request_id=self.request.id,
            lane=self.lease.lane,
            pages=self.lease.pages,
            start=self.computed,
            tokens=tuple(self.history.slice(self.computed, stop)),
            drafts=drafts,
            prompt_stop=len(self.request.prompt),
            samples=samples,
            params=self.request.params,
            history=self.history,
            scores_prompt=self.bypasses_cache and not self.logprobs_sent and self.computed < len(self.request.prompt),
            restore=None if restore is None else restore.slot,
            copies=() if restore is None else restore.copies,
            saves=self.lease.plan_saves(start=self.computed, stop=stop, samples=samples),
        )

    def row_ahead(self, row: Row) -> Row:
        """The row after one in flight, for the token that it samples."""
        assert self.lease is not None
        return Row(
            request_id=row.request_id,
            lane=row.lane,
            pages=self.lease.pages,
            start=row.stop,
            tokens=(PENDING_TOKEN,),
            drafts=(),
            prompt_stop=row.prompt_stop,
            samples=True,
            params=row.params,
            history=self.history,
            awaits_token=True,
        )

    def accept(self, row: Row, outcome: RowOutcome) -> tuple[tuple[SampledToken, ...], Finish | None]:
        """Apply the outcome of a row. Tokens sampled past a stop id or past max_tokens are dropped."""
        self.scored.extend(outcome.scored)
        self.next_drafts = outcome.next_drafts
        kept = len(outcome.kept)
        self.computed = row.stop + kept
        sampled, finish = self._append(outcome.sampled)
        kept_in_reply = min(kept, len(sampled))  # a correct draft after a stop id is not part of the reply
        self.kept += kept_in_reply
        self.rejected += len(row.drafts) - kept_in_reply
        return sampled, finish

    def _append(self, sampled: tuple[SampledToken, ...]) -> tuple[tuple[SampledToken, ...], Finish | None]:
        stop_ids = self.request.params.stop_ids
        for count, token in enumerate(sampled, start=1):
            self.history.output.append(token.token)
            if token.token in stop_ids:
                return sampled[:count], "stop"
            if self.room == 0:
                return sampled[:count], "length"
        done = self.room == 0 and self.computed >= self.known
        return sampled, "length" if done else None
