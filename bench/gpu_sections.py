"""Sections of `bench.gpu_backend` that need something of their own: a drafter, filled pages, the sampler alone.

In: a bench with a model and its backend. Out: figures, said by the bench.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from onedraw.backends.sampled_rows import SamplingPosition
from onedraw.backends.torch.runner.staging_buffers import DirectStaging
from onedraw.backends.torch.state.kv_pages import PageStore
from onedraw.checkpoints.random_weights import RandomCheckpoint
from onedraw.models.registry import ModelInfo
from onedraw.speculation.speculator import Speculator
from onedraw.types import Draft, History, Request, SamplingParams

if TYPE_CHECKING:
    from bench.gpu_backend import Bench

SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=4096)
PENALIZED = SamplingParams(temperature=1.0, repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1)
PROMPT = 32_000  # tokens before drafted turns
FAR = 131_000


# ------------------------------------------------------------------ a drafter beside the model


def drafter_maker(
    name: str, checkpoint: RandomCheckpoint, info: ModelInfo, *, context: int, lanes: int
) -> Callable[[Any, Any, Any], Any]:
    """As the server makes it: by its path, or `random:SHAPE-dflash`."""
    from onedraw.build.drafters import DrafterBuilder
    from onedraw.settings import Settings
    from onedraw.text.fake_tokenizer import fake_tokenizer

    drafting = DrafterBuilder(Path(name), fake_tokenizer(), checkpoint)
    return drafting.maker(Settings(model=str(checkpoint.path), max_batch=lanes), info, max_context=context)


def drafter(bench: Bench) -> None:
    """A prompt as long as the context allows, up to 32,000 tokens, then turns of the drafter's own guesses. A random drafter
    guesses wrong, so a turn gives one token: what is seen here is what drafting costs, and that it fits."""
    if not bench.backend.capacity.drafter:
        bench.say(f"{bench.name}: drafter", "none; pass --drafter random:qwen3.6-27b-dflash-q4_k_m")
        return
    prompt = min(PROMPT, bench.backend.capacity.max_context - 256)
    asked = _request(bench, "long", prompt, replace(SAMPLED, max_tokens=32))
    engine = bench.engine(Speculator([], draft_tokens=15), turn_tokens=2048)
    found: list[Any] = []
    engine.add(asked, lambda event: found.extend(event.sampled))
    before, turns, begin = 0.0, [], time.perf_counter()
    while engine.busy:
        start = time.perf_counter()
        engine.step()
        if len(found) <= 1:
            before = time.perf_counter() - begin
        else:
            turns.append(1e3 * (time.perf_counter() - start))
    stats = engine.stats()
    bench.say(f"{bench.name}: drafter: prompt of {prompt} with features taken, s", before)
    bench.say(f"{bench.name}: drafter: drafted turn at {prompt}, median, ms", statistics.median(turns[6:]))
    bench.say(f"{bench.name}: drafter: drafts, kept, tokens", [stats.draft_tokens, stats.accepted_tokens, len(found)])
    if bench.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(bench.device)
        bench.say(f"{bench.name}: drafter: memory of torch at most, GiB", torch.cuda.max_memory_reserved(bench.device) / 2**30)
        bench.say(f"{bench.name}: drafter: memory taken on the device, everything, GiB", (total - free) / 2**30)
    _same_tokens(bench)


def _same_tokens(bench: Bench) -> None:
    asked = _request(bench, "short", 500, replace(SAMPLED, max_tokens=16, checksums=True))
    found = [bench.answers([asked], bench.engine(Speculator([], draft_tokens=count)))[0] for count in (0, 15)]
    bench.say(f"{bench.name}: drafter: tokens and scores as without drafts", found[0] == found[1])


def _request(bench: Bench, name: str, prompt: int, params: SamplingParams) -> Request:
    rng = np.random.default_rng(7)
    return Request(name, tuple(int(t) for t in rng.integers(0, bench.spec.vocab, prompt)), replace(params, seed=1))


# ------------------------------------------------------------------ far into a context


def long(bench: Bench) -> None:
    """A decode turn at 128K. The pages are filled with random numbers in place of a prompt's keys and values."""
    if bench.backend.capacity.max_context < FAR + 32:
        bench.say(f"{bench.name}: long", f"needs --context {FAR + 64} and --pages {(FAR + 64) // 16 + 8}")
        return
    for store in bench.backend.states[0].stores:
        for tensor in vars(store).values() if isinstance(store, PageStore) else ():
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype.itemsize > 1:
                tensor.normal_()
    chain = tuple(Draft(1, i - 1) for i in range(15))
    for name, drafts in (("1 row", ()), ("verify of 16", chain)):
        ms = bench.turn_ms(bench.plan([(FAR, drafts)], SAMPLED))
        device = bench.replay_ms()
        floor = 1e3 * bench.bytes(rows=1, context=FAR) / bench.speed
        bench.say(f"{bench.name}: {name} at 128K (random numbers in the pages), ms (floor {floor:.2f})", ms)
        bench.say(f"{bench.name}: {name} at 128K, of it on the device, ms", device)
        bench.say(f"{bench.name}: {name} at 128K, share of the floor", [round(floor / t, 3) for t in (ms, device)])


# ------------------------------------------------------------------ choosing alone


def choosing(bench: Bench) -> None:
    """The backend's own sampler over random logits of the model's vocabulary, recorded and replayed as a turn's is."""
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
            own = [replace(params, seed=i) for i in range(rows)]
            positions = [SamplingPosition(i, own[i], History((1, 2, 3), [4]), (), f"c{i}") for i in range(rows)]
            ms = _choosing_ms(bench, logits, positions)
            bench.say(f"{bench.name}: choosing {rows} x {bench.spec.vocab}, {name}, ms", ms)


@torch.inference_mode()
def _choosing_ms(bench: Bench, logits: Tensor, positions: list[SamplingPosition]) -> float:
    sampler = bench.backend.model.ops.sampler(vocab=bench.spec.vocab, lanes=bench.lanes, device=bench.device)
    capturable = sampler.capturable
    if capturable is None:
        start = time.perf_counter()
        sampler.sample(logits.float(), positions)
        return 1e3 * (time.perf_counter() - start)
    ready = capturable.prepare(positions, staging=DirectStaging(bench.device), rows=len(positions))
    stream = torch.cuda.Stream(bench.device)
    with torch.cuda.stream(stream):
        for _ in range(2):
            ready.sample(lambda rows: logits[rows], None)
    torch.cuda.synchronize(bench.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        ready.sample(lambda rows: logits[rows], None)
    times = []
    for _ in range(40):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[10:])


MORE: dict[str, Callable[[Any], None]] = {"long": long, "choosing": choosing, "drafter": drafter}
