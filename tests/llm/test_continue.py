"""`continue_ids`: replies that are continued from their first tokens, and beginnings that are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from onedraw.build.llm import build_llm
from onedraw.contract.record import to_json
from onedraw.errors import BadParameter
from onedraw.llm.llm import LLM
from onedraw.llm.reply import Reply
from onedraw.llm.reply_stream import ReplyStream
from onedraw.llm.request_options import generation_from_keywords
from onedraw.settings import Settings
from onedraw.text.fake_tokenizer import fake_tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}}, "required": ["a", "b"]}
CALLED = {"type": "object", "properties": {"b": {"enum": ["x", "é"]}}, "required": ["b"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": CALLED}}]
BRACE_Z = tuple(fake_tokenizer().encode("{z", add_special=False))
CHAT = [{"role": "user", "content": "Hello"}]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0, "max_tokens": 24, "logprobs": 2},
    "penalties": {"frequency_penalty": 0.8, "repetition_penalty": 1.2, "dry_multiplier": 0.8, "max_tokens": 24, "min_tokens": 4},
    "stop strings": {"stop": ("a", "e "), "min_tokens": 3, "max_tokens": 60},
    "schema": {"guided_json": SCHEMA, "max_tokens": 48},
    "prompt logprobs": {"prompt_logprobs": 1, "max_tokens": 8},
    "prompt logprobs, stop strings": {"prompt_logprobs": 1, "stop": ("a", "e "), "max_tokens": 60},
    "prompt logprobs, stop ids": {"prompt_logprobs": 1, "stop_token_ids": tuple(range(0, 256, 5)), "max_tokens": 60},
    "prediction": {"prediction": "abcabcabc", "max_tokens": 16},
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with build_llm(Settings(model="fake", backend="fake", threads=1)) as built:
        yield built


def begun(llm: LLM, prompt: Any, options: dict[str, Any]) -> str:
    """The text of the tokens that the options give, without what waits for later tokens."""
    found = Reply()
    for piece in ReplyStream(0, generation_from_keywords(llm, prompt, options), llm.tokenizer).begun:
        found.add(piece)
    return found.text


@pytest.mark.parametrize("name", OPTIONS)
def test_a_reply_cut_after_any_token_is_continued_with_its_rest(llm: LLM, name: str) -> None:
    for seed in (1, 2, 3):
        options = {**OPTIONS[name], "seed": seed, "checksums": True}
        whole = llm.generate("The sea", **options)
        assert isinstance(whole, Reply)
        ids = whole.token_ids
        assert ids
        for count in range(len(ids) + 1):
            rest = llm.generate("The sea", **options, continue_ids=ids[:count])
            assert isinstance(rest, Reply)
            assert rest.tokens == whole.tokens[count:]
            assert (rest.finish, rest.stop_reason, rest.seed) == (whole.finish, whole.stop_reason, seed)
            assert begun(llm, "The sea", {**options, "continue_ids": ids[:count]}) + rest.text == whole.text
            assert (rest.usage.prompt, rest.usage.completion) == (whole.usage.prompt, len(ids) - count)
            assert rest.prompt_logprobs == whole.prompt_logprobs


def test_a_tool_call_is_continued_inside_its_arguments(llm: LLM) -> None:
    options: dict[str, Any] = {
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "seed": 4,
        "max_tokens": 400,
    }
    whole = llm.generate(CHAT, **options)
    assert isinstance(whole, Reply)
    assert whole.finish == "tool_calls"
    for count in range(1, len(whole.token_ids) + 1):
        given = whole.token_ids[:count]
        rest = llm.generate(CHAT, **options, continue_ids=given)
        assert isinstance(rest, Reply)
        assert (rest.finish, rest.token_ids) == ("tool_calls", whole.token_ids[count:])
        first = Reply()
        for piece in ReplyStream(0, generation_from_keywords(llm, CHAT, {**options, "continue_ids": given}), llm.tokenizer).begun:
            first.add(piece)
        both = "".join(call.arguments for reply in (first, rest) for call in reply.calls)
        assert both == whole.calls[0].arguments


def test_each_choice_is_continued_by_its_own_seed(llm: LLM) -> None:
    replies = llm.generate("Well", n=3, seed=9, max_tokens=12)
    assert isinstance(replies, list)
    for reply in replies:
        rest = llm.generate("Well", seed=reply.seed, max_tokens=12, continue_ids=reply.token_ids[:5])
        assert isinstance(rest, Reply)
        assert rest.token_ids == reply.token_ids[5:]


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"continue_ids": (1,)}, "continue_ids", "needs the seed"),
        ({"continue_ids": (1,), "seed": -1}, "continue_ids", "needs the seed"),
        ({"continue_ids": (1,), "seed": 1, "n": 2}, "n", "with n = 1 and the seed that the choice reported"),
        ({"continue_ids": (10**6,), "seed": 1}, "continue_ids", "token id 1000000 is outside the vocabulary"),
        ({"continue_ids": (-1,), "seed": 1}, "continue_ids", "token id -1 is outside the vocabulary"),
        ({"continue_ids": (1,) * 5, "seed": 1, "max_tokens": 4}, "continue_ids", "5 tokens are over the 4 of max_tokens"),
        (
            {"continue_ids": (7, 8), "stop_token_ids": (7,), "seed": 1},
            "continue_ids",
            "token 0 has the id 7, which ends the reply",
        ),
        ({"continue_ids": BRACE_Z, "guided_json": SCHEMA, "seed": 1}, "continue_ids", f"token 1 has the id {BRACE_Z[1]}, which"),
        ({"system_fingerprint": "another"}, "system_fingerprint", "is 'another', and this model runs as"),
    ],
)
def test_what_cannot_be_continued_is_refused_by_name(llm: LLM, options: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(BadParameter, match=message) as caught:
        llm.generate("Well", **options)
    assert caught.value.param == param


def test_the_fingerprint_of_the_model_is_accepted(llm: LLM) -> None:
    reply = llm.generate("Well", max_tokens=2, system_fingerprint=llm.card.fingerprint)
    assert isinstance(reply, Reply)
    assert len(reply.tokens) == 2


def test_a_record_names_given_tokens_only_if_there_are_any(llm: LLM) -> None:
    assert "given" not in to_json(generation_from_keywords(llm, "Well", {"seed": 1}))
    assert to_json(generation_from_keywords(llm, "Well", {"seed": 1, "continue_ids": [5, 6]}))["given"] == [5, 6]
