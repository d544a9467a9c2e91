"""Between the allocator's checkpoints and snapshots on disk: what was saved goes out, what a prompt begins with comes in.

In: checkpoints that rows have filled, prompts about to be admitted. Out: files, and pages and checkpoints in the prefix
index that admission then finds there like any others. The engine thread copies and reads, never writes to the disk.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from onedraw.backends.base import Backend, SupportsSnapshots
from onedraw.memory.allocator import Allocator
from onedraw.memory.disk_snapshots import Snapshot, SnapshotFolder
from onedraw.memory.pages import first_needed
from onedraw.memory.prefix_cache import Checkpoint
from onedraw.memory.prefix_import import abandon, adopt, make_room, pages_of, reach
from onedraw.types import History

log = logging.getLogger("onedraw.snapshots")

FEWEST = 64  # tokens: a shorter prompt is computed sooner than it is looked up


@dataclass(frozen=True, slots=True)
class Find:
    """A snapshot that serves a prompt up to `position`; with `slot`, from its states and logits."""

    snapshot: Snapshot
    position: int
    slot: bool


class CheckpointOffload:
    """Owner: the engine."""

    def __init__(self, folder: SnapshotFolder, *, allocator: Allocator, backend: Backend, fewest: int = FEWEST) -> None:
        if not isinstance(backend, SupportsSnapshots):
            raise AssertionError("this backend does not export checkpoints")
        self._folder, self._allocator, self._backend, self._fewest = folder, allocator, backend, fewest
        self.restored = 0

    @property
    def saved(self) -> int:
        return self._folder.written

    def keep(self, saved: list[tuple[Checkpoint, tuple[int, ...]]]) -> None:
        """Write the checkpoints that a step saved, as far as the disk keeps up."""
        for checkpoint, tokens in saved:
            if len(tokens) < self._fewest or self._folder.busy or tokens in self._folder:
                continue
            held = pages_of(self._allocator, checkpoint)
            if held is None:  # gave way within the turn
                continue
            firsts, pages = [first for first, _ in held], [pages for _, pages in held]
            try:
                arrays = self._backend.export(checkpoint.slot, pages)
            except Exception as error:  # a snapshot less; nobody's reply hangs on it
                log.warning("a snapshot could not be taken: %s", error)
                return
            if not checkpoint.logits:
                arrays.pop("logits", None)  # the slot has those of somebody else
            self._folder.write(tokens, arrays, logits=checkpoint.logits, firsts=firsts)

    def fetch(self, history: History) -> None:
        """Before admission: bring in what the disk knows of a prompt beyond what the index knows."""
        if len(history.prompt) < self._fewest:
            return
        known = reach(self._allocator, history)
        found = self._find(history)
        if found is None or found.position < known + self._fewest:
            return
        arrays = self._folder.read(found.snapshot)
        if arrays is None:
            return
        tokens = history.prompt[: found.position]
        adoption = make_room(self._allocator, tokens, slot=found.slot)
        if adoption is None:
            return
        try:
            self._backend.adopt(adoption.slot, adoption.places(found.snapshot.firsts), arrays)
        except (KeyError, ValueError) as error:
            self._folder.discard(found.snapshot, error)
            abandon(self._allocator, adoption)
            return
        except Exception as error:  # the prompt is computed instead; the file may be good
            log.warning("a snapshot could not be taken in: %s", error)
            abandon(self._allocator, adoption)
            return
        adopt(self._allocator, adoption, logits=found.slot and found.snapshot.logits)
        self.restored += 1

    def _find(self, history: History) -> Find | None:
        """Exactly this prompt; else a boundary inside it where there is recurrent state, or as many full pages as possible."""
        prompt, needs, size = history.prompt, self._allocator.needs, self._allocator.page_size
        slots = self._allocator.slots.count > 0
        whole = self._folder.whole(prompt, lengths=[len(prompt)]) if slots and not history.output else None
        if whole is not None and whole.logits:
            return Find(whole, len(prompt), slot=True)
        if needs.recurrent:
            lengths = range(needs.chunk, len(prompt) + (1 if history.output else 0), needs.chunk)
            inside = self._folder.whole(prompt, lengths=lengths) if slots else None
            return None if inside is None else Find(inside, len(inside.tokens), slot=True)
        begins = self._folder.beginning(prompt[: len(history) - 1])
        if begins is None:
            return None
        snapshot, pages = begins
        sees = (first_needed(pages * size, window) // size for window in needs.windows)
        there = all(first <= seen for first, seen in zip(snapshot.firsts, sees, strict=True))
        return Find(snapshot, pages * size, slot=False) if there else None

    def close(self) -> None:
        self._folder.close()
