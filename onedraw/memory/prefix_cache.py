"""How far a prefix that the index knows can be resumed. A pure function of the nodes on its way.

In: the path of nodes, the tokens, what the backend needs. Out: Resume. A prefix of n positions can be resumed if every
layer group has the pages that position n still sees, and, where there is recurrent state, a checkpoint of it at n: on a
chunk boundary inside the prompt, or at the very end of this prompt. If nothing is left to compute, the checkpoint must
have the logits too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from onedraw.memory.pages import NO_PAGE, first_needed

# -------------------- Which pages and checkpoints hold which prefix: a tree of full pages, each below the page b


@dataclass(slots=True, eq=False)
class Node:
    """One full page of tokens behind those of its ancestors. Owner: the index."""

    above: Node | None
    tokens: tuple[int, ...]
    depth: int  # full pages up to here
    pages: list[int]  # per group
    below: dict[tuple[int, ...], Node] = field(default_factory=dict)
    checkpoints: dict[tuple[int, ...], Checkpoint] = field(default_factory=dict)  # by their tail
    pins: int = 0  # leases whose settled pages end here

    @property
    def empty(self) -> bool:
        return not (self.below or self.pins or self.checkpoints or self.pages.count(NO_PAGE) < len(self.pages))


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """The state after `position` tokens, in `slot`; with `logits`, the scores of the last of them too.

    Where the position is inside a page, `tail` are the tokens past the node and `pages` the partly filled page of each
    group; whoever saved it may go on writing behind the tail.
    """

    node: Node
    tail: tuple[int, ...]
    position: int
    slot: int
    logits: bool
    pages: tuple[int, ...]


class PrefixIndex:
    """Owner: the allocator."""

    def __init__(self, *, page_size: int, groups: int) -> None:
        self.root = Node(None, (), 0, [])
        self._page_size = page_size
        self._known: list[dict[int, list[Node | Checkpoint]]] = [{} for _ in range(groups)]
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def knows(self, group: int, page: int) -> bool:
        return page in self._known[group]

    def walk(self, tokens: tuple[int, ...]) -> list[Node]:
        """The root and the nodes of the longest chain of full pages that `tokens` begin with."""
        node, size = self.root, self._page_size
        path = [node]
        for start in range(0, len(tokens) - size + 1, size):
            below = node.below.get(tokens[start : start + size])
            if below is None:
                break
            node = below
            path.append(node)
        return path

    def find(self, tokens: tuple[int, ...]) -> Checkpoint | None:
        """The checkpoint after exactly these tokens."""
        path, depth = self.walk(tokens), len(tokens) // self._page_size
        return path[depth].checkpoints.get(tokens[depth * self._page_size :]) if len(path) > depth else None

    def below(self, node: Node, tokens: tuple[int, ...]) -> Node:
        """The node of these tokens behind `node`, made where there is none."""
        found = node.below.get(tokens)
        if found is None:
            found = node.below[tokens] = Node(node, tokens, node.depth + 1, [NO_PAGE] * len(self._known))
            self._count += 1
        return found

    def adopt(self, node: Node, group: int, page: int) -> None:
        """Remember a settled page. A node that has a page of this group keeps it."""
        if node.pages[group] == NO_PAGE:
            node.pages[group] = page
            self._known[group].setdefault(page, []).append(node)

    def keep(self, checkpoint: Checkpoint) -> None:
        checkpoint.node.checkpoints[checkpoint.tail] = checkpoint
        for group, page in enumerate(checkpoint.pages):
            self._known[group].setdefault(page, []).append(checkpoint)

    def remove(self, checkpoint: Checkpoint) -> list[tuple[int, int]]:
        """Forget a checkpoint; returns group and number of the pages that nothing here knows any more."""
        unknown = []
        for group, page in enumerate(checkpoint.pages):
            users = self._known[group].get(page, [])
            if checkpoint in users:
                users.remove(checkpoint)
                if not users:
                    del self._known[group][page]
                    unknown.append((group, page))
        del checkpoint.node.checkpoints[checkpoint.tail]
        self._prune(checkpoint.node)
        return unknown

    def forget(self, group: int, page: int) -> list[Checkpoint]:
        """The page gets new content. Returns the checkpoints that needed it, which are still to be removed."""
        lost = []
        for user in self._known[group].pop(page):
            if isinstance(user, Checkpoint):
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
        while node.above is not None and node.empty:
            del node.above.below[node.tokens]
            self._count -= 1
            node = node.above

    # ------------------------------------------------------------------ audit

    def nodes(self) -> Iterator[Node]:
        """All of them but the root."""
        heap = list(self.root.below.values())
        while heap:
            node = heap.pop()
            yield node
            heap.extend(node.below.values())

    def checkpoints(self) -> list[Checkpoint]:
        return [c for node in (self.root, *self.nodes()) for c in node.checkpoints.values()]

    def known(self, group: int) -> frozenset[int]:
        return frozenset(self._known[group])

    def audit(self) -> None:
        """Raise if a node is of no use, or pages and nodes do not know each other."""
        nodes = list(self.nodes())
        if len(nodes) != self._count or any(node.empty for node in nodes):
            raise AssertionError("the index keeps a node nobody needs, or has lost count of them")
        for group, known in enumerate(self._known):
            used = [n.pages[group] for n in nodes if n.pages[group] != NO_PAGE]
            used += [c.pages[group] for c in self.checkpoints() if c.pages]
            if sorted(used) != sorted(page for page, users in known.items() for _ in users):
                raise AssertionError(f"group {group}: pages and nodes do not know each other")


# -------------------- How far a prefix that the index knows can be resumed. A pure function of the nodes on its


@dataclass(frozen=True, slots=True)
class Needs:
    """What a backend asks of a prefix."""

    page_size: int
    windows: tuple[int | None, ...]  # of the layer groups
    chunk: int
    recurrent: bool

    def boundary(self, position: int) -> bool:
        """Every prompt that is longer passes through the state at `position`."""
        return position % self.chunk == 0


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on from `position`, with the pages of `path`; from a checkpoint where there is one."""

    position: int
    path: list[Node]  # the root and the full pages before `position`
    checkpoint: Checkpoint | None = None

    @property
    def copies(self) -> bool:
        """The last page is partly filled and somebody may go on writing to it."""
        return self.checkpoint is not None and bool(self.checkpoint.tail)


def longest(path: list[Node], tokens: Sequence[int], *, prompt: int, known: int, needs: Needs, copies: bool = True) -> Resume:
    """The farthest point to go on from. `path` are the nodes `tokens` pass; without `copies` only at the end of a page."""
    there = _presence(path, needs)
    for node in reversed(path):
        for checkpoint in _checkpoints(node, tokens, needs.page_size):
            whole = checkpoint.logits and checkpoint.position == known == prompt
            midway = needs.recurrent and checkpoint.position < known and _passes(checkpoint.position, prompt, needs)
            if (whole or midway) and (copies or not checkpoint.tail) and there(checkpoint.position):
                return Resume(checkpoint.position, path[: node.depth + 1], checkpoint)
        position = node.depth * needs.page_size
        if not needs.recurrent and position < known and there(position):
            return Resume(position, path[: node.depth + 1])
    return Resume(0, path[:1])


def _passes(position: int, prompt: int, needs: Needs) -> bool:
    """A cold run of a prompt of this length passes through the state at `position`."""
    return position == prompt or (position < prompt and needs.boundary(position))


def _checkpoints(node: Node, tokens: Sequence[int], page_size: int) -> Iterator[Checkpoint]:
    """Those at a node that hold for these tokens, the longest first."""
    if node.checkpoints:
        start = node.depth * page_size
        for tail in sorted(node.checkpoints, key=len, reverse=True):
            if tuple(tokens[start : start + len(tail)]) == tail:
                yield node.checkpoints[tail]


def _presence(path: list[Node], needs: Needs) -> Callable[[int], bool]:
    """Whether, in every group, the full pages of `path` that a position still sees are there."""
    runs: list[list[int]] = []  # per group: how many pages without a gap end at each depth
    for group in range(len(needs.windows)):
        run = [0]
        for node in path[1:]:
            run.append(0 if node.pages[group] == NO_PAGE else run[-1] + 1)
        runs.append(run)

    def there(position: int) -> bool:
        depth = position // needs.page_size
        return all(
            run[depth] >= depth - first_needed(position, window) // needs.page_size
            for run, window in zip(runs, needs.windows, strict=True)
        )

    return there
