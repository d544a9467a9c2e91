"""Host-to-device inputs of a step: equal layouts have equal addresses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onedraw.backends.torch.runner.cuda_graphs import NoCapture
from onedraw.backends.torch.runner.staging_buffers import StagingBuffer, StagingBufferFull
from tests.support.replayed_work import ReplayedWork

CPU = torch.device("cpu")


def test_steps_with_equal_layouts_share_a_signature_and_addresses() -> None:
    staging = StagingBuffer(CPU, 4096)
    found = []
    for value in (1, 2):
        staging.begin()
        tensors = [staging.put(np.full(3, value, dtype=np.int32)), staging.put(np.full((2, 2), value / 2, dtype=np.float32))]
        staging.note(("splits", 4))
        found.append((staging.send(), tensors))
    assert found[0][0] == found[1][0]
    for first, second in zip(found[0][1], found[1][1], strict=True):
        assert first.data_ptr() == second.data_ptr()
        assert torch.equal(first, second)  # the values of the later step, at the addresses of the earlier one
    assert found[0][1][1].tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_another_shape_or_key_gives_another_signature() -> None:
    staging = StagingBuffer(CPU, 4096)
    signatures = set()
    for size, fact in ((3, 1), (4, 1), (3, 2)):
        staging.begin()
        staging.put(np.zeros(size, dtype=np.int64))
        staging.note(fact)
        signatures.add(staging.send())
    assert len(signatures) == 3


def test_rows_with_room_for_more_share_a_signature_whatever_their_number_and_only_they_are_copied() -> None:
    staging = StagingBuffer(CPU, 1024)
    found = []
    for count in (1, 3):
        staging.begin()
        rows = staging.put_rows(np.full((count, 4), count, dtype=np.int32), 8)
        found.append((staging.send(), rows, rows.tolist()))
    assert found[0][0] is found[1][0]
    assert found[0][1].data_ptr() == found[1][1].data_ptr()
    assert [shown[2][:4] for shown in found] == [[[1] * 4, *[[0] * 4] * 3], [*[[3] * 4] * 3, [0] * 4]]
    staging.begin()
    with pytest.raises(StagingBufferFull):
        staging.put_rows(np.zeros((1, 4), dtype=np.int32), 65)
    staging.put_rows(np.zeros((1, 4), dtype=np.int32), 64)
    with pytest.raises(RuntimeError, match="after `put_rows`"):
        staging.put(np.zeros(1, dtype=np.int32))


def test_an_array_after_sending_or_beyond_the_size_is_an_error() -> None:
    staging = StagingBuffer(CPU, 256)
    staging.begin()
    with pytest.raises(StagingBufferFull):
        staging.put(np.zeros(100, dtype=np.int64))
    staging.send()
    with pytest.raises(RuntimeError, match="after the step was sent"):
        staging.put(np.zeros(1, dtype=np.int64))


def test_a_value_made_from_a_tensor_and_its_layout_is_made_once() -> None:
    staging, made = StagingBuffer(CPU, 256), []
    for value, layout in ((1, "a"), (2, "a"), (3, "b")):
        staging.begin()
        words = staging.put(np.full(2, value, dtype=np.int32))
        made.append(staging.cached(words, layout, lambda words=words: [words.view(2, 1)]))  # type: ignore[misc]
        staging.send()
    assert made[0] is made[1]
    assert made[1] is not made[2]
    assert made[0][0].tolist() == [[3], [3]]  # a view: the latest content


def test_a_replay_reads_the_buffer_and_stale_closures_are_noticed() -> None:
    staging, graphs = StagingBuffer(CPU, 256), ReplayedWork()
    for value in (3, 5):
        staging.begin()
        there = staging.put(np.asarray([value]))
        signature = staging.send()
        assert graphs.run(signature, lambda there=there, value=value: (int(there[0]), value)) == (value, 3)
        assert NoCapture().run(signature, lambda value=value: value) == value
    assert graphs.replayed == 1
