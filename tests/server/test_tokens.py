"""How pieces add up: usage over choices, and the places of tokens."""

from __future__ import annotations

import pytest

from onedraw.llm.llm import Generation
from onedraw.server.generation import PreparedRequest
from onedraw.server.openai.chat import write_usage
from onedraw.server.openai.choice_parts import Places, Tally, prompt_offsets
from onedraw.types import Piece, SamplingParams, Usage
from tests.server.running import fake_llm


def job(*lengths: int, n: int) -> PreparedRequest:
    generations = tuple(Generation(prompt=(1,) * length, params=SamplingParams(), n=n) for length in lengths)
    return PreparedRequest(
        id="cmpl-1",
        kind="completion",
        generations=generations,
        n=n,
        echoes=(None,) * len(generations),
        logprobs=False,
        token_ids=False,
        checksums=False,
    )


def test_usage_counts_prompts_once_and_only_what_nobody_computed_as_cached():
    tally = Tally(job(10, 20, n=2))
    for index, (cached, kept, rejected) in enumerate([(0, 1, 2), (8, 3, 4), (16, 0, 0), (12, 0, 1)]):
        usage = Usage(prompt=10, completion=5, cached=cached, kept=kept, rejected=rejected)
        tally.note(Piece(index=index, finish="stop", usage=usage))
    assert write_usage(tally.total()) == {
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


def test_a_token_the_text_does_not_spell_has_no_width():
    with fake_llm() as llm:
        (eos,) = llm.card.eos_ids
        assert prompt_offsets((eos, *llm.encode("ab", add_special=False)), "ab", llm.tokenizer) == [0, 0, 1]
        spelled = llm.tokenizer.decode((eos,), skip_special=False)
        ids = llm.encode(f"a{spelled}b", add_special=False)
        assert ids[1] == eos
        assert prompt_offsets(ids, f"a{spelled}b", llm.tokenizer) == [0, 1, 1 + len(spelled)]


def test_a_token_behind_a_broken_character_begins_behind_it() -> None:
    class Bytes:
        def token_bytes(self, token: int) -> bytes:
            return [b"\xe6\x97", b"y", b"\xa5", b"z", b"\xff"][token]

        def is_special(self, token: int) -> bool:
            return False

        strips_space = False

    places = Places(Bytes(), skip_special=True)  # type: ignore[arg-type]
    assert [places.next(token) for token in (0, 1)] == [(0, ""), (1, "\ufffdy")]
    assert [places.next(token) for token in (0, 2, 3)] == [(2, ""), (2, "日"), (3, "z")]
    assert [places.next(token) for token in (4, 3)] == [(4, "\ufffd"), (5, "z")]
