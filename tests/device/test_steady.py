"""Turns that are padded, recorded and replayed: the same tokens and checksums as turns that run kernel by kernel.

On an accelerator with CUDA graphs. Without one under Triton's interpreter, where a recorded turn is its first work called again
(`Replays`): what does not come through the arena is then stale, and padding that is no exact no-op shows.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from onedraw.backends.answers import Position
from onedraw.backends.torch.backend import TorchBackend
from onedraw.backends.torch.feed import Arena
from onedraw.backends.torch.graphs import Graphs, Recorder, Replays, Straight
from onedraw.backends.torch.line import Line
from onedraw.backends.torch.ops import TorchOps
from onedraw.backends.torch.part import Part
from onedraw.backends.torch.stack import Site
from onedraw.checkpoints.random import random_weights
from onedraw.models.spec import AttentionSpec, DeltaSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from onedraw.types import Request, SamplingParams
from tests.laws.harness import Answer, Clairvoyant, Schedule, plain, run

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


SPECS = {
    "hybrid": spec_of(DELTA, ATTENTION),
    "attention": spec_of(ATTENTION),
    "windows": spec_of(ATTENTION, WINDOWED),
    "three": spec_of(DELTA, WINDOWED, ATTENTION),
}
KINDS = ["hybrid"] if INTERPRETED else list(SPECS)  # the interpreter takes a second for every turn
CUT = [("hybrid", (1,))] if INTERPRETED else [("three", (1,)), ("three", (1, 2))]
WAYS = [*((kind, ()) for kind in KINDS), *CUT]  # where the layers are divided into stages


def backend_of(
    kind: str,
    recorder: Recorder | None,
    *,
    lanes: int = 3,
    pages: int = 60,
    cuts: tuple[int, ...] = (),
    given: Sequence[Site] = (),
    **more: Any,
) -> TorchBackend:
    """`cuts`: where the layers are divided into stages, all on the one device, unless others are given."""
    from onedraw.backends.torch.kernels.cuda import TritonOps

    spec = SPECS[kind]
    pdl = DEVICE != "cpu" and torch.cuda.get_device_capability() >= (9, 0)
    sites = [Site(torch.device(DEVICE), TritonOps(torch.device(DEVICE), pdl=pdl), stop) for stop in (*cuts, None)]
    return TorchBackend(
        spec,
        random_weights(spec, seed=1),
        dtype=DTYPE,
        sites=given or sites,
        lanes=lanes,
        pages=pages,
        page_size=16,
        max_context=256,
        drafts=64,
        check=False,
        recorder=recorder,
        **more,
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
    backend = backend_of(kind, None, lanes=1)
    backend._steady = None
    return [run(backend, [request], Schedule(ahead=False))[0][0] for request in asked]


def recorders() -> dict[str, Recorder]:
    if DEVICE == "cpu":
        return {"replays": Replays()}
    return {"straight": Straight(), "graphs": Graphs(torch.device(DEVICE))}


@pytest.mark.parametrize(("kind", "cuts"), WAYS)
def test_a_recorded_turn_has_the_bits_of_a_plain_one(kind: str, cuts: tuple[int, ...]) -> None:
    """On one stage and on several: the plain turns are those of the whole."""
    asked = requests()
    expected = one_by_one(kind, asked)
    assert all(answer.error is None for answer in expected)
    drafts = Clairvoyant({r.id: a.tokens for r, a in zip(asked, expected, strict=True)}, VOCAB, silent_every=0)
    trees = dataclasses.replace(drafts, tree=True)
    for name, recorder in recorders().items():
        backend, replayed = backend_of(kind, recorder, cuts=cuts), [0]
        if DEVICE != "cpu":
            backend.rehearse(lambda line: None)
        for label, schedule in (
            ("batched", Schedule(arrivals=(0, 4, 5))),
            ("drafts", Schedule(proposer=drafts, arrivals=(0, 0, 2))),
            ("trees", Schedule(proposer=trees)),
        ):
            if INTERPRETED and cuts and label == "drafts":
                continue  # trees bring home what chains do, and more
            for _ in range(1 if label == "batched" or (INTERPRETED and not cuts) else 2):  # the second replays what the first did
                got, stats = run(backend, asked, schedule)
                assert got == expected, (name, label)
            if label != "batched":
                assert 0 < stats.accepted_tokens < stats.draft_tokens, (name, label)
            if isinstance(recorder, Replays | Graphs):
                replayed.append(recorder.replayed)
        if isinstance(recorder, Replays | Graphs):
            assert 2 < replayed[1] < replayed[-1], replayed
        assert backend._steady is not None
        assert backend._steady.awaited > 1
        if isinstance(recorder, Graphs):
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


@pytest.mark.parametrize(("kind", "cuts"), [(kind, ()) for kind in KINDS] if INTERPRETED else WAYS)
def test_a_turn_that_begins_before_its_tokens_are_known_has_the_bits_of_a_plain_one(kind: str, cuts: tuple[int, ...]) -> None:
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
        backend = backend_of(kind, recorder, cuts=cuts)
        for name, schedule in schedules.items():
            assert backend._steady is not None
            before = backend._steady.awaited
            got, stats = run(backend, asked, schedule)
            assert [dataclasses.replace(a, cached=0) for a in got] == expected, name
            assert backend._steady.awaited > before, name
            assert stats.turns_ahead == backend._steady.awaited - before, name
        if INTERPRETED:
            continue
        got, _ = run(backend, asked, Schedule(cancels=((12, 1),)))
        assert [got[0], got[2]] == [expected[0], expected[2]]
        assert got[1].checksums == expected[1].checksums[: len(got[1].checksums)]
        got, stats = run(backend_of(kind, recorders()[kept], pages=7, cuts=cuts), asked, Schedule())
        assert got == expected
        assert stats.preemptions
        assert stats.turns_ahead


@pytest.mark.parametrize("fault", ["stale token", "stepped twice", "short history"])
def test_a_planted_fault_of_a_turn_ahead_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from onedraw.backends.torch import steady
    from onedraw.backends.torch.kernels.cuda import TritonOps

    asked = calm(2, max_tokens=5, length=5)[1:]
    expected = one_by_one("hybrid", asked)
    match fault:
        case "stale token":
            monkeypatch.setattr(TritonOps, "leave", lambda self, answers, lanes, last: None)
        case "stepped twice":
            real = steady.SteadyTurns._launch

            def twice(self, laid, watch):  # type: ignore[no-untyped-def]
                first = real(self, laid, watch)
                if laid.positions[0].drafts:  # a row that awaits its token
                    self._work(laid, None, watch)
                return first

            monkeypatch.setattr(steady.SteadyTurns, "_launch", twice)
        case "short history":
            monkeypatch.setattr(
                steady, "positions_of", lambda rows: [Position(r.lane, r.params, r.history, (), r.request_id) for r in rows]
            )
    got, stats = run(backend_of("hybrid", Straight()), asked, Schedule())
    assert stats.turns_ahead
    assert got != expected


def test_a_stage_that_reads_the_arena_of_another_turn_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what the host says to the second stage arrives every other time."""
    asked = requests(1)
    expected = one_by_one("windows", asked)
    real, calls = Part.send, itertools.count()

    def send(self: Part, captures: Hashable) -> Hashable:
        forgets = self._number == 1 and next(calls) % 2 == 1
        with monkeypatch.context() as patch:
            if forgets:
                patch.setattr(Arena, "send", lambda arena: tuple(arena._facts))
            return real(self, captures)

    for kept in recorders():
        assert run(backend_of("windows", recorders()[kept], cuts=(1,)), asked, Schedule())[0] == expected
        with monkeypatch.context() as patch:
            patch.setattr(Part, "send", send)
            assert run(backend_of("windows", recorders()[kept], cuts=(1,)), asked, Schedule())[0] != expected


@pytest.mark.parametrize("last", [False] if INTERPRETED else [False, True])
def test_a_stage_that_records_beside_one_that_does_not_has_the_bits_of_one_that_runs_kernel_by_kernel(last: bool) -> None:
    """A part on the CPU, behind the device's or (`last`) before it."""
    from onedraw.backends.torch.kernels.cuda import TritonOps

    cpu, device = torch.device("cpu"), torch.device(DEVICE)
    order = [(cpu, TorchOps(cpu)), (device, TritonOps(device))] if last else [(device, TritonOps(device)), (cpu, TorchOps(cpu))]
    sites = [Site(*one, stop) for one, stop in zip(order, (1, None), strict=True)]
    asked = requests(2)
    expected: list[Answer] = []
    for records in (False, True):
        recorder = Replays() if DEVICE == "cpu" else Graphs(device)
        backend = backend_of("hybrid", recorder, given=sites)
        backend._narrow = lambda: None  # type: ignore[method-assign]  # the interpreter has no bf16, and f16 is watched
        if not records:
            backend._parts = [None, None]
        got, _ = run(backend, asked, Schedule())
        expected = expected or got
        assert got == expected
        known = {request.id: answer.tokens for request, answer in zip(asked, expected, strict=True)}
        for tree in (True,) if INTERPRETED else (False, True):
            drafts = Clairvoyant(known, VOCAB, silent_every=3, tree=tree)
            got, stats = run(backend, asked, Schedule(proposer=drafts))
            assert got == expected
            assert stats.accepted_tokens
        assert (recorder.replayed > 2) == records
    assert all(answer.error is None for answer in expected)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs one kernel at a time")
@pytest.mark.parametrize("cuts", [(1,), (1, 2)])
@pytest.mark.parametrize("tree", [False, True])
def test_recorded_turns_that_are_under_way_at_once_have_the_bits_of_plain_ones(cuts: tuple[int, ...], tree: bool) -> None:
    """Prompts on the threads of the stages, and beside them as many turns of one row each as there are stages."""
    asked = [dataclasses.replace(request, id=f"{request.id}.{n}") for n in range(3) for request in requests()]
    expected = one_by_one("three", asked)
    drafts = Clairvoyant({r.id: a.tokens for r, a in zip(asked, expected, strict=True)}, VOCAB, silent_every=0, tree=tree)
    stages = len(cuts) + 1
    for schedule in (Schedule(turn_tokens=64), Schedule(proposer=drafts, turn_tokens=64)):
        backend = backend_of("three", None, cuts=cuts, lanes=4, line=Line([lambda: None] * stages), tickets=stages)
        backend._capacity = dataclasses.replace(backend.capacity, ticket_rows=1)
        got, stats = run(backend, asked, schedule)
        assert got == expected
        assert stats.overlapped_turns > 4
        assert backend._steady is not None
        recorder = backend._steady._parts[0]._recorder
        assert isinstance(recorder, Graphs)
        assert recorder.replayed > 20
        backend.close()


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
        assert stats.turns_ahead > 10, label
