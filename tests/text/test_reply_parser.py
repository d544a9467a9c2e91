"""The parser of a reply: channels, reasoning tokens, the end after a single call, and the names that records hold."""

from __future__ import annotations

from dataclasses import fields

import pytest

from onedraw.text.constraints.response_format import ChoiceFormat, GbnfFormat, JsonFormat, LarkFormat, RegexFormat
from onedraw.text.fake_tokenizer import fake_tokenizer
from onedraw.text.reasoning import ReasoningSyntax
from onedraw.text.reply_parser import PLAIN_TEXT, ReplyParser, ReplyPart, ReplySyntax, chat_reply_syntax
from onedraw.text.tools.dialects import CallableTools, Dialect, Tool

THINK = ReasoningSyntax("<think>", "</think>", "\n</think>\n\n")
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def parsed(parser: ReplyParser, text: str) -> list[tuple[str, str]]:
    return [(part.channel, part.text) for part in [*parser.push(text), *parser.finish()] if part.text]


def test_a_plain_text_is_all_content() -> None:
    assert parsed(ReplyParser(PLAIN_TEXT), f"<think>x</think>{CALL}") == [("content", f"<think>x</think>{CALL}")]


def test_reasoning_content_and_calls_are_separated() -> None:
    parser = ReplyParser(ReplySyntax(reasoning=THINK, thinking="may", calls=CallableTools("hermes")))
    assert parsed(parser, f"<think>so</think>yes {CALL}") == [("reasoning", "so"), ("content", "yes"), ("tool", '{"a": 1}')]
    assert (parser.completed_calls, parser.done) == (1, False)


def test_a_reply_with_one_allowed_call_is_done_after_it() -> None:
    parser = ReplyParser(ReplySyntax(calls=CallableTools("hermes", parallel=False)))
    parser.push("text " + CALL[:-1])
    assert not parser.done
    parser.push(CALL[-1])
    assert parser.done


def test_every_call_has_its_index_and_its_own_id() -> None:
    parser = ReplyParser(ReplySyntax(calls=CallableTools("hermes")))
    calls = [part.call for part in parser.push(CALL + CALL) if part.call is not None]
    assert [call.index for call in dict.fromkeys(calls)] == [0, 1]
    assert len({call.id for call in calls}) == 2


@pytest.mark.parametrize("cut", ["<t", "<tool_c", "<tool_call>", '<tool_call>{"na'])
def test_a_call_that_is_cut_off_before_its_name_is_dropped(cut: str) -> None:
    parser = ReplyParser(ReplySyntax(calls=CallableTools("hermes")))
    assert parser.push("ah " + cut) == [ReplyPart("content", "ah")]
    assert parser.finish(cut=True) == []


def test_a_call_without_a_name_that_the_model_ended_is_content() -> None:
    parser = ReplyParser(ReplySyntax(calls=CallableTools("hermes")))
    assert parser.push('<tool_call>{"na') == []
    assert parser.finish() == [ReplyPart("content", '<tool_call>{"na', truncated_call=True)]


def test_a_reply_that_could_become_a_call_without_markers_is_content() -> None:
    parser = ReplyParser(ReplySyntax(calls=CallableTools("llama")))
    assert parser.push('{"na') == []
    assert parser.finish(cut=True) == [ReplyPart("content", '{"na', truncated_call=True)]
    plain = ReplyParser(ReplySyntax(calls=CallableTools("hermes")))
    assert [*plain.push("1 <"), *plain.finish(cut=True)] == [ReplyPart("content", "1"), ReplyPart("content", " <")]


@pytest.mark.parametrize(
    ("dialect", "cut"), [("hermes", "<"), ("hermes", "<tool"), ("gemma", "<"), ("llama", "{"), ("pythonic", "[f")]
)
def test_a_required_call_that_is_cut_off_before_its_name_has_no_content(dialect: Dialect, cut: str) -> None:
    parser = ReplyParser(ReplySyntax(calls=CallableTools(dialect, required=True)))
    assert [*parser.push(cut), *parser.finish(cut=True)] == []


@pytest.mark.parametrize(("thinking", "count"), [("may", 14), ("open", 14), ("over", 0)])
def test_tokens_of_reasoning_are_counted_with_their_markers(thinking: str, count: int) -> None:
    """One byte is one token here. `may`: counted from the last byte of the start marker on."""
    parser = ReplyParser(ReplySyntax(reasoning=THINK, thinking=thinking))  # type: ignore[arg-type]
    text = ("<think>" if thinking == "may" else "x") + "12345" + "</think>yes"
    for character in text:
        parser.count_token(character.encode())
    assert parser.reasoning_tokens == count


def test_the_syntax_of_a_chat_reply_keeps_markers_that_are_special_tokens() -> None:
    marked = ReasoningSyntax("<|im_start|>", "<|im_end|>", "<|im_end|>")
    syntax = chat_reply_syntax("prompt<|im_start|>", marked, CallableTools("hermes"), fake_tokenizer())
    assert (syntax.opening, syntax.thinking, syntax.spelled) == (True, "open", frozenset((257, 258)))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (ReplySyntax, "opening reasoning thinking spelled calls"),
        (ReasoningSyntax, "opens closes closing anywhere switch effort prompted"),
        (CallableTools, "dialect tools parallel required"),
        (Tool, "name description parameters strict param"),
        (JsonFormat, "schema param"),
        (RegexFormat, "pattern param"),
        (ChoiceFormat, "texts param"),
        (LarkFormat, "lark param numbers"),
        (GbnfFormat, "gbnf param"),
    ],
)
def test_field_names_that_recorded_requests_hold_are_unchanged(kind: type, names: str) -> None:
    """Records are JSON by field name: a renamed field would make old records unreadable."""
    assert " ".join(field.name for field in fields(kind)) == names
