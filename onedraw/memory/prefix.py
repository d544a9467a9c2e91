"""Which pages and checkpoints hold which prefix: a tree of full pages, each below the page before it.

In: tokens, pages and checkpoints as they are settled. Out: the nodes a prompt passes. Keys are the tokens themselves,
not a hash of them, so two prefixes can never be mistaken for each other.

A node has a page per layer group, or none where that page was let go or got other content; it stays as long as it has a
page or a checkpoint, something stands below it, or a lease has come as far as this. What is gone makes the hits that
need it impossible and no others; `resume.py` says which those are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from onedraw.memory.pages import NO_PAGE


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
    """Owner: the ledger."""

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
