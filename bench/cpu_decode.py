"""Decode speed on a CPU against `transformers`: same weights, same dtype, one run.

    python -m bench.cpu_decode [MODEL] [--new-tokens 64] [--repeats 3] [--json]

Prints batch-1 decode of both, eight requests at once of ours, and the ratios. The two take turns, so that a noisy machine
is noisy for both; the median of the repeats counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from typing import Any

import torch

from bench.peer import llama_in_transformers
from onedraw.assemble import open_door
from onedraw.checkpoints.pull import resolve
from onedraw.door import Door
from onedraw.settings import Settings, default_cache_dir
from onedraw.wishes import Wishes, settle

PROMPT = tuple((7 * i) % 4000 + 100 for i in range(64))


def ours(door: Door, *, count: int, new_tokens: int) -> float:
    """Tokens per second after the first token of all, over `count` requests at once."""
    stamps: list[list[float]] = [[] for _ in range(count)]

    def one(index: int) -> None:
        wishes = Wishes(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, seed=1)
        prompt = (PROMPT[index], *PROMPT[1:])
        for piece in door.stream(settle(wishes, door=door, prompt=prompt)):
            stamps[index].extend([time.perf_counter()] * len(piece.choices))

    threads = [threading.Thread(target=one, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    begin = max(s[0] for s in stamps)
    later = [t for s in stamps for t in s if t > begin]
    return len(later) / (max(later) - begin)


@torch.inference_mode()
def theirs(model: Any, *, new_tokens: int) -> float:
    """transformers, one request, greedy, with its cache, after its first token."""
    ids = torch.tensor([PROMPT])
    out = model(ids, use_cache=True)
    cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
    begin = time.perf_counter()
    for _ in range(new_tokens - 1):
        out = model(token, past_key_values=cache, use_cache=True)
        cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
    return (new_tokens - 1) / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    path = resolve(options.model, default_cache_dir())
    begin = time.perf_counter()
    door = open_door(Settings(model=str(path), dtype="f32", max_context=1024))
    opened = time.perf_counter() - begin
    peer = llama_in_transformers(path)
    runs: dict[str, list[float]] = {"transformers 1": [], "onedraw 1": [], "onedraw 8": []}
    for _ in range(options.repeats):
        runs["transformers 1"].append(theirs(peer, new_tokens=options.new_tokens))
        runs["onedraw 1"].append(ours(door, count=1, new_tokens=options.new_tokens))
        runs["onedraw 8"].append(ours(door, count=8, new_tokens=options.new_tokens))
    door.close()
    speed = {name: statistics.median(values) for name, values in runs.items()}
    base = speed["transformers 1"]
    weight_bytes = sum(p.numel() * p.element_size() for p in peer.parameters())
    result = {
        "tokens_per_second": speed,
        "ratio_1": speed["onedraw 1"] / base,
        "ratio_8": speed["onedraw 8"] / base,
        "threads": torch.get_num_threads(),
        "weight_gigabytes_per_second_at_1": speed["onedraw 1"] * weight_bytes / 1e9,
        "open_seconds": opened,
        "runs": runs,
    }
    if options.json:
        print(json.dumps(result, indent=2))
        return
    for name, value in speed.items():
        print(f"{name:16s} {value:7.1f} tok/s   {value / base:5.2f} x transformers at 1")
    print(f"weights are read at {result['weight_gigabytes_per_second_at_1']:.1f} GB/s at batch 1; opened in {opened:.1f} s")


if __name__ == "__main__":
    main()
