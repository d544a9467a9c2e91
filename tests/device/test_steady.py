"""Turns that are padded, recorded and replayed: the same tokens and checksums as turns that run kernel by kernel.

On an accelerator with CUDA graphs. Without one under Triton's interpreter, where a recorded turn is its first work called again
(`ReplayedWork`): what does not come through the arena is then stale, and padding that is no exact no-op shows.
"""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest
import torch

from onedraw.backends.sampled_rows import SamplingPosition
from onedraw.backends.torch.backend import TorchBackend
from onedraw.backends.torch.runner.cuda_graphs import CudaGraphs, GraphCache, NoCapture
from onedraw.checkpoints.random_weights import random_weights
from onedraw.engine.engine import Engine, Event
from onedraw.engine.scheduler import Scheduler
from onedraw.errors import NonFiniteLogits
from onedraw.memory.allocator import Allocator
from onedraw.models.spec import AttentionSpec, DeltaSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from onedraw.speculation.speculator import Speculator
from onedraw.types import Request, SamplingParams
from tests.laws.harness import Answer, Clairvoyant, Schedule, plain, run
from tests.support.replayed_work import ReplayedWork

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs a CUDA device"),
]
DEVICE = "cuda:0" if torch.cuda.is_available() and not INTERPRETED else "cpu"
DTYPE = "f16" if INTERPRETED else "bf16"
VOCAB = 96
ATTENTION = AttentionSpec(heads=4, kv_heads=2, head_dim=16, rope=RopeSpec(1e4, 16), scale=0.25)
WINDOWED = dataclasses.replace(ATTENTION, window=20)
DELTA = DeltaSpec(key_heads=1, value_heads=2, key_dim=16, value_dim=16, conv=4)


def spec_of(*mixers: AttentionSpec | DeltaSpec) -> ModelSpec:
    return ModelSpec(
        family="llama",
        layers=tuple(LayerSpec(mixer, MlpSpec(64)) for mixer in mixers),
        hidden=64,
        vocab=VOCAB,
        eps=1e-5,
        tied=False,
        max_context=256,
    )


SPECS = {"hybrid": spec_of(DELTA, ATTENTION), "attention": spec_of(ATTENTION), "windows": spec_of(ATTENTION, WINDOWED)}
KINDS = ["hybrid"] if INTERPRETED else list(SPECS)  # the interpreter takes a second for every turn


def backend_of(
    kind: str,
    recorder: GraphCache | None,
    *,
    lanes: int = 3,
    dtype: str = DTYPE,
    pages: int = 60,
    max_context: int = 256,
    capture: bool = True,
) -> TorchBackend:
    from onedraw.backends.torch.ops.cuda.ops import TritonOps

    spec = SPECS[kind]
    pdl = DEVICE != "cpu" and torch.cuda.get_device_capability() >= (9, 0)
    return TorchBackend(
        spec,
        random_weights(spec, seed=1),
        dtype=dtype,
        device=DEVICE,
        lanes=lanes,
        pages=pages,
        page_size=16,
        max_context=max_context,
        drafts=64,
        ops=TritonOps(torch.device(DEVICE), pdl=pdl),
        check=False,
        graph_cache=recorder,
        capture=capture,
    )


def requests(count: int = 3) -> list[Request]:
    rng = np.random.default_rng(3)
    found = []
    for i in range(count):
        params = SamplingParams(
            temperature=(0.0, 0.8, 1.0)[i % 3],
            top_p=0.9 if i % 2 else 1.0,
            top_k=20 if i == 2 and not INTERPRETED else 0,
            repetition_penalty=1.1 if i % 2 else 1.0,
            frequency_penalty=0.3 if i % 2 else 0.0,
            seed=i,
            max_tokens=7 if INTERPRETED else 12,
            checksums=True,
        )
        found.append(Request(f"q{i}", tuple(int(t) for t in rng.integers(0, VOCAB, 4 + 2 * i)), params))
    return found


def one_by_one(kind: str, asked: list[Request]) -> list[Answer]:
    """Alone, no drafts, nothing recorded, nothing padded."""
    backend = backend_of(kind, None, lanes=1, capture=False)
    return [run(backend, [request], Schedule(ahead=False))[0][0] for request in asked]


def recorders() -> dict[str, GraphCache]:
    if DEVICE == "cpu":
        return {"replays": ReplayedWork()}
    return {"straight": NoCapture(), "graphs": CudaGraphs(torch.device(DEVICE))}


@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_turn_has_the_bits_of_a_plain_one(kind: str) -> None:
    asked = requests()
    expected = one_by_one(kind, asked)
    assert all(answer.error is None for answer in expected)
    drafts = Clairvoyant({r.id: a.tokens for r, a in zip(asked, expected, strict=True)}, VOCAB, silent_every=0)
    trees = dataclasses.replace(drafts, tree=True)
    for name, recorder in recorders().items():
        backend, replayed = backend_of(kind, recorder), [0]
        if DEVICE != "cpu":
            backend.warm_up(lambda line: None, drafts=7)
        for label, schedule in (
            ("batched", Schedule(arrivals=(0, 4, 5))),
            ("drafts", Schedule(proposer=drafts, arrivals=(0, 0, 2))),
            ("trees", Schedule(proposer=trees)),
        ):
            got, stats = run(backend, asked, schedule)
            assert got == expected, (name, label)
            if label != "batched":
                assert 0 < stats.accepted_tokens < stats.draft_tokens, (name, label)
            if isinstance(recorder, ReplayedWork):
                replayed.append(recorder.replayed)
        if isinstance(recorder, ReplayedWork):
            assert 2 < replayed[1] < replayed[-1], replayed
        assert backend.graph_runner is not None
        assert backend.graph_runner.started_ahead > 1
        if isinstance(recorder, CudaGraphs):
            assert len(recorder) > 2


def calm(count: int, *, max_tokens: int, length: int = 12) -> list[Request]:
    """Sampled requests that stand before the end of a page, every other one with penalties."""
    rng = np.random.default_rng(4)
    found = []
    for i in range(count):
        penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.2} if i % 2 else {}
        params = SamplingParams(temperature=0.9, max_tokens=max_tokens, checksums=True, seed=i, **penalties)
        found.append(Request(f"c{i}", tuple(int(t) for t in rng.integers(0, VOCAB, length + i)), params))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_that_begins_before_its_tokens_are_known_has_the_bits_of_a_plain_one(kind: str) -> None:
    """One request ends at a stop id that nobody foresaw while another goes on over the end of its page and a third arrives; on
    an accelerator, one is cancelled, and pages are so few that somebody is driven out."""
    asked = calm(3, max_tokens=7 if INTERPRETED else 40)
    full = one_by_one(kind, asked)
    stop = frozenset({full[0].tokens[3]})
    asked[0] = dataclasses.replace(asked[0], params=dataclasses.replace(asked[0].params, stop_ids=stop))
    expected = one_by_one(kind, asked)
    assert expected[0].finish == "stop"
    drafts = Clairvoyant({r.id: a.tokens for r, a in zip(asked, expected, strict=True)}, VOCAB, silent_every=2, lie_every=3)
    schedules = {"arrivals": Schedule(arrivals=(0, 0, 5))}
    if not INTERPRETED:
        schedules["small turns"] = Schedule(arrivals=(0, 3, 9), turn_tokens=64)
        schedules["mixed with drafts"] = Schedule(proposer=drafts, arrivals=(0, 2, 7))
        schedules["prefixes"] = Schedule(reuse=True, arrivals=(0, 0, 30))
    for kept, recorder in recorders().items():
        backend = backend_of(kind, recorder)
        for name, schedule in schedules.items():
            assert backend.graph_runner is not None
            before = backend.graph_runner.started_ahead
            got, stats = run(backend, asked, schedule)
            assert [dataclasses.replace(a, cached=0) for a in got] == expected, name
            assert backend.graph_runner.started_ahead > before, name
            assert stats.steps_ahead == backend.graph_runner.started_ahead - before, name
        if INTERPRETED:
            continue
        got, _ = run(backend, asked, Schedule(cancels=((12, 1),)))
        assert [got[0], got[2]] == [expected[0], expected[2]]
        assert got[1].checksums == expected[1].checksums[: len(got[1].checksums)]
        got, stats = run(backend_of(kind, recorders()[kept], pages=7), asked, Schedule())
        assert got == expected
        assert stats.preemptions
        assert stats.steps_ahead


@pytest.mark.parametrize("fault", ["stale token", "stepped twice", "short history"])
def test_a_planted_fault_of_a_turn_ahead_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from onedraw.backends.torch.ops.cuda.ops import TritonOps
    from onedraw.backends.torch.runner import graph_runner

    asked = calm(2, max_tokens=5, length=5)[1:]
    expected = one_by_one("hybrid", asked)
    match fault:
        case "stale token":
            monkeypatch.setattr(TritonOps, "keep_last_tokens", lambda self, samples, lanes, last: None)
        case "stepped twice":
            real = graph_runner.GraphRunner.result

            def twice(self, laid, sampled):  # type: ignore[no-untyped-def]
                first = real(self, laid, sampled)
                if laid.step.plan.rows[0].awaits_token:
                    self._layers(self._stages[-1], laid.stages[-1], None, laid.step.probe)
                return first

            monkeypatch.setattr(graph_runner.GraphRunner, "result", twice)
        case "short history":
            monkeypatch.setattr(
                graph_runner,
                "sampling_positions",
                lambda rows: [SamplingPosition(r.lane, r.params, r.history, (), r.request_id) for r in rows],
            )
    got, stats = run(backend_of("hybrid", NoCapture()), asked, Schedule())
    assert stats.steps_ahead
    assert got != expected


@pytest.mark.parametrize("room", [64, 800])  # for nothing; for all but what became known since the last turn
def test_wishes_that_are_too_many_to_be_recorded_change_nothing(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers run already when the choosing is laid out: it goes on without its arena."""
    from onedraw.backends.torch.runner import graph_runner

    asked = calm(2, max_tokens=4, length=5)[1:]
    expected = one_by_one("hybrid", asked)
    drafts = Clairvoyant({r.id: a.tokens for r, a in zip(asked, expected, strict=True)}, VOCAB, silent_every=2)
    monkeypatch.setattr(graph_runner, "SAMPLING_BYTES", room)
    recorder = next(iter(recorders().values()))
    got, stats = run(backend_of("hybrid", recorder), asked, Schedule(proposer=drafts))
    assert got == expected
    assert stats.accepted_tokens


@pytest.mark.skipif(DEVICE != "cpu", reason="what shares memory on a device is luck")
def test_choosing_that_reads_the_memory_of_the_layers_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what the layers left stays where other recorded works put theirs."""
    from onedraw.backends.torch.model.transformer import ResidualStream
    from onedraw.backends.torch.runner.graph_runner import GraphRunner

    asked = calm(1, max_tokens=4, length=5)
    expected = one_by_one("hybrid", asked)
    real = GraphRunner._layers

    def shares(self, stage, own, entered, probe):  # type: ignore[no-untyped-def]
        stream, probe = real(self, stage, own, entered, probe)
        return ResidualStream(stream.x.clone(), None, 0), probe

    monkeypatch.setattr(GraphRunner, "_layers", shares)
    assert run(backend_of("hybrid", ReplayedWork()), asked, Schedule())[0] != expected


def test_numbers_that_overflow_end_their_rows_and_name_the_layer_though_a_turn_is_behind_them() -> None:
    asked = calm(2, max_tokens=6, length=5)
    backend = backend_of("hybrid", next(iter(recorders().values())), dtype="f16")
    allocator = Allocator(backend.capacity, reuse=False)
    scheduler = Scheduler(allocator=allocator, capacity=backend.capacity, speculator=Speculator(), step_tokens=64)
    engine = Engine(backend=backend, scheduler=scheduler)
    heard: list[Event] = []
    for request in asked:
        engine.add(request, heard.append)
    for _ in range(3):
        engine.step()
    norm = backend.model.layers[1].attn_norm
    kept = norm.clone()
    norm.fill_(torch.inf)
    while engine.busy:
        engine.step()
    assert engine.stats().steps_ahead > 1
    errors = {event.request_id: event.error for event in heard if event.error is not None}
    assert set(errors) == {"c0", "c1"}
    assert all(isinstance(error, NonFiniteLogits) and "layer 1 " in str(error) for error in errors.values())
    allocator.audit_all()
    norm.copy_(kept)
    assert all(answer.error is None for answer in run(backend, asked, Schedule())[0])


@pytest.mark.skipif(DEVICE == "cpu", reason="nothing is recorded without a CUDA device")
def test_what_was_rehearsed_is_not_recorded_again_and_leaves_nothing_behind() -> None:
    """One row is rehearsed as far as the context goes."""
    asked = [dataclasses.replace(request, id=f"far{i}") for i, request in enumerate(calm(2, max_tokens=6, length=1020))][:1]
    plain_one = backend_of("hybrid", None, lanes=1, pages=80, max_context=4096, capture=False)
    expected = [run(plain_one, asked, Schedule(ahead=False))[0][0]]
    recorder = CudaGraphs(torch.device(DEVICE))
    backend = backend_of("hybrid", recorder, pages=80, max_context=4096)
    backend.warm_up(lambda line: None)
    asked_plainly = [dataclasses.replace(r, params=dataclasses.replace(r.params, checksums=False)) for r in asked]
    before = len(recorder)
    got, stats = run(backend, asked_plainly, Schedule())
    assert stats.steps_ahead > 3
    assert len(recorder) == before >= 12
    assert got[0].tokens == expected[0].tokens
    assert run(backend, asked, Schedule())[0] == expected


def test_drafts_that_were_rehearsed_are_not_recorded_again_and_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to seven of one row, in either reach; the interpreter has one of the ways to choose."""
    from onedraw.backends.torch.runner import graph_runner

    if INTERPRETED:
        monkeypatch.setattr(graph_runner, "WARM_UP_PARAMS", graph_runner.WARM_UP_PARAMS[:1])
    asked = [dataclasses.replace(request, params=SamplingParams(temperature=0.0, max_tokens=8)) for request in requests(1)]
    expected = one_by_one("hybrid", asked)
    recorder: ReplayedWork | CudaGraphs = ReplayedWork() if DEVICE == "cpu" else CudaGraphs(torch.device(DEVICE))
    backend, lines = backend_of("hybrid", recorder, lanes=1), list[str]()
    backend.warm_up(lines.append, drafts=7)
    assert lines[0].startswith("capturing CUDA graphs, 1 of ")
    before = recorded(recorder)
    got, stats = run(backend, asked, Schedule(proposer=Clairvoyant({asked[0].id: expected[0].tokens}, VOCAB, silent_every=0)))
    assert got == expected
    assert stats.accepted_tokens > 0
    assert recorded(recorder) == before


def recorded(recorder: ReplayedWork | CudaGraphs) -> int:
    return len(recorder._works if isinstance(recorder, ReplayedWork) else recorder)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes a second for every turn")
@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_a_checkpoint_of_a_family_decodes_alike_with_turns_ahead_and_without(name: str) -> None:
    """Four at once over several pages, some of them with penalties, all of them stopped by ids that nobody foresaw."""
    from tests.device.test_families import backend_of as family_of

    asked = [
        dataclasses.replace(request, params=dataclasses.replace(request.params, stop_ids=frozenset(range(0, 512, 23))))
        for request in calm(6, max_tokens=60, length=30)
    ]
    lonely = family_of(name, lanes=1)
    expected = plain(lambda: lonely, asked)
    assert len({len(answer.tokens) for answer in expected}) > 2
    for label, schedule in (
        ("alone", Schedule(arrivals=tuple(range(0, 600, 100)))),
        ("batched", Schedule()),
        ("arriving", Schedule(arrivals=(0, 2, 5, 7, 11, 17), turn_tokens=64, reuse=True)),
    ):
        got, stats = run(family_of(name), asked, schedule)
        assert [dataclasses.replace(a, cached=0) for a in got] == expected, label
        assert stats.steps_ahead > 10, label
