"""Measure what `onedraw batch` loses against the same requests run by `onedraw bench`.

    python -m bench.batch_lines [MODEL] [--batch 8] [--waves 4] [--prompt-tokens 128] [--new-tokens 64] [--rounds 5]

Both sides run the same prompts and seeds on one engine, in turn: `bench` in waves of --batch requests that begin together,
the batch as one file of lines. The figures are ratios, the median over rounds: new tokens per second, and tokens per second of
processor time, which other programs on a busy machine disturb less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

from onedraw.build.llm import build_llm
from onedraw.cli.bench import Prompts, _together
from onedraw.llm.llm import LLM
from onedraw.llm.request_options import RequestOptions, make_generation
from onedraw.server.batch.offline import run_file
from onedraw.settings import Settings


def in_waves(llm: LLM, prompts: list[tuple[int, ...]], *, batch: int, new_tokens: int) -> float:
    """Return new tokens per second of waves of requests."""
    seconds = 0.0
    for start in range(0, len(prompts), batch):
        generations = [
            make_generation(
                RequestOptions(temperature=1.0, top_p=1.0, max_tokens=new_tokens, ignore_eos=True, seed=start + row),
                llm=llm,
                prompt=prompt,
            )
            for row, prompt in enumerate(prompts[start : start + batch])
        ]
        seconds += _together(llm, generations).seconds
    return len(prompts) * new_tokens / seconds


def as_file(llm: LLM, prompts: list[tuple[int, ...]], *, new_tokens: int, folder: Path) -> float:
    """Return new tokens per second of a file of lines."""
    source = folder / "in.jsonl"
    with source.open("w") as file:
        for seed, prompt in enumerate(prompts):
            body = {
                "prompt": prompt,
                "temperature": 1.0,
                "top_p": 1.0,
                "max_tokens": new_tokens,
                "ignore_eos": True,
                "seed": seed,
            }
            file.write(json.dumps({"custom_id": str(seed), "method": "POST", "url": "/v1/completions", "body": body}) + "\n")
    summary = asyncio.run(run_file(llm, source, folder / "out.jsonl"))
    assert summary.completion_tokens == len(prompts) * new_tokens
    return summary.completion_tokens / summary.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    for name, value in (("batch", 8), ("waves", 4), ("prompt-tokens", 128), ("new-tokens", 64), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    context = given.prompt_tokens + given.new_tokens
    settings = Settings(model=given.model, max_batch=given.batch, max_context=context, draft=("none",), prefix_cache=False)
    found: list[tuple[float, float]] = []
    spent: list[float] = []  # processor time of the waves over that of the lines
    with build_llm(settings) as llm, tempfile.TemporaryDirectory() as folder:
        prompts = Prompts(llm, given.prompt_tokens)
        for _ in range(given.rounds + 1):
            chosen = [prompts.next() for _ in range(given.batch * given.waves)]
            begin = time.process_time()
            waves = in_waves(llm, chosen, batch=given.batch, new_tokens=given.new_tokens)
            middle = time.process_time()
            found.append((waves, as_file(llm, chosen, new_tokens=given.new_tokens, folder=Path(folder))))
            spent.append((middle - begin) / (time.process_time() - middle))
    ratios = sorted(lines / waves for waves, lines in found[1:])  # The first round warms up.
    bench, batch = (statistics.median(side) for side in zip(*found[1:], strict=True))
    print(f"bench {bench:.1f} tokens/s, batch {batch:.1f} tokens/s, ratio {statistics.median(ratios):.3f}", end=" ")
    print(f"({ratios[0]:.3f} … {ratios[-1]:.3f} over {given.rounds} rounds)")
    print(f"per second of processor time: ratio {statistics.median(spent[1:]):.3f} ({min(spent[1:]):.3f} … {max(spent[1:]):.3f})")


if __name__ == "__main__":
    main()
