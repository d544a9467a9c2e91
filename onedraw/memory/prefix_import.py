"""A prefix that comes from elsewhere into the prefix index: room for it first, then its place among the others.

In: tokens, and a backend's word that pages and slot have their content. Out: nodes and a checkpoint that `Allocator.lend`
finds like any others. Owner of an adoption: the engine thread, which begins and ends it between two turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onedraw.memory.allocator import Allocator
from onedraw.memory.pages import NO_PAGE, first_needed, pages_for
from onedraw.memory.prefix_cache import Checkpoint, Node, longest
from onedraw.types import History


@dataclass(frozen=True, slots=True)
class Adoption:
    """Room for a prefix that comes from elsewhere, until it is in the index."""

    tokens: tuple[int, ...]
    slot: int | None
    pages: tuple[dict[int, int], ...]  # per group: place in the prefix → page to be filled
    held: tuple[dict[int, int], ...]  # the same for those that are there already
    pinned: Node

    def places(self, firsts: Sequence[int]) -> list[dict[int, int]]:
        """Stored page → page here, where the stored ones begin with these places."""
        return [{place - first: page for place, page in new.items()} for first, new in zip(firsts, self.pages, strict=True)]


def reach(allocator: Allocator, history: History) -> int:
    """How far a prompt could be resumed now."""
    path = allocator.index.walk(history.prompt)
    return longest(path, history.prompt, prompt=len(history.prompt), known=len(history), needs=allocator.needs).position


def pages_of(allocator: Allocator, checkpoint: Checkpoint) -> list[tuple[int, list[int]]] | None:
    """Per group the pages that its position sees, in order, and the place of the first; None where it is gone or one of
    them is. Where they are still there, those that the end of the last full page sees come along: the next turn of a
    conversation goes on from there."""
    if checkpoint.node.checkpoints.get(checkpoint.tail) is not checkpoint:
        return None
    chain: list[Node] = []
    node = checkpoint.node
    while node.above is not None:
        chain.append(node)
        node = node.above
    found, size = [], allocator.page_size
    for group, window in enumerate(allocator.needs.windows):
        held = [node.pages[group] for node in reversed(chain)] + list(checkpoint.pages[group : group + 1])
        ends = (checkpoint.position - checkpoint.position % size, checkpoint.position)
        firsts = [first_needed(end, window) // size for end in ends]
        first = next((first for first in firsts if NO_PAGE not in held[first:]), None)
        if first is None:
            return None
        found.append((first, held[first:]))
    return found


def make_room(allocator: Allocator, tokens: tuple[int, ...], *, slot: bool) -> Adoption | None:
    """Pages, and a slot, for a prefix that comes from elsewhere; what the index has of it stays. None: no room."""
    position, size = len(tokens), allocator.page_size
    path = allocator.index.walk(tokens)
    pages: list[dict[int, int]] = [{} for _ in allocator.pools]
    held: list[dict[int, int]] = [{} for _ in allocator.pools]
    for group, pool in enumerate(allocator.pools):
        for place in range(first_needed(position, pool.window) // size, pages_for(position, size)):
            there = path[place + 1].pages[group] if place + 1 < len(path) else NO_PAGE
            (pages if there == NO_PAGE else held)[group][place] = there
    idle = [sum(map(pool.idle, set(kept.values()))) for pool, kept in zip(allocator.pools, held, strict=True)]
    if any(len(new) + gone > pool.available for new, gone, pool in zip(pages, idle, allocator.pools, strict=True)):
        return None
    allocator.index.pin(path[-1])
    for pool, kept in zip(allocator.pools, held, strict=True):
        for page in kept.values():
            pool.share(page)
    adoption = Adoption(tokens, allocator.slots.take() if slot else None, tuple(pages), tuple(held), path[-1])
    for pool, new in zip(allocator.pools, pages, strict=True):
        for place in new:
            new[place] = pool.take()
    if slot and adoption.slot is None:  # all are about to be read or written
        abandon(allocator, adoption)
        return None
    return adoption


def adopt(allocator: Allocator, adoption: Adoption, *, logits: bool) -> None:
    """What was made room for has its content now: whoever comes finds it in the index."""
    tokens, size = adoption.tokens, allocator.page_size
    depth = len(tokens) // size
    node = allocator.index.root
    for place in range(depth):
        node = allocator.index.below(node, tokens[place * size : (place + 1) * size])
        for group, new in enumerate(adoption.pages):
            if place in new:
                allocator.index.adopt(node, group, new[place])
    allocator.index.pin(node)  # it stays while its checkpoint is exchanged
    tail = tokens[depth * size :]
    if adoption.slot is not None:
        before = node.checkpoints.get(tail)
        if before is not None and allocator.slots.pinned(before.slot):
            allocator.slots.give_back(adoption.slot)
        else:
            if before is not None:
                allocator.dissolve(before)
            last = tuple(new[depth] for new in adoption.pages) if tail else ()
            checkpoint = Checkpoint(node, tail, len(tokens), adoption.slot, logits, last)
            allocator.index.keep(checkpoint)
            allocator.slots.keep(checkpoint)
    _let_rest(allocator, adoption)
    allocator.index.unpin(node)


def abandon(allocator: Allocator, adoption: Adoption) -> None:
    if adoption.slot is not None:
        allocator.slots.give_back(adoption.slot)
    _let_rest(allocator, adoption)


def _let_rest(allocator: Allocator, adoption: Adoption) -> None:
    for group, (new, held) in enumerate(zip(adoption.pages, adoption.held, strict=True)):
        allocator.drop(group, [page for _, page in sorted({**new, **held}.items())])
    allocator.index.unpin(adoption.pinned)
