"""Measure engine steps through the torch backend on a GPU, including copies and host time, and check the exactness.

    python -m bench.gpu_backend SECTION ... --model random:llama3-8b [--device cuda:0] [--json out.json]

Sections:
    warm_up   how long capturing the CUDA graphs takes before the first request
    decode    sampled decoding through the engine, with and without async scheduling
    steps     verify and tree steps, compared with a decode step
    drafted   speculative decoding with 1, 4 and 8 of 15 drafts kept, compared with plain decoding
    exact     tokens and score checksums of 1,000 positions: alone, verified, batched, preempted, in other prompt chunks
    requested the same comparison for requests with logprobs and constraints
    prefill   arithmetic speed of long prompts
    host      where the host spends its time in a decode step
    long      a decode step at 128K positions
    sampling  the sampler alone
    drafter   a long prompt and drafted steps with the model of --drafter

Weights are random. The time of a step is the median from `submit` to the end of `collect`.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.measuring import capture, device_ms, report, write_figures
from onedraw.backends.memory_plan import DRAFTS_PER_LANE
from onedraw.backends.packing import matrix_sizes
from onedraw.backends.sampled_rows import SamplingPosition
from onedraw.backends.torch.backend import TorchBackend
from onedraw.backends.torch.device import copy_bandwidth, pick_ops
from onedraw.backends.torch.runner.cuda_graphs import CudaGraphs
from onedraw.backends.torch.runner.graph_runner import CapturedStep
from onedraw.backends.torch.runner.staging_buffers import DirectStaging
from onedraw.backends.torch.state.kv_pages import PageStore
from onedraw.backends.torch.state.model_state import ModelState
from onedraw.build.drafters import DrafterBuilder
from onedraw.checkpoints.in_memory import InMemoryCheckpoint
from onedraw.checkpoints.random_weights import named_mixture, open_random
from onedraw.engine.engine import Engine
from onedraw.engine.scheduler import Scheduler
from onedraw.lab.recorded_drafts import RecordedProposer
from onedraw.lab.references import step_bytes
from onedraw.memory.allocator import Allocator
from onedraw.models.registry import ModelInfo, read_model_info
from onedraw.models.spec import AttentionSpec
from onedraw.settings import Settings
from onedraw.speculation.speculator import Speculator
from onedraw.text.fake_tokenizer import fake_tokenizer
from onedraw.types import Draft, History, Plan, Request, Row, SamplingParams, TokenMask

PAGE = 16
CHAIN = tuple(Draft(1, i - 1) for i in range(15))
TREE = tuple(Draft(1 + i, -1 if i < 4 else (i - 4) // 2) for i in range(21))
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=4096)
PENALIZED = SamplingParams(temperature=1.0, repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1, max_tokens=4096)
DRAFTER_PROMPT = 32_000  # prompt tokens before the measured drafted steps
LONG_CONTEXT = 131_000


class Bench:
    """A model with random weights and its backend."""

    positions = 1000  # number of positions that `exact` compares

    def __init__(
        self,
        model: str,
        device: str,
        *,
        context: int,
        lanes: int,
        pages: int,
        drafter: str = "",
        layers: int | None = None,
        kv: str | None = None,
        only: str = "",
    ) -> None:
        begin = time.perf_counter()
        self.name, self.device = model.removeprefix("random:") + ("" if kv is None else f", kv {kv}"), torch.device(device)
        self.only = only
        info = read_model_info(checkpoint := open_random(model))
        self.spec = replace(info.spec, layers=info.spec.layers[:layers])
        self.speed = copy_bandwidth(device) if self.device.type == "cuda" else 1e10
        self.dtype = "bf16" if self.device.type == "cuda" else "f32"
        self.kv = kv or self.dtype
        packed = bool(named_mixture(model)[1])
        products = f"packed-{self.dtype}" if packed else self.dtype
        self.sizes = matrix_sizes(info.weights, products)
        self.plain_sizes = matrix_sizes(info.weights, "bf16")  # two bytes per weight
        self.backend = TorchBackend(
            self.spec,
            info.weights,
            dtype=products,
            activation=self.dtype,
            kv_dtype=kv,
            device=device,
            lanes=lanes,
            pages=pages,
            page_size=PAGE,
            max_context=context,
            drafts=64,
            ops=pick_ops(device, products, cache=Path("build")),
            check=False,
            make_drafter=drafter_maker(drafter, checkpoint, info, context=context, lanes=lanes) if drafter else None,
        )
        self.pages, self.lanes = pages, lanes
        self.cases = [(128, 1), (960, 1), (960, 8), (960, 32)]  # prompt tokens, rows
        self.kept: tuple[int, ...] = (1, 4, 8)  # drafts of 15 that `drafted` keeps per step
        self.async_modes: tuple[bool, ...] = (True, False)  # whether `decode` schedules asynchronously
        report(f"{self.name}: weights created and pages allocated, s", time.perf_counter() - begin)
        report(f"{self.name}: copy bandwidth, TB/s", self.speed / 1e12)

    def bytes(self, *, rows: int, context: int) -> int:
        """Return the bytes that a decode step reads."""
        return step_bytes(self.spec, self.sizes, dtype=self.kv, rows=rows, context=context)

    def plan(self, rows: Sequence[tuple[int, tuple[Draft, ...]]], params: SamplingParams) -> Plan:
        """Return a plan of rows at the given positions; no two rows share a page."""
        planned, page = [], 0
        for lane, (start, drafts) in enumerate(rows):
            need = -(-(start + 1 + len(drafts)) // PAGE)
            history = History((1,) * start, [2])
            row_pages = tuple(range(page, page + need))
            page += need
            planned.append(
                Row(
                    f"r{lane}",
                    lane,
                    tuple(row_pages for _ in self.spec.windows),
                    start,
                    (2,),
                    drafts,
                    start,
                    True,
                    params,
                    history,
                )
            )
        assert page <= self.pages, (page, self.pages)
        return Plan(tuple(planned))

    def step_ms(self, plan: Plan, repeats: int = 30) -> float:
        """Return the median time of a step through the backend; the first five, which compile and capture, do not count."""
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            self.backend.collect(self.backend.submit(plan))
            times.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(times[5:])

    def replay_ms(self, repeats: int = 20) -> float:
        """Return the device time of the last captured step: its layer graph and its sampling graph, without the host."""
        runner = self.backend.graph_runner
        graphs = [] if runner is None else [g for g in getattr(runner.graphs, "_graphs", {}).values() if g is not None]
        if not graphs:
            return float("nan")

        def replay() -> None:
            for graph in graphs[-2:]:
                graph.graph.replay()

        return device_ms(replay, repeats=repeats - 3)

    def engine(
        self, speculator: Speculator, *, pages: int | None = None, step_tokens: int = 2048, async_scheduling: bool = True
    ) -> Engine:
        capacity = self.backend.capacity
        capacity = replace(capacity, async_scheduling=async_scheduling and capacity.async_scheduling)
        if pages is not None:
            capacity = replace(capacity, groups=tuple(replace(group, pages=pages) for group in capacity.groups))
        allocator = Allocator(capacity, reuse=False)
        return Engine(
            backend=self.backend,
            scheduler=Scheduler(allocator=allocator, capacity=capacity, speculator=speculator, step_tokens=step_tokens),
        )

    def answers(self, requests: Sequence[Request], engine: Engine) -> tuple[list[list[Any]], list[float]]:
        """Run the requests; return the (token, checksum) pairs of each and the seconds of every step."""
        found: list[list[Any]] = [[] for _ in requests]
        seconds = []

        def sink(index: int) -> Callable[[Any], None]:
            return lambda event: found[index].extend((c.token, c.checksum) for c in event.sampled)

        for index, request in enumerate(requests):
            engine.add(request, sink(index))
        while engine.busy:
            begin = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - begin)
        return found, seconds


def steps(bench: Bench) -> None:
    """Time single steps of different batches, and compare verify and tree steps with a decode step at the same position."""
    cases: dict[str, list[tuple[int, tuple[Draft, ...]]]] = {
        "1 row at 200": [(200, ())],
        "1 row at 1K": [(1000, ())],
        "8 rows at 1K": [(1000 + 3 * i, ()) for i in range(8)],
        "32 rows at 1K": [(1000 + 3 * i, ()) for i in range(32)],
        "verify of 16 at 1K": [(1000, CHAIN)],
        "tree of 22 at 1K": [(1000, TREE)],
        "1 row at 24K": [(24_000, ())],
        "verify of 16 at 24K": [(24_000, CHAIN)],
        "tree of 22 at 24K": [(24_000, TREE)],
        "1 row at 128K": [(131_000, ())],
    }
    one_row: dict[str, tuple[float, float]] = {}
    for case, rows in cases.items():
        if not case.endswith(bench.only):
            continue
        if max(start for start, _ in rows) + 32 > bench.backend.capacity.max_context or len(rows) > bench.lanes:
            continue
        ms = bench.step_ms(bench.plan(rows, SAMPLED))
        device = bench.replay_ms()
        context = sum(start for start, _ in rows) // len(rows)
        floor = 1e3 * bench.bytes(rows=len(rows), context=context) / bench.speed
        report(f"{bench.name}: {case}, sampled, ms (floor {floor:.2f})", ms)
        report(f"{bench.name}: {case}, device part, ms", device)
        report(
            f"{bench.name}: {case}, share of the floor, whole step and device part",
            [round(floor / t, 3) for t in (ms, device)],
        )
        position = case.rpartition(" at ")[2]
        if case.startswith("1 row"):
            one_row[position] = ms, device
            report(f"{bench.name}: {case}, tok/s", 1e3 / ms)
        elif "rows" in case:
            report(f"{bench.name}: {case}, tok/s", 1e3 * len(rows) / ms)
        else:
            ratios = [round(t / one, 3) for t, one in zip((ms, device), one_row[position], strict=True)]
            report(f"{bench.name}: {case}, x a decode step, whole step and device part", ratios)


def _requests(bench: Bench, count: int, prompt: int, new: int, params: SamplingParams) -> list[Request]:
    rng = np.random.default_rng(7)
    return [
        Request(
            f"q{i}", tuple(int(t) for t in rng.integers(0, bench.spec.vocab, prompt)), replace(params, seed=i, max_tokens=new)
        )
        for i in range(count)
    ]


def decode(bench: Bench) -> None:
    """Time sampled decoding through the engine: 128 steps of a constant batch, all rows at about the same position. An earlier
    run of the same requests captures the CUDA graphs."""
    for prompt, count in bench.cases:
        if count > bench.lanes:
            continue
        requests = _requests(bench, count, prompt, 148 + -(-prompt * count // 1024), SAMPLED)
        bench.answers(requests, bench.engine(Speculator([])))
        for async_scheduling in bench.async_modes if bench.backend.capacity.async_scheduling else (False,):
            times = _constant_batch_seconds(bench.engine(Speculator([]), async_scheduling=async_scheduling), requests, 128)
            ms, mean, worst = 1e3 * statistics.median(times), 1e3 * statistics.mean(times), 1e3 * max(times)
            floor = 1e3 * bench.bytes(rows=count, context=prompt + 64) / bench.speed
            name = f"{bench.name}: decode, {count} rows from {prompt}, {'async' if async_scheduling else 'sync'} scheduling"
            report(f"{name}, step, median, mean, worst, ms", [round(ms, 3), round(mean, 3), round(worst, 3)])
            report(f"{name}, tok/s (mean)", 1e3 * count / mean)
            report(f"{name}, share of the floor", floor / mean)


def _constant_batch_seconds(
    engine: Engine, requests: Sequence[Request], count: int, on_begin: Callable[[], None] | None = None
) -> list[float]:
    """Return the seconds of `count` steps that run all requests; they start once every request has computed its prompt."""
    for request in requests:
        engine.add(request, lambda event: None)
    while engine.scheduler.waiting or any(sequence.remaining > 1 for sequence in engine.scheduler.running):
        engine.step()
    engine.step()
    if on_begin is not None:
        on_begin()
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begin)
    assert len(engine.scheduler.running) == len(requests)
    while engine.busy:
        engine.step()
    return times


def drafted(bench: Bench) -> None:
    """Compare plain decoding with recorded drafts of which 1, 4 and 8 of 15 are kept per step, by median step times."""
    for label, params, counts in (("T 1.0 with penalties", PENALIZED, bench.kept), ("T 0.8, top-p .95", SAMPLED, (4,))):
        requests = _requests(bench, 1, 960, 200, params)
        plain, seconds = bench.answers(requests, bench.engine(Speculator([])))
        one = statistics.median(seconds[5:])
        report(f"{bench.name}: plain decode through the engine, {label}, tok/s", 1 / one)
        for kept in counts:
            proposer = RecordedProposer(kept=kept, length=15, vocab=bench.spec.vocab)
            proposer.answers = {requests[0].prompt: tuple(token for token, _ in plain[0])}
            for _ in range(2):  # the first run compiles kernels and captures graphs
                got, times = bench.answers(requests, bench.engine(Speculator([proposer], draft_tokens=15)))
            step = statistics.median(times[3:])
            report(f"{bench.name}: {kept} kept of 15, {label}, same tokens", got == plain)
            report(f"{bench.name}: {kept} kept of 15, {label}, tok/s", (kept + 1) / step)
            report(f"{bench.name}: {kept} kept of 15, {label}, x plain", (kept + 1) * one / step)


def exact(bench: Bench) -> None:
    """Compare tokens and score checksums of a request that runs alone with other ways to compute the same positions."""
    positions = bench.positions
    params = replace(PENALIZED, checksums=True, top_p=0.98)
    requests = _requests(bench, 1, 200, positions, params)
    alone, seconds = bench.answers(requests, bench.engine(Speculator([])))
    report(f"{bench.name}: exact: positions decoded alone, ms each", 1e3 * statistics.median(seconds[5:]))
    truth = RecordedProposer(kept=9, length=15, vocab=bench.spec.vocab)
    truth.answers = {requests[0].prompt: tuple(token for token, _ in alone[0])}
    others = _requests(bench, min(bench.lanes, 32), 170, positions, params)[1:]
    others = [replace(one, id=f"s{i}") for i, one in enumerate(others)]
    need = -(-(200 + positions) // PAGE)
    variants: dict[str, Callable[[], tuple[list[list[Any]], Engine]]] = {
        "rows of a 16-row verify": lambda: _run(bench, requests, bench.engine(Speculator([truth], draft_tokens=15))),
        "chunks of 64": lambda: _run(bench, requests, bench.engine(Speculator([truth], draft_tokens=15), step_tokens=64)),
        f"a row of a batch of {1 + len(others)}": lambda: _run(bench, [*requests, *others], bench.engine(Speculator([]))),
        "recomputed after preemption": lambda: _run(
            bench, [*others[:1], *requests], bench.engine(Speculator([]), pages=need + need // 2)
        ),
    }
    for name, run in variants.items():
        got, engine = run()
        answer = got[1] if name.startswith("recomputed") else got[0]
        differ = sum(a != b for a, b in itertools.zip_longest(answer, alone[0]))
        stats = engine.stats()
        counted = f"kept {stats.accepted_tokens}, preemptions {stats.preemptions}, middle chunks {stats.middle_chunks}"
        report(f"{bench.name}: exact: {name}, positions that differ of {positions} ({counted})", differ)


class HistoryConstraint:
    """A constraint that allows about half of the tokens; all earlier tokens decide which half."""

    def __init__(self, vocab: int) -> None:
        self._masks = np.random.default_rng(3).integers(0, 2**32, (64, -(-vocab // 32)), dtype=np.uint32)

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> TokenMask:
        mask: TokenMask = self._masks[sum((*output, *drafts)) % 64]
        return mask

    def legal(self, output: Sequence[int]) -> int:
        return len(output)


def requested(bench: Bench) -> None:
    """Compare tokens, logprobs and checksums of requests with logprobs and constraints, run alone, in a batch and with drafts."""
    positions, constraint = bench.positions, HistoryConstraint(bench.spec.vocab)
    kinds: dict[str, tuple[dict[str, Any], HistoryConstraint | None]] = {
        "logprobs": ({"logprobs": 5}, None),
        "processed logprobs": ({"logprobs": 20, "logprobs_mode": "processed", "top_p": 0.9}, None),
        "a constraint": ({"logprobs": 2}, constraint),
        "a constraint and penalties": ({"frequency_penalty": 0.3, "top_k": 50}, constraint),
    }
    params = replace(SAMPLED, temperature=1.0, checksums=True)
    requests = [
        replace(one, params=replace(one.params, **fields))
        for one, (fields, _) in zip(_requests(bench, len(kinds), 200, positions, params), kinds.values(), strict=True)
    ]
    constraints = [constraint for _, constraint in kinds.values()]

    def answers(
        selected: Sequence[int], speculator: Speculator, others: Sequence[Request] = ()
    ) -> tuple[list[list[Any]], Engine]:
        engine = bench.engine(speculator)
        found: list[list[Any]] = [[] for _ in selected]
        for sampled, index in zip(found, selected, strict=True):
            engine.add(requests[index], partial(_extend, sampled), constraints[index])
        for other in others:
            engine.add(other, lambda event: None)
        while engine.busy:
            engine.step()
        return found, engine

    alone = [answers([index], Speculator([]))[0][0] for index in range(len(requests))]
    known = RecordedProposer(kept=4, length=7, vocab=bench.spec.vocab)
    known.answers = {one.prompt: tuple(t.token for t in sampled) for one, sampled in zip(requests, alone, strict=True)}
    others = [replace(one, id=f"s{i}") for i, one in enumerate(_requests(bench, min(bench.lanes, 32), 170, positions, SAMPLED))]
    variants = {
        "in a batch": (Speculator([]), others[len(requests) :]),
        "with drafts": (Speculator([known], draft_tokens=7), []),
    }
    for variant, (speculator, beside) in variants.items():
        found, engine = answers(range(len(requests)), speculator, beside)
        stats = engine.stats()
        counted = f"ahead {stats.steps_ahead} of {stats.steps}, mixed {stats.mixed_constraints}, kept {stats.accepted_tokens}"
        for name, got, expected in zip(kinds, found, alone, strict=True):
            differ = sum(a != b for a, b in itertools.zip_longest(got, expected))
            report(f"{bench.name}: {name}, {variant}: positions that differ of {positions} ({counted})", differ)


def _extend(sampled: list[Any], event: Any) -> None:
    sampled.extend(event.sampled)


def _run(bench: Bench, requests: Sequence[Request], engine: Engine) -> tuple[list[list[Any]], Engine]:
    return bench.answers(requests, engine)[0], engine


def prefill(bench: Bench) -> None:
    """Time prompts that are computed in one step, and report the arithmetic speed of the matrix products and of attention."""
    spec = bench.spec

    def weight_bytes(sizes: Any) -> int:
        return step_bytes(spec, sizes, dtype=bench.dtype, rows=1, context=0)

    read = weight_bytes(bench.plain_sizes) - weight_bytes(dict.fromkeys(bench.plain_sizes, 0))
    matrices = read / 2 - spec.vocab * spec.hidden  # parameters that every token is multiplied with
    for count in (2048, 8192):
        requests = _requests(bench, 1, count, 1, SAMPLED)
        times = [sum(bench.answers(requests, bench.engine(Speculator([]), step_tokens=count))[1]) for _ in range(4)]
        attended = sum(
            4 * count * count / 2 * m.heads * m.head_dim for m in (x.mixer for x in spec.layers) if isinstance(m, AttentionSpec)
        )
        report(f"{bench.name}: prefill of {count}, ms", 1e3 * min(times))
        report(
            f"{bench.name}: prefill of {count}, TFLOP/s of model arithmetic",
            (2 * count * matrices + attended) / min(times) / 1e12,
        )


def host(bench: Bench) -> None:
    """Profile the host in a decode step. The time that it waits for the device is not host work."""
    for count in sorted({rows for _, rows in bench.cases}):
        if count > bench.lanes:
            continue
        requests = _requests(bench, count, 100, 160, SAMPLED)
        bench.answers(requests, bench.engine(Speculator([])))
        with _Clock() as clock:
            clock.time(bench.backend, "submit")
            clock.time(bench.backend, "collect")
            clock.time(CapturedStep, "wait")
            step_times = _constant_batch_seconds(bench.engine(Speculator([])), requests, 100, clock.begin)
        parts = [1e3 * statistics.mean(clock.spent[name][:100]) for name in ("submit", "collect", "wait")]
        step = 1e3 * statistics.mean(step_times)
        report(
            f"{bench.name}: {count} rows: step, submit, collect, waiting in collect, ms", [round(x, 3) for x in (step, *parts)]
        )
        report(f"{bench.name}: {count} rows: host work per step, ms", step - parts[2])
        profile = cProfile.Profile()
        profile.enable()
        _constant_batch_seconds(bench.engine(Speculator([])), requests, 100)
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(12)


class _Clock:
    """Record the seconds that calls of chosen methods take; the methods are restored on exit."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {}
        self._real: list[tuple[Any, str, Any]] = []

    def time(self, owner: Any, name: str) -> None:
        work, into = getattr(owner, name), self.spent.setdefault(name, [])

        def call(*arguments: Any) -> Any:
            begin = time.perf_counter()
            result = work(*arguments)
            into.append(time.perf_counter() - begin)
            return result

        self._real.append((owner, name, work))
        setattr(owner, name, call)

    def begin(self) -> None:
        for spent in self.spent.values():
            spent.clear()

    def __enter__(self) -> _Clock:
        return self

    def __exit__(self, *error: object) -> None:
        for owner, name, work in self._real:
            setattr(owner, name, work)


def warm_up(bench: Bench) -> None:
    """Time the capture of CUDA graphs before the first request."""
    begin = time.perf_counter()
    bench.backend.warm_up(lambda line: None, drafts=DRAFTS_PER_LANE)
    runner = bench.backend.graph_runner
    count = len(runner.graphs) if runner is not None and isinstance(runner.graphs, CudaGraphs) else 0
    report(f"{bench.name}: captured graphs before the first request, and s", [count, round(time.perf_counter() - begin, 1)])


# ------------------------------------------------------------------ a model with a drafter


def drafter_maker(
    name: str, checkpoint: InMemoryCheckpoint, info: ModelInfo, *, context: int, lanes: int
) -> Callable[[Any, Any, Any], Any]:
    """Return what builds the drafter, as the server does it, from a path or from `random:SHAPE-dflash`."""
    builder = DrafterBuilder(Path(name), fake_tokenizer(), checkpoint)
    return builder.maker(Settings(model=str(checkpoint.path), max_batch=lanes), info, max_context=context)


def drafter(bench: Bench) -> None:
    """Time a prompt of up to 32,000 tokens and then drafted steps. The drafts of a random drafter are rejected, so a step yields
    one token: the section measures the cost and the memory of drafting, not its gain."""
    if not bench.backend.capacity.drafter:
        report(f"{bench.name}: drafter", "none; pass --drafter random:qwen3.6-27b-dflash-q4_k_m")
        return
    prompt = min(DRAFTER_PROMPT, bench.backend.capacity.max_context - 256)
    requests = _request(bench, "long", prompt, replace(SAMPLED, max_tokens=32))
    engine = bench.engine(Speculator([], draft_tokens=15), step_tokens=2048)
    found: list[Any] = []
    engine.add(requests, lambda event: found.extend(event.sampled))
    prompt_seconds, times, begin = 0.0, [], time.perf_counter()
    while engine.busy:
        start = time.perf_counter()
        engine.step()
        if len(found) <= 1:
            prompt_seconds = time.perf_counter() - begin
        else:
            times.append(1e3 * (time.perf_counter() - start))
    stats = engine.stats()
    report(f"{bench.name}: drafter: prompt of {prompt}, drafter features included, s", prompt_seconds)
    report(f"{bench.name}: drafter: drafted step at {prompt}, median, ms", statistics.median(times[6:]))
    report(f"{bench.name}: drafter: drafts, kept, tokens", [stats.draft_tokens, stats.accepted_tokens, len(found)])
    if bench.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(bench.device)
        report(f"{bench.name}: drafter: peak memory of torch, GiB", torch.cuda.max_memory_reserved(bench.device) / 2**30)
        report(f"{bench.name}: drafter: memory in use on the device, GiB", (total - free) / 2**30)
    _same_tokens(bench)


def _same_tokens(bench: Bench) -> None:
    requests = _request(bench, "short", 500, replace(SAMPLED, max_tokens=16, checksums=True))
    found = [bench.answers([requests], bench.engine(Speculator([], draft_tokens=count)))[0] for count in (0, 15)]
    report(f"{bench.name}: drafter: same tokens and checksums as without drafts", found[0] == found[1])


def _request(bench: Bench, name: str, prompt: int, params: SamplingParams) -> Request:
    rng = np.random.default_rng(7)
    return Request(name, tuple(int(t) for t in rng.integers(0, bench.spec.vocab, prompt)), replace(params, seed=1))


# ------------------------------------------------------------------ a long context


def long(bench: Bench) -> None:
    """Time a decode step and a verify step at 128K. The KV pages hold random numbers instead of a computed prompt."""
    if bench.backend.capacity.max_context < LONG_CONTEXT + 32:
        report(f"{bench.name}: long", f"needs --context {LONG_CONTEXT + 64} and --pages {(LONG_CONTEXT + 64) // 16 + 8}")
        return
    [state] = bench.backend.states
    assert isinstance(state, ModelState)
    for store in state.stores:
        for tensor in vars(store).values() if isinstance(store, PageStore) else ():
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype.itemsize > 1:
                tensor.normal_()
    cases: dict[str, tuple[Draft, ...]] = {"1 row": (), "verify of 16": CHAIN}
    for name, drafts in cases.items():
        ms = bench.step_ms(bench.plan([(LONG_CONTEXT, drafts)], SAMPLED))
        device = bench.replay_ms()
        floor = 1e3 * bench.bytes(rows=1, context=LONG_CONTEXT) / bench.speed
        report(f"{bench.name}: {name} at 128K (random KV), ms (floor {floor:.2f})", ms)
        report(f"{bench.name}: {name} at 128K, device part, ms", device)
        report(f"{bench.name}: {name} at 128K, share of the floor", [round(floor / t, 3) for t in (ms, device)])


# ------------------------------------------------------------------ the sampler alone


def sampling(bench: Bench) -> None:
    """Time the backend's sampler on random logits over the vocabulary of the model, captured in a graph as in a step."""
    cases = {
        "T 0.8, top-p .95": SAMPLED,
        "T 0.8, top-k 40, top-p .95": replace(SAMPLED, top_k=40),
        "T 1 with penalties": PENALIZED,
        "greedy": replace(SAMPLED, temperature=0.0, top_p=1.0),
    }
    for rows in (1, 8, 32):
        if rows > bench.lanes:
            continue
        logits = 3 * torch.randn(rows, -(-bench.spec.vocab // 64) * 64, device=bench.device).to(bench.backend.model.dtype)
        for name, params in cases.items():
            positions = [SamplingPosition(i, replace(params, seed=i), History((1, 2, 3), [4]), (), f"c{i}") for i in range(rows)]
            ms = _sampling_ms(bench, logits, positions)
            report(f"{bench.name}: sampling {rows} x {bench.spec.vocab}, {name}, ms", ms)


@torch.inference_mode()
def _sampling_ms(bench: Bench, logits: Tensor, positions: list[SamplingPosition]) -> float:
    sampler = bench.backend.model.ops.sampler(vocab=bench.spec.vocab, lanes=bench.lanes, device=bench.device)
    capturable = sampler.capturable
    if capturable is None:
        start = time.perf_counter()
        sampler.sample(logits.float(), positions)
        return 1e3 * (time.perf_counter() - start)
    ready = capturable.prepare(positions, staging=DirectStaging(bench.device), rows=len(positions))
    graph = capture(lambda: ready.sample(lambda rows: logits[rows], None))
    return device_ms(graph.replay, repeats=30, warm_up=10)


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "warm_up": warm_up,
    "decode": decode,
    "steps": steps,
    "drafted": drafted,
    "exact": exact,
    "prefill": prefill,
    "host": host,
    "requested": requested,
    "long": long,
    "sampling": sampling,
    "drafter": drafter,
}
ALIASES = {"turns": "steps", "rehearse": "warm_up", "choosing": "sampling"}  # earlier names of sections


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), choices=[*SECTIONS, *ALIASES], metavar="SECTION")
    parser.add_argument("--model", default="random:llama3-8b")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--context", type=int, default=132_000)
    parser.add_argument("--lanes", type=int, default=32)
    parser.add_argument("--pages", type=int, default=9000)
    parser.add_argument("--cases", help="for decode: prompt tokens x rows, such as 128x1,960x8")
    parser.add_argument(
        "--async-only", "--ahead-only", action="store_true", help="for decode: skip the run without async scheduling"
    )
    parser.add_argument("--kept", default="1,4,8", help="for drafted: how many of 15 drafts are kept per step")
    parser.add_argument("--memory", type=float, metavar="GiB", help="limit of the device memory that is used")
    parser.add_argument("--layers", type=int, help="use only this many layers of the model")
    parser.add_argument("--positions", type=int, default=1000, help="for exact: number of positions to compare")
    parser.add_argument("--kv-dtype", choices=("bf16", "fp8", "int8"), help="dtype of the KV cache")
    parser.add_argument("--only", default="", help="for steps: only cases whose name ends with this, such as 24K")
    parser.add_argument("--drafter", default="", help="a DFlash drafter: a path, or random:qwen3.6-27b-dflash-q4_k_m")
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.memory is not None:
        share = options.memory * 2**30 / torch.cuda.get_device_properties(options.device).total_memory
        torch.cuda.set_per_process_memory_fraction(share, options.device)
    sizes: dict[str, Any] = {"context": options.context, "lanes": options.lanes, "pages": options.pages, "layers": options.layers}
    bench = Bench(options.model, options.device, drafter=options.drafter, kv=options.kv_dtype, only=options.only, **sizes)
    bench.positions = options.positions
    if options.cases:
        bench.cases = [(int(prompt), int(rows)) for prompt, rows in (case.split("x") for case in options.cases.split(","))]
    bench.kept = tuple(map(int, options.kept.split(",")))
    bench.async_modes = (True,) if options.async_only else (True, False)
    for section in options.sections:
        begin = time.perf_counter()
        SECTIONS[ALIASES.get(section, section)](bench)
        print(f"-- {section}: {time.perf_counter() - begin:.1f} s", flush=True)
        if torch.cuda.is_available():
            report(f"{bench.name}: peak memory, GiB", torch.cuda.max_memory_reserved(options.device) / 2**30)
        if options.json:
            write_figures(options.json)


if __name__ == "__main__":
    main()
