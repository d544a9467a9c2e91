"""The allocator lends lanes, pages and checkpoints; a lease is what one sequence holds.

In: a sequence's tokens and lengths. Out: Lease, whose numbers go into rows. Everything a lease took it gives back in
`release`; `audit` proves it whenever the engine is idle, `audit_all` in every turn of a test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from onedraw.memory.pages import NO_PAGE, GroupSizes, PagePool, Pages, first_needed, most_pages, pages_for, pages_of
from onedraw.memory.prefix_cache import Checkpoint, Needs, Node, PrefixIndex, Resume, longest
from onedraw.memory.slots import CheckpointSlots, Slots
from onedraw.types import CheckpointSave, History, PageCopy

# -------------------- Which positions of a prompt are worth a checkpoint. A pure function of numbers; it can cha


INTERVAL = 8  # chunks between the checkpoints of a long prompt, at least
SHARE = 4  # one prompt's middle takes at most this part of the slots


def save_points(*, prompt: int, start: int, shared: int, chunk: int, recurrent: bool, slots: int) -> tuple[int, ...]:
    """Positions past `start`, where the prompt is resumed. `shared`: how much of it the index knows."""
    wanted = [prompt]
    if recurrent:
        wanted += [prompt - prompt % chunk, shared - shared % chunk]
        wanted += _regular(prompt, chunk=chunk, most=slots // SHARE)
    useful = (position for position in dict.fromkeys(wanted) if start < position <= prompt)
    return tuple(useful)[:slots]


def _regular(prompt: int, *, chunk: int, most: int) -> range:
    """At most `most` positions at equal distances, latest first. Distances double, so that prompts of different lengths
    save at the same places."""
    distance = INTERVAL * chunk
    while most and prompt // distance > most:
        distance *= 2
    return range(prompt - prompt % distance, 0, -distance) if most else range(0)


# -------------------- The allocator lends lanes, pages and checkpoints; a lease is what one sequence holds.


class CacheSizes(Protocol):
    """What of a backend's capacity the books are kept by."""

    @property
    def lanes(self) -> int: ...

    @property
    def groups(self) -> Sequence[GroupSizes]: ...

    @property
    def page_size(self) -> int: ...

    @property
    def checkpoints(self) -> int: ...

    @property
    def chunk(self) -> int: ...

    @property
    def recurrent(self) -> bool: ...


class Allocator:
    """Owner: the scheduler, on the engine thread."""

    def __init__(self, sizes: CacheSizes, *, reuse: bool) -> None:
        self.page_size = sizes.page_size
        self.reuse = reuse  # prefixes may be shared
        self.needs = Needs(
            page_size=sizes.page_size,
            windows=tuple(group.window for group in sizes.groups),
            chunk=sizes.chunk,
            recurrent=sizes.recurrent,
        )
        self.index = PrefixIndex(page_size=sizes.page_size, groups=len(sizes.groups))
        self.pools = tuple(
            PagePool(group.pages, window=group.window, forget=partial(self._forget, number))
            for number, group in enumerate(sizes.groups)
        )
        self.lanes = Slots(sizes.lanes)
        self.slots = CheckpointSlots(sizes.checkpoints if reuse else 0, give_up=self.dissolve)
        self.leases: dict[int, Lease] = {}  # by lane
        self.saving: set[tuple[int, ...]] = set()  # prefixes whose checkpoints are about to be filled
        self.queried = 0  # tokens looked up in the index
        self.hit = 0  # tokens found there
        self.let_go = 0  # pages that a window had passed
        self.saved = 0  # checkpoints
        self._saved_ends: list[tuple[Checkpoint, tuple[int, ...]]] = []  # see take_saved

    @property
    def pages_held(self) -> int:
        return sum(pool.held for pool in self.pools)

    @property
    def pages_total(self) -> int:
        return sum(pool.count for pool in self.pools)

    def lend(self, history: History, *, reuse: bool, more: int = 1, step: int | None = None) -> Lease | None:
        """A lease that goes on from the longest prefix there is, or None where lanes or pages do not suffice.

        At least one known token is left to compute, since its logits are needed, unless a checkpoint has them. A lease
        is only lent if the known tokens and `more` fit now, in rows of up to `step`, beside what those before it were
        promised, so that admission does not drive out what runs. A prompt that is only scored has no next token, and
        must not wait for a page that may not be there.
        """
        if not self.lanes.available:
            return None
        known, prompt = len(history), len(history.prompt)
        tokens: tuple[int, ...] = ()
        if reuse and self.reuse:
            tokens = history.prompt if self.needs.recurrent else tuple(history.slice(0, known))
        path = self.index.walk(tokens)
        length, step = known + more, step or known + more
        for copies in (True, False):  # a copied page is one more than a cold run takes, so it may be one too many
            resume = longest(path, tokens, prompt=prompt, known=known, needs=self.needs, copies=copies)
            if self._fits(resume, length, step):
                self.queried += len(tokens)
                self.hit += resume.position
                return self._lease(resume, history, length, shared=(len(path) - 1) * self.page_size)
            if not resume.copies:
                break
        return None

    def seen_from(self, length: int, window: int | None) -> int:
        """Positions before it may be let go once `length` positions are settled."""
        return first_needed(length, window)

    def _shared(self, resume: Resume, group: int) -> Pages:
        """Pages of the resumed prefix that are still seen, at their places."""
        first = first_needed(resume.position, self.pools[group].window) // self.page_size
        return pages_of([NO_PAGE] * first + [node.pages[group] for node in resume.path[1 + first :]])

    def _fits(self, resume: Resume, length: int, step: int) -> bool:
        for group, pool in enumerate(self.pools):
            first = first_needed(resume.position, pool.window) // self.page_size
            most = most_pages(length - first * self.page_size, window=pool.window, step=step, page_size=self.page_size)
            shared = [page for page in self._shared(resume, group) if page != NO_PAGE]
            idle = sum(map(pool.idle, shared)) + (resume.copies and pool.idle(_tail(resume, group)))
            if most - len(shared) + idle + self._promised(group) > pool.available:
                return False
        return True

    def _promised(self, group: int) -> int:
        """Pages of a sliding group that those who run will hold again: a window lets go of some and takes others, so what
        they hold now says little. The positions of one turn are asked of the newcomer alone: all rows share them."""
        window = self.pools[group].window
        if window is None:
            return 0
        least = partial(most_pages, window=window, step=1, page_size=self.page_size)
        return sum(max(least(lease.length) - lease.held(group), 0) for lease in self.leases.values())

    def _lease(self, resume: Resume, history: History, length: int, *, shared: int) -> Lease:
        pages = tuple(self._shared(resume, group) for group in range(len(self.pools)))
        for pool, held in zip(self.pools, pages, strict=True):
            for page in held:
                if page != NO_PAGE:
                    pool.share(page)
        lane = self.lanes.take()
        assert lane is not None
        prompt = len(history.prompt)
        lease = Lease(
            allocator=self,
            lane=lane,
            pages=pages,
            firsts=[held.count(NO_PAGE) for held in pages],
            node=resume.path[-1],
            indexable=(prompt if self.needs.recurrent else _EVERYTHING) if self.reuse else 0,
            cached=resume.position,
            length=length,
            prompt=history.prompt,
            wishes=save_points(
                prompt=prompt,
                start=resume.position,
                shared=min(shared, prompt),
                chunk=self.needs.chunk,
                recurrent=self.needs.recurrent,
                slots=self.slots.count,
            ),
        )
        self.index.pin(lease.node)
        if resume.checkpoint is not None:
            lease.opening = self._open(resume.checkpoint, pages)
        self.leases[lane] = lease
        return lease

    def _open(self, checkpoint: Checkpoint, pages: tuple[Pages, ...]) -> Opening:
        """Pin a checkpoint and the pages to be copied until a row has restored them."""
        self.slots.pin(checkpoint.slot)
        for pool, source in zip(self.pools, checkpoint.pages):
            pool.share(source)
        copies = []
        for group, source in enumerate(checkpoint.pages):
            pages[group].append(self.pools[group].take())
            copies.append(PageCopy(group, source, pages[group][-1]))
        return Opening(checkpoint.slot, tuple(copies))

    # ------------------------------------------------------------------ taking back

    def drop(self, group: int, pages: Sequence[int]) -> None:
        """Give back pages of one group, from the end: the end of a prefix is forgotten before its beginning."""
        pool, knows = self.pools[group], self.index.knows
        for page in reversed(pages):
            if page != NO_PAGE:
                pool.drop(page, indexed=knows(group, page))

    def close(self, opening: Opening) -> None:
        """The row that restored has run, or never will."""
        self.slots.unpin(opening.slot)
        for copy in opening.copies:
            self.drop(copy.group, (copy.source,))

    def keep(self, lease: Lease, pending: Pending) -> None:
        """A row has filled a checkpoint's slot: index it, unless the same stands there already."""
        self.saving.discard(pending.tokens)
        depth, node = pending.position // self.page_size, lease.node
        while node.depth > depth:
            assert node.above is not None
            node = node.above
        tail = pending.tokens[depth * self.page_size :]
        before = node.checkpoints.get(tail)
        if before is not None and (before.logits or not pending.logits or self.slots.pinned(before.slot)):
            self.slots.give_back(pending.slot)
            return
        pages = tuple(held[depth] for held in lease.pages) if tail else ()
        checkpoint = Checkpoint(node, tail, pending.position, pending.slot, pending.logits, pages)
        if before is not None:
            self.dissolve(before)
        self.index.keep(checkpoint)
        self.slots.keep(checkpoint)
        self.saved += 1
        last = len(lease.prompt) - len(lease.prompt) % self.needs.chunk
        if pending.logits or pending.position == last:
            self._saved_ends.append((checkpoint, pending.tokens))

    def take_saved(self) -> list[tuple[Checkpoint, tuple[int, ...]]]:
        """Checkpoints at the end or last chunk boundary of a prompt, saved since the last call, with their tokens."""
        saved, self._saved_ends = self._saved_ends, []
        return saved

    def give_back(self, lease: Lease) -> None:
        if lease.opening is not None:
            self.close(lease.opening)
        for pending in lease.pending:
            self.saving.discard(pending.tokens)
            self.slots.give_back(pending.slot)
        for group, pages in enumerate(lease.pages):
            self.drop(group, pages)
        self.index.unpin(lease.node)
        self.lanes.give_back(lease.lane)
        del self.leases[lease.lane]

    def _forget(self, group: int, page: int) -> None:
        """An idle page gets new content."""
        for checkpoint in self.index.forget(group, page):
            self.dissolve(checkpoint)

    def dissolve(self, checkpoint: Checkpoint) -> None:
        """Forget a checkpoint; its slot is free."""
        for group, page in self.index.remove(checkpoint):
            self.pools[group].unindexed(page)
        self.slots.give_back(checkpoint.slot)

    def audit(self) -> None:
        """Raise if a page or lane is lost or held by nobody. Counts alone, cheap enough for every idle moment."""
        if self.lanes.available + len(self.leases) != self.lanes.count:
            raise AssertionError("a lane is lost")
        for group, pool in enumerate(self.pools):
            if len(self._held(group)) != pool.held:
                raise AssertionError(
                    f"group {group}: {pool.held} pages are held on the books, {len(self._held(group))} by leases"
                )

    def _held(self, group: int) -> Counter[int]:
        """Every page that leases hold, and by how many."""
        held: Counter[int] = Counter()
        for lease in self.leases.values():
            held.update(page for page in lease.pages[group] if page != NO_PAGE)
            if lease.opening is not None:
                held.update(copy.source for copy in lease.opening.copies if copy.group == group)
        return held

    def audit_all(self) -> None:
        """Raise if any page, slot, lane or node is not exactly where the books say."""
        self.audit()
        for group, pool in enumerate(self.pools):
            pool.audit(self._held(group), self.index.known(group))
        self.index.audit()
        leases = self.leases.values()
        openings = [lease.opening for lease in leases if lease.opening is not None]
        pending = [p for lease in leases for p in lease.pending]
        if {p.tokens for p in pending} != self.saving:
            raise AssertionError("a checkpoint is said to be on its way and is not, or the other way round")
        self.slots.audit(
            pins=Counter(opening.slot for opening in openings), taken=len(pending), checkpoints=self.index.checkpoints()
        )


_EVERYTHING = 2**62


def _tail(resume: Resume, group: int) -> int:
    assert resume.checkpoint is not None
    return resume.checkpoint.pages[group]


@dataclass(frozen=True, slots=True)
class Opening:
    """What a lease's first row does before it runs. The sources of the copies are held until it has."""

    slot: int
    copies: tuple[PageCopy, ...]


@dataclass(frozen=True, slots=True)
class Pending:
    """A checkpoint that the planned row fills."""

    position: int
    slot: int
    tokens: tuple[int, ...]  # the prefix it is of
    logits: bool


@dataclass(slots=True, eq=False)
class Lease:
    """Lane and pages of one sequence. Owner: the sequence that was lent it."""

    allocator: Allocator
    lane: int
    pages: tuple[Pages, ...]  # per group; NO_PAGE where the window has passed
    firsts: list[int]  # per group: places of pages let go already
    node: Node  # of the last settled full page
    indexable: int  # positions before it may be shared
    cached: int  # positions that came from the index
    length: int  # positions it was admitted for
    prompt: tuple[int, ...]
    wishes: tuple[int, ...] = ()  # positions still ahead that are worth a checkpoint, the most useful first
    opening: Opening | None = None  # until the first row has run
    pending: list[Pending] = field(default_factory=list)  # between a row's making and its settling

    def cover(self, length: int) -> bool:
        """Hold pages for positions up to `length` in every group; False, with nothing taken, where a pool cannot."""
        allocator = self.allocator
        count = pages_for(length, allocator.page_size)
        for pool, pages in zip(allocator.pools, self.pages):
            if count > len(pages) and count - len(pages) > pool.available:
                return False
        for pool, pages in zip(allocator.pools, self.pages):
            while len(pages) < count:
                pages.append(pool.take())
        return True

    def held(self, group: int) -> int:
        return len(self.pages[group]) - self.firsts[group]

    def saves(self, *, start: int, stop: int, samples: bool) -> tuple[CheckpointSave, ...]:
        """Slots for the checkpoints worth making in a row of these positions, as far as there are any."""
        if not self.wishes:
            return ()
        for position in self.wishes:
            if start < position <= stop:
                self._save(position, logits=position == len(self.prompt) == stop and samples)
        self.wishes = tuple(position for position in self.wishes if position > stop)
        return tuple(CheckpointSave(p.position, p.slot) for p in sorted(self.pending, key=lambda p: p.position))

    def _save(self, position: int, *, logits: bool) -> None:
        allocator = self.allocator
        if not logits and not (allocator.needs.recurrent and allocator.needs.boundary(position)):
            return
        tokens = self.prompt[:position]
        there = allocator.index.find(tokens)
        if tokens in allocator.saving or (there is not None and (there.logits or not logits)):
            return
        slot = allocator.slots.take()
        if slot is not None:
            allocator.saving.add(tokens)
            self.pending.append(Pending(position, slot, tokens, logits))

    def settle(self, length: int, history: History, *, ahead: int = 0) -> None:
        """Positions up to `length` are final: give back the pages past them, let others share the full ones and the
        checkpoints, and let go of what no window sees any more. A row under way is writing the `ahead` positions behind them."""
        allocator = self.allocator
        if self.opening is not None:
            allocator.close(self.opening)
            self.opening = None
        keep = pages_for(length + ahead, allocator.page_size)
        for group, pages in enumerate(self.pages):
            if len(pages) > keep:
                allocator.drop(group, pages[keep:])
                del pages[keep:]
        full = min(length, self.indexable) // allocator.page_size
        if full > self.node.depth:
            self._index(full, history)
        if self.pending:
            for pending in self.pending:
                allocator.keep(self, pending)
            self.pending.clear()
        for group, pool in enumerate(allocator.pools):
            if pool.window is not None:
                self._let_go(group, allocator.seen_from(length, pool.window) // allocator.page_size)

    def _index(self, full: int, history: History) -> None:
        index, size, node = self.allocator.index, self.allocator.page_size, self.node
        for number in range(node.depth, full):
            node = index.below(node, tuple(history.slice(number * size, (number + 1) * size)))
            for group, pages in enumerate(self.pages):
                if pages[number] != NO_PAGE:
                    index.adopt(node, group, pages[number])
        index.pin(node)
        index.unpin(self.node)
        self.node = node

    def _let_go(self, group: int, first: int) -> None:
        pages, before = self.pages[group], self.firsts[group]
        if first <= before:
            return
        self.allocator.drop(group, pages[before:first][::-1])  # the longest unseen is forgotten first
        pages[before:first] = pages_of([NO_PAGE] * (first - before))
        self.firsts[group] = first
        self.allocator.let_go += first - before

    def release(self) -> None:
        self.allocator.give_back(self)
