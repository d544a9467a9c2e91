"""A packed file against its dequantized twin: the same tokens wherever the twin's margin is larger than rounding.

    python -m bench.packed_twin FILE [--device cuda:0] [--twin f32]

Greedy replies of the twin are given to both as prompts, so every position is compared under the same history: the likeliest
token of each side, and where they differ, by how much the twin preferred its own (in nats). Both are opened as a server opens
them; only --dtype differs.
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
    """Prompts with their greedy answers behind them."""
    options = RequestOptions(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, seed=0)
    generations = [
        make_generation(options, llm=llm, prompt=llm.encode(text), label="twin") for text, own in PROMPTS if not constrained(own)
    ]
    return [(*generation.prompt, *reply.token_ids) for generation, reply in zip(generations, llm.run(*generations), strict=True)]


def scored(llm: LLM, texts: Sequence[tuple[int, ...]]) -> list[Logprobs]:
    """Every position of every text: the logprob of the next token, and the two likeliest."""
    options = RequestOptions(temperature=0.0, max_tokens=1, prompt_logprobs=2, seed=0)
    found: list[Logprobs] = []
    for text in texts:
        (reply,) = llm.run(make_generation(options, llm=llm, prompt=text, label="twin"))
        found += reply.prompt_logprobs or ()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--twin", default="f32", help="dtype of the twin: f32, bf16")
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    given = {"model": options.model, "devices": options.device, "max_context": 1024, "max_batch": 16, "draft": "none"}
    texts: list[tuple[int, ...]] = []
    sides: dict[str, list[Logprobs]] = {}
    for dtype in (options.twin, "packed"):
        with build_llm(Settings.of(**given, dtype=dtype), warm_up=False) as llm:
            texts = texts or replies(llm, options.new_tokens)
            sides[dtype] = scored(llm, texts)
            print(f"{dtype}: {llm.card.device}, {llm.card.dtype}, {len(sides[dtype])} positions", flush=True)
    report(sides[options.twin], sides["packed"])


def report(twin: Sequence[Logprobs], packed: Sequence[Logprobs]) -> None:
    margins = [own.top[0][1] - own.top[1][1] for own in twin]
    apart = [margin for own, other, margin in zip(twin, packed, margins, strict=True) if own.top[0][0] != other.top[0][0]]
    drift = [abs(own.logprob - other.logprob) for own, other in zip(twin, packed, strict=True)]
    print(f"likeliest token equal at {len(twin) - len(apart)} of {len(twin)} positions")
    print(f"margin of the twin where it differs, at most: {max(apart, default=0.0):.4f} nats")
    print(f"positions with a larger margin than that: {sum(margin > max(apart, default=0.0) for margin in margins)}, all equal")
    print(f"logprob of the given token, difference: median {statistics.median(drift):.5f}, most {max(drift):.4f} nats")
    print(f"median margin {statistics.median(margins):.3f} nats")


if __name__ == "__main__":
    main()
