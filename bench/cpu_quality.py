"""Measure how packed weights, 8-bit activations and KV cache dtypes change quality: perplexity and greedy replies.

    python -m bench.cpu_quality [MODEL] [--kv] [--new-tokens 40] [--json]

Runs one model file in three configurations: float32, packed weights with float32 activations (which must give the same bits), and
packed weights with 8-bit activations, the default on a CPU. With --kv it runs float32 with every KV cache dtype instead.
Perplexity is measured on `bench/prompts/prose.txt`, in independent windows of 512 tokens.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from onedraw.build.llm import build_llm
from onedraw.llm.llm import LLM
from onedraw.llm.request_options import RequestOptions, make_generation
from onedraw.settings import Settings

TEXT = Path(__file__).parent / "prompts" / "prose.txt"
WINDOW = 512
OPENINGS = (
    "The capital of France is",
    "Once upon a time there was a",
    "Water boils when",
    "def fibonacci(n):",
    "My favourite season is",
)
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "f32"},
    "packed, f32 activations": {"dtype": "packed", "cpu_activations": "f32"},
    "packed, int8 activations": {"dtype": "packed"},
}
KV_CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "f32"},
    **{f"float32, kv {kind}": {"dtype": "f32", "kv_dtype": kind} for kind in ("bf16", "f16", "int8", "fp8")},
}


def logprobs(llm: LLM) -> list[float]:
    """Return the logprob of every token of the text except the first of each window."""
    ids = llm.encode(TEXT.read_text(encoding="utf-8"), add_special=False)
    request_options = RequestOptions(temperature=0.0, max_tokens=0, prompt_logprobs=0, seed=1)
    found: list[float] = []
    for start in range(0, len(ids), WINDOW):
        part = ids[start : start + WINDOW]
        if len(part) > 1:
            (reply,) = llm.run(make_generation(request_options, llm=llm, prompt=part))
            found += [one.logprob for one in reply.prompt_logprobs or ()]
    return found


def replies(llm: LLM, new_tokens: int) -> list[tuple[tuple[int, ...], str]]:
    """Return the token ids and the text of a greedy reply to each opening."""
    request_options = RequestOptions(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, seed=1)
    generations = [make_generation(request_options, llm=llm, prompt=llm.encode(opening)) for opening in OPENINGS]
    return [(tuple(c.token for c in reply.tokens), reply.text) for reply in llm.run(*generations)]


def measure(model: str, settings: dict[str, Any], new_tokens: int) -> dict[str, Any]:
    with build_llm(Settings(model=model, device="cpu", draft=("none",), max_context=1024, **settings)) as llm:
        found = logprobs(llm)
        completions = replies(llm, new_tokens)
        return {
            "fingerprint": llm.card.fingerprint,
            "tokens": len(found),
            "perplexity": math.exp(-sum(found) / len(found)),
            "replies": [text for _, text in completions],
            "reply_tokens": [ids for ids, _ in completions],
        }


def agreement(first: list[tuple[int, ...]], second: list[tuple[int, ...]]) -> list[int]:
    """Return how many leading tokens each pair of replies has in common."""
    return [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a)) for a, b in zip(first, second, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--new-tokens", type=int, default=40)
    parser.add_argument("--kv", action="store_true", help="compare KV cache dtypes instead of weight formats")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    configurations = KV_CONFIGURATIONS if options.kv else CONFIGURATIONS
    found = {name: measure(options.model, settings, options.new_tokens) for name, settings in configurations.items()}
    base = found["float32"]
    for result in found.values():
        result["ratio"] = result["perplexity"] / base["perplexity"]
        result["agrees_for"] = agreement(base["reply_tokens"], result["reply_tokens"])
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for name, result in found.items():
        print(f"{name:26s} perplexity {result['perplexity']:.4f} over {result['tokens']} tokens, {result['ratio']:.5f} x")
        print(f"{'':26s} greedy replies agree with float32 for {result['agrees_for']} of {options.new_tokens} tokens")
    for number, opening in enumerate(OPENINGS):
        for name in ("float32", list(configurations)[-1]):
            print(f"{name:26s} {opening}{found[name]['replies'][number]!r}")


if __name__ == "__main__":
    main()
