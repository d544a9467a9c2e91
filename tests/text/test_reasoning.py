"""Reasoning and content are separated in the same way, whatever the chunks of text are."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onedraw.text.reasoning import SPACE, ReasoningParser, ReasoningSyntax, detect_reasoning, initial_thinking

THINK = ReasoningSyntax("<think>", "</think>", "\n</think>\n\n")
SHORT = ReasoningSyntax("<t>", "</t>", "</t>")
ANYWHERE = ReasoningSyntax("<t>", "</t>", "</t>", anywhere=True)


def slow(text: str, syntax: ReasoningSyntax, *, reasoning: bool) -> list[tuple[str, str]]:
    """Split the whole text at once, and remove the white space around markers."""
    texts: list[tuple[str, str]] = []
    trim_left = reasoning
    if not reasoning and text.lstrip(SPACE).startswith(syntax.opens):
        text, reasoning, trim_left = text.lstrip(SPACE)[len(syntax.opens) :], True, True
    while text:
        if reasoning:
            before, found, text = text.partition(syntax.closes)
            texts.append(("reasoning", before.strip(SPACE) if found else before.lstrip(SPACE)))
            reasoning, trim_left = not found, True
        else:
            before, found, text = text.partition(syntax.opens) if syntax.anywhere else (text, "", "")
            texts.append(("content", before.lstrip(SPACE) if trim_left else before))
            reasoning, trim_left = bool(found), True
    return joined(texts)


def joined(texts: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Adjacent texts of one channel joined."""
    grouped = groupby((entry for entry in texts if entry[1]), key=lambda entry: entry[0])
    return [(channel, "".join(text for _, text in group)) for channel, group in grouped]


@given(
    st.lists(st.sampled_from(["<t>", "</t>", "<", "</", "t>", "x", "\n", " "]), max_size=15),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([SHORT, ANYWHERE]),
)
@settings(max_examples=500)
def test_the_chunks_of_text_do_not_change_the_channels(
    parts: list[str], width: int, reasoning: bool, syntax: ReasoningSyntax
) -> None:
    text = "".join(parts)
    parser = ReasoningParser(syntax, "open" if reasoning else "may")
    texts = [entry for start in range(0, len(text), width) for entry in parser.push(text[start : start + width])]
    texts += parser.finish()
    assert all(text for _, text in texts)
    assert joined(texts) == slow(text, syntax, reasoning=reasoning)


def test_a_reply_that_begins_with_reasoning() -> None:
    parser = ReasoningParser(THINK)
    assert parser.push("<thi") == []
    assert parser.push("nk>\nso ") == [("reasoning", "so")]
    assert parser.push("it is\n") == [("reasoning", " it is")]
    assert parser.push("</think>\n\nyes") == [("content", "yes")]
    assert parser.finish() == []


def test_a_prompt_may_have_opened_the_reasoning() -> None:
    parser = ReasoningParser(THINK, "open")
    assert parser.push("so</think>yes") == [("reasoning", "so"), ("content", "yes")]


def test_a_marker_inside_an_answer_is_content() -> None:
    """Else a model that explains its markers would lose half of its answer."""
    parser = ReasoningParser(THINK)
    assert parser.push("Write <think> and </think> around it.") == [("content", "Write <think> and </think> around it.")]


def test_half_a_marker_at_the_end_is_kept() -> None:
    parser = ReasoningParser(THINK, "open")
    assert parser.push("a </thin") == [("reasoning", "a")]
    assert parser.finish() == [("reasoning", " </thin")]
    assert parser.finish() == []


def test_without_a_reasoning_syntax_all_text_is_content() -> None:
    parser = ReasoningParser(None, "open")
    assert parser.push("<think>x</think>") == [("content", "<think>x</think>")]
    assert parser.push("") == []
    assert parser.finish() == []


QWEN = "{{ '<think>\\n' }}{{ '\\n</think>\\n\\n' }}{% if enable_thinking %}{% endif %}"
LAGUNA = "{{- '<think>\\n' + r + '\\n</think>\\n' -}}{%- if enable_thinking %}{%- endif %}"
GEMMA = "{{- '<|channel>thought\\n' + text + '\\n<channel|>' -}}{% if enable_thinking %}<|think|>{% endif %}"


@pytest.mark.parametrize(
    ("source", "reasoning"),
    [
        (QWEN, THINK),
        (LAGUNA, ReasoningSyntax("<think>", "</think>", "\n</think>\n")),
        (GEMMA, ReasoningSyntax("<|channel>thought\n", "<channel|>", "\n<channel|>", anywhere=True)),
        ("{{ '<think>' }}{{ '</think>' }}", ReasoningSyntax("<think>", "</think>", "</think>", switch=False)),
        (
            "{{ '<think></think>' + reasoning_effort }}",
            ReasoningSyntax("<think>", "</think>", "</think>", switch=False, effort=True),
        ),
        ("{{ messages }}", None),
        ("a <think> alone", None),
    ],
)
def test_the_reasoning_syntax_is_detected_from_the_template(source: str, reasoning: ReasoningSyntax | None) -> None:
    assert detect_reasoning(source) == reasoning


def test_the_end_of_the_prompt_decides_whether_reasoning_is_open() -> None:
    gemma = detect_reasoning(GEMMA)
    assert initial_thinking("<|im_start|>assistant\n<think>\n", THINK) == "open"
    assert initial_thinking("<think>\n\n</think>\n\n", THINK) == "over"
    assert initial_thinking("<|im_start|>assistant\n", THINK) == "may"
    assert initial_thinking("<|im_start|>assistant\n", replace(THINK, prompted=True)) == "over"
    assert initial_thinking("<think>", None) == "over"
    assert initial_thinking("<|turn>model\n<|channel>thought\n<channel|>", gemma) == "over"
    assert initial_thinking("<|turn>model\n<|channel>thought\n", gemma) == "open"


def test_after_its_reasoning_a_reply_is_content() -> None:
    assert ReasoningParser(THINK, "over").push("<think>x") == [("content", "<think>x")]
