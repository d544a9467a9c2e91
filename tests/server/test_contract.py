"""The contract over HTTP on the default model: tokens and score checksums do not depend on other requests or settings."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from onedraw.build.llm import build_llm
from onedraw.llm.llm import idle_stats
from onedraw.settings import Settings
from tests.server.running import Served, serving, wait_until

pytestmark = pytest.mark.weights

SHARED = "You are a careful assistant. Answer briefly and in full sentences, and never invent a source. " * 3
REQUESTS: tuple[dict[str, Any], ...] = (
    {"prompt": "Hello", "temperature": 0.0},
    {"prompt": SHARED + "What is rain?", "temperature": 1.0, "seed": 1},
    {"prompt": SHARED + "What is snow?", "temperature": 0.7, "seed": 2, "top_p": 0.9},
    {"prompt": SHARED + "Name a river.", "temperature": 1.0, "seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"prompt": "def main():\n", "temperature": 1.0, "seed": 4, "min_p": 0.05, "top_k": 50, "presence_penalty": 0.5},
    {"prompt": "A list:\n- one\n- two\n", "temperature": 1.2, "seed": 5, "dry_multiplier": 0.8, "logit_bias": {"198": -1.5}},
    {"prompt": SHARED, "temperature": 0.9, "seed": 6, "min_tokens": 20, "stop": ["\n\n\n"]},
    {"prompt": "Zwölf Boxkämpfer jagen", "temperature": 1.0, "seed": 7, "bad_words": ["the", "Viktor"]},
)
Answer = tuple[list[int], list[str]]


def ask(served: Served, body: dict[str, Any]) -> Answer:
    answer = served.post(
        "/v1/completions", model=served.model, max_tokens=24, return_token_ids=True, return_checksums=True, **body
    )
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    return choice["token_ids"], choice["score_checksums"]


def one_by_one(served: Served) -> list[Answer]:
    return [ask(served, body) for body in REQUESTS]


def all_at_once(served: Served) -> list[Answer]:
    """Send all requests at once while another one runs, so that every request shares a batch."""
    long = {"model": served.model, "prompt": "One, two,", "max_tokens": 100, "ignore_eos": True, "seed": 8}
    with served.unread("/v1/completions", json.dumps(long).encode()):
        wait_until(lambda: served.llm.service.stats().completion_tokens > 0)
        return at_once(served)


def at_once(served: Served) -> list[Answer]:
    order = list(range(len(REQUESTS)))
    random.Random(7).shuffle(order)
    with ThreadPoolExecutor(len(order)) as pool:
        futures = {i: pool.submit(ask, served, REQUESTS[i]) for i in order}
    return [futures[i].result() for i in range(len(REQUESTS))]


@pytest.fixture(scope="module")
def plain(smollm2_path: Path) -> list[Answer]:
    """Run the requests one at a time on a new server with batch size 1 and no prefix cache."""
    with opened(smollm2_path, max_batch=1, prefix_cache=False) as llm, serving(llm) as served:
        return one_by_one(served)


def opened(path: Path, **settings: Any) -> Any:
    return build_llm(Settings(model=str(path), dtype="f32", **{"max_context": 512, **settings}))


@pytest.fixture(
    params=["eight at once", "small turns", "few pages", "prefix hits", "after a restart", "one thread", "two threads"]
)
def variation(request: pytest.FixtureRequest, smollm2_path: Path) -> Iterator[tuple[str, list[Answer], Any]]:
    import torch

    settings: dict[str, Any] = {
        "small turns": {"turn_tokens": 16},
        "few pages": {"kv_memory": 176 * 2 * 30 * 3 * 64 * 4, "max_context": 128},
        "one thread": {"threads": 1},
        "two threads": {"threads": 2},
    }.get(request.param, {})
    before = torch.get_num_threads()
    try:
        with opened(smollm2_path, **settings) as llm, serving(llm) as served:
            if request.param in ("prefix hits", "after a restart"):
                one_by_one(served)
            answers = one_by_one(served) if request.param in ("prefix hits", "one thread", "two threads") else all_at_once(served)
            stats = idle_stats(llm)
        if request.param == "after a restart":
            with opened(smollm2_path) as llm, serving(llm) as served:
                answers, stats = one_by_one(served), idle_stats(llm)
        yield request.param, answers, stats
    finally:
        torch.set_num_threads(before)


def test_the_same_requests_give_the_same_tokens_and_scores(variation: tuple[str, list[Answer], Any], plain: list[Answer]) -> None:
    name, answers, stats = variation
    assert answers == plain
    match name:
        case "eight at once":
            assert stats.mixed_steps > 0
        case "small turns":
            assert stats.middle_chunks > 0
        case "few pages":
            assert stats.preemptions > 0
        case "prefix hits":
            assert stats.prefix_hits > 0
