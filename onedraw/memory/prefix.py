"""Which pages hold which prefix: a chain of full pages, each keyed by the node before it and its own tokens.

In: tokens and pages as they are settled. Out: the pages of the longest known prefix. Keys are the tokens themselves,
not a hash of them, so two prefixes can never be mistaken for each other.

A page is idle before the pages that precede it become idle (leases drop from the end), so the pool's oldest idle page
is never the middle of a chain somebody could still use.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

ROOT = 0


@dataclass(frozen=True, slots=True)
class Node:
    number: int
    key: tuple[int, tuple[int, ...]]  # (number of the node before, tokens of the page)
    page: int


class PrefixIndex:
    """Owner: the ledger."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._numbers = itertools.count(ROOT + 1)
        self._nodes: dict[tuple[int, tuple[int, ...]], Node] = {}
        self._by_page: dict[int, Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def knows(self, page: int) -> bool:
        return page in self._by_page

    def match(self, tokens: tuple[int, ...]) -> list[Node]:
        """Nodes of the longest chain of full pages that `tokens` begin with."""
        found: list[Node] = []
        before, size = ROOT, self._page_size
        for start in range(0, len(tokens) - size + 1, size):
            node = self._nodes.get((before, tokens[start : start + size]))
            if node is None:
                break
            found.append(node)
            before = node.number
        return found

    def add(self, *, before: int, tokens: tuple[int, ...], page: int) -> int:
        """Remember a settled page; returns its node's number. A chain known already keeps its first page."""
        key = (before, tokens)
        node = self._nodes.get(key)
        if node is None:
            node = Node(next(self._numbers), key, page)
            self._nodes[key] = node
            self._by_page[page] = node
        return node.number

    def forget(self, page: int) -> None:
        """The page gets new content."""
        node = self._by_page.pop(page)
        del self._nodes[node.key]
