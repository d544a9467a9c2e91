"""One request on its way: known tokens, how far they are computed, and what it holds.

In: rows' outcomes. Out: what became known, and whether the request is finished. Owner: the engine thread.

    known    = len(history)                 prompt and everything chosen so far
    computed <= known                       positions whose state is settled
    row      = [computed, computed + n) and drafts, drafts only if the row reaches `known`
    after    : computed += n + kept;  known += len(chosen) = kept + 1, or 0 for a middle chunk
"""

from __future__ import annotations

from dataclasses import dataclass, field

from onedraw.memory.allocator import Lease
from onedraw.types import PENDING_TOKEN, Draft, Finish, History, Logprobs, Request, Row, RowOutcome, SampledToken, Usage


@dataclass(slots=True, eq=False)
class Sequence:
    request: Request
    history: History = field(init=False)
    computed: int = 0
    lease: Lease | None = None
    cached: int = 0  # prompt positions that came from the prefix cache when first admitted
    admitted: bool = False
    kept: int = 0
    rejected: int = 0
    scored: list[Logprobs] = field(default_factory=list)
    next_drafts: tuple[Draft, ...] = ()  # the backend's own, for the next row
    looked_up: bool = False  # on the disk, before it was first admitted
    ended: bool = False  # nobody waits for it any more; it may still ride
    told_scores: bool = False  # the prompt's logprobs went out; a recomputation need not make them again

    def __post_init__(self) -> None:
        self.history = History(self.request.prompt)

    @property
    def known(self) -> int:
        return len(self.history)

    @property
    def remaining(self) -> int:
        """Known tokens still to compute; 1 while generating, 0 where a checkpoint has the whole prompt."""
        return self.known - self.computed

    @property
    def room(self) -> int:
        """Tokens that may still be chosen."""
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
        """Prompt logprobs need the logits of every prompt position, so every one is computed."""
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
        """The next row may fill a checkpoint. It carries no drafts, so that its state is the one after known tokens."""
        return self.lease is not None and bool(self.lease.wishes)

    def rewind(self) -> None:
        """Preemption: give everything back, compute again later. The tokens stay."""
        assert self.lease is not None
        self.lease.release()
        self.lease, self.computed, self.next_drafts = None, 0, ()

    def row(self, *, length: int, drafts: tuple[Draft, ...]) -> Row:
        assert self.lease is not None
        stop = self.computed + length
        samples = stop == self.known and self.room > 0
        opening = self.lease.opening
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
            scores_prompt=self.bypasses_cache and not self.told_scores and self.computed < len(self.request.prompt),
            restore=None if opening is None else opening.slot,
            copies=() if opening is None else opening.copies,
            saves=self.lease.saves(start=self.computed, stop=stop, samples=samples),
        )

    def row_behind(self, row: Row) -> Row:
        """The row after one that is under way: the token which that one chooses, whichever it is."""
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
        """Take in what a row gave. Choices past a stop id or past max_tokens are as if never made."""
        self.scored.extend(outcome.scored)
        self.next_drafts = outcome.next_drafts
        kept = len(outcome.kept)
        self.computed = row.stop + kept
        chosen, finish = self._take(outcome.sampled)
        said = min(kept, len(chosen))  # a draft behind a stop id was right, but is no part of the reply
        self.kept += said
        self.rejected += len(row.drafts) - said
        return chosen, finish

    def _take(self, chosen: tuple[SampledToken, ...]) -> tuple[tuple[SampledToken, ...], Finish | None]:
        stop_ids = self.request.params.stop_ids
        for count, choice in enumerate(chosen, start=1):
            self.history.output.append(choice.token)
            if choice.token in stop_ids:
                return chosen[:count], "stop"
            if self.room == 0:
                return chosen[:count], "length"
        done = self.room == 0 and self.computed >= self.known
        return chosen, "length" if done else None
