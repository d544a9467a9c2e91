"""The allocator gives out lanes, KV pages and checkpoint slots. A Lease is the part of them that one sequence holds.

A lane is a slot of per-sequence state on the device, a page is a block of KV positions, and a checkpoint slot holds the recurrent
state and last logits after a prefix of a prompt. Layers with the same attention window form a group, which has pages of its own.
A row is what one sequence computes in one step; a planned row is one that the scheduler has put into the next step. Only numbers
are handled here; the backend owns the memory. `Lease.release` returns everything. `audit` compares the counts
whenever the engine is idle, and tests call `audit_all` after every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from onedraw.memory.pages import NO_PAGE, GroupSizes, PagePool, Pages, first_visible, most_pages, page_array, pages_for
from onedraw.memory.prefix_cache import (
    CheckpointSlots,
    Node,
    PrefixCache,
    PrefixCheckpoint,
    ResumePoint,
    ReuseRules,
    Slots,
    checkpoint_positions,
    longest_resume,
)
from onedraw.types import CheckpointSave, History, PageCopy

_UNLIMITED = 2**62  # stands for no limit on positions; larger than any position


class CacheSizes(Protocol):
    """The sizes that the allocator needs to know of a backend's Capacity."""

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


@dataclass(frozen=True, slots=True)
class Needs:
    """What a sequence needs to be admitted: pages for `length` positions, computed in rows of up to `step` tokens."""

    history: History
    reuse: bool  # whether cached prefixes are used
    length: int
    step: int


class Allocator:
    """Gives out lanes, pages and checkpoint slots by their numbers; the memory itself belongs to the backend. The scheduler owns
    it, on the engine's thread."""

    def __init__(self, sizes: CacheSizes, *, reuse: bool) -> None:
        self.page_size = sizes.page_size
        self.reuse = reuse  # whether prompts share the pages of common prefixes
        self.rules = ReuseRules(
            page_size=sizes.page_size,
            windows=tuple(group.window for group in sizes.groups),
            chunk=sizes.chunk,
            recurrent=sizes.recurrent,
        )
        self.prefix_cache = PrefixCache(page_size=sizes.page_size, groups=len(sizes.groups))
        self.pools = tuple(
            PagePool(group.pages, window=group.window, on_evict=partial(self._forget_page, number))
            for number, group in enumerate(sizes.groups)
        )
        self.lanes = Slots(sizes.lanes)
        self.checkpoint_slots = CheckpointSlots(sizes.checkpoints if reuse else 0, evict=self.remove_checkpoint)
        self.leases: dict[int, Lease] = {}  # lane → its lease
        self.saving: set[tuple[int, ...]] = set()  # prefixes of which a planned row saves a checkpoint, so that no other row does
        self.tokens_queried = 0  # tokens looked up in the prefix cache
        self.tokens_hit = 0  # tokens found in the prefix cache
        self.window_pages_freed = 0  # pages freed because a sliding window has moved beyond them
        self.checkpoints_saved = 0
        # checkpoints that `take_saved` returns at its next call, each with the tokens of its prefix
        self._saved_ends: list[tuple[PrefixCheckpoint, tuple[int, ...]]] = []

    @property
    def pages_held(self) -> int:
        return sum(pool.held for pool in self.pools)

    @property
    def pages_total(self) -> int:
        return sum(pool.count for pool in self.pools)

    # ------------------------------------------------------------------ allocation

    def allocate(self, history: History, *, reuse: bool, more: int = 1, step: int | None = None) -> Lease | None:
        """Return a lease that resumes from the longest cached prefix, or None if lanes or pages do not suffice.

        At least one known token is left to compute, because its logits are needed, unless a checkpoint has them. The known
        tokens and `more` new ones must fit now, in rows of at most `step` tokens, in addition to the pages that running sequences
        still need: admitting a sequence must not preempt another. `more` is 0 for a prompt that is only scored, so that it does
        not wait for a page it never uses.
        """
        if not self.lanes.available:
            return None
        needs = Needs(history, reuse, length=len(history) + more, step=step or len(history) + more)
        tokens = self._reusable_tokens(needs)
        path = self.prefix_cache.match(tokens)
        for resume in self._resume_points(needs, tokens, path):
            if self._fits(resume, needs):
                self.tokens_queried += len(tokens)
                self.tokens_hit += resume.position
                return self._make_lease(resume, needs.history, needs.length, shared=(len(path) - 1) * self.page_size)
        return None

    def releases_needed(
        self, leases: Sequence[Lease], history: History, *, reuse: bool, more: int = 1, step: int | None = None
    ) -> int | None:
        """Return the least n such that `allocate` succeeds once the first n of these leases are released. None if releasing all
        of them is not enough."""
        needs = Needs(history, reuse, length=len(history) + more, step=step or len(history) + more)
        tokens = self._reusable_tokens(needs)
        points = list(self._resume_points(needs, tokens, self.prefix_cache.match(tokens)))
        for count in range(0 if self.lanes.available else 1, len(leases) + 1):
            if any(self._fits(resume, needs, without=leases[:count]) for resume in points):
                return count
        return None

    def _reusable_tokens(self, needs: Needs) -> tuple[int, ...]:
        """Return the tokens to look up in the prefix cache: none for a sequence that does not use it. With recurrent layers they
        are those of the prompt, since checkpoints are saved inside prompts and at their ends only."""
        if not (needs.reuse and self.reuse):
            return ()
        return needs.history.prompt if self.rules.recurrent else tuple(needs.history.slice(0, len(needs.history)))

    def _resume_points(self, needs: Needs, tokens: tuple[int, ...], path: list[Node]) -> Iterator[ResumePoint]:
        """Yield the points to resume from, to be tried in this order. The first is the end of the longest cached prefix. If its
        last page is partly filled, that page must be copied, which takes a page more than a run without cache and may be too
        much. The second is then the longest prefix that ends with a full page."""
        known, prompt = len(needs.history), len(needs.history.prompt)
        for copies in (True, False):
            resume = longest_resume(path, tokens, prompt=prompt, known=known, rules=self.rules, copies=copies)
            yield resume
            if not resume.copies_page:
                return

    def first_visible(self, length: int, window: int | None) -> int:
        """Return the first position to which later positions still attend once `length` positions are committed."""
        return first_visible(length, window)

    def _shared_pages(self, resume: ResumePoint, group: int) -> Pages:
        """Return the pages of the resumed prefix by page index, with NO_PAGE for pages that a sliding window has moved beyond."""
        first = first_visible(resume.position, self.pools[group].window) // self.page_size
        return page_array([NO_PAGE] * first + [node.pages[group] for node in resume.path[1 + first :]])

    def _fits(self, resume: ResumePoint, needs: Needs, *, without: Sequence[Lease] = ()) -> bool:
        """Whether there are enough pages, if the leases `without` were released."""
        for group, pool in enumerate(self.pools):
            first = first_visible(resume.position, pool.window) // self.page_size
            most = most_pages(
                needs.length - first * self.page_size, window=pool.window, step=needs.step, page_size=self.page_size
            )
            shared = [page for page in self._shared_pages(resume, group) if page != NO_PAGE]
            looked_up = [*shared, _partial_page(resume, group)] if resume.copies_page else shared
            freed = self._pages_freed(group, without)
            idle = sum(pool.idle(page) or page in freed for page in looked_up)
            if most - len(shared) + idle + self._reserved(group, without) > pool.available + len(freed):
                return False
        return True

    def _pages_freed(self, group: int, leases: Sequence[Lease]) -> frozenset[int]:
        """Return the pages that no other lease than these holds."""
        held = self._held_pages(group, leases)
        return frozenset(page for page, holders in held.items() if self.pools[group].holders(page) == holders)

    def _reserved(self, group: int, without: Sequence[Lease]) -> int:
        """Return how many more pages of a group with a sliding window the running sequences will need. As a window moves on, its
        sequence frees pages and takes others, so the number held now is no bound. The positions of one step are counted for the
        new sequence alone, since all rows of a step share its token budget."""
        window = self.pools[group].window
        if window is None:
            return 0
        least = partial(most_pages, window=window, step=1, page_size=self.page_size)
        leases = (lease for lease in self.leases.values() if lease not in without)
        return sum(max(least(lease.length) - lease.held(group), 0) for lease in leases)

    def _make_lease(self, resume: ResumePoint, history: History, length: int, *, shared: int) -> Lease:
        pages = tuple(self._shared_pages(resume, group) for group in range(len(self.pools)))
        for pool, held in zip(self.pools, pages, strict=True):
            for page in held:
                if page != NO_PAGE:
                    pool.retain(page)
        lane = self.lanes.take()
        assert lane is not None
        prompt = len(history.prompt)
        lease = Lease(
            allocator=self,
            lane=lane,
            pages=pages,
            freed=[held.count(NO_PAGE) for held in pages],
            node=resume.path[-1],
            shareable=(prompt if self.rules.recurrent else _UNLIMITED) if self.reuse else 0,
            cached=resume.position,
            length=length,
            prompt=history.prompt,
            save_positions=checkpoint_positions(
                prompt=prompt,
                start=resume.position,
                shared=min(shared, prompt),
                chunk=self.rules.chunk,
                recurrent=self.rules.recurrent,
                slots=self.checkpoint_slots.count,
            ),
        )
        self.prefix_cache.pin(lease.node)
        if resume.checkpoint is not None:
            lease.restore = self._plan_restore(resume.checkpoint, pages)
        self.leases[lane] = lease
        return lease

    def _plan_restore(self, checkpoint: PrefixCheckpoint, pages: tuple[Pages, ...]) -> Restore:
        """Pin the checkpoint and retain its partly filled pages until a row has copied them."""
        self.checkpoint_slots.pin(checkpoint.slot)
        for pool, source in zip(self.pools, checkpoint.pages):
            pool.retain(source)
        copies = []
        for group, source in enumerate(checkpoint.pages):
            pages[group].append(self.pools[group].take())
            copies.append(PageCopy(group, source, pages[group][-1]))
        return Restore(checkpoint.slot, tuple(copies))

    # ------------------------------------------------------------------ checkpoints

    def add_checkpoint(self, lease: Lease, pending: PendingSave) -> None:
        """Add a checkpoint, whose slot a row has filled, to the prefix cache. If the cache has one
        of the same prefix that has logits too if this one does, or that a row is going to restore, free the slot instead."""
        self.saving.discard(pending.tokens)
        depth, node = pending.position // self.page_size, lease.node
        while node.depth > depth:
            assert node.parent is not None
            node = node.parent
        tail = pending.tokens[depth * self.page_size :]
        before = node.checkpoints.get(tail)
        if before is not None and (before.logits or not pending.logits or self.checkpoint_slots.pinned(before.slot)):
            self.checkpoint_slots.release(pending.slot)
            return
        pages = tuple(held[depth] for held in lease.pages) if tail else ()
        checkpoint = PrefixCheckpoint(node, tail, pending.position, pending.slot, pending.logits, pages)
        if before is not None:
            self.remove_checkpoint(before)
        self.prefix_cache.add_checkpoint(checkpoint)
        self.checkpoint_slots.add(checkpoint)
        self.checkpoints_saved += 1
        last = len(lease.prompt) - len(lease.prompt) % self.rules.chunk
        if pending.logits or pending.position == last:
            self._saved_ends.append((checkpoint, pending.tokens))

    def remove_checkpoint(self, checkpoint: PrefixCheckpoint) -> None:
        """Remove a checkpoint from the prefix cache and free its slot."""
        for group, page in self.prefix_cache.remove_checkpoint(checkpoint):
            self.pools[group].uncache(page)
        self.checkpoint_slots.release(checkpoint.slot)

    def take_saved(self) -> list[tuple[PrefixCheckpoint, tuple[int, ...]]]:
        """Return the checkpoints at the end or last chunk boundary of a prompt that were saved since the last call, with their
        tokens."""
        saved, self._saved_ends = self._saved_ends, []
        return saved

    # ------------------------------------------------------------------ release

    def release_pages(self, group: int, pages: Sequence[int]) -> None:
        """Release pages of one group, the last first, so that the end of a prefix is evicted before its beginning."""
        pool, cached = self.pools[group], self.prefix_cache.has_page
        for page in reversed(pages):
            if page != NO_PAGE:
                pool.release(page, cached=cached(group, page))

    def end_restore(self, restore: Restore) -> None:
        """Unpin a checkpoint and release the pages to copy, because the row that restores it has run or will not run."""
        self.checkpoint_slots.unpin(restore.slot)
        for copy in restore.copies:
            self.release_pages(copy.group, (copy.source,))

    def release(self, lease: Lease) -> None:
        if lease.restore is not None:
            self.end_restore(lease.restore)
        for pending in lease.pending_saves:
            self.saving.discard(pending.tokens)
            self.checkpoint_slots.release(pending.slot)
        for group, pages in enumerate(lease.pages):
            self.release_pages(group, pages)
        self.prefix_cache.unpin(lease.node)
        self.lanes.release(lease.lane)
        del self.leases[lease.lane]

    def forget_cached(self) -> None:
        """Empty the prefix cache, because the device lost the content of its pages and checkpoints. There must be no lease."""
        assert not self.leases, "a lease may refer to cached pages"
        for checkpoint in self.prefix_cache.checkpoints():
            self.remove_checkpoint(checkpoint)
        for group, pool in enumerate(self.pools):
            for page in self.prefix_cache.pages(group):
                self._forget_page(group, page)
                pool.uncache(page)
        self._saved_ends.clear()

    def _forget_page(self, group: int, page: int) -> None:
        """Remove a page from the prefix cache, because it gets new content, and the checkpoints that need it."""
        for checkpoint in self.prefix_cache.forget_page(group, page):
            self.remove_checkpoint(checkpoint)

    # ------------------------------------------------------------------ audit

    def audit(self) -> None:
        """Raise if a page or lane was lost. Only counts are compared, so this is cheap enough for every idle moment."""
        if self.lanes.available + len(self.leases) != self.lanes.count:
            raise AssertionError("a lane is lost")
        for group, pool in enumerate(self.pools):
            held = len(self._held_pages(group, self.leases.values()))
            if held != pool.held:
                raise AssertionError(f"group {group}: the pool counts {pool.held} held pages, leases hold {held}")

    def _held_pages(self, group: int, leases: Iterable[Lease]) -> Counter[int]:
        """Return every page that these leases hold, with the number of its holders."""
        held: Counter[int] = Counter()
        for lease in leases:
            held.update(page for page in lease.pages[group] if page != NO_PAGE)
            if lease.restore is not None:
                held.update(copy.source for copy in lease.restore.copies if copy.group == group)
        return held

    def audit_all(self) -> None:
        """Raise if the state of any page, slot, lane or node of the prefix cache contradicts the leases."""
        self.audit()
        for group, pool in enumerate(self.pools):
            pool.audit(self._held_pages(group, self.leases.values()), self.prefix_cache.pages(group))
        self.prefix_cache.audit()
        leases = self.leases.values()
        restores = [lease.restore for lease in leases if lease.restore is not None]
        pending = [p for lease in leases for p in lease.pending_saves]
        if {p.tokens for p in pending} != self.saving:
            raise AssertionError("the set of prefixes being saved differs from the pending saves of the leases")
        self.checkpoint_slots.audit(
            pins=Counter(restore.slot for restore in restores),
            taken=len(pending),
            checkpoints=self.prefix_cache.checkpoints(),
        )


def _partial_page(resume: ResumePoint, group: int) -> int:
    assert resume.checkpoint is not None
    return resume.checkpoint.pages[group]


@dataclass(frozen=True, slots=True)
class Restore:
    """A checkpoint that the first row of a lease restores before it runs, by its slot, and the pages that this row copies. Slot
    and source pages are kept until then."""

    slot: int
    copies: tuple[PageCopy, ...]


@dataclass(frozen=True, slots=True)
class PendingSave:
    """A checkpoint slot that a planned row will fill."""

    position: int
    slot: int
    tokens: tuple[int, ...]  # the prefix whose state is saved
    logits: bool  # whether the logits of its last position are saved too


@dataclass(slots=True, eq=False)
class Lease:
    """The lane, pages and pending checkpoints of one sequence, which owns the lease."""

    allocator: Allocator
    lane: int
    pages: tuple[Pages, ...]  # pages of each layer group, by page index; NO_PAGE if a sliding window has moved beyond it
    freed: list[int]  # for each group, how many entries at the beginning of `pages` are NO_PAGE
    node: Node  # the prefix cache's node of the last full page whose positions are committed
    shareable: int  # positions below this one may enter the prefix cache
    cached: int  # number of positions that came from the prefix cache
    length: int  # number of positions for which the sequence was admitted
    prompt: tuple[int, ...]
    save_positions: tuple[int, ...] = ()  # uncomputed positions that are worth a checkpoint, the most useful first
    restore: Restore | None = None  # set until the first row has run
    pending_saves: list[PendingSave] = field(default_factory=list)  # set from the planning of a row until its commit

    def reserve(self, length: int) -> bool:
        """Take pages for positions up to `length` in every group. If a pool has too few, take none and return False."""
        count = pages_for(length, self.allocator.page_size)
        for pool, pages in zip(self.allocator.pools, self.pages):
            if count > len(pages) and count - len(pages) > pool.available:
                return False
        for pool, pages in zip(self.allocator.pools, self.pages):
            while len(pages) < count:
                pages.append(pool.take())
        return True

    def held(self, group: int) -> int:
        return len(self.pages[group]) - self.freed[group]

    def plan_saves(self, *, start: int, stop: int, samples: bool) -> tuple[CheckpointSave, ...]:
        """Take slots for the checkpoints worth saving in a row of these positions, as long as there are slots."""
        if not self.save_positions:
            return ()
        for position in self.save_positions:
            if start < position <= stop:
                self._plan_save(position, logits=position == len(self.prompt) == stop and samples)
        self.save_positions = tuple(position for position in self.save_positions if position > stop)
        return tuple(CheckpointSave(p.position, p.slot) for p in sorted(self.pending_saves, key=lambda p: p.position))

    def _plan_save(self, position: int, *, logits: bool) -> None:
        allocator = self.allocator
        if not logits and not (allocator.rules.recurrent and allocator.rules.boundary(position)):
            return
        tokens = self.prompt[:position]
        existing = allocator.prefix_cache.find_checkpoint(tokens)
        if tokens in allocator.saving or (existing is not None and (existing.logits or not logits)):
            return
        slot = allocator.checkpoint_slots.take()
        if slot is not None:
            allocator.saving.add(tokens)
            self.pending_saves.append(PendingSave(position, slot, tokens, logits))

    def commit(self, length: int, history: History, *, ahead: int = 0) -> None:
        """Mark positions up to `length` as committed, so that they never change. Release the pages beyond them, except for
        the next `ahead` positions, which a row in flight writes; add full pages and checkpoints to the prefix cache; and free
        pages outside every window."""
        allocator = self.allocator
        if self.restore is not None:
            allocator.end_restore(self.restore)
            self.restore = None
        keep = pages_for(length + ahead, allocator.page_size)
        for group, pages in enumerate(self.pages):
            if len(pages) > keep:
                allocator.release_pages(group, pages[keep:])
                del pages[keep:]
        full = min(length, self.shareable) // allocator.page_size
        if full > self.node.depth:
            self._cache_pages(full, history)
        if self.pending_saves:
            for pending in self.pending_saves:
                allocator.add_checkpoint(self, pending)
            self.pending_saves.clear()
        for group, pool in enumerate(allocator.pools):
            if pool.window is not None:
                self._free_passed(group, allocator.first_visible(length, pool.window) // allocator.page_size)

    def _cache_pages(self, full: int, history: History) -> None:
        """Add full pages, up to page index `full`, to the prefix cache."""
        cache, size, node = self.allocator.prefix_cache, self.allocator.page_size, self.node
        for number in range(node.depth, full):
            node = cache.child(node, tuple(history.slice(number * size, (number + 1) * size)))
            for group, pages in enumerate(self.pages):
                if pages[number] != NO_PAGE:
                    cache.add_page(node, group, pages[number])
        cache.pin(node)
        cache.unpin(self.node)
        self.node = node

    def _free_passed(self, group: int, first: int) -> None:
        """Release the pages before page index `first`, beyond which the sliding window has moved."""
        pages, before = self.pages[group], self.freed[group]
        if first <= before:
            return
        # `release_pages` begins with the last page. The list is reversed, so that the oldest page is evicted first.
        self.allocator.release_pages(group, pages[before:first][::-1])
        pages[before:first] = page_array([NO_PAGE] * (first - before))
        self.freed[group] = first
        self.allocator.window_pages_freed += first - before

    def release(self) -> None:
        self.allocator.release(self)
