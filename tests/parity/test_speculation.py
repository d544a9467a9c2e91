"""Speculative decoding of the default model: the same answers as without, the right distribution, and accepted drafts."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from onedraw.build.llm import build_llm
from onedraw.llm.llm import LLM
from onedraw.llm.reply_stream import Generation
from onedraw.llm.request_options import RequestOptions, make_generation
from onedraw.settings import Settings
from onedraw.speculation.proposers import PredictionProposer
from onedraw.speculation.speculator import Speculator
from onedraw.types import Request

pytestmark = pytest.mark.weights

CHATS = (
    "Explain how rain forms in simple words.",
    "Write a Python function that checks whether a number is prime.",
    "Give me three tips for learning to cook.",
    "Repeat this list twice: red, green, blue, yellow, black, white.",
)
SEEDS = 5000


@pytest.fixture(scope="module")
def plain(smollm2_path: Path) -> Iterator[LLM]:
    with build_llm(Settings(model=str(smollm2_path), dtype="f32", max_context=1536, draft=("none",))) as llm:
        yield llm


def drafting(path: Path, **settings: Any) -> LLM:
    return build_llm(Settings(model=str(path), dtype="f32", **{"max_context": 1536, "draft": ("auto",), **settings}))


def generations(llm: LLM, **options: Any) -> list[Generation]:
    return [
        make_generation(
            RequestOptions(seed=10 + i, checksums=True, **{"max_tokens": 48, **options}),
            llm=llm,
            prompt=llm.chat_prompt([{"role": "user", "content": text}]).ids,
        )
        for i, text in enumerate(CHATS)
    ]


MIXES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "penalised": {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "top_p": 0.95, "min_p": 0.02},
    "dry and bias": {"temperature": 1.0, "dry_multiplier": 0.8, "logit_bias": {198: -2.0}, "logprobs": 2, "min_tokens": 20},
}


@pytest.mark.parametrize("budget", [0, 16], ids=["chain", "tree"])
def test_drafts_never_change_an_answer(plain: LLM, smollm2_path: Path, budget: int) -> None:
    kept = 0
    with drafting(smollm2_path, tree_budget=budget, draft_tokens=8) as llm:
        assert llm.service.capacity.drafter == "dflash"
        for name, options in MIXES.items():
            expected = plain.run(*generations(plain, **options))
            together = llm.run(*generations(llm, **options))
            alone = [llm.run(generation)[0] for generation in generations(llm, **options)[:2]]
            assert [r.tokens for r in together] == [r.tokens for r in expected], name
            assert [r.tokens for r in alone] == [r.tokens for r in expected[:2]], name
            kept += sum(r.usage.kept for r in together)
        stats = llm.service.stats()
    assert kept > 20
    assert stats.draft_tokens > stats.accepted_tokens


def test_the_built_in_drafter_reaches_its_acceptance(smollm2_path: Path) -> None:
    """Greedy, first 96 tokens: about 2 tokens per step on chat, 2.7 on code; wrong features would give little over 1."""
    with drafting(smollm2_path, draft=(str(_shipped(smollm2_path)),), draft_tokens=7) as llm:
        tokens = turns = 0
        for text in CHATS[:3]:
            before = llm.service.stats().steps
            generation = make_generation(
                RequestOptions(temperature=0.0, max_tokens=96),
                llm=llm,
                prompt=llm.chat_prompt([{"role": "user", "content": text}]).ids,
            )
            [reply] = llm.run(generation)
            tokens, turns = tokens + len(reply.tokens) - 1, turns + llm.service.stats().steps - before - 1
    assert tokens / turns > 1.8


def _shipped(model: Path) -> Path:
    from onedraw.build.drafters import find_built_in_drafter
    from onedraw.checkpoints.open import open_checkpoint
    from onedraw.models.registry import read_model_info

    checkpoint = open_checkpoint(model)
    path = find_built_in_drafter(read_model_info(checkpoint).spec, checkpoint)
    checkpoint.close()
    assert path is not None
    return path


def test_first_tokens_of_many_seeds_vary_as_without_drafts(plain: LLM, smollm2_path: Path) -> None:
    prompt = plain.chat_prompt([{"role": "user", "content": "Write a short story about the sea."}]).ids
    with drafting(smollm2_path, draft_tokens=4) as llm:
        openings = [
            [
                tuple(r.token_ids)
                for r in each.run(
                    *(
                        make_generation(RequestOptions(temperature=1.0, seed=s, max_tokens=6), llm=each, prompt=prompt)
                        for s in range(150)
                    )
                )
            ]
            for each in (plain, llm)
        ]
        assert llm.service.stats().draft_tokens > 0
    assert openings[0] == openings[1]
    assert len({opening[0] for opening in openings[0]}) > 5


@pytest.mark.parametrize(
    "options",
    [{"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.5}],
    ids=["plain law", "top-p and penalties"],
)
def test_drafted_first_tokens_follow_the_sampling_rule(smollm2_path: Path, options: dict[str, Any]) -> None:
    """All seeds share the prompt's pages, so even their first row has drafts: accepted for some seeds, rejected for others.

    Without checkpoints: a row that chooses from kept logits would carry none.
    """
    speculator = Speculator([PredictionProposer()], draft_tokens=1)
    sizes: dict[str, Any] = {"max_context": 256, "max_batch": 64, "queue_limit": SEEDS + 1, "checkpoint_memory": 0}
    settings = Settings(model=str(smollm2_path), dtype="f32", **sizes)
    with build_llm(settings, speculator=speculator) as llm:
        prompt = llm.encode("There are many animals in the world, big and small ones, and yet my own favourite animal is the")[
            :17
        ]
        base = make_generation(RequestOptions(max_tokens=2, ignore_eos=True, logprobs=20, **options), llm=llm, prompt=prompt)
        [first] = llm.run(dataclasses.replace(base, params=dataclasses.replace(base.params, logprobs_mode="processed")))
        assert first.tokens[0].logprobs is not None
        law = dict(first.tokens[0].logprobs.top)
        likeliest = max(law, key=lambda token: law[token])
        counts: Counter[int] = Counter()
        done = threading.Semaphore(0)

        def hear(event: Any) -> None:
            assert event.error is None
            if event.sampled and event.usage.completion == len(event.sampled):
                counts[event.sampled[0].token] += 1
            if event.finish:
                done.release()

        requests = [
            Request(f"s{seed}", prompt, dataclasses.replace(base.params, seed=seed, logprobs=None), predicted=(likeliest,))
            for seed in range(SEEDS)
        ]
        llm.service.submit([(request, hear) for request in requests])
        for _ in range(SEEDS):
            done.acquire()
        stats = llm.service.stats()
    assert stats.accepted_tokens > 100
    assert stats.draft_tokens - stats.accepted_tokens > 100
    assert sum(counts.values()) == SEEDS
    often = [token for token in law if np.exp(law[token]) * SEEDS >= 8]
    expected = np.array([np.exp(law[t]) for t in often])
    observed = np.array([counts[t] for t in often], dtype=float)
    expected, observed = np.append(expected, 1 - expected.sum()) * SEEDS, np.append(observed, SEEDS - observed.sum())
    keep = expected > 1
    result = chisquare(observed[keep], expected[keep] * observed[keep].sum() / expected[keep].sum())
    assert result.pvalue > 1e-4, result


@pytest.mark.long
def test_a_long_answer_at_temperature_one_with_penalties_equals_plain_decoding(plain: LLM, smollm2_path: Path) -> None:
    options = RequestOptions(
        temperature=1.0,
        seed=77,
        max_tokens=1200,
        ignore_eos=True,
        repetition_penalty=1.1,
        frequency_penalty=0.05,
        presence_penalty=0.1,
        checksums=True,
    )
    prompt = plain.chat_prompt([{"role": "user", "content": "Tell me a long story about a lighthouse keeper."}]).ids
    [expected] = plain.run(make_generation(options, llm=plain, prompt=prompt))
    with drafting(smollm2_path, tree_budget=16, draft_tokens=7) as llm:
        [found] = llm.run(make_generation(options, llm=llm, prompt=prompt))
    assert len(found.tokens) == 1200
    assert found.tokens == expected.tokens
    assert found.usage.kept > 50
