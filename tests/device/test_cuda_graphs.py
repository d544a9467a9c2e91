"""Padded, captured and replayed steps give the same tokens and checksums as eager steps.

On a GPU with CUDA graphs. Without one under Triton's interpreter, where replaying a step calls the work of its first run again
(`ReplayedWork`): inputs that are not in the staging buffers are then stale, and padding that is not an exact no-op shows.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from onedraw.backends.sampled_rows import SamplingPosition
from onedraw.backends.torch.backend import TorchBackend
from onedraw.backends.torch.runner.cuda_graphs import CudaGraphs, GraphCache, NoCapture
from onedraw.backends.torch.runner.eager_runner import EagerInputs
from onedraw.backends.torch.runner.step import Step
from onedraw.checkpoints.random_weights import random_weights
from onedraw.engine.engine import Engine, Event
from onedraw.engine.scheduler import Scheduler
from onedraw.errors import NonFiniteLogits
from onedraw.memory.allocator import Allocator
from onedraw.models.spec import AttentionSpec, DeltaSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from onedraw.speculation.speculator import Speculator
from onedraw.text.constraints.base import token_mask
from onedraw.types import DryParams, Plan, Request, SamplingParams, TokenMask
from tests.laws.harness import Answer, KnownAnswerProposer, LiveConstraint, Schedule, plain, run
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
KINDS = ["hybrid"] if INTERPRETED else list(SPECS)  # the interpreter takes a second per step


def backend_of(
    kind: str,
    graph_cache: GraphCache | None,
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
        graph_cache=graph_cache,
        capture=capture,
    )


def requests(count: int = 3) -> list[Request]:
    rng = np.random.default_rng(3)
    made = []
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
        made.append(Request(f"q{i}", tuple(int(t) for t in rng.integers(0, VOCAB, 4 + 2 * i)), params))
    return made


def run_alone(kind: str, submitted: list[Request]) -> list[Answer]:
    """One request at a time, without drafts, capture and padding."""
    backend = backend_of(kind, None, lanes=1, capture=False)
    return [run(backend, [request], Schedule(async_scheduling=False))[0][0] for request in submitted]


def graph_caches() -> dict[str, GraphCache]:
    if DEVICE == "cpu":
        return {"replays": ReplayedWork()}
    return {"straight": NoCapture(), "graphs": CudaGraphs(torch.device(DEVICE))}


@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_have_the_bits_of_eager_steps(kind: str) -> None:
    submitted = requests()
    expected = run_alone(kind, submitted)
    assert all(answer.error is None for answer in expected)
    drafts = KnownAnswerProposer({r.id: a.tokens for r, a in zip(submitted, expected, strict=True)}, VOCAB, empty_every=0)
    trees = dataclasses.replace(drafts, tree=True)
    for name, graph_cache in graph_caches().items():
        backend, replayed = backend_of(kind, graph_cache), [0]
        if DEVICE != "cpu":
            backend.warm_up(lambda line: None, drafts=7)
        for label, schedule in (
            ("batched", Schedule(arrivals=(0, 4, 5))),
            ("drafts", Schedule(proposer=drafts, arrivals=(0, 0, 2))),
            ("trees", Schedule(proposer=trees)),
        ):
            got, stats = run(backend, submitted, schedule)
            assert got == expected, (name, label)
            if label != "batched":
                assert 0 < stats.accepted_tokens < stats.draft_tokens, (name, label)
            if isinstance(graph_cache, ReplayedWork):
                replayed.append(graph_cache.replayed)
        if isinstance(graph_cache, ReplayedWork):
            assert 2 < replayed[1] < replayed[-1], replayed
        assert backend.graph_runner is not None
        assert backend.graph_runner.started_ahead > 1
        if isinstance(graph_cache, CudaGraphs):
            assert len(graph_cache) > 2


def sampled_requests(count: int, *, max_tokens: int, length: int = 12) -> list[Request]:
    """Sampled requests whose prompts end shortly before a page does, every other one with penalties."""
    rng = np.random.default_rng(4)
    made = []
    for i in range(count):
        penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.2} if i % 2 else {}
        params = SamplingParams(temperature=0.9, max_tokens=max_tokens, checksums=True, seed=i, **penalties)
        made.append(Request(f"c{i}", tuple(int(t) for t in rng.integers(0, VOCAB, length + i)), params))
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_steps_launched_ahead_have_the_bits_of_eager_steps(kind: str) -> None:
    """The tokens of a step launched ahead are not yet known on the host. One request ends at a stop id, another continues past
    the end of its page, and a third arrives; on a GPU one is cancelled, too, and pages are few enough to preempt one."""
    submitted = sampled_requests(3, max_tokens=7 if INTERPRETED else 40)
    full = run_alone(kind, submitted)
    stop = frozenset({full[0].tokens[3]})
    submitted[0] = dataclasses.replace(submitted[0], params=dataclasses.replace(submitted[0].params, stop_ids=stop))
    expected = run_alone(kind, submitted)
    assert expected[0].finish == "stop"
    drafts = KnownAnswerProposer(
        {r.id: a.tokens for r, a in zip(submitted, expected, strict=True)}, VOCAB, empty_every=2, wrong_every=3
    )
    schedules = {"arrivals": Schedule(arrivals=(0, 0, 5))}
    if not INTERPRETED:
        schedules["small steps"] = Schedule(arrivals=(0, 3, 9), step_tokens=64)
        schedules["mixed with drafts"] = Schedule(proposer=drafts, arrivals=(0, 2, 7))
        schedules["prefixes"] = Schedule(reuse=True, arrivals=(0, 0, 30))
    for kept, graph_cache in graph_caches().items():
        backend = backend_of(kind, graph_cache)
        for name, schedule in schedules.items():
            assert backend.graph_runner is not None
            before = backend.graph_runner.started_ahead
            got, stats = run(backend, submitted, schedule)
            assert [dataclasses.replace(a, cached=0) for a in got] == expected, name
            assert backend.graph_runner.started_ahead > before, name
            assert stats.steps_ahead == backend.graph_runner.started_ahead - before, name
        if INTERPRETED:
            continue
        got, _ = run(backend, submitted, Schedule(cancels=((12, 1),)))
        assert [got[0], got[2]] == [expected[0], expected[2]]
        assert got[1].checksums == expected[1].checksums[: len(got[1].checksums)]
        got, stats = run(backend_of(kind, graph_caches()[kept], pages=7), submitted, Schedule())
        assert got == expected
        assert stats.preemptions
        assert stats.steps_ahead


class RuleOfHistory:
    """A constraint that allows a third of the tokens, which third depends on every token before. Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> TokenMask:
        self.calls += 1
        turn = sum((i + 1) * token for i, token in enumerate((*output, *drafts)))
        return token_mask([token for token in range(VOCAB) if (token + turn) % 3 == 0], VOCAB)


def requests_of_every_kind(max_tokens: int) -> list[Request]:
    """A plain request beside requests with logprobs, constraints and rules that the host applies."""
    kinds: list[tuple[dict[str, Any], bool]] = [
        ({"temperature": 0.8}, False),
        ({"top_p": 0.8, "logprobs": 3, "logprobs_mode": "processed", "logprob_token_ids": (7, 2)}, True),
        ({"logprobs": 5, "logprob_token_ids": (VOCAB - 1,), "frequency_penalty": 0.4}, False),
        ({"temperature": 1.3}, True),
    ]
    if not INTERPRETED:
        kinds += [
            ({"temperature": 0.0, "logprobs": 0}, False),
            ({"dry": DryParams(0.8, allowed_length=1), "bad_words": ((3, 4), (7,)), "logprobs": 40}, False),
            ({"logit_bias": ((5, 3.0),), "min_tokens": 4, "stop_ids": frozenset({5}), "logprobs": 128}, True),
        ]
    rng = np.random.default_rng(5)
    made = []
    for i, (given, constrained) in enumerate(kinds):
        params = SamplingParams(**{"seed": i, "max_tokens": max_tokens, "checksums": True, **given})
        prompt = tuple(int(t) for t in rng.integers(0, VOCAB, 5 + i))
        made.append(Request(f"k{i}", prompt, params, constraint=LiveConstraint(RuleOfHistory()) if constrained else None))
    return made


def eager_plans(backend: TorchBackend) -> list[Plan]:
    """The plans that the backend will not run as captured steps."""
    found: list[Plan] = []
    real = backend.eager_runner.lay_out

    def lay_out(step: Step) -> EagerInputs:
        found.append(step.plan)
        return real(step)

    backend.eager_runner.lay_out = lay_out  # type: ignore[method-assign]
    return found


def calls_of_constraints(submitted: list[Request]) -> int:
    return sum(r.constraint.constraint.calls for r in submitted if isinstance(r.constraint, LiveConstraint))  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_logprobs_and_constraints_have_the_bits_of_eager_steps_in_captured_ones(kind: str) -> None:
    """Also in steps launched before the tokens are known from which masks are computed, and with drafts."""
    submitted = requests_of_every_kind(4 if INTERPRETED else 12)
    expected = run_alone(kind, submitted)
    assert all(answer.error is None for answer in expected)
    assert all(any(len(found.top) > 2 and found.asked for found in expected[i].logprobs) for i in (1, 2))
    known = {r.id: a.tokens for r, a in zip(submitted, expected, strict=True)}
    drafts = KnownAnswerProposer(known, VOCAB, empty_every=0, wrong_every=2)
    schedules = {"batched": Schedule(), "drafts": Schedule(proposer=drafts)}
    if not INTERPRETED:
        schedules["trees"] = Schedule(proposer=dataclasses.replace(drafts, tree=True))
        schedules["arrivals"] = Schedule(arrivals=(0, 3, 6, 9, 12), step_tokens=64)
    for name, graph_cache in graph_caches().items():
        backend = backend_of(kind, graph_cache, lanes=len(submitted))
        eager = eager_plans(backend)
        for label, schedule in schedules.items():
            before = calls_of_constraints(submitted)
            got, stats = run(backend, submitted, schedule)
            assert got == expected, (name, label)
            assert stats.mixed_logprobs, (name, label)
            assert stats.mixed_constraints, (name, label)
            assert calls_of_constraints(submitted) > before
            if "drafts" in label or "trees" in label:
                assert 0 < stats.accepted_tokens < stats.draft_tokens, (name, label)
            else:
                assert stats.steps_ahead > 1, (name, label)
        # Rows of prompts alone are not captured, and what shares a step with them.
        assert all(any(len(row.tokens) > 1 for row in plan.rows) for plan in eager)


@pytest.mark.parametrize("fault", ["masks of neighbours", "logprobs of neighbours", "masks before the last token"])
def test_a_planted_fault_in_what_rows_request_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from onedraw.backends.torch import backend as torch_backend
    from onedraw.backends.torch.ops.cuda import sampler

    submitted = requests_of_every_kind(3 if INTERPRETED else 8)[:4]
    expected = run_alone("hybrid", submitted)
    match fault:
        case "masks of neighbours":
            real = sampler.TokenMasks.rows
            monkeypatch.setattr(sampler.TokenMasks, "rows", lambda self, count: np.roll(real(self, count), 1))
        case "logprobs of neighbours":
            write = sampler.write_logprobs

            def shifted(samples, logits, result, requests, **sizes):  # type: ignore[no-untyped-def]
                write(samples, logits, dataclasses.replace(result, tokens=result.tokens.roll(1)), requests, **sizes)

            monkeypatch.setattr(sampler, "write_logprobs", shifted)
        case "masks before the last token":
            monkeypatch.setattr(torch_backend, "PENDING_TOKEN", None)  # sampling then starts with the layers
    got, stats = run(backend_of("hybrid", NoCapture(), lanes=4), submitted, Schedule())
    assert stats.steps_ahead
    assert got != expected


@pytest.mark.parametrize("fault", ["stale token", "state updated twice", "short history"])
def test_a_planted_fault_in_steps_launched_ahead_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from onedraw.backends.torch.ops.cuda.ops import TritonOps
    from onedraw.backends.torch.runner import graph_runner

    submitted = sampled_requests(2, max_tokens=5, length=5)[1:]
    expected = run_alone("hybrid", submitted)
    match fault:
        case "stale token":
            monkeypatch.setattr(TritonOps, "keep_last_tokens", lambda self, samples, lanes, last: None)
        case "state updated twice":
            real = graph_runner.GraphRunner.commit

            def twice(self, laid, sampled):  # type: ignore[no-untyped-def]
                first = real(self, laid, sampled)
                if laid.step.plan.rows[0].awaits_token:
                    self._layers(self._stages[-1], laid.stages[-1], None, laid.step.probe)
                return first

            monkeypatch.setattr(graph_runner.GraphRunner, "commit", twice)
        case "short history":
            monkeypatch.setattr(
                graph_runner,
                "sampling_positions",
                lambda rows: [SamplingPosition(r.lane, r.params, r.history, (), r.request_id) for r in rows],
            )
    got, stats = run(backend_of("hybrid", NoCapture()), submitted, Schedule())
    assert stats.steps_ahead
    assert got != expected


@pytest.mark.parametrize("size", [64, 800])  # bytes: for nothing; for all but the count increments
def test_sampling_inputs_that_exceed_their_staging_buffer_change_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers already run when the sampling inputs are staged: sampling then runs eagerly."""
    from onedraw.backends.torch.runner import graph_runner

    submitted = sampled_requests(2, max_tokens=4, length=5)[1:]
    expected = run_alone("hybrid", submitted)
    drafts = KnownAnswerProposer({r.id: a.tokens for r, a in zip(submitted, expected, strict=True)}, VOCAB, empty_every=2)
    monkeypatch.setattr(graph_runner, "SAMPLING_BYTES", size)
    graph_cache = next(iter(graph_caches().values()))
    got, stats = run(backend_of("hybrid", graph_cache), submitted, Schedule(proposer=drafts))
    assert got == expected
    assert stats.accepted_tokens


@pytest.mark.skipif(DEVICE != "cpu", reason="on a device it is not deterministic which captures share memory")
def test_sampling_that_reads_memory_shared_between_captures_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the hidden states stay in memory that other captured work overwrites."""
    from onedraw.backends.torch.runner.graph_runner import GraphRunner
    from onedraw.backends.torch.runner.pipeline import ResidualStream

    submitted = sampled_requests(1, max_tokens=4, length=5)
    expected = run_alone("hybrid", submitted)
    real = GraphRunner._layers

    def without_copy(self, stage, own, entered, probe):  # type: ignore[no-untyped-def]
        stream, probe = real(self, stage, own, entered, probe)
        return ResidualStream(stream.x.clone(), None, 0), probe

    monkeypatch.setattr(GraphRunner, "_layers", without_copy)
    assert run(backend_of("hybrid", ReplayedWork()), submitted, Schedule())[0] != expected


def test_overflow_ends_its_rows_and_names_the_layer_with_a_step_launched_ahead() -> None:
    submitted = sampled_requests(2, max_tokens=6, length=5)
    backend = backend_of("hybrid", next(iter(graph_caches().values())), dtype="f16")
    allocator = Allocator(backend.capacity, reuse=False)
    scheduler = Scheduler(allocator=allocator, capacity=backend.capacity, speculator=Speculator(), step_tokens=64)
    engine = Engine(backend=backend, scheduler=scheduler)
    events: list[Event] = []
    for request in submitted:
        engine.add(request, events.append)
    for _ in range(3):
        engine.step()
    norm = backend.model.layers[1].attn_norm
    kept = norm.clone()
    norm.fill_(torch.inf)
    while engine.busy:
        engine.step()
    assert engine.stats().steps_ahead > 1
    errors = {event.request_id: event.error for event in events if event.error is not None}
    assert set(errors) == {"c0", "c1"}
    assert all(isinstance(error, NonFiniteLogits) and "layer 1 " in str(error) for error in errors.values())
    allocator.audit_all()
    norm.copy_(kept)
    assert all(answer.error is None for answer in run(backend, submitted, Schedule())[0])


@pytest.mark.skipif(DEVICE == "cpu", reason="capture needs a CUDA device")
def test_warmed_up_steps_are_not_captured_again_and_change_no_state() -> None:
    """One row is warmed up to the end of the context."""
    submitted = [
        dataclasses.replace(request, id=f"far{i}") for i, request in enumerate(sampled_requests(2, max_tokens=6, length=1020))
    ][:1]
    backend_alone = backend_of("hybrid", None, lanes=1, pages=80, max_context=4096, capture=False)
    expected = [run(backend_alone, submitted, Schedule(async_scheduling=False))[0][0]]
    graph_cache = CudaGraphs(torch.device(DEVICE))
    backend = backend_of("hybrid", graph_cache, pages=80, max_context=4096)
    backend.warm_up(lambda line: None)
    without_checksums = [dataclasses.replace(r, params=dataclasses.replace(r.params, checksums=False)) for r in submitted]
    before = len(graph_cache)
    got, stats = run(backend, without_checksums, Schedule())
    assert stats.steps_ahead > 3
    assert len(graph_cache) == before >= 12
    assert got[0].tokens == expected[0].tokens
    assert run(backend, submitted, Schedule())[0] == expected


def test_warmed_up_verify_steps_are_not_captured_again_and_change_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to seven drafts of one row; under the interpreter with one kind of sampling parameters."""
    from onedraw.backends.torch.runner import graph_runner

    if INTERPRETED:
        monkeypatch.setattr(graph_runner, "WARM_UP_PARAMS", graph_runner.WARM_UP_PARAMS[:1])
    submitted = [dataclasses.replace(request, params=SamplingParams(temperature=0.0, max_tokens=8)) for request in requests(1)]
    expected = run_alone("hybrid", submitted)
    graph_cache: ReplayedWork | CudaGraphs = ReplayedWork() if DEVICE == "cpu" else CudaGraphs(torch.device(DEVICE))
    backend, lines = backend_of("hybrid", graph_cache, lanes=1), list[str]()
    backend.warm_up(lines.append, drafts=7)
    assert lines[0].startswith("capturing CUDA graphs, 1 of ")
    before = capture_count(graph_cache)
    got, stats = run(
        backend, submitted, Schedule(proposer=KnownAnswerProposer({submitted[0].id: expected[0].tokens}, VOCAB, empty_every=0))
    )
    assert got == expected
    assert stats.accepted_tokens > 0
    assert capture_count(graph_cache) == before


def capture_count(graph_cache: ReplayedWork | CudaGraphs) -> int:
    return len(graph_cache._works if isinstance(graph_cache, ReplayedWork) else graph_cache)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes a second per step")
@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_model_families_decode_alike_with_and_without_steps_launched_ahead(name: str) -> None:
    """Four at once over several pages, some with penalties, all ended by stop ids."""
    from tests.device.test_families import backend_of as family_of

    submitted = [
        dataclasses.replace(request, params=dataclasses.replace(request.params, stop_ids=frozenset(range(0, 512, 23))))
        for request in sampled_requests(6, max_tokens=60, length=30)
    ]
    alone = family_of(name, lanes=1)
    expected = plain(lambda: alone, submitted)
    assert len({len(answer.tokens) for answer in expected}) > 2
    for label, schedule in (
        ("alone", Schedule(arrivals=tuple(range(0, 600, 100)))),
        ("batched", Schedule()),
        ("arriving", Schedule(arrivals=(0, 2, 5, 7, 11, 17), step_tokens=64, reuse=True)),
    ):
        got, stats = run(family_of(name), submitted, schedule)
        assert [dataclasses.replace(a, cached=0) for a in got] == expected, label
        assert stats.steps_ahead > 10, label
