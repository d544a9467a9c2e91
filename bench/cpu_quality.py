"""Measure how packed weights, 8-bit activations and KV cache dtypes change quality: perplexity and greedy replies.

    python -m bench.cpu_quality [MODEL] [--kv [DTYPE …]] [--window 512] [--new-tokens 40] [--json]

Runs one model file in three configurations: float32, packed weights with float32 activations (which must give the same bits), and
packed weights with 8-bit activations, the default on a CPU. With --kv it runs float32 with every KV cache dtype instead, or with
those that are named. Perplexity is measured on `bench/prompts/prose.txt`, in independent windows of 512 tokens. For longer
windows the texts of `bench/prompts/conversations.jsonl` follow it. The divergence (KL) from float32 is that of the likeliest
tokens of both and of all others together, a lower bound on that of all tokens.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onedraw.build.llm import build_llm
from onedraw.llm.llm import LLM
from onedraw.llm.request_options import RequestOptions, make_generation
from onedraw.settings import Settings
from onedraw.types import Logprobs

TEXT = Path(__file__).parent / "prompts" / "prose.txt"
CONVERSATIONS = TEXT.with_name("conversations.jsonl")
WINDOW = 512
ALTERNATIVES = 100  # likeliest tokens of a position that the divergence compares
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
KV_KINDS = ("bf16", "f16", "int8", "fp8", "int4")


def kv_configurations(kinds: Sequence[str]) -> dict[str, dict[str, Any]]:
    narrow = {f"float32, kv {kind}": {"dtype": "f32", "kv_dtype": kind} for kind in kinds or KV_KINDS}
    return {"float32": {"dtype": "f32"}, **narrow}


def text_of(window: int) -> str:
    """Return the text for windows of this length: for long ones, so much more that they are full."""
    text = TEXT.read_text(encoding="utf-8")
    if window > WINDOW:
        for line in CONVERSATIONS.read_text(encoding="utf-8").splitlines():
            conversation = json.loads(line)
            turns = [f"{turn['user'].strip()}\n{turn['reply']}" for turn in conversation["turns"]]
            text += "\n\n" + "\n\n".join([conversation["system"], *turns])
    return text


def logprobs(llm: LLM, window: int) -> list[Logprobs]:
    """Return the logprobs of every token of the text except the first of each window."""
    ids = llm.encode(text_of(window), add_special=False)
    ids = ids[:window] if window > WINDOW else ids
    request_options = RequestOptions(temperature=0.0, max_tokens=0, prompt_logprobs=ALTERNATIVES, seed=1)
    found: list[Logprobs] = []
    for start in range(0, len(ids), window):
        part = ids[start : start + window]
        if len(part) > 1:
            (reply,) = llm.run(make_generation(request_options, llm=llm, prompt=part))
            found += reply.prompt_logprobs or ()
    return found


def divergence(exact: Logprobs, found: Logprobs) -> float:
    """Return the KL divergence of two distributions over the tokens that are among the likeliest of both, and all others."""
    first, second = dict(exact.top), dict(found.top)
    both = first.keys() & second.keys()
    p, q = ([*(math.exp(side[token]) for token in both)] for side in (first, second))
    p, q = ([*side, max(1.0 - sum(side), 1e-9)] for side in (p, q))
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def replies(llm: LLM, new_tokens: int) -> list[tuple[tuple[int, ...], str]]:
    """Return the token ids and the text of a greedy reply to each opening."""
    request_options = RequestOptions(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, seed=1)
    generations = [make_generation(request_options, llm=llm, prompt=llm.encode(opening)) for opening in OPENINGS]
    return [(tuple(c.token for c in reply.tokens), reply.text) for reply in llm.run(*generations)]


def measure(model: str, settings: dict[str, Any], new_tokens: int, window: int = WINDOW) -> dict[str, Any]:
    with build_llm(Settings(model=model, device="cpu", draft=("none",), max_context=max(1024, window), **settings)) as llm:
        scored = logprobs(llm, window)
        found = [one.logprob for one in scored]
        completions = replies(llm, new_tokens)
        return {
            "fingerprint": llm.card.fingerprint,
            "logprobs": scored,
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
    parser.add_argument("--kv", nargs="*", metavar="DTYPE", help="compare KV cache dtypes instead of weight formats")
    parser.add_argument("--window", type=int, default=WINDOW, help="tokens of the text that are scored together")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    configurations = CONFIGURATIONS if options.kv is None else kv_configurations(options.kv)
    found = {
        name: measure(options.model, settings, options.new_tokens, options.window) for name, settings in configurations.items()
    }
    base = found["float32"]
    exact = base["logprobs"]
    for result in found.values():
        pairs = zip(exact, result.pop("logprobs"), strict=True)
        result["divergence"] = sum(divergence(a, b) for a, b in pairs) / len(exact)
        result["ratio"] = result["perplexity"] / base["perplexity"]
        result["agrees_for"] = agreement(base["reply_tokens"], result["reply_tokens"])
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for name, result in found.items():
        compared = f"{result['ratio']:.5f} x, KL {result['divergence']:.5f}"
        print(f"{name:26s} perplexity {result['perplexity']:.4f} over {result['tokens']} tokens, {compared}")
        print(f"{'':26s} greedy replies agree with float32 for {result['agrees_for']} of {options.new_tokens} tokens")
    for number, opening in enumerate(OPENINGS):
        for name in ("float32", list(configurations)[-1]):
            print(f"{name:26s} {opening}{found[name]['replies'][number]!r}")


if __name__ == "__main__":
    main()
