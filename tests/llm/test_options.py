"""Invalid options are refused by name; integers of any size give an error message, not a traceback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from onedraw.build.llm import build_llm
from onedraw.contract.record import from_json, to_json
from onedraw.errors import BadParameter, ContextOverflow
from onedraw.llm.llm import LLM
from onedraw.llm.reply_stream import Generation
from onedraw.llm.request_options import RequestOptions, make_chat_generation, make_generation, settle_seed
from onedraw.sampling.noise import hashed_seed
from onedraw.settings import Settings
from onedraw.text.tools.dialects import Tool, ToolUse
from onedraw.types import SEED_LIMIT


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with build_llm(Settings(backend="fake")) as opened:
        yield opened


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ({"bad_words": [""]}, "bad_words"),  # would ban the space token
        ({"bad_words": ["fine", "  "]}, "bad_words"),
        ({"dry_multiplier": 1.0, "dry_sequence_breakers": ["\n", ""]}, "dry_sequence_breakers"),  # would break everywhere
        ({"dry_multiplier": 1.0, "dry_range": -2}, "dry_range"),
        ({"dry_range": -77}, "dry_range"),
        ({"dry_base": -1.0}, "dry_base"),
        ({"dry_allowed_length": -5}, "dry_allowed_length"),
        ({"dry_allowed_length": 65}, "dry_allowed_length"),
        ({"dry_multiplier": 0.0, "dry_sequence_breakers": [""]}, "dry_sequence_breakers"),
        ({"top_k": -(10**400)}, "top_k"),
        ({"temperature": 10**400}, "temperature"),
        ({"seed": 10**400}, "seed"),
        ({"min_tokens": 10**5000}, "min_tokens"),
        ({"bad_words": ["word"] * 20_000}, "bad_words"),
        ({"dry_multiplier": 1.0, "dry_sequence_breakers": ["text"] * 20_000}, "dry_sequence_breakers"),
        ({"logit_bias": {5: 1e39}}, "logit_bias"),
        ({"repetition_penalty": 1e-39}, "repetition_penalty"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),  # the prompt is not a chat
        ({"guided_regex": "\ud800"}, "guided_regex"),
        ({"guided_choice": ["a", "\ud800"]}, "guided_choice"),
    ],
)
def test_invalid_options_are_refused_by_name(llm: LLM, option: dict[str, Any], name: str) -> None:
    with pytest.raises(BadParameter) as caught:
        make_generation(RequestOptions.of(**option), llm=llm, prompt=(1,), default_max_tokens=4)
    assert caught.value.param == name


@pytest.mark.parametrize("given", [{"max_tokens": 10**400}, {"max_tokens": -1}, {}])
def test_a_reply_ends_at_the_context(llm: LLM, given: dict[str, Any]) -> None:
    room = llm.card.max_context - 1
    generation = make_generation(RequestOptions.of(**given, min_tokens=5), llm=llm, prompt=(1,))
    assert (generation.params.max_tokens, generation.params.min_tokens) == (room, 5)
    full = make_generation(RequestOptions.of(max_tokens=9, min_tokens=5), llm=llm, prompt=(1,) * (room - 1))
    assert (full.params.max_tokens, full.params.min_tokens) == (2, 2)


def test_a_prompt_that_leaves_no_room_is_refused(llm: LLM) -> None:
    with pytest.raises(ContextOverflow, match="prompt is too long: ") as caught:
        make_generation(RequestOptions.of(max_tokens=4), llm=llm, prompt=(1,) * llm.card.max_context)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("seed", [-(2**63), -2, 2**53, 2**63 - 1])
def test_a_seed_outside_the_range_is_hashed_into_it_and_replays(llm: LLM, seed: int) -> None:
    settled = settle_seed(seed)
    assert 0 <= settled < SEED_LIMIT
    assert settled == settle_seed(seed) == settle_seed(settled) == hashed_seed(seed)
    assert settled != settle_seed(seed ^ 1)


def test_small_seeds_stay_and_minus_one_is_none() -> None:
    assert [settle_seed(seed) for seed in (0, 7, SEED_LIMIT - 1)] == [0, 7, SEED_LIMIT - 1]
    assert settle_seed(-1) != settle_seed(-1)
    with pytest.raises(BadParameter, match="64-bit"):
        settle_seed(2**63)


def test_effort_and_budget_have_no_effect_on_a_model_that_does_not_reason(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(llm.__dict__, "reasoning", None)
    asked = RequestOptions.of(reasoning_effort="high", thinking_budget=5, seed=1, max_tokens=4)
    messages = [{"role": "user", "content": "?"}]
    plain = make_chat_generation(RequestOptions.of(seed=1, max_tokens=4), llm=llm, messages=messages)
    assert make_chat_generation(asked, llm=llm, messages=messages) == plain


@pytest.mark.parametrize(("given", "meant"), [(None, 0), (-1, 0), (0, 0), (7, 7)])
def test_a_dry_range_of_minus_one_is_the_whole_history(llm: LLM, given: int | None, meant: int) -> None:
    generation = make_generation(
        RequestOptions.of(dry_multiplier=1.0, dry_range=given), llm=llm, prompt=(1,), default_max_tokens=4
    )
    assert generation.params.dry is not None
    assert generation.params.dry.range == meant


@pytest.mark.parametrize(
    "options",
    [
        {"guided_json": {"type": "object"}},
        {"guided_regex": "a+"},
        {"guided_choice": ("a", "b")},
        {"guided_grammar": 'root ::= "a"'},
        {"guided_grammar": 'start: "a"'},
        {},
    ],
    ids=str,
)
def test_a_generation_can_be_written_to_json_and_read_back(llm: LLM, options: dict[str, Any]) -> None:
    """Records hold generations with any response format and syntax."""
    tool = Tool("f", strict=not options)
    use = ToolUse((tool,), (tool,)) if not options else None
    settled = RequestOptions.of(**options, thinking_budget=5, seed=1, max_tokens=9)
    messages = [{"role": "user", "content": "?"}]
    generation = make_chat_generation(settled, llm=llm, messages=messages, template_kwargs={"enable_thinking": True}, use=use)
    assert from_json(Generation, json.loads(json.dumps(to_json(generation)))) == generation
    assert generation.response_format is not None
