"""A prefix that comes from elsewhere into the prefix index: room for it first, then its place among the others.

In: tokens, and a backend's word that pages and slot have their content. Out: nodes and a checkpoint that `Ledger.lend`
finds like any others. Owner of an adoption: the engine thread, which begins and ends it between two turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onedraw.memory.allocator import Ledger
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


def reach(ledger: Ledger, history: History) -> int:
    """How far a prompt could be resumed now."""
    path = ledger.index.walk(history.prompt)
    return longest(path, history.prompt, prompt=len(history.prompt), known=len(history), needs=ledger.needs).position


def pages_of(ledger: Ledger, checkpoint: Checkpoint) -> list[tuple[int, list[int]]] | None:
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
    found, size = [], ledger.page_size
    for group, window in enumerate(ledger.needs.windows):
        held = [node.pages[group] for node in reversed(chain)] + list(checkpoint.pages[group : group + 1])
        ends = (checkpoint.position - checkpoint.position % size, checkpoint.position)
        firsts = [first_needed(end, window) // size for end in ends]
        first = next((first for first in firsts if NO_PAGE not in held[first:]), None)
        if first is None:
            return None
        found.append((first, held[first:]))
    return found


def make_room(ledger: Ledger, tokens: tuple[int, ...], *, slot: bool) -> Adoption | None:
    """Pages, and a slot, for a prefix that comes from elsewhere; what the index has of it stays. None: no room."""
    position, size = len(tokens), ledger.page_size
    path = ledger.index.walk(tokens)
    pages: list[dict[int, int]] = [{} for _ in ledger.pools]
    held: list[dict[int, int]] = [{} for _ in ledger.pools]
    for group, pool in enumerate(ledger.pools):
        for place in range(first_needed(position, pool.window) // size, pages_for(position, size)):
            there = path[place + 1].pages[group] if place + 1 < len(path) else NO_PAGE
            (pages if there == NO_PAGE else held)[group][place] = there
    idle = [sum(map(pool.idle, set(kept.values()))) for pool, kept in zip(ledger.pools, held, strict=True)]
    if any(len(new) + gone > pool.available for new, gone, pool in zip(pages, idle, ledger.pools, strict=True)):
        return None
    ledger.index.pin(path[-1])
    for pool, kept in zip(ledger.pools, held, strict=True):
        for page in kept.values():
            pool.share(page)
    adoption = Adoption(tokens, ledger.slots.take() if slot else None, tuple(pages), tuple(held), path[-1])
    for pool, new in zip(ledger.pools, pages, strict=True):
        for place in new:
            new[place] = pool.take()
    if slot and adoption.slot is None:  # all are about to be read or written
        abandon(ledger, adoption)
        return None
    return adoption


def adopt(ledger: Ledger, adoption: Adoption, *, logits: bool) -> None:
    """What was made room for has its content now: whoever comes finds it in the index."""
    tokens, size = adoption.tokens, ledger.page_size
    depth = len(tokens) // size
    node = ledger.index.root
    for place in range(depth):
        node = ledger.index.below(node, tokens[place * size : (place + 1) * size])
        for group, new in enumerate(adoption.pages):
            if place in new:
                ledger.index.adopt(node, group, new[place])
    ledger.index.pin(node)  # it stays while its checkpoint is exchanged
    tail = tokens[depth * size :]
    if adoption.slot is not None:
        before = node.checkpoints.get(tail)
        if before is not None and ledger.slots.pinned(before.slot):
            ledger.slots.give_back(adoption.slot)
        else:
            if before is not None:
                ledger.dissolve(before)
            last = tuple(new[depth] for new in adoption.pages) if tail else ()
            checkpoint = Checkpoint(node, tail, len(tokens), adoption.slot, logits, last)
            ledger.index.keep(checkpoint)
            ledger.slots.keep(checkpoint)
    _let_rest(ledger, adoption)
    ledger.index.unpin(node)


def abandon(ledger: Ledger, adoption: Adoption) -> None:
    if adoption.slot is not None:
        ledger.slots.give_back(adoption.slot)
    _let_rest(ledger, adoption)


def _let_rest(ledger: Ledger, adoption: Adoption) -> None:
    for group, (new, held) in enumerate(zip(adoption.pages, adoption.held, strict=True)):
        ledger.drop(group, [page for _, page in sorted({**new, **held}.items())])
    ledger.index.unpin(adoption.pinned)
