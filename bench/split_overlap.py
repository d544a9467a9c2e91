"""Measure what a split over devices costs for one request, and what it gains when its stages work on several steps at once.

    python -m bench.split_overlap smollm2 --devices cpu:0,cpu:1              two stages, one CPU each
    python -m bench.split_overlap --shape 1b --devices cuda:0,cuda:0         random weights, one GPU as two stages

Runs the same greedy requests in three layouts: whole on the first device, split with one step at a time, and split with one step
per stage. Measures one request alone (milliseconds per token, which shows the cost of copies and thread switches), the prompts of
concurrent requests (tokens per second until all have their first token), and their replies (tokens per second). `busy` is the
average number of working stages: the time spent in stages over the elapsed time. All layouts must give the same tokens, and also
the same score checksums if all stages are on one kind of device (a GPU and a CPU round differently); otherwise the exit status is
1. Each figure is the best of --repeats.
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
from onedraw.engine.client import Event
from onedraw.engine.service import Service
from onedraw.models.registry import LLAMA, ModelInfo, read_model_info
from onedraw.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from onedraw.settings import Settings
from onedraw.types import Request, SamplingParams

SHAPES = {  # layers, hidden size, heads, KV heads, head size, feed-forward size, vocabulary
    "tiny": (4, 128, 4, 2, 32, 256, 1024),
    "135m": (30, 576, 9, 3, 64, 1536, 49152),
    "1b": (16, 2048, 32, 8, 64, 8192, 128256),
    "8b": (32, 4096, 32, 8, 128, 14336, 128256),
}


@dataclass(frozen=True, slots=True)
class Measure:
    layout: str
    max_in_flight: int
    alone_ms_per_token: float
    alone_cpu_ms_per_token: float  # CPU time of the process, which other load on the machine hardly changes
    prompts_tokens_per_second: float
    prompts_cpu_ms_per_token: float
    prompts_busy: float
    replies_tokens_per_second: float
    replies_cpu_ms_per_token: float
    replies_busy: float


@dataclass
class Answer:
    """The result of one request, filled by the events of the engine."""

    tokens: list[int]
    checksums: list[int | None]
    done: threading.Event
    error: str = ""

    def on_event(self, event: Event) -> None:
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
    """The answers of concurrent requests, the elapsed time, the CPU time of the process, and the time spent in stages."""

    answers: list[Answer]
    seconds: float
    cpu_seconds: float
    stage_seconds: float


def run_all(service: Service, requests: Sequence[Request]) -> Run:
    """Submit all requests at once and wait for their ends."""
    answers = [Answer([], [], threading.Event()) for _ in requests]
    stage_seconds, begin, cpu_seconds = service.stats().step_seconds, time.perf_counter(), time.process_time()
    service.submit([(request, answer.on_event) for request, answer in zip(requests, answers, strict=True)])
    for answer in answers:
        answer.done.wait()
    seconds = time.perf_counter() - begin
    while service.stats().running:  # the counters change after the last event of a step
        time.sleep(0.001)
    if errors := [answer.error for answer in answers if answer.error]:
        raise RuntimeError(errors[0])
    return Run(answers, seconds, time.process_time() - cpu_seconds, service.stats().step_seconds - stage_seconds)


def requests(vocab: int, *, count: int, prompt: int, new: int, seed: int, checksums: bool = False) -> list[Request]:
    rng = np.random.default_rng(seed)
    params = SamplingParams(temperature=0.0, max_tokens=new, checksums=checksums)
    prompts = rng.integers(0, vocab, (count, prompt))
    return [Request(f"{seed}.{i}", tuple(map(int, tokens)), params) for i, tokens in enumerate(prompts)]


def measure(layout: str, service: Service, options: argparse.Namespace) -> tuple[Measure, list[Answer]]:
    make = partial(requests, service.capacity.vocab)
    run_all(service, make(count=2, prompt=32, new=4, seed=1))  # warm up
    alone, prompts, replies = [], [], []
    for repeat in range(options.repeats):
        seed = 10 * repeat
        alone.append(run_all(service, make(count=1, prompt=4, new=options.new_tokens, seed=seed + 2)))
        prompts.append(run_all(service, make(count=options.requests, prompt=options.prompt_tokens, new=1, seed=seed + 3)))
        replies.append(run_all(service, make(count=options.requests, prompt=4, new=options.new_tokens, seed=seed + 4)))
    compared = run_all(service, make(count=options.requests, prompt=48, new=12, seed=9, checksums=True)).answers
    figures = [1000 * min(run.seconds for run in alone) / options.new_tokens]
    figures.append(1000 * min(run.cpu_seconds for run in alone) / options.new_tokens)
    for runs, tokens in ((prompts, options.requests * options.prompt_tokens), (replies, options.requests * options.new_tokens)):
        best = min(runs, key=lambda run: run.seconds)
        figures += [
            tokens / best.seconds,
            1000 * min(run.cpu_seconds for run in runs) / tokens,
            best.stage_seconds / best.seconds,
        ]
    return Measure(layout, service.capacity.max_in_flight, *(round(figure, 2) for figure in figures)), compared


def open_service(options: argparse.Namespace, info: ModelInfo, **placement: Any) -> Service:
    settings = Settings.of(
        max_batch=options.requests,
        max_context=max(options.prompt_tokens, 64) + options.new_tokens + 16,
        prefix_cache=False,
        draft=("none",),
        dtype=options.dtype,
        self_check=False,
        **placement,
    )

    def make() -> Backend:
        return torch_backend(settings, info, lambda line: None, None)

    return make_service(make, settings, make_speculator(settings))


@dataclass(frozen=True, slots=True)
class Verdict:
    compared: str  # what was compared: tokens, or tokens and checksums
    same: bool

    def __str__(self) -> str:
        return f"{self.compared}: the same in all layouts" if self.same else f"{self.compared} DIFFER"


def compare_answers(layouts: Sequence[Sequence[Answer]], names: Sequence[str]) -> Verdict:
    """Tell whether every layout gave the answers of the first. Checksums count only if all devices are of one kind."""
    one_kind = len({name.partition(":")[0] for name in names}) == 1
    found = [[(answer.tokens, answer.checksums if one_kind else ()) for answer in answers] for answers in layouts]
    return Verdict("tokens and checksums" if one_kind else "tokens", all(one == found[0] for one in found))


def compare(options: argparse.Namespace) -> tuple[list[Measure], Verdict]:
    checkpoint = None if options.shape else find_checkpoint(Settings.of(model=options.model))
    info = random_model(options.shape) if checkpoint is None else read_model_info(checkpoint)
    names = options.devices.split(",")
    layouts = {
        f"whole on {names[0]}": {"device": names[0]},
        "split, one step at a time": {"devices": options.devices, "overlap": "off"},
        "split, one step per stage": {"devices": options.devices, "overlap": "on"},
    }
    measures, results = [], []
    for layout, placement in layouts.items():
        service = open_service(options, info, **placement)
        try:
            found, answers = measure(layout, service, options)
        finally:
            service.close()
        measures.append(found)
        results.append(answers)
        if not options.json:
            print(describe(found), flush=True)
    return measures, compare_answers(results, names)


def describe(found: Measure) -> str:
    return (
        f"{found.layout:26} alone {found.alone_ms_per_token:.2f} ms/token ({found.alone_cpu_ms_per_token:.2f} CPU), "
        f"prompts {found.prompts_tokens_per_second:.0f} tok/s ({found.prompts_cpu_ms_per_token:.2f} ms/token CPU, "
        f"{found.prompts_busy:.2f} busy), replies {found.replies_tokens_per_second:.0f} tok/s "
        f"({found.replies_cpu_ms_per_token:.2f} ms/token CPU, {found.replies_busy:.2f} busy)"
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
    options = parser.parse_args(arguments)
    measures, verdict = compare(options)
    if options.json:
        found = {"measures": [asdict(one) for one in measures], "compared": verdict.compared, "same": verdict.same}
        print(json.dumps(found))
    else:
        print(verdict)
    return 0 if verdict.same else 1


if __name__ == "__main__":
    sys.exit(main())
