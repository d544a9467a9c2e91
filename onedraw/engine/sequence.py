"""A request that is being generated: its known tokens, how far they are computed, and the memory it holds.

Row outcomes come in; newly sampled tokens and the finish reason go out. A Sequence belongs to the engine's thread. A row is the
work of the sequence in one step: n known tokens, then drafts, of which `kept` equal the sampled tokens. A lease is the memory
that the sequence holds.

    known    = len(history)                 prompt and everything sampled so far
    computed <= known                       positions whose state is committed
    row      = [computed, computed + n) and drafts, drafts only if the row reaches `known`
    after    : computed += n + kept;  known += len(sampled) = kept + 1, or 0 if the row ends inside the prompt

A request may give the first tokens of its reply. The sequence then starts as if it had sampled them and been preempted. A
request may also force tokens, to have them scored. They are its drafts, and all are kept, because sampling takes a forced token
whatever the noise is.
"""

from __future__ import annotations

import time
from dataclasses import InitVar, dataclass, field

from onedraw.engine.fairness import TurnKey
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
    cached: int = 0  # number of prompt positions that came from the prefix cache when the sequence was first admitted
    admitted: bool = False
    created: float = field(default_factory=time.monotonic)
    queued: float = 0.0  # seconds from its creation until it was first admitted
    kept: int = 0  # number of drafts that became tokens of the reply
    rejected: int = 0  # number of the other drafts
    scored: list[Logprobs] = field(default_factory=list)  # logprobs of the prompt's tokens, as far as they are computed
    next_drafts: tuple[Draft, ...] = ()  # drafts for the next row, made by a drafter on the device
    looked_up: bool = False  # whether the disk was searched for a snapshot of the prompt, which happens once
    ended: bool = False  # whether the request's last event was delivered; a row may still be in flight
    lost: bool = False  # whether its state on the device is undefined: it is preempted when it has no row in flight
    logprobs_sent: bool = False  # whether the prompt's logprobs were sent: after preemption they are not computed again
    key: TurnKey = field(init=False)  # the caller and request that it belongs to
    turn_stop: int = 0  # its turn (see `fairness.py`) ends when its output has this many tokens
    passed: int = 0  # how often other sequences were admitted before it because it needs more KV pages than are free

    def __post_init__(self, constraint: Constraint | None) -> None:
        self.history = History(self.request.prompt, list(self.request.given), constraint=constraint, forced=self.request.forced)
        self.key = TurnKey(self.request.caller, self.request.parent or self.request.id, self.request.background)

    @property
    def known(self) -> int:
        return len(self.history)

    @property
    def remaining(self) -> int:
        """Known tokens that are not computed yet: 1 while generating, 0 if a checkpoint covers the whole prompt."""
        return self.known - self.computed

    @property
    def room(self) -> int:
        """How many tokens may still be sampled: none after a stop id, else as many as max_tokens leaves."""
        return 0 if self._stopped else self.request.params.max_tokens - len(self.history.output)

    @property
    def _stopped(self) -> bool:
        output = self.history.output
        return bool(output) and output[-1] in self.request.params.stop_ids

    @property
    def ending(self) -> Finish | None:
        """The reason for which the reply ends with the tokens known so far; None if it goes on."""
        if self._stopped:
            return "stop"
        return "length" if self.history.output and self.room == 0 else None

    @property
    def overtime(self) -> int:
        """Tokens sampled since its turn ended; negative while the turn lasts."""
        return len(self.history.output) - self.turn_stop

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt=len(self.request.prompt),
            completion=len(self.history.output) - len(self.request.given),
            cached=self.cached,
            kept=self.kept,
            rejected=self.rejected,
            queued=self.queued,
        )

    @property
    def bypasses_cache(self) -> bool:
        """Whether every prompt position must be computed, because the request wants the logprobs of its prompt."""
        return self.request.params.prompt_logprobs is not None

    def begin(self, lease: Lease, *, turn: int) -> None:
        self.lease = lease
        self.turn_stop = len(self.history.output) + turn
        self.passed = 0
        self.computed = lease.cached
        self.scored.clear()
        if not self.admitted:
            self.admitted = True
            self.queued = time.monotonic() - self.created
            self.cached = min(lease.cached, len(self.request.prompt))

    @property
    def saves(self) -> bool:
        """Whether the next row may save a checkpoint. Such a row has no drafts, so that its state covers known tokens only."""
        return self.lease is not None and bool(self.lease.save_positions)

    def rewind(self) -> None:
        """Preempt the sequence: release its lease and compute everything again later. Its tokens stay known."""
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
            draft_limit=0,  # until the scheduler decides otherwise
        )

    def row_ahead(self, row: Row) -> Row:
        """Return the row that follows a row in flight. It computes the token that the row in flight samples."""
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
        """Apply the outcome of a row. Tokens sampled beyond a stop id or max_tokens are dropped."""
        self.scored.extend(outcome.scored)
        self.next_drafts = outcome.next_drafts
        kept = len(outcome.kept)
        self.computed = row.stop + kept
        sampled, finish = self._append(outcome.sampled)
        kept_in_reply = min(kept, len(sampled))  # A draft that was correct but comes after a stop id is not part of the reply.
        self.kept += kept_in_reply
        self.rejected += len(row.drafts) - kept_in_reply
        return sampled, finish

    def _append(self, sampled: tuple[SampledToken, ...]) -> tuple[tuple[SampledToken, ...], Finish | None]:
        for count, token in enumerate(sampled, start=1):
            self.history.output.append(token.token)
            if self.ending is not None:
                return sampled[:count], self.ending
        done = self.room == 0 and self.computed >= self.known  # no token is sampled: only the prompt's logprobs are requested
        return sampled, (self.ending or "length") if done else None
