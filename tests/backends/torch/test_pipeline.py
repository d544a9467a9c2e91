"""Jobs pass the stages of a pipeline in order, one at a time in each; a call that fails ends its own job alone."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from functools import partial

import pytest

from onedraw.backends.torch.device import find_devices, on_cores, set_threads
from onedraw.backends.torch.runner.pipeline import Pipeline
from onedraw.errors import BadSetting

PATIENCE = 120.0  # seconds


def nothing() -> None: ...


def test_a_stage_takes_one_job_at_a_time_and_in_order() -> None:
    pipeline, seen, inside = Pipeline([nothing] * 3), list[tuple[int, int]](), [0, 0, 0]

    def step(job: int, stage: int) -> int:
        inside[stage] += 1
        assert inside[stage] == 1
        time.sleep(0.002 if (job + stage) % 2 else 0)
        seen.append((stage, job))
        inside[stage] -= 1
        return job

    found = [pipeline.start([partial(step, job, stage) for stage in range(3)]) for job in range(12)]
    assert [one.result(PATIENCE) for one in found] == list(range(12))
    assert all([job for at, job in seen if at == stage] == list(range(12)) for stage in range(3))
    pipeline.close()


def test_two_stages_work_at_once() -> None:
    """Each of two jobs waits in its stage for the other: one after the other they would deadlock."""
    pipeline, meet = Pipeline([nothing] * 2), threading.Barrier(2)
    first = pipeline.start([nothing, lambda: meet.wait(PATIENCE)])
    second = pipeline.start([lambda: meet.wait(PATIENCE), lambda: "through"])
    assert first.result(PATIENCE) in (0, 1)
    assert second.result(PATIENCE) == "through"
    pipeline.close()


def test_a_call_that_fails_ends_its_own_job_alone() -> None:
    pipeline = Pipeline([nothing] * 2)

    def fails() -> None:
        raise RuntimeError("planted")

    bad, late, good = pipeline.start([fails, nothing]), pipeline.start([nothing, fails]), pipeline.start([nothing, lambda: 7])
    for one in (bad, late):
        with pytest.raises(RuntimeError, match="planted"):
            one.result(PATIENCE)
    assert good.result(PATIENCE) == 7
    pipeline.close()


def test_every_job_raises_the_error_of_a_failed_first_call() -> None:
    def fails() -> None:
        raise RuntimeError("planted")

    pipeline = Pipeline([nothing, fails])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="planted"):
            pipeline.start([nothing, nothing]).result(PATIENCE)
    pipeline.close()


def test_a_first_call_is_released_after_it_ran() -> None:
    class FirstCall:
        def __call__(self) -> None: ...

    first = FirstCall()
    pipeline, held = Pipeline([first]), weakref.ref(first)
    del first
    pipeline.start([nothing]).result(PATIENCE)
    gc.collect()
    assert held() is None
    pipeline.close()


needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot pin a thread to processors")


@needs_affinity
def test_a_stage_is_pinned_to_its_cores_and_other_threads_are_not() -> None:
    cores = sorted(os.sched_getaffinity(0))
    pipeline = Pipeline([partial(set_threads, 1, [], (cores[0],)), partial(set_threads, 1, [], (cores[-1],))])
    where: list[set[int]] = []
    steps = [lambda: where.append(os.sched_getaffinity(0))] * 2
    pipeline.start(steps).result(PATIENCE)
    pipeline.close()
    assert where == [{cores[0]}, {cores[-1]}]
    with on_cores((cores[0],)):
        assert os.sched_getaffinity(0) == {cores[0]}
    assert sorted(os.sched_getaffinity(0)) == cores


@needs_affinity
def test_cores_that_do_not_exist_are_refused_by_name() -> None:
    first, *_, there = sorted([*os.sched_getaffinity(0)] * 2)
    with pytest.raises(BadSetting, match=rf"--devices cpu:{there + 1}: this program may run on the processors {first}"):
        find_devices([f"cpu:{there + 1}"])
    found = find_devices([f"cpu:{there}", "cpu"])
    assert [(device.name, device.cores) for device in found] == [(f"cpu:{there}", (there,)), ("cpu", ())]
