"""Arrays on their way to a device: laid out alike, they lie at the same places."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onedraw.backends.torch.runner.cuda_graphs import NoCapture
from onedraw.backends.torch.runner.staging_buffers import StagingBuffer, StagingBufferFull
from tests.support.replayed_work import ReplayedWork

CPU = torch.device("cpu")


def test_turns_that_lay_out_alike_share_a_signature_and_addresses() -> None:
    arena = StagingBuffer(CPU, 4096)
    found = []
    for value in (1, 2):
        arena.begin()
        tensors = [arena.put(np.full(3, value, dtype=np.int32)), arena.put(np.full((2, 2), value / 2, dtype=np.float32))]
        arena.note(("splits", 4))
        found.append((arena.send(), tensors))
    assert found[0][0] == found[1][0]
    for first, second in zip(found[0][1], found[1][1], strict=True):
        assert first.data_ptr() == second.data_ptr()
        assert torch.equal(first, second)  # the later turn's values, in the place of the former's
    assert found[0][1][1].tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_another_shape_or_fact_is_another_signature() -> None:
    arena = StagingBuffer(CPU, 4096)
    signatures = set()
    for size, fact in ((3, 1), (4, 1), (3, 2)):
        arena.begin()
        arena.put(np.zeros(size, dtype=np.int64))
        arena.note(fact)
        signatures.add(arena.send())
    assert len(signatures) == 3


def test_what_comes_after_the_sending_is_an_error_and_so_is_too_much() -> None:
    arena = StagingBuffer(CPU, 256)
    arena.begin()
    with pytest.raises(StagingBufferFull):
        arena.put(np.zeros(100, dtype=np.int64))
    arena.send()
    with pytest.raises(RuntimeError, match="after the step was sent"):
        arena.put(np.zeros(1, dtype=np.int64))


def test_what_was_made_of_a_place_and_its_layout_is_made_once() -> None:
    arena, made = StagingBuffer(CPU, 256), []
    for value, layout in ((1, "a"), (2, "a"), (3, "b")):
        arena.begin()
        words = arena.put(np.full(2, value, dtype=np.int32))
        made.append(arena.cached(words, layout, lambda words=words: [words.view(2, 1)]))  # type: ignore[misc]
        arena.send()
    assert made[0] is made[1]
    assert made[1] is not made[2]
    assert made[0][0].tolist() == [[3], [3]]  # a view: the latest content


def test_a_replay_reads_what_lies_there_now_and_a_stale_closure_shows() -> None:
    arena, recorder = StagingBuffer(CPU, 256), ReplayedWork()
    for value in (3, 5):
        arena.begin()
        there = arena.put(np.asarray([value]))
        signature = arena.send()
        assert recorder.run(signature, lambda there=there, value=value: (int(there[0]), value)) == (value, 3)
        assert NoCapture().run(signature, lambda value=value: value) == value
    assert recorder.replayed == 1
