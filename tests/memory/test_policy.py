"""Which positions of a prompt are worth a checkpoint."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from onedraw.memory.allocator import INTERVAL, save_points


def test_without_recurrent_state_only_the_end_is_kept() -> None:
    assert save_points(prompt=100, start=0, shared=64, chunk=1, recurrent=False, slots=8) == (100,)


def test_the_end_comes_first_then_the_next_turn_then_who_shares_the_beginning() -> None:
    assert save_points(prompt=70, start=0, shared=37, chunk=16, recurrent=True, slots=8) == (70, 64, 32)


def test_a_prompt_that_ends_on_a_boundary_needs_one_slot_for_both() -> None:
    assert save_points(prompt=64, start=0, shared=0, chunk=16, recurrent=True, slots=8) == (64,)


def test_a_long_prompt_is_kept_at_regular_places_that_other_lengths_have_too() -> None:
    long = save_points(prompt=4000, start=0, shared=0, chunk=16, recurrent=True, slots=16)
    longer = save_points(prompt=4100, start=0, shared=0, chunk=16, recurrent=True, slots=16)
    assert long == (4000, 3072, 2048, 1024)
    assert set(long[1:]) <= set(longer)
    assert all(position % (INTERVAL * 16) == 0 for position in long[1:])


def test_what_was_resumed_is_not_saved_again() -> None:
    assert save_points(prompt=70, start=64, shared=64, chunk=16, recurrent=True, slots=8) == (70,)


@given(
    prompt=st.integers(1, 3000),
    part=st.floats(0, 1),
    known=st.floats(0, 1),
    chunk=st.integers(1, 64),
    recurrent=st.booleans(),
    slots=st.integers(0, 40),
)
def test_every_point_is_the_end_or_a_boundary_ahead(
    prompt: int, part: float, known: float, chunk: int, recurrent: bool, slots: int
) -> None:
    start, shared = int(part * (prompt - 1)), int(known * prompt)
    points = save_points(prompt=prompt, start=start, shared=shared, chunk=chunk, recurrent=recurrent, slots=slots)
    assert len(points) == len(set(points)) <= slots
    assert all(start < position <= prompt for position in points)
    assert all(position == prompt or (recurrent and position % chunk == 0) for position in points)
    assert not slots or points[0] == prompt
