"""Moves prompt checkpoints between memory and disk: saved checkpoints become snapshots, prompts resume from snapshots.

In: checkpoints that rows have filled, prompts about to be admitted. Out: files; pages and checkpoints in the prefix cache, where
admission finds them like any others. The engine thread copies and reads; a thread of `SnapshotFolder` writes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from onedraw.backends.base import Backend, SupportsSnapshots
from onedraw.memory.allocator import Allocator
from onedraw.memory.disk_snapshots import Snapshot, SnapshotFolder
from onedraw.memory.pages import first_visible
from onedraw.memory.prefix_cache import PrefixCheckpoint
from onedraw.memory.prefix_import import begin_import, cancel_import, checkpoint_pages, finish_import, reusable_length
from onedraw.types import History

log = logging.getLogger("onedraw.snapshots")

MIN_TOKENS = 64  # computing a shorter prompt is faster than reading it from disk


@dataclass(frozen=True, slots=True)
class SnapshotMatch:
    """A snapshot that covers a prompt up to `position`; with `slot`, its recurrent state and logits are used too."""

    snapshot: Snapshot
    position: int
    slot: bool


class CheckpointOffload:
    """Owner: the engine."""

    def __init__(self, folder: SnapshotFolder, *, allocator: Allocator, backend: Backend, min_tokens: int = MIN_TOKENS) -> None:
        if not isinstance(backend, SupportsSnapshots):
            raise AssertionError("this backend does not export checkpoints")
        self._folder, self._allocator, self._backend, self._min_tokens = folder, allocator, backend, min_tokens
        self.restored = 0

    @property
    def saved(self) -> int:
        return self._folder.written

    def save(self, checkpoints: list[tuple[PrefixCheckpoint, tuple[int, ...]]]) -> None:
        """Export the checkpoints that a step saved and queue them for writing, as far as the disk keeps up."""
        for checkpoint, tokens in checkpoints:
            if len(tokens) < self._min_tokens or self._folder.busy or tokens in self._folder:
                continue
            held = checkpoint_pages(self._allocator, checkpoint)
            if held is None:  # evicted within the same step
                continue
            firsts, pages = [first for first, _ in held], [pages for _, pages in held]
            try:
                arrays = self._backend.export_checkpoint(checkpoint.slot, pages)
            except Exception as error:  # a missing snapshot only costs time later; no reply depends on it
                log.warning("a checkpoint could not be exported to a snapshot: %s", error)
                return
            if not checkpoint.logits:
                arrays.pop("logits", None)  # the slot still has the logits of an earlier checkpoint
            self._folder.write(tokens, arrays, logits=checkpoint.logits, firsts=firsts)

    def fetch(self, history: History) -> None:
        """Before admission: load a snapshot into the prefix cache if it covers more of the prompt than the cache does."""
        if len(history.prompt) < self._min_tokens:
            return
        cached = reusable_length(self._allocator, history)
        match = self._find(history)
        if match is None or match.position < cached + self._min_tokens:
            return
        arrays = self._folder.read(match.snapshot)
        if arrays is None:
            return
        imported = begin_import(self._allocator, history.prompt[: match.position], slot=match.slot)
        if imported is None:
            return
        try:
            self._backend.import_checkpoint(imported.slot, imported.page_map(match.snapshot.firsts), arrays)
        except (KeyError, ValueError) as error:
            self._folder.discard(match.snapshot, error)
            cancel_import(self._allocator, imported)
            return
        except Exception as error:  # compute the prompt instead; the file may be good, so it stays
            log.warning("a snapshot could not be loaded: %s", error)
            cancel_import(self._allocator, imported)
            return
        finish_import(self._allocator, imported, logits=match.slot and match.snapshot.logits)
        self.restored += 1

    def _find(self, history: History) -> SnapshotMatch | None:
        """The snapshot of exactly this prompt; else, with recurrent state, of a chunk boundary inside it; else, as many full
        pages as possible."""
        prompt, rules, size = history.prompt, self._allocator.rules, self._allocator.page_size
        has_slots = self._allocator.checkpoint_slots.count > 0
        whole = self._folder.longest_whole(prompt, lengths=[len(prompt)]) if has_slots and not history.output else None
        if whole is not None and whole.logits:
            return SnapshotMatch(whole, len(prompt), slot=True)
        if rules.recurrent:
            lengths = range(rules.chunk, len(prompt) + (1 if history.output else 0), rules.chunk)
            inside = self._folder.longest_whole(prompt, lengths=lengths) if has_slots else None
            return None if inside is None else SnapshotMatch(inside, len(inside.tokens), slot=True)
        found = self._folder.longest_pages(prompt[: len(history) - 1])
        if found is None:
            return None
        snapshot, pages = found
        visible = (first_visible(pages * size, window) // size for window in rules.windows)
        complete = all(first <= needed for first, needed in zip(snapshot.firsts, visible, strict=True))
        return SnapshotMatch(snapshot, pages * size, slot=False) if complete else None

    def close(self) -> None:
        self._folder.close()
