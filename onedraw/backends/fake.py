"""A backend without a device: pages, a recurrent state, checkpoints, and logits that depend on all of them. Public; every
host test uses it.

In: plans. Out: outcomes chosen by the numpy law. Logits at a position depend on every token read back through the pages
of every layer group (of a sliding one, its last window), and, where `recurrent`, on a state that only moves forward and
has two forms: prompt positions by chunks on absolute multiples, generated positions step by step. Whatever an engine
does wrong with pages, lanes, chunks, checkpoints or drafts changes the logits here, and so the tokens.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from onedraw.backends.base import Capacity, PageGroup, StepHandle, require_state_dtype
from onedraw.backends.sampled_rows import row_outcome
from onedraw.sampling.law import logprobs, sample
from onedraw.sampling.noise import gumbel
from onedraw.sampling.verify import draft_paths, draft_prefixes
from onedraw.types import CheckpointSave, Logprobs, Outcome, Plan, Row, RowOutcome, SampledToken

Logits = npt.NDArray[np.float32]
_STEP_FORM = 2**32  # what a generated position leaves in a page, where there are two forms, is not what a prompt's leaves


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint's content."""

    state: bytes
    logits: Logits | None


class FakeBackend:
    """`windows`: one per layer group, None for one that sees everything. `pages`: of each group, or one number for all."""

    def __init__(
        self,
        *,
        vocab: int = 61,
        pages: int | Sequence[int] = 64,
        windows: Sequence[int | None] = (None,),
        lanes: int = 4,
        page_size: int = 4,
        max_context: int = 256,
        chunk: int = 1,
        recurrent: bool = False,
        checkpoints: int = 0,
        draft_positions: int | None = None,
        max_in_flight: int = 1,
        min_step_rows: int = 1,
        state_dtype: str = "f32",
        returns_logits: bool = True,
        async_scheduling: bool = False,
        async_tokens: int = 0,
        favoured: Sequence[int] = (),
    ) -> None:
        require_state_dtype(state_dtype, "recurrent state of the fake backend")
        counts = [pages] * len(windows) if isinstance(pages, int) else pages
        self._capacity = Capacity(
            vocab=vocab,
            max_context=max_context,
            lanes=lanes,
            groups=tuple(PageGroup(count, window) for count, window in zip(counts, windows, strict=True)),
            page_size=page_size,
            chunk=chunk,
            recurrent=recurrent,
            checkpoints=checkpoints,
            draft_positions=draft_positions,
            max_in_flight=max_in_flight,
            min_step_rows=min_step_rows,
            returns_logits=returns_logits,
            logits_per_position=returns_logits,
            async_scheduling=async_scheduling,
            async_tokens=async_tokens,
            device="fake",
        )
        self._stores = [np.full((count, page_size), -1, dtype=np.int64) for count in counts]
        self._lanes: list[bytes] = [b""] * lanes
        self._chosen: list[tuple[str, int, int]] = [("", 0, 0)] * lanes  # request, position and token of a lane's last choice
        self._kept = [SavedCheckpoint(b"", None)] * checkpoints
        self._taste = np.zeros(vocab, dtype=np.float32)
        self._taste[list(favoured)] = 6.0
        self._tickets = itertools.count()
        self._under_way: dict[StepHandle, tuple[Outcome, list[Callable[[], None]]]] = {}
        self._homeward: list[Callable[[], None]] = []  # what the rows of the plan that is being submitted do in the end

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    def submit(self, plan: Plan) -> StepHandle:
        begin = time.perf_counter()
        most = self._capacity.draft_positions
        assert most is None or sum(len(row.drafts) for row in plan.rows) <= most, "more drafts than can be rolled back"
        most = self._capacity.max_in_flight + any(row.awaits_token for row in plan.rows)
        assert len(self._under_way) < most, "more plans than may be under way"
        self._homeward = []
        rows = tuple(self.run(self.awaited(row) if row.awaits_token else row) for row in plan.rows)
        ticket = StepHandle(next(self._tickets))
        self._under_way[ticket] = Outcome(rows, time.perf_counter() - begin), self._homeward
        return ticket

    def collect(self, ticket: StepHandle) -> Outcome:
        assert ticket == min(self._under_way), "plans come back in the order they were submitted"
        outcome, homeward = self._under_way.pop(ticket)
        for step in homeward:
            step()
        return outcome

    def close(self) -> None:
        self._under_way.clear()

    # ------------------------------------------------------------------ one row

    def awaited(self, row: Row) -> Row:
        """With the token that the row under way has chosen."""
        request, position, token = self._chosen[row.lane]
        assert (request, position) == (row.request_id, row.start), "the row before it is not under way"
        return replace(row, tokens=(token,))

    def run(self, row: Row) -> RowOutcome:
        """Restore, write, walk, choose after every position that may be reached, commit what was known; when the plan is
        collected, save and commit what was kept: as late as stages that work on several plans at once may do it."""
        self.copy(row)
        if row.restore is not None:
            self.restore(row)
        self._write(row)
        states = self._states(row)
        known = len(row.tokens)
        scored = self._score(row, states) if row.scores_prompt else ()
        logits = self.all_logits(row, states) if row.samples else []
        awaited = row.tokens if row.awaits_token else ()  # the history has it when that row is back
        choices = [self.sample(row, scores, (*awaited, *drafts)) for scores, drafts in zip(logits, draft_prefixes(row.drafts))]
        outcome = row_outcome(row, choices, scored)
        if row.samples:
            self._chosen[row.lane] = row.request_id, row.stop, outcome.sampled[-1].token if outcome.sampled else 0

        def settle() -> None:
            for save in row.saves:
                ends = row.samples and save.position == row.stop == row.prompt_stop
                self.save(row, save, states[save.position - row.start], logits[0] if ends else None)
            if outcome.kept:
                self.compact(row, outcome.kept)
                self.commit(row, states, known + outcome.kept[-1] + 1)

        self.commit(row, states, known)
        self._homeward.append(settle)
        return outcome

    def sample(self, row: Row, logits: Logits, drafts: tuple[int, ...]) -> SampledToken | None:
        return sample(logits, row.params, row.history, drafts)

    def commit(self, row: Row, states: Sequence[bytes], index: int) -> None:
        """After every turn the state that holds after the kept tokens sits in the row's lane, drafts or none."""
        self._lanes[row.lane] = states[index]

    def compact(self, row: Row, kept: Sequence[int]) -> None:
        """Bring the kept path of a tree from its nodes' slots to its positions."""
        groups = range(len(self._stores))
        tokens = [[self._at(row, group, row.stop + index) for group in groups] for index in kept]
        for depth, entry in enumerate(tokens):
            self._put(row, row.stop + depth, entry)

    def all_logits(self, row: Row, states: Sequence[bytes]) -> list[Logits]:
        """After the last known token and after each draft; those of a whole prompt come from its checkpoint."""
        if not row.tokens:
            assert row.restore is not None, "a row without tokens has its logits from a checkpoint"
            logits = self._kept[row.restore].logits
            assert logits is not None, "a checkpoint inside a prompt has no logits"
            return [logits]
        known = len(row.tokens)
        return [self._logits(row, row.stop, states[known + i], path) for i, path in enumerate(draft_paths(row.drafts))]

    # ------------------------------------------------------------------ checkpoints

    def copy(self, row: Row) -> None:
        for copy in row.copies:
            self._stores[copy.group][copy.target] = self._stores[copy.group][copy.source]

    def restore(self, row: Row) -> None:
        assert row.restore is not None
        self._lanes[row.lane] = self._kept[row.restore].state

    def save(self, row: Row, save: CheckpointSave, state: bytes, logits: Logits | None) -> None:
        assert not row.drafts, "a row that saves carries no drafts"
        self._kept[save.slot] = SavedCheckpoint(state, logits)

    @property
    def identity(self) -> str:
        return "fake"

    def export(self, slot: int, pages: Sequence[Sequence[int]]) -> dict[str, npt.NDArray[Any]]:
        kept = self._kept[slot]
        found: dict[str, npt.NDArray[Any]] = {f"pages.{g}": self._stores[g][list(own)] for g, own in enumerate(pages)}
        found["state"] = np.frombuffer(kept.state, np.uint8)
        return found if kept.logits is None else found | {"logits": kept.logits}

    def adopt(self, slot: int | None, places: Sequence[Mapping[int, int]], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        for group, own in enumerate(places):
            for stored, page in own.items():
                self._stores[group][page] = arrays[f"pages.{group}"][stored]
        if slot is not None:
            self._kept[slot] = SavedCheckpoint(arrays["state"].tobytes(), arrays.get("logits"))

    # ------------------------------------------------------------------ state

    def _page(self, row: Row, group: int, slot: int) -> int:
        page = row.pages[group][slot // self._capacity.page_size]
        assert page >= 0, f"slot {slot} lies in a page that group {group} let go"
        return page

    def _put(self, row: Row, slot: int, tokens: Sequence[int]) -> None:
        """One token per group."""
        for group, (store, token) in enumerate(zip(self._stores, tokens, strict=True)):
            store[self._page(row, group, slot), slot % self._capacity.page_size] = token

    def _at(self, row: Row, group: int, slot: int) -> int:
        return int(self._stores[group][self._page(row, group, slot), slot % self._capacity.page_size])

    def _write(self, row: Row) -> None:
        """Every token in a slot of its own: known ones at their positions, drafts behind them in order."""
        for slot, token in enumerate((*row.tokens, *(d.token for d in row.drafts)), start=row.start):
            form = _STEP_FORM if self._capacity.recurrent and slot >= row.prompt_stop else 0
            self._put(row, slot, [token + form] * len(self._stores))

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
        seen = [self._seen(row, group, stop, path) for group in range(len(self._stores))]
        weights = np.arange(1, stop + len(path) + 1, dtype=np.int64) * 2654435761
        totals = [int((tokens * weights[: len(tokens)]).sum()) & (2**64 - 1) for tokens in seen]
        recent = seen[0][-2:].tobytes() + bytes(total % 11 for total in totals)
        key = int.from_bytes(_mix(b"logits", recent, state[:1])[:6], "little")
        return (2.0 * gumbel(key, 0, self._capacity.vocab) + self._taste).astype(np.float32)

    def _seen(self, row: Row, group: int, stop: int, path: Sequence[int]) -> npt.NDArray[np.int64]:
        """What the last of `stop` positions and a path behind them sees of a group: its last window, or all."""
        size, window = self._capacity.page_size, self._capacity.groups[group].window
        first = 0 if window is None else max(stop + len(path) - window, 0)
        low = min(first, stop) // size
        pages = np.asarray(row.pages[group][low : -(-stop // size)], dtype=np.int64)
        assert (pages >= 0).all(), f"group {group} let go of a page that position {stop + len(path) - 1} sees"
        seen = self._stores[group][pages].reshape(-1)[min(first, stop) - low * size : stop - low * size]
        if path:
            drafts = [self._at(row, group, row.stop + index) for index in path]
            seen = np.concatenate([seen, drafts[max(first - stop, 0) :]])
        return seen

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
