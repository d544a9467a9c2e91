"""Usage over all choices, and offsets of prompt tokens in the echoed text."""

from __future__ import annotations

import pytest

from onedraw.llm.reply_stream import Generation
from onedraw.server.openai.chat import prompt_offsets, write_usage
from onedraw.server.prompts import PreparedRequest, total_usage
from onedraw.types import SamplingParams, Usage
from tests.server.running import fake_llm


def prepared(*lengths: int, n: int) -> PreparedRequest:
    generations = tuple(Generation(prompt=(1,) * length, params=SamplingParams(), n=n) for length in lengths)
    return PreparedRequest(
        id="cmpl-1",
        kind="completion",
        generations=generations,
        choices=(),
        n=n,
        echoes=(None,) * len(generations),
        prompt_logprobs=None,
        logprobs=False,
        token_ids=False,
        checksums=False,
    )


def test_usage_counts_a_prompt_once_and_only_tokens_that_no_choice_computed_as_cached():
    usages = {
        index: Usage(prompt=10, completion=5, cached=cached, kept=kept, rejected=rejected)
        for index, (cached, kept, rejected) in enumerate([(0, 1, 2), (8, 3, 4), (16, 0, 0), (12, 0, 1)])
    }
    assert write_usage(total_usage(prepared(10, 20, n=2), usages)) == {
        "prompt_tokens": 30,
        "completion_tokens": 20,
        "total_tokens": 50,
        "prompt_tokens_details": {"cached_tokens": 0 + 12},
        "completion_tokens_details": {"reasoning_tokens": 0, "accepted_prediction_tokens": 4, "rejected_prediction_tokens": 7},
    }


@pytest.mark.parametrize("text", ["plain", "Grüße 世界 🌍", ""])
def test_the_offset_of_a_token_is_where_its_character_begins(text):
    with fake_llm() as llm:
        ids = llm.encode(text, add_special=False)  # one token per byte
        expected = [at for at, character in enumerate(text) for _ in character.encode()]
        assert prompt_offsets(ids, text, llm.tokenizer) == expected


def test_a_token_that_is_not_in_the_text_has_no_width():
    with fake_llm() as llm:
        (eos,) = llm.card.eos_ids
        assert prompt_offsets((eos, *llm.encode("ab", add_special=False)), "ab", llm.tokenizer) == [0, 0, 1]
        spelled = llm.tokenizer.decode((eos,), skip_special=False)
        ids = llm.encode(f"a{spelled}b", add_special=False)
        assert ids[1] == eos
        assert prompt_offsets(ids, f"a{spelled}b", llm.tokenizer) == [0, 1, 1 + len(spelled)]
