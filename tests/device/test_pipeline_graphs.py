"""Pipeline stages: steps captured stage by stage give the tokens and checksums of an eager step on one device.

On a GPU with CUDA graphs, with the device named two or three times. Without one under Triton's interpreter, where replaying a
stage calls the work of its first run again (`ReplayedWork`).
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Hashable, Sequence
from typing import Any

import pytest
import torch

from onedraw.backends.torch import backend as backend_module
from onedraw.backends.torch.backend import TorchBackend
from onedraw.backends.torch.ops.plain.ops import TorchOps
from onedraw.backends.torch.runner.cuda_graphs import CudaGraphs, GraphCache
from onedraw.backends.torch.runner.graph_runner import GraphStage
from onedraw.backends.torch.runner.pipeline import Pipeline, StageDevice
from onedraw.backends.torch.runner.staging_buffers import StagingBuffer
from onedraw.checkpoints.random_weights import random_weights
from tests.device.test_cuda_graphs import (
    ATTENTION,
    DELTA,
    DEVICE,
    DTYPE,
    INTERPRETED,
    VOCAB,
    WINDOWED,
    graph_caches,
    requests,
    sampled_requests,
    spec_of,
)
from tests.laws.harness import Answer, KnownAnswerProposer, Schedule, run
from tests.support.replayed_work import ReplayedWork

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs a CUDA device"),
]
SPECS = {"two": spec_of(DELTA, ATTENTION), "windows": spec_of(ATTENTION, WINDOWED), "three": spec_of(DELTA, WINDOWED, ATTENTION)}
SPLITS = [("two", (1,))] if INTERPRETED else [("three", (1,)), ("three", (1, 2))]  # the interpreter takes a second per step


def backend_of(
    kind: str,
    graph_cache: GraphCache | None,
    *,
    cuts: tuple[int, ...] = (),
    given: Sequence[StageDevice] = (),
    lanes: int = 3,
    **more: Any,
) -> TorchBackend:
    """`cuts`: layers at which stages end; all stages are on one device, unless `given`."""
    from onedraw.backends.torch.ops.cuda.ops import TritonOps

    spec, device = SPECS[kind], torch.device(DEVICE)
    pdl = DEVICE != "cpu" and torch.cuda.get_device_capability() >= (9, 0)
    stage_devices = given or [StageDevice(device, TritonOps(device, pdl=pdl), stop) for stop in (*cuts, None)]
    sizes: dict[str, Any] = {"lanes": lanes, "page_size": 16, "max_context": 256, "drafts": 64, **{"pages": 60, **more}}
    return TorchBackend(
        spec,
        random_weights(spec, seed=1),
        dtype=DTYPE,
        stage_devices=stage_devices,
        check=False,
        graph_cache=graph_cache,
        **sizes,
    )


def run_alone(kind: str, submitted: list[Any]) -> list[Answer]:
    """One stage, one request at a time, without drafts, capture and padding."""
    backend = backend_of(kind, None, lanes=1, capture=False)
    return [run(backend, [request], Schedule())[0][0] for request in submitted]


@pytest.mark.parametrize(("kind", "cuts"), SPLITS)
def test_captured_stages_have_the_bits_of_one_stage(kind: str, cuts: tuple[int, ...]) -> None:
    """Known tokens, steps launched ahead, chains and trees; twice, so that the second run replays what the first captured."""
    submitted = requests()
    expected = run_alone(kind, submitted)
    assert all(answer.error is None for answer in expected)
    drafts = KnownAnswerProposer({r.id: a.tokens for r, a in zip(submitted, expected, strict=True)}, VOCAB, empty_every=0)
    trees = dataclasses.replace(drafts, tree=True)
    schedules = {"batched": Schedule(arrivals=(0, 4, 5)), "trees": Schedule(proposer=trees)}
    if not INTERPRETED:  # trees commit all that chains do, and more
        schedules["chains"] = Schedule(proposer=drafts, arrivals=(0, 0, 2))
    for name, graph_cache in graph_caches().items():
        backend = backend_of(kind, graph_cache, cuts=cuts)
        for label, schedule in schedules.items():
            replayed: list[int] = []
            for _ in range(1 if INTERPRETED and label == "batched" else 2):
                got, stats = run(backend, submitted, schedule)
                assert got == expected, (name, label)
                replayed.append(getattr(graph_cache, "replayed", 0))
            assert label == "batched" or 0 < stats.accepted_tokens < stats.draft_tokens, (name, label)
            if isinstance(graph_cache, ReplayedWork | CudaGraphs):
                assert replayed[-1] > replayed[0] or replayed[0] > 2 * len(cuts), (label, replayed)
        assert backend.graph_runner is not None
        assert backend.graph_runner.started_ahead > 1


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes a second per step")
@pytest.mark.parametrize(("kind", "cuts"), SPLITS)
def test_steps_launched_ahead_on_stages_have_the_bits_of_one_stage(kind: str, cuts: tuple[int, ...]) -> None:
    """Pages are few enough to preempt a request, and one request ends at a stop id."""
    submitted = sampled_requests(3, max_tokens=40)
    stop = frozenset({run_alone(kind, submitted[:1])[0].tokens[3]})
    submitted[0] = dataclasses.replace(submitted[0], params=dataclasses.replace(submitted[0].params, stop_ids=stop))
    expected = run_alone(kind, submitted)
    for pages, arrivals in ((60, (0, 0, 5)), (5, ())):
        got, stats = run(backend_of(kind, None, cuts=cuts, pages=pages), submitted, Schedule(arrivals=arrivals))
        assert got == expected
        assert stats.steps_ahead
        assert pages == 60 or stats.preemptions


def test_a_stage_that_reads_the_staging_buffer_of_another_step_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: every other host-to-device copy of the second stage is skipped."""
    submitted = requests(1)
    expected = run_alone("windows", submitted)
    real, calls = GraphStage.send, itertools.count()

    def send(self: GraphStage, probed: Hashable) -> Hashable:
        skips = self._number == 1 and next(calls) % 2 == 1
        with monkeypatch.context() as patch:
            if skips:
                patch.setattr(StagingBuffer, "send", lambda staging: tuple(staging._facts))
            return real(self, probed)

    for kept in graph_caches():
        assert run(backend_of("windows", graph_caches()[kept], cuts=(1,)), submitted, Schedule())[0] == expected
        with monkeypatch.context() as patch:
            patch.setattr(GraphStage, "send", send)
            assert run(backend_of("windows", graph_caches()[kept], cuts=(1,)), submitted, Schedule())[0] != expected


@pytest.mark.parametrize("last", [False] if INTERPRETED else [False, True])
def test_captured_stages_beside_eager_stages_have_the_bits_of_eager_stages(last: bool) -> None:
    """A stage on the CPU, after the stage on the GPU or (`last`) before it."""
    from onedraw.backends.torch.ops.cuda.ops import TritonOps

    cpu, device = torch.device("cpu"), torch.device(DEVICE)
    order = [(cpu, TorchOps(cpu)), (device, TritonOps(device))] if last else [(device, TritonOps(device)), (cpu, TorchOps(cpu))]
    stage_devices = [StageDevice(*one, stop) for one, stop in zip(order, (1, None), strict=True)]
    submitted = requests(2)
    expected: list[Answer] = []
    for records in (False, True):
        graph_cache = ReplayedWork() if DEVICE == "cpu" else CudaGraphs(device)
        backend = backend_of("two", graph_cache, given=stage_devices, capture=records)
        backend._checks_range = lambda: False  # type: ignore[method-assign]  # the interpreter has no bf16, and f16 is checked
        got, _ = run(backend, submitted, Schedule())
        expected = expected or got
        assert got == expected
        known = {request.id: answer.tokens for request, answer in zip(submitted, expected, strict=True)}
        for tree in (True,) if INTERPRETED else (False, True):
            drafts = KnownAnswerProposer(known, VOCAB, empty_every=3, tree=tree)
            got, stats = run(backend, submitted, Schedule(proposer=drafts))
            assert got == expected
            assert stats.accepted_tokens
        assert (graph_cache.replayed > 2) == records
    assert all(answer.error is None for answer in expected)


@pytest.mark.parametrize("cuts", [(1,)] if INTERPRETED else [(1,), (1, 2)])
@pytest.mark.parametrize("tree", [True] if INTERPRETED else [False, True])
def test_captured_steps_in_flight_at_once_have_the_bits_of_eager_steps(
    cuts: tuple[int, ...], tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts on the threads of the stages, and as many single-row steps in flight as there are stages."""
    kind, stages, lock = "two" if INTERPRETED else "three", len(cuts) + 1, threading.RLock()
    if INTERPRETED:  # it runs one kernel at a time, like one GPU
        monkeypatch.setattr(backend_module, "device_locks", lambda devices: [lock for _ in devices])
    count = 1 if INTERPRETED else 3
    submitted = [dataclasses.replace(request, id=f"{request.id}.{n}") for n in range(count) for request in requests()]
    expected = run_alone(kind, submitted)
    drafts = KnownAnswerProposer(
        {r.id: a.tokens for r, a in zip(submitted, expected, strict=True)}, VOCAB, empty_every=3, tree=tree
    )
    for schedule in (
        (Schedule(proposer=drafts, step_tokens=64),)
        if INTERPRETED
        else (
            Schedule(step_tokens=64),
            Schedule(proposer=drafts, step_tokens=64),
        )
    ):
        graph_cache = ReplayedWork() if DEVICE == "cpu" else CudaGraphs(torch.device(DEVICE))
        backend = backend_of(
            kind, graph_cache, cuts=cuts, lanes=4, pipeline=Pipeline([lambda: None] * stages), max_in_flight=stages
        )
        backend._capacity = dataclasses.replace(backend.capacity, min_step_rows=1)
        got, stats = run(backend, submitted, schedule)
        backend.close()
        assert got == expected
        assert stats.overlapped_steps > 4
        assert graph_cache.replayed > 2
