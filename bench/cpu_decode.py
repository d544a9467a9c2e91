"""Compare decode speed on a CPU with `transformers`: same weights, same dtype, one run.

    python -m bench.cpu_decode [MODEL] [--new-tokens 64] [--repeats 3] [--json]

Prints the decode speed of one request in both systems, of eight concurrent requests in onedraw, and the ratios. The two are
measured alternately, each in its own process, so that other load on the machine affects both. The median of the repeats counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from bench.peer import llama_in_transformers
from onedraw.build.llm import build_llm
from onedraw.checkpoints.download import resolve_model
from onedraw.llm.llm import LLM
from onedraw.llm.request_options import RequestOptions, make_generation
from onedraw.settings import Settings, default_cache_dir

PROMPT = tuple((7 * i) % 4000 + 100 for i in range(64))


def onedraw_decode(llm: LLM, *, count: int, new_tokens: int) -> float:
    """Return the tokens per second of `count` concurrent requests, from the moment all have their first token."""
    stamps: list[list[float]] = [[] for _ in range(count)]

    def run_one(index: int) -> None:
        request_options = RequestOptions(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, seed=1)
        prompt = (PROMPT[index], *PROMPT[1:])
        for piece in llm.pieces(llm.prepare(make_generation(request_options, llm=llm, prompt=prompt))):
            stamps[index].extend([time.perf_counter()] * len(piece.tokens))

    threads = [threading.Thread(target=run_one, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    begin = max(s[0] for s in stamps)
    later = [t for s in stamps for t in s if t > begin]
    return len(later) / (max(later) - begin)


@torch.inference_mode()
def transformers_decode(model: Any, *, new_tokens: int) -> float:
    """Return the tokens per second of one greedy request with the KV cache, after its first token."""
    ids = torch.tensor([PROMPT])
    out = model(ids, use_cache=True)
    cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
    begin = time.perf_counter()
    for _ in range(new_tokens - 1):
        out = model(token, past_key_values=cache, use_cache=True)
        cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
    return (new_tokens - 1) / (time.perf_counter() - begin)


def measure_onedraw(path: str, *, new_tokens: int) -> dict[str, float]:
    begin = time.perf_counter()
    llm = build_llm(Settings(model=path, dtype="f32", max_context=1024, draft=("none",)))
    opened = time.perf_counter() - begin
    onedraw_decode(llm, count=1, new_tokens=4)
    found = {f"onedraw {count}": onedraw_decode(llm, count=count, new_tokens=new_tokens) for count in (1, 8)}
    llm.close()
    return {**found, "open_seconds": opened}


def measure_transformers(path: str, *, new_tokens: int) -> dict[str, float]:
    model = llama_in_transformers(Path(path))
    transformers_decode(model, new_tokens=4)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"transformers 1": transformers_decode(model, new_tokens=new_tokens), "weight_bytes": size}


SYSTEMS = {"onedraw": measure_onedraw, "transformers": measure_transformers}


def measure_in_subprocess(system: str, path: str, new_tokens: int) -> dict[str, float]:
    """Measure one system in its own process, since two thread pools in one process slow each other down."""
    command = [sys.executable, "-m", "bench.cpu_decode", path, "--system", system, "--new-tokens", str(new_tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    path = str(resolve_model(options.model, default_cache_dir()))
    if options.system:
        print(json.dumps(SYSTEMS[options.system](path, new_tokens=options.new_tokens)))
        return
    runs: dict[str, list[float]] = {}
    for _ in range(options.repeats):
        for system in SYSTEMS:
            for name, value in measure_in_subprocess(system, path, options.new_tokens).items():
                runs.setdefault(name, []).append(value)
    median = {name: statistics.median(values) for name, values in runs.items()}
    base = median["transformers 1"]
    result = {
        "median": median,
        "ratio_1": median["onedraw 1"] / base,
        "ratio_8": median["onedraw 8"] / base,
        "threads": torch.get_num_threads(),
        "weight_gigabytes_per_second_at_1": median["onedraw 1"] * median["weight_bytes"] / 1e9,
        "runs": runs,
    }
    if options.json:
        print(json.dumps(result, indent=2))
        return
    for name in ("transformers 1", "onedraw 1", "onedraw 8"):
        print(f"{name:16s} {median[name]:7.1f} tok/s   {median[name] / base:5.2f} x transformers")
    rate = result["weight_gigabytes_per_second_at_1"]
    print(f"one request reads weights at {rate:.1f} GB/s; model opened in {median['open_seconds']:.1f} s")


if __name__ == "__main__":
    main()
