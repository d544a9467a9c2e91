"""ReasoningSyntax and content, however the text is cut."""

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


def slow(text: str, how: ReasoningSyntax, *, reasoning: bool) -> list[tuple[str, str]]:
    """The whole text at once: spans by regular splitting, white space around markers taken away."""
    pieces: list[tuple[str, str]] = []
    fresh = reasoning
    if not reasoning and text.lstrip(SPACE).startswith(how.opens):
        text, reasoning, fresh = text.lstrip(SPACE)[len(how.opens) :], True, True
    while text:
        if reasoning:
            before, found, text = text.partition(how.closes)
            pieces.append(("reasoning", before.strip(SPACE) if found else before.lstrip(SPACE)))
            reasoning, fresh = not found, True
        else:
            before, found, text = text.partition(how.opens) if how.anywhere else (text, "", "")
            pieces.append(("content", before.lstrip(SPACE) if fresh else before))
            reasoning, fresh = bool(found), True
    return folded(pieces)


def folded(pieces: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Neighbours of one channel joined."""
    grouped = groupby((piece for piece in pieces if piece[1]), key=lambda piece: piece[0])
    return [(channel, "".join(text for _, text in group)) for channel, group in grouped]


@given(
    st.lists(st.sampled_from(["<t>", "</t>", "<", "</", "t>", "x", "\n", " "]), max_size=15),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([SHORT, ANYWHERE]),
)
@settings(max_examples=500)
def test_however_a_text_is_cut_the_channels_are_the_same(
    parts: list[str], width: int, reasoning: bool, how: ReasoningSyntax
) -> None:
    text = "".join(parts)
    splitter = ReasoningParser(how, "open" if reasoning else "may")
    pieces = [piece for start in range(0, len(text), width) for piece in splitter.push(text[start : start + width])]
    pieces += splitter.finish()
    assert all(text for _, text in pieces)
    assert folded(pieces) == slow(text, how, reasoning=reasoning)


def test_a_reply_that_thinks_first() -> None:
    splitter = ReasoningParser(THINK)
    assert splitter.push("<thi") == []
    assert splitter.push("nk>\nso ") == [("reasoning", "so")]
    assert splitter.push("it is\n") == [("reasoning", " it is")]
    assert splitter.push("</think>\n\nyes") == [("content", "yes")]
    assert splitter.finish() == []


def test_a_prompt_may_have_opened_the_reasoning() -> None:
    splitter = ReasoningParser(THINK, "open")
    assert splitter.push("so</think>yes") == [("reasoning", "so"), ("content", "yes")]


def test_a_marker_in_the_middle_of_an_answer_is_text() -> None:
    """A model that explains its own markers must not lose half of its answer."""
    splitter = ReasoningParser(THINK)
    assert splitter.push("Write <think> and </think> around it.") == [("content", "Write <think> and </think> around it.")]


def test_half_a_marker_at_the_end_is_text() -> None:
    splitter = ReasoningParser(THINK, "open")
    assert splitter.push("a </thin") == [("reasoning", "a")]
    assert splitter.finish() == [("reasoning", " </thin")]
    assert splitter.finish() == []


def test_without_reasoning_everything_is_content() -> None:
    splitter = ReasoningParser(None, "open")
    assert splitter.push("<think>x</think>") == [("content", "<think>x</think>")]
    assert splitter.push("") == []
    assert splitter.finish() == []


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
def test_the_template_tells_how_a_family_reasons(source: str, reasoning: ReasoningSyntax | None) -> None:
    assert detect_reasoning(source) == reasoning


def test_the_prompts_end_tells_where_the_reply_begins() -> None:
    gemma = detect_reasoning(GEMMA)
    assert initial_thinking("<|im_start|>assistant\n<think>\n", THINK) == "open"
    assert initial_thinking("<think>\n\n</think>\n\n", THINK) == "over"
    assert initial_thinking("<|im_start|>assistant\n", THINK) == "may"
    assert initial_thinking("<|im_start|>assistant\n", replace(THINK, prompted=True)) == "over"
    assert initial_thinking("<think>", None) == "over"
    assert initial_thinking("<|turn>model\n<|channel>thought\n<channel|>", gemma) == "over"
    assert initial_thinking("<|turn>model\n<|channel>thought\n", gemma) == "open"


def test_behind_its_thinking_a_reply_is_content() -> None:
    assert ReasoningParser(THINK, "over").push("<think>x") == [("content", "<think>x")]
