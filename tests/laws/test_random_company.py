"""Random requests with random parameters, in random company and under random settings, equal the same requests alone.

Unlike the laws on the engine, requests go through the whole program here: options, text, constraints, drafts, stop strings.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onedraw.build.llm import build_llm
from onedraw.llm.llm import LLM
from onedraw.llm.reply import Reply
from onedraw.settings import Settings
from tests.support.searching import examples

TEXTS = ("the cat sat on a mat", "the cat sat on a mat and ran", "one two one two one two one", "x", "a b c d e f g " * 6)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]}
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from((0.0, 0.3, 1.0, 2.0)),
    "top_k": st.integers(-1, 60),
    "top_p": st.floats(0.05, 1.0),
    "min_p": st.floats(0.0, 0.5),
    "repetition_penalty": st.floats(0.5, 2.0),
    "frequency_penalty": st.floats(-2.0, 2.0),
    "presence_penalty": st.floats(-2.0, 2.0),
    "dry_multiplier": st.floats(0.0, 2.0),
    "dry_allowed_length": st.integers(1, 4),
    "logit_bias": st.dictionaries(st.integers(0, 255), st.floats(-5, 5), max_size=3),
    "min_tokens": st.integers(0, 3),
    "ignore_eos": st.booleans(),
    "stop": st.lists(st.sampled_from(("a", "the", " ", "xy", "e t")), max_size=2),
    "stop_token_ids": st.lists(st.integers(0, 255), max_size=2),
    "bad_words": st.lists(st.sampled_from(("a", "cat", "qu")), max_size=2),
    "n": st.integers(1, 3),
    "logprobs": st.integers(0, 3),
    "prediction": st.sampled_from(TEXTS),
    "speculation": st.booleans(),
}
CONSTRAINTS = (
    {"guided_json": SCHEMA},
    {"guided_regex": "(the|a) [a-z]{3,8}( [a-z]+){1,4}"},
    {"guided_choice": ["yes", "no", "maybe so"]},
    {"guided_grammar": 'start: item ("," item)*\nitem: /[a-z]{1,5}/'},
)
SETTINGS = st.fixed_dictionaries(
    {
        "draft": st.sampled_from((("none",), ("ngram",), ("prediction",), ("ngram", "prediction"))),
        "draft_tokens": st.sampled_from((None, 1, 3, 8)),
        "max_batch": st.integers(1, 7),
        "turn_tokens": st.sampled_from((8, 17, 64, 512)),
        "page_size": st.sampled_from((1, 4, 16)),
        "few_pages": st.booleans(),
        "prefix_cache": st.booleans(),
        "scheduling_policy": st.sampled_from(("fair", "fcfs")),
        "ahead": st.sampled_from(("auto", "on")),
    }
)
CONTEXT = 128
EXERCISED: Counter[str] = Counter()


@st.composite
def asked(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    names = draw(st.lists(st.sampled_from(sorted(OPTIONS)), max_size=5, unique=True))
    options = {name: draw(OPTIONS[name]) for name in names}
    if draw(st.integers(0, 3)) == 0:
        options |= draw(st.sampled_from(CONSTRAINTS))
        options.pop("ignore_eos", None)
        options.pop("bad_words", None)  # they may leave no token to sample, which is refused
        options.pop("stop_token_ids", None)
    return draw(st.sampled_from(TEXTS)), {**options, "seed": draw(st.integers(0, 9)), "max_tokens": draw(st.integers(3, 30))}


def settings(values: dict[str, Any]) -> Settings:
    few = values["few_pages"]
    kept = {name: value for name, value in values.items() if name != "few_pages"}
    pages = -(-CONTEXT // values["page_size"]) if few else None  # just enough for one sequence
    return Settings(backend="fake", model="fake", max_context=CONTEXT, kv_memory=pages, checkpoint_memory=None, **kept)


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with build_llm(settings(PLAIN)) as llm:
        yield llm


PLAIN = {
    "draft": ("none",),
    "draft_tokens": None,
    "max_batch": 1,
    "turn_tokens": 512,
    "page_size": 16,
    "few_pages": False,
    "prefix_cache": False,
    "scheduling_policy": "fcfs",
    "ahead": "auto",
}


def content(reply: Reply | list[Reply]) -> list[Any]:
    replies = reply if isinstance(reply, list) else [reply]
    return [(one.tokens, one.text, one.finish, one.stop_reason) for one in replies]


@examples(40, many=1_000)
@given(requests=st.lists(asked(), min_size=2, max_size=5), values=SETTINGS)
def test_no_company_and_no_setting_changes_a_reply(plain: LLM, requests: list[Any], values: dict[str, Any]) -> None:
    requests = [(text, {**options, "checksums": True}) for text, options in requests]
    alone = [content(plain.generate(text, **{**options, "prediction": None})) for text, options in requests]
    with build_llm(settings(values)) as llm:

        async def together() -> list[Reply | list[Reply]]:
            return await asyncio.gather(*(llm.agenerate(text, **options) for text, options in requests))

        assert [content(reply) for reply in asyncio.run(together())] == alone
        stats = llm.service.stats()
    EXERCISED.update(
        kept=stats.accepted_tokens,
        rejected=stats.draft_tokens - stats.accepted_tokens,
        mixed=stats.mixed_steps,
        preemptions=stats.preemptions,
        hits=stats.prefix_hits,
        constrained=stats.mixed_constraints,
        middle_chunks=stats.middle_chunks,
        ahead=stats.steps_ahead,
    )


def test_the_random_company_exercised_everything() -> None:
    if not EXERCISED:
        pytest.skip("needs the test above")
    expected = ("kept", "rejected", "mixed", "preemptions", "hits", "constrained", "middle_chunks", "ahead")
    assert [name for name in expected if not EXERCISED[name]] == []
