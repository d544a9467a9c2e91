"""Slots of checkpoints: the least recently used one goes first, one that is about to be restored never."""

from __future__ import annotations

import pytest

from onedraw.memory.prefix_cache import Checkpoint, PrefixIndex
from onedraw.memory.slots import CheckpointSlots, Slots


class Books:
    """Slots and the index they belong to."""

    def __init__(self, count: int) -> None:
        self.index = PrefixIndex(page_size=2, groups=1)
        self.slots = CheckpointSlots(count, give_up=self.remove)

    def save(self, *tokens: int) -> Checkpoint | None:
        slot = self.slots.take()
        if slot is None:
            return None
        node = self.index.below(self.index.root, tokens)
        checkpoint = Checkpoint(node, (), len(tokens), slot, logits=True, pages=())
        self.index.keep(checkpoint)
        self.slots.keep(checkpoint)
        return checkpoint

    def remove(self, checkpoint: Checkpoint) -> None:
        self.index.remove(checkpoint)
        self.slots.give_back(checkpoint.slot)

    def knows(self, *tokens: int) -> bool:
        return self.index.find(tokens) is not None


def test_a_lane_given_back_twice_is_noticed() -> None:
    lanes = Slots(2)
    lane = lanes.take()
    assert lane is not None
    lanes.give_back(lane)
    with pytest.raises(AssertionError):
        lanes.give_back(lane)


def test_the_least_recently_used_checkpoint_makes_room() -> None:
    books = Books(2)
    first = books.save(1, 1)
    books.save(2, 2)
    assert first is not None
    books.slots.pin(first.slot)  # somebody restores it
    books.slots.unpin(first.slot)
    books.save(3, 3)
    assert [books.knows(1, 1), books.knows(2, 2), books.knows(3, 3)] == [True, False, True]
    assert books.slots.evictions == 1


def test_what_is_still_to_be_restored_is_never_given_up() -> None:
    books = Books(1)
    only = books.save(1, 1)
    assert only is not None
    books.slots.pin(only.slot)
    assert books.save(2, 2) is None
    with pytest.raises(AssertionError):
        books.remove(only)


def test_the_node_of_a_checkpoint_goes_with_it() -> None:
    books = Books(1)
    books.save(1, 1)
    books.save(2, 2)
    assert len(books.index) == 1
    books.index.audit()
