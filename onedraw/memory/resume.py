"""How far a prefix that the index knows can be resumed. A pure function of the nodes on its way.

In: the path of nodes, the tokens, what the backend needs. Out: Resume. A prefix of n positions can be resumed if every
layer group has the pages that position n still sees, and, where there is recurrent state, a checkpoint of it at n: on a
chunk boundary inside the prompt, or at the very end of this prompt. If nothing is left to compute, the checkpoint must
have the logits too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from onedraw.memory.pages import NO_PAGE
from onedraw.memory.prefix import Checkpoint, Node
from onedraw.memory.span import first_needed


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
