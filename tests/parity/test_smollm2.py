"""The default model against `transformers` with the same dequantized weights, and its samples against the sampling rule."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from bench.cpu_quality import CONFIGURATIONS, measure
from bench.peer import llama_in_transformers
from onedraw.build.llm import build_llm
from onedraw.llm.llm import LLM
from onedraw.llm.request_options import RequestOptions, make_generation
from onedraw.sampling.law import law
from onedraw.settings import Settings
from onedraw.types import History, Request, SamplingParams

pytestmark = pytest.mark.weights

PROMPTS = (
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):\n",
    "1, 2, 3, 4, 5,",
    "Dear Sir or Madam,",
    "In 1969, humans",
    "Water boils at",
    "import numpy as np\n\n",
    "Q: What is the meaning of life?\nA:",
    "The three primary colours are",
    "« Bonjour », dit-il,",
    "SELECT name FROM users WHERE",
)
SEEDS = 5000


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with build_llm(Settings(model=str(smollm2_path), dtype="f32", max_context=512, max_batch=64)) as opened:
        yield opened


@pytest.fixture(scope="module")
def peer(smollm2_path: Path) -> Any:
    return llama_in_transformers(smollm2_path)


def test_greedy_equals_transformers(llm: LLM, peer: Any) -> None:
    """Every token is the peer's argmax after the same tokens, so by induction the greedy answers are equal."""
    prompts = [llm.encode(text) for text in PROMPTS]
    options = RequestOptions(temperature=0.0, max_tokens=64, ignore_eos=True)
    replies = llm.run(*(make_generation(options, llm=llm, prompt=prompt) for prompt in prompts))
    for text, reply in zip(PROMPTS, replies, strict=True):
        with torch.inference_mode():
            logits = peer(torch.tensor([[*reply.prompt_ids, *reply.token_ids]])).logits[0]
        start = len(reply.prompt_ids) - 1
        assert reply.token_ids == logits[start:-1].argmax(-1).tolist(), text
        assert len(reply.token_ids) == 64


def test_logits_are_those_of_transformers(llm: LLM, peer: Any) -> None:
    """Prompt logprobs of both, over a text long enough to cross several blocks of keys."""
    prompt = llm.encode(" ".join(PROMPTS) * 3)[:200]
    options = RequestOptions(max_tokens=0, prompt_logprobs=0)
    [reply] = llm.run(make_generation(options, llm=llm, prompt=prompt))
    with torch.inference_mode():
        expected = peer(torch.tensor([prompt])).logits[0].log_softmax(-1)
    targets = torch.tensor(prompt[1:])
    expected = expected[:-1].gather(1, targets[:, None])[:, 0]
    assert reply.prompt_logprobs is not None
    found = torch.tensor([p.logprob for p in reply.prompt_logprobs])
    assert (found - expected).abs().max() < 1e-3


def first_tokens(llm: LLM, prompt: tuple[int, ...], options: dict[str, Any]) -> Counter[int]:
    """The first tokens of many seeds, in one batch."""
    counts: Counter[int] = Counter()
    done = threading.Semaphore(0)
    base = make_generation(RequestOptions(max_tokens=1, ignore_eos=True, **options), llm=llm, prompt=prompt).params
    llm.service._queue_limit = SEEDS + 1

    def hear(event: Any) -> None:
        assert event.error is None
        counts.update(choice.token for choice in event.sampled)
        done.release()

    llm.service.submit([(Request(f"seed-{seed}", prompt, dataclasses.replace(base, seed=seed)), hear) for seed in range(SEEDS)])
    for _ in range(SEEDS):
        done.acquire()
    return counts


@pytest.mark.parametrize(
    "options",
    [{"temperature": 1.0, "top_p": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.2}],
    ids=["softmax", "filtered"],
)
def test_first_tokens_follow_the_sampling_rule(llm: LLM, peer: Any, options: dict[str, Any]) -> None:
    prompt = llm.encode("There are many animals in the world, big and small ones, and yet my own favourite animal is the")
    assert len(prompt) > 16  # more than a page: all seeds share the first page of the prompt
    with torch.inference_mode():
        logits = peer(torch.tensor([prompt])).logits[0, -1].numpy()
    scores = law(logits, SamplingParams(**options), History(prompt)).astype(np.float64)
    share = np.exp(scores - scores.max())
    share /= share.sum()
    counts = first_tokens(llm, prompt, options)
    assert all(share[token] > 0 for token in counts), "a token outside the law was drawn"
    often = [token for token in np.argsort(-share) if share[token] * SEEDS >= 8]
    expected = np.array([*share[often], 1 - share[often].sum()]) * SEEDS
    observed = np.array([*(counts[int(t)] for t in often), SEEDS - sum(counts[int(t)] for t in often)], dtype=float)
    keep = expected > 0.5
    result = chisquare(observed[keep], expected[keep] * observed[keep].sum() / expected[keep].sum())
    assert len(often) > 5
    assert result.pvalue > 1e-4, result


def test_temperature_zero_and_top_k_one_are_greedy_and_seeds_matter(llm: LLM) -> None:
    prompt = llm.encode("The weather today is")

    def tokens(**options: Any) -> list[int]:
        [reply] = llm.run(make_generation(RequestOptions(max_tokens=24, ignore_eos=True, **options), llm=llm, prompt=prompt))
        return reply.token_ids

    greedy = tokens(temperature=0.0, seed=1)
    assert greedy == tokens(temperature=0.0, seed=2)
    assert greedy == tokens(temperature=1.3, top_k=1, seed=3)
    assert tokens(temperature=1.0, seed=4) == tokens(temperature=1.0, seed=4)
    assert tokens(temperature=1.0, seed=4) != tokens(temperature=1.0, seed=5)


@pytest.mark.long
def test_quantized_products_cost_less_than_half_a_percent_of_perplexity(smollm2_path: Path) -> None:
    """Perplexity of a fixed text against float32; with float32 activations it does not change at all."""
    found = {name: measure(str(smollm2_path), settings, new_tokens=1) for name, settings in CONFIGURATIONS.items()}
    exact = found["float32"]["perplexity"]
    assert found["packed, f32 activations"]["perplexity"] == exact
    assert found["packed, int8 activations"]["perplexity"] == pytest.approx(exact, rel=0.005)
    assert found["packed, int8 activations"]["tokens"] > 3000
