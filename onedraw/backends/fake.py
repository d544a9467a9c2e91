"""A backend without a device: pages, a recurrent state, and logits that depend on both. Public; every host test uses it.

In: plans. Out: outcomes chosen by the numpy law. Logits at a position depend on every token read back through the pages,
and, where `recurrent`, on a state that only moves forward and has two forms: prompt positions by chunks on absolute
multiples, generated positions step by step. Whatever an engine does wrong with pages, lanes, chunks or drafts changes
the logits here, and so the tokens.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from onedraw.backends.base import Capacity, PageGroup, Ticket
from onedraw.backends.outcome import row_outcome
from onedraw.sampling.law import choice, logprobs
from onedraw.sampling.noise import gumbel
from onedraw.sampling.verify import hypotheses, trails
from onedraw.types import Choice, Logprobs, Outcome, Plan, Row, RowOutcome

Logits = npt.NDArray[np.float32]


class FakeBackend:
    def __init__(
        self,
        *,
        vocab: int = 61,
        pages: int = 64,
        lanes: int = 4,
        page_size: int = 4,
        max_context: int = 256,
        chunk: int = 1,
        recurrent: bool = False,
        returns_logits: bool = True,
        favoured: Sequence[int] = (),
    ) -> None:
        self._capacity = Capacity(
            vocab=vocab,
            max_context=max_context,
            lanes=lanes,
            groups=(PageGroup(pages),),
            page_size=page_size,
            chunk=chunk,
            recurrent=recurrent,
            returns_logits=returns_logits,
            logits_per_position=returns_logits,
            device="fake",
        )
        self._store = np.full((pages, page_size), -1, dtype=np.int64)
        self._lanes: list[bytes] = [b""] * lanes
        self._taste = np.zeros(vocab, dtype=np.float32)
        self._taste[list(favoured)] = 6.0
        self._tickets = itertools.count()
        self._outcomes: dict[Ticket, Outcome] = {}

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    def submit(self, plan: Plan) -> Ticket:
        begin = time.perf_counter()
        rows = tuple(self.run(row) for row in plan.rows)
        ticket = Ticket(next(self._tickets))
        self._outcomes[ticket] = Outcome(rows, time.perf_counter() - begin)
        return ticket

    def collect(self, ticket: Ticket) -> Outcome:
        return self._outcomes.pop(ticket)

    def close(self) -> None:
        self._outcomes.clear()

    # ------------------------------------------------------------------ one row

    def run(self, row: Row) -> RowOutcome:
        """Write, walk, choose after every position that may be reached, commit what was kept."""
        self._write(row)
        states = self._states(row)
        known = len(row.tokens)
        scored = self._score(row, states) if row.scores else ()
        choices: list[Choice | None] = []
        if row.chooses:
            for i, (path, drafts) in enumerate(zip(trails(row.drafts), hypotheses(row.drafts), strict=True)):
                logits = self._logits(row, row.stop, states[known + i], path)
                choices.append(self.choose(row, logits, drafts))
        outcome = row_outcome(row, choices, scored)
        self.compact(row, outcome.kept)
        self.commit(row, states, known + (outcome.kept[-1] + 1 if outcome.kept else 0))
        return outcome

    def choose(self, row: Row, logits: Logits, drafts: tuple[int, ...]) -> Choice | None:
        return choice(logits, row.params, row.history, drafts)

    def commit(self, row: Row, states: Sequence[bytes], index: int) -> None:
        """After every turn the state that holds after the kept tokens sits in the row's lane, drafts or none."""
        self._lanes[row.lane] = states[index]

    def compact(self, row: Row, kept: Sequence[int]) -> None:
        """Bring the kept path of a tree from its nodes' slots to its positions."""
        tokens = [self._at(row, row.stop + index) for index in kept]
        for depth, token in enumerate(tokens):
            self._put(row, row.stop + depth, token)

    # ------------------------------------------------------------------ state

    def _put(self, row: Row, slot: int, token: int) -> None:
        size = self._capacity.page_size
        self._store[row.pages[0][slot // size], slot % size] = token

    def _at(self, row: Row, slot: int) -> int:
        size = self._capacity.page_size
        return int(self._store[row.pages[0][slot // size], slot % size])

    def _write(self, row: Row) -> None:
        """Every token in a slot of its own: known ones at their positions, drafts behind them in order."""
        for slot, token in enumerate((*row.tokens, *(d.token for d in row.drafts)), start=row.start):
            self._put(row, slot, token)

    def _states(self, row: Row) -> list[bytes]:
        """states[i]: after i known tokens; states[known + 1 + i]: after draft i, from its parent's state.

        Prompt positions chunk by chunk on absolute multiples, the rest step by step.
        """
        known = len(row.tokens)
        if not self._capacity.recurrent:
            return [b""] * (known + len(row.drafts) + 1)
        chunk = self._capacity.chunk
        opening = b"" if row.start == 0 else self._lanes[row.lane]
        states, segment = [opening], b""
        for position, token in enumerate(row.tokens, start=row.start):
            if position < row.prompt_stop:
                if position % chunk == 0:
                    opening, segment = states[-1], b""
                segment += token.to_bytes(4, "little")
                states.append(_mix(b"chunk", opening, segment))
            else:
                states.append(_step(states[-1], token))
        for draft in row.drafts:
            states.append(_step(states[known + 1 + draft.parent], draft.token))
        return states

    def _logits(self, row: Row, stop: int, state: bytes, path: Sequence[int] = ()) -> Logits:
        """Logits after positions [0, stop) and a path of drafts behind them, read back through the pages."""
        size = self._capacity.page_size
        pages = np.asarray(row.pages[0][: -(-stop // size)], dtype=np.int64)
        seen = self._store[pages].reshape(-1)[:stop]
        if path:
            seen = np.concatenate([seen, [self._at(row, row.stop + index) for index in path]])
        weights = np.arange(1, len(seen) + 1, dtype=np.int64) * 2654435761
        total = int((seen * weights).sum()) & (2**64 - 1)
        recent = seen[-2:].tobytes() + (total % 11).to_bytes(1, "little")
        key = int.from_bytes(_mix(b"logits", recent, state[:1])[:6], "little")
        return (2.0 * gumbel(key, 0, self._capacity.vocab) + self._taste).astype(np.float32)

    def _score(self, row: Row, states: Sequence[bytes]) -> tuple[Logprobs, ...]:
        stop = min(row.stop + 1, row.prompt_stop)
        top = row.params.prompt_logprobs or 0
        return tuple(
            logprobs(self._logits(row, position, states[position - row.start]), row.history.prompt[position], top)
            for position in range(row.start + 1, stop)
        )


def _step(state: bytes, token: int) -> bytes:
    return _mix(b"step", state, token.to_bytes(4, "little"))


def _mix(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"|".join(parts), digest_size=8).digest()
