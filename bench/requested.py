"""Measure what logprobs and constraints cost: decode speed of such requests relative to plain ones, on one load of the model.

    python -m bench.requested random:llama3-8b [--batch 1,8] [--mixed 32] [--new-tokens 128] [--repeats 2] [--json]

For every batch size it runs plain requests, requests with `logprobs: 5`, and requests with a JSON schema that no reply completes
(at temperature 1, so that the tokens vary). Then it runs --mixed requests, first without and then with one constrained request.
Speculative decoding is off. The share is the decode speed relative to the same number of plain requests.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from onedraw.build.llm import build_llm
from onedraw.cli.bench import measure_all
from onedraw.cli.flags import token_ids
from onedraw.llm.llm import LLM
from onedraw.llm.request_options import RequestOptions
from onedraw.settings import Settings

SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}
HOT: dict[str, Any] = {"temperature": 1.0}


@dataclass(frozen=True, slots=True)
class Cost:
    """The figures of one kind of request and one batch size."""

    requested: str
    batch: int
    tokens_per_second: float
    p99_ms: float  # 99th percentile of the time between two tokens of a request, in milliseconds
    share: float  # decode speed relative to plain requests


def costs(llm: LLM, *, batches: Sequence[int], mixed: int, prompt_tokens: int, new_tokens: int, repeats: int) -> list[Cost]:
    found: list[Cost] = []

    def measure(batch: int, name: str, plain: Cost | None, *, constrained: int = 0, **options: object) -> Cost:
        fields = RequestOptions.of(max_tokens=new_tokens, ignore_eos=True, seed=0, speculation=False, **options)
        work = {"prompt_tokens": prompt_tokens, "repeats": repeats, "constrained": constrained, "notify": _no_progress}
        (measured,) = measure_all(llm, fields, batches=[batch], **work)  # type: ignore[arg-type]
        speed = measured.decode_tokens_per_second
        share = 1.0 if plain is None else speed / max(plain.tokens_per_second, 1e-9)
        found.append(Cost(name, batch, speed, measured.inter_token_p99_ms, share))
        print(f"{name:30} {batch:4} rows {speed:9.1f} tok/s, p99 {found[-1].p99_ms:7.2f} ms, {share:6.1%} of plain", flush=True)
        return found[-1]

    for batch in batches:
        plain = measure(batch, "plain, T .8", None, **SAMPLED)
        measure(batch, "logprobs 5, T .8", plain, **SAMPLED, logprobs=5)
        plain = measure(batch, "plain, T 1", None, **HOT)
        measure(batch, "JSON schema, T 1", plain, **HOT, constrained=-1)
    if mixed:
        plain = measure(mixed, "plain, T 1", None, **HOT)
        measure(mixed, "one of them constrained", plain, **HOT, constrained=1)
    return found


def _no_progress(line: str) -> None:
    """Discard progress lines, since `measure` prints every result."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--batch", type=token_ids, default=(1, 8))
    parser.add_argument("--mixed", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args(arguments)
    largest = max((*flags.batch, flags.mixed))
    context = flags.prompt_tokens + flags.new_tokens
    settings = Settings(
        model=flags.model, backend=flags.backend, max_batch=largest, max_context=context, queue_limit=largest, draft=("none",),
        self_check=False,
    )  # fmt: skip
    work = {name: getattr(flags, name) for name in ("mixed", "prompt_tokens", "new_tokens", "repeats")}
    with build_llm(settings, lambda line: print(line, file=sys.stderr), warm_up=False) as llm:
        found = costs(llm, batches=flags.batch, **work)
    if flags.json:
        print(json.dumps([asdict(cost) for cost in found]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
