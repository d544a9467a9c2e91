"""How fast turns are through the backend, and whether their bits are one row's own: captured turns, copies and host included.

    python -m bench.gpu_backend SECTION ... --model random:llama3-8b [--device cuda:0] [--json out.json]

Sections: decode (sampled, through the engine, with turns sent off ahead and without), turns (decode, verify and tree turns
against a decode turn), drafted (4 kept of 15 against plain), exact (1,000 positions: alone, verified, in a batch of 32, after
preemption, in other chunks), requested (the same for logprobs and constraints), prefill, host (where the host's time goes),
rehearse (turns recorded before the first request), long
(one row at 128K), choosing (the sampler alone), drafter (`--drafter`: a long prompt, then drafted turns).
Weights are random and made on the device. A turn's time is from `submit` to the end of `collect`, median of many.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu_sections import MORE, drafter_maker
from onedraw.backends.memory_plan import DRAFTS_PER_LANE
from onedraw.backends.packing import matrix_sizes
from onedraw.backends.torch.backend import TorchBackend
from onedraw.backends.torch.device import copy_bandwidth, pick_ops
from onedraw.backends.torch.runner.cuda_graphs import CudaGraphs
from onedraw.backends.torch.runner.graph_runner import CapturedStep
from onedraw.checkpoints.random_weights import named_mixture, open_random
from onedraw.engine.engine import Engine
from onedraw.engine.scheduler import Scheduler
from onedraw.lab.recorded_drafts import RecordedProposer
from onedraw.lab.references import step_bytes
from onedraw.memory.allocator import Allocator
from onedraw.models.registry import read_model_info
from onedraw.speculation.speculator import Speculator
from onedraw.types import Draft, History, Plan, Request, Row, SamplingParams, TokenMask

FOUND: dict[str, Any] = {}
PAGE = 16
CHAIN = tuple(Draft(1, i - 1) for i in range(15))
TREE = tuple(Draft(1 + i, -1 if i < 4 else (i - 4) // 2) for i in range(21))
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=4096)
PENALIZED = SamplingParams(temperature=1.0, repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1, max_tokens=4096)


def say(name: str, value: Any) -> None:
    FOUND[name] = value
    print(f"{name:72s} {f'{value:.4g}' if isinstance(value, float) else value}", flush=True)


class Bench:
    """One model and its backend."""

    say = staticmethod(say)
    positions = 1000  # that `exact` compares

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
        self.plain_sizes = matrix_sizes(info.weights, "bf16")  # two bytes a number
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
        self.kept: tuple[int, ...] = (1, 4, 8)  # of 15 drafts
        self.ways: tuple[bool, ...] = (True, False)  # ahead or not
        say(f"{self.name}: weights made and pages allocated, s", time.perf_counter() - begin)
        say(f"{self.name}: copy bandwidth, TB/s", self.speed / 1e12)

    def bytes(self, *, rows: int, context: int) -> int:
        """That a turn reads."""
        return step_bytes(self.spec, self.sizes, dtype=self.kv, rows=rows, context=context)

    def plan(self, rows: Sequence[tuple[int, tuple[Draft, ...]]], params: SamplingParams) -> Plan:
        """Rows that stand at a position, each with pages of its own."""
        made, page = [], 0
        for lane, (start, drafts) in enumerate(rows):
            need = -(-(start + 1 + len(drafts)) // PAGE)
            history = History((1,) * start, [2])
            own = tuple(range(page, page + need))
            page += need
            made.append(
                Row(f"r{lane}", lane, tuple(own for _ in self.spec.windows), start, (2,), drafts, start, True, params, history)
            )
        assert page <= self.pages, (page, self.pages)
        return Plan(tuple(made))

    def turn_ms(self, plan: Plan, repeats: int = 30) -> float:
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            self.backend.collect(self.backend.submit(plan))
            times.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(times[5:])

    def replay_ms(self, repeats: int = 20) -> float:
        """The last recorded turn alone, its layers and its choosing, timed by the device."""
        runner = self.backend.graph_runner
        graphs = [] if runner is None else [g for g in getattr(runner.graphs, "_graphs", {}).values() if g is not None]
        if not graphs:
            return float("nan")
        times = []
        for _ in range(repeats):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for graph in graphs[-2:]:
                graph.graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return statistics.median(times[3:])

    def engine(self, speculator: Speculator, *, pages: int | None = None, turn_tokens: int = 2048, ahead: bool = True) -> Engine:
        capacity = self.backend.capacity
        capacity = replace(capacity, async_scheduling=ahead and capacity.async_scheduling)
        if pages is not None:
            capacity = replace(capacity, groups=tuple(replace(group, pages=pages) for group in capacity.groups))
        allocator = Allocator(capacity, reuse=False)
        return Engine(
            backend=self.backend,
            scheduler=Scheduler(allocator=allocator, capacity=capacity, speculator=speculator, step_tokens=turn_tokens),
        )

    def answers(self, requests: Sequence[Request], engine: Engine, arrivals: int = 0) -> tuple[list[list[Any]], list[float]]:
        """Tokens with checksums of every request, and the seconds of every turn."""
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


def turns(bench: Bench) -> None:
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
    alone: dict[str, tuple[float, float]] = {}
    for case, rows in cases.items():
        if not case.endswith(bench.only):
            continue
        if max(start for start, _ in rows) + 32 > bench.backend.capacity.max_context or len(rows) > bench.lanes:
            continue
        ms = bench.turn_ms(bench.plan(rows, SAMPLED))
        device = bench.replay_ms()
        context = sum(start for start, _ in rows) // len(rows)
        floor = 1e3 * bench.bytes(rows=len(rows), context=context) / bench.speed
        say(f"{bench.name}: {case}, sampled, ms (floor {floor:.2f})", ms)
        say(f"{bench.name}: {case}, of it on the device, ms", device)
        say(
            f"{bench.name}: {case}, share of the floor, with the host and on the device",
            [round(floor / t, 3) for t in (ms, device)],
        )
        place = case.rpartition(" at ")[2]
        if case.startswith("1 row"):
            alone[place] = ms, device
            say(f"{bench.name}: {case}, tok/s", 1e3 / ms)
        elif "rows" in case:
            say(f"{bench.name}: {case}, tok/s", 1e3 * len(rows) / ms)
        else:
            ratios = [round(t / one, 3) for t, one in zip((ms, device), alone[place], strict=True)]
            say(f"{bench.name}: {case}, x a decode turn, with the host and on the device", ratios)


def _requests(bench: Bench, count: int, prompt: int, new: int, params: SamplingParams) -> list[Request]:
    rng = np.random.default_rng(7)
    return [
        Request(
            f"q{i}", tuple(int(t) for t in rng.integers(0, bench.spec.vocab, prompt)), replace(params, seed=i, max_tokens=new)
        )
        for i in range(count)
    ]


def decode(bench: Bench) -> None:
    """Sampled decoding through the engine, all rows at about the same place: 128 turns in which nobody comes or goes. What
    they need was recorded before, by a run of the same requests."""
    for prompt, count in bench.cases:
        if count > bench.lanes:
            continue
        asked = _requests(bench, count, prompt, 148 + -(-prompt * count // 1024), SAMPLED)
        bench.answers(asked, bench.engine(Speculator([])))
        for ahead in bench.ways if bench.backend.capacity.async_scheduling else (False,):
            times = _steady_turns(bench.engine(Speculator([]), ahead=ahead), asked, 128)
            ms, mean, worst = 1e3 * statistics.median(times), 1e3 * statistics.mean(times), 1e3 * max(times)
            floor = 1e3 * bench.bytes(rows=count, context=prompt + 64) / bench.speed
            name = f"{bench.name}: decode, {count} rows from {prompt}, {'' if ahead else 'not '}ahead"
            say(f"{name}, turn, median, mean, worst, ms", [round(ms, 3), round(mean, 3), round(worst, 3)])
            say(f"{name}, tok/s by the mean", 1e3 * count / mean)
            say(f"{name}, share of the floor", floor / mean)


def _steady_turns(engine: Engine, asked: Sequence[Request], turns: int, begun: Callable[[], None] | None = None) -> list[float]:
    """Seconds of so many turns of all requests, from the first that all of them share on."""
    for request in asked:
        engine.add(request, lambda event: None)
    while engine.scheduler.waiting or any(sequence.remaining > 1 for sequence in engine.scheduler.running):
        engine.step()
    engine.step()
    if begun is not None:
        begun()
    times = []
    for _ in range(turns):
        begin = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begin)
    assert len(engine.scheduler.running) == len(asked)
    while engine.busy:
        engine.step()
    return times


def drafted(bench: Bench) -> None:
    """Plain decoding, then the same answers with 1, 4 and 8 of 15 drafts kept per turn, by the medians of turns."""
    for label, params, counts in (("T 1.0 with penalties", PENALIZED, bench.kept), ("T 0.8, top-p .95", SAMPLED, (4,))):
        asked = _requests(bench, 1, 960, 200, params)
        plain, seconds = bench.answers(asked, bench.engine(Speculator([])))
        one = statistics.median(seconds[5:])
        say(f"{bench.name}: plain decode through the engine, {label}, tok/s", 1 / one)
        for kept in counts:
            proposer = RecordedProposer(kept=kept, length=15, vocab=bench.spec.vocab)
            proposer.answers = {asked[0].prompt: tuple(token for token, _ in plain[0])}
            for _ in range(2):  # the first compiles and records
                got, times = bench.answers(asked, bench.engine(Speculator([proposer], draft_tokens=15)))
            turn = statistics.median(times[3:])
            say(f"{bench.name}: {kept} kept of 15, {label}, same tokens", got == plain)
            say(f"{bench.name}: {kept} kept of 15, {label}, tok/s", (kept + 1) / turn)
            say(f"{bench.name}: {kept} kept of 15, {label}, x plain", (kept + 1) * one / turn)


def exact(bench: Bench) -> None:
    """Tokens and checksums of scores at so many positions, decoded alone, against every other way."""
    positions = bench.positions
    params = replace(PENALIZED, checksums=True, top_p=0.98)
    asked = _requests(bench, 1, 200, positions, params)
    alone, seconds = bench.answers(asked, bench.engine(Speculator([])))
    say(f"{bench.name}: exact: positions decoded alone, ms each", 1e3 * statistics.median(seconds[5:]))
    truth = RecordedProposer(kept=9, length=15, vocab=bench.spec.vocab)
    truth.answers = {asked[0].prompt: tuple(token for token, _ in alone[0])}
    strangers = _requests(bench, min(bench.lanes, 32), 170, positions, params)[1:]
    strangers = [replace(one, id=f"s{i}") for i, one in enumerate(strangers)]
    need = -(-(200 + positions) // PAGE)
    ways: dict[str, Callable[[], tuple[list[list[Any]], Engine]]] = {
        "rows of a 16-row verify": lambda: _ran(bench, asked, bench.engine(Speculator([truth], draft_tokens=15))),
        "chunks of 64": lambda: _ran(bench, asked, bench.engine(Speculator([truth], draft_tokens=15), turn_tokens=64)),
        f"a row of a batch of {1 + len(strangers)}": lambda: _ran(bench, [*asked, *strangers], bench.engine(Speculator([]))),
        "recomputed after preemption": lambda: _ran(
            bench, [*strangers[:1], *asked], bench.engine(Speculator([]), pages=need + need // 2)
        ),
    }
    for name, run in ways.items():
        got, engine = run()
        answer = got[1] if name.startswith("recomputed") else got[0]
        differ = sum(a != b for a, b in itertools.zip_longest(answer, alone[0]))
        stats = engine.stats()
        counted = f"kept {stats.accepted_tokens}, preemptions {stats.preemptions}, middle chunks {stats.middle_chunks}"
        say(f"{bench.name}: exact: {name}, positions that differ of {positions} ({counted})", differ)


class RuleOfHistory:
    """A constraint that allows about half of the tokens, which half depends on every token before."""

    def __init__(self, vocab: int) -> None:
        self._masks = np.random.default_rng(3).integers(0, 2**32, (64, -(-vocab // 32)), dtype=np.uint32)

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> TokenMask:
        found: TokenMask = self._masks[sum((*output, *drafts)) % 64]
        return found


def requested(bench: Bench) -> None:
    """Tokens, logprobs and checksums of requests with logprobs and constraints, decoded alone, against a batch and drafts."""
    positions, mask = bench.positions, RuleOfHistory(bench.spec.vocab)
    kinds: dict[str, tuple[dict[str, Any], RuleOfHistory | None]] = {
        "logprobs": ({"logprobs": 5}, None),
        "processed logprobs": ({"logprobs": 20, "logprobs_mode": "processed", "top_p": 0.9}, None),
        "a constraint": ({"logprobs": 2}, mask),
        "a constraint and penalties": ({"frequency_penalty": 0.3, "top_k": 50}, mask),
    }
    params = replace(SAMPLED, temperature=1.0, checksums=True)
    asked = [
        replace(one, params=replace(one.params, **given))
        for one, (given, _) in zip(_requests(bench, len(kinds), 200, positions, params), kinds.values(), strict=True)
    ]
    constraints = [constraint for _, constraint in kinds.values()]

    def answers(
        chosen: Sequence[int], speculator: Speculator, strangers: Sequence[Request] = ()
    ) -> tuple[list[list[Any]], Engine]:
        engine = bench.engine(speculator)
        found: list[list[Any]] = [[] for _ in chosen]
        for own, index in zip(found, chosen, strict=True):
            engine.add(asked[index], lambda event, own=own: own.extend(event.sampled), constraints[index])  # type: ignore[misc]
        for stranger in strangers:
            engine.add(stranger, lambda event: None)
        while engine.busy:
            engine.step()
        return found, engine

    alone = [answers([index], Speculator([]))[0][0] for index in range(len(asked))]
    truth = RecordedProposer(kept=4, length=7, vocab=bench.spec.vocab)
    truth.answers = {one.prompt: tuple(t.token for t in own) for one, own in zip(asked, alone, strict=True)}
    strangers = [
        replace(one, id=f"s{i}") for i, one in enumerate(_requests(bench, min(bench.lanes, 32), 170, positions, SAMPLED))
    ]
    ways = {"in a batch": (Speculator([]), strangers[len(asked) :]), "with drafts": (Speculator([truth], draft_tokens=7), [])}
    for way, (speculator, others) in ways.items():
        found, engine = answers(range(len(asked)), speculator, others)
        stats = engine.stats()
        counted = f"ahead {stats.steps_ahead} of {stats.steps}, mixed {stats.mixed_constraints}, kept {stats.accepted_tokens}"
        for name, got, expected in zip(kinds, found, alone, strict=True):
            differ = sum(a != b for a, b in itertools.zip_longest(got, expected))
            say(f"{bench.name}: {name}, {way}: differ of {positions} ({counted})", differ)


def _ran(bench: Bench, requests: Sequence[Request], engine: Engine) -> tuple[list[list[Any]], Engine]:
    return bench.answers(requests, engine)[0], engine


def prefill(bench: Bench) -> None:
    spec = bench.spec
    given = {"dtype": bench.dtype, "rows": 1, "context": 0}
    read = step_bytes(spec, bench.plain_sizes, **given) - step_bytes(spec, dict.fromkeys(bench.plain_sizes, 0), **given)
    matrices = read / 2 - spec.vocab * spec.hidden  # numbers that every token meets
    for count in (2048, 8192):
        asked = _requests(bench, 1, count, 1, SAMPLED)
        times = [sum(bench.answers(asked, bench.engine(Speculator([]), turn_tokens=count))[1]) for _ in range(4)]
        attended = sum(
            4 * count * count / 2 * m.heads * m.head_dim for m in (x.mixer for x in spec.layers) if hasattr(m, "heads")
        )
        say(f"{bench.name}: prefill of {count}, ms", 1e3 * min(times))
        say(
            f"{bench.name}: prefill of {count}, TFLOP/s of model arithmetic",
            (2 * count * matrices + attended) / min(times) / 1e12,
        )


def host(bench: Bench) -> None:
    """Where the host's time of a decode turn goes. What is waited for is time that the host has to spare."""
    for count in sorted({rows for _, rows in bench.cases}):
        if count > bench.lanes:
            continue
        asked = _requests(bench, count, 100, 160, SAMPLED)
        bench.answers(asked, bench.engine(Speculator([])))
        with _Clock() as clock:
            clock.time(bench.backend, "submit")
            clock.time(bench.backend, "collect")
            clock.time(CapturedStep, "wait")
            wholes = _steady_turns(bench.engine(Speculator([])), asked, 100, clock.begin)
        parts = [1e3 * statistics.mean(clock.spent[name][:100]) for name in ("submit", "collect", "wait")]
        turn = 1e3 * statistics.mean(wholes)
        say(f"{bench.name}: {count} rows: turn, submit, collect, of it waiting, ms", [round(x, 3) for x in (turn, *parts)])
        say(f"{bench.name}: {count} rows: the host's own time of a turn, ms", turn - parts[2])
        profile = cProfile.Profile()
        profile.enable()
        _steady_turns(bench.engine(Speculator([])), asked, 100)
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(12)


class _Clock:
    """Seconds that calls of some methods take."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {}
        self._real: list[tuple[Any, str, Any]] = []

    def time(self, owner: Any, name: str) -> None:
        work, into = getattr(owner, name), self.spent.setdefault(name, [])

        def call(*given: Any) -> Any:
            begin = time.perf_counter()
            result = work(*given)
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


def rehearse(bench: Bench) -> None:
    """What recording turns before the first request takes."""
    begin = time.perf_counter()
    bench.backend.warm_up(lambda line: None, drafts=DRAFTS_PER_LANE)
    runner = bench.backend.graph_runner
    count = len(runner.graphs) if runner is not None and isinstance(runner.graphs, CudaGraphs) else 0
    say(f"{bench.name}: turns recorded before the first request, and s", [count, round(time.perf_counter() - begin, 1)])


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "rehearse": rehearse,
    "decode": decode,
    "turns": turns,
    "drafted": drafted,
    "exact": exact,
    "prefill": prefill,
    "host": host,
    "requested": requested,
    **MORE,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--model", default="random:llama3-8b")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--context", type=int, default=132_000)
    parser.add_argument("--lanes", type=int, default=32)
    parser.add_argument("--pages", type=int, default=9000)
    parser.add_argument("--cases", help="of decode: prompt tokens x rows, as in 128x1,960x8")
    parser.add_argument("--ahead-only", action="store_true", help="of decode: not without turns sent off ahead")
    parser.add_argument("--kept", default="1,4,8", help="of drafted: drafts kept per turn of 15")
    parser.add_argument("--memory", type=float, metavar="GiB", help="of the device, at most")
    parser.add_argument("--layers", type=int, help="the first layers only")
    parser.add_argument("--positions", type=int, default=1000, help="that `exact` compares")
    parser.add_argument("--kv-dtype", choices=("bf16", "fp8", "int8"), help="of keys and values")
    parser.add_argument("--only", default="", help="of the turns, those whose name ends so, as in 24K")
    parser.add_argument("--drafter", default="", help="beside the model: random:qwen3.6-27b-dflash-q4_k_m, or a path")
    parser.add_argument("--json")
    wishes = parser.parse_args()
    if wishes.memory is not None:
        share = wishes.memory * 2**30 / torch.cuda.get_device_properties(wishes.device).total_memory
        torch.cuda.set_per_process_memory_fraction(share, wishes.device)
    sizes = {"context": wishes.context, "lanes": wishes.lanes, "pages": wishes.pages, "layers": wishes.layers}
    given = {"drafter": wishes.drafter, "kv": wishes.kv_dtype, "only": wishes.only}
    bench = Bench(wishes.model, wishes.device, **given, **sizes)
    bench.positions = wishes.positions
    if wishes.cases:
        bench.cases = [(int(prompt), int(rows)) for prompt, rows in (case.split("x") for case in wishes.cases.split(","))]
    bench.kept = tuple(map(int, wishes.kept.split(",")))
    bench.ways = (True,) if wishes.ahead_only else (True, False)
    for section in wishes.sections:
        begin = time.perf_counter()
        SECTIONS[section](bench)
        print(f"-- {section}: {time.perf_counter() - begin:.1f} s", flush=True)
        if torch.cuda.is_available():
            say(f"{bench.name}: memory at most, GiB", torch.cuda.max_memory_reserved(wishes.device) / 2**30)
        if wishes.json:
            Path(wishes.json).write_text(json.dumps(FOUND, indent=1, default=str))


if __name__ == "__main__":
    main()
