"""Compare a model with packed weights and the same model dequantized: tokens differ only where two are almost equally likely.

    python -m bench.packed_against_dequantized FILE [--device cuda:0] [--reference-dtype f32]

Greedy replies of the dequantized model are the prompts of both, so that every position is compared after the same tokens. Prints
at how many positions the likeliest token is equal, and the largest margin (in nats) by which the dequantized model preferred a
token where it is not. Both are opened as the server opens them, with a different --dtype.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

from onedraw.build.llm import build_llm
from onedraw.contract.variations import PROMPTS, constrained
from onedraw.llm.llm import LLM
from onedraw.llm.request_options import RequestOptions, make_generation
from onedraw.settings import Settings
from onedraw.types import Logprobs


def replies(llm: LLM, new_tokens: int) -> list[tuple[int, ...]]:
    """Return token sequences of prompts followed by their greedy replies."""
    options = RequestOptions(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, seed=0)
    generations = [
        make_generation(options, llm=llm, prompt=llm.encode(text), label="compare")
        for text, fields in PROMPTS
        if not constrained(fields)
    ]
    return [(*generation.prompt, *reply.token_ids) for generation, reply in zip(generations, llm.run(*generations), strict=True)]


def prompt_logprobs(llm: LLM, texts: Sequence[tuple[int, ...]]) -> list[Logprobs]:
    """Return, for every position of every text, the logprob of its token and the two likeliest tokens."""
    options = RequestOptions(temperature=0.0, max_tokens=1, prompt_logprobs=2, seed=0)
    found: list[Logprobs] = []
    for text in texts:
        (reply,) = llm.run(make_generation(options, llm=llm, prompt=text, label="compare"))
        found += reply.prompt_logprobs or ()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--reference-dtype", "--twin", default="f32", help="dtype of the dequantized model: f32 or bf16")
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    common = {"model": options.model, "devices": options.device, "max_context": 1024, "max_batch": 16, "draft": "none"}
    texts: list[tuple[int, ...]] = []
    logprobs: dict[str, list[Logprobs]] = {}
    for dtype in (options.reference_dtype, "packed"):
        with build_llm(Settings.of(**common, dtype=dtype), warm_up=False) as llm:
            texts = texts or replies(llm, options.new_tokens)
            logprobs[dtype] = prompt_logprobs(llm, texts)
            print(f"{dtype}: {llm.card.device}, {llm.card.dtype}, {len(logprobs[dtype])} positions", flush=True)
    report(logprobs[options.reference_dtype], logprobs["packed"])


def report(reference: Sequence[Logprobs], packed: Sequence[Logprobs]) -> None:
    margins = [one.top[0][1] - one.top[1][1] for one in reference]
    differing = [a for a, x, y in zip(margins, reference, packed, strict=True) if x.top[0][0] != y.top[0][0]]
    drift = [abs(x.logprob - y.logprob) for x, y in zip(reference, packed, strict=True)]
    largest = max(differing, default=0.0)
    print(f"likeliest token equal at {len(reference) - len(differing)} of {len(reference)} positions")
    print(f"largest margin of the dequantized model where they differ: {largest:.4f} nats")
    print(f"positions with a larger margin: {sum(margin > largest for margin in margins)}, all equal")
    print(
        f"difference of the logprobs of the prompt tokens: median {statistics.median(drift):.5f}, largest {max(drift):.4f} nats"
    )
    print(f"median margin {statistics.median(margins):.3f} nats")


if __name__ == "__main__":
    main()
