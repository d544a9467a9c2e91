"""Checkpoint slots evict the least recently used checkpoint, never a pinned one; and which prompt positions are saved."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onedraw.memory.prefix_cache import MIN_INTERVAL, CheckpointSlots, PrefixCache, PrefixCheckpoint, Slots, checkpoint_positions


class CacheWithSlots:
    """Checkpoint slots and the prefix cache that refers to them."""

    def __init__(self, count: int) -> None:
        self.prefixes = PrefixCache(page_size=2, groups=1)
        self.slots = CheckpointSlots(count, evict=self.remove)

    def save(self, *tokens: int) -> PrefixCheckpoint | None:
        slot = self.slots.take()
        if slot is None:
            return None
        node = self.prefixes.child(self.prefixes.root, tokens)
        checkpoint = PrefixCheckpoint(node, (), len(tokens), slot, logits=True, pages=())
        self.prefixes.add_checkpoint(checkpoint)
        self.slots.add(checkpoint)
        return checkpoint

    def remove(self, checkpoint: PrefixCheckpoint) -> None:
        self.prefixes.remove_checkpoint(checkpoint)
        self.slots.release(checkpoint.slot)

    def has(self, *tokens: int) -> bool:
        return self.prefixes.find_checkpoint(tokens) is not None


def test_releasing_a_lane_twice_raises() -> None:
    lanes = Slots(2)
    lane = lanes.take()
    assert lane is not None
    lanes.release(lane)
    with pytest.raises(AssertionError):
        lanes.release(lane)


def test_the_least_recently_used_checkpoint_is_evicted() -> None:
    cache = CacheWithSlots(2)
    first = cache.save(1, 1)
    cache.save(2, 2)
    assert first is not None
    cache.slots.pin(first.slot)  # a row restores it
    cache.slots.unpin(first.slot)
    cache.save(3, 3)
    assert [cache.has(1, 1), cache.has(2, 2), cache.has(3, 3)] == [True, False, True]
    assert cache.slots.evictions == 1


def test_a_pinned_checkpoint_is_never_evicted() -> None:
    cache = CacheWithSlots(1)
    only = cache.save(1, 1)
    assert only is not None
    cache.slots.pin(only.slot)
    assert cache.save(2, 2) is None
    with pytest.raises(AssertionError):
        cache.remove(only)


def test_evicting_a_checkpoint_removes_its_node() -> None:
    cache = CacheWithSlots(1)
    cache.save(1, 1)
    cache.save(2, 2)
    assert len(cache.prefixes) == 1
    cache.prefixes.audit()


def test_without_recurrent_state_only_the_end_of_a_prompt_is_saved() -> None:
    assert checkpoint_positions(prompt=100, start=0, shared=64, chunk=1, recurrent=False, slots=8) == (100,)


def test_the_end_comes_first_then_its_chunk_boundary_then_the_end_of_the_shared_prefix() -> None:
    assert checkpoint_positions(prompt=70, start=0, shared=37, chunk=16, recurrent=True, slots=8) == (70, 64, 32)


def test_a_prompt_that_ends_on_a_boundary_needs_one_slot_for_both() -> None:
    assert checkpoint_positions(prompt=64, start=0, shared=0, chunk=16, recurrent=True, slots=8) == (64,)


def test_a_long_prompt_is_saved_at_regular_positions_that_other_lengths_share() -> None:
    long = checkpoint_positions(prompt=4000, start=0, shared=0, chunk=16, recurrent=True, slots=16)
    longer = checkpoint_positions(prompt=4100, start=0, shared=0, chunk=16, recurrent=True, slots=16)
    assert long == (4000, 3072, 2048, 1024)
    assert set(long[1:]) <= set(longer)
    assert all(position % (MIN_INTERVAL * 16) == 0 for position in long[1:])


def test_a_resumed_position_is_not_saved_again() -> None:
    assert checkpoint_positions(prompt=70, start=64, shared=64, chunk=16, recurrent=True, slots=8) == (70,)


@given(
    prompt=st.integers(1, 3000),
    part=st.floats(0, 1),
    known=st.floats(0, 1),
    chunk=st.integers(1, 64),
    recurrent=st.booleans(),
    slots=st.integers(0, 40),
)
def test_every_position_is_the_end_or_a_chunk_boundary_after_the_start(
    prompt: int, part: float, known: float, chunk: int, recurrent: bool, slots: int
) -> None:
    start, shared = int(part * (prompt - 1)), int(known * prompt)
    positions = checkpoint_positions(prompt=prompt, start=start, shared=shared, chunk=chunk, recurrent=recurrent, slots=slots)
    assert len(positions) == len(set(positions)) <= slots
    assert all(start < position <= prompt for position in positions)
    assert all(position == prompt or (recurrent and position % chunk == 0) for position in positions)
    assert not slots or positions[0] == prompt
