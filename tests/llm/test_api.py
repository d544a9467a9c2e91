"""The Python API: load, generate, stream, their asyncio versions, close."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

import onedraw
from onedraw.errors import BadParameter, BadRequest, BadSetting, ShuttingDown
from onedraw.llm.reply import Reply
from onedraw.llm.request_options import generation_from_keywords


@pytest.fixture
def model() -> Iterator[onedraw.LLM]:
    with onedraw.load("fake", backend="fake") as loaded:
        yield loaded


def one(found: Reply | list[Reply]) -> Reply:
    assert isinstance(found, Reply)
    return found


def answer(reply: Reply) -> Reply:
    """Return a reply without the counts of drafts, which depend on measured times."""
    return replace(reply, usage=replace(reply.usage, kept=0, rejected=0))


def test_a_reply_names_the_seed_that_reproduces_it(model: onedraw.LLM) -> None:
    first = one(model.generate("hello", max_tokens=12))
    again = one(model.generate("hello", max_tokens=12, seed=first.seed))
    assert answer(again) == answer(first)


def test_a_prompt_is_a_text_or_token_ids(model: onedraw.LLM) -> None:
    text = one(model.generate("hello", max_tokens=6, seed=1))
    ids = one(model.generate(list(text.prompt_ids), max_tokens=6, seed=1))
    assert ids.token_ids == text.token_ids


def test_messages_are_rendered_with_the_template(model: onedraw.LLM) -> None:
    reply = one(model.generate([{"role": "user", "content": "hello"}], max_tokens=2))
    assert len(reply.prompt_ids) > len(model.encode("hello"))


def test_several_choices_are_returned_as_a_list(model: onedraw.LLM) -> None:
    replies = model.generate("hello", n=3, max_tokens=4)
    assert isinstance(replies, list)
    assert len({reply.seed for reply in replies}) == 3


def test_the_whole_reply_equals_its_joined_pieces(model: onedraw.LLM) -> None:
    whole = one(model.generate("hello", max_tokens=20, seed=4))
    pieces = list(model.stream("hello", max_tokens=20, seed=4))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert pieces[-1].finish == whole.finish


def test_the_asyncio_methods_give_the_same_replies(model: onedraw.LLM) -> None:
    async def both() -> tuple[Reply, str]:
        reply = one(await model.agenerate("hello", max_tokens=20, seed=4))
        text = "".join([piece.text async for piece in model.astream("hello", max_tokens=20, seed=4)])
        return reply, text

    reply, text = asyncio.run(both())
    assert answer(reply) == answer(one(model.generate("hello", max_tokens=20, seed=4)))
    assert text == reply.text


def test_leaving_a_stream_early_cancels_the_rest(model: onedraw.LLM) -> None:
    pieces = model.stream("hello", max_tokens=1500, ignore_eos=True)
    next(pieces)
    del pieces
    assert one(model.generate("hello", max_tokens=2)).finish is not None


def test_an_invalid_option_of_a_stream_raises_before_the_first_piece(model: onedraw.LLM) -> None:
    with pytest.raises(BadParameter, match="temperature"):
        model.stream("hello", temperature=-1)
    with pytest.raises(BadParameter, match="n: must be"):
        model.stream("hello", n=0)


def test_unknown_options_and_settings_are_refused_by_name(model: onedraw.LLM) -> None:
    with pytest.raises(BadParameter, match="temprature: unknown"):
        model.generate("hello", temprature=1)
    with pytest.raises(BadSetting, match="unknown setting 'max_contxt'"):
        onedraw.load("fake", backend="fake", max_contxt=5)


@pytest.mark.parametrize("prompt", [[1, "two"], [True], [{"role": "user", "content": "x"}, 3], [None]])
def test_a_prompt_of_an_unsupported_type_is_refused(model: onedraw.LLM, prompt: list[object]) -> None:
    with pytest.raises(BadRequest, match="a prompt is a text, a list of chat messages or a list of token ids"):
        model.generate(prompt)  # type: ignore[arg-type]


def test_a_closed_llm_refuses_requests() -> None:
    model = onedraw.load("fake", backend="fake")
    model.close()
    with pytest.raises(ShuttingDown):
        model.generate("hello")


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, onedraw; print(sorted({'torch', 'numpy', 'tokenizers', 'onedraw.api'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        _ = onedraw.lod  # type: ignore[attr-defined]


def test_a_reply_to_messages_begins_a_text_and_a_completion_continues_one(model: onedraw.LLM) -> None:
    """As on the server, the leading space of the first token is kept in a continuation and removed in an answer."""
    assert generation_from_keywords(model, [{"role": "user", "content": "hello"}], {}).syntax.opening
    assert not generation_from_keywords(model, "hello", {}).syntax.opening
    assert not generation_from_keywords(model, [1, 2, 3], {}).syntax.opening


def test_tools_can_be_used_from_python(model: onedraw.LLM) -> None:
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}}
    closed = {**tool, "parameters": {**tool["parameters"], "additionalProperties": False}}
    reply = model.generate([{"role": "user", "content": "?"}], tools=[closed], tool_choice="f", max_tokens=300, seed=1)
    assert isinstance(reply, Reply)
    assert (reply.finish, reply.calls[0].call.name) == ("tool_calls", "f")
    assert json.loads(reply.calls[0].arguments)["a"] in (1, 2)
    with pytest.raises(BadRequest, match="tool_choice"):
        model.generate([{"role": "user", "content": "?"}], tools=[tool], tool_choice="g")
    with pytest.raises(BadRequest, match="only chat"):
        model.generate("text", tools=[tool])
