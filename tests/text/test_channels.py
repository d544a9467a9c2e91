"""Reasoning and content, however the text is cut."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onedraw.text.channels import THINK, ChannelSplitter, reasoning_is_open, reasoning_markers

SHORT = ("<t>", "</t>")


def slow(text: str, markers: tuple[str, str], *, reasoning: bool) -> list[tuple[str, str]]:
    pieces = []
    while text:
        before, found, text = text.partition(markers[reasoning])
        pieces.append(("reasoning" if reasoning else "content", before))
        reasoning ^= bool(found)
    return folded(pieces)


def folded(pieces: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Neighbours of one channel joined."""
    grouped = groupby((piece for piece in pieces if piece[1]), key=lambda piece: piece[0])
    return [(channel, "".join(text for _, text in group)) for channel, group in grouped]


@given(st.lists(st.sampled_from(["<t>", "</t>", "<", "</", "t>", "x", "\n"]), max_size=15), st.integers(1, 4), st.booleans())
@settings(max_examples=500)
def test_however_a_text_is_cut_the_channels_are_the_same(parts: list[str], width: int, reasoning: bool) -> None:
    text = "".join(parts)
    splitter = ChannelSplitter(SHORT, reasoning_open=reasoning)
    pieces = [piece for start in range(0, len(text), width) for piece in splitter.push(text[start : start + width])]
    pieces += splitter.finish()
    assert all(text for _, text in pieces)
    assert folded(pieces) == slow(text, SHORT, reasoning=reasoning)


def test_a_reply_that_thinks_first() -> None:
    splitter = ChannelSplitter(THINK)
    assert splitter.push("<thi") == []
    assert splitter.push("nk>so") == [("reasoning", "so")]
    assert splitter.push("</think>\n\nyes") == [("content", "\n\nyes")]
    assert splitter.finish() == []


def test_a_prompt_may_have_opened_the_reasoning() -> None:
    splitter = ChannelSplitter(THINK, reasoning_open=True)
    assert splitter.push("so</think>yes") == [("reasoning", "so"), ("content", "yes")]


def test_half_a_marker_at_the_end_is_text() -> None:
    splitter = ChannelSplitter(THINK, reasoning_open=True)
    assert splitter.push("a </thin") == [("reasoning", "a ")]
    assert splitter.finish() == [("reasoning", "</thin")]
    assert splitter.finish() == []


def test_without_markers_everything_is_content() -> None:
    splitter = ChannelSplitter(None, reasoning_open=True)
    assert splitter.push("<think>x</think>") == [("content", "<think>x</think>")]
    assert splitter.push("") == []
    assert splitter.finish() == []


@pytest.mark.parametrize(
    ("source", "markers"),
    [("{{ '<think>' }}{{ '</think>' }}", THINK), ("{{ messages }}", None), ("a <think> alone", None)],
)
def test_the_template_tells_whether_a_family_reasons(source: str, markers: tuple[str, str] | None) -> None:
    assert reasoning_markers(source) == markers


def test_a_prompt_that_ends_with_the_start_marker_is_open() -> None:
    assert reasoning_is_open("<|im_start|>assistant\n<think>\n", THINK)
    assert not reasoning_is_open("<think>\n\n</think>\n\n", THINK)
    assert not reasoning_is_open("<think>", None)
