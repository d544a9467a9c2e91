"""What a split over devices costs alone, and what it gains when its stages work on several turns at once.

    python -m bench.split_overlap smollm2 --devices cpu:0,cpu:1              two stages, a processor each
    python -m bench.split_overlap --shape 1b --devices cuda:0,cuda:0         random weights, one GPU named twice

The same requests, greedy, in three ways: whole on the first device, split with one turn at a time, split with a turn per
stage. Measured are one request alone (milliseconds per token: a split pays copies and the change of threads), the prompts of
a crowd (tokens per second until all have their first token), and its replies (tokens per second). `busy` is how many stages
were at work on average: the time spent in stages over the time that passed. Every way must give the same tokens, and where all
stages are on one kind of device the same checksums of scores (a GPU and a CPU have low bits of their own); the program says what
it compared, and fails where it is not so. Each figure is the best of --repeats.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from onedraw.backends.base import Backend
from onedraw.build.checkpoint import find_checkpoint
from onedraw.build.drafters import make_speculator
from onedraw.build.llm import make_service, torch_backend
from onedraw.checkpoints.random_weights import random_weights
from onedraw.engine.service import Event, Service
from onedraw.models.registry import LLAMA, ModelInfo, read_model_info
from onedraw.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from onedraw.settings import Settings
from onedraw.types import Request, SamplingParams

SHAPES = {  # layers, hidden, heads, key heads, head size, feed-forward, vocabulary
    "tiny": (4, 128, 4, 2, 32, 256, 1024),
    "135m": (30, 576, 9, 3, 64, 1536, 49152),
    "1b": (16, 2048, 32, 8, 64, 8192, 128256),
    "8b": (32, 4096, 32, 8, 128, 14336, 128256),
}


@dataclass(frozen=True, slots=True)
class Measure:
    way: str
    tickets: int
    alone_ms_per_token: float
    alone_cpu_ms_per_token: float  # computing time of the process: what a busy machine hardly changes
    prompts_tokens_per_second: float
    prompts_cpu_ms_per_token: float
    prompts_busy: float
    replies_tokens_per_second: float
    replies_cpu_ms_per_token: float
    replies_busy: float


@dataclass
class Answer:
    """What one request got, and when."""

    tokens: list[int]
    checksums: list[int | None]
    done: threading.Event
    error: str = ""

    def hear(self, event: Event) -> None:
        self.tokens += [choice.token for choice in event.sampled]
        self.checksums += [choice.checksum for choice in event.sampled]
        if event.error is not None:
            self.error = str(event.error)
        if event.finish is not None or event.error is not None:
            self.done.set()


def random_model(shape: str) -> ModelInfo:
    layers, hidden, heads, kv_heads, dim, inner, vocab = SHAPES[shape]
    mixer = AttentionSpec(heads=heads, kv_heads=kv_heads, head_dim=dim, rope=RopeSpec(5e5, dim), scale=dim**-0.5)
    spec = ModelSpec(
        family="llama",
        layers=(LayerSpec(mixer, MlpSpec(inner)),) * layers,
        hidden=hidden,
        vocab=vocab,
        eps=1e-5,
        tied=False,
        max_context=8192,
    )
    return ModelInfo(spec, LLAMA, "plain", random_weights(spec, seed=1), (), {})


@dataclass(frozen=True, slots=True)
class Run:
    """What a crowd of requests got, in how many seconds; how long the process computed, and how long stages were at work."""

    answers: list[Answer]
    seconds: float
    computing: float
    at_work: float


def ask(service: Service, requests: Sequence[Request]) -> Run:
    """All at once."""
    answers = [Answer([], [], threading.Event()) for _ in requests]
    before, begin, computed = service.stats().step_seconds, time.perf_counter(), time.process_time()
    service.submit([(request, answer.hear) for request, answer in zip(requests, answers, strict=True)])
    for answer in answers:
        answer.done.wait()
    seconds = time.perf_counter() - begin
    while service.stats().running:  # counters follow the last event within a turn
        time.sleep(0.001)
    if errors := [answer.error for answer in answers if answer.error]:
        raise RuntimeError(errors[0])
    return Run(answers, seconds, time.process_time() - computed, service.stats().step_seconds - before)


def requests(vocab: int, *, count: int, prompt: int, new: int, seed: int, checksums: bool = False) -> list[Request]:
    rng = np.random.default_rng(seed)
    params = SamplingParams(temperature=0.0, max_tokens=new, checksums=checksums)
    prompts = rng.integers(0, vocab, (count, prompt))
    return [Request(f"{seed}.{i}", tuple(map(int, tokens)), params) for i, tokens in enumerate(prompts)]


def measure(way: str, service: Service, given: argparse.Namespace) -> tuple[Measure, list[Answer]]:
    make = partial(requests, service.capacity.vocab)
    ask(service, make(count=2, prompt=32, new=4, seed=1))  # warm
    alone, prompts, replies = [], [], []
    for repeat in range(given.repeats):
        seed = 10 * repeat
        alone.append(ask(service, make(count=1, prompt=4, new=given.new_tokens, seed=seed + 2)))
        prompts.append(ask(service, make(count=given.requests, prompt=given.prompt_tokens, new=1, seed=seed + 3)))
        replies.append(ask(service, make(count=given.requests, prompt=4, new=given.new_tokens, seed=seed + 4)))
    judged = ask(service, make(count=given.requests, prompt=48, new=12, seed=9, checksums=True)).answers
    figures = [1000 * min(run.seconds for run in alone) / given.new_tokens]
    figures.append(1000 * min(run.computing for run in alone) / given.new_tokens)
    for runs, tokens in ((prompts, given.requests * given.prompt_tokens), (replies, given.requests * given.new_tokens)):
        best = min(runs, key=lambda run: run.seconds)
        figures += [tokens / best.seconds, 1000 * min(run.computing for run in runs) / tokens, best.at_work / best.seconds]
    return Measure(way, service.capacity.max_in_flight, *(round(figure, 2) for figure in figures)), judged


def open_one(given: argparse.Namespace, info: ModelInfo, **place: Any) -> Service:
    settings = Settings.of(
        max_batch=given.requests,
        max_context=max(given.prompt_tokens, 64) + given.new_tokens + 16,
        prefix_cache=False,
        draft=("none",),
        dtype=given.dtype,
        self_check=False,
        **place,
    )

    def make() -> Backend:
        return torch_backend(settings, info, lambda line: None, None)

    return make_service(make, settings, make_speculator(settings))


@dataclass(frozen=True, slots=True)
class Verdict:
    compared: str  # what the ways were compared by
    same: bool

    def __str__(self) -> str:
        return f"{self.compared}: the same in every way" if self.same else f"{self.compared} DIFFER"


def judge(ways: Sequence[Sequence[Answer]], names: Sequence[str]) -> Verdict:
    """Whether every way gave what the first did."""
    alike = len({name.partition(":")[0] for name in names}) == 1
    found = [[(answer.tokens, answer.checksums if alike else ()) for answer in answers] for answers in ways]
    return Verdict("tokens and checksums" if alike else "tokens", all(one == found[0] for one in found))


def compare(given: argparse.Namespace) -> tuple[list[Measure], Verdict]:
    checkpoint = None if given.shape else find_checkpoint(Settings.of(model=given.model))
    info = random_model(given.shape) if checkpoint is None else read_model_info(checkpoint)
    names = given.devices.split(",")
    ways = {
        f"whole on {names[0]}": {"device": names[0]},
        "split, one turn at a time": {"devices": given.devices, "overlap": "off"},
        "split, a turn per stage": {"devices": given.devices, "overlap": "on"},
    }
    measures, judged = [], []
    for way, place in ways.items():
        service = open_one(given, info, **place)
        try:
            found, answers = measure(way, service, given)
        finally:
            service.close()
        measures.append(found)
        judged.append(answers)
        if not given.json:
            print(told(found), flush=True)
    return measures, judge(judged, names)


def told(found: Measure) -> str:
    return (
        f"{found.way:26} alone {found.alone_ms_per_token:.2f} ms/token ({found.alone_cpu_ms_per_token:.2f} computing), "
        f"prompts {found.prompts_tokens_per_second:.0f} tok/s ({found.prompts_cpu_ms_per_token:.2f} ms/token computing, "
        f"{found.prompts_busy:.2f} busy), replies {found.replies_tokens_per_second:.0f} tok/s "
        f"({found.replies_cpu_ms_per_token:.2f} ms/token computing, {found.replies_busy:.2f} busy)"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape instead of a model")
    parser.add_argument("--devices", default="cpu:0,cpu:1")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    measures, verdict = compare(given)
    if given.json:
        found = {"measures": [asdict(one) for one in measures], "compared": verdict.compared, "same": verdict.same}
        print(json.dumps(found))
    else:
        print(verdict)
    return 0 if verdict.same else 1


if __name__ == "__main__":
    sys.exit(main())
