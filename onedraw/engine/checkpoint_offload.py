"""Moves prompt checkpoints between device memory and disk, where they survive a restart as snapshots.

A checkpoint is the recurrent state and last logits after a prefix of a prompt, in a numbered slot on the device. A snapshot is a
checkpoint and its KV pages, in a file. A chunk is the number of prompt positions that recurrent layers compute at once.

Checkpoints that rows have saved are exported to files. Before a prompt is admitted, a snapshot that covers more of it than the
prefix cache is loaded into the cache, where admission finds it like any other prefix. The engine's thread exports and reads; the
thread of a SnapshotFolder writes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from onedraw.backends.base import Backend, SupportsSnapshots
from onedraw.memory.allocator import Allocator
from onedraw.memory.disk_snapshots import Snapshot, SnapshotFolder
from onedraw.memory.pages import NO_PAGE, first_visible, pages_for
from onedraw.memory.prefix_cache import Node, PrefixCheckpoint, longest_resume
from onedraw.types import History

log = logging.getLogger("onedraw.snapshots")

MIN_TOKENS = 64  # Computing a prompt shorter than this takes less time than reading its snapshot.


@dataclass(frozen=True, slots=True)
class SnapshotMatch:
    """A snapshot that covers the first `position` tokens of a prompt. If `slot` is true, not only its pages are used but also
    its recurrent state and logits."""

    snapshot: Snapshot
    position: int
    slot: bool


class CheckpointOffload:
    """Saves and restores the snapshots of one engine. It may only be used on the engine's thread."""

    def __init__(self, folder: SnapshotFolder, *, allocator: Allocator, backend: Backend, min_tokens: int = MIN_TOKENS) -> None:
        if not isinstance(backend, SupportsSnapshots):
            raise AssertionError("this backend does not export checkpoints")
        self._folder, self._allocator, self._backend, self._min_tokens = folder, allocator, backend, min_tokens
        self.restored = 0
        self._written_before = 0  # number of snapshots written to the folders that were in use before this one

    @property
    def saved(self) -> int:
        return self._written_before + self._folder.written

    def save(self, checkpoints: list[tuple[PrefixCheckpoint, tuple[int, ...]]]) -> None:
        """Export the checkpoints that a step has saved and queue them for writing. While the disk is busy they are skipped."""
        for checkpoint, tokens in checkpoints:
            if len(tokens) < self._min_tokens or self._folder.busy or tokens in self._folder:
                continue
            held = checkpoint_pages(self._allocator, checkpoint)
            if held is None:  # The checkpoint, or a page that it needs, was evicted within the same step.
                continue
            firsts, pages = [first for first, _ in held], [pages for _, pages in held]
            try:
                arrays = self._backend.export_checkpoint(checkpoint.slot, pages)
            except Exception as error:  # No snapshot: a later prompt is computed again, which costs only time.
                log.warning("a checkpoint could not be exported to a snapshot: %s", error)
                return
            if not checkpoint.logits:
                arrays.pop("logits", None)  # The checkpoint has none; its slot still has those of an earlier checkpoint.
            self._folder.write(tokens, arrays, logits=checkpoint.logits, firsts=firsts)

    def fetch(self, history: History) -> None:
        """Load a snapshot into the prefix cache if it covers at least `min_tokens` more of the prompt than the cache does."""
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
        except Exception as error:  # The prompt is computed instead. The file may be fine, so it stays on disk.
            log.warning("a snapshot could not be loaded: %s", error)
            cancel_import(self._allocator, imported)
            return
        finish_import(self._allocator, imported, logits=match.slot and match.snapshot.logits)
        self.restored += 1

    def _find(self, history: History) -> SnapshotMatch | None:
        """Return the best usable snapshot, or None. One of the whole prompt with its logits is best. The second best is, for a
        model with recurrent state, the longest that ends at a chunk boundary, and for other models the one with the most full
        pages."""
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

    def change_folder(self, folder: SnapshotFolder) -> None:
        """Read and write snapshots of another folder from now on, and close the one before."""
        self._written_before += self._folder.written
        before, self._folder = self._folder, folder
        before.close()

    def close(self) -> None:
        self._folder.close()


# ---------------------------------------------------------------------- importing a snapshot into the prefix cache


@dataclass(frozen=True, slots=True)
class PrefixImport:
    """Pages and a checkpoint slot that are reserved for a prefix until its content is loaded and added to the prefix cache."""

    tokens: tuple[int, ...]
    slot: int | None
    new_pages: tuple[dict[int, int], ...]  # for each layer group, a map from page index in the prefix to the page to fill
    held_pages: tuple[dict[int, int], ...]  # for each layer group, a map from page index to a page that the cache has already
    pinned: Node

    def page_map(self, firsts: Sequence[int]) -> list[dict[int, int]]:
        """Return for each layer group a map from the number of a stored page to the page to fill. `firsts` has the index in the
        prefix of each group's first stored page."""
        return [{index - first: page for index, page in new.items()} for first, new in zip(firsts, self.new_pages, strict=True)]


def reusable_length(allocator: Allocator, history: History) -> int:
    """Return up to which position a prompt could be resumed from the prefix cache now."""
    path = allocator.prefix_cache.match(history.prompt)
    return longest_resume(path, history.prompt, prompt=len(history.prompt), known=len(history), rules=allocator.rules).position


def checkpoint_pages(allocator: Allocator, checkpoint: PrefixCheckpoint) -> list[tuple[int, list[int]]] | None:
    """Return for each layer group the index of the first page to store, and the pages from there to the checkpoint's position.

    A prompt that resumes at the checkpoint attends to these pages. The next prompt of a conversation resumes at the end of the
    last full page instead, so the pages to which that position attends are added if the cache has them. None if the checkpoint
    or a needed page was evicted.
    """
    if checkpoint.node.checkpoints.get(checkpoint.tail) is not checkpoint:
        return None
    chain: list[Node] = []
    node = checkpoint.node
    while node.parent is not None:
        chain.append(node)
        node = node.parent
    found, size = [], allocator.page_size
    for group, window in enumerate(allocator.rules.windows):
        held = [node.pages[group] for node in reversed(chain)] + list(checkpoint.pages[group : group + 1])
        ends = (checkpoint.position - checkpoint.position % size, checkpoint.position)
        firsts = [first_visible(end, window) // size for end in ends]
        first = next((first for first in firsts if NO_PAGE not in held[first:]), None)
        if first is None:
            return None
        found.append((first, held[first:]))
    return found


def begin_import(allocator: Allocator, tokens: tuple[int, ...], *, slot: bool) -> PrefixImport | None:
    """Reserve the pages that the cache lacks, and a checkpoint slot if requested. None if too few pages or no slot can be had."""
    position, size = len(tokens), allocator.page_size
    path = allocator.prefix_cache.match(tokens)
    new_pages: list[dict[int, int]] = [{} for _ in allocator.pools]
    held_pages: list[dict[int, int]] = [{} for _ in allocator.pools]
    for group, pool in enumerate(allocator.pools):
        for index in range(first_visible(position, pool.window) // size, pages_for(position, size)):
            page = path[index + 1].pages[group] if index + 1 < len(path) else NO_PAGE
            (new_pages if page == NO_PAGE else held_pages)[group][index] = page
    idle = [sum(map(pool.idle, set(held.values()))) for pool, held in zip(allocator.pools, held_pages, strict=True)]
    if any(len(new) + taken > pool.available for new, taken, pool in zip(new_pages, idle, allocator.pools, strict=True)):
        return None
    allocator.prefix_cache.pin(path[-1])
    for pool, held in zip(allocator.pools, held_pages, strict=True):
        for page in held.values():
            pool.retain(page)
    taken_slot = allocator.checkpoint_slots.take() if slot else None
    imported = PrefixImport(tokens, taken_slot, tuple(new_pages), tuple(held_pages), path[-1])
    for pool, new in zip(allocator.pools, new_pages, strict=True):
        for index in new:
            new[index] = pool.take()
    if slot and imported.slot is None:  # Planned rows will read or fill every slot, so none can be evicted.
        cancel_import(allocator, imported)
        return None
    return imported


def finish_import(allocator: Allocator, imported: PrefixImport, *, logits: bool) -> None:
    """Add the reserved pages and slot, which have been filled, to the prefix cache."""
    tokens, size, cache = imported.tokens, allocator.page_size, allocator.prefix_cache
    depth = len(tokens) // size
    node = cache.root
    for index in range(depth):
        node = cache.child(node, tokens[index * size : (index + 1) * size])
        for group, new in enumerate(imported.new_pages):
            if index in new:
                cache.add_page(node, group, new[index])
    cache.pin(node)  # so that the cache keeps the node while its checkpoint is replaced
    tail = tokens[depth * size :]
    if imported.slot is not None:
        before = node.checkpoints.get(tail)
        if before is not None and allocator.checkpoint_slots.pinned(before.slot):
            allocator.checkpoint_slots.release(imported.slot)
        else:
            if before is not None:
                allocator.remove_checkpoint(before)
            last = tuple(new[depth] for new in imported.new_pages) if tail else ()
            checkpoint = PrefixCheckpoint(node, tail, len(tokens), imported.slot, logits, last)
            cache.add_checkpoint(checkpoint)
            allocator.checkpoint_slots.add(checkpoint)
    _release_pages(allocator, imported)
    cache.unpin(node)


def cancel_import(allocator: Allocator, imported: PrefixImport) -> None:
    if imported.slot is not None:
        allocator.checkpoint_slots.release(imported.slot)
    _release_pages(allocator, imported)


def _release_pages(allocator: Allocator, imported: PrefixImport) -> None:
    """Release the pages: those in the prefix cache stay available for reuse, the others become free."""
    for group, (new, held) in enumerate(zip(imported.new_pages, imported.held_pages, strict=True)):
        allocator.release_pages(group, [page for _, page in sorted({**new, **held}.items())])
    allocator.prefix_cache.unpin(imported.pinned)
