"""Measure how many drafts are kept: greedy against shared-noise proposals, chains against trees, DFlash against a draft model.

    python -m bench.proposals [MODEL] [--temperatures 0.7,1] [--new-tokens 96] [--budget 24] [--layers 10] [--json]

Prints tokens per step for chat and code prompts, one request at a time. The draft length is fixed to the drafter's full length.
The draft model consists of the first --layers layers of the target. Every reply is compared with plain decoding; the exit status
is 1 if any token differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from onedraw.backends.torch.backend import TorchBackend
from onedraw.backends.torch.device import pick_ops
from onedraw.backends.torch.drafters.base import CANDIDATES
from onedraw.backends.torch.drafters.dflash import DflashDrafter
from onedraw.backends.torch.drafters.draft_model import DraftModel, SmallModel
from onedraw.backends.torch.model.transformer import Transformer
from onedraw.backends.torch.runner.pipeline import StageDevice
from onedraw.build.checkpoint import read_text
from onedraw.build.drafters import find_built_in_drafter
from onedraw.checkpoints.download import resolve_model
from onedraw.checkpoints.open import open_checkpoint
from onedraw.models.dflash import read_drafter_info
from onedraw.models.registry import read_model_info
from onedraw.sampling.draft_ranking import rank_candidates
from onedraw.settings import default_cache_dir
from onedraw.speculation.draft_tree import build_tree
from onedraw.types import Request, SamplingParams
from tests.laws.harness import Answer, Schedule, run

CONTEXT = 512
PROMPTS = {
    "chat": (
        "What is the capital of France, and why is it famous?",
        "Explain how rain forms in simple words.",
        "Write a short email to my landlord about a broken heater.",
        "Give me three tips for learning to cook.",
        "Tell me a story about a fox and a river.",
        "Compare cats and dogs as pets.",
        "Describe a walk through an old city at night.",
        "Why do people like music?",
    ),
    "code": (
        "Write a Python function that reverses a string.",
        "Write a Python function that checks whether a number is prime.",
        "Write a JavaScript function that sums an array.",
        "Write a Python class for a stack with push and pop.",
        "Write a Python function that counts the words in a text file.",
        "Write a C function that computes the factorial of a number.",
    ),
}
MakeDrafter = Callable[[Any, Any, Any], Any]  # (target, sampler, layout) -> drafter


class Bench:
    """A target model with its tokenizer and built-in drafter, and the drafters to compare."""

    def __init__(self, model: str, *, new_tokens: int, layers: int) -> None:
        path = resolve_model(model, default_cache_dir())
        self.target = read_model_info(open_checkpoint(path))
        source = open_checkpoint(path)
        self.tokenizer, self.template = read_text(source)
        drafter = find_built_in_drafter(self.target.spec, source)
        assert drafter is not None, "this benchmark needs a model that has a built-in drafter"
        self.drafter = read_drafter_info(open_checkpoint(drafter))
        self.ops = pick_ops("cpu", "f32", cache=default_cache_dir())
        self.new_tokens, self.layers = new_tokens, layers

    def dflash_drafter(self, budget: int) -> MakeDrafter:
        """The built-in DFlash drafter; `budget` is the largest size of a draft tree, and 0 means chains."""

        def make(target: Any, sampler: Any, layout: Any) -> Any:
            arrange = lambda candidates: build_tree(candidates, budget)  # noqa: E731
            spec, weights = self.drafter.spec, self.drafter.weights
            sizes: dict[str, Any] = {"lanes": 1, "max_context": CONTEXT, "width": CANDIDATES if budget else 1}
            return DflashDrafter(spec, weights, target=target, layout=layout, arrange=arrange, **sizes)

        return make

    def draft_model(self) -> MakeDrafter:
        """The first layers of the target, which draft one token at a time."""

        def make(target: Any, sampler: Any, layout: Any) -> Any:
            spec = dataclasses.replace(self.target.spec, layers=self.target.spec.layers[: self.layers])
            small = Transformer(
                spec,
                self.target.weights,
                dtype=torch.float32,
                stage_devices=[StageDevice(target.device, target.ops)],
                max_context=CONTEXT + 1,
            )
            return DraftModel(SmallModel(small, layout=layout), layout=layout, lanes=1, max_context=CONTEXT, length=4)

        return make

    def backend(self, make: MakeDrafter | None) -> TorchBackend:
        sizes: dict[str, Any] = {"lanes": 1, "pages": 40, "page_size": 16, "max_context": CONTEXT}
        return TorchBackend(
            self.target.spec,
            self.target.weights,
            dtype="f32",
            device="cpu",
            ops=self.ops,
            check=False,
            make_drafter=make,
            **sizes,
        )

    def requests(self, kind: str, temperature: float) -> list[Request]:
        assert self.template is not None
        found = []
        for i, text in enumerate(PROMPTS[kind]):
            prompt = self.tokenizer.encode(self.template.render([{"role": "user", "content": text}]), add_special=False)
            params = SamplingParams(
                temperature=temperature,
                seed=100 + i,
                max_tokens=self.new_tokens,
                checksums=True,
                stop_ids=frozenset(self.target.eos_ids),
            )
            found.append(Request(f"{kind}{i}", tuple(prompt), params))
        return found

    def measure(self, backend: TorchBackend, requests: list[Request], expected: list[Answer]) -> dict[str, Any]:
        """Decode every request with drafts and compare the tokens and score checksums with plain decoding."""
        steps = tokens = kept = 0
        same = True
        for request, answer in zip(requests, expected, strict=True):
            [got], stats = run(backend, [request], Schedule())
            same = same and (got.tokens, got.checksums) == (answer.tokens, answer.checksums)
            steps, tokens, kept = steps + stats.steps - 1, tokens + len(got.tokens) - 1, kept + stats.accepted_tokens
        return {"tokens_per_step": tokens / steps, "kept_per_step": kept / steps, "same": same, "tokens": tokens}


def greedy_rank(ids: Any, logits: Any, params: SamplingParams, **rest: Any) -> Any:
    """Rank candidates by their logits alone, as a drafter without shared noise does."""
    return rank_candidates(ids, logits, dataclasses.replace(params, temperature=0.0), **rest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--temperatures", default="0.7,1")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--budget", type=int, default=24)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    bench = Bench(options.model, new_tokens=options.new_tokens, layers=options.layers)
    variants: dict[str, tuple[MakeDrafter, bool]] = {
        "dflash, greedy proposals, chain": (bench.dflash_drafter(0), False),
        "dflash, shared noise, chain": (bench.dflash_drafter(0), True),
        f"dflash, greedy proposals, tree of {options.budget}": (bench.dflash_drafter(options.budget), False),
        f"dflash, shared noise, tree of {options.budget}": (bench.dflash_drafter(options.budget), True),
        f"draft model of {options.layers} layers, greedy proposals": (bench.draft_model(), False),
        f"draft model of {options.layers} layers, shared noise": (bench.draft_model(), True),
    }
    rows = []
    for temperature in (float(t) for t in options.temperatures.split(",")):
        for kind in PROMPTS:
            requests = bench.requests(kind, temperature)
            plain = bench.backend(None)
            expected = [run(plain, [request], Schedule())[0][0] for request in requests]
            for name, (make, shared_noise) in variants.items():
                with mock.patch(
                    "onedraw.backends.torch.drafters.base.rank_candidates", rank_candidates if shared_noise else greedy_rank
                ):
                    found = bench.measure(bench.backend(make), requests, expected)
                rows.append({"temperature": temperature, "prompts": kind, "drafter": name, **found})
                if not options.json:
                    kept = f"{found['kept_per_step']:.2f} kept, {'same' if found['same'] else 'DIFFERENT'}"
                    print(
                        f"T={temperature:<4} {kind:5s} {name:48s} {found['tokens_per_step']:.2f} tokens per step, {kept}",
                        flush=True,
                    )
    if options.json:
        print(json.dumps(rows, indent=2))
    raise SystemExit(not all(row["same"] for row in rows))


if __name__ == "__main__":
    main()
