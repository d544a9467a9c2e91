"""The prefix cache: which pages and checkpoints belong to which token prefix, and from where a new prompt can resume.

It is a radix tree in which each node stands for one full page of tokens. A prompt can resume at position n if every layer
group still has the pages to which position n attends. A model with recurrent state also needs a checkpoint of that state at n,
which is saved at chunk boundaries inside a prompt and at its end. If nothing is left to compute, the checkpoint must have the
logits of the last position as well.

A checkpoint is in a numbered slot on the device; if all slots are used, the least recently used checkpoint is evicted. The chunk
is the number of prompt positions that recurrent layers compute at once. A lease is the memory that a running sequence holds. A
planned row is the work of one sequence in the step that is about to run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from onedraw.memory.pages import NO_PAGE, first_visible


@dataclass(slots=True, eq=False)
class Node:
    """One full page of tokens that follows the pages of its ancestors. The prefix cache owns it."""

    parent: Node | None
    tokens: tuple[int, ...]
    depth: int  # number of full pages up to and including this one
    pages: list[int]  # the page of each layer group; NO_PAGE if it is gone
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    # Checkpoints of prefixes that end inside the next page, by the tokens that follow this page (the tail).
    checkpoints: dict[tuple[int, ...], PrefixCheckpoint] = field(default_factory=dict)
    pins: int = 0  # number of leases whose last committed full page this is, and of snapshot imports; a pinned node stays

    @property
    def empty(self) -> bool:
        return not (self.children or self.pins or self.checkpoints or self.pages.count(NO_PAGE) < len(self.pages))


@dataclass(frozen=True, slots=True, eq=False)
class PrefixCheckpoint:
    """The recurrent state after `position` tokens, stored in `slot`. With `logits`, those of the last token are stored too.

    If the position is inside a page, `tail` has the tokens after the node's page and `pages` the partly filled page of each
    group. The sequence that saved the checkpoint may still write behind the tail in these pages.
    """

    node: Node
    tail: tuple[int, ...]
    position: int
    slot: int
    logits: bool
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReuseRules:
    """The sizes of a backend that decide where a prefix can be resumed."""

    page_size: int
    windows: tuple[int | None, ...]  # attention window of each layer group; None: full attention
    chunk: int
    recurrent: bool

    def boundary(self, position: int) -> bool:
        """Whether every longer prompt, computed in chunks, passes through the state at `position`."""
        return position % self.chunk == 0


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A point to resume from: the pages of `path` up to `position`, and a checkpoint if the model needs one."""

    position: int
    path: list[Node]  # the root and the nodes of the full pages before `position`
    checkpoint: PrefixCheckpoint | None = None

    @property
    def copies_page(self) -> bool:
        """Whether the last page is partly filled. Another sequence may still write to it, so it must be copied."""
        return self.checkpoint is not None and bool(self.checkpoint.tail)


class PrefixCache:
    """The radix tree. The allocator owns it."""

    def __init__(self, *, page_size: int, groups: int) -> None:
        self.root = Node(None, (), 0, [])
        self._page_size = page_size
        # for each group, a map from a page to the nodes and checkpoints that refer to it
        self._users: list[dict[int, list[Node | PrefixCheckpoint]]] = [{} for _ in range(groups)]
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def has_page(self, group: int, page: int) -> bool:
        return page in self._users[group]

    def match(self, tokens: tuple[int, ...]) -> list[Node]:
        """Return the root and the longest chain of nodes whose tokens are a prefix of `tokens`."""
        node, size = self.root, self._page_size
        path = [node]
        for start in range(0, len(tokens) - size + 1, size):
            child = node.children.get(tokens[start : start + size])
            if child is None:
                break
            node = child
            path.append(node)
        return path

    def find_checkpoint(self, tokens: tuple[int, ...]) -> PrefixCheckpoint | None:
        """Return the checkpoint after exactly these tokens, or None."""
        path, depth = self.match(tokens), len(tokens) // self._page_size
        return path[depth].checkpoints.get(tokens[depth * self._page_size :]) if len(path) > depth else None

    def child(self, node: Node, tokens: tuple[int, ...]) -> Node:
        """Return the child of `node` with these tokens. It is created if missing."""
        found = node.children.get(tokens)
        if found is None:
            found = node.children[tokens] = Node(node, tokens, node.depth + 1, [NO_PAGE] * len(self._users))
            self._count += 1
        return found

    def add_page(self, node: Node, group: int, page: int) -> None:
        """Add a page with final content to a node, unless the node already has a page of this group."""
        if node.pages[group] == NO_PAGE:
            node.pages[group] = page
            self._users[group].setdefault(page, []).append(node)

    def add_checkpoint(self, checkpoint: PrefixCheckpoint) -> None:
        checkpoint.node.checkpoints[checkpoint.tail] = checkpoint
        for group, page in enumerate(checkpoint.pages):
            self._users[group].setdefault(page, []).append(checkpoint)

    def remove_checkpoint(self, checkpoint: PrefixCheckpoint) -> list[tuple[int, int]]:
        """Remove a checkpoint. Return (group, page) of the pages to which the cache no longer refers."""
        unused = []
        for group, page in enumerate(checkpoint.pages):
            users = self._users[group].get(page, [])
            if checkpoint in users:
                users.remove(checkpoint)
                if not users:
                    del self._users[group][page]
                    unused.append((group, page))
        del checkpoint.node.checkpoints[checkpoint.tail]
        self._prune(checkpoint.node)
        return unused

    def forget_page(self, group: int, page: int) -> list[PrefixCheckpoint]:
        """Remove a page that gets new content. Return the checkpoints that used it, which the caller must remove."""
        lost = []
        for user in self._users[group].pop(page):
            if isinstance(user, PrefixCheckpoint):
                lost.append(user)
            else:
                user.pages[group] = NO_PAGE
                self._prune(user)
        return lost

    def pin(self, node: Node) -> None:
        node.pins += 1

    def unpin(self, node: Node) -> None:
        node.pins -= 1
        self._prune(node)

    def _prune(self, node: Node) -> None:
        while node.parent is not None and node.empty:
            del node.parent.children[node.tokens]
            self._count -= 1
            node = node.parent

    def nodes(self) -> Iterator[Node]:
        """Iterate over all nodes except the root."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def checkpoints(self) -> list[PrefixCheckpoint]:
        return [c for node in (self.root, *self.nodes()) for c in node.checkpoints.values()]

    def pages(self, group: int) -> frozenset[int]:
        return frozenset(self._users[group])

    def audit(self) -> None:
        """Raise if the cache contradicts itself: a node that nothing needs, or pages and nodes that do not refer to each
        other."""
        nodes = list(self.nodes())
        if len(nodes) != self._count or any(node.empty for node in nodes):
            raise AssertionError("the prefix cache has an unused node, or its node count is wrong")
        for group, by_page in enumerate(self._users):
            used = [n.pages[group] for n in nodes if n.pages[group] != NO_PAGE]
            used += [c.pages[group] for c in self.checkpoints() if c.pages]
            if sorted(used) != sorted(page for page, users in by_page.items() for _ in users):
                raise AssertionError(f"group {group}: pages and nodes do not refer to each other")


def longest_resume(
    path: list[Node], tokens: Sequence[int], *, prompt: int, known: int, rules: ReuseRules, copies: bool = True
) -> ResumePoint:
    """Return the farthest point from which a sequence that begins with these tokens, whose nodes are `path`, can resume.
    `prompt` is the length of its prompt, `known` that of prompt and output together. Without `copies` no page may be copied, so
    the point is at the end of a page."""
    available = _page_availability(path, rules)
    for node in reversed(path):
        for checkpoint in _matching_checkpoints(node, tokens, rules.page_size):
            whole = checkpoint.logits and checkpoint.position == known == prompt
            midway = rules.recurrent and checkpoint.position < known and _on_cold_path(checkpoint.position, prompt, rules)
            if (whole or midway) and (copies or not checkpoint.tail) and available(checkpoint.position):
                return ResumePoint(checkpoint.position, path[: node.depth + 1], checkpoint)
        position = node.depth * rules.page_size
        if not rules.recurrent and position < known and available(position):
            return ResumePoint(position, path[: node.depth + 1])
    return ResumePoint(0, path[:1])


def _on_cold_path(position: int, prompt: int, rules: ReuseRules) -> bool:
    """Whether a run without cache would have the same bits of state at `position`: only at chunk boundaries and the prompt's
    end."""
    return position == prompt or (position < prompt and rules.boundary(position))


def _matching_checkpoints(node: Node, tokens: Sequence[int], page_size: int) -> Iterator[PrefixCheckpoint]:
    """Iterate over the checkpoints of a node whose tail matches these tokens, the longest first."""
    if node.checkpoints:
        start = node.depth * page_size
        for tail in sorted(node.checkpoints, key=len, reverse=True):
            if tuple(tokens[start : start + len(tail)]) == tail:
                yield node.checkpoints[tail]


def _page_availability(path: list[Node], rules: ReuseRules) -> Callable[[int], bool]:
    """Return a function that tells whether every group has all full pages of `path` to which a position attends."""
    runs: list[list[int]] = []  # per group and depth, the number of consecutive pages that end there without a gap
    for group in range(len(rules.windows)):
        run = [0]
        for node in path[1:]:
            run.append(0 if node.pages[group] == NO_PAGE else run[-1] + 1)
        runs.append(run)

    def available(position: int) -> bool:
        depth = position // rules.page_size
        return all(
            run[depth] >= depth - first_visible(position, window) // rules.page_size
            for run, window in zip(runs, rules.windows, strict=True)
        )

    return available


MIN_INTERVAL = 8  # The checkpoints that a long prompt saves at equal intervals are at least this many chunks apart.
MAX_SHARE = 4  # The checkpoints at equal intervals of one prompt take at most 1 / MAX_SHARE of the slots.


class Slots:
    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))

    @property
    def available(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        return self._free.pop() if self._free else None

    def release(self, slot: int) -> None:
        if slot in self._free or not 0 <= slot < self.count:
            raise AssertionError(f"slot {slot} released twice")
        self._free.append(slot)


class CheckpointSlots:
    """Slots for checkpoints. A slot is free, taken (a planned row fills it), or in use by a checkpoint. A checkpoint that a
    planned row will restore is pinned, so that it is not evicted."""

    def __init__(self, count: int, *, evict: Callable[[PrefixCheckpoint], None]) -> None:
        self._slots = Slots(count)
        self._used: OrderedDict[int, PrefixCheckpoint] = OrderedDict()  # least recently used first
        self._pins: dict[int, int] = {}  # slot → number of planned rows that restore its checkpoint
        self._evict = evict  # removes a checkpoint from the prefix cache and releases its slot
        self.evictions = 0

    @property
    def count(self) -> int:
        return self._slots.count

    @property
    def used(self) -> int:
        return len(self._used)

    def take(self) -> int | None:
        """Return a slot to fill, or None if planned rows are going to read or fill every slot."""
        if not self._slots.available:
            oldest = next((c for slot, c in self._used.items() if slot not in self._pins), None)
            if oldest is None:
                return None
            self._evict(oldest)
            self.evictions += 1
        return self._slots.take()

    def release(self, slot: int) -> None:
        """Free a slot that was taken but not filled, or whose checkpoint was removed."""
        if slot in self._pins:
            raise AssertionError(f"slot {slot} is released although a row is going to restore it")
        self._used.pop(slot, None)
        self._slots.release(slot)

    def add(self, checkpoint: PrefixCheckpoint) -> None:
        self._used[checkpoint.slot] = checkpoint

    def pinned(self, slot: int) -> bool:
        return slot in self._pins

    def pin(self, slot: int) -> None:
        self._used.move_to_end(slot)
        self._pins[slot] = self._pins.get(slot, 0) + 1

    def unpin(self, slot: int) -> None:
        self._pins[slot] -= 1
        if not self._pins[slot]:
            del self._pins[slot]

    def audit(self, *, pins: Mapping[int, int], taken: int, checkpoints: list[PrefixCheckpoint]) -> None:
        """Raise if the slots disagree with the leases that restore and fill them, or with the prefix cache."""
        if dict(pins) != self._pins:
            raise AssertionError(f"pinned checkpoints: {self._pins} counted, leases have {dict(pins)}")
        if {c.slot: c for c in checkpoints} != dict(self._used) or len(checkpoints) != len(self._used):
            raise AssertionError("the prefix cache and the slots have different checkpoints")
        if self._slots.available + taken + len(self._used) != self.count:
            raise AssertionError("a checkpoint slot is lost")


def checkpoint_positions(*, prompt: int, start: int, shared: int, chunk: int, recurrent: bool, slots: int) -> tuple[int, ...]:
    """Return the positions of a prompt worth a checkpoint, the most useful first. They affect speed only, never the answer.

    The prompt is resumed from `start`, and the cache has pages for its first `shared` positions.
    """
    positions = [prompt]
    if recurrent:
        positions += [prompt - prompt % chunk, shared - shared % chunk]
        positions += _regular_positions(prompt, chunk=chunk, most=slots // MAX_SHARE)
    useful = (position for position in dict.fromkeys(positions) if start < position <= prompt)
    return tuple(useful)[:slots]


def _regular_positions(prompt: int, *, chunk: int, most: int) -> range:
    """Return at most `most` positions at equal intervals, the latest first. Intervals are doubled until they fit, so that
    prompts of different lengths save at common positions."""
    interval = MIN_INTERVAL * chunk
    while most and prompt // interval > most:
        interval *= 2
    return range(prompt - prompt % interval, 0, -interval) if most else range(0)
