"""A backend without weights or device, for host tests and client development: logits are a hash of everything the engine manages.

In: plans. Out: outcomes sampled with `sampling/law.py`. The logits of a position depend on every token read back through the
pages of every layer group (with a window: the last tokens), and, if `recurrent`, on a state, which prompt positions update in
chunks that begin at multiples of the chunk size, generated ones one by one. So an engine error with pages, lanes, chunks,
checkpoints or drafts changes the tokens. A row is the work of one sequence in one step; a lane is the slot of its state. A group
is the layers that keep the same positions in pages.
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

from onedraw.backends.base import Capacity, PageGroup, StepHandle
from onedraw.backends.sampled_rows import row_outcome
from onedraw.sampling.law import sample
from onedraw.sampling.logprobs import logprobs
from onedraw.sampling.noise import gumbel
from onedraw.sampling.verify import draft_paths, draft_prefixes
from onedraw.types import CheckpointSave, Logprobs, Outcome, Plan, Row, RowOutcome, SampledToken

Logits = npt.NDArray[np.float32]
_RECURRENT_FORM = 2**32  # in recurrent models, added to page entries of generated positions, to tell them from prompt positions


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    state: bytes
    logits: Logits | None


class FakeBackend:
    """A backend that computes hashes instead of a model. `windows`: one per layer group, None for full attention. `pages`: per
    group, or one number for all. `favoured`: token ids that are sampled more often."""

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
        returns_logits: bool = True,
        async_scheduling: bool = False,
        async_tokens: int = 0,
        favoured: Sequence[int] = (),
    ) -> None:
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
        self._last_sampled: list[tuple[str, int, int]] = [("", 0, 0)] * lanes  # by lane: request, position and token
        self._kept = [SavedCheckpoint(b"", None)] * checkpoints
        self._bias = np.zeros(vocab, dtype=np.float32)
        self._bias[list(favoured)] = 6.0
        self._handles = itertools.count()
        self._in_flight: dict[StepHandle, tuple[Outcome, list[Callable[[], None]]]] = {}
        self._on_collect: list[Callable[[], None]] = []  # deferred work of the plan being submitted

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    def submit(self, plan: Plan) -> StepHandle:
        begin = time.perf_counter()
        most = self._capacity.draft_positions
        assert most is None or sum(len(row.drafts) for row in plan.rows) <= most, "more drafts than can be rolled back"
        most = self._capacity.max_in_flight + any(row.awaits_token for row in plan.rows)
        assert len(self._in_flight) < most, "more plans in flight than the capacity allows"
        self._on_collect = []
        rows = tuple(self.run(self.awaited(row) if row.awaits_token else row) for row in plan.rows)
        handle = StepHandle(next(self._handles))
        self._in_flight[handle] = Outcome(rows, time.perf_counter() - begin), self._on_collect
        return handle

    def collect(self, handle: StepHandle) -> Outcome:
        assert handle == min(self._in_flight), "plans are collected in the order of their submission"
        outcome, deferred = self._in_flight.pop(handle)
        for work in deferred:
            work()
        return outcome

    def close(self) -> None:
        self._in_flight.clear()

    # ------------------------------------------------------------------ one row

    def awaited(self, row: Row) -> Row:
        """Return the row with its pending token replaced by the token that the sequence's row in the plan before has sampled."""
        request, position, token = self._last_sampled[row.lane]
        assert (request, position) == (row.request_id, row.start), "the row before it is not in flight"
        return replace(row, tokens=(token,))

    def run(self, row: Row) -> RowOutcome:
        """Compute a row: copy pages, restore a checkpoint, write the tokens to pages, compute states, sample, and commit the
        known tokens. Checkpoints are saved and kept drafts committed only when the plan is collected, as late as pipeline stages
        may do it."""
        self.copy(row)
        if row.restore is not None:
            self.restore(row)
        self._write(row)
        states = self._states(row)
        known = len(row.tokens)
        scored = self._score(row, states) if row.scores_prompt else ()
        logits = self.all_logits(row, states) if row.samples else []
        awaited = row.tokens if row.awaits_token else ()  # the history gets the awaited token when the plan before is collected
        samples = [self.sample(row, scores, (*awaited, *drafts)) for scores, drafts in zip(logits, draft_prefixes(row.drafts))]
        outcome = row_outcome(row, samples, scored)
        if row.samples:
            self._last_sampled[row.lane] = row.request_id, row.stop, outcome.sampled[-1].token if outcome.sampled else 0

        def finish() -> None:
            for save in row.saves:
                ends = row.samples and save.position == row.stop == row.prompt_stop
                self.save(row, save, states[save.position - row.start], logits[0] if ends else None)
            if outcome.kept:
                self.compact(row, outcome.kept)
                self.commit(row, states, known + outcome.kept[-1] + 1)

        self.commit(row, states, known)
        self._on_collect.append(finish)
        return outcome

    def sample(self, row: Row, logits: Logits, drafts: tuple[int, ...]) -> SampledToken | None:
        return sample(logits, row.params, row.history, drafts)

    def commit(self, row: Row, states: Sequence[bytes], index: int) -> None:
        """Store the state after the kept tokens in the row's lane."""
        self._lanes[row.lane] = states[index]

    def compact(self, row: Row, kept: Sequence[int]) -> None:
        """Move the page entries of kept drafts, which are a path in the draft tree, to the slots of their positions."""
        groups = range(len(self._stores))
        tokens = [[self._at(row, group, row.stop + index) for group in groups] for index in kept]
        for depth, entry in enumerate(tokens):
            self._put(row, row.stop + depth, entry)

    def all_logits(self, row: Row, states: Sequence[bytes]) -> list[Logits]:
        """Logits after the last known token and after each draft; for a row without tokens, those of its checkpoint."""
        if not row.tokens:
            assert row.restore is not None, "a row without tokens takes its logits from a checkpoint"
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

    def export_checkpoint(self, slot: int, pages: Sequence[Sequence[int]]) -> dict[str, npt.NDArray[Any]]:
        kept = self._kept[slot]
        found: dict[str, npt.NDArray[Any]] = {f"pages.{g}": self._stores[g][list(own)] for g, own in enumerate(pages)}
        found["state"] = np.frombuffer(kept.state, np.uint8)
        return found if kept.logits is None else found | {"logits": kept.logits}

    def import_checkpoint(
        self, slot: int | None, page_maps: Sequence[Mapping[int, int]], arrays: Mapping[str, npt.NDArray[Any]]
    ) -> None:
        for group, own in enumerate(page_maps):
            for stored, page in own.items():
                self._stores[group][page] = arrays[f"pages.{group}"][stored]
        if slot is not None:
            self._kept[slot] = SavedCheckpoint(arrays["state"].tobytes(), arrays.get("logits"))

    # ------------------------------------------------------------------ state

    def _page(self, row: Row, group: int, slot: int) -> int:
        page = row.pages[group][slot // self._capacity.page_size]
        assert page >= 0, f"slot {slot} is in a page that group {group} has freed"
        return page

    def _put(self, row: Row, slot: int, tokens: Sequence[int]) -> None:
        """Write tokens to slots of the row's pages, in every group."""
        for group, (store, token) in enumerate(zip(self._stores, tokens, strict=True)):
            store[self._page(row, group, slot), slot % self._capacity.page_size] = token

    def _at(self, row: Row, group: int, slot: int) -> int:
        return int(self._stores[group][self._page(row, group, slot), slot % self._capacity.page_size])

    def _write(self, row: Row) -> None:
        """Known tokens go to the slots of their positions, drafts to the slots after them in order."""
        for slot, token in enumerate((*row.tokens, *(d.token for d in row.drafts)), start=row.start):
            form = _RECURRENT_FORM if self._capacity.recurrent and slot >= row.prompt_stop else 0
            self._put(row, slot, [token + form] * len(self._stores))

    def _states(self, row: Row) -> list[bytes]:
        """The states of a row: states[i] after i known tokens, states[known + 1 + i] after draft i, from its parent's state.

        Prompt positions are computed in chunks that begin at multiples of the chunk size, the others one by one.
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
        """Logits after positions [0, stop) and a path of drafts, read back through the pages."""
        seen = [self._seen(row, group, stop, path) for group in range(len(self._stores))]
        weights = np.arange(1, stop + len(path) + 1, dtype=np.int64) * 2654435761
        totals = [int((tokens * weights[: len(tokens)]).sum()) & (2**64 - 1) for tokens in seen]
        recent = seen[0][-2:].tobytes() + bytes(total % 11 for total in totals)
        key = int.from_bytes(_mix(b"logits", recent, state[:1])[:6], "little")
        return (2.0 * gumbel(key, 0, self._capacity.vocab) + self._bias).astype(np.float32)

    def _seen(self, row: Row, group: int, stop: int, path: Sequence[int]) -> npt.NDArray[np.int64]:
        """The page entries of a group to which the last position attends. The positions are [0, stop), then the drafts of `path`;
        the entries are those in the group's window, or all without a window."""
        size, window = self._capacity.page_size, self._capacity.groups[group].window
        first = 0 if window is None else max(stop + len(path) - window, 0)
        low = min(first, stop) // size
        pages = np.asarray(row.pages[group][low : -(-stop // size)], dtype=np.int64)
        assert (pages >= 0).all(), f"group {group} has freed a page that position {stop + len(path) - 1} attends to"
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


class ScriptedBackend(FakeBackend):
    """A backend whose steps cost a few microseconds a token, to measure everything around it. The token at a position is always
    the same one of `favoured`. There are no logits, so only greedy requests are served."""

    def __init__(self, *, favoured: Sequence[int], **options: Any) -> None:
        super().__init__(returns_logits=False, favoured=favoured, **options)
        self._tokens = [SampledToken(token) for token in favoured]

    def run(self, row: Row) -> RowOutcome:
        if not row.samples:
            return RowOutcome()
        sampled = self._tokens[(row.stop * 2654435761 >> 7) % len(self._tokens)]
        self._last_sampled[row.lane] = row.request_id, row.stop, sampled.token
        return RowOutcome((sampled,))


def _step(state: bytes, token: int) -> bytes:
    return _mix(b"step", state, token.to_bytes(4, "little"))


def _mix(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"|".join(parts), digest_size=8).digest()
