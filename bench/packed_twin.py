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

from onedraw.build.llm import open_door
from onedraw.contract.variations import PROMPTS, held
from onedraw.llm.llm import Door
from onedraw.llm.options import Wishes, settle
from onedraw.settings import Settings
from onedraw.types import Logprobs


def replies(door: Door, new_tokens: int) -> list[tuple[int, ...]]:
    """Prompts with their greedy answers behind them."""
    wishes = Wishes(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, seed=0)
    asks = [settle(wishes, door=door, prompt=door.encode(text), label="twin") for text, own in PROMPTS if not held(own)]
    return [(*ask.prompt, *reply.token_ids) for ask, reply in zip(asks, door.generate(*asks), strict=True)]


def scored(door: Door, texts: Sequence[tuple[int, ...]]) -> list[Logprobs]:
    """Every position of every text: the logprob of the next token, and the two likeliest."""
    wishes = Wishes(temperature=0.0, max_tokens=1, prompt_logprobs=2, seed=0)
    found: list[Logprobs] = []
    for text in texts:
        (reply,) = door.generate(settle(wishes, door=door, prompt=text, label="twin"))
        found += reply.prompt_logprobs or ()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--twin", default="f32", help="dtype of the twin: f32, bf16")
    parser.add_argument("--new-tokens", type=int, default=64)
    wishes = parser.parse_args()
    given = {"model": wishes.model, "devices": wishes.device, "max_context": 1024, "max_batch": 16, "draft": "none"}
    texts: list[tuple[int, ...]] = []
    sides: dict[str, list[Logprobs]] = {}
    for dtype in (wishes.twin, "packed"):
        with open_door(Settings.of(**given, dtype=dtype), rehearse=False) as door:
            texts = texts or replies(door, wishes.new_tokens)
            sides[dtype] = scored(door, texts)
            print(f"{dtype}: {door.card.device}, {door.card.dtype}, {len(sides[dtype])} positions", flush=True)
    report(sides[wishes.twin], sides["packed"])


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
