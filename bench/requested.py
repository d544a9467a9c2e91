"""What rows cost that request logprobs or a constraint: decode speed beside plain rows, on one load of the model.

    python -m bench.requested random:llama3-8b [--batch 1,8] [--mixed 32] [--new-tokens 128] [--repeats 2] [--json]

For every batch size: plain requests, the same with `logprobs: 5`, and with a JSON schema that no reply completes (T 1, so that
the model's choice matters). Then `--mixed` requests, first without and then with one constrained request among them. Nothing is
drafted. The share is the decode speed relative to plain requests of the same number.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from onedraw.build.llm import build_llm
from onedraw.cli.bench import measure_all
from onedraw.cli.flags import token_ids
from onedraw.llm.llm import LLM
from onedraw.llm.request_options import RequestOptions
from onedraw.settings import Settings

SAMPLED = {"temperature": 0.8, "top_p": 0.95}
HOT = {"temperature": 1.0}


@dataclass(frozen=True, slots=True)
class Cost:
    """One kind of requests; times in milliseconds."""

    requested: str
    batch: int
    tokens_per_second: float
    p99_ms: float  # between two tokens of a request
    share: float  # of the speed of plain requests


def costs(llm: LLM, *, batches: Sequence[int], mixed: int, prompt_tokens: int, new_tokens: int, repeats: int) -> list[Cost]:
    found: list[Cost] = []

    def measure(batch: int, name: str, plain: Cost | None, *, constrained: int = 0, **options: object) -> Cost:
        given = RequestOptions.of(max_tokens=new_tokens, ignore_eos=True, seed=0, speculation=False, **options)
        work = {"prompt_tokens": prompt_tokens, "repeats": repeats, "constrained": constrained, "notify": _note}
        (measured,) = measure_all(llm, given, batches=[batch], **work)  # type: ignore[arg-type]
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


def _note(line: str) -> None:
    """No-op: every result is a line of its own."""


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
    given = parser.parse_args(arguments)
    most = max((*given.batch, given.mixed))
    context = given.prompt_tokens + given.new_tokens
    settings = Settings(
        model=given.model, backend=given.backend, max_batch=most, max_context=context, queue_limit=most, draft=("none",),
        self_check=False,
    )  # fmt: skip
    work = {name: getattr(given, name) for name in ("mixed", "prompt_tokens", "new_tokens", "repeats")}
    with build_llm(settings, lambda line: print(line, file=sys.stderr), warm_up=False) as llm:
        found = costs(llm, batches=given.batch, **work)
    if given.json:
        print(json.dumps([asdict(cost) for cost in found]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
